"""A search on a Ray of two nodes, one of which goes, and on a Slurm: the answer of one process, in its order."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from opcast.datasets.clusters import load_cluster
from opcast.jobs.cli import main
from opcast.simulator.question.requests import SimulateRequest
from opcast.simulator.question.sources import Sources
from opcast.simulator.question.work import Work
from opcast.simulator.search.request import SearchRequest
from opcast.simulator.search.result import SearchReport
from opcast.simulator.search.space import Space
from opcast.simulator.search.spread import Crew, each_of
from opcast.simulator.workbench import Workbench

pytestmark = pytest.mark.slow
TINY = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def request_of_tiny(tmp_path_factory: pytest.TempPathFactory) -> SearchRequest:
    """Two dozen layouts of a tiny model."""
    base = SimulateRequest(
        model=TINY,
        work=Work(seq_len=128, global_batch=32),
        cluster=load_cluster("dgx_h100"),
        sources=Sources.at(str(tmp_path_factory.mktemp("search")), order=("network", "analytical")),
    )
    axes = {"tp": (1, 2), "pp": (1, 2), "vpp": (1,), "zero_stage": (0, 1), "micro_batch": (1, 2)}
    return SearchRequest(base=base, space=Space(**axes, recompute=("none", "full")), prune=())


@pytest.fixture(scope="module")
def alone(request_of_tiny: SearchRequest) -> SearchReport:
    """The answer of one process."""
    return Workbench(request_of_tiny.base.sources).search(request_of_tiny)


def same(found: SearchReport, alone: SearchReport) -> bool:
    """Whether two answers are one, rows in their order."""
    return found.rows == alone.rows and found.best == alone.best and found.pareto == alone.pareto


def test_slurm_finds_what_one_process_finds(
    slurm: Any, request_of_tiny: SearchRequest, alone: SearchReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("submitit", reason="no submitit: pip install 'opcast[cluster]'")
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    crew = Crew(2, "slurm", str(tmp_path), {"mem": "400M"})
    assert same(Workbench(request_of_tiny.base.sources).search(request_of_tiny, crew), alone)
    assert len(list(tmp_path.glob("*_result.pkl"))) == 2


def test_ray_finds_what_one_process_finds(
    ray_cluster: Any, request_of_tiny: SearchRequest, alone: SearchReport
) -> None:
    assert same(Workbench(request_of_tiny.base.sources).search(request_of_tiny, Crew(2, "ray")), alone)


def test_a_node_that_goes_amid_a_search_changes_nothing(
    ray_cluster: Any, request_of_tiny: SearchRequest, alone: SearchReport
) -> None:
    """A node is killed when the first points are there: the same rows, in the same order."""
    left: list[Any] = []

    @contextmanager
    def watching(count: int) -> Iterator[Callable[[int], None]]:
        def advance(done: int) -> None:
            if done and not left:
                left.append(next(iter(ray_cluster.worker_nodes)))
                ray_cluster.remove_node(left[0], allow_graceful=False)

        yield advance

    found = Workbench(request_of_tiny.base.sources).search(request_of_tiny, Crew(2, "ray"), progress=watching)
    assert left, "no node went"
    assert len(ray_cluster.worker_nodes) == 1
    ray_cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    assert same(found, alone)


def test_ray_runs_again_elsewhere_what_a_removed_node_ran(ray_cluster: Any, tmp_path: Path) -> None:
    import ray

    @ray.remote(max_retries=3, num_cpus=1)
    def where(marks: str) -> str:
        node = str(ray.get_runtime_context().get_node_id())
        (Path(marks) / node).touch()
        time.sleep(1.5 if len(list(Path(marks).iterdir())) == 1 else 0)
        return node

    waiting = where.remote(str(tmp_path))
    deadline = time.monotonic() + 60
    while not list(tmp_path.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    first = next(tmp_path.iterdir()).name
    node = next(each for each in ray_cluster.list_all_nodes() if each.node_id == first)
    ray_cluster.remove_node(node, allow_graceful=False)
    ray_cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    assert ray.get(waiting, timeout=60) != first


def test_what_a_node_of_ray_took_with_it_is_run_again(ray_cluster: Any, tmp_path: Path) -> None:
    parts = [(number, str(tmp_path)) for number in range(10)]

    def late_square(number: int, folder: str) -> int:
        (Path(folder) / f"{number}-{time.time_ns()}").touch()  # a mark that it began
        time.sleep(0.5)
        return number * number

    def leave() -> None:
        while len(list(tmp_path.iterdir())) < 3:
            time.sleep(0.05)
        ray_cluster.remove_node(next(iter(ray_cluster.worker_nodes)), allow_graceful=False)

    gone = threading.Thread(target=leave)
    gone.start()
    found = list(Crew(2, "ray").apply(late_square, parts))
    gone.join()
    ray_cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    assert found == [number * number for number in range(10)]


def test_what_ray_says_of_its_nodes_stays_off_the_answer(
    ray_cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node dies amid a search in this very process, which Ray says on the spot: stdout is one object all the same.

    The last test on this Ray, for the command begins a connection of its own and ends it.
    """
    import ray

    ray.shutdown()
    told = {"out": "", "err": ""}

    def hear() -> None:
        now = capsys.readouterr()
        told["out"], told["err"] = told["out"] + now.out, told["err"] + now.err

    def dies() -> None:
        deadline = time.monotonic() + 60
        while not ray.is_initialized():
            time.sleep(0.02)
        ray_cluster.remove_node(next(iter(ray_cluster.worker_nodes)), allow_graceful=False)
        while "marked dead" not in told["err"] + told["out"] and time.monotonic() < deadline:
            hear()
            time.sleep(0.1)

    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    words = f"model={tmp_path}/tiny.json cluster=dgx_h100 workload.seq_len=128 workload.global_batch=32 prune=[]"
    axes = "space.tp=[1,2] space.pp=[1] space.vpp=[1] space.micro_batch=[1,2] space.recompute=[none,full]"
    gone = threading.Thread(target=dies, daemon=True)
    gone.start()
    code = main(["search", *words.split(), *axes.split(), "crew.engine=ray", "workers=2", "format=json"])
    gone.join()
    hear()
    ray_cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    assert code == 0, told["err"]
    assert "marked dead" in told["err"]
    assert json.loads(told["out"])["best"]
    assert not ray.is_initialized(), "what opcast began it ends"


def test_parts_go_round_among_jobs() -> None:
    assert each_of(divmod, [(7, 2), (9, 4)]) == [(3, 1), (2, 1)]
