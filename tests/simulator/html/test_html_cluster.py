"""The part of a step's page that only a cluster has: pipeline, communication, stages."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opcast.datasets.devices import load_device
from opcast.simulator.html import ClusterView, colours, step, write
from opcast.simulator.html.cluster import memory_chart, parallelism_chart, sections
from opcast.simulator.html.gantt import BUBBLE, MAX_BARS, SEND, bubbles, merge_neighbours, pipeline_charts, tasks
from opcast.simulator.html.layers import MAX_BARS as MOST_OF_LAYERS
from opcast.simulator.html.layers import drawn_layers
from opcast.simulator.memory.breakdown import Memory
from opcast.simulator.question.orders import FORWARD, TASKS, make_orders
from opcast.simulator.report.answer import StepReport
from opcast.simulator.report.step import Breakdown, OpShare, StageShare
from opcast.simulator.timing.schedule.pipeline import PipelineTimes, run_pipeline


def pipeline(schedule: str, stages: int = 4, micro_batches: int = 8, virtual: int = 1, **sends: Any) -> PipelineTimes:
    made = make_orders(schedule, stages, micro_batches, virtual)
    forward = np.random.default_rng(1).uniform(900, 1100, (stages, made.chunks))
    return run_pipeline(made, forward, 2 * forward, forward, **sends)


def kinds(stage: int, chunk: int, kind: int, at_end: bool) -> dict[str, float]:
    return {"products": 700.0, "tensor parallel": 150.0} if kind == FORWARD else {"products": 1400.0, "attention": 60.0}


def view(times: PipelineTimes | None, stages: int = 4) -> ClusterView:
    return ClusterView(
        times,
        {"dp": 0.01, "tp": 0.2, "pp": 0.0},
        {"dp": 0.1, "ep": 0.0},
        [StageShare(s, 8, 0.9, 0.1 * s, 10**9) for s in range(stages)],
        [{"weights": 10.0, "activations": 20.0 - s, "<b>odd</b>": 1.0} for s in range(stages)],
        79.0,
        layers=drawn_layers(times, kinds, [(300.0, {"optimizer": 300.0})] * stages) if times is not None else None,
    )


REPORT = StepReport(
    model="llama3_8b",
    device="h100_sxm",
    precision="bf16",
    workload="train",
    coverage=0.9,
    tokens_per_s_per_gpu=9000.0,
    tflops_per_gpu=450.0,
    mfu=0.45,
    hfu=0.5,
    memory=Memory(40.0, 10.0, 5.0, 15.0, 9.0, 1.0),
    fits=True,
    breakdown=Breakdown(0.7, 0.1, 0.1, 0.05, 0.05, (OpShare("gemm", 10, 0.7, 0.7, ("learned",)),), {"forward": 1.0}),
    provenance={"learned": 1.0},
    unmapped=(),
    notes=(),
    wall_time_s=0.5,
    step_time_s=1.0,
    low_s=0.9,
    high_s=1.1,
)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "dualpipe"])
@pytest.mark.parametrize("blocking", [False, True])
def test_bars_fill_every_stage_from_start_to_end(schedule: str, blocking: bool) -> None:
    times = pipeline(schedule, virtual=2 if schedule == "interleaved" else 1, send_us=70.0, blocking=blocking)
    bars = list(tasks(times))
    assert (SEND in {bar.what for bar in bars}) == blocking
    for stage in range(4):
        mine = sorted((bar for bar in bars if bar.stage == stage), key=lambda bar: bar.start_us)
        assert sum(bar.duration_us for bar in mine) == pytest.approx(times.makespan_us)
        for before, after in itertools.pairwise(mine):
            assert before.start_us + before.duration_us == pytest.approx(after.start_us)
        idle = sum(bar.duration_us for bar in mine if bar.what == BUBBLE)
        assert idle == pytest.approx(float(times.bubble_us[stage]))


def test_a_long_pipeline_is_drawn_whole_with_few_bars_and_its_ends_task_by_task() -> None:
    times = pipeline("interleaved", 16, 128, 4, send_us=3.0)
    made = pipeline_charts(times)
    assert list(made) == ["start", "whole", "end"]
    for figure in made.values():
        assert sum(len(trace["x"]) for trace in figure["data"]) <= 1.3 * MAX_BARS
        start, after = figure["layout"]["xaxis"]["range"]
        assert start == 0
        assert all(base < after for trace in figure["data"] for base in trace["base"])
    busy = sum(bar.duration_us for bar in merge_neighbours(times) if bar.what != BUBBLE)
    assert busy == pytest.approx(float(times.busy_us.sum()), rel=0.05)
    whole = {trace["legendgroup"] for trace in made["whole"]["data"]}
    assert "forwards and backwards" in whole
    assert {TASKS[0], TASKS[1], BUBBLE} <= {trace["legendgroup"] for trace in made["start"]["data"]}


def test_a_short_pipeline_has_one_picture() -> None:
    assert list(pipeline_charts(pipeline("1f1b"))) == ["whole"]


def work_by_layer(data: dict[str, Any]) -> dict[str, float]:
    total: dict[str, float] = {}
    for _, _, layer, start, end, share in data["bars"]:
        name = data["layers"][layer][0]
        total[name] = total.get(name, 0.0) + (end - start) * share * data["unit_us"]
    return total


@pytest.mark.parametrize(
    ("schedule", "stages", "micro_batches", "virtual"), [("1f1b", 4, 8, 1), ("interleaved", 16, 128, 4)]
)
def test_layers_hold_the_work_of_every_task_whether_drawn_apart_or_by_stretches(
    schedule: str, stages: int, micro_batches: int, virtual: int
) -> None:
    times = pipeline(schedule, stages, micro_batches, virtual, send_us=70.0, blocking=True)
    optimizers = [(300.0, {"optimizer": 150.0})] * stages
    data = dict(drawn_layers(times, kinds, optimizers).data)
    assert 0 < len(data["bars"]) <= MOST_OF_LAYERS
    tasks = stages * micro_batches * times.orders.chunks
    work = work_by_layer(data)
    assert work["products"] == pytest.approx(2100.0 * tasks, rel=0.02)
    assert work["tensor parallel"] == pytest.approx(150.0 * tasks, rel=0.02)
    assert work["sends that block"] == pytest.approx(float(times.held_us.sum()), rel=0.02)
    assert work["optimizer"] == pytest.approx(150.0 * stages, rel=0.02)
    assert data["end"] * data["unit_us"] == pytest.approx(times.makespan_us + 300.0)


def test_a_forward_beside_a_backward_shares_its_time_in_the_layers() -> None:
    times = pipeline("dualpipe", 4, 16)
    by_stage: dict[int, list[tuple[float, float]]] = {}
    for at, stage, _, start, end, _ in drawn_layers(times, kinds).data["bars"]:
        del at
        by_stage.setdefault(stage, []).append((start, end))
    for spans in by_stage.values():
        ordered = sorted(set(spans))
        assert all(before[1] <= after[0] + 1e-3 for before, after in itertools.pairwise(ordered))


def test_bubbles_stand_before_between_and_after() -> None:
    found = list(bubbles(0, np.array([2.0, 5.0]), np.array([3.0, 6.0]), 10.0))
    assert [(bar.start_us, bar.duration_us) for bar in found] == [(0, 2), (3, 2), (6, 4)]


def test_only_what_a_step_has_is_shown() -> None:
    assert [s.id for s in sections(view(pipeline("1f1b")), 1.0)] == ["pipeline", "layers", "communication", "stages"]
    assert sections(ClusterView(), 1.0) == ()
    assert [s.id for s in sections(ClusterView(pipeline("1f1b", 1), {"dp": 0.1}), 1.0)] == ["communication"]


def test_exposed_and_hidden_communication_by_dimension() -> None:
    chart = parallelism_chart([("tp", 0.2, 0.0), ("dp", 0.01, 0.1)], 1.0)
    exposed, hidden = chart["data"]
    assert exposed["y"] == ["tensor (tp)", "data (dp)"]
    assert (exposed["x"], hidden["x"]) == ([200.0, 10.0], [0.0, 100.0])


def test_memory_by_stage_marks_where_the_device_ends() -> None:
    chart = memory_chart([{"weights": 60.0, "logits": 0.0}, {"weights": 90.0, "logits": 0.0}], 79.0)
    assert chart["layout"]["shapes"][0]["x0"] == 79.0
    assert [trace["legendgroup"] for trace in chart["data"]] == ["weights"]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cluster") / "step.html"
    times = pipeline("interleaved", 8, 64, 5, send_us=50.0, blocking=True)
    return write(step.page(REPORT, load_device("h100_sxm"), view(times, 8)), path)


def test_the_page_has_the_sections_escaped_and_in_colours_of_both_themes(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for heading in ("The pipeline in time", "Communication", "Stage by stage"):
        assert f"<h2>{heading}</h2>" in text
    assert "<b>odd</b>" not in text
    assert "interleaved over 8 stages with 5 chunks each and 64 micro-batches" in text
    assert "micro-batch</dt>" in text
    pictures = re.findall(r'<script type="application/json">(.*?)</script>', text, re.DOTALL)
    used = set(re.findall(r"var\(--([a-z-]+)\)", " ".join(pictures)))
    assert used <= set(colours.PALETTE)


def test_every_figure_is_one_that_plotly_accepts() -> None:
    import plotly.graph_objects as go

    found = list(pipeline_charts(pipeline("interleaved", 8, 64, 5)).values())
    found += [memory_chart(view(None).memory_gib, 79.0), parallelism_chart([("tp", 0.2, 0.1)], 1.0)]
    for chart in found:
        plain = re.sub(r"var\(--[a-z-]+\)", "red", repr(chart))
        go.Figure(eval(plain))


def test_the_page_works_in_a_browser(page: Path, tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("pages need Chromium: apt-get install chromium")
    probe = tmp_path / "probe.html"
    script = """<script>const troubles = [];
