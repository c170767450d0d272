"""Set up ``.venv`` beside this checkout and run opcast in it. Standard library only, any Python from 3.11 on.

    python3 jobs/bootstrap.py quickstart [ARGUMENTS OF opcast quickstart]
    python3 jobs/bootstrap.py test [newest | lowest] [fast] [ARGUMENTS OF pytest]
    python3 jobs/bootstrap.py install [gpu-vllm | gpu-sglang | gpu-te] [--dry-run]

``quickstart`` installs what the main job needs and runs it. ``test`` also installs the developer's tools, then runs
the linter, the format check, the import contracts, and the type check beside the tests; CI runs this very command.
``test fast`` leaves slow tests out (``tests/conftest.py``). ``install`` sets up what both need; ``install gpu-vllm``
the packages of an engine, which choose the torch in a folder of their own (``bootstrap_engines.py``).

Packages come in the versions of ``jobs/constraints.txt``, those that CI had, where they can be had, and else in what
``pyproject.toml`` allows. ``test newest`` takes the newest of every dependency, beyond its range too, ``test lowest``
the lowest; both keep the torch of the usual set-up, have a folder of their own, and run the tests alone.

torch comes first, so that nothing later can choose it. Where a GPU is present, the caller's torch is kept if a product
on the GPU succeeds with it; else builds are tried, those first that fit the driver and the card, until one succeeds.
Elsewhere a CPU build is installed. A constraints file, named in ``.venv/pip.conf``, holds that version.
This file must still parse on Python 3.6, to tell an old interpreter what to do.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

OLDEST = (3, 11)
MOST_WORKERS = 4  # processes that run tests: each holds torch
NEWEST_TRIED = (3, 14)
ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
LOG = VENV / "bootstrap.log"
STAMP = VENV / "bootstrap.json"
CONSTRAINTS = VENV / "constraints.txt"
TORCH_CPU = "torch==2.13.0+cpu"  # a local version: the package index itself only has CUDA builds, and never this one
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TORCH_ANY = "torch>=2.6,<3"
TORCH_INDEX = "https://download.pytorch.org/whl/"
TORCH_CUDA = (  # build, oldest driver, least compute capability; newest first, "" is what the package index has
    ("", 580, 7.5),
    ("cu128", 525, 7.0),
    ("cu126", 525, 5.0),
    ("cu118", 450, 3.7),  # torch 2.7 is its last
)
TORCH_ROCM = ("rocm7.1", "rocm7.0", "rocm6.4", "rocm6.3")
PINS, ENGINES = ROOT / "jobs" / "constraints.txt", ROOT / "jobs" / "bootstrap_engines.py"
KINDS = ("newest", "lowest")  # of versions that `test` can be asked to take instead
NVML = "nvidia-ml-py>=12.535.77,<14"
PACKETS = ("--no-deps", "--only-binary", ":all:", "ns3>=3.44,<4")  # no Python bindings, which take minutes to build
# Tests hold traces against these; what they use besides drags Jupyter in.
CHAKRA = ("--no-deps", "mlc-chakra>=1.0.0,<2", "HolisticTraceAnalysis>=0.5.0,<1", "psutil>=5,<8")
EXTRAS = {"quickstart": ("hf", "mlflow", "fast", "api"), "test": ("dev",), "install": ("dev",)}  # dev includes them
SOURCE = VENV / "src"  # holds a link `opcast` to the checkout, which mypy and import-linter read as the package
CHECKS = (  # name, folder to run in, command
    ("lint", ROOT, ("ruff", "check", ".")),
    ("format", ROOT, ("ruff", "format", "--check", ".")),
    ("imports", SOURCE, ("lint-imports", "--config", str(ROOT / "pyproject.toml"))),
    ("types", ROOT, ("mypy",)),
)
LONG = ("imports", "types")  # seconds and a minute, on one processor each: they run beside the tests
REQUIREMENT = re.compile(r"([\w.-]+)(\[[\w,]+\])?([^;]*)(;.*)?")  # name, extras, range, marker
TORCH_PROBE = "import torch; v = torch.version; print(torch.__version__, v.cuda or getattr(v, 'hip', '') or '')"
GPU_PROBE = "import torch; x = torch.ones(8, 8, device='cuda'); assert float((x @ x).sum()) == 512.0"
KFD = Path("/sys/class/kfd/kfd/topology/nodes")  # devices of AMD's compute driver


def say(message: str) -> None:
    """Print to stderr: stdout belongs to the command that runs afterwards."""
    print("bootstrap: " + message, file=sys.stderr, flush=True)


def refuse(message: str, code: int = 2) -> NoReturn:
    """End with one line: 2 for what the caller can mend at once, 1 for an installation that failed."""
    say(message)
    sys.exit(code)


if sys.version_info < OLDEST:
    _newer = [name for name in ("python3.14", "python3.13", "python3.12", "python3.11") if shutil.which(name)]
    _way = "run this with " + _newer[0] if _newer else "install Python 3.11 or later and run this with it"
    refuse(f"Python {platform.python_version()} is too old, opcast needs 3.11 or later: {_way}")


def main(arguments: list[str]) -> int:
    """Set up what the verb needs and run it; the exit code is that of what ran."""
    if not arguments or arguments[0] not in EXTRAS:
        refuse("say what to run: quickstart or test (or install), as in `python3 jobs/bootstrap.py quickstart`")
    verb, extra = arguments[0], arguments[1:]
    if verb == "install" and extra:
        return runpy.run_path(str(ENGINES))["install"](sys.modules[__name__], extra[0], extra[1:])
    if verb != "quickstart":  # tests start hundreds of processes: each would compile opcast anew
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        sys.dont_write_bytecode = False
    kind = extra.pop(0) if verb == "test" and extra and extra[0] in KINDS else ""
    move_to(kind)
    if kind == "newest" or not is_ready(verb):  # what is newest may have changed since
        set_up(verb, kind)
    if verb == "install":
        return 0
    return run_checks(extra, () if kind else CHECKS) if verb == "test" else become([str(tool("opcast")), verb, *extra])


def move_to(kind: str) -> None:
    """Work in the environment of a kind of versions: ``.venv``, or one beside it."""
    global VENV, LOG, STAMP, CONSTRAINTS, SOURCE
    VENV = ROOT / (f".venv-{kind}" if kind else ".venv")
    LOG, STAMP, CONSTRAINTS = VENV / "bootstrap.log", VENV / "bootstrap.json", VENV / "constraints.txt"
    SOURCE = VENV / "src"


# ---- what is there already


def fingerprint() -> str:
    """Hash of all that decides what is installed: the project file, this file, and where the checkout lies."""
    digest = hashlib.sha256(str(ROOT).encode())
    for path in (ROOT / "pyproject.toml", Path(__file__), PINS):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def is_ready(verb: str) -> bool:
    """Whether ``.venv`` works and was set up from these very files for this verb or a larger one."""
    try:
        stamp = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return False
    return python().exists() and stamp.get("fingerprint") == fingerprint() and verb in stamp.get("verbs", ())


def python() -> Path:
    """The environment's interpreter."""
    return tool("python")


