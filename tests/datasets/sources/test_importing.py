"""Importing foreign measurements: what is kept out and why, repeats, and that every row is accounted for."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.datasets.schema import SchemaError
from opcast.datasets.sources.importing import SOURCES, ImportReport, import_into, load_source
from opcast.datasets.sources.merging import merged
from opcast.datasets.sources.options import ImportOptions
from opcast.datasets.sources.tables import RowBatch, SourceError, combined
from opcast.datasets.store import Store

IMPORT = """
import sys
from opcast.datasets.sources.importing import import_into
from opcast.datasets.store import Store
import_into(Store(sys.argv[2]), "aiconfigurator", sys.argv[1])
"""


def gemm_rows(count: int = 6, **changes: Any) -> dict[str, Any]:
    """Columns of a table of plausible products; ``changes`` replace whole columns."""
    columns = {
        "device": "NVIDIA H100 80GB HBM3",
        "version": "1.0",
        "kernel_source": "cublas",
        "gemm_dtype": "bfloat16",
        "m": 2 ** np.arange(count),
        "n": 4096,
        "k": 4096,
        "latency": np.linspace(0.012, 0.03, count),
    }
    return pd.DataFrame({**columns, **changes}, index=range(count)).to_dict("list")


def write_table(folder: Path, columns: dict[str, Any], name: str = "h100_sxm__gemm__torch__1.0.parquet") -> Path:
    """A table as aiconfigurator keeps them."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def run(store: Store, path: Path, **options: Any) -> ImportReport:
    return import_into(store, "aiconfigurator", path, ImportOptions(**options))


def accounted(report: ImportReport) -> int:
    """Rows that the report says something about."""
    return report.rows_written + report.merged + report.skipped + sum(one.rows for one in report.rejected)


def content(store: Store) -> dict[tuple[str, str], pd.DataFrame]:
    """Every row of a store, whatever the names of its files."""
    found = {}
    for kind in store.kinds():
        for device in store.devices(kind):
            table = store.read(kind, device, newest=False).drop_columns(["run_id"]).to_pandas()
            found[kind, device] = table.sort_values(list(table.columns)).reset_index(drop=True)
    return found


def same(one: Store, other: Store) -> bool:
    left, right = content(one), content(other)
    return left.keys() == right.keys() and all(left[key].equals(right[key]) for key in left)


def test_importing_again_writes_nothing(tmp_path: Path, store: Store) -> None:
    path = write_table(tmp_path, gemm_rows())
    first, before = run(store, path), store.files()
    again = run(store, path)
    assert (first.rows_written, first.skipped) == (6, 0)
    assert (again.rows_written, again.skipped, again.written) == (0, 6, {})
    assert store.files() == before


def test_a_changed_file_is_new(tmp_path: Path, store: Store) -> None:
    run(store, write_table(tmp_path, gemm_rows()))
    assert run(store, write_table(tmp_path, gemm_rows(version="1.1"))).rows_written == 6


def test_a_damaged_file_is_reported_and_the_others_go_on(tmp_path: Path, store: Store) -> None:
    write_table(tmp_path, gemm_rows())
    damaged = write_table(tmp_path, gemm_rows(version="2"), "h100_sxm__gemm__torch__2.0.parquet")
    damaged.write_bytes(damaged.read_bytes()[:-40])
    report = run(store, tmp_path)
    assert report.rows_written == 6
    (refused,) = report.rejected
    assert "damaged" in refused.reason
    assert str(damaged) in refused.example
    assert refused.rows == 0


def test_an_example_names_the_file_below_what_they_share(tmp_path: Path, store: Store) -> None:
    for system in ("h100_sxm", "h200_sxm"):
        folder = tmp_path / system / "gemm" / "torch" / "1.0"
        write_table(folder, gemm_rows(device=None, latency=[*[0.02] * 5, -1.0]), "gemm_perf.parquet")
    (refused,) = run(store, tmp_path).rejected
    assert (refused.rows, refused.example) == (2, "row 5 of h100_sxm/gemm/torch/1.0/gemm_perf.parquet")


