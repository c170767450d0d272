"""``opcast train``: fit predictors for a device from a store, evaluate them on unseen shapes, register them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..datasets.devices import Device
from ..datasets.store import Store
from ..models.registry import Registry
from . import resolve
from .requests import ANY_DEVICE, TrainRequest, train_request
from .show import BadInputError, print_json, say, table, wants_json

FREE_CHOICE = {"device": "device.id"}


def run(config: dict[str, Any]) -> int:
    """Train and print the evaluation; returns the exit code."""
    as_json = wants_json(config)
    if config["device"].get("id") == ANY_DEVICE:
        return run_pooled(config, as_json)
    target = resolve.device(config)
    store = Store(Path(config["store"]).expanduser())
    if target.id not in store.devices():
        devices = ", ".join(store.devices()) or "nothing"
        raise BadInputError(
            f"store {store.path} has no measurements of {target.id}; it has {devices} (`opcast profile` measures)"
        )
    request = train_request(config, target)
    if config["rollback"]:
        return roll_back(request, target, as_json)
    results = fit_and_register(store, target, request)
    error = none_trained(results, request.kinds)
    if as_json:
        print_json({"device": target.id, "kinds": results, **({"error": error} if error else {})})
    else:
        show(results, target)
    if error:
        say(f"opcast: {error}")
    return 1 if error else 0


def roll_back(request: TrainRequest, target: Device, as_json: bool) -> int:
    """Make the version before the current one current, in the registry and by MLflow's alias; returns the exit code."""
    from ..models import tracking

    registry = Registry(Path(request.predictors).expanduser())
    current = [model for model in registry.list() if model.device_id == target.id and model.current]
    chosen = [model for model in current if not request.kinds or model.kind in request.kinds]
    if not chosen:
        raise BadInputError(
            f"no predictor of {', '.join(request.kinds) or 'any kind'} for {target.id} was trained here"
        )
    done = []
    for model in chosen:
        now = registry.roll_back(model.kind, model.device_id, model.backend)
        name = f"{model.kind}@{model.backend}/{model.device_id}"
        alias = None
        if request.tracking and importlib.util.find_spec("mlflow") is not None:
            labels = (model.kind, f"{model.kind}@{model.backend}")
            previous = (
                tracking.roll_back(request.tracking, target.id, label, f"{name}@{now.version}") for label in labels
            )
            alias = next((version for version in previous if version), None)
        done.append({"predictor": name, "from": model.version, "to": now.version, "mlflow_version": alias})
        say(f"{name}: version {now.version} answers again, in place of {model.version}")
    if as_json:
        print_json({"device": target.id, "rolled_back": done})
    return 0


def none_trained(results: Mapping[str, Mapping[str, Any]], kinds: Sequence[str]) -> str:
    """Why training failed: no kind could be learned, or not one that was named; "" where all went well."""
    missed = [label for label, result in results.items() if "error" in result and "power" not in result]
    if not missed or (not kinds and len(missed) < len(results)):
        return ""
    return f"nothing was learned of {', '.join(missed)}: {results[missed[0]]['error']}"


def fit_and_register(store: Store, target: Device, request: TrainRequest) -> dict[str, dict[str, Any]]:
    """Train every kind asked for: predictors into the plain registry first, then into MLflow when it is there."""
    from ..models.tracking import train_tracked

    kinds = request.kinds or None
    registry = Registry(Path(request.predictors).expanduser())
    results = train_tracked(store, target, kinds, request.options, registry, request.tracking, say)
    if request.power:
        from ..models import power

        watts = power.train(store, target, registry.root, kinds, request.options, say)
        for label, card in watts.items():
            results.setdefault(label, {"error": "trained for power only"})["power"] = card
    return results


def run_pooled(config: dict[str, Any], as_json: bool) -> int:
    """One predictor a kind and framework over all devices of the store: for devices that nobody measured."""
    from ..models.transfer import train_pooled

    store = Store(Path(config["store"]).expanduser())
    if not store.devices():
        raise BadInputError(
            f"store {store.path} has no measurements (`opcast profile` measures, `opcast import` reads)"
        )
    request = train_request(config, ANY_DEVICE)
    registry = Registry(Path(request.predictors).expanduser())
    results = train_pooled(store, registry, request.kinds or None, request.options, say)
    error = none_trained(results, request.kinds)
    if as_json:
        print_json({"device": "any", "kinds": results, **({"error": error} if error else {})})
        return 1 if error else 0
    rows = []
    for name, r in results.items():
        errors = [f"{r[f'test_{key}']:.1f}" for key in ("median_ape", "mean_ape", "p90_ape")] if "n" in r else [""] * 3
        rows.append((name, r.get("n", ""), *errors, r.get("error") or r["predictor"]))
    heads = ("op", "rows", "median APE %", "mean", "p90", "predictor")
    table("errors on an architecture left out", heads, rows)
    if error:
        say(f"opcast: {error}")
    return 1 if error else 0


def show(results: Mapping[str, Mapping[str, Any]], target: Device) -> None:
    """The evaluations as a table: a row for each of every predictor, beside what simpler answers would have cost."""
    peers = ("roofline", "calibrated", "log-log", "nearest")
    heads = ("op", "held out", "rows", "median APE %", "mean", "p90", "coverage", *peers, "predictor")
    rows: list[tuple[object, ...]] = []
    for kind, result in sorted(results.items()):
        if "error" in result:
            rows.append((kind, *[""] * (len(heads) - 2), result["error"]))
            continue
        name = result["predictor"] if result.get("promoted", True) else f"{result['predictor']}, not current"
        if "why_not" in result:
            name += f", {result['chosen']}: {result['why_not']}"
        for mode, report in result["evaluations"].items():
            if "error" in report:
                rows.append((kind, mode, *[""] * (len(heads) - 3), report["error"]))
                continue
            errors = [f"{report[metric]:.1f}" for metric in ("median_ape", "mean_ape", "p90_ape")]
            others = [
                _median(report, baseline) for baseline in ("roofline", "calibrated_roofline", "log_log", "nearest")
            ]
            rows.append((kind, mode, report["n"], *errors, f"{report['coverage']:.0%}", *others, name))
    table(f"errors of {target.name} on rows held out (simpler answers: median APE %)", heads, rows)


def _median(report: Mapping[str, Any], baseline: str) -> str:
    figures = report.get("baselines", {}).get(baseline)
    return f"{figures['median_ape']:.0f}" if figures else ""
