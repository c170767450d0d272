"""The documents say what is so: their commands and code are run, their links lead somewhere, no verb is left out.

Blocks marked ``bash`` and ``python`` are run in the order they stand, each line of a ``bash`` block by itself, in a
scratch folder with a store of its own. A comment above a block changes that: ``<!-- slow -->`` marks the test slow,
``<!-- not run: reason -->`` leaves the block out. A ``text`` block right below a ``bash`` block shows what its command
prints, shortened: each line must be there, in words as they stand and in figures nearly so.
"""

from __future__ import annotations

import importlib
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("[!.]*/README.md")])
samples = runpy.run_path(str(ROOT / "tests" / "benchmarks" / "samples.py"))
readability = runpy.run_path(str(ROOT / "tests" / "benchmarks" / "readability.py"))
BLOCK, commands, not_said = samples["BLOCK"], samples["commands"], samples["not_said"]
CONF = ROOT / "conf"
BY_HAND = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
MOST_WORDS, LEAST_EASE = 40_000, 75.0
ELSEWHERE = {"importing.md": {"timer", "record_shapes"}, "passes.md": {"phase"}}  # of a table, of torch, of a pattern
TEST_COMMAND = "python3 jobs/bootstrap.py test"
SET_UP = "python3 jobs/bootstrap.py quickstart"
QUICK = "opcast quickstart --cfg job"  # its settings compose; tests/jobs/test_quickstart.py runs all of it, small
TERMS = {
    *("APE", "algbw", "busbw", "bubble", "coverage", "decode", "efficiency", "engine", "envelope", "goodput", "HFU"),
    *("ITL", "MFU", "op", "pipeline parallelism", "prefill", "roofline", "store", "tensor parallelism", "TPOT", "TTFT"),
}


def blocks() -> list[Any]:
    """The blocks of all pages that are code to run."""
    return list(samples["blocks"](PAGES))


def parameters() -> list[object]:
    """Each block as a test parameter, with the marks its note asks for."""
    return [
        pytest.param(b, id=str(b), marks=[pytest.mark.slow, pytest.mark.timeout(3600)] if b.note == "slow" else [])
        for b in blocks()
    ]


def test_an_output_that_is_no_longer_so_is_found() -> None:
    output = "  latency     172 µs  \n  roofline   139 µs, compute bound\n  best   1.50 s  of all, 12.0% less"
    assert not_said("  latency  180 µs\n  roofline 139 µs, compute bound\n best 1.50 s … 12.9% less", output) == []
    wrong = ["  latency  280 µs", "  roofline 139 ms", " of best"]
    assert not_said("\n".join(wrong), output) == wrong


def test_a_figure_of_the_front_page_stays_within_the_interval_of_its_answer() -> None:
    near = samples["nearness"]
    assert near("latency  172 µs\n  interval  160 µs to 180 µs") == pytest.approx(1 - 172 / 180)
    assert near("step time  1.5 s\n  90% interval  900 ms to 1.6 s") == pytest.approx(1 - 1.5 / 1.6)
    assert near("goodput  90.0") == near("latency  1 ms\n  interval  0.3 ms to 3 ms") == samples["NEARLY"]


def test_the_command_that_writes_samples_changes_their_figures_alone() -> None:
    shown = "  step time             1.57 s\n  1   tp=1    3.48 s   9,417   183 ms less, …\n  gone   1\n"
    output = "step time   9 s\nstep time   1.6 s\n 1  tp=1  12.25 s   941  18 ms less, 3 of all"
    new = "  step time             1.6 s\n  1   tp=1    12.25 s  941     18 ms less, …\n  gone   1\n"
    assert samples["refreshed"](shown, output) == (new, ["  gone   1"])
    near = "  1  tp=1  on 8 GPUs  3.2 s  10,599"  # a figure that is near stands before one that is nearer in place
    assert samples["refreshed"]("  1  tp=1  3.1 s  10,600", near) == ("  1  tp=1  3.2 s  10,599\n", [])


@pytest.mark.parametrize("path", BY_HAND, ids=lambda path: path.name)
def test_a_page_is_easy_to_read(path: Path) -> None:
    assert readability["ease"](path.read_text("utf-8"))[0] >= LEAST_EASE, "python tests/benchmarks/readability.py PAGE"


def test_the_documents_are_short() -> None:
    words = {path.name: readability["by_hand"](path.read_text("utf-8")) for path in BY_HAND}
    assert sum(words.values()) <= MOST_WORDS, words
    assert words["findings.md"] <= 2500