def test_a_flipped_bit_costs_that_file_alone(tmp_path: Path, store: Store) -> None:
    write_table(tmp_path, gemm_rows())
    damaged = write_table(tmp_path, gemm_rows(), "h100_sxm__gemm__torch__2.0.parquet")
    damaged.write_bytes(b"PAR1" + bytes(200) + b"PAR1")
    assert run(store, tmp_path).rows_written == 6


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"latency": [0.02, 0.02, np.nan, 0.02, 0.02, 0.02]}, "positive, finite latency_us"),
        ({"latency": [0.02, 0.02, 0.0, 0.02, 0.02, 0.02]}, "positive, finite latency_us"),
        ({"latency": [0.02, 0.02, -0.02, 0.02, 0.02, 0.02]}, "positive, finite latency_us"),
        ({"latency": [0.02, 0.02, 0.02e-3, 0.02, 0.02, 0.02]}, "latency below 0.3"),
        ({"m": [1, 2, 0, 8, 16, 32]}, "gemm.m=0 must be at least 1"),
        ({"m": [1.0, 2.0, 2.5, 8.0, 16.0, 32.0]}, "gemm.m is not an integer"),
        ({"m": [1.0, 2.0, np.nan, 8.0, 16.0, 32.0]}, "gemm.m is not an integer"),
        ({"gemm_dtype": ["bfloat16", "bfloat16", "fp7", "bfloat16", "bfloat16", "bfloat16"]}, "dtype='fp7'"),
        ({"device": [*["NVIDIA H100 80GB HBM3"] * 2, "NVIDIA Z1", *["NVIDIA H100 80GB HBM3"] * 3]}, "device 'z1'"),
    ],
)
def test_what_cannot_be_is_counted_and_kept_out(
    tmp_path: Path, store: Store, changes: dict[str, Any], says: str
) -> None:
    report = run(store, write_table(tmp_path, gemm_rows(**changes)))
    assert report.rows_written == 5
    (refused,) = report.rejected
    assert says in refused.reason
    assert refused.rows == 1
    assert "h100_sxm__gemm__torch__1.0.parquet" in refused.example
    assert 4 not in store.read("gemm")["m"].to_pylist()


def test_milliseconds_read_as_microseconds_are_refused_as_a_whole(tmp_path: Path, store: Store) -> None:
    rows = gemm_rows()
    rows["latency"] = [value / 1e3 for value in rows["latency"]]
    with pytest.raises(SourceError, match=r"nothing usable in 1 file .*latency below 0.3") as error:
        run(store, write_table(tmp_path, rows))
    assert "\n" not in str(error.value)
    assert not store.files()


def test_a_bandwidth_above_the_links_is_refused(tmp_path: Path, store: Store) -> None:
    rows = {
        "nccl_dtype": ["half", "half"],
        "num_gpus": [8, 8],
        "message_size": [2**28, 2**28],
        "kernel_source": ["NCCL", "NCCL"],
        "op_name": ["all_gather", "all_reduce"],
        "latency": [0.9, 2.1],  # 2^29 bytes: all-gather at 522 GB/s of 450
    }
    report = run(store, write_table(tmp_path, rows, "h100_sxm__nccl__nccl__2.23.parquet"))
    assert report.rows_written == 1
    assert [one.reason for one in report.rejected] == ["all_gather: bandwidth above the link's peak"]


def test_a_table_without_a_column_names_it(tmp_path: Path, store: Store) -> None:
    rows = gemm_rows()
    del rows["k"]
    with pytest.raises(SourceError, match="lacks the column 'k'"):
        run(store, write_table(tmp_path, rows))


def test_text_in_place_of_numbers_names_the_column(tmp_path: Path, store: Store) -> None:
    with pytest.raises(SourceError, match=r"column 'm' of table gemm holds .*string"):
        run(store, write_table(tmp_path, gemm_rows(m="many")))


