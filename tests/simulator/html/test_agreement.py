"""The picture of predicted over measured times: every run a dot, exact answers in the middle, none outside."""

import re
import xml.etree.ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from opcast.simulator.html.agreement import LEFT, RIGHT, WIDTH, svg

RATIOS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20)


def dots(text: str) -> list[float]:
    """Where dots stand, from left to right."""
    return sorted(float(x) for x in re.findall(r"M([\d.]+) [\d.]+h0", text))


@given(st.dictionaries(st.text("ab_<&", min_size=1, max_size=8), RATIOS, min_size=1, max_size=4))
def test_every_run_is_a_dot_inside_the_picture(ratios: dict[str, list[float]]) -> None:
    text = svg(ratios, "a <title>")
    ET.fromstring(text)
    found = dots(text)
    assert len(found) == sum(map(len, ratios.values()))
    assert LEFT <= found[0] <= found[-1] <= WIDTH - RIGHT


def test_exact_answers_stand_in_the_middle_and_small_errors_first() -> None:
    text = svg({"train_far": [0.5, 2.0], "infer_near": [1.0, 1.0, 1.0], "train_none": []}, "runs")
    low, *middle, high = dots(text)
    assert set(middle) == {(LEFT + WIDTH - RIGHT) / 2}
    assert low + high == 2 * middle[0]
    assert text.index("near (3)") < text.index("far (2)")
    assert "none" not in text
    assert "75.0 %" in text
