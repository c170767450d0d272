"""Reports as pages: complete, self-contained, escaped, honest about their numbers, and alive in a real browser."""

from __future__ import annotations

import base64
import gzip
import json
import math
import random
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opcast.datasets.devices import Device
from opcast.datasets.ops import KINDS
from opcast.simulator.html import ReportError, colours, quickstart, units, write
from opcast.simulator.html import step as step_html
from opcast.simulator.html.page import embed
from opcast.simulator.html.quickstart import HOST_AND_REST, family_pairs
from opcast.simulator.html.sites import Errors, call_site, sites
from opcast.simulator.html.timeline import MAX_BARS, MERGED_RUNS_PER_STEP, layer_and_module, operators, timeline
from opcast.simulator.memory.breakdown import Memory
from opcast.simulator.report.answer import InferenceReport, StepReport
from opcast.simulator.report.comparison import Comparison, OpComparison, StepComparison
from opcast.simulator.report.step import Breakdown, OpShare, Span

NASTY = "layers.0.<script>alert('&\"%{x}')</script></script><a href='https://example.org'>"
LAYERS = 6
LAYER_OPS = (
    ("rms_norm", "input_layernorm", 14.0),
    ("gemm", "self_attn.q_proj", 1500.0),
    ("gemm", "self_attn.o_proj", 1490.0),
    ("attention_prefill", "self_attn", 610.0),
    ("elementwise", "self_attn", 9.0),
    ("gemm", "mlp.up_proj", 4200.0),
    ("silu_mul", "mlp", 150.0),
    ("gemm", "mlp.down_proj", 4300.0),
)
BACKWARD_KIND = {
    "rms_norm": "rms_norm_backward",
    "attention_prefill": "attention_backward",
    "silu_mul": "silu_mul_backward",
}
DEVICE = Device(
    id="cpu_test_2t",
    name="A test CPU",
    vendor="cpu",
    architecture="x86_64",
    compute_units=2,
    clock_mhz=2600.0,
    tensor_tflops={"fp32": 0.19},
    vector_tflops=0.05,
    memory_gib=24.0,
    memory_gbps=13.0,
    l2_mib=4.0,
    l2_gbps=120.0,
)


def layer(index: int, phase: str) -> list[tuple[str, str, str, float]]:
    """(kind, path, phase, microseconds) of one layer's operators."""
    found = [(kind, f"model.layers.{index}.{path}", phase, us) for kind, path, us in LAYER_OPS]
    if phase == "forward":
        return found
    return [(BACKWARD_KIND.get(kind, kind), path, phase, 2 * us) for kind, path, _, us in reversed(found)]


def step_nodes(workload: str) -> list[tuple[str, str, str, float]]:
    """The operators of a small transformer's step."""
    nodes = [("embedding", "model.embed_tokens", "forward", 120.0)]
    nodes += [node for index in range(LAYERS) for node in layer(index, "forward")]
    nodes.append(("gemm", "lm_head", "forward", 38000.0))
    if workload == "train":
        nodes.append(("cross_entropy", "", "forward", 2600.0))
        nodes += [node for index in reversed(range(LAYERS)) for node in layer(index, "backward")]
        nodes.append(("adamw", "optimizer", "optimizer", 190000.0))
    scale = 0.02 if workload == "decode" else 1.0
    return [(kind, path, phase, us * scale) for kind, path, phase, us in nodes]


def spans_of(nodes: list[tuple[str, str, str, float]], host_us: float = 3.0) -> tuple[Span, ...]:
    """The nodes one after another, the host before each."""
    spans, now = [], 0.0
    for kind, path, phase, us in nodes:
        spans.append(Span(f"aten.{kind}", kind, path, phase, now + host_us, us, "learned"))
        now += host_us + us
    return tuple(spans)


def shares_of(spans: tuple[Span, ...], total_s: float) -> tuple[OpShare, ...]:
    """Time by kind."""
    times: dict[str, list[float]] = {}
    for span in spans:
        times.setdefault(span.kind, []).append(span.duration_us * 1e-6)
    found = [OpShare(kind, len(us), sum(us), sum(us) / total_s, ("learned",)) for kind, us in times.items()]
    return tuple(sorted(found, key=lambda share: -share.time_s))


