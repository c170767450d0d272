"""``opcast serving``: traffic through the replicas of a served model; its capacity; latency against rate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..datasets.counts import counted
from ..datasets.loading import choice, number, whole
from ..simulator.report import served_view
from ..simulator.report.served import ServingReport
from ..simulator.search.spread import Crew, processors
from . import resolve
from .composing import STEP_CHOICE
from .questions import as_list
from .serving_observed import observed_beside, show_observed
from .serving_unread import check_read, check_words
from .show import BadInputError, print_json, say, show, show_answer, table, wants_json
from .simulate import apart, spelled
from .validate import progress_bar
from .writing import folder_at, places, write, write_text

if TYPE_CHECKING:
    from ..simulator.question.serving import ServingRequest
    from ..simulator.serving.capacity import Apply, Capacity
    from ..simulator.serving.serve import ServedTraffic

SUBJECT = "what"
FREE_CHOICE = {**STEP_CHOICE, "engine": "engine.serving", "args": "args"}
ADDED = (
    "device.",
    "cluster.",
    "stack.",
    "precision.quantization",
    "precision.kv_dtype",
    "law",
    "decode_pool.",
    "second_kind.",
    "traffic.turn_input",
)
KINDS = ("run", "capacity", "sweep", "compare", "caps", "calibrate")
MOST_LOGGED, FEW_LOGGED = 1_000_000, 1_000  # iterations that traces are written of
FILES = ("requests", "trace", "report", "picture")
OF_LEARNING = ("log", "output")
OF_ONE_RUN = {
    "capacity": ("requests", "trace", "chakra"),
    "sweep": ("requests", "trace", "chakra"),
    "caps": ("requests", "trace", "report", "chakra"),
}
WORTH_S = 5.0  # of runs that are left, from which on processes for them pay


def words(arguments: Sequence[str]) -> list[str]:
    """The words of a call, checked: settings that would not be read are refused as they were typed.

    ``launch=FILE`` becomes the settings of the servers that the file starts; what else is given goes before them.
    """
    files, rest, names = apart(arguments)
    if files:
        from ..simulator.search.served.servers import settings_of_servers

        settings = settings_of_servers(Path(files[-1]))
        if "model" not in names | settings.keys():
            raise BadInputError(f"launch={files[-1]} does not say a model that opcast knows: add model=llama3_8b")
        if not names & {"cluster", "device"}:
            raise BadInputError(f"launch={files[-1]} does not say what its GPUs are: add cluster=dgx_h100, or another")
        rest = [*(f"{name}={spelled(value)}" for name, value in settings.items() if name not in names), *rest]
    check_words(rest)
    return rest


def run(config: dict[str, Any]) -> int:
    """Serve and print; returns the exit code."""
    choice(BadInputError, "what", config["what"], KINDS)
    as_json = wants_json(config)
    places(config, *FILES)
    if config["observed"]:
        config = with_observed_traffic(config)
    if config["what"] == "calibrate":
        from .serving_calibrate import calibrate

        return calibrate(config)
    if unread := [name for name in OF_LEARNING if config[name]]:
        raise BadInputError(
            f"{unread[0]}={config[unread[0]]} is of `opcast serving calibrate`: leave it out, or ask for it"
        )
    request = resolve.request_of("serving", config)
    check_read(config, request)
    if config["what"] == "run":
        return run_once(config, request, as_json)
    for name in OF_ONE_RUN.get(config["what"], (*FILES, "chakra")):
        if config[name]:
            raise BadInputError(
                f"{name}={config[name]} is of one run: leave it out of `opcast serving {config['what']}`"
            )
    return run_many(config, request, as_json)


def with_observed_traffic(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the requests that were seen as its trace, where it names no trace."""
    if config["what"] != "run":
        raise BadInputError(
            f"observed={config['observed']} is of one run: leave it out of `opcast serving {config['what']}`"
        )
    traffic = dict(config["traffic"] or {})
    return {**config, "traffic": {**traffic, "trace": traffic.get("trace") or str(config["observed"])}}


