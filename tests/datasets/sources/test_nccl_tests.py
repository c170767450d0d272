"""What nccl-tests prints becomes collectives: sizes, ranks, nodes, link, library, and no result that was wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from opcast.datasets.ops import LINKS
from opcast.datasets.sources.importing import ImportReport, SourceError, import_into
from opcast.datasets.sources.nccl_output import runs
from opcast.datasets.sources.options import ImportOptions
from opcast.datasets.store import Store

HEADER = """\
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""
SENT = {"all_reduce": lambda n: 2 * (n - 1) / n, "sendrecv": lambda n: 1.0}  # busbw over algbw; others (n - 1) / n
TIMES = {
    "all_reduce": ((1048576, 48.20, 47.80), (268435456, 1935.2, 1934.6)),
    "all_gather": ((1048576, 38.90, 38.10), (268435456, 1012.4, 1010.1)),
    "alltoall": ((1048576, 45.12, 44.98), (268435456, 1099.5, 1098.9)),
    "sendrecv": ((1048576, 18.61, 18.44), (268435456, 1240.0, 1239.0)),
}


def rows_of(collective: str, ranks: int, *times: tuple[int, float, float]) -> str:
    """The lines of a table as the program prints them."""
    dtype, width = ("bfloat16", 2) if collective == "sendrecv" else ("float", 4)
    in_place = "N/A" if collective in ("alltoall", "sendrecv") else "0"
    factor = SENT.get(collective, lambda n: (n - 1) / n)(ranks)
    lines = []
    for size, *both in times or TIMES[collective]:
        fields = [f"{size:12d} {size // width:13d} {dtype:>9s}     sum      -1"]
        for time, wrong in zip(both, ("0", in_place), strict=True):
            rate = size / 1e3 / time
            fields.append(f"{time:8.2f} {rate:7.2f} {rate * factor:7.2f} {wrong:>6s}")
        lines.append(" ".join(fields))
    return "\n".join(lines) + "\n"


KINDS = {"all_reduce": "all_reduce", "all_gather": "all_gather", "alltoall": "all_to_all", "sendrecv": "send_recv"}


def printed(
    collective: str = "all_reduce",
    hosts: tuple[str, ...] = ("node-1",) * 8,
    rows: str = "",
    device: str = "NVIDIA A100-SXM4-80GB",
    graph: int = 0,
    version: bool = True,
    members: int = 0,
) -> str:
    """A run as the program prints it."""
    lines = []
    if version:
        lines += ["# nccl-tests version 2.17.6 nccl-headers=22703 nccl-library=22703"]
        lines += [f"# Collective test starting: {collective}_perf"]
    lines += [f"# nThread 1 nGpus 1 minBytes 1048576 maxBytes 268435456 step: 2(factor) iters: 20 graph: {graph}", "#"]
    lines += ["# Using devices"]
    for rank, host in enumerate(hosts):
        slot = sum(other == host for other in hosts[:rank])
        lines.append(
            f"#  Rank {rank:2d} Group  0 Pid  {4000 + rank} on {host:>10s} device {slot:2d} [0x{7 + slot:02x}] {device}"
        )
    table = rows or rows_of(collective, members or len(hosts))
    return "\n".join(lines) + "\n" + HEADER + table + "# Out of bounds values : 0 OK\n"


def imported(store: Store, tmp_path: Path, text: str, name: str = "run.txt", **options: str) -> ImportReport:
    (tmp_path / name).write_text(text)
    return import_into(store, "nccl-tests", tmp_path / name, ImportOptions(**options))


@pytest.mark.parametrize("collective", KINDS)
def test_each_collective(store: Store, tmp_path: Path, collective: str) -> None:
    imported(store, tmp_path, printed(collective))
    rows = store.read(KINDS[collective]).to_pylist()
    assert [row["size_bytes"] for row in rows] == [1048576, 268435456]
    row = rows[0]
    assert (row["ranks"], row["ranks_per_node"], LINKS[row["link"]]) == (8, 8, "nvlink")
    assert (row["device_id"], row["backend"], row["nccl"]) == ("a100_sxm_80gb", "nccl-2.27.3:nccl", "2.27.3")
    assert row["dtype"] == ("bf16" if collective == "sendrecv" else "fp32")


def test_out_of_place_and_in_place_are_repeats(store: Store, tmp_path: Path) -> None:
    imported(store, tmp_path, printed())
    row = store.read("all_reduce").to_pylist()[0]
    assert row["latency_us"] == pytest.approx(48.0)
    assert row["latency_min_us"] == pytest.approx(47.8)
    assert row["iterations"] == 2


