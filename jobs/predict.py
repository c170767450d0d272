"""``opcast predict``: one op, or a table of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..datasets.devices import Device
from ..datasets.ops import KINDS, Op, OpError, kind, make_op
from ..simulator.network.query import TransferError
from ..simulator.predict.ops import predict_ops, with_power
from ..simulator.report.answer import OpPrediction
from . import links, resolve
from .show import BadInputError, microseconds, print_json, say, table, wants_json

FREE_CHOICE = {"device": "device.id"}
OF_LINKS = ("algorithm", "algbw_gbps", "busbw_gbps", "stretch")  # of ``network``, in tables
ADDED = ("device.", "cluster.", "fault_draw", "faults_study")  # checked where they are used


def run(config: dict[str, Any]) -> int:
    """Print the prediction (or write a table of them); returns the exit code."""
    as_json = wants_json(config)
    if config["cache"] not in ("warm", "cold"):
        raise BadInputError(f"cache={config['cache']!r} does not exist; choose warm or cold")
    resolve.limits(config)
    links.check(config)
    many = config["shapes"] is not None
    given = [name for name in ("op", "shapes", "transfers") if config.get(name)]
    if not given:
        raise BadInputError(
            "name an op: `opcast predict op=gemm op.m=4096 op.n=4096 op.k=4096`, or shapes=FILE for many"
        )
    if "transfers" in given and len(given) > 1:
        raise BadInputError(f"transfers={config['transfers']} says all that is asked: leave {given[0]}=… out")
    ops = [] if config["transfers"] else configured_ops(config)
    target = resolve.device(config)
    found = predicted(ops, target, config) if ops else [links.transfers(config, target)]
    if many:
        return show_many(found, config, as_json)
    links.write(found[0], config)
    if as_json:
        print_json(found[0].to_dict())
    else:
        show_one(found[0], target.name)
    return 0


def configured_ops(config: Mapping[str, Any]) -> list[Op]:
    """The op of ``op=…`` or those of ``shapes=FILE``."""
    if config["shapes"] is not None:
        for name in ("report", "picture", "group"):
            if config[name]:
                raise BadInputError(f"{name}={config[name]} is for one op: leave it out of shapes=…")
        return read_shapes(Path(str(config["shapes"])), config.get("op"))
    return [configured_op(links.with_ranks(config["op"], config))]


def predicted(ops: list[Op], target: Device, config: Mapping[str, Any]) -> list[OpPrediction]:
    """The prediction of every op, on the device or on the cluster of such devices."""
    if config.get("cluster"):
        found = links.predict(ops, target, config)
    else:
        found = predict_ops(ops, target, resolve.engine(config, target), config["cache"])
    limits = resolve.limits(config)
    return with_power(found, ops, target, resolve.registries(config), limits, config.get("backend"))


def configured_op(values: Mapping[str, Any]) -> Op:
    """The op of ``op=… op.dim=…``; OpError names a dim that is missing."""
    values = links.with_bytes(values)
    name = values.pop("kind")
    missing = [key for key, value in values.items() if value == "???"]
    if missing:
        wanted = ", ".join(f"op.{key}=…" for key in missing)
        raise OpError(f"{name} needs {wanted} (dims: {', '.join(KINDS[name].names)})")
    return make_op(name, **values)


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
    table(f"{op} on {device_name}", ("", ""), rows)
    if found.network:
        links.show(found.network, many=len(found.network.get("transfers", ())) > 1)


def show_many(found: list[OpPrediction], config: Mapping[str, Any], as_json: bool) -> int:
    """All predictions as JSON, a file or a table."""
    flat = [flattened(p) for p in found]
    if config["output"]:
        import pandas as pd

        path = Path(str(config["output"]))
        frame = pd.DataFrame(flat)
        if path.suffix == ".parquet":
            frame.to_parquet(path)
        else:
            frame.to_csv(path, index=False)
        say(f"{len(flat)} predictions written to {path}")
    elif as_json:
        print_json({"predictions": [p.to_dict() for p in found]})
    else:
        rows = [
            (str(make_op(p.op["kind"], **{k: v for k, v in p.op.items() if k != "kind"})),
             microseconds(p.latency_us), microseconds(p.low_us), microseconds(p.high_us), p.engine, p.bound)
            for p in found
        ]  # fmt: skip
        table("", ("op", "latency", "low", "high", "engine", "bound"), rows)
    return 0


def flattened(found: OpPrediction) -> dict[str, Any]:
    """A prediction as one row: of what its links did only figures."""
    row = {key: value for key, value in found.to_dict().items() if key not in ("op", "network")}
    return {**found.op, **row, **{name: found.network[name] for name in OF_LINKS if name in found.network}}


def read_shapes(path: Path, default: Mapping[str, Any] | None) -> list[Op]:
    """Ops from a table; the kind of ``op=…`` fills in where the table has no ``kind`` column.

    Raises BadInputError for a file that cannot be read and OpError with the row number for a bad row.
    """
    import pandas as pd

    readers: dict[str, Callable[[Path], Any]] = {
        ".csv": pd.read_csv,
        ".parquet": pd.read_parquet,
        ".json": pd.read_json,
        ".jsonl": lambda p: pd.read_json(p, lines=True),
    }
    if path.suffix not in readers:
        raise BadInputError(f"shapes={path}: unknown format {path.suffix!r}; give .csv, .parquet, .json or .jsonl")
    try:
        frame = readers[path.suffix](path)
    except (OSError, ValueError) as error:
        raise BadInputError(f"shapes={path} cannot be read: {error}") from None
    default_kind = default["kind"] if default else None
    ops = []
    for number, row in enumerate(frame.to_dict("records"), start=1):
        values: dict[str, Any] = {str(key): value for key, value in row.items() if not pd.isna(value)}
        name = values.pop("kind", default_kind)
        try:
            if name is None:
                raise OpError("no kind: add a column `kind` or op=…")
            kind(name)
            ops.append(make_op(name, **links.with_bytes(values)))
        except (OpError, TransferError) as error:
            raise OpError(f"{path} row {number}: {error}") from None
    if not ops:
        raise BadInputError(f"shapes={path} holds no rows")
    return ops
