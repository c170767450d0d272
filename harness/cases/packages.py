"""Kernels of other packages, where they are installed: what serving engines run in place of torch's own.

Each is a backend of its own, named ``package:kernel``; rows say in ``kernel`` which version it was.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import lru_cache
from importlib import metadata
from typing import Any

from ...datasets.installing import install_command
from .base import Inputs, Unsupported
from .outline import StandIn

EXTRAS = {
    "flash_attn": install_command("flash_attn"),
    "flash_attn_interface": "build the folder hopper of github.com/Dao-AILab/flash-attention",
    "flashinfer": install_command("flashinfer"),
    "vllm": install_command("vllm"),
    "mamba_ssm": "pip install mamba-ssm (it builds its kernels)",
    "causal_conv1d": "pip install causal-conv1d (it builds its kernels)",
    "fla": "pip install flash-linear-attention",
    "sglang": "pip install sglang (in an environment of its own)",
    "flash_mla": "build github.com/deepseek-ai/FlashMLA",
    "transformer_engine": "pip install 'transformer-engine[pytorch]'",
    "transformer_engine_torch": "pip install 'transformer-engine[pytorch]'",
    "deep_gemm": f"{install_command('vllm')}, which carries it, or build github.com/deepseek-ai/DeepGEMM",
    "deep_ep": "build github.com/deepseek-ai/DeepEP",
}
CARRIED = {"deep_gemm": "vllm.third_party.deep_gemm"}
"""Where a package lies in another one, for who has not built it."""


def package(name: str, inputs: Inputs | None = None) -> Any:
    """A module, whose package and version go into ``inputs.kernel``. Unsupported with the way to it where it is not."""
    root = name.partition(".")[0]
    if inputs is not None and inputs.outline:
        inputs.kernel = root
        return StandIn()
    carried = ""
    try:
        module = importlib.import_module(name)
    except Exception as error:  # a build for another torch, CUDA or NCCL fails in its own way: by an assertion, too
        module = _carried(name, error)
        carried = str(getattr(module, "__version__", "of another package"))
    if inputs is not None:
        inputs.kernel = f"{root} {carried or version(root)}".strip()
    return module


def _carried(name: str, reason: Exception) -> Any:
    """A package as another one carries it, where it cannot be imported for a reason of its own. Unsupported, with all
    reasons, where no other has it or that copy is broken, too."""
    root = name.partition(".")[0]
    known = sys.modules.get(root) or importlib.util.find_spec(root)
    absent = isinstance(reason, ModuleNotFoundError) and known is None
    reasons = f"{name} {'is not installed' if absent else 'cannot be imported'} ({first_words(reason)})"
    try:
        if name in CARRIED:
            return importlib.import_module(CARRIED[name])
    except Exception as broken:
        if not (isinstance(broken, ModuleNotFoundError) and f"{CARRIED[name]}.".startswith(f"{broken.name}.")):
            reasons += f", and neither can {CARRIED[name]} ({first_words(broken)})"
    raise Unsupported(f"{reasons}: {EXTRAS[root]}") from reason


@lru_cache
def version(root: str) -> str:
    """The installed version of a package by the module that it is imported as; empty where it tells none."""
    for name in (*metadata.packages_distributions().get(root, ()), root):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return str(getattr(importlib.import_module(root), "__version__", ""))


def first_words(error: Exception) -> str:
    """The first line of an error, short enough for a row."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