def tool(name: str) -> Path:
    """A command installed in the environment."""
    return VENV / "Scripts" / f"{name}.exe" if os.name == "nt" else VENV / "bin" / name


def probe_torch(interpreter: str | Path) -> tuple[str, str] | None:
    """Version of an interpreter's torch and the CUDA (or HIP) version it is built for; None without a usable one."""
    result = ask(str(interpreter), "-c", TORCH_PROBE)
    if result.returncode != 0:
        return None
    version, _, accelerator = result.stdout.strip().splitlines()[-1].partition(" ")
    release = tuple(int(number) for number in version.split("+")[0].split(".")[:2])
    return (version, accelerator.strip()) if release >= (2, 6) else None


def why_not_on_gpu(interpreter: str | Path) -> str:
    """Why an interpreter's torch cannot multiply on the GPU, in one line; "" when it can."""
    result = ask(str(interpreter), "-c", GPU_PROBE)
    return "" if result.returncode == 0 else last_line(result.stderr)


def gpu_vendor() -> str:
    """``nvidia`` or ``amd`` where this machine shows such a GPU, as the drivers say and not torch; "" without one."""
    if has_nvidia_gpu():
        return "nvidia"
    for path in KFD.glob("*/gpu_id"):
        with contextlib.suppress(OSError):
            if path.read_text().strip() not in ("", "0"):
                return "amd"
    return ""


