"""The notebooks of docs/examples run from top to bottom on small sizes, and show what they said on their own sizes."""

import json
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "docs" / "examples").glob("*.ipynb"))
answers = runpy.run_path(str(ROOT / "tests" / "benchmarks" / "notebooks.py"))["answers"]
QUESTIONS = {
    "training_layout": ("Llama 3 70B on 512 H100", r"Take TP \d+, PP \d+"),
    "other_gpu": ("What would B200 change, and is it worth its price", r"worth its price: tokens cost [+-]\d+%"),
    "disaggregated_serving": (
        "How many GPUs for prefill and for decode",
        r"(replicas|alike): .* the goodput by [+-]\d+%",
    ),
}


def code(path: Path) -> list[dict]:
    """The cells of code of a notebook."""
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def test_each_question_of_a_user_has_its_notebook() -> None:
    assert {path.stem for path in NOTEBOOKS} == set(QUESTIONS)
    for path in NOTEBOOKS:
        assert QUESTIONS[path.stem][0] in path.read_text()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_shows_what_it_said_and_ends_with_the_answer(path: Path) -> None:
    shown = ["".join(text for output in cell["outputs"] for text in output["text"]) for cell in code(path)]
    assert shown[0] == ""  # settings
    assert all(shown[1:]), "python tests/benchmarks/notebooks.py runs them and keeps what they print"
    assert re.search(QUESTIONS[path.stem][1], shown[-1])


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPCAST_EXAMPLES", "small")
    monkeypatch.setenv("OPCAST_HOME", str(tmp_path))
    monkeypatch.setenv("LOKY_MAX_CPU_COUNT", "1")  # a search starts no processes
    said = answers(json.loads(path.read_text()))
    assert all(said[1:])