def report_of(workload: str, **changes: Any) -> StepReport | InferenceReport:
    """A report whose breakdown is that of its timeline."""
    spans = spans_of(step_nodes(workload))
    total_s = (spans[-1].start_us + spans[-1].duration_us) * 1e-6
    busy = sum(span.duration_us for span in spans) * 1e-6
    optimizer = sum(span.duration_us for span in spans if span.phase == "optimizer") * 1e-6
    fields: dict[str, Any] = {
        "model": "tiny_llama",
        "device": DEVICE.id,
        "precision": "fp32",
        "workload": workload,
        "coverage": 0.9,
        "tokens_per_s_per_gpu": 256 / total_s,
        "tflops_per_gpu": 0.11,
        "mfu": 0.57,
        "hfu": 0.58,
        "memory": Memory(1.33, 0.33, 0.33, 0.65, 0.0195, 0.0005),
        "fits": True,
        "breakdown": Breakdown(busy - optimizer, 0.0, 0.0, optimizer, total_s - busy, shares_of(spans, total_s), {}),
        "provenance": {"learned": busy / total_s, "host": 1 - busy / total_s},
        "unmapped": (),
        "notes": (),
        "wall_time_s": 0.08,
        "timeline": spans,
    }
    if workload == "train":
        fields |= {"step_time_s": total_s, "low_s": total_s * 0.9, "high_s": total_s * 1.12}
        return StepReport(**(fields | changes))
    ms = total_s * 1e3
    fields |= {"ttft_ms": ms if workload == "prefill" else None, "tpot_ms": ms if workload == "decode" else None}
    fields |= {"e2e_ms": ms, "low_ms": ms * 0.9, "high_ms": ms * 1.12}
    return InferenceReport(**(fields | changes))


def compared(workload: str, seed: int = 1) -> list[OpComparison]:
    """Every node with a measured time: off by its op and by noise."""
    chance, bias, found = random.Random(f"{workload}{seed}"), {}, []
    for kind, path, phase, us in step_nodes(workload):
        off = bias.setdefault((kind, call_site(path)), chance.gauss(0.0, 0.08))
        measured = us * math.exp(off + chance.gauss(0.0, 0.03))
        detail = f"{kind}[m=256 n=768 fp32]"
        found.append(
            OpComparison(workload, kind, f"aten.{kind}", path, phase, detail, us, us * 0.9, us * 1.1, measured)
        )
    return found


def step_of(workload: str, ops: list[OpComparison]) -> StepComparison:
    """A compared step: its real runs take what its operators do and two percent more."""
    report = report_of(workload)
    total_ms = report.step_time_s * 1e3 if isinstance(report, StepReport) else report.e2e_ms
    measured = sum(op.measured_us for op in ops) * 1.02e-3
    chance = random.Random(workload)
    runs = tuple(measured * math.exp(chance.gauss(0.0, 0.02)) for _ in range(12))
    return StepComparison(workload, total_ms, total_ms * 0.9, total_ms * 1.12, runs, report)


def comparison(**changes: Any) -> Comparison:
    """A whole quickstart."""
    ops = {name: compared(name) for name in ("train", "prefill", "decode")}
    training: dict[str, dict[str, Any]] = {
        kind: {
            "n": 120,
            "test_median_ape": 4.2,
            "test_mean_ape": 6.1,
            "test_p90_ape": 13.4,
            "coverage": 0.91,
            "roofline_median_ape": 48.0,
            "analytical_median_ape": 22.0,
            "candidates": {"interpolation": 4.2, "lightgbm": 5.5},
            "chosen": "interpolation",
            "split": "5 folds by shape",
            "predictor": f"opcast-{kind}@1",
        }
        for kind in ("gemm", "attention_prefill", "rms_norm")
    }
    fields: dict[str, Any] = {
        "device": DEVICE.to_dict(),
        "model": "tiny_llama",
        "parameters": 88_096_512,
        "precision": "fp32",
        "environment": {"torch": "2.13.0+cpu", "opcast_version": "0.1.0", "threads": 2, "cuda": None},
        "campaign": {"run_id": "r1", "cases": 812, "ok": 806, "failed": 6, "wall_time_s": 143.0, "drift": {"g": 0.03}},
        "training": {**training, "rope": {"error": "7 rows are too few"}},
        "steps": [step_of(name, found) for name, found in ops.items()],
        "ops": [op for found in ops.values() for op in found],
    }
    return Comparison(**(fields | changes))


