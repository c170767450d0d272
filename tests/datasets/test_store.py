"""The measurement store: round trips, what readers see, and what crashes, crowds and damage do to it."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opcast.datasets.devices import load_device
from opcast.datasets.ops import KINDS, make_op
from opcast.datasets.schema import (
    CACHES,
    COLUMNS,
    SCHEMA_VERSION,
    STATUSES,
    Measurement,
    SchemaError,
    schema_for,
    table_from,
)
from opcast.datasets.store import Store, StoreError

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
GEMM = make_op("gemm", m=16, n=32, k=64)
NORM = make_op("rms_norm", rows=16, cols=32)


def row(op=GEMM, latency_us: float | None = 3.5, minutes: float = 0, **changes: object) -> Measurement:
    values = {"op": op, "device_id": "dev", "run_id": "run", "latency_us": latency_us} | changes
    return Measurement(measured_at=NOW + timedelta(minutes=minutes), **values)  # type: ignore[arg-type]


def latencies(store: Store, *args: object, **kwargs: object) -> list[float | None]:
    return store.read(*args, **kwargs)["latency_us"].to_pylist()  # type: ignore[arg-type]


def test_a_row_of_a_throttled_device_never_hides_a_good_one_nor_answers(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write([row(latency_us=3.0), row(latency_us=9.0, minutes=1, throttled=True)], "run")
    assert latencies(store, "gemm") == [3.0]
    store.write([row(NORM, latency_us=9.0, throttled=True)], "run")
    assert latencies(store, "rms_norm") == [9.0], "what there is, is told"
    assert not store.lookup("rms_norm", "dev", "warm")
    ((exact,),) = store.lookup("gemm", "dev", "warm").values()
    assert exact.latency_us == 3.0


# --- round trip ----------------------------------------------------------------------------------------

POSITIVE = st.floats(1e-3, 1e9)
WORD = st.text(max_size=8)


@st.composite
def measurements(draw: st.DrawFn) -> Measurement:
    definition = KINDS[draw(st.sampled_from(("gemm", "rope", "elementwise", "all_reduce", "host_overhead")))]
    dims = {
        dim.name: draw(st.integers(dim.low, len(dim.choices) - 1 if dim.choices else 2**40)) for dim in definition.dims
    }
    status = draw(st.sampled_from(STATUSES))
    return Measurement(
        op=make_op(definition.name, draw(st.sampled_from(("bf16", "fp8", "fp32"))), **dims),
        device_id=draw(st.sampled_from(("h100_sxm", "cpu_x_2t"))),
        run_id="run",
        measured_at=datetime(2020, 1, 1, tzinfo=UTC) + timedelta(microseconds=draw(st.integers(0, 2**51))),
        backend=draw(st.sampled_from(("torch", "triton:rms_norm"))),
        status=status,
        error=None if status == "ok" else draw(WORD),
        latency_us=draw(POSITIVE) if status == "ok" else None,
        latency_p10_us=draw(st.none() | POSITIVE),
        iterations=draw(st.none() | st.integers(0, 2**50)),
        throttled=draw(st.none() | st.booleans()),
        cache=draw(st.sampled_from(CACHES)),
        node=draw(WORD),
        torch=draw(st.none() | WORD),
    )


@given(st.lists(measurements(), max_size=12))
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
def test_what_is_written_is_read(rows: list[Measurement]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        files = store.write(rows, "run")
        read = []
        for kind_name in store.kinds():
            table = store.read(kind_name, status=None, newest=False)
            for values in table.to_pylist():
                dims = {name: values.pop(name) for name in KINDS[kind_name].names}
                op = make_op(kind_name, values.pop("dtype"), values.pop("out_dtype"), **dims)
                values["measured_at"] = values["measured_at"].astimezone(UTC)
                read.append(Measurement(op=op, **values))
        assert sorted(map(repr, read)) == sorted(map(repr, rows))
        assert len(files) == len({(each.op.kind, each.device_id) for each in rows})
        assert set(store.kinds()) == {each.op.kind for each in rows}
        assert set(store.devices()) == {each.device_id for each in rows}


def test_files_lie_where_the_contract_says(store: Store) -> None:
    first, second = store.write([row(), row(NORM)], "run")
    assert first.parent == store.path / "op=gemm" / "device=dev"
    assert second.parent == store.path / "op=rms_norm" / "device=dev"
    assert first.name.startswith("run-")
    assert first.suffix == ".parquet"
    metadata = pq.read_metadata(first)
    assert metadata.row_group(0).column(0).compression == "ZSTD"
    assert json.loads((store.path / "manifest.json").read_text())["format"] == 1


def test_a_whole_table_is_written_like_rows(store: Store) -> None:
    table = table_from("gemm", [row(), row(device_id="other", latency_us=4.0)])
    assert len(store.write(("gemm", table.drop_columns(["power_w", "run_id"])), "run")) == 2
    assert latencies(store, "gemm", "other") == [4.0]
    assert store.read("gemm")["run_id"].to_pylist() == ["run", "run"]


def test_nothing_of_a_call_is_written_when_a_row_cannot_be(store: Store) -> None:
    with pytest.raises(SchemaError, match="positive, finite latency_us"):
        store.write([row(), row(NORM, latency_us=-1.0)], "run")
    with pytest.raises(SchemaError, match="cache='tepid'"):
        store.write([row(cache="tepid")], "run")
    with pytest.raises(StoreError, match=r"run_id='../run' must be letters"):
        store.write([row(run_id="../run")], "../run")
    with pytest.raises(StoreError, match="device_id='a/b' must be letters"):
        store.write([row(device_id="a/b")], "run")
    with pytest.raises(SchemaError, match="rows of run 'other' cannot be written under run 'run'"):
        store.write([row(run_id="other")], "run")
    assert not list(store.path.glob("**/*.parquet"))
    assert store.write([], "run") == []


# --- reading -------------------------------------------------------------------------------------------


def test_the_newest_ok_row_of_each_environment_is_read(store: Store) -> None:
    store.write([row(latency_us=1.0, minutes=5), row(latency_us=2.0, minutes=3)], "run")
    store.write([row(latency_us=3.0, minutes=4, run_id="later")], "later")
    store.write([row(latency_us=None, minutes=9, status="error", error="died", run_id="z")], "z")
    assert latencies(store, "gemm") == [1.0]
    assert sorted(latencies(store, "gemm", newest=False)) == [1.0, 2.0, 3.0]
    assert len(latencies(store, "gemm", newest=False, status=None)) == 4
    assert latencies(store, "gemm", status="error") == [None]
    assert latencies(store, "gemm", status=None) == [None]
    for change in ({"torch": "2.9"}, {"driver": "580"}, {"cache": "cold"}, {"backend": "cublas"}, {"source": "import"}):
        store.write([row(latency_us=7.0, **change)], "run")
    assert sorted(latencies(store, "gemm")) == [1.0] + [7.0] * 5


def test_of_rows_of_one_moment_one_is_read(store: Store) -> None:
    store.write([row(latency_us=1.0), row(latency_us=2.0)], "run")
    assert len(latencies(store, "gemm")) == 1


def test_devices_runs_and_columns_are_selected(store: Store) -> None:
    store.write([row(), row(GEMM.replace(m=1), device_id="b")], "run")
    store.write([row(GEMM.replace(m=2), run_id="run-2")], "run-2")
    assert len(store.read("gemm")) == 3
    assert len(store.read("gemm", "b")) == 1
    assert len(store.read("gemm", run_id="run-2")) == 1
    assert store.read("gemm", run_id="run")["run_id"].unique().to_pylist() == ["run"]
    assert store.read("gemm", columns=["m", "latency_us"]).column_names == ["m", "latency_us"]
    assert len(store.read("gemm", "nowhere")) == 0
    assert store.read("rope").schema.names == schema_for("rope").names
    assert store.devices("gemm") == ["b", "dev"]
    assert store.devices("rope") == []


def test_done_counts_every_status_and_one_run(store: Store) -> None:
    store.write([row(), row(GEMM.replace(m=1), latency_us=None, status="oom", cache="cold")], "run")
    store.write([row(NORM, run_id="run2", backend="triton")], "run2")
    store.write([row(GEMM.replace(m=9), device_id="other")], "run")
    every = {(GEMM, "torch", "warm"), (GEMM.replace(m=1), "torch", "cold"), (NORM, "triton", "warm")}
    assert store.done("dev") == every
    assert store.done("dev", "run2") == {(NORM, "triton", "warm")}
    assert store.done("dev", "ru") == set()


def test_lookup_answers_exact_ops_newest_first(store: Store) -> None:
    store.write([row(latency_us=1.0, latency_p10_us=0.9, latency_p90_us=1.2, torch="2.8")], "run")
    store.write([row(latency_us=2.0, minutes=5, torch="2.9"), row(latency_us=9.0, minutes=9, cache="cold")], "run")
    key = (*GEMM.dims, "bf16", "bf16")
    newest, older = store.lookup("gemm", "dev", "warm")[key]
    assert (newest.latency_us, newest.low_us, newest.high_us) == (2.0, 2.0, 2.0)
    assert (older.latency_us, older.low_us, older.high_us, older.backend) == (1.0, 0.9, 1.2, "torch")
    assert [each.latency_us for each in store.lookup("gemm", "dev", "cold")[key]] == [9.0]
    assert store.lookup("gemm", "other", "warm") == {}


def test_the_fingerprint_follows_the_content(store: Store, tmp_path: Path) -> None:
    empty = store.fingerprint("gemm", "dev")
    store.write([row()], "run")
    one = store.fingerprint("gemm", "dev")
    assert one == store.fingerprint("gemm", "dev") != empty
    store.write([row(device_id="other"), row(NORM)], "run")
    assert store.fingerprint("gemm", "dev") == one
    copied = Store(shutil.copytree(store.path, tmp_path / "copy"))
    assert copied.fingerprint() == store.fingerprint()
    store.write([row(minutes=1)], "run")
    assert store.fingerprint("gemm", "dev") != one


# --- measured devices, manifest, notes -------------------------------------------------------------------


def test_measured_devices_are_kept(store: Store) -> None:
    figures = replace(load_device("l4"), id="cpu_test_2t", vendor="cpu")
    assert store.device("cpu_test_2t") is None
    store.save_device(figures)
    assert store.device("cpu_test_2t") == figures
    assert store.measured_devices() == ["cpu_test_2t"]
    store.save_device(replace(figures, memory_gbps=99.0))
    assert store.device("cpu_test_2t").memory_gbps == 99.0
    assert store.device("../../etc/passwd") is None
    with pytest.raises(StoreError, match="device_id='a/b' must be"):
        store.save_device(replace(figures, id="a/b"))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"id": "x"}', '{"id": 3, "tensor_tflops": 4}', "\x00\x01"])
def test_a_damaged_device_file_is_one_line(store: Store, text: str) -> None:
    store.save_device(replace(load_device("l4"), id="x"))
    (store.path / "devices" / "x.json").write_text(text)
    with pytest.raises(StoreError, match=r"is damaged .*: remove it and measure the device again") as caught:
        store.device("x")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": 2}', "has format 2, this opcast reads 1: update opcast"),
        ("{", "is damaged: remove it"),
        ("[]", "is no manifest of opcast: choose another store"),
        ('{"format": "one"}', "is no manifest of opcast"),
    ],
)
def test_a_newer_or_damaged_manifest_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(StoreError, match=message) as caught:
        Store(tmp_path)
    assert "\n" not in str(caught.value)


# --- damage --------------------------------------------------------------------------------------------


def written(store: Store) -> Path:
    return store.write([row(GEMM.replace(m=m), latency_us=float(m)) for m in range(1, 200)], "run")[0]


def test_a_file_cut_anywhere_is_named_and_can_be_passed_over(store: Store) -> None:
    path = written(store)
    whole = path.read_bytes()
    store.write([row(GEMM.replace(m=1000), run_id="good")], "good")
    for keep in (0, 3, 4, len(whole) // 2, len(whole) - 8, len(whole) - 1):
        path.write_bytes(whole[:keep])
        with pytest.raises(StoreError, match=r"is damaged \(.+\): move it out of the store") as caught:
            store.read("gemm")
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
        assert latencies(store, "gemm", on_corrupt="skip") == [3.5]


def test_a_flipped_bit_never_becomes_a_latency(store: Store) -> None:
    path = written(store)
    whole, truth = path.read_bytes(), latencies(store, "gemm")
    rng = random.Random(7)
    silent = 0
    for _ in range(60):
        position = rng.randrange(len(whole))
        path.write_bytes(whole[:position] + bytes([whole[position] ^ (1 << rng.randrange(8))]) + whole[position + 1 :])
        try:
            silent += latencies(store, "gemm") != truth
        except StoreError:
            continue
    assert silent == 0


def test_foreign_newer_and_misplaced_files_are_told_apart(store: Store) -> None:
    path = written(store)
    folder = path.parent
    pq.write_table(pa.table({"m": [1], "latency": [2.0]}), folder / "foreign.parquet")
    with pytest.raises(StoreError, match=r"foreign.parquet was not written by opcast: move it out of the store"):
        store.read("gemm")
    (folder / "foreign.parquet").unlink()
    table = table_from("gemm", [row()])
    newer = {"opcast.schema_version": str(SCHEMA_VERSION + 1), "opcast.kind": "gemm"}
    pq.write_table(table.replace_schema_metadata(newer), folder / "newer.parquet")
    with pytest.raises(StoreError, match=r"newer.parquet has schema version 2, this opcast reads 1: update opcast"):
        store.read("gemm")
    (folder / "newer.parquet").unlink()
    pq.write_table(table_from("rms_norm", [row(NORM)]), folder / "norm.parquet")
    with pytest.raises(StoreError, match=r"norm.parquet holds rms_norm rows but lies under op=gemm"):
        store.read("gemm")


def test_a_file_of_an_older_opcast_is_read(store: Store) -> None:
    path = written(store)
    table = pq.read_table(path, partitioning=None)
    pq.write_table(table.drop_columns(["power_w", "batch"]).replace_schema_metadata(table.schema.metadata), path)
    read = store.read("gemm")
    assert len(read) == 199
    assert read["power_w"].null_count == 199
    assert set(read["batch"].to_pylist()) == {1}


def test_kinds_of_another_version_do_not_disturb(store: Store) -> None:
    written(store)
    folder = store.path / "op=warp_drive" / "device=dev"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"x": [1]}), folder / "run-1.parquet")
    assert store.kinds() == ["gemm", "warp_drive"]
    assert len(store.done("dev")) == 199


# --- places that cannot be written -----------------------------------------------------------------------


def test_a_file_is_no_store(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(StoreError, match="is a file: give a directory"):
        Store(file)
    below = Store(file / "store")
    with pytest.raises(StoreError, match=r"cannot write .*: Not a directory"):
        below.write([row()], "run")


def test_an_unwritable_directory_is_one_line(request: pytest.FixtureRequest) -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own lie below one that only their owner may enter
        store = Store(Path(folder) / "store")
        store.write([row()], "run")
        Path(folder).chmod(0o755)
        folders = [path for path in (store.path, *store.path.rglob("*")) if path.is_dir()]
        for path in folders:
            path.chmod(0o555)
        request.getfixturevalue("unprivileged")
        for attempt in (
            lambda: store.write([row(minutes=1)], "run"),
            lambda: store.set_aside("a", None, "x", "no"),
            lambda: store.save_device(replace(load_device("l4"), id="x")),
            lambda: Store(Path(folder) / "other").write([row()], "run"),
        ):
            with pytest.raises(StoreError, match=r"cannot write .*[Pp]ermission denied") as caught:
                attempt()
            assert "\n" not in str(caught.value)
        assert len(store.read("gemm")) == 1
        if os.getuid() == 0:
            os.seteuid(0)
        for path in folders:
            path.chmod(0o755)


# --- crowds and crashes ----------------------------------------------------------------------------------

WRITER = """
import sys
from datetime import UTC, datetime
from opcast.datasets.ops import make_op
from opcast.datasets.schema import Measurement
from opcast.datasets.store import Store

