"""The requests of a trace as a stream: times, lengths and what prompts share, from the table of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..question.traffic import RequestTraffic, check_own_arrivals
from ..question.unread import changed, refuse_unread
from .arrivals import ArrivalClock, generators
from .streams import SECOND_US, RequestStream, chunk
from .trace_formats.drawn import drawn_requests, is_drawn
from .trace_formats.flat_tables import block_contents
from .trace_formats.reading import read_requests
from .trace_formats.rows import RequestRows, arrivals, complain, labels, tokens

MOONCAKE_BLOCK = 512  # tokens of one of its hashes


def trace_stream(traffic: RequestTraffic) -> RequestStream:
    """All requests of a trace file. RequestTraceError names the first bad row, RequestError a setting that the trace
    says itself."""
    assert traffic.trace is not None
    if is_drawn(traffic.trace):
        own_format = changed(traffic, ("trace_format", "tokenizer"), "traffic.")
        refuse_unread(own_format, f"with traffic.trace={traffic.trace}")
        rows = drawn_requests(traffic.trace)
    else:
        rows = read_requests(Path(traffic.trace).expanduser(), traffic.trace_format, traffic.tokenizer)
    if rows.arrival is None:
        rows = first_rows(rows, traffic.requests)
    table = rows.table
    inputs, outputs = tokens(rows, rows.input), tokens(rows, rows.output)
    times = arrival_times(rows, traffic)
    if rows.arrival is not None:
        check_own_arrivals(traffic)  # last: a damaged file is the fault to tell first
    more: dict[str, Any] = {}
    keys, prefix, shared = np.zeros(0, np.int64), None, None
    if "hash_ids" in table.columns:
        hashes = block_contents(rows)
        keys = np.concatenate([*hashes, np.zeros(0, np.int64)])
        more["keys"] = np.cumsum([0, *map(len, hashes)])[:-1].astype(np.int64)
        shared = np.minimum(inputs, np.array([len(row_hashes) for row_hashes in hashes]) * MOONCAKE_BLOCK)
    elif "prefix_id" in table.columns:
        prefix = labels(rows, "prefix_id").factorize()[0].astype(np.int64)  # NONE where there is none
        shared = inputs
        if "prefix_tokens" in table:
            columns = table.assign(prefix_tokens=table["prefix_tokens"].where(prefix >= 0, 0))
            named = RequestRows(rows.path, columns, rows.arrival, rows.input, rows.output)
            shared = np.minimum(tokens(named, "prefix_tokens", 0), inputs)
        shared = np.where(prefix < 0, 0, shared)
    if "class" in table.columns and traffic.classes:
        more["kind"] = class_codes(rows, [each.name for each in traffic.classes])
    shares = shared is not None and bool((shared > 0).any())
    if not rows.ordered and rows.arrival is not None:
        order = np.argsort(times, kind="stable")
        times, inputs, outputs = times[order], inputs[order], outputs[order]
        more = more | ({"kind": more["kind"][order]} if "kind" in more else {})
    requests = chunk(times, inputs, outputs, prefix, shared, **more)
    longest, answers, mean = int((inputs + outputs).max()), float(outputs.sum()), float(inputs.mean())
    return RequestStream(
        iter([requests]),
        len(table),
        traffic.concurrency,
        longest,
        answers,
        mean,
        shares,
        keys,
        MOONCAKE_BLOCK,
        rows.notes,
        "kind" in more,
    )


def class_codes(rows: RequestRows, names: list[str]) -> np.ndarray:
    """The class of each row by its name, int64 [n]. RequestTraceError for one that traffic.classes does not have."""
    texts = labels(rows, "class").astype(str)
    complain(rows, "class", ~texts.isin(names).to_numpy(bool), f"is none of traffic.classes: {', '.join(names)}")
    return texts.map({name: code for code, name in enumerate(names)}).to_numpy(np.int64)


def first_rows(rows: RequestRows, count: int) -> RequestRows:
    """The first requests of a file that has lengths alone, with a note about it."""
    note = "the file has lengths alone: requests come as traffic.arrival and traffic.rate say"
    if len(rows.table) > count:
        note += f"; the first {count:,} of {len(rows.table):,} (traffic.requests)"
    return RequestRows(rows.path, rows.table[:count], None, rows.input, rows.output, notes=(*rows.notes, note))


def arrival_times(rows: RequestRows, traffic: RequestTraffic) -> np.ndarray:
    """Arrivals in microseconds from 0 on, float64 [n]; drawn where the file has none."""
    if rows.arrival is None:
        return ArrivalClock(traffic, generators(traffic.seed)[0]).take(len(rows.table)) / traffic.speed
    times = arrivals(rows) * rows.unit_s
    return (times - times.min()) / traffic.speed * SECOND_US
