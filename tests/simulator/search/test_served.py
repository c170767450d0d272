"""Ways to serve: closed forms agree with the event loop, answers explain themselves, nothing better is left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from opcast.datasets.clusters import load_cluster
from opcast.simulator.question.request_classes import ServingTargets
from opcast.simulator.search.points import write_points
from opcast.simulator.search.result import SearchReport
from opcast.simulator.search.served.decoding import decode_reports
from opcast.simulator.search.served.explain import PARTS, reason, settings
from opcast.simulator.search.served.replicas import LayoutReplica
from opcast.simulator.search.served.request import OF_POINT, ServedSearchRequest
from opcast.simulator.search.served.run import ReplicaEvaluator, set_up
from opcast.simulator.workbench import Workbench

WIDER = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8}
AXES: dict[str, Any] = {"tp": (1, 2), "batch": (8, 32), "max_tokens": (512,)}
Asking = Callable[..., ServedSearchRequest]


@pytest.fixture(scope="module")
def whole(serving: Asking, bench: Workbench) -> SearchReport:
    """Both kinds of pools, the best two played through the event loop."""
    return bench.search(serving({}, top=20))


def test_an_answer_explains_itself(whole: SearchReport) -> None:
    assert (whole.evaluated, whole.combinations) == (len(whole.rows), 2)
    assert {row["pools"] for row in whole.rows} == {"together", "apart"}
    values = [row["tokens_per_s_per_gpu"] for row in whole.best]
    assert values == sorted(values, reverse=True)
    for row in whole.best[:-1]:
        how, _, rest = row["reason"].partition(" in ")
        objective, _, parts = rest.partition(":")
        assert how == "as good" or float(how.removesuffix("% better")) >= 0
        assert objective in {name.replace("_", " ") for name in whole.objectives}
        assert not parts or " ms " in parts or parts.endswith("under way")
    for before, row in zip(whole.best, whole.best[1:], strict=False):
        near = abs(before["tokens_per_s_per_gpu"] / row["tokens_per_s_per_gpu"] - 1) <= 0.03
        assert (row["tie"] == "noise") or not near
    assert {each["axis"] for each in whole.sensitivity} >= {"batch"}
    assert "decode" in settings(whole.best[0]) or "batch" in settings(whole.best[0])


@pytest.mark.parametrize("pools", ["together", "apart"])
def test_closed_forms_say_what_the_event_loop_says(pools: str, serving: Asking, bench: Workbench) -> None:
    found = bench.search(serving({"pools": pools, "tp": 1, "batch": 8, "policy": "sglang"}, confirm=1, top=1)).best[0]
    played = found["confirmed"]
    assert played["tpot_ms"] == pytest.approx(found["tpot_ms"], rel=0.15)
    assert played["keeps_up"]


def test_the_best_ratio_is_the_best_of_all(serving: Asking, bench: Workbench) -> None:
    fixed = {"pools": "apart", "tp": 1, "batch": 8}
    best = bench.search(serving(fixed)).best[0]
    every = tuple(f"{x}:{y}" for x in range(1, 8) for y in range(1, 9 - x))
    rows = bench.search(serving({**fixed, "ratio": every})).rows
    assert len(rows) == len(every)
    assert best["tokens_per_s"] == pytest.approx(max(row["tokens_per_s"] for row in rows))


def test_experts_are_shared_out_over_attention_ranks(serving: Asking, bench: Workbench) -> None:
    found = bench.search(serving({"tp": (1, 4), "batch": 8, "pools": "together"}, kind="deepseek_v3"))
    layouts = {(row["tp"], row["dp"], row["ep"]) for row in found.rows}
    assert {(1, 8, 8), (1, 1, 1), (4, 1, 1)} <= layouts
    assert all(ep == tp * dp for tp, dp, ep in layouts if dp > 1)


def test_what_users_expect_bounds_the_best(serving: Asking, bench: Workbench, whole: SearchReport) -> None:
    limit = float(np.median([row["tpot_ms"] for row in whole.rows]))
    found = bench.search(serving({}, slo=ServingTargets(tpot_ms=limit), objectives=("goodput",)))
    assert all(row["tpot_ms"] <= limit for row in found.best)
    strict = bench.search(serving({}, constraints=(f"tpot_ms <= {limit}",)))
    assert any(each["status"] == "not what is asked for" for each in strict.sensitivity)
    nothing = bench.search(serving({}, slo=ServingTargets(ttft_ms=0.001)))
    assert not nothing.best
    assert "no point meets slo.ttft_ms=0.001" in nothing.notes[0]


def test_what_has_no_kv_memory_is_left_out(serving: Asking, bench: Workbench) -> None:
    request = serving({"tp": 1, "batch": (8, 100_000_000), "pools": "together"})
    found = bench.search(request)
    assert found.pruned_by["memory"].count == 1
    assert found.evaluated + found.pruned == found.points
    ruled = bench.search(serving({"rules": ("tp * batch <= 16",)}))
    assert ruled.pruned_by["rule: tp * batch <= 16"].count > 0
    assert all(row["tp"] * row["batch"] <= 16 for row in ruled.rows)


@pytest.mark.parametrize(("policy", "left"), [("trtllm", {2}), ("vllm", set())])
def test_prompts_that_an_engine_does_not_cut_fit_an_iteration(
    policy: str, left: set[int], serving: Asking, bench: Workbench
) -> None:
    axes = {"tp": 1, "max_tokens": (128, 512), "pools": "together", "policy": policy}
    found = bench.search(serving(axes))
    assert {group.count for name, group in found.pruned_by.items() if name == "prompt"} == left
    assert {row["max_tokens"] for row in found.rows} == ({512} if left else {128, 512})


@pytest.mark.parametrize(
    ("axes", "own", "says"),
    [
        ({"tp": 3}, {}, "none is left after: tp divides"),
        ({"tp": 8, "pp": 4}, {}, "none is left after"),
        ({"rules": ("tp > 2", "tp < 2")}, {}, "no point can meet both"),
        ({"rules": ("tp > 4",)}, {}, "none of 12 points meets the rule"),
        ({"ratio": "1-3"}, {}, "must be replicas that prefill and that decode"),
        ({"pools": "mixed"}, {}, "pools"),
        ({}, {"objectives": ("goodput",)}, "needs what users expect"),
        ({}, {"objectives": ("speed",)}, "objectives"),
        ({}, {"output_len": 1}, "output_len"),
        ({}, {"link_gbps": 0}, "link_gbps=0"),
        ({}, {"constraints": ("__import__('os')",)}, "constraints"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    axes: dict[str, Any], own: dict[str, Any], says: str, serving: Asking, bench: Workbench
) -> None:
    with pytest.raises(ValueError, match=says) as error:
        bench.search(serving(axes, **own))
    assert "\n" not in str(error.value)


def test_requests_go_through_json(serving: Asking) -> None:
    request = serving({"pools": "apart", "ratio": ("1:3",)}, slo=ServingTargets(ttft_ms=100))
    again = ServedSearchRequest.from_json(request.to_json())
    assert again.key() == request.key()
    assert again.space == request.space


@pytest.mark.slow
def test_two_processes_find_the_same(serving: Asking, bench: Workbench) -> None:
    request = serving({"tp": (1, 4), "batch": 8}, kind="deepseek_v3")
    alone, two = bench.search(request), bench.search(request, 2)
    assert two.rows == alone.rows
    assert two.best == alone.best


def test_no_more_than_a_node_as_a_replica(serving: Asking, bench: Workbench) -> None:
    request = serving({"tp": 1, "batch": 8})
    pair = replace(request, step=replace(request.step, cluster=replace(load_cluster("dgx_h100"), nodes=2)))
    best = bench.search(pair).best[0]
    assert 8 < best["devices"] <= 16


def test_what_makes_two_ways_differ_adds_up(serving: Asking, bench: Workbench) -> None:
    found = bench.compare(serving({}), "tp=1 batch=8", "tp=2 batch=32")
    for parts in (found.tpot, found.ttft, found.dimensions):
        *each, whole = parts
        assert sum(part.more for part in each) == pytest.approx(whole.more, rel=1e-6)
    assert [step.settings for step in found.settings] == ["tp", "batch"]
    assert found.settings[-1].tpot_ms == found.other["tpot_ms"]
    assert "exposed tp" in {part.name for part in found.dimensions}
    assert any("all_reduce" in op.name for op in found.decode_ops if not op.one)
    assert {"settings", "tpot", "prompt_ops"} <= set(found.to_dict())
    same = bench.compare(serving({}), "tp=2", "tp=2")
    assert not any(part.more for part in (*same.tpot, *same.figures, *same.decode_ops, *same.memory))
    assert not same.settings


def test_reports_that_are_made_together_are_those_of_each_alone(serving: Asking, bench: Workbench) -> None:
    request = serving({})
    setup = set_up(request)
    replica = ReplicaEvaluator(setup, bench).replica((setup.layouts[-1], "vllm"))
    assert isinstance(replica, LayoutReplica)
    together = decode_reports(request, replica, [8, 32], bench)
    alone = [decode_reports(request, replica, [batch], bench)[0] for batch in (8, 32)]
    one, other = ([report.to_dict() | {"wall_time_s": 0.0} for report in reports] for reports in (together, alone))
    assert one == other
    assert together[0].e2e_ms < together[1].e2e_ms


def test_ways_are_ranks_of_points_that_were_kept(serving: Asking, bench: Workbench, tmp_path: Path) -> None:
    request = serving({}, slo=ServingTargets(tpot_ms=20.0), confirm=0)
    kept = bench.search(request)
    write_points(kept.rows, tmp_path / "ways.parquet")
    last = len([row for row in kept.rows if row["tpot_ms"] <= 20.0])
    apart = next(row["rank"] for row in kept.best if row["pools"] == "apart")
    together = next(row["rank"] for row in kept.best if row["pools"] == "together")
    found = bench.compare(request, str(together), str(apart), tmp_path / "ways.parquet")
    for way, rank in ((found.one, together), (found.other, apart)):
        row = kept.best[rank - 1]
        assert {name: way[name] for name in OF_POINT} == {name: row[name] for name in OF_POINT}
        assert way["ttft_ms"] == pytest.approx(row["ttft_ms"])
        assert way["tokens_per_s_per_gpu"] == pytest.approx(row["tokens_per_s_per_gpu"])
    assert "pools" in found.settings[-1].settings
    for text, says in (("0", "0 is no rank"), (str(last + 1), "is no rank of"), ("tq=2", "is no setting=value")):
        with pytest.raises(ValueError, match=says):
            bench.compare(request, "1", text, tmp_path / "ways.parquet")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1", "name its file with points=FILE"),
        ("tp=x", "tp=x must be a whole number"),
        ("tp=3", "tp=3 pp=1 dp=1 ep=1 cannot be: tp divides the attention heads"),
        ("pools=together ratio=1:3", "pools=together has no ratio"),
        ("ratio=1:99", "ratio=1:99 does not fit the 8 GPUs"),
        ("batch=100000000", "holds .* tokens of"),
        ("cluster=dgx_b200", "cluster=dgx_b200 is not searched"),
    ],
)
def test_what_cannot_be_compared(text: str, says: str, serving: Asking, bench: Workbench) -> None:
    with pytest.raises(ValueError, match=says):
        bench.compare(serving({}), "tp=1", text)


def test_points_of_ways_are_a_file(serving: Asking, bench: Workbench, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is a folder: name a file, as .*ways\.parquet"):
        bench.search(serving({}), points=tmp_path)


def test_what_was_played_is_in_the_file_whichever_row_is_first(tmp_path: Path) -> None:
    write_points([{"tp": 1}, {"tp": 2, "confirmed": {"rate": 3.0}}], tmp_path / "ways.parquet")
    assert [row["confirmed"] for row in pq.read_table(tmp_path / "ways.parquet").to_pylist()] == [None, {"rate": 3.0}]


def test_a_reason_names_no_difference_that_cannot_be_seen() -> None:
    row = {"tokens_per_s_per_gpu": 100.0, "concurrency": 63.0, **dict.fromkeys(PARTS, 1.0)}
    near, far = row | {"concurrency": 63.2}, row | {"concurrency": 20.0}
    assert "under way" not in reason(row, near, "tokens_per_s_per_gpu")
    assert "63 instead of 20 requests under way" in reason(row, far, "tokens_per_s_per_gpu")
    assert reason(row | {"p_p99_ttft_met": 0.9}, near, "chance") == "better in chance"  # the next one was not played
