"""SimAI's files: workloads and bus bandwidths (https://github.com/aliyun/SimAI).

A workload is a header of parallel degrees, the number of layers, then a line a layer with compute in ns and a
collective in bytes for the forward pass, the input gradient and the weight gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...datasets.counts import counted
from ..network.astra import FormatError

COLLECTIVES = {
    name.replace("_", "").upper(): name for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
}
GROUPS = ("TP", "DP", "EP", "PP")
PHASES = ("forward", "input_gradient", "weight_gradient")
SCOPES = ("", "EP", "DP_EP")
HEADER = {"model_parallel_NPU_group": "tp", "ep": "ep", "pp": "pp", "vpp": "vpp", "ga": "ga", "all_gpus": "gpus"}
LISTS = ("checkpoints", "checkpoint_initiates")  # a count, then as many layers
KIND = "HYBRID_TRANSFORMER_FWD_IN_BCKWD"
KINDS = (KIND, "HYBRID_TRANSFORMER")


class LayerPhase(NamedTuple):
    """Compute in ns, then a collective of ``size_bytes`` over the ranks of ``scope`` ("" is the phase's usual one)."""

    compute_ns: int
    collective: str = ""
    size_bytes: int = 0
    scope: str = ""


class WorkloadLayer(NamedTuple):
    """One line of a SimAI workload."""

    name: str
    forward: LayerPhase
    input_gradient: LayerPhase
    weight_gradient: LayerPhase
    update_ns: int = 0


@dataclass(frozen=True)
class SimaiWorkload:
    """``degrees``: tp, ep, pp, vpp, ga and gpus; ``pp_bytes`` is sent between pipeline stages.

    ``extra`` are further figures of the first line; ``lists`` the layers that are recomputed (:data:`LISTS`).
    """

    degrees: Mapping[str, int]
    layers: Sequence[WorkloadLayer]
    pp_bytes: int = 0
    extra: Mapping[str, int] = field(default_factory=dict)
    lists: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: dict.fromkeys(LISTS, ()))
    kind: str = KIND


def read_workload(text: str) -> SimaiWorkload:
    """A SimAI workload. FormatError names the line."""
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if len(lines) < 2 or lines[0][1].split()[0].rstrip(":") not in KINDS:
        raise FormatError(f"a SimAI workload starts with {KIND} and a number of layers")
    figures, lists = _header(*lines[0])
    count = _whole_number(lines[1][0], "the number of layers", lines[1][1].strip())
    if len(lines) - 2 != count:
        raise FormatError(f"line {lines[1][0]} promises {counted(count, 'layer')}, {len(lines) - 2} follow")
    if "all_gpus" not in figures:  # files of ASTRA-sim's first version have none
        gpus_per_replica = figures.get("model_parallel_NPU_group", 1) * figures.get("pp", 1)
        raise FormatError(
            f"line {lines[0][0]} lacks all_gpus, the number of GPUs that the workload is for: add all_gpus: N, "
            f"a multiple of {gpus_per_replica}"
        )
    degrees = {our_name: figures.pop(simai_name, 1) for simai_name, our_name in HEADER.items()}
    for simai_name, our_name in HEADER.items():
        if degrees[our_name] < 1:
            raise FormatError(f"line {lines[0][0]}: {simai_name}: {degrees[our_name]} must be at least 1")
    pp_bytes = figures.pop("pp_comm", 0)
    layers = [_layer(number, line) for number, line in lines[2:]]
    return SimaiWorkload(degrees, layers, pp_bytes, figures, lists, lines[0][1].split()[0].rstrip(":"))


def _header(number: int, line: str) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    """Figures and lists of the first line: ``name: value`` each, with or without the colon."""
    words = line.replace(":", " ").split()[1:]
    figures: dict[str, int] = {}
    lists: dict[str, tuple[int, ...]] = dict.fromkeys(LISTS, ())
    index = 0
    while index < len(words):
        name, value = words[index], words[index + 1] if index + 1 < len(words) else "nothing"
        figure = _whole_number(number, name, value)
        index += 2
        if name in LISTS:
            lists[name] = tuple(_whole_number(number, name, item) for item in words[index : index + figure])
            index += figure
        else:
            figures[name] = figure
    return figures, lists


def _layer(number: int, line: str) -> WorkloadLayer:
    words = line.split()
    if len(words) != 12:
        raise FormatError(
            f"line {number} has {len(words)} fields, not 12: a name, -1, three times compute, "
            "collective and bytes, and the update"
        )
    forward, inputs, weights = (_work(number, words[at : at + 3]) for at in (2, 5, 8))
    return WorkloadLayer(words[0], forward, inputs, weights, _whole_number(number, "the update", words[11]))


