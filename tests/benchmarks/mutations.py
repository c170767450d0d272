"""Which wrong constants and signs the fast tests see: thirty laws, each changed in a copy of the tree, one at a time.

Runs the nearest tests of each (``-m "not slow" -x``) and prints ``caught`` where one fails, ``survived`` where all
pass; the exit code is 1 when more than three survive. First the tests run on the copy as it is, and must pass.

    python tests/benchmarks/mutations.py [--only WORD …] [--no-baseline]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
MOST_SURVIVORS = 3
PATIENCE_S = 1200.0


class Mutation(NamedTuple):
    """``old`` stands once in ``file`` and becomes ``new``; ``tests`` are the nearest, from ``tests/``, by blanks."""

    name: str
    file: str
    old: str
    new: str
    tests: str


NETWORK, SERVING = (
    "simulator/network/test_nccl_times.py",
    "simulator/serving/test_serve.py simulator/serving/test_vllm.py",
)
MUTATIONS = (
    Mutation(
        "tree crossings of two nodes",
        "simulator/network/nccl_times.py",
        "np.where(g.nodes == 2, 1.0, 2.0)  # of two",
        "np.where(g.nodes == 2, 2.0, 2.0)  # of two",
        NETWORK,
    ),
    Mutation(
        "norm of waits and moves",
        "simulator/network/nccl_times.py",
        "** (1.0 / power)",
        "** power",
        NETWORK,
    ),
    Mutation(
        "bus factor of all_reduce",
        "datasets/collective_ops.py",
        "return 2 * share",
        "return 1 * share",
        f"{NETWORK} datasets/test_ops.py",
    ),
    Mutation(
        "ring factor inside a node",
        "simulator/timing/rings.py",
        "np.where(inside, factor, 1.0)",
        "np.where(inside, 1.0, factor)",
        "simulator/timing/test_costs.py",
    ),
    Mutation(
        "ZeRO's share of the moments",
        "simulator/passes/zero/update.py",
        "(shares * itemsize(moment))",
        "(self.counts * itemsize(moment))",
        "simulator/passes/test_data.py",
    ),
    Mutation(
        "numerator of HFU",
        "simulator/report/account.py",
        '"hfu": hardware /',
        '"hfu": model /',
        "simulator/report/test_breakdown.py simulator/step/test_training.py simulator/step/test_simulate.py",
    ),
    Mutation(
        "Simpson's weights of a generation",
        "simulator/step/build.py",
        "{first: 1 / 6, (first + last) // 2: 4 / 6, last: 1 / 6}",
        "{first: 1 / 4, (first + last) // 2: 2 / 4, last: 1 / 4}",
        "simulator/step/test_parts.py simulator/step/test_inference.py",
    ),
    Mutation(
        "watts of a waiting device",
        "simulator/report/energy.py",
        "least_w(device) * step_s",
        "device.tdp_w * step_s",
        "simulator/report/test_energy.py",
    ),
    Mutation(
        "price of an hour",
        "simulator/report/energy.py",
        "seconds / 3600.0",
        "seconds / 60.0",
        "simulator/report/test_energy.py simulator/step/test_simulate.py",
    ),
    Mutation(
        "sign of P(out of memory)",
        "simulator/report/trust.py",
        "1.0 - probability_within(",
        "probability_within(",
        "simulator/report/test_trust.py simulator/step/test_training.py",
    ),
    Mutation(
        "Student's t in closed form",
        "simulator/memory/errors.py",
        "(1.0 - x / 12.0)",
        "(1.0 + x / 12.0)",
        "simulator/memory/test_errors.py",
    ),
    Mutation(
        "host's time of a prompt's token",
        "simulator/serving/host.py",
        "self.prompt_us * first.prompt",
        "self.prompt_us * first.clients",
        "simulator/serving/test_host.py",
    ),
    Mutation(
        "exponent of clocks",
        "models/clocks.py",
        "room ** (1.0 / measured.alpha)",
        "room**measured.alpha",
        "models/test_clocks.py simulator/timing/test_clocks.py",
    ),
    Mutation(
        "GiB for GB",
        "simulator/memory/breakdown.py",
        "GIB = 2**30",
        "GIB = 10**9",
        "simulator/memory/test_stage.py simulator/passes/test_caches.py",
    ),
    Mutation(
        "GB in a GiB of published memory",
        "datasets/truth/training.py",
        "GB_IN_GIB = 1e9 / 2**30",
        "GB_IN_GIB = 2**30 / 1e9",
        "datasets/truth",
    ),
    Mutation(
        "sign of a kin's voice",
        "models/kinship.py",
        "math.exp(-units_apart",
        "math.exp(units_apart",
        "models/test_kinship.py",
    ),
    Mutation(
        "bubble of a pipeline",
        "simulator/timing/schedule/pipeline.py",
        "self.makespan_us - self.busy_us - self.sending_us",
        "self.makespan_us - self.busy_us + self.sending_us",
        "simulator/timing/schedule/test_pipeline.py",
    ),
    Mutation(
        "vLLM admits nobody beside a preemption",
        "simulator/serving/policies/vllm.py",
        "if gone == 0:",
        "if True:",
        SERVING,
    ),
    Mutation(
        "a prefix hit leaves the last token",
        "simulator/serving/blocks.py",
        "(state.slots[slot].input + state.slots[slot].made - 1)",
        "(state.slots[slot].input + state.slots[slot].made)",
        SERVING,
    ),
    Mutation(
        "bytes of keys and values",
        "simulator/passes/kept.py",
        "op.heads_kv * (op.head_dim + op.v_head_dim)",
        "op.heads_kv * (op.head_dim)",
        "simulator/passes/test_caches.py simulator/passes/test_serving.py",
    ),
    Mutation(
        "the larger of the roofline's two",
        "models/analytical/__init__.py",
        "np.maximum(cost.flops / (peak * 1e6), memory)",
        "np.minimum(cost.flops / (peak * 1e6), memory)",
        "models/test_analytical.py",
    ),
    Mutation(
        "own bytes in a reuse distance",
        "simulator/timing/residency.py",
        "+ sizes / 2",
        "- sizes / 2",
        "simulator/timing/test_residency.py",
    ),
    Mutation(
        "verdict of a rate in a search for capacity",
        "simulator/serving/capacity.py",
        "low, high = (middle, high) if enough(middle) else (low, middle)",
        "low, high = (low, middle) if enough(middle) else (middle, high)",
        "simulator/serving/test_outputs.py",
    ),
    Mutation(
        "goodput's share",
        "simulator/serving/report.py",
        'goodput=attained * totals["arrived"] / seconds',
        'goodput=totals["arrived"] / seconds',
        "simulator/serving/test_outputs.py simulator/serving/test_serve.py",
    ),
    Mutation(
        "TPOT counts tokens after the first",
        "simulator/serving/tally.py",
        "np.divide(decode, outputs - 1,",
        "np.divide(decode, outputs,",
        "simulator/serving/test_outputs.py simulator/serving/test_serve.py",
    ),
    Mutation(
        "quantile of few residuals",
        "models/intervals.py",
        "(len(scores) + 1) * coverage",
        "(len(scores) - 1) * coverage",
        "models/test_intervals.py",
    ),
    Mutation(
        "bytes that AdamW reads",
        "datasets/ops.py",
        "d.numel * (2.0 * d.itemsize + 2.0 * d.out_itemsize)",
        "d.numel * (1.0 * d.itemsize + 2.0 * d.out_itemsize)",
        "datasets/test_ops.py",
    ),
    Mutation(
        "the busiest rank of experts",
        "simulator/passes/expert.py",
        "(top + (local - 1) * others) / local",
        "(top + local * others) / local",
        "simulator/passes/test_expert.py",
    ),
    Mutation(
        "halves of a zigzag ring",
        "simulator/passes/sharding/attention.py",
        "earlier, later = QueryPart(tokens, half, False), QueryPart(half, tokens, False)",
        "earlier, later = QueryPart(tokens, tokens, False), QueryPart(half, tokens, False)",
        "simulator/passes/test_context.py",
    ),
    Mutation(
        "what a search may leave out",
        "simulator/search/rank.py",
        "(row <= lower).all(axis=1) & (row[0] < lower[:, 0])",
        "(row <= lower).any(axis=1) & (row[0] < lower[:, 0])",
        "simulator/search/test_search.py",
    ),
)


def copy_of_tree(folder: Path) -> Path:
    """The tracked files in ``folder/opcast``, which Python imports as the package."""
    tree = folder / "opcast"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    return tree


def passes(tree: Path, paths: list[str]) -> bool:
    """Whether the fast tests of some paths pass on a copy. RuntimeError where pytest could not run them."""
    reference = os.environ.get("OPCAST_REFERENCE") or str(ROOT.parent / "shared")
    own = {"PYTHONPATH": str(tree.parent), "OPCAST_REFERENCE": reference, "OMP_NUM_THREADS": "1"}
    own["PYTHONDONTWRITEBYTECODE"] = ""  # compiled once for all mutations
    options = ["-m", "not slow", "-x", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command = [sys.executable, "-P", "-m", "pytest", *options, *(f"tests/{each}" for each in paths)]
    done = subprocess.run(
        command, cwd=tree, env={**os.environ, **own}, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout[-500:]}{done.stderr[-500:]}")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if failed:
        print(f"    {failed[0][:150]}", flush=True)
    return done.returncode == 0


def survives(tree: Path, mutation: Mutation) -> bool:
    """Whether the nearest tests pass with the law changed."""
    path = tree / mutation.file
    text = path.read_text()
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        return passes(tree, mutation.tests.split())
    finally:
        path.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="mutations whose name has one of these words")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests unchanged first")
    asked = parser.parse_args()
    chosen = [each for each in MUTATIONS if any(word in each.name for word in asked.only)]
    for each in chosen:
        if (count := (ROOT / each.file).read_text().count(each.old)) != 1:
            print(f"{each.file} has {count} times {each.old!r}, which {each.name!r} changes", file=sys.stderr)
            return 2
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_of_tree(Path(folder))
        if not asked.no_baseline and not passes(tree, sorted({p for each in chosen for p in each.tests.split()})):
            print("the tests fail without a mutation")
            return 2
        survivors = []
        for mutation in chosen:
            began = time.monotonic()
            alive = survives(tree, mutation)
            survivors += [mutation.name] * alive
            print(
                f"{'survived' if alive else 'caught':8} {time.monotonic() - began:4.0f} s  {mutation.name}", flush=True
            )
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} caught; survived: {', '.join(survivors) or 'none'}")
    return int(len(survivors) > MOST_SURVIVORS)


if __name__ == "__main__":
    sys.exit(main())
