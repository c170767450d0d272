"""What is installed: every package named, configuration inside, tests outside, public names as promised."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import entry_points, metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOT_PACKAGED = {"tests", "docs", "packing", "build", "dist", "outputs", "multirun", "mlruns"}
PUBLIC = [
    "ChipsReport",
    "Cluster",
    "CompareRequest",
    "Device",
    "Fault",
    "NetworkChoice",
    "Op",
    "Parallel",
    "Plan",
    "PlanReport",
    "PlanRequest",
    "PostTrainReport",
    "PostTrainRequest",
    "PredictRequest",
    "SearchReport",
    "SearchRequest",
    "ServedSearchRequest",
    "ServedSpace",
    "ServingRequest",
    "SimulateRequest",
    "Sources",
    "Space",
    "Stack",
    "Straggler",
    "SweepReport",
    "Transfer",
    "UpgradeReport",
    "UpgradeRequest",
    "ValidateRequest",
    "Work",
    "Workbench",
    "WorkloadFile",
    "__version__",
    "compare_chips",
    "load_cluster",
    "load_device",
    "load_stack",
    "make_op",
    "plan",
    "posttrain",
    "predict",
    "search",
    "search_serving",
    "serving",
    "serving_capacity",
    "serving_caps",
    "serving_sweep",
    "serving_ways",
    "simulate",
    "simulate_file",
    "step_latency",
    "sweep",
    "upgrade",
    "validate",
]


def project() -> dict:
    """The project file."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages() -> set[str]:
    """Names of the packages that the tree holds: each folder with Python files, but tests and scratch."""
    folders = {path.parent.relative_to(ROOT) for path in ROOT.rglob("*.py")}
    kept = {f for f in folders if not any(part.startswith(".") or part in NOT_PACKAGED for part in f.parts)}
    return {".".join(("opcast", *folder.parts)) for folder in kept}


def test_every_package_is_listed() -> None:
    assert set(project()["tool"]["setuptools"]["packages"]) == packages(), "see [tool.setuptools] in pyproject.toml"