def has_nvidia_gpu() -> bool:
    """Whether this machine shows an NVIDIA GPU."""
    with contextlib.suppress(OSError):
        if any(Path("/proc/driver/nvidia/gpus").iterdir()):
            return True
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return False
    result = ask(smi, "-L")
    return result.returncode == 0 and "GPU" in result.stdout


def nvidia_facts() -> tuple[float | None, float | None]:
    """The driver's version (its first two parts) and the least compute capability; None for what is not told."""
    smi = shutil.which("nvidia-smi")
    result = ask(smi, "--query-gpu=driver_version,compute_cap", "--format=csv,noheader") if smi else None
    matches = re.findall(r"^(\d+\.\d+)[^,]*, *(\d+\.\d+)", result.stdout, re.MULTILINE) if result else []
    if matches:
        return float(matches[0][0]), min(float(capability) for _, capability in matches)
    with contextlib.suppress(OSError, ValueError):
        return float(".".join(Path("/sys/module/nvidia/version").read_text().split(".")[:2])), None
    return None, None


def fitting_builds(driver: float | None, capability: float | None) -> list[str]:
    """Builds of torch that may run with a driver on a compute capability, newest first; None is not known."""
    return [
        build
        for build, oldest, least in TORCH_CUDA
        if (driver is None or driver >= oldest) and (capability is None or capability >= least)
    ]


# ---- setting up


def set_up(verb: str, kind: str = "") -> None:
    """Create or repair ``.venv`` for the verb; the stamp is written last, so that a broken-off run is taken up."""
    began = time.monotonic()
    STAMP.unlink(missing_ok=True)
    create_venv()
    vendor = gpu_vendor()
    hold(install_torch(vendor))
    install_opcast(verb, vendor, kind)
    verbs = {"quickstart"} if verb == "quickstart" else set(EXTRAS)
    STAMP.write_text(json.dumps({"fingerprint": fingerprint(), "verbs": sorted(verbs)}))
    say(f"{VENV} is ready after {time.monotonic() - began:.0f} s")


def create_venv() -> None:
    """An empty environment where there is none that works with the Python that runs this."""
    mine = f"{sys.version_info[0]}.{sys.version_info[1]}"
    version = "import sys, pip; print('%d.%d' % sys.version_info[:2])"
    if python().exists() and ask(str(python()), "-c", version).stdout.strip() == mine:
        return
    if any(importlib.util.find_spec(name) is None for name in ("venv", "ensurepip")):
        refuse("this Python lacks the venv module: install it (Debian, Ubuntu: apt install python3-venv) and run again")
    say(f"creating {VENV} with Python {platform.python_version()}")
    result = ask(sys.executable, "-m", "venv", "--clear", str(VENV))
    if result.returncode != 0:
        refuse(f"could not create {VENV}: {last_line(result.stdout + result.stderr)}")


