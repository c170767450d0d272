"""Served traffic as a timeline: requests, iterations, KV memory and queues, rank by rank."""

from __future__ import annotations

import heapq

import numpy as np

from ..formats.tracks import RankTrack, TrackSpan
from .rules import ServingSetup, first_rank, ranks_of, replica_of, rules_of

MOST_ITERATIONS = 50_000  # so many from the beginning are shown, with the requests that came meanwhile
PHASES = (("queue", "arrival_us", "admitted_us"), ("prefill", "admitted_us", "prefilled_us"))


def tracks(iterations: np.ndarray, requests: np.ndarray, setup: ServingSetup) -> list[RankTrack]:
    """Two tracks for each rank: its iterations with counters of memory, queue and batch, and its requests.

    ``iterations`` and ``requests`` are records as :class:`.serve.ServedTraffic` has them. Requests of a rank lie in as
    few rows as they can without overlapping.
    """
    end_us = float(iterations["end_us"].max()) if len(iterations) else 0.0
    visible = requests[(requests["rank"] >= 0) & (requests["arrival_us"] <= end_us)]
    rank_tracks = []
    for rank in range(first_rank(setup, setup.replicas)):
        log = iterations[iterations["rank"] == rank]
        rank_tracks.append(_iterations(rank, log, setup))
        came = visible[visible["prefill_rank"] == rank]
        if len(came):
            rank_tracks.append(RankTrack(f"requests of {rank_name(rank, setup)}", _requests(came)))
    return rank_tracks


def rank_name(rank: int, setup: ServingSetup) -> str:
    """The replica, and the rank of it where it has several, with the pool that it is of."""
    replica = replica_of(setup, rank)
    local = rank - first_rank(setup, replica)
    two = setup.first_decode < setup.replicas
    names = ("first ", "second ") if setup.mixed else ("prefill ", "decode ")
    pool = names[int(replica >= setup.first_decode)] if two else ""
    return f"{pool}replica {replica}" + (f" rank {local}" if ranks_of(setup, replica) > 1 else "")


def _iterations(rank: int, log: np.ndarray, setup: ServingSetup) -> RankTrack:
    rules = rules_of(setup, rank)
    lanes = {lane: number for number, lane in enumerate(np.unique(log["lane"]).tolist())}
    spans = []
    for row in log:
        start, stage = float(row["start_us"]), lanes[int(row["lane"])]
        prompts, decodes = int(row["prefill_tokens"]), int(row["decodes"])
        kind = "mixed" if prompts and decodes else "prefill" if prompts else "decode"
        arguments = {name: float(row[name]) for name in ("decodes", "prefill_tokens", "decode_context", "samples")}
        stream = f"iterations {stage + 1}" if len(lanes) > 1 else "iterations"
        spans.append(TrackSpan(f"{prompts} + {decodes}", start, float(row["end_us"]) - start, stream, kind, arguments))
    times = log["start_us"].tolist()
    counters = {
        "KV memory in use, %": (100 * log["blocks"] / max(rules.blocks, 1)).tolist(),
        "requests waiting": log["waiting"].astype(float).tolist(),
        "sequences decoding": log["decodes"].tolist(),
        "prompt tokens": log["prefill_tokens"].tolist(),
    }
    named = {name: list(zip(times, values, strict=True)) for name, values in counters.items()}
    return RankTrack(rank_name(rank, setup), spans, counters=named)


def _requests(came: np.ndarray) -> list[TrackSpan]:
    rows: list[tuple[float, int]] = []  # (when it is free, its number)
    spans = []
    for request in came[np.argsort(came["arrival_us"], kind="stable")]:
        begin, finish = float(request["arrival_us"]), float(request["finish_us"])
        row = heapq.heappop(rows)[1] if rows and rows[0][0] <= begin else len(rows)
        heapq.heappush(rows, (finish, row))
        stream = f"row {row + 1}"
        names = ("input_tokens", "output_tokens", "preemptions", "hit_tokens")
        arguments = {name: int(request[name]) for name in names}
        spans.append(TrackSpan(f"request {request['request']}", begin, finish - begin, stream, "request", arguments))
        moved = float(request["moved_us"])
        decode = float(request["prefilled_us"]) + moved
        parts = [(name, float(request[start]), float(request[end])) for name, start, end in PHASES]
        parts += [("KV transfer", decode - moved, decode)] if moved > 0 else []
        parts += [("decode", decode, finish)]
        spans += [TrackSpan(name, start, end - start, stream, name) for name, start, end in parts if end > start]
    return spans
