"""What a machine sustains is read off its own rows of long products, and rows timed there come back to boost clock."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from opcast.datasets.devices import load_device, overridden
from opcast.datasets.ops import KINDS, make_op
from opcast.datasets.row_clocks import burst_mhz, relative_clocks
from opcast.datasets.schema import Measurement
from opcast.datasets.store import Store
from opcast.datasets.vocabulary import OpColumns
from opcast.models import clocks, power
from opcast.models.busy import parts
from opcast.models.power import Limits
from opcast.simulator.engines import ask, build_engine
from opcast.simulator.question.sources import Sources
from opcast.simulator.workbench import Workbench

H100 = load_device("h100_sxm")
LONG = make_op("gemm", m=32768, n=32768, k=32768)
SHORT = make_op("gemm", m=4096, n=4096, k=4096)
CLOCK = 0.8
TFLOPS = 700.0  # of long products at boost clock


LONG_ATTENTION, ATTENTION = (
    make_op("attention_prefill", batch=b, heads_q=32, heads_kv=8, head_dim=128, v_head_dim=128, seq_q=n, seq_kv=n)
    for b, n in ((8, 32768), (1, 8192))
)


def columns_of(op) -> dict[str, np.ndarray]:
    return {name: np.array([value]) for name, value in zip(KINDS[op.kind].names, op.dims, strict=True)}


def held_us(op, clock: float, device=H100) -> float:
    """Microseconds of a product at a relative clock that would reach :data:`TFLOPS` at boost."""
    busy = parts(OpColumns(op.kind, columns_of(op), op.dtype, op.out_dtype, "warm"), device)
    boost = float(op.cost.flops) / (TFLOPS * 1e6) / (1.0 - busy.rest / busy.whole)
    return float((boost * busy.slower(clock))[0])


def row(op, us: float, clock: float | None, **changes: object) -> Measurement:
    told = {} if clock is None else {"clocks": "steady" if clock < 1 else "burst", "sm_clock_mhz": 1900.0 * clock}
    values = {"op": op, "device_id": H100.id, "run_id": "r", "backend": "cublas", "source": "harness", "cache": "warm"}
    values["measured_at"] = datetime(2026, 11, 26, tzinfo=UTC)
    return Measurement(**{**values, "latency_us": us, **told, **changes})  # type: ignore[arg-type]


def store_of(folder: Path, *rows: Measurement) -> Store:
    store = Store(folder / "store")
    store.write(list(rows), "r")
    return store


def own(store: Store, device=H100):
    tables = [(kind, store.read(kind, device.id, columns=names)) for kind, names in clocks.COLUMNS.items()]
    return clocks.with_own_clocks(device, tables)


def slower(device, op, burst_us: float) -> float:
    """How many times longer a step's product takes than it did in a burst."""
    limits = Limits(device.tdp_w)
    answer = power.drawn(
        None, OpColumns(op.kind, columns_of(op), op.dtype, op.out_dtype, "warm"), device, limits, np.array([burst_us])
    )
    return float(answer.slower[0])


def test_the_clock_that_a_long_product_kept_is_that_of_steps(tmp_path: Path) -> None:
    """What a step makes of the product is what was timed: at boost clock first, then slowed again."""
    store = store_of(tmp_path, row(LONG, held_us(LONG, CLOCK), CLOCK), row(SHORT, held_us(SHORT, 1.0), 1.0))
    device = own(store)
    assert clocks.anchor(device, "bf16") != clocks.anchor(H100, "bf16")
    assert clocks.anchor(device, "fp8") == clocks.anchor(H100, "fp8"), "no row says anything of it"
    (answer,) = ask(build_engine(device, [store.path], []), [LONG]).latency_us
    assert answer == pytest.approx(held_us(LONG, 1.0), rel=1e-6)
    assert answer * slower(device, LONG, answer) == pytest.approx(held_us(LONG, CLOCK), rel=0.01)
    short = held_us(SHORT, 1.0)
    assert short * slower(device, SHORT, short) == pytest.approx(held_us(SHORT, CLOCK), rel=0.02)


