"""What every test may use: the folder of public reference measurements, skips that say what is missing, the fast lane.

The fast lane is ``-m "not slow"``. Beside the tests that carry the mark, ``slow.txt`` lists those that took more than
half a second of processor time, all their cases together: of each, the lane keeps as many cases as take that long, and
all of those marked ``essential``. ``pytest --times tests/slow.txt`` runs everything and writes the list anew; with
``-m "not slow"`` it runs the fast lane, and adds to the list what has become slow.
"""

from __future__ import annotations

import gc
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from opcast.datasets.collecting import collect_seldom
from opcast.simulator.passes import verify
from opcast.simulator.trace import cache, entry

ROOT = Path(__file__).resolve().parent.parent
SLOW = Path(__file__).with_name("slow.txt")
SLOW_S = 0.5  # of processor time, child processes included
KEPT_S = 0.25  # of the cases of a slow test, in the fast lane
MARKED_S, USUAL_S = 5.0, 0.05  # taken for a case that is not listed, with the mark and without

# A busy machine is no failure: time is measured by the tests that are about time. The same examples are drawn in every
# run, so that what passed once passes again; `pytest --hypothesis-profile=search` draws others, and more of them.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("patient", PATIENT, derandomize=True)
settings.register_profile("search", PATIENT, max_examples=1000)
settings.load_profile("patient")


def reference_folder() -> Path:
    """The public reference measurements (``data/`` and ``truth/``): $OPCAST_REFERENCE, else beside the checkout."""
    return Path(os.environ.get("OPCAST_REFERENCE") or ROOT.parent / "shared")


@pytest.fixture(scope="session")
def reference_data() -> Path:
    """Folder of the public reference measurements; the test is skipped where they are not at hand."""
    folder = reference_folder()
    if not (folder / "data").is_dir():
        pytest.skip(f"no reference measurements: {folder} has no data/ (set OPCAST_REFERENCE)")
    return folder


@pytest.fixture(scope="session")
def root() -> Path:
    """Root of the checkout."""
    return ROOT


@pytest.fixture(scope="session", autouse=True)
def _verified_passes() -> Iterator[None]:
    """What every pass makes in any test is checked, whatever the test looks at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "EVERY_PASS", True)
        yield


@pytest.fixture(scope="session", autouse=True)
def private_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A store and predictors of the tests' own, in child processes too: the user's are neither read nor written."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPCAST_HOME", str(home))
        yield home


@pytest.fixture(scope="session")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all processes that run tests keep the graphs that one of them has traced."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "traces"


@pytest.fixture(autouse=True)
def _one_trace_of_a_model(request: pytest.FixtureRequest, traces: Path) -> Iterator[None]:
    """What one test traced, no other traces again, but for those about tracing and about what is written where."""
    if any(name in request.node.nodeid for name in ("simulator/trace", "jobs/test_fuzz")):
        yield
        return
    trace = entry.trace_source

    def remembered(source: Any, workload: Any, precision: str, every_layer: bool = False) -> Any:
        if every_layer or source.identity is None:
            return trace(source, workload, precision, every_layer)
        name = cache.graph_name(source, workload, precision)
        graph = cache.load_graph(traces, name)
        if graph is None:
            graph = trace(source, workload, precision)
            cache.save_graph(traces, name, graph)
        return graph

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry, "trace_source", remembered)
        yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip ``gpu`` and ``reference`` tests where what they need is missing."""
    if item.get_closest_marker("sibling") is not None and not item.config.getoption("--every-model"):
        pytest.skip("another of its kind is tried (--every-model tries all)")
    if item.get_closest_marker("gpu") is not None and not has_cuda():
        pytest.skip("needs an NVIDIA GPU and a CUDA torch")
    if item.get_closest_marker("reference") is not None and not (reference_folder() / "data").is_dir():
        pytest.skip("needs the public reference measurements (set OPCAST_REFERENCE)")


def has_cuda() -> bool:
    """Whether torch sees an NVIDIA GPU."""
    import torch

    return torch.cuda.is_available()


# --- the fast lane ---------------------------------------------------------------------------------------

taken_s: Counter[str] = Counter()  # processor time by test function, of this process


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--times FILE``: where to write the list of slow tests; ``--every-model``: siblings of models, too."""
    parser.addoption("--times", help="write tests of more than half a second, and their seconds, to this file")
    parser.addoption(
        "--every-model",
        action="store_true",
        help="also models whose code another model's test runs, and all questions to all faces",
    )


def function_of(item: pytest.Item) -> str:
    """The test's file from ``tests/`` and its name, without its parameters."""
    return item.nodeid.partition("[")[0].removeprefix("tests/")


def recorded_s(text: str) -> dict[str, float]:
    """Seconds of processor time by test function, from the lines of a list of slow tests."""
    return {name: float(seconds) for seconds, name in (line.split() for line in text.splitlines())}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark slow tests as such; files that take longest come first, so that no process ends with them alone."""
    recorded, fast = recorded_s(SLOW.read_text()), config.getoption("markexpr") == "not slow"
    names = [function_of(item) for item in items]
    cases, seen, files_s = Counter(names), Counter[str](), defaultdict[str, float](float)
    for item, name in zip(items, names, strict=True):
        seen[name] += 1
        stays = item.get_closest_marker("essential") is not None
        if name in recorded and not stays and seen[name] > int(KEPT_S * cases[name] / recorded[name]):
            item.add_marker("slow")
        slow = item.get_closest_marker("slow") is not None
        if not (slow and fast):
            usual_s = MARKED_S if slow else USUAL_S
            files_s[name.partition("::")[0]] += recorded[name] / cases[name] if name in recorded else usual_s
    items.sort(key=lambda item: -files_s[function_of(item).partition("::")[0]])


def pytest_configure() -> None:
    """What is imported and collected is no garbage: Python need not look through it again and again."""
    collect_seldom()


def pytest_collection_finish() -> None:
    """From here on garbage is among what the tests make alone."""
    gc.freeze()


def processor_s() -> float:
    """Processor time of this process and of its children that have ended."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Count the processor time of a test, its fixtures included."""
    before = processor_s()
    try:
        return (yield)
    finally:
        taken_s[function_of(item)] += processor_s() - before


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what one of several processes has counted (pytest-xdist)."""
    taken_s.update(getattr(node, "workeroutput", {}).get("taken_s", {}))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the list of slow tests where that was asked for; one of several processes hands over its own."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["taken_s"] = dict(taken_s)
    elif (path := session.config.getoption("--times")) and not session.config.getoption("lf"):
        slow = {name: seconds for name, seconds in taken_s.items() if seconds >= SLOW_S}
        if session.config.getoption("markexpr"):  # of what is listed, not all cases were run
            slow |= recorded_s(SLOW.read_text())
        Path(path).write_text("".join(f"{slow[name]:.1f} {name}\n" for name in sorted(slow)))
