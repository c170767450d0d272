"""``opcast validate`` of every published table ends; what can fail by construction fails before the simulation."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from opcast.datasets.truth import Row, ServingRow, TruthError, read_table
from opcast.datasets.truth.rows import Hardware
from opcast.jobs.cli import main
from opcast.simulator.validation import ValidationSettings
from opcast.simulator.validation.run import as_measured, noise_floor, summary, validate

LEAST = 30  # tables
OPS = """row_id,op,precision,gpu_canon,M,N,K,latency_ms
a,matmul,FP16,A100-80,4096,12288,12288,4.4576
b,matmul,FP16,A100-80,2048,12288,12288,2.3586
c,matmul,FP16,A100-80,2048,12288,12288,2.3500
"""


def tables(folder: Path) -> list[Path]:
    """The files of a folder that are tables of results."""
    found = []
    for path in sorted(folder.glob("*.csv")):
        try:
            read_table(path, 1)
        except TruthError:
            continue
        found.append(path)
    return found


@pytest.mark.reference
@pytest.mark.slow
def test_what_is_made_of_answers_can_be_made_of_every_table(reference_data: Path) -> None:
    """Groups, the noise floor and JSON of all rows, with what was measured in place of what would be predicted."""
    paths = tables(reference_data / "truth")
    assert len(paths) >= LEAST
    for path in paths:
        table = read_table(path)
        assert not table.failed, path
        found = summary(table, as_measured(table.rows), None, details=True)
        json.dumps(found.to_dict())
        for name, errors in found.metrics.items():
            assert errors["accuracy"] == 100 if name == "fits" else errors["max_ape"] == 0, (path, name)


@pytest.mark.reference
@pytest.mark.slow
def test_every_table_is_run_to_its_end(
    reference_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """The last line of each, by the command, and with --every-model the first; of served runs the smallest of replicas
    that do both, and of pools."""
    both = request.config.getoption("--every-model")
    for path in tables(reference_data / "truth"):
        code = main(["validate", f"truth={sample(path, tmp_path, both)}", "format=json", "details=true"])
        found = json.loads(capsys.readouterr().out)
        assert found["failed"] == [], path
        assert code == (0 if found["simulated"] else 2), path
        assert found["rows"] == found["simulated"] + len(found["unsupported"])


def sample(path: Path, folder: Path, both: bool) -> Path:
    """A copy of a table with its last line, or ``both`` ends, beside what it is read with."""
    for beside in ("model_dims.csv", "serving_silicon_peer_predictions.csv"):
        shutil.copyfile(path.with_name(beside), folder / beside)
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        lines = list(reader)
    rows = read_table(path).rows
    served = smallest(rows)
    kept = [line for line in lines if line.get("id") in served] if served else [*lines[: int(both)], lines[-1]]
    with (folder / path.name).open("w", newline="") as file:
        writer = csv.DictWriter(file, reader.fieldnames or ())
        writer.writeheader()
        writer.writerows(kept)
    return folder / path.name


def smallest(rows: Sequence[Row]) -> set[str]:
    """The served runs with the fewest clients, of one pool and of two."""
    served = [row for row in rows if isinstance(row, ServingRow)]
    kinds = [[row for row in served if (row.decoding is None) is alone] for alone in (True, False)]
    return {min(kind, key=lambda row: (row.hardware.devices, row.concurrency)).id for kind in kinds if kind}


def test_machines_with_figures_of_their_own_are_told_apart() -> None:
    one, other = (Hardware("H100", "h100_sxm", "dgx_h100", 8, cluster_figures={"nic_gbps": g}) for g in (25, 50))
    assert one != other
    assert len({one, other, replace(one)}) == 2


def test_what_fails_by_construction_fails_before_the_simulation(tmp_path: Path) -> None:
    path = tmp_path / "ops.csv"
    path.write_text(OPS)
    table = read_table(path)
    asked: list[str] = []

    def engine(device: object, cluster: object) -> object:
        asked.append(str(device))
        raise AssertionError

    assert noise_floor(table.rows)["latency"]["groups"] == 1
    odd = tuple(replace(row, clock_mhz=[1.0]) for row in table.rows)
    with pytest.raises(TypeError, match="unhashable"):
        validate(replace(table, rows=odd), ValidationSettings(engine, tmp_path))
    assert not asked
    assert validate(table, ValidationSettings(engine, tmp_path)).failed
    assert asked