path, me, rounds, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
store = Store(path)
number = 0
while rounds < 0 or number < rounds:
    rows = [
        Measurement(op=make_op("gemm", m=me + 1, n=number + 1, k=i + 1), device_id="dev", run_id="run",
                    measured_at=datetime.now(UTC), latency_us=1.0 + i)
        for i in range(size)
    ]
    store.write(rows, "run")
    if rounds > 0:
        store.set_aside(f"writer {me}", str(number), "dev", "unlike others")
    number += 1
    print(number, flush=True)
"""


def start_writer(path: Path, me: int, rounds: int, size: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-c", WRITER, str(path), str(me), str(rounds), str(size)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_many_processes_writing_at_once_lose_nothing(store: Store) -> None:
    writers = [start_writer(store.path, me, 8, 5) for me in range(4)]
    for writer in writers:
        _, errors = writer.communicate(timeout=600)
        assert writer.returncode == 0, errors
    table = store.read("gemm", newest=False)
    found = set(zip(table["m"].to_pylist(), table["n"].to_pylist(), table["k"].to_pylist(), strict=True))
    assert found == {(m + 1, n + 1, k + 1) for m in range(4) for n in range(8) for k in range(5)}
    assert len(table) == 4 * 8 * 5
    assert len(store.files()) == 4 * 8
    assert len(store.aside()) == 4 * 8
    assert not list(store.path.rglob("*.tmp"))


def test_many_threads_of_one_process_lose_nothing(store: Store) -> None:
    failures: list[Exception] = []

    def work(me: int) -> None:
        try:
            for number in range(6):
                store.write([row(GEMM.replace(m=me + 1, n=number + 1))], "run")
                store.set_aside(f"writer {me}", str(number), "dev", "unlike others")
                store.save_device(replace(load_device("l4"), id="shared"))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(store.read("gemm")) == len(store.aside()) == 24


def test_a_killed_writer_leaves_only_whole_files(store: Store) -> None:
    """kill -9 at random moments, most of them in the middle of a write of several files' worth of rows."""
    size, rng = 20_000, random.Random(3)
    for me in range(3):
        writer = start_writer(store.path, me, -1, size)
        assert writer.stdout is not None
        assert writer.stdout.readline(), writer.stderr.read() if writer.stderr else ""
        time.sleep(rng.uniform(0.0, 0.7))
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        whole = 1 + len(writer.stdout.readlines())
        table = store.read("gemm", newest=False, columns=["m", "n", "k"])
        mine = table["n"].to_numpy()[table["m"].to_numpy() == me + 1]
        rounds, counts = np.unique(mine, return_counts=True)
        assert set(counts) == {size}
        assert len(rounds) >= whole, "a round that was reported as written is gone"
    store.write([row(run_id="after")], "after")
    assert len(store.read("gemm", run_id="after")) == 1