def test_where_no_clock_fell_nothing_is_slowed(tmp_path: Path) -> None:
    burst = held_us(SHORT, 1.0)
    assert slower(H100, SHORT, burst) > 1.04
    assert slower(own(store_of(tmp_path / "short", row(SHORT, burst, 1.0))), SHORT, burst) > 1.04, "it ended too soon"
    assert slower(own(store_of(tmp_path / "long", row(LONG, held_us(LONG, 1.0), 1.0))), SHORT, burst) == 1.0


def test_attention_is_slowed_as_its_own_long_rows_were(tmp_path: Path) -> None:
    """By shipped figures, and by rows of products alone, it keeps its clock: nobody timed it for long."""
    products = own(store_of(tmp_path / "products", row(LONG, held_us(LONG, CLOCK), CLOCK)))
    burst = held_us(ATTENTION, 1.0)
    assert slower(H100, ATTENTION, burst) == slower(products, ATTENTION, burst) == 1.0
    long = row(LONG_ATTENTION, held_us(LONG_ATTENTION, CLOCK), CLOCK, backend="sdpa")
    store = store_of(tmp_path / "held", long, row(ATTENTION, held_us(ATTENTION, 1.0), 1.0, backend="sdpa"))
    device = own(store)
    assert clocks.anchor(device, "bf16") == clocks.anchor(H100, "bf16")
    assert burst * slower(device, ATTENTION, burst) == pytest.approx(held_us(ATTENTION, CLOCK), rel=0.02)
    idle = held_us(ATTENTION, 1.0) * 3.0
    assert slower(device, ATTENTION, idle) == 1.0, "a third of the rate fits under the limit"
    (answer,) = ask(build_engine(device, [store.path], []), [LONG_ATTENTION]).latency_us
    assert answer == pytest.approx(held_us(LONG_ATTENTION, 1.0), rel=0.01)
    kept = row(LONG_ATTENTION, held_us(LONG_ATTENTION, 1.0), 1.0, backend="sdpa")
    assert slower(own(store_of(tmp_path / "kept", kept)), ATTENTION, burst) == 1.0


@pytest.mark.parametrize(
    "changes", [{"source": "somebody"}, {"throttled": True}, {"clocks": None}, {"status": "error", "latency_us": None}]
)
def test_rows_that_tell_nothing_of_this_machine_are_passed_over(tmp_path: Path, changes: dict[str, object]) -> None:
    store = store_of(tmp_path, row(LONG, held_us(LONG, CLOCK), CLOCK, **changes))
    assert own(store) == H100


def test_a_cap_is_taken_from_what_the_machine_sustains(tmp_path: Path) -> None:
    device = own(store_of(tmp_path, row(LONG, held_us(LONG, CLOCK), CLOCK)))
    burst, capped = held_us(LONG, 1.0), power.capped(device, 500.0)
    assert clocks.anchor(capped, "bf16") == clocks.anchor(device, "bf16")
    assert slower(capped, LONG, burst) > slower(device, LONG, burst) > 1.15


def test_a_workbench_knows_what_its_machine_sustains_and_no_other(tmp_path: Path) -> None:
    store_of(tmp_path, row(LONG, held_us(LONG, CLOCK), CLOCK))
    bench = Workbench(Sources.at(str(tmp_path)))
    assert bench.device("h100_sxm") == bench.device(H100) == own(Store(tmp_path / "store"))
    larger = overridden(H100, {"compute_units": 140})
    assert bench.device(larger) == larger
    assert bench.device("h200_sxm") == load_device("h200_sxm")


def test_clocks_count_from_those_of_bursts() -> None:
    words = np.array(["steady", "burst", "burst", None, "steady"], dtype=object)
    mhz = np.array([1500.0, 1980.0, 2000.0, 900.0, np.nan])
    top = burst_mhz(words, mhz, 1830.0)
    assert top == 1990.0
    assert relative_clocks(words, mhz, top).tolist() == [1500 / 1990, 1.0, 1.0, 1.0, 1.0]
    assert burst_mhz(words[:1], mhz[:1], 1830.0) == 1830.0
    assert relative_clocks(words, mhz, np.nan).tolist() == [1.0] * 5
