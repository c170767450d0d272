"""``opcast serving observe``: a trace sent to a live server, and what was seen of each request."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..datasets.loading import choice, flag, load, number, whole
from ..datasets.reading import read_text
from ..simulator.question.canonical import RequestError
from ..simulator.question.traffic import RequestTraffic
from .show import BadInputError, print_json, say, table, wants_json
from .validate import progress_bar
from .writing import check_place, write, write_text

if TYPE_CHECKING:
    from ..harness.serving_client import ObservedRequest, SentRequest
    from ..simulator.serving.loop import RequestChunk
    from ..simulator.serving.streams import RequestStream

ADDED = ("traffic.", "about.")
LOW_ID, HIGH_ID = (
    1_000,
    31_000,
)  # of token numbers in prompts: words in the vocabularies of all models known here (judged)
SECONDS_MOST = 24 * 3600.0
SHORTEST = 0.8  # of the longest: lengths that a row of served runs may have (docs/serving.md)
OF_ROW = ("stack", "version", "model_canon", "gpu_canon", "tp")  # what a row needs to be told
FIELDS = (
    *(*OF_ROW, "concurrency", "input_len_tokens", "output_len_tokens", "lengths"),
    *("ttft_ms", "tpot_ms"),
)


def run(config: dict[str, Any]) -> int:
    """Send, print and write; returns the exit code, 1 where no request was answered."""
    from ..harness.serving_client import SendingPlan, endpoint_of, observe
    from ..simulator.serving.requests import stream

    as_json = wants_json(config)
    for name in ("url", "model_name", "output"):
        if not isinstance(config[name], str) or not config[name]:
            raise BadInputError(
                f"`opcast serving observe` needs {name}=…: `opcast serving observe --help` has an example"
            )
    endpoint_of(config["url"])
    output = Path(config["output"]).expanduser()
    check_place("output", output)
    most = whole(BadInputError, "most_requests", config["most_requests"], 1)
    seconds = number(BadInputError, "seconds", config["seconds"])
    if not 0 < seconds <= SECONDS_MOST:
        raise BadInputError(f"seconds={config['seconds']} must be more than 0 and at most {SECONDS_MOST:,.0f}")
    choice(BadInputError, "prompt", config["prompt"], ("ids", "words"))
    traffic = load(RequestTraffic, dict(config["traffic"] or {}), RequestError, "traffic", "setting")
    if traffic.turns > 1:
        raise BadInputError(f"traffic.turns={traffic.turns}: requests are sent one by one; leave it out")
    row = row_of(config, traffic) if config["row"] else None
    source = stream(traffic)
    requests = to_send(source, most, config["prompt"], traffic.seed)
    if source.requests > most:
        say(f"the first {most:,} of {source.requests:,} requests are sent (most_requests)")
    extra = (("ignore_eos", True),) if flag(BadInputError, "ignore_eos", config["ignore_eos"]) else ()
    clients = traffic.concurrency
    plan = SendingPlan(config["url"], config["model_name"], seconds, clients, key_of(config["key_file"]), extra)
    rows: list[ObservedRequest] = []
    try:
        with progress_bar(len(requests)) as advance:
            rows.extend(observe(requests, plan, advance))  # keeps what came before a Ctrl-C
    finally:
        if rows:
            write("output", output, partial(write_observed, rows))
    answer = summary(rows, output)
    if row is not None and answer["answered"]:
        append_row(Path(str(config["row"])).expanduser(), row | means(rows, answer))
    print_json(answer) if as_json else show(answer)
    return 0 if answer["answered"] else 1


def key_of(path: Any) -> str:
    """The first line of a file with a key; empty where none is named."""
    if path is None:
        return ""
    return (read_text(Path(str(path)).expanduser(), BadInputError, f"key_file={path}").splitlines() or [""])[0].strip()


def to_send(source: RequestStream, most: int, prompt: str, seed: int) -> list[SentRequest]:
    """The first requests of a stream, with prompts whose tokens are alike where the stream says that they share."""
    from ..harness.serving_client import SentRequest

    requests: list[SentRequest] = []
    for chunk in source.chunks:
        for row in range(min(len(chunk.input), most - len(requests))):
            ids = prompt_ids(source, chunk, row, seed, len(requests))
            text: Sequence[int] | str = ids if prompt == "ids" else " ".join(f"w{number}" for number in ids)
            arrival_s = float(chunk.arrival_us[row]) / 1e6
            requests.append(SentRequest(arrival_s, text, len(ids), int(chunk.output[row])))
        if len(requests) == most:
            break
    return requests


def prompt_ids(source: RequestStream, chunk: RequestChunk, row: int, seed: int, number_sent: int) -> list[int]:
    """Token numbers of a prompt: of its shared content first, then those of this request alone."""
    length, shared = int(chunk.input[row]), int(min(chunk.shared[row], chunk.input[row]))
    contents: list[np.ndarray] = []
    if shared and len(chunk.keys):
        first = int(chunk.keys[row])
        blocks = -(-shared // source.key_tokens)
        keys = source.keys[first : first + blocks].tolist()
        contents = [drawn_ids((seed, 1, key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF), source.key_tokens) for key in keys]
    elif shared:
        contents = [drawn_ids((seed, 2, int(chunk.prefix[row]) & 0xFFFFFFFF), shared)]
    begun = np.concatenate([*contents, np.zeros(0, np.int64)])[:shared]
    alone = drawn_ids((seed, 3, number_sent), length - len(begun))
    return [int(token) for token in (*begun, *alone)]


def drawn_ids(key: Sequence[int], count: int) -> np.ndarray:
    """The same numbers for the same key; int64 [count]."""
    return np.random.default_rng(key).integers(LOW_ID, HIGH_ID, count)


def write_observed(rows: Sequence[ObservedRequest], path: Path) -> None:
    """Each request as a row of Parquet: ``arrival_s``, ``input_tokens`` and ``output_tokens`` as in a trace of opcast's
    own, then times in milliseconds, NaN where it has none; ``itl_ms`` lists the times between its tokens."""
    times = [times_ms(row) for row in rows]
    columns: dict[str, Any] = {
        name: [getattr(row, name) for row in rows]
        for name in ("request", "arrival_s", "sent_s", "input_tokens", "output_tokens", "asked_tokens", "error")
    }
    for name in ("ttft_ms", "tpot_ms", "e2e_ms", "itl_ms"):
        columns[name] = pa.array(
            [time[name] for time in times], pa.list_(pa.float64()) if name == "itl_ms" else pa.float64()
        )
    pq.write_table(pa.table(columns), path, compression="zstd")


def times_ms(row: ObservedRequest) -> dict[str, Any]:
    """TTFT, TPOT, end to end and the times between tokens of a request, in milliseconds; None where it has none."""
    if row.error or not row.token_s:
        return {"ttft_ms": None, "tpot_ms": None, "e2e_ms": None, "itl_ms": []}
    first, last = row.token_s[0], row.token_s[-1]
    tpot_ms = 1e3 * (last - first) / (row.output_tokens - 1) if row.output_tokens > 1 else None
    gaps = [1e3 * float(gap) for gap in np.diff(row.token_s)]
    return {"ttft_ms": 1e3 * first, "tpot_ms": tpot_ms, "e2e_ms": 1e3 * row.end_s, "itl_ms": gaps}


def summary(rows: Sequence[ObservedRequest], output: Path) -> dict[str, Any]:
    """What came of the run, as plain values."""
    times = [times_ms(row) for row in rows if not row.error]
    spreads = {name: spread([time[name] for time in times if time[name] is not None])
               for name in ("ttft_ms", "tpot_ms", "e2e_ms")}  # fmt: skip
    errors: dict[str, int] = {}
    for row in rows:
        if row.error:
            errors[row.error] = errors.get(row.error, 0) + 1
    return {
        "output": str(output),
        "sent": len(rows),
        "answered": len(times),
        **spreads,
        "itl_ms": spread([gap for time in times for gap in time["itl_ms"]]),
        "output_tokens": sum(row.output_tokens for row in rows if not row.error),
        "errors": errors,
    }


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles; None of nothing."""
    if not values:
        return None
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return {"mean": float(np.mean(values)), "p50": p50, "p90": p90, "p99": p99}


