"""A way to serve played through the event loop of ``opcast serving``, at nearly the rate that the closed form says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...question.serving import DecodePool, IterationLaw, KvMemory, Scheduler, ServingRequest
from ...question.traffic import Lengths, RequestTraffic
from ...serving.policies import policy_of
from ...serving.replica import ServedReplica
from ...serving.serve import serve
from .replicas import LayoutReplica, Replicas
from .request import LAYOUT, OF_PREFILL, ReplicaLayout, ServedSearchRequest

LOAD = 0.95  # of the rate in steady state: at all of it a queue of requests by chance never ends
TURNOVERS = 3  # times that all requests under way have changed
MOST_REQUESTS = 3000


def confirmed(request: ServedSearchRequest, row: Mapping[str, Any], replicas: Replicas) -> dict[str, Any]:
    """What users of the way to serve have: times in ms (mean), whether queues stay short, requests a second that have
    all of ``slo``, and their share.

    Replicas that do both are alike, so that one is played; pools apart are played whole.
    """
    own = find(row, LAYOUT, replicas)
    apart = row["pools"] == "apart"
    first = find(row, OF_PREFILL, replicas) if apart else own
    count = 1 if apart else row["replicas"]
    clients = max(round(row["concurrency"] / count), 1)
    asked = ServingRequest(
        law=IterationLaw(base_us=1.0),
        kv=KvMemory(blocks=own.served.kv.blocks),
        traffic=RequestTraffic(
            rate=LOAD * row["requests_per_s"] / count,
            requests=min(TURNOVERS * clients, MOST_REQUESTS),
            input=Lengths(mean=request.input_len),
            output=Lengths(mean=request.output_len),
        ),
        scheduler=Scheduler(policy=row["policy"], max_tokens=row["max_tokens"], max_seqs=row["batch"]),
        slo=request.slo,
        replicas=row["prefill_replicas"] if apart else 1,
        attention_dp=row["dp"],
        decode_pool=DecodePool(
            replicas=row["replicas"] if apart else 0, link_gbps=request.link_gbps, link_us=request.link_us
        ),
    )
    decoder = with_graphs(own, row["batch"]) if apart else None
    sending = row["concurrency"] / (row["prefill_replicas"] if apart else row["replicas"])
    report = serve(asked, with_graphs(first, row["batch"]), decoder, clients=sending).report
    return {
        "ttft_ms": report.ttft_ms.mean,
        "tpot_ms": report.tpot_ms.mean,
        "keeps_up": not report.overload,
        "goodput": report.goodput * count,
        "slo_attainment": report.slo_attainment,
    }


def with_graphs(own: LayoutReplica, batch: int) -> ServedReplica:
    """A replica with the CUDA graphs that its engine has for so many sequences."""
    return replace(own.served, graphs=own.engine.graphs.sizes(own.layout.tp, batch))


def find(
    row: Mapping[str, Any],
    names: tuple[str, ...],
    replicas: Replicas,
) -> LayoutReplica:
    """The replica of a row's degrees, called ``names``."""
    degrees = tuple(row[name] for name in names)
    place = ReplicaLayout(row["cluster"], row["nodes"], row["precision"], *degrees)
    return replicas[place, policy_of(row["policy"]).framework]
