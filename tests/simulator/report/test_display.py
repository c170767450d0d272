"""Answers in a notebook: every kind of answer has a rich display, whose text is escaped."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import opcast
from opcast.simulator.report.display import display_html
from opcast.simulator.report.view import ViewColumn, ViewTable, time_text

VOID = {"br"}


class Balanced(HTMLParser):
    """Reads HTML; what is open at the end stays in ``open``."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open += [] if tag in VOID else [tag]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += f"{data} "


def shown(answer: Any) -> str:
    """The text of an answer's display."""
    reader = Balanced()
    reader.feed(answer._repr_html_())
    assert reader.open == []
    return reader.text


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


def test_an_op_and_a_step(home: Path) -> None:
    gemm = shown(opcast.predict("gemm", "h100_sxm", m=512, n=512, k=512, home=home))
    assert "latency" in gemm
    assert "m=512" in gemm
    step = shown(opcast.simulate("tiny_llama_100m", device="h100_sxm", seq_len=128, home=home))
    assert "MFU" in step
    assert "gemm" in step


def test_traffic_and_searches(home: Path) -> None:
    law = {"base_us": 8000, "decode_us": 20}
    served = opcast.serving(law=law, kv={"blocks": 500}, traffic={"rate": 5, "requests": 10}, home=home)
    assert "TTFT" in shown(served)
    place: dict[str, Any] = {"cluster": "dgx_h100", "home": home}
    axes = {"tp": [1], "batch": [8], "pools": ["together"], "max_tokens": [2048]}
    found = opcast.search_serving("tiny_llama_100m", axes, input_len=64, output_len=16, **place)
    assert "best by tokens_per_s_per_gpu" in shown(found)
    layouts = {"tp": [1], "pp": [1], "micro_batch": [1, 2], "recompute": ["none"], "zero_stage": [0]}
    text = shown(opcast.search("tiny_llama_100m", layouts, seq_len=128, global_batch=16, **place))
    assert "micro_batch" in text
    assert "best by step_time" in text


def test_text_is_escaped() -> None:
    table = ViewTable("", [ViewColumn("<b>"), ViewColumn("share", "share", bar=True)], [["<script>", 0.2], ["", 0.4]])
    made = display_html("<i>", [("<u>", "&")], table, "<s>")
    assert "<script>" not in made
    assert "&lt;script&gt;" in made
    assert "28) 50.0%" in made  # a bar half as long as the longest
    assert time_text(None) == ""
    assert time_text(1500.0) == "1.5 ms"
