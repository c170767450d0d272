"""Logs of an engine's own steps: what was in each batch, and how long it took.

Read are forward-pass metrics of Dynamo and SGLang (JSON lines, ``.gz`` too, with or without the envelope of
``DYN_FPM_TRACE``), the lines of vLLM's ``--enable-logging-iteration-details``, SGLang's lines of decode batches, and
tables of one's own (``.csv``, ``.parquet`` or JSON lines) with the columns of :data:`COLUMNS`.
"""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..question.canonical import RequestError

COLUMNS = ("decodes", "decode_context", "prefill_tokens", "prefill_context", "prompts", "time_ms")
# vllm 0.18, v1/engine/core.py, log_iteration_details; later releases add the share of KV memory in use
VLLM = re.compile(
    r"Iteration\(\d+\): (\d+) context requests, (\d+) context tokens, (\d+) generation requests, "
    r"(\d+) generation tokens, iteration elapsed time: ([\d.]+) ms(?:, GPU KV cache usage: ([\d.]+)%)?"
)
VLLM_KV = re.compile(r"GPU KV cache size: ([\d,]+) tokens")
# sglang 0.5, managers/scheduler_metrics_mixin.py, log_prefill_stats and log_decode_stats
SGLANG_PROMPT = re.compile(r"Prefill batch[ \[\d\]]*[.,] ")
SGLANG_DECODE = re.compile(r"Decode batch[ \[\d\]]*[.,] #running-req: (\d+), .*?#(?:full )?token: (\d+), .*?"
                           r"gen throughput \(token/s\): ([\d.]+)")  # fmt: skip
SPEAKS_OF_TOKENS_GUESSED = "accept len:"
FEWEST = 20
LARGEST_BYTES = 1 << 30


class LoggedStep(NamedTuple):
    """A step: sequences that decode and their cached tokens (NaN: not said), new tokens of prompts and those cached
    before them, prompts, milliseconds."""

    decodes: float
    decode_context: float
    prefill_tokens: float
    prefill_context: float
    prompts: float
    time_ms: float


@dataclass(frozen=True)
class StepLog:
    """The steps of a log as columns [steps] of float64, in microseconds; ``left_out`` says how many and why."""

    decodes: np.ndarray
    decode_context: np.ndarray
    prefill_tokens: np.ndarray
    prefill_pairs: np.ndarray
    prefill_context: np.ndarray
    samples: np.ndarray
    time_us: np.ndarray
    left_out: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.time_us)

    def rows(self, chosen: np.ndarray) -> StepLog:
        """Some of the steps."""
        columns: dict[str, Any] = {name: column[chosen] for name, column in vars(self).items() if name != "left_out"}
        return StepLog(**columns, left_out=self.left_out)


def read_steps(path: Path, usual_context: float) -> StepLog:
    """The steps of a log. ``usual_context`` stands for the cached tokens of a sequence where the log does not say.

    RequestError for a file that is none, or that has too few steps.
    """
    steps, left_out = gather(path)
    if len(steps) < FEWEST:
        why = "".join(f"; {count:,} {reason}" for reason, count in left_out.items())
        raise RequestError(f"log={path} has {len(steps)} steps that can be used, {FEWEST} are needed{why}")
    return as_log(steps, left_out, usual_context)


def as_log(steps: Iterable[LoggedStep], left_out: Mapping[str, int], usual_context: float) -> StepLog:
    """Steps as columns."""
    decodes, context, new, cached, prompts, time_ms = np.array(list(steps), dtype=float).T
    decode_context = np.where(np.isfinite(context), context, usual_context * decodes)
    per_prompt = np.maximum(prompts, 1.0)
    pairs = new * (cached / per_prompt + (new / per_prompt + 1) / 2)
    return StepLog(decodes, decode_context, new, pairs, cached, decodes + prompts, 1e3 * time_ms, left_out)


