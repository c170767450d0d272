"""Transfers as a person asks for them, and what a person wants to know of them.

Sizes may have units (``1GiB``), groups are devices by name or ``ranks`` of them ``stride`` apart, and a file lists many
transfers at once. The answer is plain values: when each starts and ends, its bandwidths by nccl-tests' conventions,
the fullest links, and load over time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...datasets.counts import counted
from ...datasets.loading import choice
from ...datasets.near import meant
from ...datasets.ops import bus_factor
from ...datasets.reading import read_yaml
from .collectives import ALGORITHMS, algorithms
from .fabric import Fabric, Transfer
from .fidelity import TransferOutcome, load_over_time
from .link_load import BINS, describe_load, fullest_kinds
from .mapping import process_groups
from .reduction import SWITCH_ALGORITHMS as IN_SWITCH

UNITS = {"": 1, "b": 1} | {f"{p}{i}b": b**n for n, p in enumerate("kmgt", 1) for i, b in (("", 1000), ("i", 1024))}
SIZE = re.compile(r"\s*(\d+\.?\d*(?:e[+-]?\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
TRANSFER_KEYS = ("collective", "group", "size_bytes", "algorithm", "release_us", "after", "name")
COLLECTIVES = (*ALGORITHMS, "send")
MAX_LISTED_RANKS = 32  # members up to which an answer lists a group


class TransferError(ValueError):
    """A transfer that cannot be: no such device, size, collective or predecessor. One line says which."""


def parse_size(value: Any, name: str = "size_bytes") -> int:
    """Bytes of a number, or of text such as ``64MiB`` or ``1.5 GB``. TransferError for anything else."""
    match = SIZE.fullmatch(value) if isinstance(value, str) else None
    if match and match[2].lower() in UNITS:
        value = float(match[1]) * UNITS[match[2].lower()]
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value < 2**62 or value != int(value):
        raise TransferError(f"{name}={value!r} must be a whole number of bytes, such as 1048576, 1MiB or 2GB")
    return int(value)


def parse_group(value: Any, ranks: int | None, stride: int, devices: int) -> tuple[int, ...]:
    """The devices of a group: those of the list ``value``, or ``ranks`` of them from device 0 on, ``stride`` apart.

    TransferError for a device that is not there or is named twice.
    """
    if value is None:
        if ranks is None:
            raise TransferError("a group needs its devices (group=[0,8,16]) or its size (ranks)")
        if (check_integer("ranks", ranks, 1) - 1) * check_integer("stride", stride, 1) >= devices:
            stride_text = f", {stride} apart," if stride > 1 else ""
            raise TransferError(
                f"a group of {ranks} ranks{stride_text} is larger than the {counted(devices, 'device')} of the cluster"
            )
        value = list(range(0, ranks * stride, stride))
    if not isinstance(value, (list, tuple)) or not value:
        raise TransferError(f"group={value!r} must be a list of devices, such as [0,8,16]")
    for device in value:
        if isinstance(device, bool) or not isinstance(device, int) or not 0 <= device < devices:
            raise TransferError(f"group has device {device!r}; the cluster has devices 0 to {devices - 1}")
    if len(set(value)) < len(value):
        raise TransferError(f"group names device {next(device for device in value if value.count(device) > 1)} twice")
    return tuple(value)


def parallel_groups(group: tuple[int, ...], devices: int) -> list[tuple[int, ...]]:
    """All groups of the cluster with as many ranks as far apart, this one among them; only this one where none are."""
    stride = group[1] - group[0] if len(group) > 1 else 1
    if len(group) > 1 and stride > 0:
        groups = process_groups(devices // (len(group) * stride) * len(group) * stride, len(group), stride)
        if group in groups:
            return groups
    return [group]


def read_transfers(path: Path, devices: int) -> tuple[list[Transfer], list[str]]:
    """Transfers of a YAML file and their names. TransferError names the file and the entry."""
    values = read_yaml(path, TransferError, f"transfers={path}")
    try:
        return parse_transfers(values.get("transfers") if isinstance(values, Mapping) else values, devices)
    except TransferError as error:
        raise TransferError(f"{path}: {error}") from None


def parse_transfers(values: Any, devices: int) -> tuple[list[Transfer], list[str]]:
    """Transfers and their names from mappings with :data:`TRANSFER_KEYS`.

    ``group`` is a list of devices or ``{ranks, stride, first}``; ``after`` names earlier entries or
    counts them from 0.
    """
    if not isinstance(values, (list, tuple)) or not values:
        raise TransferError(
            "transfers must be a list, such as [{collective: all_reduce, group: [0, 1], size_bytes: 1MiB}]"
        )
    transfers: list[Transfer] = []
    names: list[str] = []
    for index, entry in enumerate(values):
        value = (
            {key: item for key, item in entry._asdict().items() if item is not None}
            if isinstance(entry, Transfer)
            else entry
        )
        try:
            transfers.append(_transfer(value, names, devices))
        except ValueError as error:
            raise TransferError(f"transfer {index}: {error}") from None
        name = str(value.get("name", f"transfer {index}"))
        if name in names:
            raise TransferError(f"transfer {index}: the name {name!r} is taken")
        names.append(name)
    return transfers, names


def _transfer(value: Any, names: Sequence[str], devices: int) -> Transfer:
    lacks = [key for key in TRANSFER_KEYS[:3] if key not in value] if isinstance(value, Mapping) else []
    unknown = sorted(set(map(str, value)) - set(TRANSFER_KEYS)) if isinstance(value, Mapping) else [str(value)]
    if unknown or lacks:
        problem = f"has no setting {unknown[0]!r}" if unknown else f"lacks {lacks[0]!r}"
        raise TransferError(f"it {problem}; it has {', '.join(TRANSFER_KEYS)}")
    collective, algorithm = str(value["collective"]), value.get("algorithm")
    check_algorithm(collective, algorithm)
    members = value["group"]
    if isinstance(members, Mapping):
        first = check_integer("first", members.get("first", 0), 0)
        unknown_keys = sorted(set(members) - {"first", "ranks", "stride"})
        if unknown_keys:
            raise TransferError(f"group has no setting {unknown_keys[0]!r}; it has first, ranks, stride")
        members = [
            first + device for device in parse_group(None, members.get("ranks"), members.get("stride", 1), devices)
        ]
    group = parse_group(members, None, 1, devices)
    if collective == "send" and len(group) != 2:
        raise TransferError(f"a send has two devices, from and to, not {len(group)}")
    release = value.get("release_us", 0.0)
    if isinstance(release, bool) or not isinstance(release, (int, float)) or not 0 <= release < math.inf:
        raise TransferError(f"release_us={release!r} must be a number of at least 0")
    after = value.get("after")
    after = after if isinstance(after, (list, tuple)) else [] if after is None else [after]
    earlier = tuple(_find_predecessor(predecessor, names) for predecessor in after)
    return Transfer(collective, group, float(parse_size(value["size_bytes"])), algorithm, float(release), earlier)


def _find_predecessor(value: Any, names: Sequence[str]) -> int:
    if isinstance(value, str) and value in names:
        return names.index(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names):
        return value
    raise TransferError(f"after={value!r} is no earlier transfer; {', '.join(names[:4]) or 'there is none before it'}")


def check_algorithm(collective: str, algorithm: Any) -> None:
    """TransferError for an unknown collective, or an algorithm that it does not have."""
    choice(TransferError, "collective", collective, COLLECTIVES)
    allowed = (
        (*algorithms(collective), *(IN_SWITCH if collective == "all_reduce" else ())) if collective != "send" else ()
    )
    if algorithm is not None and algorithm not in allowed:
        near = meant(algorithm, allowed)
        raise TransferError(
            f"algorithm={algorithm!r} is not one of {', '.join(allowed) or 'any: a send has none'}{near}"
        )


def check_integer(name: str, value: Any, minimum: int) -> int:
    """The value itself; TransferError where it is no whole number of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise TransferError(f"{name}={value!r} must be a whole number of at least {minimum}")
    return value