def install_torch(vendor: str) -> str:
    """See that the environment has a torch that fits this machine and its GPU's vendor; returns its version."""
    present = probe_torch(python())
    if present is None or (vendor and why_not_on_gpu(python())):
        host = probe_torch(sys.executable)
        trouble = why_not_on_gpu(sys.executable) if host is not None and host[1] and vendor else ""
        if host is not None and host[1] and not trouble:
            say(f"keeping torch {host[0]} of {sys.executable} (built for {host[1]})")
            share_host_packages()
        elif vendor:
            if trouble and host is not None:
                say(f"torch {host[0]} of {sys.executable} cannot use the GPU ({trouble})")
            install_gpu_torch(vendor)
        elif sys.platform == "linux":
            say(f"no GPU found: installing the CPU build {TORCH_CPU} (about 200 MB)")
            pip(TORCH_CPU, "--extra-index-url", TORCH_CPU_INDEX, "--retries", "1", lost=torch_lost())
        else:
            say("installing torch")
            pip(TORCH_ANY, lost=torch_lost())
        present = probe_torch(python())
    if present is None:
        refuse(f"torch was installed but does not import: see `{python()} -c 'import torch'`", code=1)
    return present[0]


def install_gpu_torch(vendor: str) -> None:
    """Try builds of torch until one multiplies on the GPU. When none does that is said, and the CPU is what is left."""
    driver, capability = nvidia_facts() if vendor == "nvidia" else (None, None)
    builds = fitting_builds(driver, capability) if vendor == "nvidia" else list(TORCH_ROCM)
    card = {"nvidia": "an NVIDIA GPU", "amd": "an AMD GPU"}[vendor]
    facts = (f", driver {driver}" if driver else "") + (f", compute capability {capability}" if capability else "")
    trouble = "the driver is too old for every build" if not builds else ""
    if CONSTRAINTS.exists():
        CONSTRAINTS.write_text("")  # it holds the torch of an earlier set-up, which cannot use the GPU
    for build in builds:
        say(f"{card} is present{facts}: installing torch {build or 'as the package index has it'} (several GB)")
        index = ["--index-url", TORCH_INDEX + build] if build else []
        if not attempt("--upgrade", "--force-reinstall", TORCH_ANY, *index):
            trouble = f"no torch {build} for this Python could be had (pip's words: {LOG})"
            continue
        trouble = why_not_on_gpu(python())
        if not trouble:
            return
        say(f"it cannot use the GPU: {trouble}")
    say(f"NO BUILD OF TORCH CAN USE THE GPU ({trouble}): update its driver, then remove {VENV}; going on with the CPU")
    if probe_torch(python()) is None:
        pip(TORCH_CPU, "--extra-index-url", TORCH_CPU_INDEX, "--retries", "1", lost=torch_lost())


def torch_lost() -> str:
    """One line for a torch that cannot be had, with the ways out."""
    mine = f"Python {sys.version_info[0]}.{sys.version_info[1]} on {sys.platform} {platform.machine()}"
    if sys.version_info[:2] <= NEWEST_TRIED:
        first = f"check that {TORCH_CPU_INDEX} can be reached, or let PIP_FIND_LINKS name a folder with the wheel"
    else:
        first = f"run this with Python 3.11 to {NEWEST_TRIED[0]}.{NEWEST_TRIED[1]}"
    return (
        f"no torch for {mine} could be had (pip's words: {LOG}): {first}; or install any torch from 2.6 on with "
        f"`{python()} -m pip install ...` and run this again, it is kept"
    )


