"""The shape of the tree: one direction of imports, what loads when, sizes, and names nobody else may shadow.

Which folder may import which is checked by import-linter (``[tool.importlinter]`` in pyproject.toml); here is what it
cannot see: whether an import stands at module level, what a process really loads, and outside names.
"""

from __future__ import annotations

import ast
import graphlib
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("datasets", "harness", "models", "simulator", "jobs")
HEAVY = {"torch", "sklearn", "lightgbm", "mlflow", "transformers", "numba", "pandas", "treelite", "triton"}
# Modules that run a model under torch: they may load it, others load them inside functions.
NEEDS_TORCH = {
    f"simulator/trace/{name}.py"
    for name in (
        "accelerated",
        "adapters",
        "attention",
        "build",
        "capture",
        "depth",
        "kbit",
        "mixers",
        "next_tokens",
        "steps",
        "switches",
        "tracer",
        "vision",
    )
}
NEEDS_NUMBA = {"simulator/serving/by_address.py", "simulator/serving/one_module.py"}
BARE_NODE = {"numpy", "pyarrow", "torch", "triton", "opcast"} | set(sys.stdlib_module_names)
MODULES = sorted(path for part in PARTS for path in (ROOT / part).rglob("*.py"))


def names(paths: list[Path]) -> list[str]:
    """Test ids: paths from the root."""
    return [path.relative_to(ROOT).as_posix() for path in paths]


def part_of(path: Path) -> str:
    """The top-level folder a module lies in."""
    return path.relative_to(ROOT).parts[0]


@cache
def parsed(text: str) -> tuple[ast.Module, tuple[ast.AST, ...]]:
    """The syntax tree of a module's text and all of its nodes, found once for all tests of this file."""
    tree = ast.parse(text)
    return tree, tuple(ast.walk(tree))


def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a module as its file stands."""
    return parsed(path.read_text())[0]


def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a module's syntax tree."""
    return parsed(path.read_text())[1]


def is_type_checking(node: ast.stmt) -> bool:
    """Whether the statement is ``if TYPE_CHECKING:``, which no process runs."""
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def run_at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported: not those inside functions or ``if TYPE_CHECKING``."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_type_checking(node):
            continue
        yield node
        for block in ("body", "orelse", "finalbody"):
            yield from run_at_import(getattr(node, block, []))
        for handler in getattr(node, "handlers", []):
            yield from run_at_import(handler.body)


def imported(nodes: Iterator[ast.AST]) -> Iterator[str]:
    """Top-level names of absolute imports among the nodes."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]


def run(code: str, *arguments: str, cwd: Path = ROOT, path: str = "") -> str:
    """Run code in a fresh interpreter and return what it prints."""
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", code, *arguments]
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def relatives(path: Path) -> Iterator[str]:
    """Modules of this package that a module loads when it is imported, as paths from the root."""
    for node in run_at_import(tree_of(path).body):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            for target in [base, *(base / alias.name for alias in node.names)]:
                if (module := target.with_suffix(".py")).is_file():
                    yield module.relative_to(ROOT).as_posix()


def module_name(path: Path) -> str:
    """Dotted name of a module from the root: ``harness.plan``; a package's is that of its folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(paths: list[Path]) -> dict[str, set[str]]:
    """The modules of this package that each module imports anywhere, packages on the way to them included.

    Inside functions and under ``if TYPE_CHECKING`` too: who names another's type knows of it.
    """
    known = {module_name(path) for path in paths}
    graph = {}
    for path in paths:
        name, found = module_name(path), set[str]()
        for node in nodes_of(path):
            if not isinstance(node, ast.ImportFrom) or not (node.level or (node.module or "").startswith("opcast")):
                continue
            above = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
            base = [*above, *(node.module or "").removeprefix("opcast").strip(".").split(".")]
            base = [part for part in base if part]
            for alias in node.names:
                parts = [*base, alias.name] if ".".join([*base, alias.name]) in known else base
                found |= {".".join(parts[:length]) for length in range(1, len(parts) + 1)} & known
        # A package is loaded before its own modules, so that this is no circle.
        graph[name] = {other for other in found if other != name and not name.startswith(f"{other}.")}
    return graph


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = import_graph(MODULES)
    assert {"datasets.ops", "harness.axes"} <= graph["harness.plan"], "the graph lacks what everybody sees"
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail("imports in a circle: " + " <- ".join(error.args[1]))


def test_a_circle_of_imports_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    first, second = tmp_path / "part" / "first.py", tmp_path / "part" / "second.py"
    first.parent.mkdir()
    first.write_text("from .second import b\n")
    second.write_text("def late():\n    from . import first\n")
    assert import_graph([first, second]) == {"part.first": {"part.second"}, "part.second": {"part.first"}}
    second.write_text("if TYPE_CHECKING:\n    from . import first\n")
    assert import_graph([first, second]) == {"part.first": {"part.second"}, "part.second": {"part.first"}}


def loaded_by(path: Path) -> set[str]:
    """Top-level names of the packages that a module loads when it is imported."""
    return set(imported(run_at_import(tree_of(path).body)))