def summarize_transfers(
    fabric: Fabric, transfers: Sequence[Transfer], names: Sequence[str], outcome: TransferOutcome
) -> dict[str, Any]:
    """What happened, as plain values: transfers, the fullest links and their load over time, load by kind of link."""
    topology = fabric.topology
    load = outcome.utilisation(topology.bandwidth_gbps)
    hot = fullest_kinds(topology, load)
    return {
        "topology": topology.name,
        "links": topology.links,
        "total_us": outcome.total_us,
        "transfers": [_row(fabric, *row) for row in zip(transfers, names, *_ends(outcome), strict=True)],
        **describe_load(
            topology, load, hot, load_over_time(fabric, transfers, outcome, BINS, hot[0]), outcome.total_us
        ),
    }


def _ends(outcome: TransferOutcome) -> tuple[list[float], list[float]]:
    return outcome.start_us.tolist(), outcome.end_us.tolist()


def _row(fabric: Fabric, transfer: Transfer, name: str, start_us: float, end_us: float) -> dict[str, Any]:
    group = list(transfer.group)
    return {
        "name": name,
        "collective": transfer.collective,
        "ranks": len(group),
        "group": group if len(group) <= MAX_LISTED_RANKS else [*group[: MAX_LISTED_RANKS // 2], "...", *group[-2:]],
        "size_bytes": int(transfer.size_bytes),
        "algorithm": fabric.algorithm(transfer) if len(group) > 1 else "none",
        "start_us": start_us,
        "end_us": end_us,
        **bandwidths(transfer.collective, len(group), transfer.size_bytes, end_us - start_us),
    }


def bandwidths(collective: str, ranks: int, size_bytes: float, us: float) -> dict[str, float]:
    """``algbw_gbps`` and ``busbw_gbps`` (GB/s) as nccl-tests reports them; 0 for what takes no time."""
    rate = size_bytes / (us * 1e3) if us > 0 else 0.0
    return {"algbw_gbps": rate, "busbw_gbps": rate * float(bus_factor(collective, ranks))}
