"""One list of precisions for every verb, table and page."""

from __future__ import annotations

from pathlib import Path

import pytest

from opcast.datasets.precisions import PrecisionError, known_precisions, precision_of
from opcast.datasets.truth.cells import SPELLINGS
from opcast.datasets.truth.cells import precision_of as published_precision_of

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("name", [each for each in known_precisions() if each != "auto"])
def test_tables_of_results_take_what_steps_take(name: str) -> None:
    assert published_precision_of(name.upper()) == precision_of(name)


def test_spellings_of_tables_are_of_precisions_that_exist() -> None:
    assert set(SPELLINGS.values()) <= set(known_precisions())
    assert not set(SPELLINGS) & set(known_precisions())


def test_the_documentation_names_every_precision() -> None:
    said = (DOCS / "clusters.md").read_text()
    assert [name for name in known_precisions() if f"`{name}`" not in said] == []


@pytest.mark.parametrize(("name", "meant"), [("mxfp4", "mxfp4a16"), ("fp9", "fp8"), ("w4a15", "w4a16")])
def test_a_precision_that_does_not_exist_is_answered_with_the_one_that_was_meant(name: str, meant: str) -> None:
    with pytest.raises(PrecisionError, match=f"precision='{name}' does not exist; did you mean .*{meant}"):
        precision_of(name)
