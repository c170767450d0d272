"""Names of backends: what a wish means, and which one answers where nobody wished.

A backend is named ``framework-version:kernel`` (``vllm-0.24.0:linear``) or by one word (``torch``, ``nccl``). Measured
rows and predictors are chosen among by the same rules, so that an op has one answer whoever gives it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .dtypes import WEIGHT_BITS

DEFAULT_BACKEND = "torch"  # the one a user gets who names none, where there is one
# Weight-only products of TensorRT engines: each call was timed with 8 us of the engine's own (its fastest row on A100,
# where cuBLAS's takes 2.5). No other framework runs them.
PLUGINS = "trt_flow"


def means(wanted: str, backend: str) -> bool:
    """Whether ``wanted`` is the backend, or the framework or version that it belongs to."""
    return backend == wanted or backend.startswith((f"{wanted}-", f"{wanted}:"))


def framework(backend: str) -> str:
    """``vllm`` of ``vllm-0.24.0:linear``."""
    return version(backend).partition("-")[0]


def version(backend: str) -> str:
    """``vllm-0.24.0`` of ``vllm-0.24.0:linear``."""
    return backend.partition(":")[0]


def answers_anyone(backend: str, dtype: str | None) -> bool:
    """Whether a backend may speak for who named none: plug-ins of an engine do not, for 8- and 4-bit weights."""
    return dtype not in WEIGHT_BITS or not backend.partition(":")[2].startswith(PLUGINS)


def ranked(rows: Mapping[str, int], wanted: str | None, preferences: Sequence[str]) -> list[str]:
    """The backends that may answer, best first; ``rows`` says how many rows each has.

    With a wish those that it means, itself first; without one all, ``torch`` first. Then the order of
    ``preferences`` (backends, versions or frameworks), then most rows, then the name.
    """
    first = DEFAULT_BACKEND if wanted is None else wanted
    known = [each for each in rows if wanted is None or means(wanted, each)]

    def order(backend: str) -> tuple[bool, bool, int, int, str]:
        place = next((at for at, each in enumerate(preferences) if means(each, backend)), len(preferences))
        return backend != first, not means(first, backend), place, -rows[backend], backend

    return sorted(known, key=order)
