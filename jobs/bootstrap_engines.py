"""Environments with the packages of an engine, whose kernels campaigns then measure; part of ``bootstrap.py``.

Engines pin their torch, and bootstrap holds another in ``.venv``: so each has an environment of its own, in which pip
resolves the engine, opcast and torch at once. The versions here are those that pip resolved so on 2026-11-26.

This file must still parse on Python 3.6, as ``bootstrap.py`` must.
"""

from types import ModuleType

EXTRAS = "hf,mlflow,fast"  # what the first run on a GPU needs of opcast
TEST_TOOLS = ("pytest>=8.1,<10", "pytest-timeout>=2.3.1,<3", "hypothesis>=6.108,<7")
DRIVER = 580.0  # the wheels are built for CUDA 13
ENGINES = {  # packages, and those that are built here against the torch that is there by then
    "gpu-vllm": (("vllm==0.33.0", "flash-linear-attention==0.6.0"), ()),
    "gpu-sglang": (("sglang==0.5.23", "flash-linear-attention==0.6.0"), ()),
    "gpu-te": (("torch>=2.10,<3", "flash-linear-attention==0.6.0"), ("transformer-engine[pytorch]==2.20.2",)),
}
BUILD_TOOLS = ("setuptools>=77.0.3,<85", "wheel", "ninja", "pybind11", "packaging")


def install(bootstrap: ModuleType, name: str, arguments: list) -> int:
    """Set up the environment of an engine, or with ``--dry-run`` let pip say what it would install; the exit code."""
    if name not in ENGINES or arguments not in ([], ["--dry-run"]):
        command_line = " ".join([name, *arguments])
        bootstrap.refuse("install {}: choose {}, each alone or with --dry-run".format(command_line, ", ".join(ENGINES)))
    bootstrap.move_to(name)
    packages, built = ENGINES[name]
    packages_wanted = [*packages, "--editable", f"{bootstrap.ROOT}[{EXTRAS}]", bootstrap.NVML, *TEST_TOOLS]
    if arguments:
        bootstrap.create_venv()
        dry_run = [str(bootstrap.python()), "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        return bootstrap.run(dry_run + packages_wanted)
    check_machine(bootstrap, name)
    bootstrap.create_venv()
    bootstrap.say("installing {} (several GB)".format(" and ".join(packages + built)))
    lost = f"{name} could not be installed: see the end of {bootstrap.LOG}"
    bootstrap.pip(*packages_wanted, lost=lost)
    bootstrap.hold(bootstrap.probe_torch(bootstrap.python())[0])
    if built:
        bootstrap.pip(*BUILD_TOOLS, lost=lost)
        bootstrap.pip(
            "--no-build-isolation", *built, lost=lost + " (it is compiled with nvcc: is a CUDA toolkit there?)"
        )
    trouble = bootstrap.why_not_on_gpu(bootstrap.python())
    if trouble:
        bootstrap.refuse(f"the torch of {name} cannot use the GPU ({trouble}): update its driver", code=1)
    bootstrap.say(f"ready: PYTHON={bootstrap.python()} bash jobs/first_gpu_run.sh")
    return 0


def check_machine(bootstrap: ModuleType, name: str) -> None:
    """End with one line where an engine's kernels could not run."""
    if bootstrap.gpu_vendor() != "nvidia":
        bootstrap.refuse(f"{name} needs an NVIDIA GPU, and there is none here; --dry-run says what it installs")
    driver, _ = bootstrap.nvidia_facts()
    if driver is not None and driver < DRIVER:
        bootstrap.refuse(f"{name} needs driver {DRIVER:g} or later, this is {driver:g}: update it")
