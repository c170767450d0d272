"""``opcast serving``: traffic through the replicas of a served model; its capacity; latency against rate."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..datasets.loading import choice, number
from ..simulator.serving.report import ServingReport, TimeSpread
from . import resolve
from .show import BadInputError, print_json, say, table, wants_json
from .validate import progress_bar
from .writing import check_place, write

if TYPE_CHECKING:
    from ..simulator.question.serving import ServingRequest

SUBJECT = "what"
FREE_CHOICE = {"device": "device.id", "model": "+model.path"}
ADDED = ("device.", "cluster.", "stack.", "precision.quantization", "law", "decode_pool.")
KINDS = ("run", "capacity", "sweep")


def run(config: dict[str, Any]) -> int:
    """Serve and print; returns the exit code."""
    choice(BadInputError, "what", config["what"], KINDS)
    as_json = wants_json(config)
    if config["output"]:
        check_place("output", Path(str(config["output"])))
    request = resolve.serving_request(config)
    bench = resolve.bench(config)
    if config["what"] == "run":
        return run_once(config, request, as_json)
    from ..simulator.serving.capacity import capacity, sweep
    from ..simulator.serving.connect import replicas_of
    from ..simulator.serving.serve import serve

    own, decoder = replicas_of(request, bench)

    def answer(asked: ServingRequest) -> ServingReport:
        return serve(asked, own, decoder).report

    if config["what"] == "sweep":
        rates = [number(BadInputError, "rates", each) for each in config["rates"] or []]
        if not all(rates):
            raise BadInputError(f"rates={config['rates']} must all be more than 0")
        found = sweep(request, rates, answer)
        if as_json:
            print_json({"rates": [{"rate": rate} | without_curves(report) for rate, report in found]})
        else:
            show_sweep(found)
        return 0
    best = capacity(request, answer)
    if as_json:
        print_json(best.to_dict())
        return 0
    tried = [(f"{rate:.4g}", f"{share:.1%}", "yes" if met else "no") for rate, share, met in sorted(best.tried)]
    table("rates tried", ("requests/s", "had all of slo", "enough"), tried)
    say(f"capacity: {best.rate:.4g} requests/s, {best.requests_per_s_per_gpu:.4g} per GPU")
    show(best.at_rate)
    return 0


def run_once(config: dict[str, Any], request: ServingRequest, as_json: bool) -> int:
    """One run, its requests to Parquet where that is asked for."""
    from ..simulator.serving.serve import Keeping

    served = resolve.bench(config).serving(request, Keeping(requests=bool(config["output"])), progress_bar)
    if config["output"]:
        fill = partial(write_requests, served.requests)
        say(f"requests: {write('output', Path(str(config['output'])), fill)}")
    if as_json:
        print_json(served.report.to_dict())
    else:
        show(served.report)
    return 0


def without_curves(report: ServingReport) -> dict[str, Any]:
    """The report without what is long."""
    return {name: value for name, value in report.to_dict().items() if name not in ("cdf", "over_time", "backlog")}


def write_requests(requests: Any, path: Path) -> None:
    """One row per request; a rejected one has the rank -1."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({name: requests[name] for name in requests.dtype.names}), path, compression="zstd")


def show(report: ServingReport) -> None:
    """Times, throughput, memory, and what a reader should know."""
    spreads = {
        "TTFT": report.ttft_ms,
        "TPOT": report.tpot_ms,
        "ITL": report.itl_ms,
        "end to end": report.e2e_ms,
        "queue": report.queue_ms,
        "per output token": report.normalised_ms,
    }
    if report.kv_transfer_ms is not None:
        spreads["KV transfer"] = report.kv_transfer_ms
    table("milliseconds", ("", "mean", "p50", "p90", "p99"), [(name, *figures(each)) for name, each in spreads.items()])
    rows: list[tuple[str, str]] = [
        ("requests", f"{report.completed:,} served, {report.rejected:,} rejected, in {report.duration_s:,.1f} s"),
        ("throughput", f"{report.requests_per_s:,.3g} requests/s, {report.output_tokens_per_s:,.0f} output tokens/s"),
        ("per GPU", f"{report.output_tokens_per_s_per_gpu:,.1f} output tokens/s ({report.devices} GPUs)"),
        ("goodput", f"{report.goodput:,.3g} requests/s, {report.slo_attainment:.1%} of requests had all of slo"),
        ("KV memory", f"{report.kv_peak:.0%} in use at most; {report.preemptions:,} preemptions"),
        ("iterations", f"{report.iterations:,}, {report.mean_batch:,.1f} tokens each; {report.utilisation:.0%} busy"),
    ]
    if report.prefix_hit_share:
        rows.append(("prefix cache", f"{report.prefix_hit_share:.0%} of tokens were found"))
    rows += [(f"{name} pool", f"{each['kv_peak']:.0%} of KV memory at most") for name, each in report.pools.items()]
    table(f"{report.replicas} replicas", ("", ""), rows)
    for note in (report.overload, *report.notes):
        if note:
            say(note)


def figures(spread: TimeSpread) -> tuple[str, ...]:
    """Its figures as text."""
    return tuple(f"{value:,.1f}" for value in spread.to_dict().values())


def show_sweep(found: list[tuple[float, ServingReport]]) -> None:
    """Latency against rate."""
    heads = ("requests/s", "TTFT p50", "TTFT p90", "TPOT p50", "TPOT p90", "tokens/s", "slo", "")
    rows = [(f"{rate:.4g}", *sweep_figures(report)) for rate, report in found]
    table("latency against rate, milliseconds", heads, rows)


def sweep_figures(report: ServingReport) -> tuple[str, ...]:
    """A report as a row of :func:`show_sweep`."""
    return (
        f"{report.ttft_ms.p50:,.1f}",
        f"{report.ttft_ms.p90:,.1f}",
        f"{report.tpot_ms.p50:,.1f}",
        f"{report.tpot_ms.p90:,.1f}",
        f"{report.output_tokens_per_s:,.0f}",
        f"{report.slo_attainment:.1%}",
        "overload" if report.overload else "",
    )