def _work(number: int, words: Sequence[str]) -> LayerPhase:
    name, _, scope = words[1].partition("_")
    compute, size = _whole_number(number, "compute", words[0]), _whole_number(number, "bytes", words[2])
    if name == "NONE":
        return LayerPhase(compute)
    if name not in COLLECTIVES or scope not in SCOPES:
        names = ", ".join((*COLLECTIVES, "NONE"))
        raise FormatError(f"line {number}: {words[1]!r} is not one of {names}, nor with _EP or _DP_EP behind it")
    return LayerPhase(compute, COLLECTIVES[name], size, scope)


def _whole_number(number: int, name: str, word: str) -> int:
    """A whole number of at least 0, which some writers give a decimal point; FormatError names the line."""
    try:
        value = float(word)
    except ValueError:
        value = -1.0
    if not 0 <= value < 2.0**63 or value != int(value):
        raise FormatError(f"line {number}: {name} is {word!r}, which is no whole number of at least 0")
    return int(word) if word.isdigit() and len(word) < 20 else int(value)


def write_workload(workload: SimaiWorkload) -> str:
    """The workload as SimAI reads it."""
    words = [f"{theirs}: {workload.degrees.get(mine, 1)}" for theirs, mine in HEADER.items()]
    words += [" ".join([f"{name}:", *map(str, (len(layers), *layers))]) for name, layers in workload.lists.items()]
    words += [f"{name}: {value}" for name, value in workload.extra.items()]
    head = " ".join([workload.kind, *words, f"pp_comm: {workload.pp_bytes}"])
    names = {mine: theirs for theirs, mine in COLLECTIVES.items()}

    def phase_words(work: LayerPhase) -> list[str]:
        name = names[work.collective] + (f"_{work.scope}" if work.scope else "") if work.collective else "NONE"
        return [str(work.compute_ns), name, str(work.size_bytes)]

    lines = [head, str(len(workload.layers))]
    for layer in workload.layers:
        work = [word for phase in PHASES for word in phase_words(getattr(layer, phase))]
        lines.append("\t".join([layer.name, "-1", *work, str(layer.update_ns)]))
    return "\n".join(lines) + "\n"


def group_ranks(workload: SimaiWorkload, phase: str, work: LayerPhase) -> range:
    """The ranks of the first group that a collective joins: tensor ranks are neighbours, then data, then pipeline.

    FormatError where the degrees do not divide the GPUs.
    """
    tp, ep, pp, gpus = (workload.degrees[name] for name in ("tp", "ep", "pp", "gpus"))
    if gpus % (tp * pp):
        raise FormatError(f"all_gpus: {gpus} do not divide into pp: {pp} stages of model_parallel_NPU_group: {tp}")
    stage = gpus // pp
    if work.scope and stage % (tp * ep):
        raise FormatError(f"the {stage} GPUs of a stage do not divide into ep: {ep} times tensor groups of {tp}")
    if work.scope == "EP":
        return range(0, tp * ep, tp)
    if work.scope == "DP_EP":
        return range(0, stage, tp * ep)
    return range(0, stage, tp) if phase == "weight_gradient" else range(tp)


def read_busbw(text: str) -> dict[str, dict[str, float]]:
    """SimAI's bus bandwidths, GB/s by group (TP, DP, EP, PP) and collective; FormatError names the line."""
    rates: dict[str, dict[str, float]] = {}
    group = ""
    for number, line in enumerate(text.splitlines(), 1):
        name, colon, value = (text.strip().strip(",").strip() for text in line.partition(":"))
        if not name or (number == 1 and not colon):
            continue
        if not value:
            if name not in GROUPS:
                raise FormatError(f"line {number}: {name!r} is not one of {', '.join(GROUPS)}")
            group = name
            rates[group] = {}
            continue
        names = {"busbw": "busbw"} if group == "PP" else {theirs.lower(): ours for theirs, ours in COLLECTIVES.items()}
        if not group or name.lower() not in names:
            raise FormatError(f"line {number}: {name!r} is not one of {', '.join(names)} under {', '.join(GROUPS)}")
        if value != "null":
            rates[group][names[name.lower()]] = _rate(number, value)
    if not rates:
        raise FormatError(f"SimAI's bus bandwidths have lines {', '.join(f'{name}:' for name in GROUPS)}")
    return rates


def _rate(number: int, value: str) -> float:
    try:
        rate = float(value)
    except ValueError:
        rate = 0.0
    if not 0.0 < rate < float("inf"):
        raise FormatError(f"line {number}: {value!r} is no rate in GB/s, nor null")
    return rate