def share_host_packages() -> None:
    """Append the calling interpreter's site-packages to the environment's path: its own packages still come first.

    ``--system-site-packages`` would skip those of an activated environment.
    """
    inside = ask(str(python()), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
    outside = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages") and Path(p).is_dir()]
    Path(inside, "opcast_host.pth").write_text("".join(f"{path}\n" for path in outside))


def hold(torch_version: str) -> None:
    """Hold the torch version against bootstrap's own and every later ``pip install`` in the environment."""
    CONSTRAINTS.write_text(f"torch=={torch_version}\n")
    settings = VENV / ("pip.ini" if os.name == "nt" else "pip.conf")
    settings.write_text(f"[global]\nconstraint = {CONSTRAINTS.as_uri()}\n")  # as_uri: a path with blanks would be split


def install_opcast(verb: str, vendor: str, kind: str) -> None:
    """Editable install of this checkout with the verb's extras, in a kind of versions."""
    extras = ",".join(EXTRAS[verb])
    say(f"installing opcast[{extras}]" + (f" with the {kind} of each dependency" if kind else ""))
    packages = [NVML] if vendor == "nvidia" else []
    here = ["--editable", f"{ROOT}[{extras}]"]
    lost = f"opcast[{extras}] could not be installed: see the end of {LOG}, then run the same command again"
    if kind == "newest":
        unbounded = [without_ceiling(requirement) for requirement in [*requirements(EXTRAS[verb]), *packages]]
        pip("--upgrade", "--upgrade-strategy", "eager", *unbounded, lost=lost)
        pip("--no-deps", "--editable", str(ROOT), lost=lost)
        pins = []
    else:
        pins = ["--constraint", str(lowest_pins(requirements(EXTRAS[verb])) if kind else PINS)]
        if not attempt(*here, *packages, *pins):
            if kind:
                refuse(lost, code=1)
            say(f"the versions that CI had cannot all be had here (pip's words: {LOG}): taking what their ranges allow")
            pins = []
            pip(*here, *packages, lost=lost)
    if verb != "quickstart" and shutil.which("c++") and not attempt(*PACKETS, *pins):
        say("ns-3 has no wheel for this Python: its tests are skipped")
    if verb != "quickstart" and not attempt(*CHAKRA, *pins):
        say("the reference tools of Chakra cannot be had: tests against them are skipped")


def requirements(extras: tuple[str, ...]) -> list[str]:
    """What opcast and some of its extras require as ``pyproject.toml`` says it, without torch, which comes first."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting, listed = [*project["dependencies"], f"opcast[{','.join(extras)}]"], []
    while waiting:
        text = waiting.pop(0)
        name, inner, _, _ = REQUIREMENT.fullmatch(text).groups()  # type: ignore[union-attr]
        if name == "opcast":
            waiting += [need for extra in inner[1:-1].split(",") for need in project["optional-dependencies"][extra]]
        elif name != "torch" and text not in listed:
            listed.append(text)
    return listed


def without_ceiling(requirement: str) -> str:
    """A requirement of any version from its lowest on."""
    name, extras, bounds, marker = REQUIREMENT.fullmatch(requirement).groups("")  # type: ignore[union-attr]
    floors = [bound for bound in bounds.split(",") if not bound.strip().startswith("<")]
    return name + extras + ",".join(floors) + marker


def lowest_pins(required: list[str]) -> Path:
    """A constraints file with the lowest version of each requirement; what these require themselves stays free."""
    path = VENV / "lowest.txt"
    lines = []
    for requirement in required:
        name, _, bounds, marker = REQUIREMENT.fullmatch(requirement).groups("")  # type: ignore[union-attr]
        lines += [f"{name}=={bound.strip()[2:]}{marker}\n" for bound in bounds.split(",") if ">=" in bound]
    path.write_text("".join(lines))
    return path


def pip(*arguments: str, lost: str) -> None:
    """Run pip; ends with ``lost`` when it fails."""
    if not attempt(*arguments):
        refuse(lost, code=1)


def attempt(*arguments: str) -> bool:
    """Run pip with its talk in the log; on a terminal its latest line is shown. Returns whether it could.

    Of 25,000 modules most are never imported: Python compiles those that are, when they are, unless it may not.
    """
    options = ["--no-input", "--disable-pip-version-check", *(() if sys.dont_write_bytecode else ("--no-compile",))]
    command = [str(python()), "-m", "pip", "install", *options, *arguments]
    live = sys.stderr.isatty()
    width = shutil.get_terminal_size().columns - 1
    with LOG.open("a") as log, talk(command) as process:
        log.write(f"$ {' '.join(command)}\n")
        for line in process.stdout or ():
            log.write(line)
            if live:
                print("\r\033[K" + line.strip()[:width], end="", file=sys.stderr, flush=True)
    if live:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return process.returncode == 0


def last_line(text: str) -> str:
    """The last line that is not blank, where programs put the reason."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no reason given")


