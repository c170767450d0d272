"""Arrow columns as numpy arrays: the same values as pyarrow's own conversion, and no pandas on the way."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opcast.datasets.columns import codes, group_keys, matching, number_array, numbers, text_array, values
from opcast.datasets.ops import make_op
from opcast.datasets.schema import Measurement
from opcast.datasets.store import Store

INT = st.integers(-(2**63), 2**63 - 1)
FLOAT = st.floats(allow_nan=False)
TEXT = st.text(max_size=4)


@st.composite
def columns(draw: st.DrawFn, element: st.SearchStrategy, kind: pa.DataType) -> pa.ChunkedArray:
    """A column in several chunks, cut out of a longer one so that offsets are not zero."""
    chunks = draw(st.lists(st.lists(element, max_size=12), max_size=4))
    whole = pa.chunked_array([pa.array(chunk, kind) for chunk in chunks], kind)
    start = draw(st.integers(0, len(whole)))
    return whole.slice(start, draw(st.integers(0, len(whole) - start)))


@given(st.data())
@pytest.mark.parametrize(
    ("element", "kind", "missing"),
    [
        (INT, pa.int64(), 0),
        (FLOAT, pa.float64(), np.nan),
        (st.booleans(), pa.bool_(), False),
    ],
)
def test_numbers_are_those_of_the_column(element: st.SearchStrategy, kind: pa.DataType, missing: object, data) -> None:
    column = data.draw(columns(st.none() | element, kind))
    expected = [missing if value is None else value for value in column.to_pylist()]
    np.testing.assert_array_equal(numbers(column), np.array(expected, dtype=kind.to_pandas_dtype()))


def test_timestamps_are_microseconds() -> None:
    moment = datetime(2026, 3, 1, 12, 0, 0, 7, tzinfo=UTC)
    column = pa.chunked_array([pa.array([moment], pa.timestamp("us", tz="UTC"))])
    assert numbers(column).tolist() == [int(moment.timestamp()) * 10**6 + 7]


@given(columns(st.none() | TEXT, pa.string()))
def test_codes_lead_back_to_the_texts(column: pa.ChunkedArray) -> None:
    found, texts = codes(column)
    assert [None if code < 0 else texts[code] for code in found] == column.to_pylist()
    assert values(column) == column.to_pylist()
    assert len(set(texts)) == len(texts)


@given(st.lists(TEXT, max_size=8), st.lists(INT, max_size=8))
def test_arrays_are_those_that_pyarrow_makes(texts: list[str], integers: list[int]) -> None:
    assert text_array(texts).equals(pa.array(texts, pa.string()))
    assert number_array(np.array(integers, dtype=np.int64)).equals(pa.array(integers, pa.int64()))


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 1, -(2**61), 2**61, 2**40]),
            st.sampled_from([0, 7, 2**61, 2**20]),
            st.integers(-(2**60), 2**60),
            st.none() | st.sampled_from(["", "a", "b"]),
        ),
        max_size=30,
    )
)
def test_keys_are_equal_exactly_where_rows_are(rows: list[tuple]) -> None:
    kinds = (pa.int64(), pa.int64(), pa.int64(), pa.string())
    parts = [pa.array([row[i] for row in rows], kind) for i, kind in enumerate(kinds)]
    table = pa.table(parts, names=["a", "b", "c", "d"])
    keys = group_keys(table, table.column_names).tolist()
    assert len(set(zip(keys, rows, strict=True))) == len(set(keys)) == len(set(rows))


def test_matching_keeps_rows_with_the_text() -> None:
    table = pa.table({"name": ["ok", None, "oom", "ok"], "row": [0, 1, 2, 3]})
    assert matching(table, "name", "ok")["row"].to_pylist() == [0, 3]
    assert len(matching(table, "name", "")) == 0


READ = """
import sys
from opcast.datasets.store import Store
store = Store(sys.argv[1])
assert len(store.lookup("gemm", "dev", "warm")) == 1
assert len(store.done("dev")) == 1
assert len(store.read("gemm")) == 1
store.fingerprint()
print(*sorted({"pandas", "torch", "scipy", "sklearn", "yaml"} & set(sys.modules)))
"""


def test_reading_a_store_imports_nothing_heavy(tmp_path: Path) -> None:
    op = make_op("gemm", m=16, n=32, k=64)
    made = datetime(2026, 3, 1, tzinfo=UTC)
    rows = [
        Measurement(op=op, device_id="dev", run_id="run", measured_at=made, latency_us=each, nccl=nccl)
        for each, nccl in ((1.0, None), (2.0, None))
    ]
    Store(tmp_path).write(rows, "run")
    result = subprocess.run([sys.executable, "-P", "-c", READ, str(tmp_path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ""
