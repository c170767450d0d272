"""Ways to serve played through the event loop of ``opcast serving``: the load at which each keeps what users expect.

Closed forms say which ways may be best, and near which load to look. The event loop says which one is: all ways get
the same requests, sent faster or slower. Of many alike replicas a group is played, whose requests come as regularly as
those that are left for it where all parts take turns.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...question.serving import DecodePool, IterationLaw, KvMemory, Scheduler, ServingRequest
from ...question.traffic import Lengths, RequestTraffic
from ...report.served import ServingReport
from ...serving.confidence import met
from ...serving.iteration import IterationTables
from ...serving.policies import policy_of
from ...serving.replica import ServedReplica
from ...serving.serve import rescale, serve
from .load import common
from .replicas import LayoutReplica, Replicas
from .request import LAYOUT, OF_PREFILL, ReplicaLayout, ServedSearchRequest

LOAD = 0.95  # of the rate in steady state where nothing is expected: at all of it a queue by chance never ends
TURNOVERS = 4  # times that all requests under way have changed
FEWEST_REQUESTS, MOST_REQUESTS = 2400, 6000
WHOLE_REQUESTS = 24_000  # of a way that cannot be cut: in a short run its pools are not full for most of the time
LASTING = 20  # times as long as a request may wait: in a shorter run too much load is not seen
WARM_UP = 0.1  # of the requests, as those of `opcast serving capacity`
STEP, PRECISION = 1.1, 1.01  # up or down from where the closed form looks; between a rate that is kept and one not
FARTHEST, GROWING = 7, 1.5  # steps, the logarithm of each so many times the one before: a 20th of the rate, or 20 times
PREFILL_SEQS = 256  # that a replica which only prefills may hold: they end with their prompts
ALL_RUNS = 100  # that a search makes, about: so many pay for compiling the loop


@dataclass(frozen=True)
class PlayedPart:
    """The part of a way that is played: a request, replicas that prefill (or do both) and that decode, how many clients
    send to one of them, and how many such parts the way has."""

    request: ServingRequest
    replica: ServedReplica
    decoder: ServedReplica | None
    sending: float
    parts: int
    known: dict[float, ServingReport] = field(default_factory=dict, compare=False)

    def slower(self, factor: float) -> PlayedPart:
        """The same with iterations that take so many times as long."""
        replica, decoder = replace(self.replica, tables=slower(self.replica.tables, factor)), self.decoder
        if decoder is not None:
            decoder = replace(decoder, tables=slower(decoder.tables, factor))
        return replace(self, replica=replica, decoder=decoder, known={})

    def at(self, rate: float) -> ServingReport:
        """The report at a rate of requests a second of the whole way."""
        if rate not in self.known:
            request = rescale(self.request, rate / self.parts)
            tokens = ALL_RUNS * request.traffic.requests * request.traffic.output.average
            served = serve(request, self.replica, self.decoder, clients=self.sending, of_tokens=tokens)
            self.known[rate] = served.report
        return self.known[rate]

    def keeps(self, rate: float) -> bool:
        """Whether enough requests have what users expect at a rate."""
        return met(self.request, self.at(rate))


def slower(tables: IterationTables, factor: float) -> IterationTables:
    """Tables of which each time is so many times as long."""
    return tables._replace(**{n: factor * getattr(tables, n) for n in tables._fields if n.endswith("_us")})


def part_of(
    request: ServedSearchRequest, row: Mapping[str, Any], replicas: Replicas, seed: int = 0, longer: int = 1
) -> PlayedPart:
    """The group of a row's way to serve that is played, ``longer`` times as long as a search plays it."""
    replica, apart = find(row, LAYOUT, replicas), row["pools"] == "apart"
    first = find(row, OF_PREFILL, replicas) if apart else replica
    alike = common(row["prefill_replicas"], row["replicas"])
    parts = min(n for n in range(1, alike + 1) if alike % n == 0 and (fits(row, n) or n == alike))
    clients = max(round(row["concurrency"] / parts), 1)
    waits = LASTING * row["requests_per_s"] / parts * (request.slo.ttft_ms or 0.0) / 1e3
    most = max(MOST_REQUESTS, min(TURNOVERS * clients, WHOLE_REQUESTS))
    requests = longer * min(max(TURNOVERS * clients, FEWEST_REQUESTS, round(waits)), most)
    regular = {"arrival": "poisson"} if parts == 1 else {"arrival": "gamma", "cv": 1 / math.sqrt(parts)}
    served = ServingRequest(
        law=IterationLaw(base_us=1.0),
        kv=KvMemory(blocks=first.served.kv.blocks),
        traffic=RequestTraffic(
            rate=row["requests_per_s"] / parts,
            requests=requests,
            warmup=int(WARM_UP * requests),
            input=Lengths(mean=request.input_len),
            output=Lengths(mean=request.output_len),
            seed=seed,
            **regular,
        ),
        scheduler=Scheduler(
            policy=row["policy"],
            max_tokens=row["max_tokens"],
            max_seqs=max(row["batch"], PREFILL_SEQS) if apart else row["batch"],
        ),
        slo=request.slo,
        replicas=(row["prefill_replicas"] if apart else row["replicas"]) // parts,
        attention_dp=(first if apart else replica).layout.dp,
        decode_pool=DecodePool(
            replicas=row["replicas"] // parts if apart else 0,
            kv=KvMemory(blocks=replica.served.kv.blocks),
            max_seqs=row["batch"],
            attention_dp=replica.layout.dp,
            link_gbps=request.link_gbps * min(end.layout.tp * end.layout.pp for end in (first, replica)),
            link_us=request.link_us,
        ),
    )
    decoder = with_graphs(replica, row["batch"]) if apart else None
    sending = row["concurrency"] / (row["prefill_replicas"] if apart else row["replicas"])
    return PlayedPart(served, with_graphs(first, row["batch"]), decoder, sending, parts)


