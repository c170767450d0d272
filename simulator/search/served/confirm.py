"""A way to serve played through the event loop of ``opcast serving``: as many clients as the closed form says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...question.serving import DecodePool, IterationLaw, KvMemory, Scheduler, ServingRequest
from ...question.traffic import Lengths, RequestTraffic
from ...serving.serve import serve
from .replicas import LayoutReplica, engine_name
from .request import LAYOUT, OF_PREFILL, ReplicaLayout, ServedSearchRequest

CLIENT_REQUESTS = 4  # a client sends so many, one after the other
MOST_REQUESTS = 4000


def confirmed(
    request: ServedSearchRequest, row: Mapping[str, Any], replicas: Mapping[tuple[ReplicaLayout, str], LayoutReplica]
) -> dict[str, float]:
    """What users of the way to serve have: times in ms (mean), rates, the share of requests that had all of ``slo``.

    Replicas that do both are alike, so that one is played; pools apart are played whole.
    """
    own = find(row, LAYOUT, replicas)
    apart = row["pools"] == "apart"
    first = find(row, OF_PREFILL, replicas) if apart else own
    count = 1 if apart else row["replicas"]
    clients = max(round(row["concurrency"] / count), 1)
    asked = ServingRequest(
        law=IterationLaw(base_us=1.0),
        kv=KvMemory(blocks=own.kv.blocks),
        traffic=RequestTraffic(
            arrival="closed",
            concurrency=clients,
            requests=min(CLIENT_REQUESTS * clients, MOST_REQUESTS),
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
    report = serve(asked, first.served(), own.served() if apart else None).report
    return {
        "ttft_ms": report.ttft_ms.mean,
        "tpot_ms": report.tpot_ms.mean,
        "tokens_per_s_per_gpu": report.output_tokens_per_s * count / row["devices"],
        "goodput": report.goodput * count,
        "slo_attainment": report.slo_attainment,
    }


def find(
    row: Mapping[str, Any],
    names: tuple[str, ...],
    replicas: Mapping[tuple[ReplicaLayout, str], LayoutReplica],
) -> LayoutReplica:
    """The replica of a row's degrees, called ``names``."""
    degrees = tuple(row[name] for name in names)
    place = ReplicaLayout(row["cluster"], row["nodes"], row["precision"], *degrees)
    return replicas[place, engine_name(row["policy"])]
