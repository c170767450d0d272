"""Answers for collectives that cross nodes: a cluster's links and NICs, and how NCCL uses them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...datasets.clusters import Cluster, ClusterError, check_nccl
from ...datasets.counts import counted
from ...datasets.devices import Device
from ...datasets.dtypes import itemsize
from ...datasets.ops import KINDS, LINKS
from ...datasets.store import Store
from ...models.choice import NETWORK
from ..network.calibrate import INTER_NODE_CONSTANTS, INTRA_NODE_CONSTANTS, fit
from ..network.nccl import GroupShapes
from ..network.nccl_times import Tuning, collective_us
from ..network.tunings import tuning
from .answers import Answers, Columns
from .coverage import widen_factor

FAMILIES = ("collective", "expert_parallel")
CALIBRATION_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
MIN_CALIBRATION_ROWS = 20  # rows from which constants are fitted
# Of the interval each way, from the factors that four of five unseen groups lie within: on NVLink (1.07 to 1.13 by
# GPU), on PCIe (1.2 and 1.3), between nodes from 1 MiB on (75 % of seven groups that no constant comes from, 86 % of
# twelve) and below (87 % of six); tests/benchmarks/accuracy_network.py
FACTOR_NVLINK, FACTOR_PCIE = widen_factor(1.13, 0.8), widen_factor(1.3, 0.8)
FACTOR_OTHER, FACTOR_SMALL = widen_factor(1.6, 0.8), widen_factor(2.3, 0.8)
SMALL_BYTES = 2**20
# Of a low-latency exchange between nodes beside its bytes. Read off the table of DeepEP's README, the rows of 16, 32
# and 64 ranks of H800: 128 tokens of 7168 take 118, 155 and 173 us (FP8) and 195, 273 and 314 us (16 bits), bytes at
# the rates here 80, 120 and 140 us and twice that. Its rows of 128 and 256 ranks (192, 194; 369, 360 us) then come out
# as 185, 190; 334, 344.
LOW_LATENCY_US = 35.0
MAX_FITS = 256
_FITS: dict[str, Tuning] = {}  # constants by what they were fitted to


@dataclass(frozen=True)
class NetworkEngine:
    """Collectives of a cluster by formula (:mod:`..network.nccl_times`); declines every other kind.

    NCCL's measurements of the device in ``stores`` set the constants; without any, those that ship serve. A rank has
    the same share of its node's NICs as every other: groups that hold only some ranks of a node leave the rest of the
    NICs to the other groups, which communicate at the same time. ``cluster.nccl`` overrides NCCL's own choice of
    algorithm, protocol and channels. Of kinds in no family of ``families`` it says nothing.
    """

    device: Device
    cluster: Cluster
    stores: Sequence[Store] = ()
    families: Sequence[str] = FAMILIES
    name: str = "network"

    def __post_init__(self) -> None:
        check_nccl(self.cluster.nccl)

    @cached_property
    def tuning(self) -> Tuning:
        """The constants of collectives on this cluster."""
        return calibrate_tuning(self, tuning(self.device, self.cluster.link, self.cluster.peers))

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        """ClusterError for a group that is larger than the cluster."""
        answers = Answers.declined(len(next(iter(columns.values()))))
        if KINDS[kind].family not in self.families:
            return answers
        groups = self.groups(columns)
        if KINDS[kind].family == "collective":
            latency = collective_us(kind, columns["size_bytes"], groups, self.tuning)
        else:
            latency = self._experts(kind, columns, dtype, out_dtype, groups)
        spread = self.factor(columns, groups)
        answers.latency_us[:] = np.maximum(latency, self.device.launch_us)
        answers.low_us[:], answers.high_us[:] = answers.latency_us / spread, answers.latency_us * spread
        answers.engine[:] = self.name
        answers.clause[:] = answers.source[:] = NETWORK
        answers.in_envelope[:] = groups.nodes == 1
        return answers

    def still_us(self, kind: str, columns: Columns, dtype: str, out_dtype: str) -> np.ndarray:
        """How long each of n ops takes without any byte: latency that uses no link [n]."""
        size = "size_bytes" if "size_bytes" in columns else "tokens"
        empty = {**columns, size: np.zeros_like(columns[size])}
        return self.answer(kind, empty, dtype, out_dtype, "warm").latency_us

    def groups(self, columns: Columns) -> GroupShapes:
        """What the groups of n ops run over."""
        cluster, device = self.cluster, self.device
        ranks = np.asarray(columns["ranks"], dtype=np.float64)
        if ranks.max(initial=0) > cluster.devices:
            raise ClusterError(
                f"a group of {ranks.max():.0f} ranks is larger than {cluster.id} with "
                f"{counted(cluster.nodes, 'node')}, "
                f"which has {counted(cluster.devices, 'device')}"
            )
        per_node = np.minimum(columns["ranks_per_node"], cluster.devices_per_node)
        nvlink = cluster.link == "nvlink" and device.link_gbps > 0
        nic_gbps = min(cluster.nic_gbps, device.pcie_gbps or np.inf)
        return GroupShapes(
            ranks,
            np.minimum(np.maximum(per_node, 1), np.maximum(ranks, 1)).astype(np.float64),
            device.link_gbps if nvlink else device.pcie_gbps,
            nic_gbps * cluster.nics_per_node / cluster.devices_per_node,
            "nvlink" if nvlink else "pcie",
            cluster.nic_latency_us,
            device.architecture,
            bool(cluster.topology.get("reduces", False)),
            mesh_links=cluster.mesh_links if nvlink else 0,
            host=cluster.host_maker,
            **cluster.nccl,
        )

    def factor(self, columns: Columns, groups: GroupShapes) -> np.ndarray:
        """How far above and below each answer the interval reaches."""
        near = FACTOR_NVLINK if groups.inside == "nvlink" else FACTOR_PCIE
        small = np.asarray(columns.get("size_bytes", SMALL_BYTES)) < SMALL_BYTES
        return np.where(groups.nodes > 1, np.where(small, FACTOR_SMALL, FACTOR_OTHER), near)

    def _experts(self, kind: str, columns: Columns, dtype: str, out_dtype: str, groups: GroupShapes) -> np.ndarray:
        """Tokens cross the fabric once a node they are wanted in, then NVLink (DeepEP; arXiv 2412.19437, sec. 3.2).

        In low-latency mode each goes straight to every expert: GPUs write to the NIC by themselves (IBGDA), to all
        peers at once, so that no peer costs more time (DeepEP, csrc/kernels/internode_ll.cu).
        """
        settings = self.tuning
        ranks, nodes = groups.ranks, groups.nodes
        token_bytes = columns["tokens"] * columns["hidden"] * itemsize(dtype if kind == "ep_dispatch" else out_dtype)
        topk, direct = columns["topk"], np.asarray(columns["mode"]) > 0
        far_nodes = np.where(direct, topk * (ranks - groups.per_node) / ranks, _remote_places(nodes, topk))
        near = np.where(direct, topk * (groups.per_node - 1.0) / ranks, _remote_places(ranks, topk))
        outside = token_bytes * far_nodes / (groups.outside_gbps * settings.network)
        inside = token_bytes * near / (groups.near_gbps * settings.exchange)
        start = collective_us("all_to_all", np.zeros_like(ranks), groups, settings)
        start = np.where(direct & (nodes > 1), LOW_LATENCY_US, start)
        return np.where(ranks > 1, start + np.maximum(inside, outside) / 1e3, 0.0)


@dataclass(frozen=True)
class NodeEngine:
    """Collectives inside a node where no cluster is named, by the formula of the usual one; declines all others.

    So a question has one answer with a cluster and without.
    """

    network: NetworkEngine
    name: str = "network"

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        answers = Answers.declined(len(next(iter(columns.values()))))
        if KINDS[kind].family == "collective":
            cluster, ranks = self.network.cluster, columns["ranks"]
            inside = ranks <= np.minimum(columns["ranks_per_node"], cluster.devices)
            single_link = self.network.device.link_gbps == 0  # whatever is asked, there is no other link
            answered = np.flatnonzero(inside & (single_link | (columns["link"] == LINKS.index(cluster.link))))
            node_columns = {name: values[answered] for name, values in columns.items()}
            answers.put(answered, self.network.answer(kind, node_columns, dtype, out_dtype, cache))
        return answers


def calibrate_tuning(engine: NetworkEngine, start: Tuning) -> Tuning:
    """``start`` with what the engine's stores say: of rows inside nodes, then of those across."""
    rows = {kind: measured for kind in CALIBRATION_KINDS if (measured := _read_nccl_rows(engine, kind)) is not None}
    for names, across in ((INTRA_NODE_CONSTANTS, False), (INTER_NODE_CONSTANTS, True)):
        chosen_rows = {}
        for kind, (size, groups, us) in rows.items():
            selected = (groups.nodes > 1) == across
            selected_groups = groups._replace(ranks=groups.ranks[selected], per_node=groups.per_node[selected])
            if selected.any():
                chosen_rows[kind] = (size[selected], selected_groups, us[selected])
        if sum(len(us) for _, _, us in chosen_rows.values()) >= MIN_CALIBRATION_ROWS:
            start = _fit_once(chosen_rows, start, names)
    return start


