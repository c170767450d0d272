"""The servers that a way to serve consists of: one role that does both, or one that prefills and one that decodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....datasets.clusters import Cluster
from ....datasets.counts import counted
from ...trace.models import resolve
from .request import LAYOUT, OF_PREFILL, ServedSearchRequest

BOTH, PREFILL, DECODE = "", "prefill", "decode"
PORTS = {BOTH: 8000, PREFILL: 8100, DECODE: 8200}
BOOTSTRAP_PORT = 8998
ROUND = 256  # tokens that a length is rounded up to: a whole number of KV blocks in every engine


@dataclass(frozen=True)
class ServedRole:
    """The servers of a role (``prefill``, ``decode``, or both where it is empty): what rows of the tables read."""

    role: str
    tp: int
    pp: int
    dp: int
    ep: int
    batch: int
    max_tokens: int
    max_len: int
    room: int
    quantization: str
    kv_dtype: str
    replicas: int
    cluster: str

    @property
    def ranks(self) -> int:
        """Tensor and data ranks."""
        return self.tp * self.dp

    @property
    def devices(self) -> int:
        """GPUs of a server."""
        return self.tp * self.pp * self.dp


@dataclass(frozen=True)
class PlacedServer:
    """A copy of a server: on which node and GPUs of it, and at which port."""

    role: ServedRole
    copy: int
    node: int
    gpus: tuple[int, ...]
    port: int

    def address(self, nodes: int) -> str:
        """Where it is reached: this machine, or ``NODE_1`` and so on where there are several."""
        return f"{'localhost' if nodes == 1 else f'NODE_{self.node}'}:{self.port}"


def counts(servers: Sequence[ServedRole]) -> str:
    """How many servers there are of each role, and their GPUs."""
    return ", ".join(f"{role.replicas} x {role.role or 'server'} of {counted(role.devices, 'GPU')}" for role in servers)


def longest(request: ServedSearchRequest) -> int:
    """Tokens that a server takes of prompt and answer: a tenth more than was asked for, as far as the model goes."""
    tokens = request.input_len + request.output_len
    with_room = -(-(tokens + tokens // 10) // ROUND) * ROUND
    config = dict(resolve(request.step.model).language)
    most = config.get("max_position_embeddings") or config.get("n_positions") or with_room
    return max(tokens, min(with_room, int(most)))


def placed(servers: Sequence[ServedRole], clusters: Mapping[str, Cluster]) -> list[PlacedServer]:
    """Every copy of every role on GPUs of its own, node by node, with a port that no other on its node has.

    A server of more than a node's GPUs has whole nodes, and no list of its GPUs. Roles on unlike GPUs share no node.
    """
    copies: list[PlacedServer] = []
    node = used = 0
    for role in servers:
        per_node = clusters[role.cluster].devices_per_node
        if used and role.cluster != copies[-1].role.cluster:
            node, used = node + 1, 0
        for copy in range(role.replicas):
            if role.devices > per_node:
                node, used = (node + 1, 0) if used else (node, used)
                copies.append(PlacedServer(role, copy, node, (), PORTS[role.role] + copy))
                node += -(-role.devices // per_node)
                continue
            if used + role.devices > per_node:
                node, used = node + 1, 0
            gpus = tuple(range(used, used + role.devices))
            copies.append(PlacedServer(role, copy, node, gpus, PORTS[role.role] + copy))
            used += role.devices
    return copies


def roles(request: ServedSearchRequest, row: Mapping[str, Any]) -> list[ServedRole]:
    """The servers of a point: one role, or one that prefills and one that decodes."""
    max_len = longest(request)
    room = max_len - request.input_len - request.output_len
    dtype = request.step.kv_dtype or str(request.step.options.get("kv_dtype") or "")
    kv_dtype = "" if dtype == "same" else dtype
    common = {"max_len": max_len, "room": room, "quantization": row["precision"], "kv_dtype": kv_dtype}
    degrees = dict(zip(("tp", "pp", "dp", "ep"), (row[name] for name in LAYOUT), strict=True))
    settings = {**degrees, "batch": row["batch"], **common, "replicas": row["replicas"], "cluster": row["cluster"]}
    if row["pools"] == "together":
        return [ServedRole(BOTH, max_tokens=row["max_tokens"], **settings)]
    first = dict(zip(("tp", "pp", "dp", "ep"), (row[name] for name in OF_PREFILL), strict=True))
    first |= {"replicas": row["prefill_replicas"], "cluster": row["prefill_cluster"] or row["cluster"]}
    prompts = max(row["max_tokens"] // request.input_len, 1)
    one = ServedRole(PREFILL, **first, batch=prompts, max_tokens=row["max_tokens"], **common)
    return [one, ServedRole(DECODE, max_tokens=max(row["batch"], 256), **settings)]
