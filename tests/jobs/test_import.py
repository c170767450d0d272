"""``opcast import``: the report in JSON and in words, and one line for what cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from opcast.datasets.devices import load_device
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
        (["aiconfigurator", "path={tables}/h100_sxm__gemm__torch__2.0.parquet"], "nothing usable in 1 file "),
        (["aiconfigurator", "path={tables}", "device=h101"], "unknown device 'h101'; did you mean h100"),
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


def test_every_option_of_every_source_is_a_setting(tmp_path: Path) -> None:
    settings = options(compose("import", ["source=csv", "device=a40"]), Store(tmp_path))
    assert set(settings) == {name for source in SOURCES for name in load_source(source).OPTIONS}


def test_a_device_is_given_by_its_name(tmp_path: Path) -> None:
    assert options(compose("import", ["source=vidur", "device=a40"]), Store(tmp_path))["device"] == "a40"


# --- a device of one's own -----------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the file of a device, rows measured on it, and mappings; it is the working directory."""
    figures = {**load_device("a40").to_dict(), "id": "my_gpu", "name": "My GPU"}
    (tmp_path / "my_gpu.yaml").write_text(json.dumps(figures))
    (tmp_path / "gemm.csv").write_text("m,n,k,us\n" + "".join(f"{m},1024,1024,{m / 20}\n" for m in (1024, 2048, 4096)))
    columns = "kind: gemm\ncolumns: {m: m, n: n, k: k, latency_us: {column: us, unit: us}}\n"
    (tmp_path / "plain.yaml").write_text(columns + "constants: {dtype: bf16}\n")
    (tmp_path / "named.yaml").write_text(columns + "constants: {dtype: bf16, device_id: my_gpu.yaml}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "given", [["mapping=plain.yaml", "device=my_gpu.yaml"], ["mapping=named.yaml"]], ids=["setting", "mapping"]
)
def test_a_file_of_figures_names_a_device(own: Path, given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The rows are checked by its figures, and every verb knows the device from then on."""
    assert main(["import", "source=csv", "path=gemm.csv", *given, "store=store", "format=json"]) == 0
    assert json.loads(capsys.readouterr().out)["by_kind_and_device"] == [
        {"kind": "gemm", "device": "my_gpu", "rows": 3}
    ]
    for device in ("my_gpu.yaml", "my_gpu"):
        asked = ["predict", "op=gemm", "op.m=2048", "op.n=1024", "op.k=1024", f"device={device}"]
        assert main([*asked, "store=store", "format=json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert (answer["latency_us"], answer["engine"]) == (102.4, "measured")


def test_figures_of_a_file_bound_what_is_taken(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (own / "gemm.csv").write_text("m,n,k,us\n8192,8192,8192,10\n")  # 110 PFLOP/s
    assert main(["import", "source=csv", "path=gemm.csv", "mapping=named.yaml", "store=store"]) == 2
    assert "peak rates" in capsys.readouterr().err


def test_figures_that_cannot_be_kept_are_refused(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (own / "my_gpu.yaml").write_text("{}")
    given = ["source=csv", "path=gemm.csv", "mapping=plain.yaml", "store=store", "device=my_gpu.yaml"]
    assert main(["import", *given]) == 2
    printed = capsys.readouterr()
    assert "lacks" in printed.err
    assert printed.err.count("\n") == 1


def test_rows_of_a_device_whose_figures_a_file_changes_are_of_its_id(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (own / "my_gpu.yaml").write_text(json.dumps({**load_device("a40").to_dict(), "tdp_w": 250.0}))
    given = ["path=gemm.csv", "mapping=plain.yaml", "device=my_gpu.yaml", "store=store", "format=json"]
    assert main(["import", "source=csv", *given]) == 0
    assert json.loads(capsys.readouterr().out)["by_kind_and_device"][0]["device"] == "a40"