def test_every_package_but_datasets_has_an_init_file() -> None:
    folders = {ROOT.joinpath(*name.split(".")[1:]) for name in packages()} - {ROOT / "datasets"}
    assert not [folder for folder in sorted(folders) if not (folder / "__init__.py").is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy so that the checkout stays clean."""
    copy = tmp_path_factory.mktemp("checkout") / "opcast"
    scratch = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", *(NOT_PACKAGED - {"docs", "tests", "packing"}))
    shutil.copytree(ROOT, copy, ignore=scratch)
    (path,) = built(copy, "wheel")
    return path


@pytest.fixture(scope="module")
def wheel_names(wheel: Path) -> list[str]:
    """Names of the files in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_size_of_the_wheel_is_told(wheel: Path) -> None:
    told = re.search(r"The wheel has (\d+) MB", (ROOT / "docs" / "install.md").read_text())
    assert told
    assert abs(wheel.stat().st_size / 1e6 - int(told[1])) < 3


def test_the_predictors_that_come_along_are_counted() -> None:
    shipped = [path.parent for path in (ROOT / "models" / "shipped").glob("*/*/current")]
    here = [folder for folder in shipped if folder.parent.name != "power"]
    devices = {folder.parent.name for folder in here}
    assert f"{len(here)} predictors for {len(devices)} devices" in (ROOT / "docs" / "install.md").read_text()
    assert set(re.findall(r"all (\d+)\b", (ROOT / "docs" / "evidence.md").read_text())) >= {str(len(here))}


def built(checkout: Path, *archives: str) -> list[Path]:
    """The archives (``wheel``, ``sdist``) of a checkout, built in its ``dist`` by the backend that it names."""
    calls = "; ".join(f"print(reproducible.build_{archive}('dist'))" for archive in archives)
    build = f"import sys; sys.path.insert(0, 'packing'); import reproducible; {calls}"
    (checkout / "dist").mkdir()
    result = subprocess.run([sys.executable, "-c", build], cwd=checkout, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return [checkout / "dist" / name for name in result.stdout.splitlines() if name.endswith((".whl", ".tar.gz"))]


def test_archives_are_the_same_bytes_when_they_are_built_again(tmp_path: Path) -> None:
    """From another folder, with files of another age. Without predictors and measurements, which only take time."""
    large = ("shipped", "measured", "docs", "tests", ".*", "*.egg-info", "__pycache__", "dist", "build", "mlruns")
    made = []
    for at, name in enumerate(("first", "second")):
        copy = tmp_path / name / "opcast"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*large))
        for path in copy.rglob("*"):
            os.utime(path, (1.6e9 + at, 1.6e9 + at))
        made.append(built(copy, "wheel", "sdist"))
    for first, second in zip(*made, strict=True):
        assert first.name == second.name
        assert first.read_bytes() == second.read_bytes()
    with tarfile.open(made[0][1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "pyproject.toml",
        "packing/reproducible.py",
        "README.md",
        "LICENSE",
        "conf/base.yaml",
        "jobs/cli.py",
    } <= names
    assert not [name for name in names if name.startswith(("tests", "docs", "."))]


def test_the_wheel_holds_the_code_and_the_configuration_and_nothing_else(wheel_names: list[str]) -> None:
    inside = {name for name in wheel_names if ".dist-info/" not in name}
    code = {f"opcast/{p.relative_to(ROOT).as_posix()}" for part in packages() for p in folder_of(part).glob("*.py")}
    conf = {f"opcast/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "conf").rglob("*.yaml")}
    assert conf, "there is configuration to ship"
    assert code | conf | data_files() | {"opcast/py.typed"} <= inside, "see [tool.setuptools.package-data]"
    assert not [name for name in inside if name.split("/")[1] in NOT_PACKAGED or not name.startswith("opcast/")]


def test_the_wheel_carries_the_licence(wheel_names: list[str]) -> None:
    assert [name for name in wheel_names if name.endswith(".dist-info/licenses/LICENSE")]


def data_files() -> set[str]:
    """Wheel names of the files in packages that are neither code nor documents: templates, predictors, measured steps.

    Measured stores of operators are read in a checkout only: nothing that the command does needs them.
    """
    parts = {ROOT / name.split(".")[1] for name in packages() if "." in name}
    stores = {path.parent for path in (ROOT / "datasets/measured").glob("*/store")}
    files = [path for part in parts for path in part.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    files = [path for path in files if not stores & set(path.parents)]
    kept = [p for p in files if p.suffix not in (".py", ".pyc", ".md") and not p.name.startswith(".")]
    return {f"opcast/{path.relative_to(ROOT).as_posix()}" for path in kept}


def folder_of(package: str) -> Path:
    """The folder of a package name."""
    return ROOT.joinpath(*package.split(".")[1:])


def test_public_names_are_pinned() -> None:
    opcast = importlib.import_module("opcast")
    assert sorted(opcast.__all__) == sorted(PUBLIC)
    assert all(getattr(opcast, name) is not None for name in PUBLIC)


def test_the_command_is_installed() -> None:
    (command,) = [entry for entry in entry_points(group="console_scripts") if entry.name == "opcast"]
    assert command.value == "opcast.jobs.cli:main"


def test_the_version_is_told_once() -> None:
    opcast = importlib.import_module("opcast")
    assert opcast.__version__ == project()["project"]["version"] == metadata("opcast")["Version"]


def test_the_core_needs_no_torch() -> None:
    core = {name.split(">")[0].split("=")[0] for name in project()["project"]["dependencies"]}
    assert not core & {"torch", "triton", "transformers", "mlflow", "ray", "fastapi"}


def test_extras_have_the_names_a_user_would_guess() -> None:
    extras = set(project()["project"]["optional-dependencies"])
    assert {"torch", "mlflow", "hf", "search", "api", "cluster", "data", "all", "dev"} <= extras


def test_every_package_of_an_extra_is_used() -> None:
    """What an extra installs is imported or named in the code; ``dev`` and ``docs`` are tools."""
    modules = {"nvidia-ml-py": "pynvml", "flashinfer-python": "flashinfer", "aiconfigurator-core": "aiconfigurator"}
    extras = project()["project"]["optional-dependencies"]
    wanted = {line.split(">=")[0].split("[")[0].split(";")[0].strip() for e, lines in extras.items() for line in lines
              if e not in ("dev", "docs")} - {"opcast"}  # fmt: skip
    code = "\n".join(path.read_text() for name in packages() for path in folder_of(name).glob("*.py"))
    unused = [name for name in wanted if not re.search(rf"\b{modules.get(name, name.replace('-', '_'))}\b", code)]
    assert not unused