def test_an_in_place_time_of_what_has_no_in_place_form_is_left_out(store: Store, tmp_path: Path) -> None:
    report = imported(store, tmp_path, printed("alltoall"))
    assert store.read("all_to_all").to_pylist()[0]["latency_us"] == pytest.approx(45.12)
    assert [(r.rows, r.reason) for r in report.rejected] == [(2, "in-place, where the collective has no in-place form")]


def test_unchecked_runs_are_taken_whole(store: Store, tmp_path: Path) -> None:
    rows = " 1048576  262144  float  sum  -1  48.2  21.75  38.07  N/A  47.8  21.9  38.4  N/A\n"
    assert imported(store, tmp_path, printed(rows=rows)).rows_read == 2


def test_wrong_results_are_refused(store: Store, tmp_path: Path) -> None:
    rows = rows_of("all_reduce", 8).replace("38.07      0", "38.07      7", 1)
    report = imported(store, tmp_path, printed(rows=rows))
    assert [(r.rows, r.reason) for r in report.rejected] == [(1, "wrong results")]
    assert store.read("all_reduce").to_pylist()[0]["latency_us"] == pytest.approx(47.8)


def test_hosts_are_nodes(store: Store, tmp_path: Path) -> None:
    imported(store, tmp_path, printed(hosts=("a",) * 4 + ("b",) * 4))
    row = store.read("all_reduce").to_pylist()[0]
    assert (row["ranks"], row["ranks_per_node"], LINKS[row["link"]]) == (8, 4, "ib")


def test_a_given_link_wins(store: Store, tmp_path: Path) -> None:
    imported(store, tmp_path, printed(hosts=("a", "a", "b", "b")), link="roce")
    assert LINKS[store.read("all_reduce").to_pylist()[0]["link"]] == "roce"


def test_groups_of_a_split_run_each_alone(store: Store, tmp_path: Path) -> None:
    text = printed(members=4)
    for rank in range(8):
        text = text.replace(f"Rank {rank:2d} Group  0", f"Rank {rank:2d} Group  {rank % 2}")
    imported(store, tmp_path, text)
    assert store.read("all_reduce").to_pylist()[0]["ranks"] == 4


def test_runs_in_one_log_are_told_apart(store: Store, tmp_path: Path) -> None:
    log = "\n".join(f"[1,0]<stdout>:{line}" for line in (printed() + printed("all_gather")).splitlines())
    imported(store, tmp_path, log)
    assert store.kinds() == ["all_gather", "all_reduce"]
    assert len(runs(log)) == 2


@pytest.mark.parametrize("how", ["command", "file", "option"])
def test_older_output_tells_the_collective_elsewhere(store: Store, tmp_path: Path, how: str) -> None:
    text = printed("all_gather", version=False)
    if how == "command":
        imported(store, tmp_path, "$ mpirun -np 8 ./build/all_gather_perf -b 1M -e 256M -f 16\n" + text)
    elif how == "file":
        imported(store, tmp_path, text, "dgx-all_gather-8.log")
    else:
        imported(store, tmp_path, text, collective="all_gather")
    assert store.kinds() == ["all_gather"]
    assert store.read("all_gather").to_pylist()[0]["backend"] == "nccl:nccl"


def test_a_run_of_no_known_collective_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"reduce_perf is no collective of opcast's .*2 rows"):
        imported(store, tmp_path, printed("reduce", rows=rows_of("sendrecv", 8)))
    with pytest.raises(SourceError, match="say collective="):
        imported(store, tmp_path, printed(version=False))


def test_graphs_are_told(store: Store, tmp_path: Path) -> None:
    imported(store, tmp_path, printed(graph=10))
    assert store.read("all_reduce").to_pylist()[0]["timer"] == "cuda_graph"


def test_empty_sizes_and_cut_lines_are_counted(store: Store, tmp_path: Path) -> None:
    rows = rows_of("all_reduce", 8)
    rows += " 0  0  float  sum  -1  0.20  0.00  0.00  0  0.19  0.00  0.00  0\n"
    rows += "   536870912     134217728     float     s"
    report = imported(store, tmp_path, printed(rows=rows))
    assert sorted((r.rows, r.reason) for r in report.rejected) == [
        (1, "the line is cut off or has an unknown type"),
        (2, "nothing was sent (size 0)"),
    ]