def fits(row: Mapping[str, Any], parts: int) -> bool:
    """Whether a group of a way is small enough to be played whole."""
    return bool(TURNOVERS * row["concurrency"] <= MOST_REQUESTS * parts)


def highest_rate(group: PlayedPart, start: float, least: float = 0.0, step: float = STEP) -> float:
    """The highest requests a second of the whole way that keep what users expect, 0 where none near ``start`` do, or
    none above ``least``. It is looked for by ``step`` up or down, then by
    larger ones, then by halves."""
    low = high = start
    down = up = step
    for _ in range(FARTHEST):
        if group.keeps(low):
            break
        low, high, down = low / down, low, down**GROWING
        if low < least:
            return 0.0
    else:
        return 0.0
    if low == start:
        high = low * up
        for _ in range(FARTHEST):
            if not group.keeps(high):
                break
            up **= GROWING
            low, high = high, high * up
    while high / low > PRECISION:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if group.keeps(middle) else (low, middle)
    return low


def figures_at(group: PlayedPart, rate: float) -> dict[str, Any]:
    """What users have at a rate: times in ms (mean; None where nobody is served), whether queues stay short, requests a
    second that have all of ``slo``, and their share."""
    report = group.at(rate)
    tpot_ms = report.tpot_ms.mean if report.tpot_ms.count else 0.0  # of answers of one token
    return {
        "rate": rate,
        "ttft_ms": report.ttft_ms.mean if report.completed else None,
        "tpot_ms": tpot_ms if report.completed else None,
        "keeps_up": not report.overload,
        "goodput": report.goodput * group.parts,
        "slo_attainment": report.slo_attainment,
    }


def confirmed(request: ServedSearchRequest, row: Mapping[str, Any], replicas: Replicas) -> dict[str, Any]:
    """What users of a way to serve have at nearly the rate that the closed form says."""
    return figures_at(part_of(request, row, replicas), LOAD * row["requests_per_s"])


def can_play() -> bool:
    """Whether the event loop is fast enough for a search to ask it: numba is installed."""
    return importlib.util.find_spec("numba") is not None


def with_graphs(replica: LayoutReplica, batch: int) -> ServedReplica:
    """A replica with the CUDA graphs that its engine has for so many sequences."""
    return replace(replica.served, graphs=replica.engine.graphs.sizes(replica.layout.tp, batch))


def find(
    row: Mapping[str, Any],
    names: tuple[str, ...],
    replicas: Replicas,
) -> LayoutReplica:
    """The replica of a row's degrees, called ``names``."""
    return replicas[ReplicaLayout.of(row, names), policy_of(row["policy"]).framework]
