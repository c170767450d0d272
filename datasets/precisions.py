"""The precisions of a step by name: ``conf/precision``, the one list for every verb, face, table and checkpoint.

A precision is the dtype of weights and activations, and the format of linear layers where that is another. Weights of
any number of bits go by it: ``w4.84a16`` (:func:`.dtypes.weight_bits`).
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from .dtypes import weight_bits
from .loading import nearest
from .reading import read_yaml

PRECISION_DIRECTORY = Path(__file__).resolve().parents[1] / "conf" / "precision"


class PrecisionError(ValueError):
    """A precision that nobody knows, with the nearest names that exist."""


@lru_cache
def known_precisions() -> tuple[str, ...]:
    """Names in ``conf/precision``."""
    return tuple(sorted(path.stem for path in PRECISION_DIRECTORY.glob("*.yaml")))


def precision_of(name: str) -> tuple[str, str]:
    """The dtype and the format of linear layers (empty: the dtype) that a name stands for."""
    if not isinstance(name, str):
        raise PrecisionError(f"precision={name!r} must be a word, such as bf16 or fp8")
    return _read(name)


@lru_cache
def _read(name: str) -> tuple[str, str]:
    formats = known_precisions()
    if name not in formats and name.startswith("w") and weight_bits(name):
        return "fp16", name
    if name not in formats:
        raise PrecisionError(
            f"precision={name!r} does not exist; {nearest(name, formats).replace('it has', 'choose from')}"
        )
    values = read_yaml(PRECISION_DIRECTORY / f"{name}.yaml", PrecisionError, f"precision={name}")
    return str(values["dtype"]), str(values.get("quantization") or "")