@pytest.mark.essential
def test_heavy_packages_are_imported_inside_functions() -> None:
    for path in MODULES:
        if part_of(path) not in ("datasets", "models", "simulator"):
            continue
        name = path.relative_to(ROOT).as_posix()
        allowed = {"torch"} if name in NEEDS_TORCH else {"numba"} if name in NEEDS_NUMBA else set()
        found = HEAVY & loaded_by(path)
        assert found <= allowed, f"{path}: import {sorted(found - allowed)} inside the functions that need it"
        assert allowed <= found, f"{path} is no longer an exception: take it off the list"
        loaded = (NEEDS_TORCH | NEEDS_NUMBA) & set(relatives(path))
        assert allowed or not loaded, f"{path} loads {sorted(loaded)}: import it inside a function"


def test_the_harness_loads_with_what_a_bare_gpu_node_has() -> None:
    for path in (path for path in MODULES if part_of(path) == "harness"):
        found = sorted(loaded_by(path) - BARE_NODE)
        assert not found, f"{path}: a bare node may lack {found}: import it inside a function that can do without"


def test_the_harness_runs_where_only_torch_numpy_and_pyarrow_are_installed() -> None:
    code = """\
import importlib, pathlib, sys
class Missing:
    absent = {"yaml", "pandas", "sklearn", "lightgbm", "hydra", "omegaconf", "rich", "plotly", "mlflow", "transformers"}
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.absent:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
for path in sorted(pathlib.Path("harness").rglob("*.py")):
    parts = path.with_suffix("").parts
    if "kernels" not in parts and parts[-1] not in ("__init__", "__main__"):
        importlib.import_module("opcast." + ".".join(parts))
print("loaded")
"""
    assert run(code) == "loaded"


@pytest.mark.essential
def test_modules_and_functions_stay_short() -> None:
    for path in MODULES:
        assert len(path.read_text().splitlines()) <= 500, f"{path}: one idea per module"
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= 100, f"{path}: {node.name} has {length} lines"


def reads_environment(node: ast.AST) -> bool:
    """Whether a node is ``os.environ`` or ``os.getenv``."""
    known = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    return known and ast.unparse(node) in ("os.environ", "os.getenv")


@pytest.mark.essential
def test_no_module_reads_the_environment_or_pickles() -> None:
    for path in MODULES:
        nodes = nodes_of(path)
        if part_of(path) != "jobs" and path != ROOT / "harness" / "environment.py":
            reads = [node.lineno for node in nodes if reads_environment(node)]
            assert not reads, f"{path} {reads}: the environment is read in harness/environment.py and jobs/ only"
        pickling = {"pickle", "cloudpickle", "dill", "shelve"} & set(imported(iter(nodes)))
        assert not pickling, f"{path} imports {pickling}"


def test_nothing_is_called_utils() -> None:
    assert not [name for name in names(MODULES) if Path(name).stem in ("utils", "util", "helpers", "common", "misc")]


def test_importing_opcast_loads_nothing_heavy() -> None:
    code = "import sys, opcast; print(sorted(set(sys.argv[1:]) & set(sys.modules)))"
    assert run(code, *sorted(HEAVY)) == "[]"


def test_predicting_one_op_loads_nothing_heavy() -> None:
    code = """\
import contextlib, io, sys
from opcast.jobs.cli import main
with contextlib.redirect_stdout(io.StringIO()) as out:
    code = main("predict op=gemm op.m=4096 op.n=4096 op.k=4096 op.dtype=bf16 device=h100_sxm format=json".split())
assert code == 0 and '"latency_us"' in out.getvalue()
print(sorted(set(sys.argv[1:]) & set(sys.modules)))
"""
    assert run(code, *sorted(HEAVY)) == "[]"


def test_datasets_has_no_init_file() -> None:
    assert not (ROOT / "datasets" / "__init__.py").exists(), (
        "it would shadow Hugging Face's datasets for anyone started here"
    )


@pytest.fixture
def hugging_face_datasets(tmp_path: Path) -> str:
    """A folder for the path in which a regular package ``datasets`` is installed, as Hugging Face's is."""
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "__init__.py").write_text("class Dataset: ...\nclass IterableDataset: ...\n")
    (tmp_path / "datasets-4.4.1.dist-info").mkdir()
    (tmp_path / "datasets-4.4.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: datasets\nVersion: 4.4.1\n"
    )
    return str(tmp_path)


BOTH = """\
import datasets, transformers
from transformers.utils import is_datasets_available
import opcast.datasets.ops
print(datasets.__file__, is_datasets_available(), hasattr(datasets, "Dataset"), opcast.datasets.ops.__file__)
"""


@pytest.mark.parametrize("folder", [ROOT, ROOT.parent], ids=["root", "elsewhere"])
def test_an_installed_datasets_package_wins_over_the_folder(folder: Path, hugging_face_datasets: str) -> None:
    theirs, available, whole, ours = run(BOTH, cwd=folder, path=hugging_face_datasets).split()
    assert Path(theirs) == Path(hugging_face_datasets, "datasets", "__init__.py")
    assert (available, whole) == ("True", "True")
    assert Path(ours) == ROOT / "datasets" / "ops.py"


def test_transformers_works_from_the_root_without_hugging_face_datasets() -> None:
    code = "from transformers import LlamaConfig, LlamaForCausalLM, Trainer; print(LlamaForCausalLM.__name__)"
    assert run(code) == "LlamaForCausalLM"


def test_no_public_class_name_is_defined_twice() -> None:
    found: dict[str, list[str]] = {}
    for path, name in zip(MODULES, names(MODULES), strict=True):
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(name)
    assert {name: homes for name, homes in found.items() if len(homes) > 1} == {}