def test_ops_that_all_take_as_long_as_a_host_needs_are_marked_eager(tmp_path: Path, store: Store) -> None:
    dispatched = gemm_rows(n=512, k=512, kernel_source="host", latency=0.15)
    replayed = gemm_rows(n=512, k=512, kernel_source="graph", latency=0.004)
    run(store, write_table(tmp_path, {key: [*dispatched[key], *replayed[key]] for key in replayed}))
    table = store.read("gemm", "h100_sxm")
    eager = set(table.filter(pc.equal(table["timer"], "eager"))["backend"].to_pylist())
    assert eager == {"torch-1.0:host"}
    assert {one.backend for ones in store.lookup("gemm", "h100_sxm", "warm").values() for one in ones} == {
        "torch-1.0:graph"
    }


def test_large_ops_alone_say_nothing_about_the_host(tmp_path: Path, store: Store) -> None:
    run(store, write_table(tmp_path, gemm_rows(m=4096, n=[1024, 2048, 3072, 4096, 5120, 6144], latency=1.0)))
    assert set(store.read("gemm")["timer"].to_pylist()) == {"imported"}


def test_a_host_without_peer_to_peer_copies_is_flagged(tmp_path: Path, store: Store) -> None:
    rows = {
        "nccl_dtype": ["half"] * 2,
        "num_gpus": [2, 8],
        "message_size": [2**28] * 2,
        "kernel_source": ["NCCL"] * 2,
        "op_name": ["all_reduce"] * 2,
        "latency": [26.7, 649.0],
    }
    report = run(store, write_table(tmp_path, rows, "l40s__nccl__nccl__2.27.3.parquet"))
    (finding,) = report.flagged
    assert "groups of 8 ranks" in finding.what
    assert "peer-to-peer" in finding.do


@settings(max_examples=20)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 1, 2, 64, 4096]),
            st.sampled_from([np.nan, -1.0, 0.0, 1e-6, 0.02, 0.5, 90.0]),
            st.sampled_from(["bfloat16", "fp8", "fp7"]),
            st.sampled_from(["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA Z1"]),
        ),
        min_size=1,
        max_size=30,
    )
)
def test_every_row_is_accounted_for(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[Any, ...]]) -> None:
    folder = tmp_path_factory.mktemp("import")
    m, latency, dtype, device = map(list, zip(*rows, strict=True))
    path = write_table(folder, gemm_rows(len(rows), m=m, latency=latency, gemm_dtype=dtype, device=device))
    store = Store(folder / "store")
    try:
        report = run(store, path)
    except SourceError:
        usable = [row for row in rows if row[0] > 0 and row[1] >= 0.5 and row[2] != "fp7" and "Z1" not in row[3]]
        assert not usable
        return
    assert report.rows_read == len(rows) == accounted(report)
    kept = sum(len(store.read("gemm", one, newest=False)) for one in store.devices("gemm"))
    assert report.rows_written == kept
    assert accounted(run(store, path)) == len(rows)


@given(st.lists(st.tuples(st.integers(1, 3), st.floats(1.0, 1e4)), min_size=1, max_size=40))
def test_repeats_become_their_median_and_keep_their_spread(rows: list[tuple[int, float]]) -> None:
    m, latency = map(np.array, zip(*rows, strict=True))
    table, gone, odd = merged("gemm", batch_table(m=m, latency_us=latency))
    assert table["m"].to_pylist() == list(dict.fromkeys(m.tolist()))
    assert len(table) + gone == len(rows)
    apart = [latency[m == each].max() / latency[m == each].min() > 1.2 for each in set(m.tolist())]
    assert bool(odd) == any(apart)  # of at most three ops one is more than a few
    for row in table.to_pylist():
        repeats = latency[m == row["m"]]
        assert row["latency_us"] == pytest.approx(np.median(repeats))
        if len(repeats) == 1:
            assert row["iterations"] is None
            continue
        assert row["iterations"] == len(repeats)
        assert row["latency_min_us"] == repeats.min()
        assert row["latency_p10_us"] == pytest.approx(np.percentile(repeats, 10))
        assert row["latency_p90_us"] == pytest.approx(np.percentile(repeats, 90))
        assert row["latency_mean_us"] == pytest.approx(repeats.mean())
        assert row["latency_std_us"] == pytest.approx(repeats.std(), abs=1e-6)


