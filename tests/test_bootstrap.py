"""The set-up script: what it refuses, what it keeps, and that nothing later can replace torch."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SHARED = ("--dist", "loadfile", "--no-loadscope-reorder")
FAKE_TORCH = """\
__version__ = "2.9.1+cu128"
class version:
    cuda = "12.8"
class ones:
    def __init__(self, *shape, device): pass
    def __matmul__(self, other): return self
    def sum(self): return 512.0
"""
SET_UP = """\
import importlib.util, sys
spec = importlib.util.spec_from_file_location("bootstrap", sys.argv[1])
bootstrap = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bootstrap)
bootstrap.create_venv()
bootstrap.hold(bootstrap.install_torch('nvidia'))
"""


def call(command: list[object], **settings: object) -> subprocess.CompletedProcess[str]:
    """Run a command and keep what it says."""
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, **settings)  # type: ignore[call-overload]


@pytest.fixture
def checkout(root: Path, tmp_path: Path) -> Path:
    """A checkout, in a folder with a blank in its name, of which only the set-up script and project file are there."""
    folder = tmp_path / "a checkout"
    (folder / "jobs").mkdir(parents=True)
    for name in ("bootstrap.py", "bootstrap_engines.py", "constraints.txt"):
        shutil.copy(root / "jobs" / name, folder / "jobs")
    shutil.copy(root / "pyproject.toml", folder)
    return folder


@pytest.mark.parametrize("arguments", [[], ["frobnicate"]])
def test_a_wrong_verb_is_one_line_and_exit_2(checkout: Path, arguments: list[str]) -> None:
    result = call([sys.executable, checkout / "jobs" / "bootstrap.py", *arguments])
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert "quickstart or test" in result.stderr


def test_an_old_python_is_told_what_to_do(checkout: Path) -> None:
    old = (
        "import sys, runpy; sys.version_info = (3, 10, 4, 'final', 0); runpy.run_path(sys.argv[1], run_name='__main__')"
    )
    result = call([sys.executable, "-c", old, checkout / "jobs" / "bootstrap.py", "test"])
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "needs 3.11 or later" in result.stderr


def test_the_script_parses_on_pythons_it_refuses(root: Path) -> None:
    import ast

    ast.parse((root / "jobs" / "bootstrap.py").read_text(), feature_version=(3, 6))


def test_a_missing_venv_module_is_told_with_the_way_out(checkout: Path) -> None:
    bare = (
        "import sys, runpy, importlib.util as u; find = u.find_spec;"
        "u.find_spec = lambda name, *a: None if name == 'ensurepip' else find(name, *a);"
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    result = call([sys.executable, "-c", bare, checkout / "jobs" / "bootstrap.py", "quickstart"])
    assert result.returncode == 2
    assert "apt install python3-venv" in result.stderr.splitlines()[-1]


def test_an_up_to_date_environment_is_used_at_once(checkout: Path) -> None:
    commands = checkout / ".venv" / "bin"
    commands.mkdir(parents=True)
    (commands / "python").symlink_to(sys.executable)
    (commands / "opcast").write_text('#!/bin/sh\necho "$@"\nexit 7\n')
    (commands / "opcast").chmod(0o755)
    digest = call(
        [sys.executable, "-c", "import bootstrap; print(bootstrap.fingerprint())"],
        env={**os.environ, "PYTHONPATH": str(checkout / "jobs")},
    ).stdout.strip()
    (checkout / ".venv" / "bootstrap.json").write_text(json.dumps({"fingerprint": digest, "verbs": ["quickstart"]}))
    result = call([sys.executable, checkout / "jobs" / "bootstrap.py", "quickstart", "format=json"])
    assert (result.stdout, result.stderr, result.returncode) == ("quickstart format=json\n", "", 7)


@pytest.mark.parametrize(
    ("given", "processors", "expected"),
    [
        (["fast", "tests/models"], 2, ["-m", "not slow", "-n", "3", *SHARED, "tests/models"]),
        (["tests/models", "-x"], 64, ["-n", "4", *SHARED, "tests/models", "-x"]),
        (["fast"], 1, ["-m", "not slow"]),
        (["fast", "--pdb"], 8, ["-m", "not slow", "--pdb"]),
        (["--times", "tests/slow.txt"], 3, ["-n", "4", *SHARED, "--times", "tests/slow.txt"]),
    ],
)
def test_the_fast_lane_and_the_processors(
    root: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], processors: int, expected: list[str]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)), raising=False)
    assert runpy.run_path(str(root / "jobs" / "bootstrap.py"))["chosen"](given) == expected


def test_the_cuda_torch_of_the_caller_is_kept_and_held(checkout: Path, tmp_path: Path) -> None:
    host = tmp_path / "host"
    call([sys.executable, "-m", "venv", "--without-pip", host], check=True)
    packages = next(host.glob("lib/python*/site-packages"))
    (packages / "torch").mkdir()
    (packages / "torch" / "__init__.py").write_text(FAKE_TORCH)
    (packages / "torch-2.9.1+cu128.dist-info").mkdir()
    (packages / "torch-2.9.1+cu128.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.9.1+cu128\n"
    )
    result = call([host / "bin" / "python", "-c", SET_UP, checkout / "jobs" / "bootstrap.py"])
    assert result.returncode == 0, result.stderr
    assert "keeping torch 2.9.1+cu128" in result.stderr

    python = checkout / ".venv" / "bin" / "python"
    assert call([python, "-c", "import torch; print(torch.version.cuda)"]).stdout.strip() == "12.8"
    install = [python, "-m", "pip", "install", "--dry-run", "--no-index"]
    satisfied = call([*install, "torch>=2.6"], cwd=tmp_path)
    assert satisfied.returncode == 0, satisfied.stderr
    assert "already satisfied" in satisfied.stdout
    upgrade = call([*install, "torch>=2.10"], cwd=tmp_path)
    assert upgrade.returncode != 0
    assert "torch==2.9.1+cu128" in upgrade.stdout + upgrade.stderr


# ---- versions


@pytest.fixture
def bootstrap(root: Path, tmp_path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("bootstrap", root / "jobs" / "bootstrap.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.CONSTRAINTS = tmp_path / "constraints.txt"
    return module


def project(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]


def test_every_dependency_has_a_range_and_a_version_of_ci_inside_it(root: Path) -> None:
    held = dict(
        line.split("==") for line in (root / "jobs" / "constraints.txt").read_text().splitlines() if "==" in line
    )
    held = {canonicalize_name(name): version for name, version in held.items()}
    assert not {"torch", "triton", "opcast", "pip"} & held.keys(), "these are chosen by the machine"
    extras = project(root)["optional-dependencies"]
    used = [*project(root)["dependencies"], *(each for name in ("all", "dev") for each in extras[name])]
    for text in [*used, *(each for extra in extras.values() for each in extra)]:
        asked = Requirement(text)
        if asked.name == "opcast":
            continue
        assert {each.operator for each in asked.specifier} == {">=", "<"}, text
        version = held.get(canonicalize_name(asked.name))
        assert version in asked.specifier if version else asked.name == "torch" or text not in used, text


def test_requirements_of_extras_within_extras_are_found(bootstrap: ModuleType, root: Path) -> None:
    listed = bootstrap.requirements(("dev",))
    names = {Requirement(text).name for text in listed}
    assert {"numpy", "transformers", "mlflow", "uvicorn", "pytest"} <= names
    assert not {"torch", "opcast"} & names
    assert {Requirement(text).name for text in bootstrap.requirements(("fast",))} == {
        *(Requirement(text).name for text in project(root)["dependencies"]),
        "numba",
    }


def test_the_newest_has_no_ceiling_and_the_lowest_is_exact(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = ["uvicorn[standard]>=0.30,<1", "vllm>=0.10,<1; platform_system == 'Linux'"]
    assert [bootstrap.without_ceiling(each) for each in some] == [
        "uvicorn[standard]>=0.30",
        "vllm>=0.10; platform_system == 'Linux'",
    ]
    monkeypatch.setattr(bootstrap, "VENV", tmp_path)
    assert bootstrap.lowest_pins(some).read_text() == "uvicorn==0.30\nvllm==0.10; platform_system == 'Linux'\n"


@pytest.mark.parametrize("reachable", [True, False])
def test_versions_of_ci_are_taken_where_they_can_be_had(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, reachable: bool
) -> None:
    calls: list[tuple[str, ...]] = []
    said: list[str] = []
    monkeypatch.setattr(bootstrap, "say", said.append)
    monkeypatch.setattr(
        bootstrap, "attempt", lambda *given: calls.append(given) or reachable or "--constraint" not in given
    )
    bootstrap.install_opcast("quickstart", "", "")
    assert str(bootstrap.PINS) in calls[0]
    assert len(calls) == (1 if reachable else 2)
    assert any("taking what their ranges allow" in line for line in said) is not reachable
    assert reachable or "--constraint" not in calls[-1]


@pytest.mark.parametrize("kind", ["", "newest", "lowest"])
def test_other_versions_have_a_folder_of_their_own_and_run_the_tests_alone(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    done: list[Any] = []
    monkeypatch.setattr(bootstrap, "is_ready", lambda verb: True)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(bootstrap, "set_up", lambda verb, kind: done.append((verb, kind)))
    monkeypatch.setattr(bootstrap, "run_checks", lambda given, checks: done.append((given, bool(checks))) or 0)
    assert bootstrap.main(["test", *([kind] if kind else []), "fast", "-x"]) == 0
    assert done == [*([("test", kind)] if kind == "newest" else []), (["fast", "-x"], not kind)]
    assert bootstrap.python().parent.parent.name == (f".venv-{kind}" if kind else ".venv")
    assert not sys.dont_write_bytecode
    assert "PYTHONDONTWRITEBYTECODE" not in os.environ, "each process of the tests would compile opcast"


@pytest.mark.parametrize("types", [0, 1])
def test_a_long_check_runs_beside_the_tests_and_is_told_when_it_fails(
    bootstrap: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    types: int,
) -> None:
    last = ("types", tmp_path, ("sh", "-c", f"echo 3 errors; exit {types}"))
    checks = (("lint", tmp_path, ("echo", "linted")), last)
    monkeypatch.setattr(bootstrap, "link_source", lambda: None)
    monkeypatch.setattr(bootstrap, "tool", lambda name: Path(shutil.which(name) or ""))
    monkeypatch.setattr(bootstrap, "python", lambda: "echo")
    assert bootstrap.run_checks(["-n", "2", "tests/models"], checks) == types
    out, err = capfd.readouterr()
    assert out.splitlines() == ["linted", "-P -m pytest -n 2 tests/models", *["3 errors"] * types]
    assert ("failed: types" in err) is bool(types)


@pytest.mark.parametrize(("codes", "ends"), [((1, 0), 0), ((1, 1), 1), ((2, 0), 1), ((0, 1), 0)])
def test_tests_that_failed_beside_others_are_asked_once_more_alone(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, codes: tuple[int, int], ends: int
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], cwd: Path, env: dict[str, str]) -> int:
        commands.append(command)
        return codes[len(commands) - 1]

    monkeypatch.setattr(bootstrap, "link_source", lambda: None)
    monkeypatch.setattr(bootstrap, "run", run)
    assert bootstrap.run_checks(["-n", "2", "tests/models"], ()) == ends
    assert [("--last-failed" in command) for command in commands] == [False, True][: 1 + (codes[0] == 1)]


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "LOKY_MAX_CPU_COUNT"])
def test_processes_that_share_the_processors_start_no_threads_and_no_processes(
    variable: str, bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(variable, raising=False)
    assert bootstrap.threads(["-n", "2"])[variable] == "1"
    assert variable not in bootstrap.threads(["--pdb"])
    monkeypatch.setenv(variable, "3")
    assert bootstrap.threads(["-n", "2"])[variable] == "3"


# ---- engines


@pytest.fixture
def engines(bootstrap: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(bootstrap, "say", lambda message: None)
    monkeypatch.setitem(sys.modules, bootstrap.__name__, bootstrap)
    spec = importlib.util.spec_from_file_location("bootstrap_engines", root / "jobs" / "bootstrap_engines.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_engine_chooses_the_torch_of_an_environment_of_its_own(
    bootstrap: ModuleType, engines: ModuleType, monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    """In one resolution with opcast: an engine pins its torch, and what is there already would be in the way."""
    done: list[Any] = []
    facts = {"gpu_vendor": lambda: "nvidia", "nvidia_facts": lambda: (595.1, 9.0), "create_venv": lambda: None}
    ends = {"probe_torch": lambda python: ("2.14.0+cu130", "13.0"), "why_not_on_gpu": lambda python: ""}
    for name, value in {**facts, **ends}.items():
        monkeypatch.setattr(bootstrap, name, value)
    monkeypatch.setattr(bootstrap, "pip", lambda *given, lost: done.append(given))
    monkeypatch.setattr(bootstrap, "hold", lambda version: done.append(version))
    assert engines.install(bootstrap, "gpu-vllm", []) == 0
    (wanted, held), folder = done, bootstrap.python().parent.parent.name
    assert "vllm==0.33.0" in wanted
    assert f"{bootstrap.ROOT}[hf,mlflow,fast]" in wanted
    assert not [each for each in wanted if each.startswith("torch")]
    assert (held, folder) == ("2.14.0+cu130", ".venv-gpu-vllm")
    done.clear()
    assert engines.install(bootstrap, "gpu-te", []) == 0
    assert done[1] == "2.14.0+cu130"  # before what is compiled against it
    assert done[-1] == ("--no-build-isolation", *engines.ENGINES["gpu-te"][1])


@pytest.mark.parametrize(
    ("words", "vendor", "driver", "says"),
    [
        (["gpu-vlm"], "nvidia", 595.0, "choose gpu-vllm, gpu-sglang, gpu-te"),
        (["gpu-vllm", "--dry"], "nvidia", 595.0, "install gpu-vllm --dry"),
        (["gpu-vllm"], "", None, "--dry-run says what it installs"),
        (["gpu-sglang"], "nvidia", 570.86, "needs driver 580 or later, this is 570.86"),
    ],
)
def test_an_engine_that_could_not_run_is_one_line(
    bootstrap: ModuleType,
    engines: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    vendor: str,
    driver: float | None,
    says: str,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(bootstrap, "say", said.append)
    monkeypatch.setattr(bootstrap, "gpu_vendor", lambda: vendor)
    monkeypatch.setattr(bootstrap, "nvidia_facts", lambda: (driver, 9.0))
    with pytest.raises(SystemExit):
        bootstrap.main(["install", *words])
    assert len(said) == 1
    assert says in said[0]


def test_versions_of_engines_lie_in_the_ranges_of_the_project(engines: ModuleType, root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    ranges = {each.name: each.specifier for each in map(Requirement, project["optional-dependencies"]["vllm"])}
    ranges |= {each.name: each.specifier for each in map(Requirement, project["optional-dependencies"]["torch"])}
    for packages, built in engines.ENGINES.values():
        for each in map(Requirement, (*packages, *built)):
            for exact in (part for part in each.specifier if part.operator == "=="):
                assert each.name not in ranges or exact.version in ranges[each.name]


def test_the_engines_file_parses_on_old_pythons_too(root: Path) -> None:
    import ast

    ast.parse((root / "jobs" / "bootstrap_engines.py").read_text(), feature_version=(3, 6))


# ---- a GPU's torch


@pytest.mark.parametrize(
    ("driver", "capability", "builds"),
    [
        (580.65, 9.0, ["", "cu128", "cu126", "cu118"]),
        (570.86, 12.0, ["cu128", "cu126", "cu118"]),  # too old for the newest
        (580.65, 7.0, ["cu128", "cu126", "cu118"]),  # V100
        (580.65, 6.1, ["cu126", "cu118"]),  # P4
        (470.82, 8.0, ["cu118"]),
        (390.10, 6.0, []),
        (None, None, ["", "cu128", "cu126", "cu118"]),
    ],
)
def test_builds_fit_the_driver_and_the_card(
    bootstrap: ModuleType, driver: float | None, capability: float | None, builds: list[str]
) -> None:
    assert bootstrap.fitting_builds(driver, capability) == builds


def a_machine(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, works: str | None, host: str | None = None
) -> list:
    """A machine with a GPU on which only one build works: what is installed, and what is said, goes into the list."""
    seen: list[str] = []
    now = {"build": None}

    def attempt(*arguments: str) -> bool:
        now["build"] = arguments[-1].rpartition("/")[2] if "--index-url" in arguments else "newest"
        seen.append(f"install {now['build']}")
        return now["build"] != "missing"

    def why_not(interpreter: object) -> str:
        inside = interpreter == bootstrap.python()
        return "" if (now["build"] if inside else host) == works else "RuntimeError: driver too old"

    def probe(interpreter: object) -> tuple[str, str] | None:
        if interpreter == bootstrap.python():
            return ("2.13", "12.8") if now["build"] else None
        return (host, "13.0") if host else None

    monkeypatch.setattr(bootstrap, "nvidia_facts", lambda: (570.86, 9.0))
    for name, value in {
        "attempt": attempt,
        "why_not_on_gpu": why_not,
        "probe_torch": probe,
        "say": seen.append,
    }.items():
        monkeypatch.setattr(bootstrap, name, value)
    return seen


def test_builds_are_tried_until_one_uses_the_gpu(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = a_machine(bootstrap, monkeypatch, works="cu126", host="2.13")
    bootstrap.CONSTRAINTS.write_text("torch==2.12\n")  # of a set-up before
    assert bootstrap.install_torch("nvidia") == "2.13"
    assert [line for line in seen if line.startswith("install")] == ["install cu128", "install cu126"]
    assert any("2.13" in line and "cannot use the GPU (RuntimeError: driver too old)" in line for line in seen)
    assert not any("NO BUILD" in line for line in seen)
    assert bootstrap.CONSTRAINTS.read_text() == ""


def test_that_no_build_uses_the_gpu_is_said_and_never_silent(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = a_machine(bootstrap, monkeypatch, works="none of them")
    bootstrap.install_torch("nvidia")
    assert "NO BUILD OF TORCH CAN USE THE GPU (RuntimeError: driver too old): update its driver" in seen[-1]
    assert seen[-1].endswith("going on with the CPU")


def test_an_amd_gpu_gets_a_rocm_build(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bootstrap, "has_nvidia_gpu", lambda: False)
    monkeypatch.setattr(bootstrap, "KFD", tmp_path)
    for node, gpu_id in (("0", "0"), ("1", "51057")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "gpu_id").write_text(gpu_id)
    assert bootstrap.gpu_vendor() == "amd"
    seen = a_machine(bootstrap, monkeypatch, works="rocm7.0")
    bootstrap.install_torch("amd")
    assert [line for line in seen if line.startswith("install")] == ["install rocm7.1", "install rocm7.0"]


def test_drivers_are_asked_for_version_and_capability(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = subprocess.CompletedProcess([], 0, "535.104.05, 8.0\n535.104.05, 7.5\n", "")
    monkeypatch.setattr(bootstrap.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(bootstrap, "ask", lambda *_: answer)
    assert bootstrap.nvidia_facts() == (535.104, 7.5)


def test_before_a_commit_the_same_checks_run_as_in_ci(root: Path) -> None:
    import yaml

    checks = runpy.run_path(str(root / "jobs" / "bootstrap.py"))["CHECKS"]
    (repository,) = yaml.safe_load((root / ".pre-commit-config.yaml").read_text())["repos"]
    entries = [hook["entry"] for hook in repository["hooks"]]
    for name, _, (tool, *words) in checks:
        wanted = [word for word in words if word.startswith("-") and word != "--check"]  # the hook writes the format
        assert any(f"bin/{tool}" in entry and all(each in entry for each in wanted) for entry in entries), name