def talk(command: list[str], cwd: Path | None = None) -> subprocess.Popen[str]:
    """Start a command whose output, errors included, is read line by line."""
    return subprocess.Popen(
        command, cwd=cwd or VENV, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ask(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command for its answer, from a folder where nothing of ours can be imported by accident."""
    elsewhere = Path(sys.executable).parent
    return subprocess.run(command, check=False, cwd=elsewhere, stdin=subprocess.DEVNULL, capture_output=True, text=True)


def run(command: list[str], cwd: Path | None = None, env: dict[str, str] | None = None) -> int:
    """Run a command on this terminal and return its exit code."""
    return subprocess.run(command, check=False, cwd=cwd, env=env).returncode


def become(command: list[str]) -> int:
    """Let a command take this process's place, so that signals reach it and its exit code is ours."""
    if os.name == "nt":
        return run(command)
    os.execv(command[0], command)


def link_source() -> None:
    """A folder in which the checkout is called ``opcast``, whatever its own name is."""
    SOURCE.mkdir(exist_ok=True)
    if not (SOURCE / "opcast").exists():
        (SOURCE / "opcast").symlink_to(ROOT, target_is_directory=True)


def chosen(arguments: list[str]) -> list[str]:
    """Arguments of pytest: ``fast`` leaves slow tests out, and files are shared out over the processors."""
    lane = ["-m", "not slow"] if arguments[:1] == ["fast"] else []
    arguments = arguments[1:] if lane else arguments
    alone = any(argument.startswith(("-n", "--pdb", "--trace", "-s", "--capture")) for argument in arguments)
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(processors + 1, MOST_WORKERS)  # one more: a fifth of the time, tests wait for others' processes
    shared = [] if alone or processors == 1 else ["-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"]
    return [*lane, *shared, *arguments]


def run_checks(pytest_arguments: list[str], checks: tuple = CHECKS) -> int:
    """Static checks, then the tests, all even when one fails. A long check runs beside the tests and speaks after them.

    Tests that failed beside others are asked once more, alone: what passes then is unsteady, and pytest names it.
    """
    failed, beside = [], []
    link_source()
    pytest_arguments = chosen(pytest_arguments)
    for name, folder, command in checks:
        full_command = [str(tool(command[0])), *command[1:]]
        say(f"{name}: {' '.join(command)}" + (", beside the tests" if name in LONG else ""))
        if name in LONG:
            beside.append((name, talk(full_command, folder)))
        elif run(full_command, cwd=folder) != 0:
            failed.append(name)
    say(" ".join(["tests: pytest", *pytest_arguments]))
    tests, environment = [str(python()), "-P", "-m", "pytest", *pytest_arguments], threads(pytest_arguments)
    code = run(tests, ROOT, environment)
    if code == 1 and "-n" in pytest_arguments:  # other codes are pytest's own: stopped, not read, nothing to run
        say("unsteady, or broken? the tests that failed, once more, one at a time")
        code = run([*tests, "-n", "0", "--last-failed", "--maxfail=9", "-rA"], ROOT, environment)
    failed += ["tests"] * (code != 0)
    failed += [name for name, process in beside if not ends_well(process)]
    if failed:
        say("failed: " + ", ".join(failed))
    return int(bool(failed))


def threads(arguments: list[str]) -> dict[str, str]:
    """Environment of the tests: those that share the processors start no threads and no processes for all of them."""
    return {"OMP_NUM_THREADS": "1", "LOKY_MAX_CPU_COUNT": "1", **os.environ} if "-n" in arguments else dict(os.environ)


def ends_well(process: subprocess.Popen[str]) -> bool:
    """Wait for a check that runs beside the tests, and print what it said if it failed."""
    output, _ = process.communicate()
    if process.returncode != 0:
        print(output, end="", flush=True)
    return process.returncode == 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        say("stopped; run the same command again to go on")
        sys.exit(130)
