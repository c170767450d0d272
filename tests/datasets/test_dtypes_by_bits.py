"""Formats that say the bits of a weight in their names: ``w4.84a16``."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opcast.datasets.devices import UNITS_OF, load_device
from opcast.datasets.dtypes import BITS, WEIGHT_BITS, canonical_dtype, itemsize, weight_bits, weight_itemsize
from opcast.datasets.ops import make_op
from opcast.datasets.precisions import PrecisionError, precision_of
from opcast.datasets.vocabulary import OpColumns
from opcast.models.analytical import latency_us


@given(st.integers(100, 1200))
def test_weights_weigh_what_the_name_says(hundredths: int) -> None:
    bits = hundredths / 100
    name = f"w{bits:g}a16"
    assert canonical_dtype(name) == name
    if name not in ("w4a16", "w8a16"):
        assert weight_bits(name) == pytest.approx(bits)
    assert weight_itemsize(name) * 8 == pytest.approx(bits)
    assert itemsize(name) == 2.0  # activations
    assert UNITS_OF[name] == ("bf16", "fp16")


@pytest.mark.parametrize("name", ["w0.5a16", "w13a16", "w4.5", "w4.5a8", "int4.5a16", "wa16", "w4.84a16x"])
def test_other_names_are_no_formats(name: str) -> None:
    assert name not in BITS
    assert name not in WEIGHT_BITS
    with pytest.raises(ValueError, match="unknown dtype"):
        canonical_dtype(name)


def test_named_formats_of_llama_cpp_are_weights_of_their_bits() -> None:
    assert precision_of("q8_0") == ("fp16", "w8.5a16")
    assert precision_of("w4.25a16") == ("fp16", "w4.25a16")
    assert WEIGHT_BITS[precision_of("q4_k_m")[1]] < WEIGHT_BITS[precision_of("q5_k_m")[1]] < 6
    with pytest.raises(PrecisionError, match="does not exist"):
        precision_of("w40a16")


@given(st.floats(1.5, 11.0), st.floats(0.1, 1.0))
def test_fewer_bits_never_take_longer_by_physics(bits: float, more: float) -> None:
    device = load_device("rtx_4090")
    shape = {name: [value] for name, value in {"batch": 1, "m": 1, "n": 8192, "k": 8192, "layout": 1}.items()}
    few, many = (
        latency_us(
            OpColumns("gemm", shape, make_op("gemm", f"w{b:.2f}a16", m=1, n=1, k=1).dtype, "bf16", "cold"), device
        )[0]
        for b in (bits, bits + more)
    )
    assert few <= many
