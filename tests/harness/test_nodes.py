"""Nodes beside each other: the odd one is found and kept out, and not one among nodes that are alike."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from opcast.datasets.ops import make_op
from opcast.datasets.schema import Measurement
from opcast.datasets.store import Store
from opcast.harness.nodes import compare, oddities, outliers, set_aside
from opcast.jobs.cli import main


def store_of(path: Path, slow: float = 1.0, nodes: int = 6) -> Store:
    """Nodes that time three canaries and a case of their own; the last one is slower by a factor."""
    store, random = Store(path), np.random.default_rng(0)
    for i in range(nodes):
        factor = (slow if i == nodes - 1 else 1.0) * float(np.exp(0.004 * random.standard_normal()))
        for run, rows in ((f"canary001_{i}of{nodes}_full-1", (1, 2, 3)), ("full-1", (10 + i,))):
            made = []
            for row in rows:
                values = {"device_id": "h100_sxm", "backend": "torch", "node": f"node-{i}", "gpu": f"gpu-{i}"}
                op = make_op("gelu", rows=row, cols=64, dtype="bf16")
                at = datetime.now(UTC)
                made.append(
                    Measurement(
                        op=op, status="ok", run_id=run, measured_at=at, latency_us=row * 10.0 * factor, **values
                    )
                )
            store.write(made, run)
    return store


def test_a_slow_node_is_found_and_its_rows_are_kept_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = store_of(tmp_path, slow=1.06)
    found = compare(store)
    assert [each.node for each in found if each.outlier] == ["node-5"]
    assert found[0].ratio == pytest.approx(1.06, abs=0.01)
    assert main(["data", "nodes", f"store={tmp_path}", "format=json"]) == 1
    assert "node-5" in set_aside(store, found)[0]
    assert not set_aside(store, found)
    assert main(["data", "nodes", f"store={tmp_path}"]) == 0
    capsys.readouterr()
    assert "node-5" not in store.read("gelu", columns=["node"])["node"].to_pylist()
    assert "node-5" in store.read("gelu", columns=["node"], all_nodes=True)["node"].to_pylist()
    assert (make_op("gelu", rows=15, cols=64, dtype="bf16"), "torch", "warm") in store.done("h100_sxm", "full-1")
    assert [each.node for each in compare(store) if each.outlier] == ["node-5"]
    assert main(["data", "nodes", f"store={tmp_path}", "take_back=node-5", "format=json"]) == 1
    assert json.loads(capsys.readouterr().out)["aside"] == []
    assert "node-5" in store.read("gelu", columns=["node"])["node"].to_pylist()


def test_nodes_that_are_alike_and_pairs_have_no_outlier(tmp_path: Path) -> None:
    assert not [each for each in compare(store_of(tmp_path / "six")) if each.outlier]
    assert not [each for each in compare(store_of(tmp_path / "two", slow=1.5, nodes=2)) if each.outlier]
    for seed in range(50):
        ratios = 1 + 0.005 * np.random.default_rng(seed).standard_normal(8)
        assert not outliers({(f"node-{i}", None): float(ratio) for i, ratio in enumerate(ratios)})


def test_what_a_gpu_says_of_itself_is_named() -> None:
    usual = {"pcie_gen": 5.0, "pcie_gen_max": 5.0, "ecc_errors": 0.0, "clock_max_mhz": 1980.0}
    ill = {**usual, "pcie_gen": 3.0, "ecc_errors": 2.0, "clock_max_mhz": 1755.0}
    found = oddities({("a", None): usual, ("b", None): usual, ("c", None): ill})
    assert set(found) == {("c", None)}
    assert found["c", None] == (
        "2 uncorrected memory errors",
        "pcie gen 3 of 5",
        "clock_max_mhz 1755.0 where others have 1980.0",
    )
