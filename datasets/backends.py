"""Names of backends, and what a wish for one means. Which one answers is :mod:`..models.choice`.

A backend is named ``framework-version:kernel`` (``vllm-0.24.0:linear``) or by one word (``torch``, ``nccl``).
"""

from __future__ import annotations

from .dtypes import WEIGHT_BITS

DEFAULT_BACKEND = "torch"  # the one a user gets who names none, where there is one
# Weight-only products of TensorRT engines: each call was timed with 8 us of the engine's own (its fastest row on A100,
# where cuBLAS's takes 2.5). No other framework runs them.
PLUGINS = "trt_flow"


def means(label: str, backend: str) -> bool:
    """Whether ``wanted`` is the backend, or the framework or version that it belongs to."""
    return backend == label or backend.startswith((f"{label}-", f"{label}:"))


def framework(backend: str) -> str:
    """``vllm`` of ``vllm-0.24.0:linear``."""
    return version(backend).partition("-")[0]


def version(backend: str) -> str:
    """``vllm-0.24.0`` of ``vllm-0.24.0:linear``."""
    return backend.partition(":")[0]


def answers_anyone(backend: str, dtype: str | None) -> bool:
    """Whether a backend may speak for who named none: plug-ins of an engine do not, for 8- and 4-bit weights."""
    return dtype not in WEIGHT_BITS or not backend.partition(":")[2].startswith(PLUGINS)
