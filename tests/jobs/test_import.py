"""``opcast import``: the report in JSON and in words, and one line for what cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from opcast.datasets.sources.importing import SOURCES, load_source
from opcast.datasets.store import Store
from opcast.jobs.cli import compose, main
from opcast.jobs.importing import options

FIELDS = {
    "source",
    "files",
    "rows_read",
    "rows_written",
    "merged",
    "skipped",
    "rejected",
    "flagged",
    "by_kind_and_device",
    "wall_time_s",
    "store",
}


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """A folder of one good table, with a repeat and an impossible row, and a damaged one."""
    row = {"device": "NVIDIA H100 80GB HBM3", "kernel_source": "cublas", "gemm_dtype": "bfloat16", "n": 512, "k": 512}
    rows = [(64, 0.004), (64, 0.005), (128, 0.006), (256, -1.0)]
    folder = tmp_path / "tables"
    folder.mkdir()
    table = pa.Table.from_pylist([{**row, "m": m, "latency": latency} for m, latency in rows])
    pq.write_table(table, folder / "h100_sxm__gemm__torch__1.0.parquet")
    (folder / "h100_sxm__gemm__torch__2.0.parquet").write_bytes(b"PAR1 and no more")
    return folder


def words(tables: Path, *more: str) -> list[str]:
    return ["import", "source=aiconfigurator", f"path={tables}", f"store={tables.parent / 'store'}", *more]


def test_json_is_one_object_that_accounts_for_every_row(tables: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(tables, "format=json")) == 0
    printed = capsys.readouterr()
    found: dict[str, Any] = json.loads(printed.out)
    assert set(found) >= FIELDS
    assert (found["files"], found["rows_read"], found["rows_written"], found["merged"]) == (2, 4, 2, 1)
    assert found["by_kind_and_device"] == [{"kind": "gemm", "device": "h100_sxm", "rows": 2}]
    assert [one["rows"] for one in found["rejected"]] == [1, 0]
    assert all(set(one) == {"reason", "rows", "example"} for one in found["rejected"])
    assert not printed.err, "a bar is for terminals"
    assert Store(found["store"]).kinds() == ["gemm"]


def test_words_say_what_was_kept_out_and_again_adds_nothing(tables: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(tables)) == 0
    first = capsys.readouterr()
    assert "the file is damaged" in " ".join(first.out.split())
    assert "2 written, 1 repeats merged, 0 already there, 1 kept out" in first.err
    assert main(words(tables)) == 0
    again = capsys.readouterr()
    assert "nothing new" in again.out
    assert "0 written, 1 repeats merged, 2 already there, 1 kept out" in again.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "say what to import: source=aiconfigurator|vidur"),
        (["source=vidr"], "did you mean vidur"),
        (["aiconfigurator", "path=/no/such/folder"], "/no/such/folder does not exist"),
        (["aiconfigurator", "path={tables}", "systems=[h101]"], "no table for systems=h101; there are h100_sxm"),
        (["aiconfigurator", "path={tables}", "device=h100_sxm"], "takes no device=…"),
        (["aiconfigurator", "path={tables}/h100_sxm__gemm__torch__2.0.parquet"], "nothing usable in 1 files"),
        (["aiconfigurator", "path={tables}", "device=h101"], "device=h101 does not exist"),
        (["aiconfigurator", "path={tables}", "format=xml"], "choose text or json"),
    ],
)
def test_bad_input_is_one_line(
    tables: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    given = [text.replace("{tables}", str(tables)) for text in arguments]
    assert main(["import", *given, f"store={tables.parent / 'store'}"]) == 2
    printed = capsys.readouterr()
    assert says in printed.err
    assert printed.err.count("\n") == 1
    assert not printed.out


def test_every_option_of_every_source_is_a_setting() -> None:
    settings = options(compose("import", ["source=csv", "device=a40"]))
    assert set(settings) == {name for source in SOURCES for name in load_source(source).OPTIONS}


def test_a_device_is_given_by_its_name() -> None:
    assert options(compose("import", ["source=vidur", "device=a40"]))["device"] == "a40"
