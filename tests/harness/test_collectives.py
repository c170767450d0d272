"""Collectives between real ranks over gloo: what they move, what is measured, and ranks that fail."""

from __future__ import annotations

import ast
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opcast.datasets.ops import KINDS, LINKS, bus_factor, make_op
from opcast.datasets.store import Store
from opcast.harness.campaign import CampaignError, run
from opcast.harness.collective_calls import CALLS, IN_PLACE
from opcast.harness.collectives import device_of
from opcast.harness.environment import node_name
from opcast.harness.plan import CampaignPlan, Case, Settings, build_plan
from opcast.harness.rank_map import RankMap, localize_plan
from opcast.harness.sessions import sessions
from opcast.harness.status import status
from opcast.harness.supervisor import Supervisor
from opcast.tests.at_hand import figures_at_hand

distributed = pytest.importorskip("torch.distributed")
pytestmark = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()), reason="this torch has no gloo"
)

FAST = Settings(threads=1, case_budget_s=0.02, ci_width=0.5, case_timeout_s=30.0)
SIZES = [1024, 1 << 23]
EXCHANGES = ("ep_dispatch", "ep_combine")
COLLECTIVES = tuple(kind for kind in CALLS if kind not in EXCHANGES)


def collective_plan(kinds: Iterable[str] = COLLECTIVES) -> CampaignPlan:
    entries = [
        {
            "kind": kind,
            "size_bytes": SIZES,
            "ranks": [2, 3],
            "backend": ["gloo", "gloo:inplace"] if kind in IN_PLACE else "gloo",
        }
        for kind in kinds
    ]
    spec = {"name": "coll", "dtype": "fp32", "settings": vars(FAST), "cases": entries}
    return build_plan(spec)


def known_store(folder: Path) -> Store:
    """A store with figures of this machine, which costs ranks half a minute to find out."""
    store = Store(folder / "store")
    store.save_device(figures_at_hand(FAST.threads))
    return store


def rows(store: Store) -> list[dict[str, Any]]:
    return [
        {"kind": kind, **row}
        for kind in store.kinds()
        for row in store.read(kind, status=None, newest=False).to_pylist()
    ]


def test_every_collective_kind_has_a_call() -> None:
    assert set(CALLS) == {name for name, kind in KINDS.items() if kind.collective}


def test_every_call_moves_the_right_data() -> None:
    """Between three ranks, and between two of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = str(Path(__file__).with_name("collective_ranks.py"))
    commands = [[sys.executable, "-P", script, str(rank), "3", str(port)] for rank in range(3)]
    started = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for c in commands]
    calls = {*CALLS, *(f"{kind}:inplace" for kind in IN_PLACE)}
    try:
        for rank, process in enumerate(started):
            output, errors = process.communicate(timeout=600)
            assert process.returncode == 0, errors
            assert set(output.split()) == {f"{call}/{ranks}" for call in calls for ranks in (2, 3) if rank < ranks}
    finally:
        for process in started:
            process.kill()


def test_memory_that_runs_out_leaves_no_rank_in_another_case() -> None:
    """Agreed on beforehand, the ranks go on together; inside a collective, the group is given up."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = str(Path(__file__).with_name("short_of_memory_ranks.py"))
    commands = [[sys.executable, "-P", script, str(rank), "2", str(port)] for rank in range(2)]
    started = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for c in commands]
    try:
        output, errors = started[0].communicate(timeout=600)
    finally:
        for process in started:
            process.kill()
            process.communicate()
    replies = {reply["kind"]: reply for reply in map(json.loads, output.splitlines())}
    assert set(replies) == {"all_gather", "broadcast", "all_reduce"}, errors
    assert (replies["all_gather"]["status"], replies["all_gather"].get("ill")) == ("oom", None)
    assert (replies["broadcast"]["status"], replies["broadcast"].get("ill")) == ("ok", None)
    assert replies["all_reduce"]["status"] == "oom"
    assert "out of memory" in replies["all_reduce"]["ill"]


