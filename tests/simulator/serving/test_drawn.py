"""Traces that ship by name: the same requests every time, around the figures that they are drawn from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from opcast.datasets.figure_sources import FigureSource
from opcast.datasets.loading import load
from opcast.datasets.reading import read_yaml
from opcast.jobs.service.naming import fits
from opcast.simulator.question.traffic import RequestTraffic
from opcast.simulator.serving.requests import stream
from opcast.simulator.serving.trace_formats.drawn import FOLDER, drawn_names, drawn_requests
from opcast.simulator.serving.trace_formats.rows import RequestTraceError


@pytest.mark.parametrize("name", drawn_names())
def test_a_trace_that_ships_is_drawn_around_what_was_published(name: str) -> None:
    assert name.endswith("_like"), "nobody shall take it for a recording"
    said = read_yaml(FOLDER / f"{name}.yaml", RequestTraceError)
    table = drawn_requests(name).table
    assert table.equals(drawn_requests(name).table)
    for column in ("input", "output"):
        assert np.median(table[f"{column}_tokens"]) == pytest.approx(said[column]["median"], rel=0.1)
        assert table[f"{column}_tokens"].max() <= said[column]["most"]
    assert len(table) / table["arrival_s"].iloc[-1] == pytest.approx(said["rate_per_s"], rel=0.1)
    for figure, source in said["sources"].items():
        load(FigureSource, source, ValueError, figure)


def test_it_is_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = stream(RequestTraffic(trace="azure_code_like"))
    assert own.requests == 1000
    assert "not recorded ones" in own.notes[0]
    monkeypatch.chdir(tmp_path)
    Path("azure_code_like").write_text("arrival_s,input_tokens,output_tokens\n0,5,6\n")
    assert stream(RequestTraffic(trace="azure_code_like")).requests == 1, "a file of that name goes before"
    with pytest.raises(RequestTraceError, match="azure_conversation_like"):
        stream(RequestTraffic(trace="azure"))
    assert fits("traffic.trace", "azure_code_like")
    assert not fits("traffic.trace", "requests.csv")
