"""What one H200 measured (datasets/measured/h200) against what opcast says of it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from opcast.datasets.devices import load_device
from opcast.datasets.ops import KINDS, make_op
from opcast.datasets.store import Store
from opcast.datasets.vocabulary import OpColumns
from opcast.models import analytical

MEASURED = Path(__file__).resolve().parents[3] / "datasets" / "measured" / "h200"


def kernels(name: str, part: str) -> list[float]:
    """Microseconds of the kernels whose name holds a text, in the profiler's trace of a step."""
    trace = json.loads(gzip.decompress((MEASURED / "traces" / f"{name}.json.gz").read_bytes()))
    return [event["dur"] for event in trace["traceEvents"] if event.get("cat") == "kernel" and part in event["name"]]


def test_every_row_has_its_device_and_nothing_was_throttled() -> None:
    store = Store(MEASURED / "store")
    rows = [row for kind in store.kinds() for row in store.read(kind, status="ok", newest=False).to_pylist()]
    assert len(rows) > 1000
    assert {row["device_id"] for row in rows} == {"h200_sxm"}
    assert not any(row["throttled"] for row in rows)


@pytest.mark.parametrize(
    ("step", "parts"),
    [  # heads that are rotated by halves, and keys and values that a growing cache takes for the first time
        ("llama3_8b_prefill", ((32, 128, 2), (8, 128, 2))),
        ("qwen3_0_6b_prefill", ((16, 128, 2), (8, 128, 2))),
    ],
)
def test_parts_with_gaps_are_joined_as_slowly_as_on_the_gpu(step: str, parts: tuple[tuple[int, ...], ...]) -> None:
    """The wait of a round was read off these very traces: this guards the law's form, and is no prediction."""
    real = sum(kernels(step, "CatArrayBatchedCopy")) / (28 if "qwen" in step else 4)
    device = load_device("h200_sxm")

    def predicted_us(heads: int, width: int, joins: int) -> float:
        size = 2 * 4096 * heads * width
        op = make_op("copy", "bf16", size_bytes=size, run_bytes=width, joins=joins)
        columns = {dim: np.array([getattr(op, dim)]) for dim in KINDS["copy"].names}
        return float(analytical.latency_us(OpColumns("copy", columns, "bf16", None, "warm"), device)[0])

    said = sum(predicted_us(*part) for part in parts) + 2 * predicted_us(8, 128, 1)
    assert said == pytest.approx(real, rel=0.3)