VOID = {"meta", "link", "br", "img", "input", "hr", "line", "rect"}


class Reader(HTMLParser):
    """Checks that tags are balanced, and keeps text, links, figures and scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.figures: list[dict[str, Any]] = []
        self.words: list[str] = []
        self.attributes: list[str] = []
        self.json = False
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        named = dict(attributes)
        self.tags.append(tag)
        self.attributes += [name for name, _ in attributes]
        self.links += [named[name] or "" for name in ("src", "href", "action", "data", "poster") if name in named]
        if tag not in VOID:
            self.open.append(tag)
        self.json = tag == "script" and named.get("type") == "application/json"

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag in VOID
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1:] == [tag], f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()
        self.json = False

    def handle_data(self, data: str) -> None:
        if self.json:
            self.figures.append(json.loads(data))
        elif self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data.replace("\u00a0", " "))

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def quickstart_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(quickstart.page(comparison()), tmp_path_factory.mktemp("quick") / "report.html")


@pytest.fixture(scope="module")
def step_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    odd = report_of("train", unmapped=("aten.odd x3", NASTY), notes=("a note",))
    return write(step_html.page(odd, DEVICE), tmp_path_factory.mktemp("step") / "report.html")


def read(path: Path) -> Reader:
    return Reader(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["quickstart_page", "step_page"])
def test_a_page_is_whole_and_needs_nothing_from_outside(name: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(name)
    page = read(path)
    assert all(link.startswith("#") for link in page.links), page.links
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    text = path.read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert "@import" not in text[: text.index("</style>")]
    assert "url(" not in text[: text.index("</style>")]
    packed = re.findall(r'<script type="text/plain" id="plotly">(.*?)</script>', text)
    assert len(packed) == 1
    assert b"plotly.js (basic - minified) v" in gzip.decompress(base64.b64decode(packed[0]))[:100]
    assert path.stat().st_size < 1.5e6


def test_the_quickstart_page_shows_every_step_beside_its_measurement(quickstart_page: Path) -> None:
    text = read(quickstart_page).text
    for step in comparison().steps:
        error = (step.predicted_ms / step.measured_ms - 1) * 100
        for shown in (units.duration(step.predicted_ms * 1e3), units.duration(step.measured_ms * 1e3)):
            assert shown.replace("\u00a0", " ") in text
        assert f"error {units.percent(error, signed=True)}, inside the interval".replace("\u00a0", " ") in text
    for fact in ("A test CPU", "2 threads", "190 GFLOP/s in fp32", "13 GB/s", "torch 2.13.0+cpu", "opcast 0.1.0"):
        assert fact in text
    for told in ("not learned: 7 rows are too few", "interpolation", "812 cases were planned, 806 measured", "TTFT"):
        assert told in text
    assert "None" not in text
    assert "nan" not in text.lower().split()


def test_every_figure_is_one_that_plotly_accepts(quickstart_page: Path, step_page: Path) -> None:
    import plotly.graph_objects as go

    shown = [read(quickstart_page).figures, read(step_page).figures]
    assert [len(figures) for figures in shown] == [6, 2]
    for variants in (variants for figures in shown for variants in figures):
        for figure in variants.values():
            go.Figure(figure)  # raises for a property or value that Plotly does not know
            assert figure["data"]
    assert list(shown[0][0]) == ["all", "train", "prefill", "decode"]


def test_figures_name_only_colours_that_both_themes_have(quickstart_page: Path, step_page: Path) -> None:
    for path in (quickstart_page, step_page):
        named = set(re.findall(r"var\(--([\w-]+)\)", path.read_text(encoding="utf-8")))
        assert named <= set(colours.PALETTE) | {"part"}


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb (WCAG 2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colours_can_be_told_from_the_page_and_text_read_on_them(theme: int) -> None:
    surface, on_fill = colours.PALETTE["surface"][theme], colours.PALETTE["on-fill"][theme]
    for name, values in colours.HUES.items():
        assert contrast(values[theme], surface) >= 3.0, name
        assert contrast(values[theme], on_fill) >= 4.0, name
    for name in ("text", "muted", "good", "fair", "poor", "accent"):
        assert contrast(colours.PALETTE[name][theme], surface) >= 4.5, name
    for name in ("phase", "phase-strong"):
        assert contrast(colours.PALETTE["text"][theme], colours.PALETTE[name][theme]) >= 4.5, name


def test_every_kind_has_a_colour() -> None:
    for kind in KINDS:
        assert colours.of_kind(kind)[6:-1] in colours.HUES
        assert colours.of_kind(kind) != colours.css(colours.UNMAPPED), f"{kind} looks like an unmapped operator"
    usual = ("gemm", "attention_prefill", "attention_backward", "rms_norm", "elementwise", "softmax", "adamw", "copy")
    assert len({colours.of_kind(kind) for kind in usual}) == len(usual)


def test_names_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    ops = [replace(op, path=NASTY, detail=NASTY, source=NASTY) for op in compared("train")]
    spans = tuple(replace(span, path=NASTY, name=NASTY, kind="aten.<b>") for span in spans_of(step_nodes("train")))
    step = replace(step_of("train", ops), report=report_of("train", timeline=spans, model=NASTY))
    nasty = comparison(model=NASTY, ops=ops, steps=[step], training={NASTY: {"error": NASTY}})
    for path in (
        write(quickstart.page(nasty), tmp_path / "quick.html"),
        write(step_html.page(step.report, DEVICE), tmp_path / "step.html"),
    ):
        page = read(path)
        assert page.tags.count("a") == len(page.links)
        assert all(link.startswith("#") for link in page.links)
        assert not [name for name in page.attributes if name.startswith("on")]
        assert NASTY in "".join(page.words)
        hints = [
            hint
            for variants in page.figures
            for figure in variants.values()
            for trace in figure["data"]
            for hint in [trace.get("name", ""), *np.atleast_1d(trace.get("hovertext", []))]
        ]
        assert hints
        assert not [hint for hint in hints if re.search(r"<(?!b>|/b>|br>)", hint)]


json_values = st.recursive(
    st.text(max_size=20) | st.floats() | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(json_values)
def test_embedded_json_comes_back_and_cannot_end_its_element(value: Any) -> None:
    text = embed(value)
    assert not set("<>&\u2028\u2029") & set(text)

    def finite(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: finite(each) for key, each in item.items()}
        if isinstance(item, list):
            return [finite(each) for each in item]
        return None if isinstance(item, float) and not math.isfinite(item) else item

    assert json.loads(text) == finite(value)


def test_the_same_comparison_gives_the_same_bytes(tmp_path: Path) -> None:
    one, two = (write(quickstart.page(comparison()), tmp_path / name) for name in ("one.html", "two.html"))
    assert one.read_bytes() == two.read_bytes()


def test_a_page_is_replaced_whole_and_nothing_else_is_left(tmp_path: Path) -> None:
    target = tmp_path / "new" / "report.html"
    write(step_html.page(report_of("prefill"), DEVICE), target)
    write(step_html.page(report_of("train"), DEVICE), target)
    assert "training step" in read(target).text
    assert [path.name for path in target.parent.iterdir()] == ["report.html"]


def test_a_place_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for target in (tmp_path / "file" / "report.html", tmp_path):
        with pytest.raises(ReportError, match="cannot write the report to") as caught:
            write(step_html.page(report_of("train"), DEVICE), target)
        assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_a_step_page_tells_time_memory_sources_and_what_is_unmapped(step_page: Path) -> None:
    text = read(step_page).text
    report = report_of("train")
    assert isinstance(report, StepReport)
    for told in (
        units.duration(report.step_time_s * 1e6).replace("\u00a0", " "),
        "57.0 %",
        "1.33 GiB",
        "fits",
        "free 22.7 GiB",
        "learned",
        "aten.odd x3",
        "a note",
        "model.layers.*.mlp.up_proj",
    ):
        assert told in text


@pytest.mark.parametrize(
    ("workload", "shown", "absent"),
    [("prefill", ["TTFT, time to first token"], "TPOT, time"), ("decode", ["TPOT, time per output token"], "TTFT, t")],
)
def test_an_inference_page_shows_what_its_workload_contains(
    workload: str, shown: list[str], absent: str, tmp_path: Path
) -> None:
    text = read(write(step_html.page(report_of(workload)), tmp_path / "page.html")).text
    assert all(word in text for word in shown)
    assert absent not in text
    assert DEVICE.id in text, "without a data sheet the device goes by its id"


def test_a_generation_shows_all_three_times_and_says_that_the_timeline_is_a_part(tmp_path: Path) -> None:
    report = report_of("prefill", ttft_ms=60.0, tpot_ms=2.0, e2e_ms=5000.0)
    text = read(write(step_html.page(report, DEVICE), tmp_path / "page.html")).text
    assert all(f" {value} " in text for value in ("60 ms", "2 ms", "5 s"))
    assert "Shown is its first part" in text


def test_a_model_that_does_not_fit_is_marked(tmp_path: Path) -> None:
    report = report_of("train", fits=False, memory=Memory(96.0, 24.0, 24.0, 40.0, 7.0, 1.0))
    path = write(step_html.page(report, DEVICE), tmp_path / "page.html")
    assert "does not fit" in read(path).text
    assert 'class="limit" style="left:25.00%"' in path.read_text(encoding="utf-8")


def test_pages_without_operators_or_predictors_still_stand(tmp_path: Path) -> None:
    bare = comparison(ops=[], training={}, campaign={}, environment={}, device={"name": "unknown"})
    text = read(write(quickstart.page(bare), tmp_path / "page.html")).text
    assert "Training step" in text
    assert "Operator by operator" not in text
    empty = report_of("train", timeline=(), unmapped=(), notes=())
    assert "The step in time" not in read(write(step_html.page(empty, DEVICE), tmp_path / "step.html")).text


# --- what the pictures are made of ----------------------------------------------------------------------


def test_call_sites_gather_the_layers_and_keep_the_time() -> None:
    ops = compared("train")
    found = sites(ops)
    assert sum(site.calls for site in found) == len(ops)
    assert sum(site.share for site in found) == pytest.approx(1.0)
    assert sum(site.off_us for site in found) == pytest.approx(sum(op.predicted_us - op.measured_us for op in ops))
    up = next(site for site in found if site.path == "model.layers.*.mlp.up_proj" and site.phase == "forward")
    assert up.calls == LAYERS
    assert up.fastest_us <= up.measured_us <= up.slowest_us


@pytest.mark.parametrize(
    ("path", "site"),
    [
        ("model.layers.12.mlp", "model.layers.*.mlp"),
        ("0.1.conv2d", "*.*.conv2d"),
        ("model.layer3.x9", "model.layer3.x9"),
        ("", ""),
        ("blocks.7", "blocks.*"),
    ],
)
def test_only_whole_numbers_in_a_path_are_layers(path: str, site: str) -> None:
    assert call_site(path) == site


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("model.layers.3.mlp.up_proj", ("layers.3", "mlp")),
        ("model.layers.3", ("layers.3", "")),
        ("transformer.h.11.attn", ("transformer.h.11", "attn")),
        ("lm_head", ("lm_head", "")),
        ("", ("model", "")),
        ("0", ("0", "")),
    ],
)
def test_layers_and_modules_of_a_path(path: str, expected: tuple[str, str]) -> None:
    assert layer_and_module(path) == expected


weighted = st.lists(st.tuples(st.floats(-90.0, 500.0), st.floats(0.1, 1e6)), min_size=1, max_size=60)


@given(weighted)
def test_quantiles_are_weighted_by_time(pairs: list[tuple[float, float]]) -> None:
    percent, weights = (np.array(values) for values in zip(*pairs, strict=True))
    errors = Errors(percent, weights)
    found = errors.quantiles()
    assert found == sorted(found)
    for level, value in zip((0.10, 0.25, 0.50, 0.75, 0.90), found, strict=True):
        assert weights[percent <= value].sum() >= level * errors.weight * (1 - 1e-9)
        assert weights[percent < value].sum() <= level * errors.weight * (1 + 1e-9)
    assert errors.within(1000.0) == pytest.approx(1.0)


def test_the_pieces_of_a_step_add_up_to_it() -> None:
    ops = compared("train")
    step = step_of("train", ops)
    pairs = family_pairs(step, ops)
    assert sum(predicted for predicted, _ in pairs.values()) == pytest.approx(step.predicted_ms * 1e3)
    assert sum(measured for _, measured in pairs.values()) == pytest.approx(step.measured_ms * 1e3)


def test_operators_that_add_up_to_more_than_the_step_leave_nothing_for_the_host(tmp_path: Path) -> None:
    ops = compared("decode")
    quick = replace(step_of("decode", ops), measured_runs_ms=(sum(op.measured_us for op in ops) * 0.5e-3,) * 3)
    assert family_pairs(quick, ops)["host"][1] == 0.0
    text = read(write(quickstart.page(comparison(steps=[quick], ops=ops)), tmp_path / "page.html")).text
    assert "add up to more than the real step" in text
    assert HOST_AND_REST in text


def many_spans(count: int, phases: int = 3) -> tuple[Span, ...]:
    """Operators whose lengths span five orders of magnitude."""
    chance = random.Random(7)
    nodes = [
        (chance.choice(list(KINDS)), f"model.layers.{i * 90 // count}.mlp", f"phase{i * phases // count}", us)
        for i in range(count)
        for us in [10 ** chance.uniform(-1, 4)]
    ]
    return spans_of(nodes, host_us=0.5)


def test_a_long_timeline_is_drawn_with_some_thousands_of_bars_and_loses_no_time() -> None:
    spans = many_spans(40_000)
    total = spans[-1].start_us + spans[-1].duration_us
    bars = operators(spans, total)
    assert len(bars) <= MAX_BARS
    assert bars[0].start_us == spans[0].start_us
    assert bars[-1].start_us + bars[-1].duration_us == pytest.approx(total)
    ends = [bar.start_us + bar.duration_us for bar in bars]
    assert all(end <= bar.start_us + 1e-3 for end, bar in zip(ends, bars[1:], strict=False))
    drawn = sum(bar.duration_us for bar in bars)
    assert sum(span.duration_us for span in spans) <= drawn <= total
    assert {bar.start_us for bar in bars if bar.duration_us >= total / MERGED_RUNS_PER_STEP} <= {
        s.start_us for s in spans
    }
    assert len(json.dumps(timeline(spans))) < 3_000_000


def test_a_short_timeline_is_drawn_operator_by_operator() -> None:
    spans = spans_of(step_nodes("train"))
    figure = timeline(spans)
    drawn = [trace for trace in figure["data"] if "legendgroup" in trace]
    assert sum(len(trace["x"]) for trace in drawn) == len(spans)
    milliseconds = sum(sum(trace["x"]) for trace in drawn)
    assert milliseconds == pytest.approx(sum(span.duration_us for span in spans) / 1e3, rel=1e-4)
    assert figure["layout"]["yaxis"]["categoryarray"] == ["operator", "module", "layer", "phase"]
    longest = {span.kind: 0.0 for span in spans}
    for span in spans:
        longest[span.kind] += span.duration_us
    assert drawn[-1]["legendgroup"] == max(longest, key=lambda kind: longest[kind]), "what takes most lies on top"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (999.6, "1,000"),
        (0.0123, "0.0123"),
        (12.345, "12.3"),
        (1234567, "1,230,000"),
        (4, "4"),
        (-2.5, "−2.50"),
    ],
)
def test_three_significant_digits(value: float, text: str) -> None:
    assert units.three_digits(value) == text


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (units.duration(0.5), "0.500 µs"),
        (units.duration(999.9), "1.00 ms"),
        (units.duration(1.5e6), "1.50 s"),
        (units.duration(math.nan), "–"),
        (units.duration_range(600e3, 1.7e6), "0.600 to 1.70 s"),
        (units.percent(-0.01, signed=True), "0.0 %"),
        (units.percent(-8.24), "−8.2 %"),
        (units.percent(3.0, signed=True), "+3.0 %"),
        (units.percent(1234.4), "1,234 %"),
        (units.gib(0.33), "338 MiB"),
        (units.gib(80.0), "80 GiB"),
        (units.with_prefix(1.93e11, "FLOP/s"), "193 GFLOP/s"),
        (units.with_prefix(88_096_512, ""), "88.1 M"),
        (units.percent(None), "–"),
    ],
)
def test_numbers_are_written_for_people(shown: str, text: str) -> None:
    assert shown.replace("\u00a0", " ") == text


# --- in a browser ---------------------------------------------------------------------------------------

PROBE = """
<script>
const troubles = [];
addEventListener("error", (event) => troubles.push(event.message));
addEventListener("securitypolicyviolation", (event) => troubles.push(event.violatedDirective + event.blockedURI));
const find = (selector) => document.querySelector(selector);
const all = (selector) => [...document.querySelectorAll(selector)];
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
const ink = () => getComputedStyle(find(".plot .ytick text")).fill;
const drawn = () => all(".plot").filter((plot) => plot.querySelector(".trace, .point")).length;
const tables = () => all("#breakdown [data-variant]").filter((element) => !element.hidden).length;
async function probe(found) {
  for (let round = 0; round < 100 && drawn() < all(".plot").length; round += 1) await wait(100);
  found.plots = drawn();
  found.ink = [ink()];
  const timeline = find("#timeline .plot");
  const width = () => timeline.layout.xaxis.range[1] - timeline.layout.xaxis.range[0];
  found.zoomed = [width()];
  find("#timeline [data-scale='0.5']").click();
  await wait(100);
  found.zoomed.push(width());
  find("#timeline .legend button").click();
  found.hidden = timeline.data.filter((trace) => trace.visible === false).length;
  found.tables = [tables()];
  all("#breakdown [data-choose=decode]").forEach((button) => button.click());
  found.tables.push(tables());
  found.captions = all("#breakdown .table:not([hidden]) figcaption").map((caption) => caption.textContent);
  find("#theme").click();
  await wait(100);
  found.ink.push(ink());
  found.fitting = document.documentElement.scrollWidth <= innerWidth;
  found.requests = performance.getEntriesByType("resource").map((entry) => entry.name);
}
addEventListener("load", async () => {
  const found = { troubles };
  await probe(found).catch((error) => troubles.push(String(error)));
  const out = document.createElement("output");
  out.id = "probe";
  out.textContent = JSON.stringify(found);
  document.body.append(out);
});
</script>
"""


def browser() -> str:
    """A Chromium on this machine; the test is skipped where there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    pytest.skip("pages need Chromium: apt-get install chromium")


