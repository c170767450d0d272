"""Answers of the command line that a person reviewed, question by question: no number changes unseen.

The questions are those of ``cases.yaml``. After a change that is meant, ``python tests/golden/regenerate.py`` writes
the new answers; the diff of ``answers/`` is then reviewed with the change, and the commit says why.
"""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest

from opcast.jobs import helping
from opcast.tests.golden import regenerate
from opcast.tests.golden.asking import ANSWERS, AskedError, ask, kept, questions, stored, text_of, write_home
from opcast.tests.golden.differences import TOLERANCE, differences, report

ASKED = questions()
CONF = Path(__file__).resolve().parents[2] / "conf"


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all questions share: their files, a store, and the graphs that they trace."""
    folder = tmp_path_factory.mktemp("golden") / "home"
    write_home(folder, ASKED)
    return folder


@pytest.mark.parametrize("name", ASKED.cases)
def test_the_answer_is_the_reviewed_one(name: str, home: Path) -> None:
    reviewed = stored(name)
    again = f"If this is meant: python tests/golden/regenerate.py '{name}' (without a name: all), and review the diff."
    assert reviewed is not None, f"{name} has no reviewed answer. {again}"
    try:
        found = differences(reviewed, ask(ASKED.cases[name], home))
    except AskedError as error:
        pytest.fail(f"{name}: no answer: {error}", pytrace=False)
    if found:
        pytest.fail(f"{report(name, found)}\n{again}", pytrace=False)


def chosen(setting: str, verb: str | None = None) -> set[str]:
    """What the cases give as a setting (a last word of it, as in ``schedule``)."""
    given = [words[1:] for words in ASKED.cases.values() if verb in (None, words[0])]
    pairs = [word.partition("=") for word in itertools.chain.from_iterable(given)]
    return {value for name, _, value in pairs if name == setting}


def choices(home: Path, *words: str) -> set[str]:
    """What the command line says that a setting may be, when it is given what it may not be."""
    step = ["simulate", "model=llama3_8b", "cluster=dgx_h100", "workload.global_batch=8", *words]
    with pytest.raises(AskedError, match="is not one of") as said:
        ask(step, home)
    return set(str(said.value).split("is not one of ")[1].split(";")[0].split(", "))


def files(group: str) -> set[str]:
    """The choices of a group of the configuration."""
    return {path.stem for path in (CONF / group).glob("*.yaml")}


def test_the_cases_cover_what_there_is_to_ask(home: Path) -> None:
    assert {words[0] for words in ASKED.cases.values()} >= {"predict", "simulate", "validate"}
    assert chosen("workload") == set(helping.choices("workload"))
    assert chosen("stack") >= files("stack")
    assert chosen("precision") >= files("precision") - {"auto"}
    assert any("simulate" in words and not chosen_word(words, "precision=") for words in ASKED.cases.values())
    assert chosen("parallel.schedule") | {"1f1b"} >= choices(home, "parallel.pp=2", "parallel.schedule=none")
    assert chosen("parallel.cp_style") >= choices(home, "parallel.cp=2", "parallel.cp_style=none")
    assert chosen("parallel.zero_stage") >= {"1", "2", "3"}
    settings = {word.partition("=")[0] for words in ASKED.cases.values() for word in words}
    assert settings >= {f"options.{name}" for name in choices(home, "options={none: 1}")}
    degrees = [answer["parallel"] for name in ASKED.cases if "parallel" in (answer := stored(name) or {})]
    for dimension in ("tp", "pp", "vpp", "dp", "cp", "ep", "etp", "shard"):
        assert any(each.get(dimension, 1) > 1 for each in degrees), dimension


def chosen_word(words: list[str], start: str) -> bool:
    """Whether a question has a word that starts so."""
    return any(word.startswith(start) for word in words)


def test_every_answer_belongs_to_a_case_and_is_written_as_it_is_kept() -> None:
    assert {path.stem for path in ANSWERS.iterdir()} == set(ASKED.cases)
    for name in ASKED.cases:
        assert (ANSWERS / f"{name}.json").read_text("utf-8") == text_of(stored(name) or {})
    assert sum(path.stat().st_size for path in ANSWERS.iterdir()) < 1_500_000


def test_what_differs_is_told_largest_first() -> None:
    old = stored("train_pp_1f1b_megatron_core")
    assert old is not None
    assert differences(old, copy.deepcopy(old)) == []
    new = copy.deepcopy(old)
    new["step_time_s"] *= 1 + TOLERANCE / 2
    new["breakdown"]["by_op"].reverse()
    assert differences(old, new) == []
    new["step_time_s"] = old["step_time_s"] * 1.1
    new["devices"] += 1
    new["added"] = 1.0
    del new["memory"]["where"]
    gemm = next(item for item in new["breakdown"]["by_op"] if item["kind"] == "gemm")
    gemm["time_s"] *= 2
    lines = report("case", differences(old, new)).splitlines()
    assert lines[0].startswith("case: 5 fields differ; step_time_s: ")
    assert lines[1] == "  added: nothing -> 1.0"
    assert lines[2].startswith("  memory.where: ")
    assert lines[3].startswith("  breakdown.by_op[gemm].time_s: ")
    assert lines[3].endswith("+100.00%")
    assert lines[4] == "  devices: 8 -> 9   +12.50%"
    assert lines[5].endswith("+10.00%")
    assert differences({"fits": True}, {"fits": 1})
    assert not differences({"bubble_s": 0.0}, {"bubble_s": 1e-17})


def test_wall_times_and_folders_are_left_out() -> None:
    said = {"wall_time_s": 3.0, "report": "/tmp/x/a.html", "notes": ["read from /tmp/x/files"]}
    assert kept(said, "/tmp/x") == {"report": "HOME/a.html", "notes": ["read from HOME/files"]}


def test_check_shows_a_difference_and_writes_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    name = "predict_rms_norm_a100"
    before = (ANSWERS / f"{name}.json").read_text("utf-8")
    assert regenerate.main([name, "--check"]) == 0
    assert "1 of 1 cases are unchanged" in capsys.readouterr().out
    assert (ANSWERS / f"{name}.json").read_text("utf-8") == before
