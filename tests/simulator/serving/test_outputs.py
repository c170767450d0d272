"""What a run writes down: energy, price, intervals, the timeline, the table of requests and the page."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opcast.simulator.formats.perfetto import write_trace
from opcast.simulator.html.page import Figure, render
from opcast.simulator.html.serving import page
from opcast.simulator.question.request_classes import ServingTargets
from opcast.simulator.question.serving import DecodePool, IterationLaw, KvMemory, ServingRequest
from opcast.simulator.question.traffic import Lengths, RequestTraffic
from opcast.simulator.report.served import ServingReport
from opcast.simulator.serving import serve as serving
from opcast.simulator.serving.capacity import PRECISION, PlayedReplicas, capacity, largest
from opcast.simulator.serving.confidence import chance_met
from opcast.simulator.serving.figures import Z90, StepFigures, at_quantile
from opcast.simulator.serving.iteration import iteration_us
from opcast.simulator.serving.replica import ServedReplica, by_hand
from opcast.simulator.serving.report import carried_on
from opcast.simulator.serving.requests_table import columns
from opcast.simulator.serving.timeline import tracks

LAW = IterationLaw(base_us=5000.0, decode_us=20.0, decode_context_us=0.02, prefill_token_us=60.0)
TRAFFIC = RequestTraffic(
    rate=20.0, requests=80, input=Lengths("uniform", low=1, high=300), output=Lengths("uniform", low=1, high=40)
)
USUAL = ServingRequest(law=LAW, kv=KvMemory(200, 16, 131072.0), traffic=TRAFFIC, slo=ServingTargets(40.0, 8.0))
Play = Callable[..., Any]


def figures(decode_width: float = 0.1, prompt_width: float = 0.2, watts: float = 500.0) -> StepFigures:
    sizes = np.array([1.0, 64.0])
    alike = [np.full(2, each) for each in (watts, decode_width, 2 * watts, prompt_width)]
    return StepFigures(sizes, alike[0], alike[1], sizes, alike[2], alike[3], np.array(100.0))


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> ServedReplica:
    """A replica by hand of which watts and errors are known."""
    monkeypatch.setattr(serving, "worth_compiling", lambda outputs: False)
    return replace(by_hand(LAW, 200, 16, 131072.0), figures=figures(), price_per_hour=2.0)


def test_energy_and_price_are_those_of_the_time_in_iterations_and_idle(known: ServedReplica) -> None:
    report = serving.serve(replace(USUAL, replicas=2), known).report
    seconds, million = report.duration_s, report.output_tokens_per_s * report.duration_s / 1e6
    assert report.cost_per_million_tokens == pytest.approx(2.0 * 2 * seconds / 3600 / million)
    idle = 100 * seconds * 2
    assert report.power_w * seconds * 2 == pytest.approx(report.kwh_per_million_tokens * million * 3.6e6)
    assert idle < report.power_w * seconds * 2 < 1000 * seconds * 2
    alone = replace(known, figures=figures(watts=100.0)._replace(prompt_w=np.full(2, 100.0)))
    assert serving.serve(replace(USUAL, replicas=2), alone).report.power_w == pytest.approx(100.0)
    assert serving.serve(USUAL, replace(known, figures=None)).report.power_w is None


def test_tables_at_a_quantile_are_off_by_its_width() -> None:
    tables = by_hand(LAW, 200, 16, 0.0).tables
    slow = at_quantile(tables, figures(), Z90)
    decode, prompt = (8, 800, 0, 0.0, 0, 8), (0, 0, 100, 5050.0, 0, 1)
    assert iteration_us(slow, *decode) == pytest.approx(math.exp(0.1) * iteration_us(tables, *decode))
    assert iteration_us(slow, *prompt) == pytest.approx(math.exp(0.2) * iteration_us(tables, *prompt))


def test_intervals_hold_the_figure_and_end_where_slow_and_fast_steps_lead(known: ServedReplica) -> None:
    report = serving.serve_with_intervals(USUAL, known).report
    for name, (low, high) in report.intervals.items():
        figure, _, part = name.partition(".")
        value = getattr(report, figure)
        value = getattr(value, part) if part else value
        assert low <= high
        if figure in ("ttft_ms", "tpot_ms", "e2e_ms", "itl_ms"):
            assert low <= value <= high
    assert report.intervals["tpot_ms.p50"][1] > 1.08 * report.tpot_ms.p50
    assert 0 < report.p_slo_met < 1
    strict = serving.serve_with_intervals(replace(USUAL, slo=ServingTargets(ttft_ms=1.0)), known).report
    loose = serving.serve_with_intervals(replace(USUAL, slo=ServingTargets(ttft_ms=1e6)), known).report
    assert strict.p_slo_met < 0.01
    assert loose.p_slo_met > 0.99
    assert strict.p_p99_ttft_met < 0.01
    assert loose.p_p99_ttft_met > 0.99
    assert report.p_p99_ttft_met is None or USUAL.slo.ttft_ms is not None
    none = serving.serve_with_intervals(replace(USUAL, intervals=False), known).report
    assert not none.intervals


def test_what_no_served_run_is_known_of_is_told_and_widens_intervals(known: ServedReplica) -> None:
    """Known runs of an engine and system say how far off answers are; of others they are no surer than their steps."""

    def answer(engine: str, system: str) -> ServingReport:
        run = {"engine": engine, "system": system, "model": "llama3_1_8b"}
        return serving.serve_with_intervals(USUAL, replace(known, run=run)).report

    def width(report: ServingReport, name: str) -> float:
        low, high = report.intervals[name]
        return high / low

    alone, familiar, new = answer("", ""), answer("vllm", "h100_sxm"), answer("an engine", "a card")
    bare = serving.serve_with_intervals(USUAL, known).report
    assert not familiar.notes
    assert "the engine an engine or the system a card" in new.notes[-1]
    for name in ("ttft_ms.p50", "tpot_ms.p90"):
        assert width(familiar, name) < width(new, name) <= width(alone, name)
        assert width(new, name) >= width(bare, name)
    assert new.intervals["output_tokens_per_s"] == bare.intervals["output_tokens_per_s"]  # requests come by themselves


def test_chances_of_the_99th_percentile_come_true(known: ServedReplica) -> None:
    """Of runs with other requests and steps that are off by chance, as many keep a limit as was said."""
    random = np.random.default_rng(0)
    first = serving.serve_with_intervals(replace(USUAL, slo=ServingTargets(ttft_ms=1.0)), known).report.ttft_ms.p99
    for factor in (0.9, 1.0, 1.2):
        asked = replace(USUAL, slo=ServingTargets(ttft_ms=factor * first))
        said = serving.serve_with_intervals(asked, known).report.p_p99_ttft_met
        kept = 0
        for seed in range(100, 140):
            traffic = replace(asked.traffic, seed=seed)
            off = replace(known, tables=at_quantile(known.tables, figures(), random.standard_normal()))
            report = serving.serve(replace(asked, traffic=traffic), off).report
            kept += report.ttft_ms.p99 <= factor * first
        assert said == pytest.approx(kept / 40, abs=0.25)


@pytest.mark.parametrize("edge", [-2.0, -1.0, 0.5, 2.5])
def test_the_chance_is_that_of_steps_no_slower_than_they_may_be(edge: float) -> None:
    found = chance_met(lambda z: z <= edge)
    assert found == pytest.approx(0.5 * (1 + math.erf(edge / math.sqrt(2))), abs=0.03)


def test_the_curve_of_targets_passes_through_what_was_attained(played: Play) -> None:
    report = played(USUAL).report
    curve = dict(report.slo_curve)
    assert curve[1.0] == pytest.approx(report.slo_attainment, abs=0.02)
    shares = [share for _, share in report.slo_curve]
    assert shares == sorted(shares)
    assert report.goodput == pytest.approx(report.slo_attainment * report.requests / report.duration_s)


def test_the_warm_up_runs_and_does_not_count(played: Play) -> None:
    whole, part = played(USUAL), played(replace(USUAL, traffic=replace(TRAFFIC, warmup=30)))
    assert part.requests.tobytes() == whole.requests.tobytes()
    counted = part.requests[part.requests["request"] >= 30]
    ttft = (counted["first_token_us"] - counted["arrival_us"]) / 1e3
    assert part.report.ttft_ms.mean == pytest.approx(ttft.mean())
    assert part.report.ttft_ms.count == 50
    assert part.report.slo_curve[-1][1] <= 1
    assert part.report.goodput == pytest.approx(part.report.slo_attainment * 80 / part.report.duration_s)


def test_tpot_of_one_client_is_the_mean_time_between_its_tokens(known: ServedReplica) -> None:
    """The first token is of the prompt: of three, two are decoded."""
    traffic = RequestTraffic(
        arrival="closed", concurrency=1, requests=8, input=Lengths(mean=100), output=Lengths(mean=3)
    )
    report = serving.serve(replace(USUAL, traffic=traffic), known).report
    assert report.itl_ms.count == 2 * report.tpot_ms.count == 16
    assert report.tpot_ms.mean == pytest.approx(report.itl_ms.mean, rel=1e-3)


def test_the_largest_rate_lies_just_below_the_first_that_is_too_much(known: ServedReplica) -> None:
    found = largest(PlayedReplicas(known, None), replace(USUAL, slo=ServingTargets(60.0)), 5.0, 2.0)
    enough, too_much = ([rate for rate, _, met in found.tried if met is wanted] for wanted in (True, False))
    assert found.rate == max(enough)
    assert 1.0 < min(too_much) / found.rate <= PRECISION
    assert found.report.slo_attainment >= ServingTargets(60.0).share


def test_the_rate_of_slow_steps_is_less_and_of_fast_ones_more(known: ServedReplica) -> None:
    traffic = RequestTraffic(rate=20.0, requests=40, input=Lengths(mean=100), output=Lengths(mean=10))
    request = replace(USUAL, traffic=traffic, slo=ServingTargets(ttft_ms=60.0))
    found = capacity(request, PlayedReplicas(known, None), lambda function, parts: [function(*part) for part in parts])
    slow, fast = found.rates_of_errors or (0.0, 0.0)
    assert 0 < slow < found.rates[0] < fast
    assert found.interval[0] <= sum(found.rates) / 5 <= found.interval[1]


def disaggregated(played: Play) -> Any:
    request = replace(USUAL, decode_pool=DecodePool(replicas=1, link_gbps=10.0, link_us=100.0))
    return played(request, by_hand(LAW, 200, 16, 131072.0))


def test_the_table_of_requests_adds_up(played: Play) -> None:
    served = disaggregated(played)
    rows = columns(served.requests, 1000.0, served.bytes_per_token)
    moved = rows["kv_transfer_ms"] > 0
    assert moved.sum() == (rows["output_tokens"] > 1).sum()
    whole = rows["prefill_e2e_ms"] + rows["kv_transfer_ms"] + rows["decode_e2e_ms"]
    assert np.allclose(whole[moved], rows["e2e_ms"][moved])
    assert np.isnan(whole[~moved]).all()
    assert rows["kv_transfer_bytes"].sum() == served.report.kv_transfer_bytes
    report = served.report
    assert report.prefill_e2e_ms.mean == pytest.approx(np.nanmean(rows["prefill_e2e_ms"]) - 1.0)
    assert report.decode_e2e_ms.mean == pytest.approx(np.nanmean(rows["decode_e2e_ms"]))
    assert set(report.pools) == {"prefill", "decode"}
    for each in report.pools.values():
        assert 0 < each["utilisation"] <= 1


@pytest.mark.parametrize("two", [False, True])
def test_the_timeline_has_every_request_and_iteration_and_nothing_overlaps(
    played: Play, tmp_path: Path, two: bool
) -> None:
    served = disaggregated(played) if two else played(replace(USUAL, replicas=2))
    path = write_trace(tmp_path / "served.json.gz", tracks(served.iterations, served.requests, served.setup))
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    spans = [each for each in events if each["ph"] == "X"]
    assert sum(each["cat"] == "request" for each in spans) == len(served.requests)
    kinds = ("prefill", "decode", "mixed")
    ran = [each for each in spans if each["cat"] in kinds and "samples" in each["args"]]
    assert len(ran) == len(served.iterations)
    counters = {each["name"] for each in events if each["ph"] == "C"}
    assert {"KV memory in use, %", "requests waiting", "sequences decoding", "prompt tokens"} == counters
    assert any(each["cat"] == "KV transfer" for each in spans) == two
    by_thread: dict[Any, list[tuple[float, float]]] = {}
    for each in spans:
        by_thread.setdefault((each["pid"], each["tid"]), []).append((each["ts"], round(each["ts"] + each["dur"], 3)))
    for thread in by_thread.values():
        open_until: list[float] = []
        for start, end in sorted(thread, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1]
            open_until.append(end)


def test_the_page_has_every_part_in_both_cases(known: ServedReplica, played: Play) -> None:
    report = serving.serve_with_intervals(USUAL, known).report
    alone = page(report, "<model>", ("poisson",), [(4.0, report), (8.0, report)])
    assert [section.id for section in alone.sections] == ["rates", "times", "summary", "time", "targets"]
    text = render(alone)
    assert "&lt;model&gt;" in text
    assert "<model>" not in text
    assert "chance that targets are met" in text
    pools = page(disaggregated(played).report, "two")
    assert [section.id for section in pools.sections] == ["times", "summary", "time", "targets", "pools"]
    over = next(section for section in pools.sections if section.id == "time")
    assert [name for name, _ in over.variants] == ["prefill", "decode"]
    assert all(set(part.variants) == {"prefill", "decode"} for part in over.parts if isinstance(part, Figure))


def test_iterations_that_go_on_in_the_next_span_are_counted_there(played: Play) -> None:
    spans = played(replace(USUAL, traffic=replace(TRAFFIC, rate=200.0))).report.over_time["all"]
    assert 0.99 < max(each["busy_share"] for each in spans) <= 1.0
    assert carried_on(np.array([0.5, 2.5, 0.0, 0.2])).tolist() == pytest.approx([0.5, 1.0, 1.0, 0.7])