def probed(path: Path, tmp_path: Path, width: int) -> dict[str, Any]:
    """What a page does when it is opened, zoomed, chosen from and switched to the other theme."""
    page = tmp_path / "probe.html"
    page.write_text(path.read_text(encoding="utf-8").replace("<main>", PROBE + "<main>", 1), encoding="utf-8")
    command = [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},1200"]
    command += ["--virtual-time-budget=20000", "--dump-dom", page.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    match = re.search(r'<output id="probe">(.*?)</output>', result.stdout)
    assert match, result.stderr[-2000:]
    return json.loads(match[1].replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"))


@pytest.mark.parametrize("width", [500, 1400])
def test_the_quickstart_page_works_in_a_browser(width: int, quickstart_page: Path, tmp_path: Path) -> None:
    found = probed(quickstart_page, tmp_path, width)
    assert found["troubles"] == []
    assert found["requests"] == []
    assert found["plots"] == 6
    assert found["zoomed"][1] == pytest.approx(found["zoomed"][0] / 2)
    assert found["hidden"] == 1
    assert found["tables"] == [1, 1]
    assert found["captions"] == ["Decode step (TPOT) by op family"]
    assert found["ink"][0] != found["ink"][1], "the figures follow the theme"
    assert found["fitting"], "nothing sticks out of the window"


def test_the_step_page_works_in_a_browser(step_page: Path, tmp_path: Path) -> None:
    found = probed(step_page, tmp_path, 1000)
    assert (found["troubles"], found["requests"], found["plots"]) == ([], [], 2)
    assert found["ink"][0] != found["ink"][1]
