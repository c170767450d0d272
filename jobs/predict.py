"""``opcast predict``: one op, or a table of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..datasets.devices import Device
from ..datasets.ops import KINDS, Op, OpError, make_op
from ..simulator.report.answer import OpPrediction
from . import links, resolve
from .show import BadInputError, microseconds, print_json, table, wants_json, with_units

FREE_CHOICE = {"device": "device.id", "cluster": "+cluster.path"}
ADDED = ("device.", "cluster.", "fault_draw", "faults_study")  # checked where they are used


def run(config: dict[str, Any]) -> int:
    """Print the prediction (or write a table of them); returns the exit code."""
    as_json = wants_json(config)
    if config["cache"] not in ("warm", "cold"):
        raise BadInputError(f"cache={config['cache']!r} does not exist; choose warm or cold")
    links.check(config)
    many = config["shapes"] is not None
    given = [name for name in ("op", "shapes", "transfers") if config.get(name)]
    if not given:
        raise BadInputError(
            "name an op: `opcast predict op=gemm op.m=4096 op.n=4096 op.k=4096`, or shapes=FILE for many"
        )
    if "transfers" in given and len(given) > 1:
        raise BadInputError(f"transfers={config['transfers']} says all that is asked: leave {given[0]}=… out")
    if many:
        from . import predict_many

        return predict_many.run(config, as_json, predicted)
    if config["output"]:
        raise BadInputError(f"output={config['output']} is for shapes=FILE: one op is printed, format=json for scripts")
    ops = [] if config["transfers"] else [configured_op(links.with_ranks(config["op"], config))]
    target = resolve.device(config)
    found = predicted(ops, target, config)
    links.write(found[0], config)
    if as_json:
        print_json(found[0].to_dict())
    else:
        show_one(found[0], target.name)
    return 0


def predicted(ops: list[Op], target: Device, config: Mapping[str, Any]) -> list[OpPrediction]:
    """The prediction of every op, on the device or on the cluster of such devices; or that of the transfers."""
    links.check_ops(ops, config)
    return resolve.bench(config).predict(resolve.predict_request(config, ops, target))


def configured_op(values: Mapping[str, Any]) -> Op:
    """The op of ``op=… op.dim=…``; OpError names a dim that is missing."""
    values = links.with_bytes(values)
    name = values.pop("kind")
    missing = [key for key, value in values.items() if value == "???"]
    if missing:
        wanted = ", ".join(f"op.{key}=…" for key in missing)
        raise OpError(f"{name} needs {wanted} (dims: {', '.join(KINDS[name].names)})")
    return make_op(name, **values)


def clause_of(found: OpPrediction) -> str:
    """By which clause of the rule an op was answered, and whose measurements that were."""
    return found.clause if found.source in ("", found.clause) else f"{found.clause} ({found.source})"


def show_one(found: OpPrediction, device_name: str) -> None:
    """A few lines for a person."""
    if found.op["kind"] == "transfers":
        interval = f"{microseconds(found.low_us)} to {microseconds(found.high_us)}"
        rows = [("all done after", microseconds(found.latency_us)), ("interval", interval)]
        table(f"{found.op['count']} transfers on {found.network['topology']}", ("", ""), rows)
        return links.show(found.network, many=True)
    op = make_op(**{"kind_name": found.op["kind"], **{k: v for k, v in found.op.items() if k != "kind"}})
    cost = op.cost
    seconds = found.latency_us * 1e-6
    rows = [
        ("latency", microseconds(found.latency_us)),
        ("interval", f"{microseconds(found.low_us)} to {microseconds(found.high_us)}"),
        ("answered by", found.engine + (f" ({found.predictor})" if found.predictor else "")),
        *([("which is", clause_of(found))] if found.clause else []),
        ("roofline", f"{microseconds(found.roofline_us)}, {found.bound} bound"),
    ]
    if found.power_w is not None and found.energy_mj is not None:
        rows.append(("draws", f"{found.power_w:.0f} W, {found.energy_mj:.4g} mJ each"))
    if found.engine == "learned" and not found.in_envelope:
        rows.append(("caution", "outside what was measured; the interval is widened"))
    rows += links.rows(found)
    if float(cost.flops) > 0 and not found.network:
        rows.append(("achieves", f"{float(cost.flops) / seconds / 1e12:.4g} TFLOP/s"))
    if float(cost.bytes) > 0 and not found.network:
        rows.append(("moves", f"{float(cost.bytes) / seconds / 1e9:.4g} GB/s"))
    table(with_units(f"{op} on {device_name}"), ("", ""), rows)
    if found.network:
        links.show(found.network, many=len(found.network.get("transfers", ())) > 1)
