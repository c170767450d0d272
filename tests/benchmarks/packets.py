"""Flows beside packets: the cases of the tests and larger ones, in ns-3.

    python tests/benchmarks/packets.py [--python INTERPRETER]

INTERPRETER is one that has the package ns3 (default: this one). Exit code 1 when a case is more than 8 % off.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path

from opcast.simulator.network import packet
from opcast.simulator.network.fabric import Fabric, Transfer
from opcast.simulator.network.faults import Fault, apply_faults
from opcast.simulator.network.shapes import Dimension, Port, Servers, fat_tree, product
from opcast.simulator.network.topology import Topology

MIB = 2**20
BOUND = 0.08
TESTS = Path(__file__).resolve().parents[1] / "simulator" / "network" / "test_packet.py"
Cases = dict[str, tuple[Topology, list[Transfer]]]


def tested() -> Cases:
    """The cases of the tests."""
    spec = importlib.util.spec_from_file_location("test_packet", TESTS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Cases = module.CASES
    return found


def larger() -> Cases:
    """Sixteen GPUs behind leaves with a quarter of the uplinks, rings round a dead cable, and small messages."""
    thin = fat_tree(Servers(16, 1, Port(450.0, 0.5, "nvlink"), Port(12.5, 0.5)), 10, 4.0)
    ring = apply_faults(product([Dimension("ring", 8, 12.5, 0.5)]), [Fault("gpu2-gpu3", gone=True)])
    everyone, eight = tuple(range(16)), tuple(range(8))
    found: Cases = {}
    for size in (4, 16):
        found[f"4:1, 16 GPUs, all-to-all of {size} MiB"] = (
            thin,
            [Transfer("all_to_all", everyone, size * MIB, "direct")],
        )
        found[f"4:1, 16 GPUs, ring of {size} MiB"] = thin, [Transfer("all_reduce", everyone, size * MIB, "ring")]
    for size in (8, 32, 96):
        found[f"dead cable, all-gather of {size} MiB"] = ring, [Transfer("all_gather", eight, size * MIB, "ring")]
        found[f"dead cable, all-reduce of {size} MiB"] = ring, [Transfer("all_reduce", eight, size * MIB, "ring")]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable)
    options = parser.parse_args()
    worst = 0.0
    print(f"{'case':38} {'flow us':>10} {'packet us':>10} {'off':>7} {'ns-3 s':>7}")
    for name, (topology, transfers) in (tested() | larger()).items():
        fabric = Fabric(topology, "shortest")
        flow = fabric.flow(transfers)[1]
        began = time.perf_counter()
        packets = packet.simulate(fabric, transfers, options.python)
        took = time.perf_counter() - began
        each = max(zip(flow, packets, strict=True), key=lambda pair: abs(pair[0] / pair[1] - 1.0))
        worst = max(worst, abs(each[0] / each[1] - 1.0))
        print(f"{name:38} {each[0]:10.1f} {each[1]:10.1f} {each[0] / each[1] - 1.0:+7.1%} {took:7.2f}")
    return int(worst > BOUND)


if __name__ == "__main__":
    sys.exit(main())