def test_a_reader_never_sees_a_file_in_the_making(store: Store) -> None:
    writers = [start_writer(store.path, me, 12, 500) for me in range(2)]
    seen = 0
    while any(writer.poll() is None for writer in writers):
        now = len(store.read("gemm", newest=False, columns=["m"]))
        assert now % 500 == 0
        assert now >= seen
        seen = now
    assert [writer.wait() for writer in writers] == [0, 0]
    assert len(store.read("gemm", newest=False)) == 2 * 12 * 500


def test_columns_of_the_store_are_those_of_a_measurement() -> None:
    assert list(COLUMNS) == [name for name in Measurement.__dataclass_fields__ if name != "op"]


def test_a_store_is_read_once_for_all_who_look_up_and_again_after_a_new_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store"
    now = datetime(2026, 1, 1, tzinfo=UTC)
    op = make_op("copy", size_bytes=1024)

    def write(latency_us: float, at: datetime) -> None:
        row = Measurement(op=op, device_id="dev", run_id="r", measured_at=at, latency_us=latency_us, backend="torch")
        Store(path).write([row], "r")

    read: list[str] = []
    whole = Store.read
    monkeypatch.setattr(
        Store, "read", lambda self, kind, *rest, **more: read.append(kind) or whole(self, kind, *rest, **more)
    )
    write(1.0, now)
    for _ in range(3):
        for cache in ("warm", "cold"):
            Store(path).lookup("copy", "dev", cache)
            Store(path).backend_rows("copy", "dev", cache)
    assert read == ["copy"]
    assert Store(path).backend_rows("copy", "dev", "warm") == {"torch": 1}
    write(2.0, now + timedelta(days=1))
    ((newest, *_),) = Store(path).lookup("copy", "dev", "warm").values()
    assert newest.latency_us == 2.0
    assert read == ["copy", "copy"]