def batch_table(**columns: Any) -> pa.Table:
    """Rows of products in the store's schema, without a run."""
    given = {"n": 64, "k": 64, "dtype": "bf16", "device_id": "h100_sxm", "backend": "b"}
    when = pd.Timestamp("2026-01-02", tz="UTC").to_pydatetime()
    batch = RowBatch("gemm", {**given, "measured_at": when, **columns})
    ((_, table, _),) = combined([batch], "test", Path("file"))
    return table


def test_a_batch_fills_in_what_it_does_not_say() -> None:
    row = batch_table(m=np.array([1.0, 2.0]), latency_us=[3.0, np.nan], layout="nn", power_w=[1.0, np.nan]).to_pylist()
    assert (row[0]["batch"], row[0]["layout"], row[0]["out_dtype"], row[0]["status"]) == (1, 0, "bf16", "ok")
    assert (row[0]["timer"], row[0]["source"], row[0]["source_ref"]) == ("imported", "test", "file")
    assert row[0]["measured_at"].isoformat() == "2026-01-02T00:00:00+00:00"
    assert (row[0]["power_w"], row[1]["power_w"], row[1]["latency_us"]) == (1.0, None, None)


@pytest.mark.parametrize("columns", [{"m": [1], "depth": 3}, {"latency_us": [3.0]}])
def test_a_batch_that_does_not_fit_its_kind_is_refused(columns: dict[str, Any]) -> None:
    with pytest.raises(SchemaError, match=r"no column 'depth'|lack the column 'm'"):
        batch_table(**{"latency_us": [3.0], **columns})


@pytest.mark.parametrize(
    ("source", "options", "says"),
    [
        ("aiconfigurater", {}, "did you mean aiconfigurator"),
        ("xyz", {}, "one of aiconfigurator, vidur"),
        ("aiconfigurator", {"mapping": "x"}, "takes no mapping=…; its settings: systems, tables, frameworks"),
    ],
)
def test_a_wrong_source_or_option_is_one_line(tmp_path: Path, source: str, options: Any, says: str) -> None:
    with pytest.raises(SourceError, match=says):
        import_into(Store(tmp_path / "store"), source, tmp_path, ImportOptions(**options))


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_keeps_the_contract(name: str, tmp_path: Path) -> None:
    module = load_source(name)
    assert isinstance(module.VERSION, int)
    assert set(getattr(module, "MEANING", ())) <= set(module.OPTIONS)
    assert all(module.OPTIONS.values())
    with pytest.raises(SourceError):
        module.files(tmp_path / "missing", ImportOptions())


def many_tables(folder: Path, count: int) -> Path:
    """A folder of many small tables of several kinds."""
    for number in range(count):
        rows = gemm_rows(200, m=np.arange(1, 201), version=f"{number}", latency=0.02)
        write_table(folder, rows, f"h100_sxm__gemm__torch__{number}.parquet")
    return folder


def test_an_import_killed_in_the_middle_finishes_when_run_again(tmp_path: Path, store: Store) -> None:
    tables = many_tables(tmp_path / "tables", 40)
    process = subprocess.Popen([sys.executable, "-c", IMPORT, str(tables), str(store.path)])
    deadline = time.monotonic() + 600
    while len(store.files()) < 3 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    there = len(store.files())
    report = run(store, tables)
    whole = Store(tmp_path / "whole")
    run(whole, tables)
    assert 3 <= there < 40
    assert report.skipped == 200 * there
    assert same(store, whole)


def test_two_imports_at_once_write_each_row_once(tmp_path: Path, store: Store) -> None:
    tables = many_tables(tmp_path / "tables", 8)
    command = [sys.executable, "-c", IMPORT, str(tables), str(store.path)]
    both = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(timeout=600) for process in both] == [0, 0]
    assert len(store.read("gemm", newest=False)) == 8 * 200
