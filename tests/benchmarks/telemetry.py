"""How well 200 logged steps teach the rest: ``python tests/benchmarks/telemetry.py [MODEL] [SEEDS]``.

In each world of tests/worlds an engine serves one load whose true step times follow the world's laws, with a host and
noise that nobody told opcast; 200 of its steps are learned, and other loads are predicted: the same again, more
sequences, longer prompts, prompts alone, and one at a time.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from opcast.simulator.engines import FusedEngine
from opcast.simulator.question.keywords import simulate_request
from opcast.simulator.question.requests import plan_of
from opcast.simulator.question.serving import IterationLaw, KvMemory, ServingRequest
from opcast.simulator.question.sources import Sources
from opcast.simulator.question.traffic import Lengths, RequestTraffic
from opcast.simulator.question.work import Work
from opcast.simulator.serving.host import HostTime
from opcast.simulator.serving.iteration import IterationTables
from opcast.simulator.serving.learned import interval_width, step_us
from opcast.simulator.serving.replica import by_hand
from opcast.simulator.serving.serve import Keeping, serve
from opcast.simulator.serving.step_fit import learn
from opcast.simulator.serving.step_logs import LoggedStep, StepLog, as_log
from opcast.simulator.serving.steps import steps_of
from opcast.simulator.serving.tabulate import Extent, tabulate
from opcast.simulator.simulate import all_simulated
from opcast.simulator.step.build import engine_of
from opcast.simulator.step.state import State
from opcast.simulator.workbench import Workbench
from opcast.tests.worlds.chip import WORLDS, World, make_world
from opcast.tests.worlds.emulation import Emulator
from opcast.tests.worlds.truth import TruthEngine

GRAPHS = (1, 2, 4, *range(8, 513, 8))
BLOCKS, NOISE, LEARNED = 60_000, 0.01, 200
HOST = HostTime(step_us=900.0, seq_us=11.0)  # what the engine's host takes, which opcast is not told


@dataclass(frozen=True)
class Score:
    """Errors of a load, in percent of each step, and the share of steps inside their 90 % interval."""

    mean_ape: float
    bias: float
    inside: float
    untaught: float


def load(rate: float, prompt: int, answer: int, requests: int = 300, seed: int = 1) -> RequestTraffic:
    """Requests by chance with lengths up to half off their mean."""
    lengths = [Lengths("uniform", low=max(mean // 2, 1), high=mean * 3 // 2) for mean in (prompt, answer)]
    return RequestTraffic(rate=rate, requests=requests, seed=seed, input=lengths[0], output=lengths[1])


LOADS = {
    "same": load(4, 400, 150, seed=5),
    "many more sequences": load(16, 300, 300, 900),
    "prompts ten times as long": load(1, 4000, 100),
    "prompts, hardly answers": load(6, 2000, 8),
    "one at a time": load(0.5, 100, 200),
}


def tables_of(world: World, model: str, home: str, extent: Extent) -> tuple[IterationTables, IterationTables]:
    """(as opcast predicts them from the world's sheet, as they truly are)."""
    sources = Sources.at(home, calibration="none")
    bench = Workbench(sources)
    given = {"stack": "vllm", "cluster": world.cluster, "tp": 1, "batch": 1, "input_len": 128}
    request = simulate_request(model, "decode", world.device, sources, given)
    steps = steps_of(request, bench)
    device = replace(world.device, tdp_w=0.0)
    plan = plan_of(request, device)
    stack = replace(plan.stack, attention="fused", products="current", ring_factor=1.0, step_us={}, scale={})
    truth = FusedEngine([TruthEngine(world, stack.id, False, Emulator(world.device), "served")])

    def simulate(works: Sequence[Work]) -> list[State]:
        still = [replace(work, cache="static") for work in works]
        return all_simulated(model, still, replace(plan, stack=stack), device, truth, bench.graphs)

    return tabulate(steps.simulate_all, steps.kernels, extent), tabulate(simulate, engine_of(stack, truth), extent)


def logged(tables: IterationTables, traffic: RequestTraffic, steps: int, random: np.random.Generator) -> StepLog:
    """Some steps of an engine whose iterations take as long as ``tables`` say, and its host."""
    law = IterationLaw(base_us=1.0)
    replica = replace(by_hand(law, BLOCKS, 16, 0.0), tables=tables, host=HOST, graphs=GRAPHS)
    served = serve(ServingRequest(law=law, kv=KvMemory(BLOCKS), traffic=traffic), replica, keeping=Keeping(20_000))
    rows = served.iterations[len(served.iterations) // 10 :]
    rows = rows[np.sort(random.choice(len(rows), min(steps, len(rows)), replace=False))]
    time_ms = (rows["end_us"] - rows["start_us"]) * np.exp(NOISE * random.standard_normal(len(rows))) / 1e3
    prompts = np.maximum(rows["samples"] - rows["decodes"], rows["prefill_tokens"] > 0)
    zero = np.zeros(len(rows))
    columns = (rows["decodes"], rows["decode_context"], rows["prefill_tokens"], zero, prompts, time_ms)
    return as_log([LoggedStep(*map(float, row)) for row in zip(*columns, strict=True)], {}, 0.0)


def scores(predicted: IterationTables, true: IterationTables, seed: int = 0) -> dict[str, Score]:
    """Errors of each load after 200 steps of another one."""
    random, graphs = np.random.default_rng(seed), np.array(GRAPHS)
    replica = replace(by_hand(IterationLaw(base_us=1.0), BLOCKS, 16, 0.0), tables=predicted, graphs=GRAPHS)
    learned, _ = learn(logged(true, load(4, 400, 150), LEARNED, random), replica, ("model", "device", "vllm"))
    bare = replace(learned, factors=dict.fromkeys(learned.factors, 1.0), host=dict.fromkeys(learned.host, 0.0))
    found = {}
    for name, traffic in LOADS.items():
        log = logged(true, traffic, 500, random)
        off = step_us(predicted, graphs, learned, log) / log.time_us
        untaught = step_us(predicted, graphs, bare, log) / log.time_us
        inside = np.abs(np.log(off)) <= interval_width(predicted, graphs, learned, log)
        errors = (100 * np.mean(np.abs(off - 1)), 100 * np.mean(off - 1), np.mean(inside))
        found[name] = Score(*map(float, errors), float(100 * np.mean(np.abs(untaught - 1))))
    return found


def main(model: str = "llama3_8b", seeds: str = "3") -> None:
    """Print the scores of every world."""
    head = ("world", "load", "untaught %", "learned %", "bias %", "in 90 %")
    print("{:<14} {:<28} {:>10} {:>10} {:>8} {:>8}".format(*head))
    every: dict[str, list[Score]] = {}
    with tempfile.TemporaryDirectory() as home:
        for name in WORLDS:
            for seed in range(1, int(seeds) + 1):
                pair = tables_of(make_world(name, seed), model, home, Extent(512, 8192, 8192))
                for load_name, score in scores(*pair).items():
                    every.setdefault(load_name, []).append(score)
                    print(
                        f"{name + ' ' + str(seed):<14} {load_name:<28} {score.untaught:>10.1f} {score.mean_ape:>10.2f} "
                        f"{score.bias:>+8.2f} {score.inside:>8.2f}"
                    )
    for load_name, of_worlds in every.items():
        errors = [score.mean_ape for score in of_worlds]
        inside = np.mean([score.inside for score in of_worlds])
        print(
            f"{'all':<14} {load_name:<28} median {np.median(errors):.2f}, worst {max(errors):.2f}, inside {inside:.2f}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