def test_tables_of_the_code_are_as_the_code_has_them() -> None:
    filled = runpy.run_path(str(ROOT / "docs" / "blocks.py"))["filled"]
    differ = [path.name for path in BY_HAND if filled(text := path.read_text("utf-8")) != text]
    assert not differ, "python docs/blocks.py --write"


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder and home of the one reader who runs all blocks, in this process: what one loads serves the next.

    The reader has one core, so that searches start no processes.
    """
    folder = tmp_path_factory.mktemp("reader")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("LOKY_MAX_CPU_COUNT", "1")
        patch.setenv("HOME", str(folder))
        patch.setenv("OPCAST_HOME", str(folder / ".opcast"))
        patch.setenv("COLUMNS", "250")  # no table is folded
        yield folder


def run_python(text: str) -> None:
    """Run a block as the program's main module, whose functions it may name as ``__main__:function``."""
    program = ModuleType("__main__")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "__main__", program)
        exec(compile(text, "<block>", "exec"), program.__dict__)


@pytest.mark.parametrize("block", parameters())
@pytest.mark.usefixtures("reader")
def test_the_block_runs(block: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from opcast.jobs.cli import main

    if block.language == "python":
        run_python(block.text)
        return
    for line in commands(block):
        words = shlex.split(line.replace(SET_UP, QUICK))
        if words[0] == "opcast":
            code = main(words[1:])
            assert code == 0, f"{line} ended with {code}:\n{capsys.readouterr().err[-3000:]}"
        elif not line.startswith(TEST_COMMAND):  # that one is what runs this test
            pytest.fail(f"{line!r} is no command this test knows: mark the block `<!-- not run: reason -->`")
    printed = capsys.readouterr()
    output = f"{printed.err}\n{printed.out}"
    near = samples["nearness"](output) if block.page == "README.md" else samples["NEARLY"]
    assert not_said(block.shown, output, near) == [], f"shown below {block}, but not in its output:\n{output}"


def test_pages_import_public_names_from_opcast_itself() -> None:
    from importlib import import_module

    import opcast

    deep = [
        f"{block}: {name} of opcast.{home}"
        for block in blocks()
        for home, names in re.findall(r"^from opcast\.([\w.]+) import (.+)$", block.text, re.MULTILINE)
        for name in names.split(", ")
        if getattr(import_module(f"opcast.{home}"), name) is getattr(opcast, name, None)
    ]
    assert deep == []


def test_the_readme_gives_exactly_two_set_up_commands() -> None:
    first = next(block for block in blocks() if block.page == "README.md")
    assert commands(first) == [SET_UP, TEST_COMMAND]
    assert not [b for b in blocks() if b.page == "README.md" and b != first and "bootstrap.py" in b.text]


def test_ci_runs_the_command_of_the_readme() -> None:
    assert TEST_COMMAND in (ROOT / ".ci" / "run").read_text()


def test_every_verb_is_documented() -> None:
    verbs = importlib.import_module("opcast.jobs.cli").VERBS
    text = "\n".join(path.read_text() for path in PAGES)
    assert not [verb for verb in verbs if not re.search(rf"`opcast {verb}\b", text)]


def test_no_verb_is_documented_that_does_not_exist() -> None:
    verbs = importlib.import_module("opcast.jobs.cli").VERBS
    for path in PAGES:
        text = path.read_text()
        code = "\n".join(match["text"] for match in BLOCK.finditer(text) if match["language"] == "bash")
        named = {*re.findall(r"`opcast (\w+)", text), *re.findall(r"^opcast (\w+)", code, re.MULTILINE)}
        assert named <= {*verbs, "VERB"}, path.name


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_the_code_imports_is_there(path: Path) -> None:
    for module, names in re.findall(r"^from (opcast[.\w]*) import ([\w, ]+)$", path.read_text(), re.MULTILINE):
        lost = [name for name in names.split(", ") if not hasattr(importlib.import_module(module), name)]
        assert not lost, f"{module} has no {lost}"


@cache
def yaml_of(path: Path) -> dict[str, Any]:
    """A file of settings, read once for all verbs; nobody changes it."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a tenth of the time, where PyYAML was built with it
    return dict(yaml.load(path.read_text(), loader) or {})


@cache
def settings_of(verb: str) -> frozenset[str]:
    """Every setting that a verb can be given: its own, and those of every choice of its groups, dims of ops included.

    One that is an empty mapping by default takes what its own text says: it ends with a dot.
    """
    from opcast.datasets.ops import KINDS
    from opcast.datasets.sources.importing import SOURCES, load_source
    from opcast.jobs.questions import CHOICES, of_choice, of_command
    from opcast.simulator.network.build import FIGURES
    from opcast.simulator.question.declaration import defaults_of
    from opcast.simulator.question.network import LINK_FAULTS

    found: set[str] = set()

    def walk(values: object, prefix: str) -> None:
        for name, value in values.items() if isinstance(values, dict) else ():
            found.add(f"{prefix}{name}" + ("." if value == {} else ""))
            found.add(f"{prefix}{name}")
            walk(value, f"{prefix}{name}.")

    pairs = importlib.import_module("opcast.jobs.cli").PAIRS
    for file in ("base", verb, *(pair for words, pair in pairs.items() if words[0] == verb)):
        values = dict(yaml_of(CONF / f"{file}.yaml"))
        entries = [entry for entry in values.pop("defaults", ()) if isinstance(entry, dict)]
        walk({name: value for name, value in values.items() if name != "hydra"} | defaults_of(of_command(file)), "")
        for group in (name for entry in entries for name in entry if not name.startswith("override ")):
            found.add(group)
            for choice in (CONF / group).glob("*.yaml"):
                walk(yaml_of(choice), f"{group}.")
            for name in CHOICES.get(group, ()):
                walk(defaults_of(of_choice(group, name)), f"{group}.")
    parts = importlib.import_module("opcast.jobs.settings").PARTS
    found |= {f"{group}.{name}" for group, names in parts.items() if group in found for name in names}
    found |= {f"{name}." for name in found.intersection(LINK_FAULTS)}
    if "cluster" in found:
        found |= {f"cluster.topology.{name}" for name in (*FIGURES, "shape", "routing")}
    if verb == "predict":
        found |= {f"op.{name}" for kind in KINDS.values() for name in (*kind.names, "dtype", "out_dtype")}
    if verb == "import":
        found |= {option for name in SOURCES for option in load_source(name).OPTIONS}
    return frozenset(found)


def claims(text: str) -> list[tuple[str, str]]:
    """What a page says in backticks of settings: the verb, where it names one, and the name before each ``=``."""
    found = []
    for code in re.findall(r"`([^`\n]+)`", BLOCK.sub("", text)):
        verb = re.match(r"opcast (\w+)", code)
        names = [] if "(" in code else re.findall(r"(?<!\S)\+{0,2}([a-z]\w*(?:\.\w+)*)=", code)
        found += [(verb[1] if verb else "", name) for name in names]
    return found


def is_setting(verb: str, name: str) -> bool:
    """Whether a verb, or any where none is named, has such a setting."""
    verbs = [verb] if verb else list(importlib.import_module("opcast.jobs.cli").VERBS)
    open_ones = tuple(known for each in verbs for known in settings_of(each) if known.endswith("."))
    return any(name in settings_of(each) for each in verbs) or name.startswith(open_ones)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_settings_named_in_the_text_exist(path: Path) -> None:
    wrong = {name for verb, name in claims(path.read_text()) if not is_setting(verb, name)}
    assert not wrong - ELSEWHERE.get(path.name, set())


def test_a_setting_that_is_not_there_would_be_seen() -> None:
    said = claims(
        "`opcast simulate cluster=dgx_h100 parallel.tp=8` and `opcast data parallel.tp=8`, `op.mm=3`, `op.m=4096`"
    )
    assert [is_setting(*each) for each in said] == [True, True, False, False, True]


def test_every_extra_is_documented() -> None:
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "install.md").read_text()
    assert not [extra for extra in extras if f"`{extra}`" not in page]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", path.read_text())
    assert not [t for t in targets if "://" not in t and not (path.parent / t).exists()]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_named_in_the_text_exist(path: Path) -> None:
    text = BLOCK.sub("", path.read_text())
    named = re.findall(r"`((?:datasets|harness|models|simulator|jobs|conf|tests|docs|\.ci)/[\w./*-]*)`", text)
    named += [word for code in re.findall(r"`python3? ([^`]+)`", text) for word in code.split() if word.endswith(".py")]
    assert not [name for name in named if not (any(ROOT.glob(name)) if name.strip("/") else False)]


def test_the_glossary_defines_each_term_once_and_in_order() -> None:
    defined = re.findall(r"^\*\*(.+?)\*\*", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    names = [name.split(",")[0].split(" (")[0] for name in defined]
    assert len(names) == len(set(names))
    assert names == sorted(names, key=str.lower)
    assert not [term for term in TERMS if term not in names]


def test_the_documents_show_the_scores_of_the_calibration() -> None:
    import json

    script = runpy.run_path(str(ROOT / "tests" / "benchmarks" / "scores.py"))
    scores = json.loads((ROOT / "tests" / "evidence" / "calibration_scores.json").read_text())
    assert next(script["score_rows"](script["FRONT"].read_text()))
    for path in (script["FRONT"], script["RESULTS"]):
        text = path.read_text()
        assert script["rewritten"](text, scores) == text, "write them with: python tests/benchmarks/scores.py --write"
    assert max(map(len, script["NAMES"].values())) < 46  # what stands beside the bars does not reach into them
    assert script["drawn"](scores) == script["PICTURE"].read_text(), "the same command draws them"
