"""``opcast predict shapes=FILE``: columns in, columns out, with the answers that the ops would get one by one."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest

from opcast.datasets.devices import load_device
from opcast.datasets.ops import make_op
from opcast.jobs import shapes
from opcast.jobs.cli import main
from opcast.jobs.resolve import SHIPPED_PREDICTORS
from opcast.simulator.engines import build_engine
from opcast.simulator.predict.ops import predict_ops, with_power

ROWS: list[dict[str, object]] = [
    {"kind": "gemm", "m": 64, "n": 4096, "k": 4096, "dtype": "bf16"},
    {"kind": "gemm", "m": 1, "n": 128, "k": 99, "dtype": "fp16", "layout": "nn", "out_dtype": "fp32"},
    {"kind": "grouped_gemm", "experts": 4, "tokens": 77, "n": 512, "k": 4096, "dtype": "bf16"},
    {"kind": "all_reduce", "size_bytes": "1MiB", "ranks": 8},
    {"kind": "gemm", "m": 8192, "n": 4096, "k": 4096, "dtype": "fp8"},
    {"kind": "rms_norm", "rows": 100, "cols": 4096, "dtype": "float32"},
]
FILES = [".csv", ".parquet", ".json", ".jsonl"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPCAST_HOME", str(tmp_path))
    return tmp_path


def written(path: Path, rows: list[dict[str, object]]) -> Path:
    names = list(dict.fromkeys(name for row in rows for name in row))
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        plain = [{**row, **({"size_bytes": 2**20} if "size_bytes" in row else {})} for row in rows]
        pq.write_table(pa.table({name: [row.get(name) for row in plain] for name in names}), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def one_by_one(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    ops = []
    for row in rows:
        values = {**row, **({"size_bytes": 2**20} if "size_bytes" in row else {})}
        ops.append(make_op(str(values.pop("kind")), **values))
    device = load_device("h100_sxm")
    engine = build_engine(device, [], [SHIPPED_PREDICTORS])
    return [
        with_power(predict_ops([op], device, engine), [op], device, [SHIPPED_PREDICTORS])[0].to_dict() for op in ops
    ]


@pytest.mark.parametrize("suffix", FILES)
def test_every_format_gives_the_answers_of_the_ops_alone(
    suffix: str, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shapes, "CHUNK", 4)  # two chunks
    table = written(home / f"shapes{suffix}", ROWS)
    assert main(["predict", f"shapes={table}", "device=h100_sxm", "format=json"]) == 0
    found = json.loads(capsys.readouterr().out)["predictions"]
    for answer, alone in zip(found, one_by_one(ROWS), strict=True):
        assert list(answer) == list(alone)
        for name, value in alone.items():
            same = answer[name] == value
            assert same or math.isclose(answer[name], value, rel_tol=1e-9), name


@pytest.mark.parametrize("suffix", FILES)
def test_output_is_what_its_name_says(suffix: str, home: Path, capsys: pytest.CaptureFixture[str]):
    table = written(home / "shapes.csv", ROWS)
    output = home / f"out{suffix}"
    assert main(["predict", f"shapes={table}", f"output={output}", "device=h100_sxm", "format=json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"output": str(output), "rows": len(ROWS)}
    if suffix == ".parquet":
        rows = pq.read_table(output).to_pylist()
    elif suffix == ".csv":
        rows = list(csv.DictReader(output.open(newline="")))
    elif suffix == ".json":
        rows = json.loads(output.read_text())
    else:
        rows = [json.loads(line) for line in output.read_text().splitlines()]
    for row, alone in zip(rows, one_by_one(ROWS), strict=True):
        assert float(row["latency_us"]) == pytest.approx(alone["latency_us"], rel=1e-9)
        assert row["engine"] == alone["engine"]
        assert row["kind"] == alone["op"]["kind"]
    assert rows[1]["layout"] == "nn"
    assert rows[3]["m"] in ("", None)


@pytest.mark.parametrize(
    ("rows", "number", "says"),
    [
        ("m,n,k\n64,4096,4096\n-1,4096,4096\n", 2, "gemm.m=-1 must be at least 1"),
        ("m,n,k\n64,4096,4096\n1,2,3\nx,4096,4096\n", 3, "gemm.m='x' is not an integer"),
        ("m,n,k\n64,4096,4096\n1,2.5,3\n", 2, "gemm.n=2.5 is not an integer"),
        ("m,n,k\n64,,4096\n", 1, "gemm needs 'n'"),
        ("m,n\n64,4\n", 1, "gemm needs 'k'"),
        ("m,n,k,dtype\n64,4,4,bf16\n64,4,4,bf17\n", 2, "unknown dtype 'bf17'"),
        ("m,n,k,kind\n64,4,4,gemm\n64,4,4,gem\n", 2, "did you mean gemm"),
        ("m,n,k,foo\n64,4,4,\n64,4,4,1\n", 2, "no dimension 'foo'"),
        ("m,n,k,layout\n64,4,4,nt\n64,4,4,tt\n", 2, "gemm.layout='tt' is not one of"),
        ("m,n,k\n64,4,4\n64,4,99999999999999999999\n", 2, "is not an integer below 2^62"),
        ("m,n,k\n64,4,4\n64,4,true\n", 2, "gemm.k=true is not an integer"),
    ],
)
def test_the_first_bad_row_is_named(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, rows: str, number: int, says: str
):
    (home / "shapes.csv").write_text(rows)
    command = ["predict", "op=gemm", f"shapes={home / 'shapes.csv'}", "device=h100_sxm", f"output={home / 'o.csv'}"]
    for size in (1, 1000):
        monkeypatch.setattr(shapes, "CHUNK", size)
        assert main(command) == 2
        said = capsys.readouterr().err
        assert f"row {number}: " in said
        assert says in said
        assert not list(home.glob("*o.csv*")), "nothing is left of an output that failed"


def test_sizes_with_units_booleans_and_whole_floats_are_read(home: Path, capsys: pytest.CaptureFixture[str]):
    (home / "a.csv").write_text("size_bytes,ranks\n1GiB,8.0\n 4096 ,2\n")
    assert main(["predict", "op=all_reduce", f"shapes={home / 'a.csv'}", "device=h100_sxm", "format=json"]) == 0
    found = json.loads(capsys.readouterr().out)["predictions"]
    assert [(each["op"]["size_bytes"], each["op"]["ranks"]) for each in found] == [(2**30, 8), (4096, 2)]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["shapes={home}/no.csv"], "cannot be read"),
        (["shapes={home}/shapes.txt"], "unknown format '.txt'"),
        (["shapes={home}/empty.csv"], "holds no rows"),
        (["shapes={home}/heads.csv"], "holds no rows"),
        (["shapes={home}/broken.parquet"], "cannot be read"),
        (["shapes={home}/broken.json"], "is no JSON"),
        (["shapes={home}/broken.jsonl"], "line 2 is no JSON"),
        (["shapes={home}/twice.csv"], "two columns of one name"),
        (["shapes={home}/ok.csv", "op.m=3"], "op.m=3 is for one op"),
        (["shapes={home}/ok.csv", "op.dtype=fp16"], "op.dtype=fp16 is for one op"),
        (["shapes={home}/ok.csv", "output={home}/o.txt"], "unknown format '.txt'"),
        (["shapes={home}/ok.csv", "output={home}"], "output="),
        (["shapes={home}/ok.csv", "output={home}/missing/o.csv"], "make it first"),
        (["shapes={home}/ok.csv", "output=/proc/o.csv"], "cannot write"),
        (["op.m=1", "op.n=1", "op.k=1", "output={home}/o.csv"], "is for shapes=FILE"),
    ],
)
def test_what_cannot_be_is_one_line(home: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str):
    (home / "ok.csv").write_text("m,n,k\n1,2,3\n")
    (home / "empty.csv").write_text("")
    (home / "heads.csv").write_text("m,n,k\n")
    (home / "twice.csv").write_text("m,n,k,m\n1,2,3,4\n")
    for name in ("broken.parquet", "broken.json", "shapes.txt"):
        (home / name).write_text("[[[")
    (home / "broken.jsonl").write_text('{"m": 1, "n": 2, "k": 3}\n{"m": 1,\n')
    assert main(["predict", "op=gemm", "device=h100_sxm", *(text.format(home=home) for text in arguments)]) == 2
    said = capsys.readouterr()
    assert says in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_a_full_disk_leaves_nothing(home: Path, capsys: pytest.CaptureFixture[str]):
    resource = pytest.importorskip("resource")
    (home / "shapes.csv").write_text("m,n,k\n" + "1,2,3\n" * 20_000)
    signal = pytest.importorskip("signal")
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # as a disk with so many bytes left
    try:
        command = ["predict", "op=gemm", f"shapes={home / 'shapes.csv'}", "device=h100_sxm"]
        codes = [main([*command, f"output={home / f'o{suffix}'}"]) for suffix in FILES if suffix != ".parquet"]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert codes == [2, 2, 2]
    assert sorted(os.listdir(home)) == ["shapes.csv"]
    assert "Traceback" not in capsys.readouterr().err


COUNTED = """
import sys
from opcast.jobs.cli import main
calls = 0
def counted(frame, event, argument):
    global calls
    calls += 1