def show(answer: Mapping[str, Any]) -> None:
    """The summary as a table, and what went wrong."""
    names = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2e_ms": "end to end"}
    lines = [
        (shown, *(f"{answer[name][part]:,.1f}" for part in ("mean", "p50", "p90", "p99")))
        for name, shown in names.items()
        if answer[name] is not None
    ]
    if lines:
        table("milliseconds, seen", ("", "mean", "p50", "p90", "p99"), lines)
    print(f"{answer['answered']:,} of {answer['sent']:,} requests were answered: {answer['output']}")
    for error, count in answer["errors"].items():
        say(f"{count:,} times: {error}")


# --- a row for `opcast validate` -----------------------------------------------------------------------


def row_of(config: Mapping[str, Any], traffic: RequestTraffic) -> dict[str, Any]:
    """What a row of served runs says beside its times. BadInputError where something is not told."""
    about = dict(config["about"] or {})
    if missing := [name for name in OF_ROW if about.get(name) is None]:
        raise BadInputError(f"row={config['row']} needs about.{missing[0]}=…: docs/serving.md says what it is")
    if unknown := [name for name in about if name not in OF_ROW]:
        raise BadInputError(f"about.{unknown[0]} is no column that is written: add it to the file by hand")
    if traffic.arrival != "closed":
        raise BadInputError(
            f"row={config['row']} is of clients that wait for their answers: traffic.arrival=closed "
            "traffic.concurrency=…"
        )
    check_place("row", Path(str(config["row"])).expanduser())
    return {name: about[name] for name in OF_ROW} | {"concurrency": traffic.concurrency}


