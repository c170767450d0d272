"""Questions about the links of a cluster, from a configuration: what may be asked, and how answers are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..datasets.ops import KINDS, Op, OpError
from ..simulator.report.answer import OpPrediction
from ..simulator.report.link_tables import critical_table, fullest_table, slowdown_table, transfer_table
from ..simulator.report.view import time_text
from .show import BadInputError, say
from .show import show as show_table
from .writing import write_text

OF_COLLECTIVES = ("group", "stride", "all_groups", "algorithm", "faults_study", "report", "picture")
OF_LINKS = ("transfers", "faults", "fault_draw")
NOTICED = 1e-3  # part of a step from which what sharing costs is worth a line
LISTED = 24  # transfers that a table shows


def check(config: Mapping[str, Any]) -> None:
    """BadInputError for questions about links without a cluster, or what is no answer to such a question."""
    asked = [f"{name}={config[name]}" for name in (*OF_LINKS, *OF_COLLECTIVES) if config.get(name)]
    asked += [f"network={config['network']}"] if config["network"] in ("flow", "packet") else []
    if asked and not config.get("cluster"):
        raise BadInputError(f"{asked[0]} needs a cluster: name one with cluster=… (`opcast list clusters`)")


def with_bytes(values: Mapping[str, Any]) -> dict[str, Any]:
    """The dims of an op with ``size_bytes`` as a number (``1GiB``)."""
    size = values.get("size_bytes")
    if not isinstance(size, str) or size == "???":
        return dict(values)
    from ..simulator.network.query import parse_size

    return {**values, "size_bytes": parse_size(size)}


def check_ops(ops: Sequence[Op], config: Mapping[str, Any]) -> None:
    """BadInputError for what only collectives can be asked."""
    for op in ops if config.get("cluster") else ():
        misplaced = [f"{name}={config[name]}" for name in OF_COLLECTIVES if config.get(name)]
        if misplaced and KINDS[op.kind].family != "collective":
            raise BadInputError(f"{misplaced[0]} is for collectives: leave it out of op={op.kind}")


def with_ranks(values: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The dims of a collective; ``ranks`` that are not given are those of ``group``. OpError where both differ."""
    group = config.get("group")
    if values.get("ranks") is None or not isinstance(group, (list, tuple)):
        return dict(values)
    if values["ranks"] not in ("???", len(group)):
        raise OpError(f"op.ranks={values['ranks']}, but group={group} has {len(group)}: leave one of them out")
    return {**values, "ranks": len(group)}


def write(prediction: OpPrediction, config: Mapping[str, Any]) -> None:
    """The page of ``report=`` and the picture of ``picture=``, where they were asked for."""
    if config.get("report"):
        from ..simulator.html import network
        from ..simulator.html import write as write_html

        say(f"report: {write_html(network.page(prediction), Path(config['report']))}")
    if config.get("picture"):
        from ..simulator.network.picture import draw_svg

        topology, load = prediction.placed
        drawing = draw_svg(topology, load, "share of each link that is in use")
        say(f"picture: {write_text('picture', Path(config['picture']), drawing)}")


def rows(prediction: OpPrediction) -> list[tuple[str, str]]:
    """Lines of a collective on a cluster: how it is done, its bandwidths, what the links make of it."""
    network = prediction.network
    if not network or "algorithm" not in network:
        return []
    lines = [("algorithm", f"{network['algorithm']} ({network['fidelity']})")]
    lines += [("algbw, busbw", f"{network['algbw_gbps']:.4g} GB/s, {network['busbw_gbps']:.4g} GB/s")]
    if "stretch" in network:
        groups = f", {network['groups']} groups at once" if network["groups"] > 1 else ""
        lines.append(("stretch", f"{network['stretch']:.3f} times as long as on a switch that never blocks{groups}"))
    return lines


def show(network: Mapping[str, Any], many: bool) -> None:
    """Transfers, the fullest links, and what faults at random do, as tables."""
    if many:
        show_table(transfer_table(network, LISTED), empty=True)
    show_links(network)


def show_links(network: Mapping[str, Any], whole: str = "whole time", what: str = "time") -> None:
    """The fullest links over the ``whole``, and how much longer ``what`` takes with random faults, as tables."""
    show_table(fullest_table(network, whole))
    if network.get("contention_s", 0.0) > NOTICED * network.get("apart_s", 0.0):
        apart, more = time_text(network["apart_s"] * 1e6), time_text(network["contention_s"] * 1e6)
        say(f"sharing links costs {more} of the {whole}: with links of its own for all communication it is {apart}")
    study = network.get("faults_study")
    if study:
        show_table(slowdown_table(study, what), empty=True)
        show_table(critical_table(study), empty=True)
