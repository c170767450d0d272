"""``opcast predict``: one op, or a table of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..datasets.counts import counted
from ..datasets.devices import Device
from ..datasets.ops import KINDS, Op, OpError, make_op
from ..simulator.report.answer import OpPrediction
from ..simulator.report.view import time_text
from . import links, resolve
from .show import BadInputError, print_json, table, wants_json, with_units

FREE_CHOICE = {"device": "device.id", "cluster": "+cluster.path"}
ADDED = ("device.", "cluster.", "fault_draw", "faults_study")  # checked where they are used


def run(config: dict[str, Any]) -> int:
    """Print the prediction (or write a table of them); returns the exit code."""
    as_json = wants_json(config)
    if config["cache"] not in ("warm", "cold"):
        raise BadInputError(f"cache={config['cache']!r} does not exist; choose warm or cold")
    links.check(config)
    many = config["shapes"] is not None
    subjects = [name for name in ("op", "shapes", "transfers") if config.get(name)]
    if not subjects:
        raise BadInputError(
            "name an op: `opcast predict op=gemm op.m=4096 op.n=4096 op.k=4096`, or shapes=FILE for many"
        )
    if "transfers" in subjects and len(subjects) > 1:
        raise BadInputError(f"transfers={config['transfers']} says all that is asked: leave {subjects[0]}=… out")
    if many:
        from . import predict_many

        return predict_many.run(config, as_json, predicted)
    if config["output"]:
        raise BadInputError(f"output={config['output']} is for shapes=FILE: one op is printed, format=json for scripts")
    ops = [] if config["transfers"] else [configured_op(links.with_ranks(config["op"], config))]
    target = resolve.device(config)
    predictions = predicted(ops, target, config)
    links.write(predictions[0], config)
    if as_json:
        print_json(predictions[0].to_dict())
    else:
        show_one(predictions[0], target.name)
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


def clause_of(prediction: OpPrediction) -> str:
    """By which clause of the rule an op was answered, and whose measurements that were."""
    return (
        prediction.clause
        if prediction.source in ("", prediction.clause)
        else f"{prediction.clause} ({prediction.source})"
    )


def show_one(prediction: OpPrediction, device_name: str) -> None:
    """A few lines for a person."""
    if prediction.op["kind"] == "transfers":
        interval = f"{time_text(prediction.low_us)} to {time_text(prediction.high_us)}"
        rows = [("all done after", time_text(prediction.latency_us)), ("interval", interval)]
        table(f"{counted(prediction.op['count'], 'transfer')} on {prediction.network['topology']}", ("", ""), rows)
        return links.show(prediction.network, many=True)
    op = make_op(**{"kind_name": prediction.op["kind"], **{k: v for k, v in prediction.op.items() if k != "kind"}})
    cost = op.cost
    seconds = prediction.latency_us * 1e-6
    rows = [
        ("latency", time_text(prediction.latency_us)),
        ("interval", f"{time_text(prediction.low_us)} to {time_text(prediction.high_us)}"),
        ("answered by", prediction.engine + (f" ({prediction.predictor})" if prediction.predictor else "")),
        *([("which is", clause_of(prediction))] if prediction.clause else []),
        ("roofline", f"{time_text(prediction.roofline_us)}, {prediction.bound} bound"),
    ]
    if prediction.power_w is not None and prediction.energy_mj is not None:
        rows.append(("draws", f"{prediction.power_w:.0f} W, {prediction.energy_mj:.4g} mJ each"))
    if prediction.engine == "learned" and not prediction.in_envelope:
        rows.append(("caution", "outside what was measured; the interval is widened"))
    rows += links.rows(prediction)
    if float(cost.flops) > 0 and not prediction.network:
        rows.append(("achieves", f"{float(cost.flops) / seconds / 1e12:.4g} TFLOP/s"))
    if float(cost.bytes) > 0 and not prediction.network:
        rows.append(("moves", f"{float(cost.bytes) / seconds / 1e9:.4g} GB/s"))
    table(with_units(f"{op} on {device_name}"), ("", ""), rows)
    if prediction.network:
        links.show(prediction.network, many=len(prediction.network.get("transfers", ())) > 1)