def run_many(config: dict[str, Any], request: ServingRequest, as_json: bool) -> int:
    """The same traffic several times: a sweep of rates, the largest that is good enough, or pools side by side."""
    from ..simulator.serving import studies
    from ..simulator.serving.comparison import ways_table

    bench, apply = resolve.bench(config), apply_of(config)
    if config["what"] == "caps":
        from . import serving_caps

        return serving_caps.run(config, request, bench, apply, as_json)
    if config["what"] == "compare":
        found = studies.serving_ways(request, bench, apply)
        if as_json:
            print_json(studies.ways_values(found))
        else:
            show(ways_table(found))
        return 0
    if config["what"] == "sweep":
        reports = studies.serving_sweep(request, checked_rates(config["rates"]), bench, apply)
        write_page(config, request, reports[-1][1], reports)
        if as_json:
            print_json(studies.sweep_values(reports))
        else:
            show_sweep(reports, unit_of(request))
        return 0
    best = studies.serving_capacity(request, bench, apply)
    write_page(config, request, best.at_rate)
    if as_json:
        print_json(best.to_dict())
    else:
        show_capacity(best, unit_of(request))
    return 0


def checked_rates(rates: Any) -> list[float]:
    """The rates of a sweep, of one or a list of them. BadInputError for one that is no number above 0."""
    checked = [number(BadInputError, "rates", rate) for rate in as_list(rates)]
    if not all(checked):
        raise BadInputError(f"rates={rates} must all be more than 0")
    return checked


def unit_of(request: ServingRequest) -> str:
    """What a rate counts: of a trace it is how many times faster than recorded."""
    return "times its speed" if request.traffic.trace else "requests/s"