def means(rows: Sequence[ObservedRequest], answer: Mapping[str, Any]) -> dict[str, Any]:
    """Lengths and times of a row. BadInputError for lengths that such a table does not have."""
    answered = [row for row in rows if not row.error]
    lengths: dict[str, Any] = {}
    fixed = True
    for name, column in (("input_tokens", "input_len_tokens"), ("output_tokens", "output_len_tokens")):
        counts = [getattr(row, name) for row in answered]
        least, most = min(counts), max(counts)
        if least < int(SHORTEST * most):
            raise BadInputError(
                f"row=…: {name} are from {least:,} to {most:,}; such a table has fixed lengths, or from {SHORTEST} of "
                "the longest up; what was seen is in the output all the same"
            )
        fixed = fixed and least == most
        lengths[column] = most
    tpot = answer["tpot_ms"]
    return lengths | {
        "lengths": "fixed" if fixed else "uniform",
        "ttft_ms": f"{answer['ttft_ms']['mean']:.6g}",
        "tpot_ms": f"{tpot['mean']:.6g}" if tpot else "",
    }


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row to a CSV file, whole or not at all. BadInputError for a file with other columns."""
    before = path.read_text(encoding="utf-8") if path.exists() else ",".join(FIELDS) + "\n"
    names = next(csv.reader(io.StringIO(before)), [])
    if missing := [name for name in FIELDS if name not in names]:
        raise BadInputError(f"row={path} is a file without the column {missing[0]}; name another")
    text = io.StringIO(before if before.endswith("\n") else before + "\n")
    text.seek(0, io.SEEK_END)
    csv.DictWriter(text, names, restval="", lineterminator="\n").writerow(row)
    write_text("row", path, text.getvalue())
    say(f"row: {path} (opcast validate truth={path})")