def _fit_once(
    rows: Mapping[str, tuple[np.ndarray, GroupShapes, np.ndarray]], start: Tuning, names: Sequence[str]
) -> Tuning:
    """What :func:`..network.calibrate.fit` finds; the same rows from the same start are fitted once a process."""
    digest = hashlib.sha256(repr((start, tuple(names))).encode())
    for kind, (size, groups, us) in rows.items():
        digest.update(kind.encode())
        for values in (size, us, *groups):
            digest.update(values.tobytes() if isinstance(values, np.ndarray) else repr(values).encode())
    key = digest.hexdigest()
    if key not in _FITS:
        if len(_FITS) >= MAX_FITS:
            _FITS.clear()
        _FITS[key] = fit(rows, start, names)[0]
    return _FITS[key]


def _read_nccl_rows(engine: NetworkEngine, kind: str) -> tuple[np.ndarray, GroupShapes, np.ndarray] | None:
    """Sizes, groups and times of the NCCL rows of one kind that fit on the cluster; None without any."""
    for store in engine.stores:
        if engine.device.id not in store.devices(kind):
            continue
        table = store.read(kind, engine.device.id)
        columns = {name: table[name].to_numpy() for name in ("size_bytes", "ranks", "ranks_per_node", "latency_us")}
        nccl = np.array(
            [str(backend).partition(":")[2] == "nccl" or backend == "nccl" for backend in table["backend"].to_pylist()],
            dtype=bool,
        )
        keep = (
            nccl & (columns["ranks"] > 1) & (columns["ranks"] <= engine.cluster.devices) & (columns["latency_us"] > 0)
        )
        if keep.any():
            selected = {name: column[keep] for name, column in columns.items()}
            return selected["size_bytes"].astype(np.float64), engine.groups(selected), selected["latency_us"]
    return None


def _remote_places(places: np.ndarray, topk: np.ndarray) -> np.ndarray:
    """How many places other than a token's own hold one of its ``topk`` experts, on average."""
    return (places - 1.0) * (1.0 - (1.0 - 1.0 / places) ** topk)