def test_faster_than_the_link_is_refused(store: Store, tmp_path: Path) -> None:
    rows = rows_of("all_reduce", 8, *TIMES["all_reduce"], (536870912, 1100.0, 1100.0))  # 488 GB/s over 300
    report = imported(store, tmp_path, printed(rows=rows))
    assert [(r.rows, r.reason) for r in report.rejected] == [(2, "all_reduce: bandwidth above the link's peak")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello\n", "no table of nccl-tests"),
        (HEADER + rows_of("all_reduce", 8), "does not list its ranks"),
        (printed(hosts=("a", "a", "a", "b")), "unevenly"),
        (printed(device="NVIDIA Mystery 9000"), "calls itself 'NVIDIA Mystery 9000'.* say device="),
        (
            printed(device="NVIDIA Graphics Device", hosts=("a", "b")),
            "calls itself 'NVIDIA Graphics Device'.* say device=",
        ),
    ],
)
def test_what_cannot_be_used_is_one_clear_error(store: Store, tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        imported(store, tmp_path, text, collective="all_reduce")


@pytest.mark.parametrize("name", ["h100_sxm", "H100-SXM5-80GB", "h100"])
def test_the_device_is_told_in_any_spelling(store: Store, tmp_path: Path, name: str) -> None:
    imported(store, tmp_path, printed(device="NVIDIA Graphics Device"), device=name)
    assert {row["device_id"] for row in store.read("all_reduce").to_pylist()} == {"h100_sxm"}


@pytest.mark.parametrize(("option", "value"), [("link", "wifi"), ("collective", "gossip"), ("measured_at", "soon")])
def test_wrong_options_are_named(store: Store, tmp_path: Path, option: str, value: str) -> None:
    with pytest.raises(SourceError, match=value):
        imported(store, tmp_path, printed(), **{option: value})


def test_a_given_date_is_kept(store: Store, tmp_path: Path) -> None:
    imported(store, tmp_path, printed(), measured_at="2025-01-31")
    assert store.read("all_reduce").to_pylist()[0]["measured_at"].isoformat() == "2025-01-31T00:00:00+00:00"


def test_compressed_logs_and_truncated_ones(store: Store, tmp_path: Path) -> None:
    import gzip

    whole = gzip.compress(printed().encode())
    (tmp_path / "run.txt.gz").write_bytes(whole)
    assert import_into(store, "nccl-tests", tmp_path).rows_written == 2
    (tmp_path / "run.txt.gz").write_bytes(whole[:-20])
    with pytest.raises(SourceError, match="truncated"):
        import_into(store, "nccl-tests", tmp_path)


# --- what a log says of itself -----------------------------------------------------------------------------

ALONE = """\
# nThread 1 nGpus 1 minBytes 1310720000 maxBytes 1310720000 step: 1048576(bytes) warmup iters: 5 iters: 20 validation: 1
#
# Using devices
# nThread 1 nGpus 1 minBytes 1310720000 maxBytes 1310720000 step: 1048576(bytes) warmup iters: 5 iters: 20 validation: 1
#
# Using devices
#   Rank  0 Pid   1320 on    node-a device  0 [0x00] Tesla V100-SXM2-16GB
#   Rank  0 Pid   2066 on    node-b device  0 [0x00] Tesla V100-SXM2-16GB
#
#       size         count      type   redop     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)                       (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
  1310720000     327680000     float     sum   3491.3  375.42    0.00  0e+00     5.31  246840    0.00  0e+00
"""
"""Two processes of a build without MPI support on two nodes, as in https://github.com/NVIDIA/nccl-tests/issues/107."""


def test_processes_without_mpi_are_no_collective(store: Store, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"rank 0 is listed 2 times: .* MPI support \(make MPI=1\)") as refused:
        imported(store, tmp_path, ALONE, collective="all_reduce")
    assert "\n" not in str(refused.value)
    assert store.kinds() == []


def test_processes_that_ran_alone_are_told_by_their_busbw(store: Store, tmp_path: Path) -> None:
    text = ALONE.replace("Rank  0 Pid   2066", "Rank  1 Pid   2066")  # somebody mended the log
    with pytest.raises(SourceError, match="busbw is 0 beside 2 ranks: each process ran alone"):
        imported(store, tmp_path, text, collective="all_reduce")


def test_one_rank_is_left_out_with_a_note(store: Store, tmp_path: Path) -> None:
    alone = printed(hosts=("a",), rows=rows_of("all_reduce", 1), device="NVIDIA GeForce RTX 4090")
    report = imported(store, tmp_path, alone + printed())
    assert [(r.rows, r.reason) for r in report.rejected] == [(2, "one rank exchanges nothing: no collective")]
    assert {row["ranks"] for row in store.read("all_reduce").to_pylist()} == {8}


@pytest.mark.parametrize(
    ("was", "now", "says"),
    [
        ("   38.07 ", "   40.00 ", "the printed busbw is not that of 8 ranks"),
        ("   21.75 ", "   12.75 ", "the printed algbw is not the size over the time"),
    ],
)
def test_printed_bandwidth_must_be_that_of_size_time_and_ranks(
    store: Store, tmp_path: Path, was: str, now: str, says: str
) -> None:
    report = imported(store, tmp_path, printed(rows=rows_of("all_reduce", 8).replace(was, now, 1)))
    (refused,) = report.rejected
    assert refused.rows == 1
    assert refused.reason.startswith(says)


def test_few_digits_of_small_sizes_agree(store: Store, tmp_path: Path) -> None:
    rows = "  8  2  float  sum  -1  23.51    0.00    0.00      0    23.62    0.00    0.00      0\n"
    rows += "  12884901888  3221225472  float  sum  -1  1.2e+05  107.37  187.90      0  1.2e+05  107.37  187.90   0\n"
    report = imported(store, tmp_path, printed(rows=rows))
    assert (report.rows_written, report.rejected) == (2, [])


def test_a_rank_that_is_not_listed_is_named(store: Store, tmp_path: Path) -> None:
    cut = "\n".join(line for line in printed().splitlines() if "Rank  3" not in line)
    with pytest.raises(SourceError, match="rank 3 is not listed"):
        imported(store, tmp_path, cut)


def test_no_node_sends_faster_than_its_nics(store: Store, tmp_path: Path) -> None:
    """Two DGX A100 have eight NICs of 25 GB/s each: 200 GB/s leave a node at best, whatever busbw makes of it."""
    hosts = ("a",) * 8 + ("b",) * 8
    rows = rows_of("all_reduce", 16, (1 << 30, 5590.0, 5590.0), (1 << 31, 7100.0, 7100.0))  # 192 and 302 GB/s
    report = imported(store, tmp_path, printed(hosts=hosts, rows=rows))
    assert [(r.rows, r.reason) for r in report.rejected] == [(2, "all_reduce: bandwidth above the link's peak")]
    assert store.read("all_reduce")["size_bytes"].to_pylist() == [1 << 30]


# --- JSON --------------------------------------------------------------------------------------------------


def report_of(hosts: tuple[str, ...] = ("a", "b"), ngpus: int = 8, **more: Any) -> str:
    """What ``-J`` writes (src/util.cu): a device a process, six decimals, "/" as "\\/"."""
    ranks = len(hosts) * ngpus
    results = []
    for size, *both in ((1048576, 48.2, 47.8), (1 << 30, 5590.0, 5592.0)):
        found: dict[str, Any] = {"size": size, "count": size // 4, "type": "float", "redop": "sum", "root": "    -1"}
        for place, time in zip(("out_of_place", "in_place"), both, strict=True):
            rate = size / 1e3 / time
            found[place] = {"time": time, "alg_bw": rate, "bus_bw": rate * 2 * (ranks - 1) / ranks, "nwrong": 0.0}
        results.append(found)
    devices = [
        {
            "rank": at * ngpus,
            "group": 0,
            "pid": 7,
            "hostname": host,
            "device": 0,
            "device_info": "NVIDIA A100-SXM4-80GB",
        }
        for at, host in enumerate(hosts)
    ]
    values = {
        "version": 2,
        "start_time": "2026-03-04 05:06:07",
        "args": ["./build/all_reduce_perf", "-g", str(ngpus)],
        "env": [],
        "nccl_version": 22703,
        "config": {"nthreads": 1, "ngpus": ngpus, "graph": 0, "devices": devices},
        "results": results,
        "out_of_bounds": {"count": 0, "okay": "true"},
    }
    return json.dumps({**values, **more}).replace("/", "\\/")


def test_json_is_read_with_all_ranks_of_a_process(store: Store, tmp_path: Path) -> None:
    report = imported(store, tmp_path, report_of(), "run.json")
    assert (report.rows_written, report.rejected) == (2, [])
    row = store.read("all_reduce").to_pylist()[0]
    assert (row["ranks"], row["ranks_per_node"], LINKS[row["link"]]) == (16, 8, "ib")
    assert (row["backend"], row["dtype"], row["latency_us"]) == ("nccl-2.27.3:nccl", "fp32", 48.0)
    assert row["measured_at"].isoformat() == "2026-03-04T05:06:07+00:00"


def test_json_of_processes_without_mpi_is_no_collective(store: Store, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="one rank exchanges nothing"):
        imported(store, tmp_path, report_of(("a",), 1), "run.json")
    twice = json.loads(report_of())["config"]
    twice["devices"][1]["rank"] = 0
    with pytest.raises(SourceError, match="MPI support"):
        imported(store, tmp_path, report_of(config=twice), "run.json")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (report_of()[:400], "no whole JSON"),
        ('{"traceEvents": []}', "no JSON of nccl-tests"),
        (report_of(config={"nthreads": "many", "devices": []}), "nthreads='many'"),
        (report_of(results=[{"size": 8, "type": "float", "out_of_place": {"cpu_time": 1.0}}]), "that of the CPU"),
        (report_of(results=[{"size": 8, "type": "float", "out_of_place": None}, 7]), "cut off"),
    ],
)
def test_json_that_cannot_be_used_is_one_line(store: Store, tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(SourceError, match=says) as refused:
        imported(store, tmp_path, text, "run.json")
    assert "\n" not in str(refused.value)
