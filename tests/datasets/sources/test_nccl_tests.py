"""What nccl-tests prints becomes collectives: sizes, ranks, nodes, link, library, and no result that was wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from opcast.datasets.ops import LINKS
from opcast.datasets.sources.importing import ImportReport, SourceError, import_into
from opcast.datasets.sources.nccl_tests import runs
from opcast.datasets.sources.options import ImportOptions
from opcast.datasets.store import Store

HEADER = """\
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""
ROWS = {
    "all_reduce": """\
     1048576        262144     float     sum      -1    48.20   21.75   38.07      0    47.80   21.94   38.39      0
   268435456      67108864     float     sum      -1   1935.2  138.71  242.75      0   1934.6  138.76  242.82      0
""",
    "all_gather": """\
     1048576         32768     float    none      -1    38.90   26.96   23.59      0    38.10   27.52   24.08      0
   268435456       8388608     float    none      -1   1012.4  265.15  232.00      0   1010.1  265.75  232.53      0
""",
    "alltoall": """\
     1048576         32768     float    none      -1    45.12   23.24   20.33      0    44.98   23.31   20.40    N/A
   268435456       8388608     float    none      -1   1099.5  244.14  213.63      0   1098.9  244.28  213.74    N/A
""",
    "sendrecv": """\
     1048576        262144  bfloat16     sum      -1    18.61   56.34   56.34      0    18.44   56.86   56.86    N/A
   268435456      67108864  bfloat16     sum      -1   1240.0  216.48  216.48      0   1239.0  216.66  216.66    N/A
""",
}
KINDS = {"all_reduce": "all_reduce", "all_gather": "all_gather", "alltoall": "all_to_all", "sendrecv": "send_recv"}


def printed(
    collective: str = "all_reduce",
    hosts: tuple[str, ...] = ("node-1",) * 8,
    rows: str = "",
    device: str = "NVIDIA A100-SXM4-80GB",
    graph: int = 0,
    version: bool = True,
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
    return "\n".join(lines) + "\n" + HEADER + (rows or ROWS[collective]) + "# Out of bounds values : 0 OK\n"


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
    rows = ROWS["all_reduce"].replace("38.07      0", "38.07      7")
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
    text = printed()
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
        imported(store, tmp_path, printed("reduce", rows=ROWS["all_reduce"]))
    with pytest.raises(SourceError, match="say collective="):
        imported(store, tmp_path, printed(version=False))


def test_graphs_are_told(store: Store, tmp_path: Path) -> None:
    imported(store, tmp_path, printed(graph=10))
    assert store.read("all_reduce").to_pylist()[0]["timer"] == "cuda_graph"


def test_empty_sizes_and_cut_lines_are_counted(store: Store, tmp_path: Path) -> None:
    rows = ROWS["all_reduce"]
    rows += " 0  0  float  sum  -1  0.20  0.00  0.00  0  0.19  0.00  0.00  0\n"
    rows += "   536870912     134217728     float     s"
    report = imported(store, tmp_path, printed(rows=rows))
    assert sorted((r.rows, r.reason) for r in report.rejected) == [
        (1, "the line is cut off or has an unknown type"),
        (2, "nothing was sent (size 0)"),
    ]


def test_faster_than_the_link_is_refused(store: Store, tmp_path: Path) -> None:
    rows = ROWS["all_reduce"] + " 536870912  134217728  float  sum  -1  1.2  138.71  242.75  0  1.1  138.7  242.8  0\n"
    report = imported(store, tmp_path, printed(rows=rows))
    assert sum(r.rows for r in report.rejected) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello\n", "no table of nccl-tests"),
        (HEADER + ROWS["all_reduce"], "does not list its ranks"),
        (printed(hosts=("a", "a", "a", "b")), "unevenly"),
        (printed(device="NVIDIA Mystery 9000"), r"names its GPU 'NVIDIA Mystery 9000' .* device=…"),
        (
            printed(device="NVIDIA Graphics Device"),
            r"GPU 'NVIDIA Graphics Device', which an engineering sample .* device=",
        ),
        (printed(hosts=("a", "b"), device="NVIDIA Graphics Device"), r"'NVIDIA Graphics Device'.* say which it is"),
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