# PERFORMANCE.md of nccl-tests: bus bandwidth = size / time times this, with the size that each test reports.
PUBLISHED_BUS_FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "send_recv": lambda n: 1.0,
}
# Elements that a rank sends and receives for a count of elements: the tests' sources (all_gather.cu and so on)
# divide the count by the ranks where each has its part; the reported size is the larger buffer.
PUBLISHED_BUFFERS = {
    "all_reduce": lambda count, n: (count, count),
    "all_gather": lambda count, n: (count // n, count // n * n),
    "reduce_scatter": lambda count, n: (count // n * n, count // n),
    "all_to_all": lambda count, n: (count // n * n, count // n * n),
    "broadcast": lambda count, n: (count, count),
    "send_recv": lambda count, n: (count, count),
}


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_sizes_and_rates_are_those_of_nccl_tests(kind: str, ranks: int) -> None:
    from opcast.harness.collective_calls import CallSetting
    from opcast.harness.plan import whole_shards

    assert bus_factor(kind, ranks) == pytest.approx(PUBLISHED_BUS_FACTORS[kind](ranks))
    op = whole_shards(make_op(kind, size_bytes=4 * 1000 * ranks + 16, ranks=ranks, dtype="fp32"))
    made = CALLS[kind](CallSetting(op, None, 0, "cpu", False))
    assert (made.source.numel(), made.target.numel()) == PUBLISHED_BUFFERS[kind](op.size_bytes // 4, ranks)
    assert max(made.source.numel(), made.target.numel()) * 4 == op.size_bytes


@pytest.mark.parametrize(
    ("local_rank", "local_ranks", "visible", "device"),
    [(0, 8, 8, 0), (5, 8, 8, 5), (5, 8, 1, 0), (0, 1, 8, 0), (1, 2, 8, 1), (5, 8, 4, None)],
)
def test_a_rank_takes_its_own_gpu(local_rank: int, local_ranks: int, visible: int, device: int | None) -> None:
    """All of the node's are shown by torchrun and by Slurm (--gpu-bind=none), one to each task by --gpus-per-task=1."""
    if device is None:
        with pytest.raises(CampaignError, match="8 ranks on a node whose tasks see 4 GPUs"):
            device_of(local_rank, local_ranks, visible)
    else:
        assert device_of(local_rank, local_ranks, visible) == device


def test_a_campaign_launches_its_ranks(tmp_path: Path) -> None:
    store = known_store(tmp_path)
    plan = collective_plan()
    summary = run(plan, store)
    assert summary.statuses == {"ok": len(plan.cases)}
    found = rows(store)
    assert {(row["kind"], row["ranks"]) for row in found} == {(kind, ranks) for kind in COLLECTIVES for ranks in (2, 3)}
    for row in found:
        assert LINKS[row["link"]] == "loopback"
        assert row["ranks_per_node"] == row["ranks"]
        assert row["timer"] == "cpu_clock"
        assert row["iterations"] >= 1
        assert row["latency_min_us"] <= row["latency_us"] <= row["latency_mean_us"] + 3 * row["latency_std_us"] + 1
        bus_gbps = row["size_bytes"] / row["latency_us"] / 1e3 * bus_factor(row["kind"], row["ranks"])
        assert 0 < bus_gbps < 500
    medians = {
        size: sorted(r["latency_us"] for r in found if r["size_bytes"] // 1000 == size // 1000) for size in SIZES
    }
    assert medians[1 << 23][len(medians[1 << 23]) // 2] > medians[1024][len(medians[1024]) // 2]
    assert run(plan, store).statuses == {}
    (word, *_) = sessions(tmp_path / "store").values()
    assert [place["node"] for place in word.placement["ranks"]] == [node_name()] * 3
    assert list(word.placement["nodes"]) == [node_name()]


def test_exchanges_between_experts_are_measured(tmp_path: Path) -> None:
    entries = [
        {"kind": kind, "tokens": [4, 512], "hidden": 64, "topk": 2, "experts": 12, "ranks": 2, "mode": mode}
        for kind in EXCHANGES
        for mode in ("normal", "low_latency")
    ]
    store = known_store(tmp_path)
    plan = build_plan({"name": "experts", "dtype": "bf16", "settings": vars(FAST), "cases": entries})
    assert run(plan, store).statuses == {"ok": 8}
    assert {(row["kind"], row["mode"], row["ranks_per_node"]) for row in rows(store)} == {
        (kind, mode, 2) for kind in EXCHANGES for mode in (0, 1)
    }
    lost = Case(make_op("ep_dispatch", tokens=4, hidden=64, topk=2, experts=13, ranks=2), "gloo")
    assert run(CampaignPlan("uneven", (lost,), (), FAST), store).statuses == {"unsupported": 1}


def test_what_cannot_run_is_said_and_the_ranks_go_on(tmp_path: Path) -> None:
    store = known_store(tmp_path)
    ops = {
        "ok": make_op("all_reduce", size_bytes=1024, ranks=2, dtype="fp32"),
        "odd size": make_op("all_reduce", size_bytes=1023, ranks=2, dtype="fp32"),
        "odd shard": make_op("all_gather", size_bytes=1028, ranks=2, dtype="fp32"),
        "one rank": make_op("broadcast", size_bytes=1024, ranks=1, dtype="fp32"),
        "refused by gloo": make_op("all_reduce", size_bytes=1024, ranks=2, dtype="fp8"),
        "ok after all": make_op("broadcast", size_bytes=1024, ranks=2, dtype="fp32"),
    }
    cases = [Case(op, "gloo") for op in ops.values()]
    cases += [Case(ops["ok"], "nccl"), Case(ops["ok"], "gloo:inplace"), Case(ops["ok"], "gloo", "cold")]
    summary = run(CampaignPlan("bad", tuple(cases), (), FAST), store)
    assert summary.statuses == {"ok": 2, "unsupported": 6, "error": 1}
    assert summary.restarts == 1
    errors = " | ".join(row["error"] or "" for row in rows(store))
    for words in ("whole number of fp32", "no multiple of ranks", "at least 2 ranks", "'nccl'", "does not run", "warm"):
        assert words in errors


def test_more_ranks_than_there_are_is_unsupported(tmp_path: Path) -> None:
    from opcast.harness.measuring import outcome

    case = Case(make_op("all_reduce", size_bytes=1024, ranks=8, dtype="fp32"), "gloo")
    reply = outcome(case, FAST, None)
    assert reply["status"] == "unsupported"
    assert "8 ranks" in reply["error"]


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks as Linux lists them")
def test_a_rank_that_dies_costs_one_case(tmp_path: Path) -> None:
    case = Case(make_op("all_reduce", size_bytes=1024, ranks=3, dtype="fp32"), "gloo")
    with Supervisor(FAST, ranks=3) as supervisor:
        assert supervisor.ask(case)["status"] == "ok"
        os.kill(_peers()[0], signal.SIGKILL)
        assert supervisor.ask(case)["status"] == "error"
        assert supervisor.ask(case)["status"] == "ok"
        assert supervisor.restarts == 1
        assert len(_peers()) == 2
    assert not _peers()


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks as Linux lists them")
def test_a_rank_that_hangs_is_killed_by_the_watchdog_and_the_case_recorded(tmp_path: Path) -> None:
    """As NCCL hangs: one rank goes silent inside a collective, and the others wait for it."""
    settings = replace(FAST, case_timeout_s=6.0)
    ops = [make_op("all_reduce", size_bytes=1024 * n, ranks=2, dtype="fp32") for n in (1, 2, 3)]
    plan = CampaignPlan("hang", tuple(Case(op, "gloo") for op in ops), (), settings)
    store, supervisor = known_store(tmp_path), Supervisor(settings, ranks=2)

    def stop_a_rank(progress: Any) -> None:
        if sum(progress.statuses.values()) == 1:
            os.kill(_peers()[0], signal.SIGSTOP)

    assert run(plan, store, stop_a_rank, measurer=supervisor).statuses == {"ok": 2, "timeout": 1}
    (lost,) = [row for row in rows(store) if row["status"] == "timeout"]
    assert (lost["size_bytes"], lost["error"]) == (2048, "no answer within 6 s: killed")
    assert supervisor.restarts == 1
    assert not _peers()


HANGING = """
import time
from types import SimpleNamespace
from opcast.datasets.ops import make_op
from opcast.harness import collectives
from opcast.harness.plan import Case, Settings
collectives.outcome = lambda *_: time.sleep(60)
measurer = collectives.InProcess(SimpleNamespace(settings=Settings(case_timeout_s=0.2)))
case = Case(make_op("all_reduce", size_bytes=1024, ranks=2, dtype="fp32"), "nccl")
measurer.ask(case, lambda columns: print(columns, flush=True))
"""


def test_a_hang_under_torchrun_is_recorded_before_all_ranks_end() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", HANGING], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1, done.stderr
    assert ast.literal_eval(done.stdout) == {
        "status": "timeout",
        "error": "no answer within 0.2 s: the ranks were ended",
    }


def _peers() -> list[int]:
    """Ranks beside rank 0 that descend from this process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
            parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
            grandparent = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if b"--peer" in words and grandparent == os.getpid():
            found.append(int(path.parent.name))
    return found


def test_torchrun_runs_the_same_plan(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(collective_plan(["all_reduce", "send_recv"]).to_json())
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "opcast.harness.collectives", str(plan), str(tmp_path / "store")]
    for measured in ("4 ok", "none"):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        assert f"4 of 4 cases in the store; measured now: {measured}" in done.stderr
    statuses = {(row["ranks"], row["status"]) for row in rows(Store(tmp_path / "store"))}
    assert statuses == {(2, "ok")}  # three ranks are not here
    (told,) = status(Store(tmp_path / "store"))
    assert (told.done, told.cases, told.complete) == (4, 4, True)  # of those that can run here, not of those announced
    (device_id,) = Store(tmp_path / "store").devices()
    assert Store(tmp_path / "store").device(device_id) is not None  # without it nothing could be trained on the rows


def test_outside_torchrun_the_module_says_how() -> None:
    command = [sys.executable, "-P", "-m", "opcast.harness.collectives", "plan.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: torchrun")


def test_ranks_of_two_nodes_measure_inside_and_between_them(tmp_path: Path) -> None:
    """Four ranks, two of which say that they are on another node."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    plan, script = tmp_path / "plan.json", str(Path(__file__).with_name("two_node_ranks.py"))
    entries = [
        {"kind": kind, "size_bytes": 1024, "ranks": [2, 3, 4, 8], "backend": "gloo"}
        for kind in ("all_gather", "send_recv")
    ]
    plan.write_text(build_plan({"name": "two", "dtype": "fp32", "settings": vars(FAST), "cases": entries}).to_json())
    ends = [str(port), str(plan), str(known_store(tmp_path).path)]
    commands = [[sys.executable, "-P", script, str(rank), "4", *ends] for rank in range(4)]
    started = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for c in commands]
    try:
        for process in started:
            _, errors = process.communicate(timeout=600)
            assert process.returncode == 0, errors
    finally:
        for process in started:
            process.kill()
    found = {(r["kind"], r["ranks"], r["ranks_per_node"], LINKS[r["link"]]) for r in rows(Store(tmp_path / "store"))}
    ways = [(2, 2, "loopback"), (2, 1, "roce"), (4, 2, "roce")]
    assert found == {(kind, *way) for kind in ("all_gather", "send_recv") for way in ways}
    assert {row["status"] for row in rows(Store(tmp_path / "store"))} == {"ok"}


def test_gloo_takes_the_interface_that_leads_to_the_master(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not the one that the host's name stands for, which on Debian is the loopback's."""
    from opcast.harness import environment, network_interfaces
    from opcast.harness.network_interfaces import interface_to

    own = {name: network_interfaces._address(name) for _, name in socket.if_nameindex()}
    reached = {name: address for name, address in own.items() if name != "lo" and address}
    for name, address in reached.items():
        assert interface_to(address, 29500) == name
    routes = tmp_path / "route"
    routes.write_text("Iface\tDestination\tGateway\neth7\t0000FEA9\t0\nib7\t00000000\t0102A8C0\n")
    monkeypatch.setattr(network_interfaces, "ROUTES", routes)
    assert interface_to("127.0.1.1", 29500) == "ib7"  # the master itself, by its own name
    monkeypatch.setenv("MASTER_ADDR", "127.0.1.1")
    for given, taken in (("", "ib7"), ("bond0", "bond0")):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", given)
        if not given:
            monkeypatch.delenv("GLOO_SOCKET_IFNAME")
        environment.use_route_to_master()
        assert os.environ["GLOO_SOCKET_IFNAME"] == taken
    assert "bond0" in environment.gloo_words()


def test_ranks_beside_each_other_share_the_threads() -> None:
    from opcast.harness.environment import threads_beside

    assert [threads_beside(96, ranks) for ranks in (1, 8, 200)] == [96, 12, 1]


@pytest.mark.essential
def test_a_link_of_no_network_card_is_said(tmp_path: Path) -> None:
    """An interface that does not exist: gloo fails, and one line says what to set."""
    plan = tmp_path / "plan.json"
    plan.write_text(collective_plan(["all_reduce"]).to_json())
    command = [sys.executable, "-P", "-m", "opcast.harness.collectives", str(plan), str(tmp_path / "store")]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": str(free.getsockname()[1])}
    told = {**os.environ, **place, "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "none7"}
    done = subprocess.run(command, env=told, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert "interface none7 here: set GLOO_SOCKET_IFNAME" in done.stderr.splitlines()[-1]


@pytest.mark.essential
def test_a_given_link_is_taken(tmp_path: Path) -> None:
    store = known_store(tmp_path)
    op = make_op("broadcast", size_bytes=1024, ranks=2, dtype="fp32", link="nvlink", ranks_per_node=8)
    plan = CampaignPlan("given", (Case(op, "gloo"),), (), Settings(**{**vars(FAST), "link": "roce"}))
    assert run(plan, store).statuses == {"ok": 1}
    (row,) = rows(store)
    assert (LINKS[row["link"]], row["ranks_per_node"]) == ("roce", 2)


def test_a_planned_link_stays() -> None:
    op = make_op("broadcast", size_bytes=1024, ranks=2, dtype="fp32", link="nvlink", ranks_per_node=8)
    plan = CampaignPlan("planned", (Case(op, "gloo"),), (), Settings(link="planned"))
    assert localize_plan(plan, {"rank_map": RankMap((0, 0), (0, 0)).to_dict()}) == plan