addEventListener("error", (event) => troubles.push(event.message));
addEventListener("load", () => setTimeout(() => {
  const out = document.createElement("output");
  const canvas = document.querySelector(".layers canvas");
  const pictures = new Set([canvas.toDataURL()]);
  for (const name of ["[data-turn]", "[data-tilt]", "[data-apart]", ".layer-legend button", "[data-view='0,90']"]) {
    document.querySelector(`.layers ${name}`).click();
    pictures.add(canvas.toDataURL());
  }
  out.id = "probe";
  out.textContent = `${troubles.length} ${document.querySelectorAll(".main-svg .barlayer").length} ` +
    `${document.querySelectorAll("#pipeline .point").length} ${pictures.size}`;
  document.body.append(out);
}, 3000));</script>"""
    probe.write_text(page.read_text(encoding="utf-8").replace("<main>", script + "<main>", 1), encoding="utf-8")
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
    command += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={tmp_path / 'p'}"]
    command += ["--window-size=1200,2000", "--virtual-time-budget=20000", "--dump-dom", probe.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    found = re.search(r'<output id="probe">(\d+) (\d+) (\d+) (\d+)</output>', result.stdout)
    assert found, result.stderr[-2000:]
    troubles, charts, bars, pictures = map(int, found.groups())
    assert troubles == 0
    assert charts >= 4
    assert bars > 500
    assert pictures == 6
