"""Questions about the links of a cluster, from a configuration: one collective, or many transfers at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..datasets.devices import Device
from ..datasets.ops import KINDS, Op, OpError
from ..datasets.store import Store
from ..simulator.engines.network import NetworkEngine
from ..simulator.network.build import own_links
from ..simulator.network.query import check_algorithm, from_dicts, group_of, read, size_of, whole
from ..simulator.predict.ops import predict_ops
from ..simulator.report.answer import OpPrediction
from . import resolve
from .show import BadInputError, microseconds, say, table

if TYPE_CHECKING:
    from ..simulator.predict.links import Links

OF_COLLECTIVES = ("group", "stride", "all_groups", "algorithm", "faults_study", "report", "picture")
OF_LINKS = (*OF_COLLECTIVES, "transfers", "faults", "fault_draw")
NOTICED = 1e-3  # part of a step from which what sharing costs is worth a line
LISTED = 24  # transfers that a table shows
PER_NODE = next(dim.default for dim in KINDS["all_reduce"].dims if dim.name == "ranks_per_node")


def asked(config: Mapping[str, Any]) -> list[str]:
    """The settings of a configuration that only links can answer, as they were given."""
    named = [f"{name}={config[name]}" for name in OF_LINKS if config.get(name)]
    given = (config.get("cluster") or {}).get("topology")
    if config.get("network", "auto") == "auto" and isinstance(given, Mapping) and own_links(given):
        named.append(f"{own_links(given)}={given[own_links(given).rpartition('.')[2]]}")
    return named + ([f"network={config['network']}"] if config.get("network", "auto") in ("flow", "packet") else [])


def check(config: Mapping[str, Any]) -> None:
    """BadInputError for questions about links without a cluster, or for a fidelity that does not exist."""
    if config.get("network", "auto") not in resolve.FIDELITIES:
        raise BadInputError(f"network={config['network']!r} is not one of {', '.join(resolve.FIDELITIES)}")
    wanted = asked(config)
    if wanted and not config.get("cluster"):
        raise BadInputError(f"{wanted[0]} needs a cluster: name one with cluster=… (`opcast list clusters`)")
    if config.get("all_groups") not in (None, True, False):
        raise BadInputError(f"all_groups={config['all_groups']!r} must be true or false")


def with_bytes(values: Mapping[str, Any]) -> dict[str, Any]:
    """The dims of an op with ``size_bytes`` as a number (``1GiB``)."""
    size = values.get("size_bytes")
    return {**values, "size_bytes": size_of(size)} if isinstance(size, str) and size != "???" else dict(values)


def formula_of(config: Mapping[str, Any], target: Device) -> NetworkEngine:
    """The formula of collectives on the configuration's cluster."""
    joined = resolve.cluster(config)
    if joined is None:
        raise BadInputError("name a cluster with cluster=… (`opcast list clusters`)")
    return NetworkEngine(target, joined, [Store(path) for path in resolve.stores(config) if path.is_dir()])


def links(config: Mapping[str, Any], target: Device) -> Links:
    """The links of the configuration's cluster with its faults. TopologyError for what is not there."""
    from ..simulator.predict.links import Links

    chosen = config.get("network", "auto")
    made = Links(formula_of(config, target), "flow" if chosen == "auto" else str(chosen))
    faults = resolve.link_faults(config, made.healthy.topology)
    return Links(made.formula, made.fidelity, tuple(faults)) if faults else made


def predict(ops: list[Op], target: Device, config: Mapping[str, Any]) -> list[OpPrediction]:
    """Predictions of ops on a cluster: collectives by what its links do, all others as on one device."""
    from ..simulator.predict.links import predict_by_formula, predict_collective

    plain = {**config, "network": "analytical", **dict.fromkeys(resolve.LINK_FAULTS)}
    engine, cache = resolve.engine(plain, target), config.get("cache", "warm")
    ready = links(config, target) if asked(config) else None
    formula = ready.formula if ready else formula_of(config, target)
    study, algorithm, at_once = resolve.study_settings(config), config.get("algorithm"), bool(config.get("all_groups"))
    made = []
    for op in ops:
        if KINDS[op.kind].family != "collective":
            misplaced = [f"{name}={config[name]}" for name in OF_COLLECTIVES if config.get(name)]
            if misplaced:
                raise BadInputError(f"{misplaced[0]} is for collectives: leave it out of op={op.kind}")
            other = resolve.engine(config, target) if ready and KINDS[op.kind].collective else engine
            made += predict_ops([op], target, other, cache)
            continue
        group = members(op, formula, config)
        check_algorithm(op.kind, algorithm)
        if ready is None:
            made.append(predict_by_formula(op, group, formula, engine, cache))
        else:
            made.append(predict_collective(op, group, ready, engine, algorithm, at_once, study, cache))
    return made