def apply_of(config: Mapping[str, Any]) -> Apply:
    """What makes runs: the first here, the others in processes where they take long enough."""
    crew = Crew(whole(BadInputError, "workers", config["workers"]) or processors())

    def apply(function: Callable[..., Any], parts: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        began = time.perf_counter()
        with progress_bar(len(parts)) as advance:
            for first_part in parts[:1]:
                yield function(*first_part)
                advance(1)
            left_s = (time.perf_counter() - began) * (len(parts) - 1)
            for result in (crew if left_s > WORTH_S else Crew()).apply(function, parts[1:]):
                yield result
                advance(1)

    return apply


def run_once(config: dict[str, Any], request: ServingRequest, as_json: bool) -> int:
    """One run, with the files that are asked for."""
    from ..simulator.serving.serve import Keeping
    from ..simulator.serving.timeline import MOST_ITERATIONS

    logged = MOST_ITERATIONS if config["trace"] else 0
    folder = folder_at("chakra", config["chakra"]) if config["chakra"] else None
    if folder is not None:
        logged = max(logged, most_iterations(request))
    keeping = Keeping(logged, bool(config["requests"] or config["trace"] or folder))
    served = resolve.bench(config).serving(request, keeping, progress_bar)
    if config["requests"]:
        say(f"requests: {write_rows(served, Path(str(config['requests'])))}")
    if config["trace"]:
        say(f"timeline: {write_timeline(served, Path(str(config['trace'])))} (https://ui.perfetto.dev)")
    if folder is not None:
        write_traces(served, folder)
    write_page(config, request, served.report)
    if config["picture"]:
        from ..simulator.serving.fleet_picture import draw_fleet

        if not served.report.fleet_over_time:
            raise BadInputError(
                f"picture={config['picture']}: the run ended before the autoscaler looked; give a shorter "
                "autoscale.interval_s, or more requests"
            )
        drawing = draw_fleet(f"replicas by autoscale.policy={request.autoscale.policy}", served.report.fleet_over_time)
        say(f"picture: {write_text('picture', Path(str(config['picture'])), drawing)}")
    beside = observed_beside(Path(str(config["observed"])).expanduser(), served.report) if config["observed"] else None
    if as_json:
        print_json(served.report.to_dict() | ({"observed": beside} if beside else {}))
        return 0
    show_report(served.report)
    if beside:
        show_observed(beside)
    return 0


def write_rows(served: ServedTraffic, path: Path) -> Path:
    """Every request as a row of Parquet. BadInputError where that cannot be written."""
    from ..simulator.serving.requests_table import columns, write_requests

    rows = columns(served.requests, served.host_us, served.bytes_per_token)
    return write("requests", path, partial(write_requests, rows))


def write_timeline(served: ServedTraffic, path: Path) -> Path:
    """Requests and iterations as trace events; says where it ends where that is before the traffic does."""
    from ..simulator.formats.perfetto import write_trace
    from ..simulator.serving.timeline import tracks

    logged, of = len(served.iterations), int(served.state.spans["iterations"].sum())
    if logged < of:
        say(f"the timeline shows the first {logged:,} of {counted(of, 'iteration')}")
    return write_trace(path, tracks(served.iterations, served.requests, served.setup))


def write_page(
    config: dict[str, Any],
    request: ServingRequest,
    report: ServingReport,
    rates: Sequence[tuple[float, ServingReport]] = (),
) -> None:
    """The HTML page, where one is asked for."""
    if not config["report"]:
        return
    from ..simulator.html import serving
    from ..simulator.html import write as write_html

    traffic = request.traffic
    sent = f"{traffic.arrival}, {traffic.rate:,g} requests/s" if traffic.arrival != "closed" else (
        f"{traffic.concurrency:,} clients"
    )  # fmt: skip
    facts: tuple[str, ...] = (str(traffic.trace) if traffic.trace else sent, f"scheduler {request.scheduler.policy}")
    if report.replicas > 1:
        facts = (*facts, f"router {request.router}")
    title = f"{config['model']['name']} on {resolve.device(config).name}" if request.step else "Served traffic"
    say(f"report: {write_html(serving.page(report, title, facts, rates), Path(str(config['report'])))}")


def show_report(report: ServingReport) -> None:
    """Times, throughput, memory, and what a reader should know."""
    times, *others = served_view.tables(report)
    if report.completed:
        show(times)
    else:
        print("milliseconds: none served")
    show_answer("", others, report.all_notes)


def show_capacity(best: Capacity, unit: str) -> None:
    """The rate, how sure it is, and what was tried."""
    tried = [(f"{rate:.4g}", f"{share:.1%}", "yes" if met else "no") for rate, share, met in sorted(best.tried)]
    table("rates tried", (unit, "had all of slo", "enough"), tried)
    sure = f", {best.interval[0]:.4g} to {best.interval[1]:.4g} over {len(best.rates)} seeds" if best.rates[1:] else ""
    print(f"capacity: {best.rate:.4g} {unit}{sure}, {best.requests_per_s_per_gpu:.4g} per GPU")
    if best.attained[1:]:
        print(f"at this rate {best.seeds_met} of {len(best.attained)} seeds have the share of slo; the first of them:")
    if best.rates_of_errors is not None:
        slow, fast = best.rates_of_errors
        print(f"by 90 % of the errors of known steps: {f'{slow:.4g}' if slow else 'none'} to {fast:.4g} {unit}")
    if best.p_p99_ttft_met is not None:
        print(f"the 99th percentile of TTFT is within slo.ttft_ms there with a chance of {best.p_p99_ttft_met:.0%}")
    show_report(best.at_rate)


def show_sweep(reports: Sequence[tuple[float, ServingReport]], unit: str) -> None:
    """Latency against rate, and the KV memory of the fullest run."""
    show(served_view.sweep_table(reports, unit))
    fullest = max((report for _, report in reports), key=lambda report: report.kv_peak)
    for name, kv in (fullest.pools or {"": vars(fullest)}).items():
        print(f"KV memory{f' of the {name} pool' if name else ''}: {served_view.memory_text(kv)}")
    for note in dict.fromkeys(note for _, report in reports for note in report.notes):
        say(note)


def most_iterations(request: ServingRequest) -> int:
    """As many iterations as the traffic may take: each request alone, where the number of requests is known."""
    traffic = request.traffic
    if traffic.trace is not None:
        return MOST_LOGGED
    return min(MOST_LOGGED, round(2 * traffic.requests * (traffic.output.average + 1)) + FEW_LOGGED)


def write_traces(served: ServedTraffic, folder: Path) -> None:
    """Write the iterations as execution traces."""
    from ..simulator.serving.emitting import emit

    files = emit(served.iterations, served.requests, served.bytes_per_token, folder)
    say(f"traces: {len(files):,} in {folder}")
    if served.report.iterations > len(served.iterations):
        say(f"of {served.report.iterations:,} iterations the first {len(served.iterations):,} are in the traces")
