"""Any table by a mapping: units, formats, names of files, choices; and one clear line for a mapping that is wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from opcast.datasets.ops import LINKS
from opcast.datasets.sources.importing import ImportReport, SourceError, import_into
from opcast.datasets.sources.options import ImportOptions
from opcast.datasets.store import Store

GEMM: dict[str, Any] = {
    "kind": "gemm",
    "columns": {"m": "M", "n": "N", "k": "K", "dtype": "type", "latency_us": {"column": "t", "unit": "ms"}},
    "constants": {"device_id": "h100_sxm", "backend": "mine-1.0:cublas", "measured_at": "2025-01-31"},
}
TABLE = "M,N,K,type,t\n4096,4096,4096,bfloat16,0.25\n1024,1024,1024,half,0.02\n"
# Sizes of NCCL's benchmark; two columns are called time(ns): out-of-place and in-place.
REDUCED = "size(B),count,type,time(ns),busbw(GB/s),time(ns),busbw(GB/s)\n1048576,262144,float,63910,21.88,63500,22.02\n"


def mapped(folder: Path, mapping: Any, text: str = TABLE, name: str = "table.csv") -> ImportOptions:
    """A table and a mapping in a folder; the option that names the mapping."""
    (folder / name).write_text(text)
    file = folder / "mapping.yaml"
    file.write_text(mapping if isinstance(mapping, str) else yaml.safe_dump(mapping))
    return ImportOptions(mapping=str(file))


def imported(store: Store, folder: Path, mapping: Any, text: str = TABLE, name: str = "table.csv") -> ImportReport:
    return import_into(store, "csv", folder, mapped(folder, mapping, text, name))


def changed(**changes: Any) -> dict[str, Any]:
    """The mapping of products with something in its sections changed; None takes an entry out."""
    made = {name: dict(section) if isinstance(section, dict) else section for name, section in GEMM.items()}
    for name, change in changes.items():
        if not isinstance(change, dict):
            made[name] = change
            continue
        both = {**made.get(name, {}), **change}
        made[name] = {key: value for key, value in both.items() if value is not None}
    return made


@pytest.mark.parametrize(("unit", "factor"), [("ns", 1e6), ("us", 1e3), ("ms", 1.0), ("s", 1e-3)])
def test_units_become_microseconds(store: Store, tmp_path: Path, unit: str, factor: float) -> None:
    mapping = changed(columns={"latency_us": {"column": "t", "unit": unit}})
    imported(store, tmp_path, mapping, f"M,N,K,type,t\n4096,4096,4096,bf16,{0.25 * factor}\n")
    (row,) = store.read("gemm").to_pylist()
    assert row["latency_us"] == pytest.approx(250)


def test_columns_and_constants(store: Store, tmp_path: Path) -> None:
    imported(store, tmp_path, changed(constants={"layout": "nn", "torch": "2.6.0", "license": "MIT"}))
    rows = {row["m"]: row for row in store.read("gemm").to_pylist()}
    assert (rows[4096]["dtype"], rows[1024]["dtype"]) == ("bf16", "fp16")
    row = rows[4096]
    assert (row["batch"], row["layout"], row["backend"], row["torch"]) == (1, 0, "mine-1.0:cublas", "2.6.0")
    assert row["measured_at"].date().isoformat() == "2025-01-31"
    assert (row["source"], row["source_ref"]) == ("csv", "table.csv")


def test_where_keeps_some_rows(store: Store, tmp_path: Path) -> None:
    imported(store, tmp_path, changed(where={"type": ["half", "float"], "M": 1024}))
    assert [row["m"] for row in store.read("gemm").to_pylist()] == [1024]


def test_elements_become_bytes(store: Store, tmp_path: Path) -> None:
    mapping = {
        "kind": "all_gather",
        "columns": {
            "size_bytes": {"column": "elements", "times": "itemsize"}, "dtype": "type", "ranks": "gpus", "link": "wire",
            "latency_us": {"column": "us", "unit": "us"},
        },
        "constants": {"device_id": "h100_sxm"},
    }  # fmt: skip
    imported(store, tmp_path, mapping, "elements,type,gpus,wire,us\n1048576,half,8,nvlink,40\n1048576,int8,8,ib,60\n")
    found = {(row["dtype"], row["size_bytes"], LINKS[row["link"]]) for row in store.read("all_gather").to_pylist()}
    assert found == {("fp16", 2097152, "nvlink"), ("int8", 1048576, "ib")}


def test_names_of_files_tell_and_values_rename(store: Store, tmp_path: Path) -> None:
    mapping = all_reduce("time(ns)")
    imported(store, tmp_path, mapping, REDUCED, "all_reduce_a100_3gpus.csv")
    (row,) = store.read("all_reduce").to_pylist()
    assert (row["ranks"], row["ranks_per_node"], row["device_id"]) == (3, 3, "a100_sxm_80gb")
    assert (row["size_bytes"], row["latency_us"], row["dtype"]) == (1048576, pytest.approx(63.91), "fp32")


def test_the_second_of_two_columns_of_one_name(store: Store, tmp_path: Path) -> None:
    imported(store, tmp_path, all_reduce("time(ns)#2"), REDUCED, "all_reduce_a100_3gpus.csv")
    assert store.read("all_reduce").to_pylist()[0]["latency_us"] == 63.5


def test_what_cannot_be_is_counted_and_kept_out(store: Store, tmp_path: Path) -> None:
    bad = "4096,4096,4096,bf16,nan\n4096,4096,4096,bf16,-1\n4096,4096,4096,bf16,0\n4096,4096,4096,bf16,\n"
    bad += "0,4096,4096,bf16,1\n1.5,4096,4096,bf16,1\nmany,4096,4096,bf16,1\n4096,4096,4096,funny,1\n"
    bad += "65536,65536,65536,bf16,0.001\n"
    report = imported(store, tmp_path, GEMM, TABLE + bad)
    assert (report.rows_read, report.rows_written) == (11, 2)
    assert sum(r.rows for r in report.rejected) == 9
    reasons = " ".join(r.reason for r in report.rejected)
    assert all(part in reasons for part in ("not an integer", "at least 1", "funny", "positive", "peak rates"))


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (changed(kind="gem"), "did you mean gemm"),
        (changed(columms={"m": "M"}), "did you mean columns"),
        (changed(columns={"mm": "M"}), "unknown 'mm'"),
        (changed(columns={"m": None}), "gives no m"),
        (changed(columns={"latency_us": "t"}), "needs unit"),
        (changed(columns={"latency_us": {"column": "t", "unit": "minutes"}}), "needs unit"),
        (changed(columns={"m": {"column": "M", "time": 2}}), "did you mean times"),
        (changed(columns={"m": {"column": "M", "times": "two"}}), "times='two'"),
        (changed(columns={"m": {"file": "x(", "column": "M"}}), "either column"),
        (changed(columns={"m": {"file": "x("}}), "no regular expression"),
        (changed(columns={"m": {"file": "x"}}), "one group"),
        (changed(columns={"m": {"file": r"(\d+)gpus"}}), "does not match"),
        (changed(columns={"dtype": {"column": "type", "values": ["half"]}}), "old: new"),
        (changed(columns={"latency_us": {"file": "(ta)", "unit": "us"}}), "positive"),
        (changed(columns={"m": 5}), "lacks the column '5'"),
        (changed(columns={"m": "rows"}), "lacks the column 'rows'"),
        (changed(columns={"measured_at": "t"}), "must be one of the constants"),
        (changed(constants={"device_id": None}), "gives no device_id"),
        (changed(constants={"device_id": "h1000"}), "unknown device 'h1000'"),
        (changed(constants={"layout": "tt"}), "layout='tt'"),
        (changed(constants={"measured_at": "soon"}), "no date"),
        (changed(constants=["backend"]), "name: value"),
        (changed(where={"kindd": 1}), "lacks the column 'kindd'"),
        ("kind: [", "no YAML"),
        ("just text", "needs the keys"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_mapping_is_one_clear_error(store: Store, tmp_path: Path, mapping: Any, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        imported(store, tmp_path, mapping)
    assert message in str(raised.value)
    assert type(raised.value).__module__.startswith("opcast")
    assert "\n" not in str(raised.value)
    assert not store.kinds()


def test_a_mapping_is_needed(store: Store, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text(TABLE)
    with pytest.raises(SourceError, match="needs mapping="):
        import_into(store, "csv", tmp_path)
    with pytest.raises(SourceError, match=r"mapping .* cannot be read: No such file"):
        import_into(store, "csv", tmp_path, ImportOptions(mapping=str(tmp_path / "none.yaml")))


def test_the_mapping_in_the_documents_is_the_one_tested_here(root: Path) -> None:
    text = (root / "docs" / "importing.md").read_text()
    (mapping,) = re.findall(r'"vtrain.yaml"\).write_text\(r"""\n(.*?)"""', text, re.DOTALL)
    shown = yaml.safe_load(mapping)
    shown["constants"]["measured_at"] = str(shown["constants"]["measured_at"])
    assert shown == all_reduce("time(ns)")


def test_a_device_may_be_given_beside_the_mapping(store: Store, tmp_path: Path) -> None:
    options = mapped(tmp_path, changed(constants={"device_id": None}))
    import_into(store, "csv", tmp_path, replace(options, device="h200_sxm"))
    assert store.devices() == ["h200_sxm"]


@pytest.mark.parametrize("text", ["M,N,K,type,t\n", "", "M,N,K,type,t\n1,2,3\n"])
def test_empty_and_ragged_tables(store: Store, tmp_path: Path, text: str) -> None:
    with pytest.raises(SourceError, match=r"no rows|damaged|nothing usable"):
        imported(store, tmp_path, GEMM, text)


def test_another_mapping_is_another_import(store: Store, tmp_path: Path) -> None:
    assert imported(store, tmp_path, GEMM).rows_written == 2
    assert imported(store, tmp_path, GEMM).rows_written == 0
    assert imported(store, tmp_path, changed(constants={"backend": "other"})).rows_written == 2


def all_reduce(column: str) -> dict[str, Any]:
    """The mapping of NCCL sweeps whose file names tell device and ranks."""
    return {
        "kind": "all_reduce",
        "columns": {
            "size_bytes": "size(B)",
            "dtype": "type",
            "latency_us": {"column": column, "unit": "ns"},
            "ranks": {"file": r"_(\d+)gpus"},
            "ranks_per_node": {"file": r"_(\d+)gpus"},
            "device_id": {"file": "_([av]100)_", "values": {"a100": "a100_sxm_80gb", "v100": "v100_sxm"}},
        },
        "constants": {"link": "nvlink", "backend": "nccl:nccl", "measured_at": "2023-10-01", "license": "MIT"},
    }


@pytest.mark.reference
def test_the_published_sweeps(store: Store, tmp_path: Path, reference_data: Path) -> None:
    mapping = mapped(tmp_path, all_reduce("time(ns)"))
    report = import_into(store, "csv", reference_data / "data" / "vtrain", mapping)
    assert (report.files, report.rows_written, report.rejected) == (14, 14 * 1024, [])
    table = store.read("all_reduce", "a100_sxm_80gb").to_pandas()
    assert sorted(table["ranks"].unique()) == [2, 3, 4, 5, 6, 7, 8]
    largest = table[table.size_bytes == table.size_bytes.max()]
    busbw = 2 * (1 - 1 / largest["ranks"]) * largest.size_bytes / largest.latency_us / 1e3
    assert busbw.between(150, 300).all()


NAMED = """kind,chip,dtype,backend,batch,m,n,k,latency_us,source,timing
gemm,mi300x,fp8_block,aiter:tuned,1,16,4096,7168,17.2,ROCm/aiter,rotated copies of the arguments
gemm,mi300x,bf16,aiter:tuned,16,1,8192,1024,75.9,ROCm/aiter,rotated copies of the arguments
,mi300x,bf16,aiter:tuned,1,1,8192,1024,75.9,ROCm/aiter,rotated copies of the arguments
gemm,gfx1250,bf16,aiter:tuned,1,1,8192,1024,75.9,ROCm/aiter,rotated copies of the arguments
"""


def test_a_table_with_opcasts_names_needs_no_mapping(store: Store, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text(NAMED)
    report = import_into(store, "csv", tmp_path)
    rows = store.read("gemm").to_pylist()
    assert {(row["backend"], row["cache"]) for row in rows} == {
        (backend, cache) for backend in ("aiter:tuned", "aiter:tuned:batched") for cache in ("cold", "warm")
    }
    assert {row["source"] for row in rows} == {"aiter"}
    assert {one.reason.split(";")[0]: one.rows for one in report.rejected} == {
        "unknown device 'gfx1250'": 2,
        "no op kind": 1,
    }


def test_the_format_of_a_state_is_a_dim_and_no_backend(store: Store, tmp_path: Path) -> None:
    head = "kind,device_id,dtype,backend,batch,heads,groups,head_dim,state_dim,state_format,latency_us\n"
    op = "linear_attention_decode,mi355x,bf16,aiter:state_{0},64,32,16,128,128,{0},{1}\n"
    (tmp_path / "table.csv").write_text(head + op.format("fp32", 26.9) + op.format("bf16", 17.4))
    import_into(store, "csv", tmp_path)
    rows = store.read("linear_attention_decode").to_pylist()
    assert {(row["backend"], row["state_format"]) for row in rows} == {("aiter:tuned", 0), ("aiter:tuned", 1)}


def test_flags_and_own_formats_are_understood(store: Store, tmp_path: Path) -> None:
    head = "kind,device_id,dtype,batch,heads_q,heads_kv,head_dim,v_head_dim,seq_q,seq_kv,causal,kv_dtype,latency_us\n"
    rows = ("attention_decode,h20_sxm,bf16,1,32,8,128,128,1,4096,{},{},13.7\n".format(*each)
            for each in (("true", "bf16"), ("False", "fp8")))  # fmt: skip
    (tmp_path / "table.csv").write_text(head + "".join(rows))
    import_into(store, "csv", tmp_path)
    assert {(row["causal"], row["kv_dtype"]) for row in store.read("attention_decode").to_pylist()} <= {(1, 0), (0, 1)}


def test_rows_of_ones_own_machine_say_so(store: Store, tmp_path: Path) -> None:
    imported(store, tmp_path, changed(constants={"source": "mine"}))
    assert {row["source"] for row in store.read("gemm").to_pylist()} == {"mine"}
    with pytest.raises(SourceError, match="can only be mine"):
        imported(store, tmp_path, changed(constants={"source": "harness"}))