def members(op: Op, formula: NetworkEngine, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The devices that run an op: ``group``, else ``op.ranks`` of them ``stride`` or ``op.ranks_per_node`` a node."""
    cluster = formula.cluster
    stride, near = config.get("stride"), op.ranks_per_node
    if stride is None:
        fewer = near != PER_NODE and near < min(op.ranks, cluster.devices_per_node)
        stride = cluster.devices_per_node // near if fewer else 1
    return group_of(config.get("group"), op.ranks, whole("stride", stride, 1), cluster.devices)


def transfers(config: Mapping[str, Any], target: Device) -> OpPrediction:
    """What the transfers of a file, or of a list, do together on the cluster."""
    from ..simulator.predict.links import predict_transfers

    for name in ("group", "stride", "all_groups", "algorithm"):
        if config.get(name):
            raise BadInputError(f"{name}={config[name]} is for op=…: in transfers=… every entry has its own")
    ready = links(config, target)
    devices = ready.formula.cluster.devices
    given = config["transfers"]
    found = read(Path(given), devices) if isinstance(given, (str, Path)) else from_dicts(given, devices)
    return predict_transfers(*found, ready, resolve.study_settings(config))


def with_ranks(values: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The dims of a collective; ``ranks`` that are not given are those of ``group``. OpError where both differ."""
    group = config.get("group")
    if values.get("ranks") is None or not isinstance(group, (list, tuple)):
        return dict(values)
    if values["ranks"] not in ("???", len(group)):
        raise OpError(f"op.ranks={values['ranks']}, but group={group} has {len(group)}: leave one of them out")
    return {**values, "ranks": len(group)}


def write(found: OpPrediction, config: Mapping[str, Any]) -> None:
    """The page of ``report=`` and the picture of ``picture=``, where they were asked for."""
    for name in ("report", "picture"):
        if config.get(name) and not isinstance(config[name], str):
            raise BadInputError(f"{name}={config[name]!r} must be a path, such as {name}=net.{_SUFFIX[name]}")
    if config.get("report"):
        from ..simulator.html import write_network_report

        say(f"report: {write_network_report(found, Path(config['report']))}")
    if config.get("picture"):
        from ..simulator.html.page import write_text
        from ..simulator.network.picture import svg

        topology, load = found.placed
        path = write_text(svg(topology, load, "share of each link that is in use"), Path(config["picture"]))
        say(f"picture: {path}")


_SUFFIX = {"report": "html", "picture": "svg"}


def rows(found: OpPrediction) -> list[tuple[str, str]]:
    """Lines of a collective on a cluster: how it is done, its bandwidths, what the links make of it."""
    network = found.network
    if not network or "algorithm" not in network:
        return []
    made = [("algorithm", f"{network['algorithm']} ({network['fidelity']})")]
    made += [("algbw, busbw", f"{network['algbw_gbps']:.4g} GB/s, {network['busbw_gbps']:.4g} GB/s")]
    if "stretch" in network:
        groups = f", {network['groups']} groups at once" if network["groups"] > 1 else ""
        made.append(("stretch", f"{network['stretch']:.3f} times as long as on a switch that never blocks{groups}"))
    return made


def show(network: Mapping[str, Any], many: bool) -> None:
    """Transfers, the fullest links, and what faults at random do, as tables."""
    rows: list[tuple[object, ...]] = [
        (
            each["name"], each["collective"], each["ranks"], each["algorithm"], microseconds(each["start_us"]),
            microseconds(each["end_us"]), f"{each['algbw_gbps']:.4g}", f"{each['busbw_gbps']:.4g}",
        )
        for each in network.get("transfers", ())[:LISTED]
    ]  # fmt: skip
    if many:
        heads = ("transfer", "collective", "ranks", "algorithm", "start", "end", "algbw GB/s", "busbw GB/s")
        table(f"transfers ({network['fidelity']})", heads, rows)
    show_links(network)


def show_links(network: Mapping[str, Any], whole: str = "whole time", what: str = "time") -> None:
    """The fullest links over the ``whole``, and how much longer ``what`` takes with random faults, as tables."""
    hot: list[tuple[object, ...]] = [
        (link["link"], link["alike"], f"{link['busy']:.1%}", f"{link['peak']:.1%}")
        for link in network.get("hot_links", ())
    ]
    if hot:
        heads = ("link", "as full", "busy", "peak")
        table(f"fullest links over the {whole} ({network['fidelity']})", heads, hot)
    if network.get("contention_s", 0.0) > NOTICED * network.get("apart_s", 0.0):
        apart, more = microseconds(network["apart_s"] * 1e6), microseconds(network["contention_s"] * 1e6)
        say(f"sharing links costs {more} of the {whole}: with links of its own for all communication it is {apart}")
    study = network.get("faults_study")
    if study:
        slow = study["slowdown"]
        rows: list[tuple[object, ...]] = [(name, times(value)) for name, value in slow.items()]
        rows += [("cut off", f"{study['partitioned']} of {study['trials']}")] if study["partitioned"] else []
        table(f"{what} with faults, {study['trials']} samples", ("", "slowdown"), rows)
        worst: list[tuple[object, ...]] = [(each["where"], times(each["slowdown"])) for each in study["critical"]]
        table("most critical links", ("link", "mean slowdown"), worst)


def times(slowdown: float | None) -> str:
    """How many times longer; None is without end."""
    return "cut off" if slowdown is None else f"{slowdown:.4f}x"