sys.setprofile(counted)
code = main(sys.argv[1:])
sys.setprofile(None)
print(calls)
sys.exit(code)
"""
# Between this process and the one that is measured, which would else begin with the memory that this one has
MEASURED = """
import resource, subprocess, sys
calls = subprocess.run([sys.executable, "-P", "-c", *sys.argv[1:]], stdout=subprocess.PIPE, check=True).stdout
print(int(calls), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_long_table_takes_no_more_memory_than_a_chunk_and_no_call_a_row(suffix: str, home: Path):
    used = []
    for rows in (2 * shapes.CHUNK, 6 * shapes.CHUNK):
        dims = {name: np.arange(rows) % 4096 + 1 for name in ("m", "n", "k")}
        (arrow_csv.write_csv if suffix == ".csv" else pq.write_table)(pa.table(dims), home / f"shapes{suffix}")
        files = f"shapes={home / 'shapes'}{suffix}", f"output={home / 'answers.parquet'}"
        command = ["predict", "op=gemm", "device=h100_sxm", "engine.order=[analytical]", *files]
        done = subprocess.run([sys.executable, "-P", "-c", MEASURED, COUNTED, *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert pq.read_metadata(home / "answers.parquet").num_rows == rows
        used.append([int(word) for word in done.stdout.split()])
    (few_calls, small), (many_calls, large) = used
    assert large < 1.5 * small  # rows that are kept would take three times as much
    assert many_calls - few_calls < 4 * shapes.CHUNK / 2  # a row that becomes an Op takes dozens
