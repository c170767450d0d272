"""Results of benchmarks with a row for each request: vLLM's ``bench serve``, SGLang's ``bench_serving``, guidellm,
aiperf and inference-perf. Requests that failed are left out and counted.

Fields as these write them: vLLM 0.33 (``vllm/benchmarks/serve.py``, with ``--save-detailed``), SGLang 0.5
(``bench_serving.py``, with ``--output-details``), guidellm 0.3 to 0.6 (``benchmarks.json``), aiperf 0.13
(``profile_export.jsonl``), inference-perf 0.2 and later (``per_request_lifecycle_metrics.json``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .rows import RequestRows, RequestTraceError, field_at, table_of, without

FAILED = "they failed"
WARM_UP = "they are of the warm-up"


def read_engine_bench(path: Path, records: list[Any]) -> RequestRows:
    """A run of vLLM's or SGLang's own benchmark: lists with an entry for each request."""
    import pandas as pd

    _check_one(path, len(records), "runs", "keep the line of one run")
    run = records[0]
    names = ("input_lens", "output_lens", "start_times", "errors")
    lists = {name: run[name] for name in names if isinstance(run.get(name), list) and run[name]}
    for name in names[:2]:
        if name not in lists:
            raise RequestTraceError(
                f"{path} lacks {name}: it has sums alone; run the benchmark with --save-detailed (vLLM) or "
                "--output-details (SGLang)"
            )
    if len({len(values) for values in lists.values()}) > 1:
        counts = ", ".join(f"{name} {len(values):,}" for name, values in lists.items())
        raise RequestTraceError(f"{path} has lists of unlike lengths ({counts}): its run was cut off")
    table = pd.DataFrame(lists)
    errors = table["errors"].astype(bool) if "errors" in table else np.zeros(len(table), bool)
    table, notes = without(table, np.asarray(errors | (table["output_lens"] == 0), bool), FAILED, path)
    arrival = "start_times" if "start_times" in table else None
    return RequestRows(path, table, arrival, "input_lens", "output_lens", ordered=False, notes=notes)


def read_guidellm(path: Path, records: list[Any]) -> RequestRows:
    """One benchmark of guidellm's report."""
    benchmarks = records[0]["benchmarks"]
    if not isinstance(benchmarks, list) or not all(isinstance(benchmark, dict) for benchmark in benchmarks):
        raise RequestTraceError(f"{path}: benchmarks={str(benchmarks)[:60]} must be a list")
    _check_one(path, len(benchmarks), "benchmarks", "keep one, with jq '.benchmarks |= .[:1]'")
    groups = {name: field_at(benchmarks[0], f"requests.{name}") for name in ("successful", "errored", "incomplete")}
    done = groups["successful"]
    if not isinstance(done, list) or not done:
        raise RequestTraceError(f"{path}: benchmarks[0].requests.successful has no request that was answered")
    others = sum(len(group) for name, group in groups.items() if name != "successful" and isinstance(group, list))
    columns = {
        "request_start_time": ("request_start_time", "start_time", "info.timings.request_start"),
        "prompt_tokens": ("prompt_tokens", "input_metrics.text_tokens"),
        "output_tokens": ("output_tokens", "output_metrics.text_tokens"),
    }
    notes = (f"{others:,} of {others + len(done):,} requests are left out: {FAILED}",) if others else ()
    return RequestRows(
        path,
        table_of(done, columns),
        "request_start_time",
        "prompt_tokens",
        "output_tokens",
        ordered=False,
        notes=notes,
    )


def read_aiperf(path: Path, records: list[Any]) -> RequestRows:
    """aiperf's records of requests."""
    columns = {
        "request_start_ns": ("metadata.request_start_ns",),
        "input_sequence_length": ("metrics.input_sequence_length",),
        "output_sequence_length": ("metrics.output_sequence_length",),
        "phase": ("metadata.benchmark_phase",),
        "cancelled": ("metadata.was_cancelled",),
    }
    table = table_of(records, columns)
    failed = np.array([bool(record.get("error")) for record in records]) | (table["cancelled"] == True)  # noqa: E712
    failed |= table["output_sequence_length"].isna()
    warm_up = np.asarray(table["phase"] == "warmup") & ~np.asarray(failed)
    notes: tuple[str, ...] = ()
    for left_out, why in ((np.asarray(failed, bool), FAILED), (warm_up, WARM_UP)):
        rows, note = without(table, left_out[table.index], why, path)
        table, notes = rows, (*notes, *note)
    return RequestRows(
        path,
        table,
        "request_start_ns",
        "input_sequence_length",
        "output_sequence_length",
        unit_s=1e-9,
        ordered=False,
        notes=notes,
    )


def read_inference_perf(path: Path, records: list[Any]) -> RequestRows:
    """inference-perf's records of requests."""
    columns = {
        "start_time": ("start_time",),
        "input_tokens": ("info.input_tokens", "info.request_metrics.text.input_tokens"),
        "output_tokens": ("info.output_tokens", "info.response_metrics.output_tokens"),
    }
    failed = np.array([bool(record.get("error")) for record in records])
    table, notes = without(table_of(records, columns), failed, FAILED, path)
    return RequestRows(path, table, "start_time", "input_tokens", "output_tokens", ordered=False, notes=notes)


def _check_one(path: Path, count: int, what: str, way_out: str) -> None:
    if count != 1:
        raise RequestTraceError(f"{path} has {count:,} {what}: {way_out}")
