"""How much slower the layout that opcast picks is than the best one that was measured, by published table.

    python tests/benchmarks/regret.py [--groups 8] [--calibration none] [--each] [TABLE.csv ...]

Rows of a table that differ in nothing but their layout (one model, GPU, number of GPUs, precision, batch and sequence)
are a group. Every row of a group is simulated; the one with the least predicted step is the pick, and its regret is how
many percent its measured step is above the least measured one. A pick at random is beside it, and so is the best of
those that opcast does not tell from its pick (``within the noise floor``, and by intervals that overlap), which is what
whoever measures these finds. With the calibration that ships
opcast has seen runs of these tables; with ``none`` it has not.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from opcast.simulator.question.requests import ValidateRequest
from opcast.simulator.question.sources import Sources
from opcast.simulator.workbench import Workbench

REFERENCE = Path(os.environ.get("OPCAST_REFERENCE", Path(__file__).resolve().parents[3] / "shared"))
TABLES = ("train_vtrain_a100", "train_nanotron_h100", "train_simumax_b200", "train_megatron_bridge")
ALIKE = ("model_canon", "gpu_canon", "num_gpus", "precision", "gbs_seqs", "seq_len_tokens", "container", "task")
LAYOUT = ("tp", "pp", "vp", "dp", "cp", "ep", "mbs_seqs", "zero_stage", "sp", "recompute")
DIMENSIONS = "model_dims.csv"
WITHIN = 3.0  # percent of regret that counts as the best
NOISE = 0.03  # of a step: two closer than this are a tie


def groups(rows: Sequence[Mapping[str, str]]) -> list[list[Mapping[str, str]]]:
    """Rows that differ in their layout alone, largest groups first."""
    found: dict[tuple[str, ...], list[Mapping[str, str]]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(name, "") for name in ALIKE), []).append(row)
    return sorted((group for group in found.values() if len(group) > 1), key=len, reverse=True)


def steps(
    rows: Sequence[Mapping[str, str]], bench: Workbench, beside: Path
) -> dict[str, tuple[float, float, float, float]]:
    """Predicted and measured step time of every row that is simulated and the interval, by its id; figures of models
    lie ``beside``."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.csv"
        if (beside / DIMENSIONS).is_file():
            shutil.copy(beside / DIMENSIONS, folder)
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        found = bench.validate(ValidateRequest(str(path), details=True))
    made = {}
    for row in found.per_row or ():
        step = row["quantities"].get("step_time", {})
        if "predicted" in step and "measured" in step:
            bounds = step.get("low", step["predicted"]), step.get("high", step["predicted"])
            made[str(row["id"])] = (step["predicted"], step["measured"], *bounds)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("tables", nargs="*", type=Path)
    parser.add_argument("--groups", type=int, default=8, help="of each table, the largest")
    parser.add_argument("--largest", type=int, default=12, help="rows of a group that are simulated")
    parser.add_argument("--calibration", default="none")
    parser.add_argument("--each", action="store_true", help="say of each group what was picked and what was best")
    options = parser.parse_args()
    bench = Workbench(Sources(calibration=options.calibration))
    for path in options.tables or [REFERENCE / "truth" / f"{name}.csv" for name in TABLES]:
        with path.open() as file:
            chosen = [group[: options.largest] for group in groups(list(csv.DictReader(file)))[: options.groups]]
        if not chosen:
            print(f"{path.stem}: no two rows differ in their layout alone", flush=True)
            continue
        known = steps([row for group in chosen for row in group], bench, path.parent)
        regrets, at_random, noise, overlap = [], [], [], []
        for group in chosen:
            rows = [row for row in group if row["row_id"] in known]
            pairs = [known[row["row_id"]] for row in rows]
            if len(pairs) > 1:
                if options.each:
                    print(compared(rows, pairs), flush=True)
                least, pick = min(each[1] for each in pairs), min(pairs)
                regrets.append((pick[1] / least - 1) * 100)
                at_random.append((statistics.mean(each[1] for each in pairs) / least - 1) * 100)
                near = [each[1] for each in pairs if each[0] <= pick[0] * (1 + NOISE)]
                noise.append((min(near) / least - 1) * 100)
                near = [each[1] for each in pairs if each[2] <= pick[3]]
                overlap.append((min(near) / least - 1) * 100)
        if not regrets:
            print(f"{path.stem}: no group of which two rows can be simulated", flush=True)
        else:
            good = sum(each <= WITHIN for each in regrets)
            said = [
                f"{path.stem}: {len(regrets)} groups, regret {middle(regrets)}, most {max(regrets):.1f} %",
                f"within {WITHIN:g} %: {good}",
                f"a pick at random: {middle(at_random)}",
                f"best of those within the noise floor of the pick: {middle(noise)}",
                f"of those whose intervals overlap: {middle(overlap)}",
            ]
            print("; ".join(said), flush=True)


def compared(rows: Sequence[Mapping[str, str]], pairs: Sequence[tuple[float, ...]]) -> str:
    """What was picked of a group, and what was measured as best, each with its predicted and measured seconds."""
    places = range(len(pairs))
    pick, best = min(places, key=lambda at: pairs[at]), min(places, key=lambda at: pairs[at][1])

    def said(at: int) -> str:
        own = " ".join(f"{name}={rows[at][name]}" for name in LAYOUT if rows[at].get(name) not in (None, "", "1"))
        return f"{own} ({rows[at]['row_id']}): {pairs[at][0]:.3f} s predicted, {pairs[at][1]:.3f} s measured"

    head = " ".join(rows[0].get(name, "") for name in ALIKE[:6])
    regret = (pairs[pick][1] / pairs[best][1] - 1) * 100
    return f"  {head}, {len(pairs)} rows, regret {regret:.1f} %\n    pick {said(pick)}\n    best {said(best)}"


def middle(values: Sequence[float]) -> str:
    """Median and mean in percent."""
    return f"median {statistics.median(values):.1f} %, mean {statistics.mean(values):.1f} %"


if __name__ == "__main__":
    main()
