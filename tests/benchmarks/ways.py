"""How good the way to serve is that a search picks: `python tests/benchmarks/ways.py [--cases A,B] [--most N]`.

Twelve questions (dense models, experts, latent attention; 8 to 64 GPUs; the policies of three engines). The search
answers each, timed. Then the event loop plays the best batch and chunk of every way (layout, pools, ratio) that its
closed form has within ``--reach`` of the best, each at the load that it keeps, with four times as many requests as the
search takes and other seeds. *Behind* is how much more the best of all these serves than the pick, in the same runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from opcast.datasets.clusters import load_cluster
from opcast.simulator.question.plan import load_stack
from opcast.simulator.question.request_classes import ServingTargets
from opcast.simulator.question.requests import SimulateRequest
from opcast.simulator.question.sources import Sources
from opcast.simulator.search.outcome import SearchOutcome
from opcast.simulator.search.served import played, run, shortlist
from opcast.simulator.search.served.explain import settings
from opcast.simulator.search.served.request import ServedSearchRequest, ServedSpace
from opcast.simulator.workbench import Workbench

FIRST_SEED = 11  # the search has others
LONGER = 4  # times as many requests: one seed of a search says a rate within 5 %, of these within 2 %
CASES: Mapping[str, tuple[str, str, int, str, str, int, int, float, float]] = {
    # model, cluster, nodes, format, policy, tokens in and out, TTFT and TPOT in ms
    "qwen3_32b_8": ("qwen3_32b", "dgx_h100", 1, "", "vllm", 3000, 300, 1000, 30),
    "qwen3_32b_32": ("qwen3_32b", "dgx_h200", 4, "", "vllm", 4000, 1000, 2000, 50),
    "llama3_70b_16": ("llama3_1_70b", "dgx_h200", 2, "", "trtllm", 2000, 500, 1000, 25),
    "llama3_70b_64": ("llama3_1_70b", "dgx_h100", 8, "", "vllm", 1000, 1000, 500, 40),
    "llama3_8b_8": ("llama3_8b", "dgx_h100", 1, "", "sglang", 1000, 200, 300, 20),
    "qwen3_8b_16": ("qwen3_8b", "dgx_h100", 2, "", "vllm", 6000, 150, 800, 25),
    "qwen3_30b_a3b_8": ("qwen3_30b_a3b", "dgx_h100", 1, "", "vllm", 2000, 400, 600, 20),
    "qwen3_235b_16": ("qwen3_235b_a22b", "dgx_h200", 2, "", "vllm", 2000, 500, 1500, 50),
    "qwen3_235b_64": ("qwen3_235b_a22b", "dgx_h200", 8, "", "trtllm", 4000, 500, 2000, 40),
    "deepseek_v3_32": ("deepseek_v3", "dgx_h200", 4, "fp8_block", "trtllm", 4000, 1000, 2000, 50),
    "deepseek_v3_64": ("deepseek_v3", "dgx_h200", 8, "fp8_block", "vllm", 2000, 1000, 2000, 60),
    "deepseek_v2_lite_8": ("deepseek_v2_lite", "dgx_h100", 1, "", "vllm", 2000, 300, 500, 20),
}


def request_of(name: str, home: str) -> ServedSearchRequest:
    """The question of a case."""
    model, cluster, nodes, quantization, policy, input_len, output_len, ttft_ms, tpot_ms = CASES[name]
    step = SimulateRequest(
        model=model,
        cluster=replace(load_cluster(cluster), nodes=nodes),
        stack=load_stack(policy),
        quantization=quantization,
        sources=Sources.at(home),
    )
    return ServedSearchRequest(
        step=step,
        input_len=input_len,
        output_len=output_len,
        slo=ServingTargets(ttft_ms=ttft_ms, tpot_ms=tpot_ms),
        space=ServedSpace(policy=(policy,)),
    )


def mean_rate(request: ServedSearchRequest, row: Mapping[str, Any], replicas: Any, seeds: int) -> float:
    """Requests a second that a way keeps in the event loop: the mean of several seeds, none of them the search's."""
    rates, start = [], row["requests_per_s"]
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        part = played.part_of(request, row, replicas, seed, LONGER)
        start = played.highest_rate(part, start) or start
        rates.append(start if part.keeps(start) else 0.0)
    return fmean(rates)


def judge(name: str, home: str, most: int, reach: float, seeds: int) -> float:
    """Print how far the pick of a case is behind the best that the event loop finds; that share."""
    request = request_of(name, home)
    bench = Workbench(request.step.sources)
    bench.search(replace(request, confirm=0), 2)  # graphs and tables to disk
    began, cpu = time.perf_counter(), time.process_time()
    report = bench.search(request, 2)
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    if not report.best:
        raise SystemExit(f"{name}: {report.notes[0]}")
    made, found = run.set_up(request), SearchOutcome()
    wanted = [(layout, request.space.policy[0]) for layout in made.layouts]
    engine = run.policy_of(request.space.policy[0]).framework
    replicas = {}
    for layout, _ in wanted:
        own = run.replica_or_why(made, layout, engine, bench)
        if not isinstance(own, run.Refused):
            replicas[layout, engine] = own
    run.points(made, replicas, found)
    rows = shortlist.ranked(request.good(found.rows), request.objectives)
    kinds: dict[Any, list[Any]] = {}
    for row in rows:
        if row["requests_per_s"] >= (1 - reach) * rows[0]["requests_per_s"]:
            kinds.setdefault((*shortlist.kind_of(row), row["max_tokens"]), []).append(row)
    tried = [row for each in kinds.values() for row in each[:2]][:most]
    pick = report.best[0]
    own = mean_rate(request, pick, replicas, seeds)
    rates = [(mean_rate(request, row, replicas, seeds), settings(row)) for row in tried]
    best, what = max([*rates, (own, settings(pick))])
    behind = best / own - 1 if own else float("inf")
    print(
        f"{name:20} {settings(pick):75} {pick['tokens_per_s_per_gpu']:7.0f} tokens/s/GPU; behind {behind:6.1%} of "
        f"{len(tried)} ways{'' if behind < 1e-9 else f' ({what})'}; {wall_s:.1f} s, {cpu_s:.1f} s CPU",
        flush=True,
    )
    return behind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="names of cases, a comma between them")
    parser.add_argument("--home", default="~/.opcast", help="where graphs and tables are kept")
    parser.add_argument("--most", type=int, default=1000, help="ways that are played for a case")
    parser.add_argument("--reach", type=float, default=0.25, help="of the best closed form; others are not played")
    parser.add_argument("--seeds", type=int, default=3, help="of the requests that each way is played with")
    given = parser.parse_args()
    behind = [
        judge(name, str(Path(given.home).expanduser()), given.most, given.reach, given.seeds)
        for name in given.cases.split(",")
    ]
    print(f"within 2 %: {sum(each <= 0.02 for each in behind)} of {len(behind)}; most {max(behind):.1%}")


if __name__ == "__main__":
    main()