def gather(path: Path) -> tuple[list[LoggedStep], dict[str, int]]:
    """The steps of a file of any of the formats, and how many were left out by why."""
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise RequestError(f"log={path} is larger than {LARGEST_BYTES >> 20:,} MiB: take a part of it")
        if path.suffix == ".parquet":
            return from_table(path)
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8", errors="replace") as file:
            lines = [line for line in file.read().splitlines() if line.strip()]
    except (OSError, EOFError) as error:
        raise RequestError(f"log={path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not lines:
        raise RequestError(f"log={path} is empty")
    if path.suffix == ".csv" or lines[0].split(",")[0].strip() in COLUMNS:
        return from_table(path)
    if lines[0].lstrip().startswith("{"):
        return sifted(from_json(path, lines))
    readers: tuple[Callable[[list[str]], Iterator[LoggedStep | str]], ...] = (from_vllm, from_sglang)
    read = [sifted(reader(lines)) for reader in readers]
    steps, left_out = max(read, key=lambda one: (len(one[0]), sum(one[1].values())))
    if not steps and not left_out:
        raise RequestError(
            f"log={path} has no steps: start vLLM with --enable-logging-iteration-details, SGLang with "
            "--decode-log-interval 1, Dynamo with DYN_FPM_TRACE=1 DYN_FPM_MODE=full, or give a table with the columns "
            f"{', '.join(COLUMNS)}"
        )
    return steps, left_out


def sifted(steps: Iterator[LoggedStep | str]) -> tuple[list[LoggedStep], dict[str, int]]:
    """The steps that can be used; the others are words that say why not."""
    steps_read: list[LoggedStep] = []
    left_out: dict[str, int] = {}
    for step in steps:
        why = step if isinstance(step, str) else unusable(step)
        if why:
            left_out[why] = left_out.get(why, 0) + 1
        elif not isinstance(step, str):
            steps_read.append(step)
    return steps_read, left_out


def unusable(step: LoggedStep) -> str:
    """Why a step says nothing; empty where it does."""
    if not step.decodes + step.prefill_tokens:
        return "are of an engine that waits"
    if not (math.isfinite(step.time_ms) and step.time_ms > 0):
        return "have no time"
    if min(step.decodes, step.prefill_tokens, step.prefill_context, step.prompts) < 0:
        return "have a number below 0"
    return ""


def from_json(path: Path, lines: list[str]) -> Iterator[LoggedStep | str]:
    """Forward-pass metrics, or a table's rows as objects."""
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            yield "are no JSON (cut off?)"
            continue
        record = record.get("event", record) if isinstance(record, dict) else {}
        record = record.get("fpm", record) if isinstance(record, dict) else {}
        try:
            yield forward_pass(record) if "scheduled_requests" in record else from_record(record)
        except (TypeError, ValueError, KeyError) as error:
            what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise RequestError(f"log={path} line {number}: {what}; a table has {', '.join(COLUMNS)}") from None


def forward_pass(record: Mapping[str, Any]) -> LoggedStep | str:
    """Dynamo's ForwardPassMetrics version 1 (components/src/dynamo/common/forward_pass_metrics.py), which SGLang writes
    too; ``wall_time`` is in seconds, from schedule to update."""
    if record.get("version", 1) != 1:
        return f"are of version {record.get('version')!r} of forward-pass metrics"
    batch = record["scheduled_requests"]
    names = ("num_decode_requests", "sum_decode_kv_tokens", "sum_prefill_tokens", "sum_prefill_kv_tokens",
             "num_prefill_requests")  # fmt: skip
    counts = [float(batch.get(name, 0)) for name in names]
    return LoggedStep._make([*counts, 1e3 * float(record["wall_time"])])


def from_record(record: Mapping[str, Any]) -> LoggedStep:
    """A row of a table with the columns of :data:`COLUMNS`; those of prompts may be left out."""
    new = float(record.get("prefill_tokens") or 0)
    context = record.get("decode_context")
    return LoggedStep(
        float(record.get("decodes") or 0),
        math.nan if context is None else float(context),
        new,
        float(record.get("prefill_context") or 0),
        float(record.get("prompts") or (new > 0)),
        float(record["time_ms"]),
    )


def from_table(path: Path) -> tuple[list[LoggedStep], dict[str, int]]:
    """A table of one's own."""
    import pandas as pd

    try:
        table = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise RequestError(f"log={path} cannot be read: {str(error).splitlines()[0]}") from None
    if missing := [name for name in ("time_ms",) if name not in table] or (
        ["decodes"] if not {"decodes", "prefill_tokens"} & set(table) else []
    ):
        raise RequestError(f"log={path} lacks the column {missing[0]}: a table of steps has {', '.join(COLUMNS)}")
    plain = table[[name for name in COLUMNS if name in table]].astype(object)
    records = plain.where(plain.notna(), None).to_dict("records")
    try:
        return sifted(from_record({str(name): value for name, value in record.items()}) for record in records)
    except (TypeError, ValueError) as error:
        raise RequestError(f"log={path}: {error}") from None


def from_vllm(lines: list[str]) -> Iterator[LoggedStep | str]:
    """vLLM's lines. Cached tokens follow from the share of KV memory in use, where the line has it."""
    kv_tokens = math.nan
    for line in lines:
        if size := VLLM_KV.search(line):
            kv_tokens = float(size[1].replace(",", ""))
        if not (match := VLLM.search(line)):
            continue
        prompts, new, decodes, generated = (float(match[index]) for index in range(1, 5))
        if decodes and generated > decodes:
            yield "guess tokens ahead, of which the line does not say how many"
            continue
        context = kv_tokens * float(match[6]) / 100 - new if match[6] else math.nan
        yield LoggedStep(decodes, max(context, 0.0) if decodes else 0.0, new, 0.0, prompts, float(match[5]))


def from_sglang(lines: list[str]) -> Iterator[LoggedStep | str]:
    """SGLang's lines of decode batches: a step took as long as its sequences' tokens at the throughput since the last
    such line, where nothing else ran since and as many sequences did."""
    before = -1.0
    for line in lines:
        if SGLANG_PROMPT.search(line):
            before = -1.0
        elif match := SGLANG_DECODE.search(line):
            running, tokens, rate = (float(match[index]) for index in (1, 2, 3))
            same, before = running == before, running
            if SPEAKS_OF_TOKENS_GUESSED in line:
                yield "guess tokens ahead, of which the line does not say how many"
            elif not same or not rate:
                yield "follow a prompt, or another number of sequences"
            else:
                yield LoggedStep(running, tokens, 0.0, 0.0, 0.0, 1e3 * running / rate)
