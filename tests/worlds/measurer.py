"""A campaign's measurer in a world: the real plan, builders, ledger and store; only the clock is the world's.

A case is built by the harness's own builder on tensors without memory (:mod:`.emulation`). What it refuses is a row of
status ``unsupported``, what does not fit is ``oom``, as on a machine. What it launches takes what the laws say, with
noise. Calls that last as long as the power limiter takes are had at the clock that it leaves.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from opcast.datasets.kernels import lacking
from opcast.datasets.launches import Caller
from opcast.datasets.ops import KINDS, LINKS
from opcast.datasets.version import __version__
from opcast.harness.cases import Unsupported
from opcast.harness.collectives import RankGroup
from opcast.harness.coverage import ways
from opcast.harness.measuring import _status, first_line
from opcast.harness.plan import Case, Settings
from opcast.harness.rank_map import RankMap
from opcast.harness.timer import Collected, summarise
from opcast.tests.worlds.chip import World
from opcast.tests.worlds.emulation import Emulator
from opcast.tests.worlds.kernels import kernel_behind
from opcast.tests.worlds.laws import Launch, clock_kept, held_back, latency_us

ENGINE = Caller("vllm", "vllm")  # which runs collectives in every way that there is

SAMPLES = 40
SETTLES_US = 30_000.0  # of one call, in which the limiter takes hold: shorter ones are had between rests
FALL = 0.03  # of the clock, that the harness takes for the limiter (harness/cuda_timer.py)


@dataclass
class WorldMeasurer:
    """What :func:`opcast.harness.campaign.run` asks: rank 0 of so many nodes of a world."""

    world: World
    emulator: Emulator
    settings: Settings
    nodes: int = 1
    restarts: int = 0

    def interrupt(self) -> None:
        """Nobody interrupts a test."""

    def start(self) -> dict[str, Any]:
        """Provenance columns of the machine that is not there."""
        known = {
            "driver": "590.1",
            "cuda": "13.0",
            "torch": "2.14.0",
            "nccl": "2.30.1",
            "node": f"{self.world.name}-node",
        }
        cluster = self.world.cluster
        return {
            **known,
            "device_id": self.world.device.id,
            "device_name": self.world.device.name,
            "opcast_version": __version__,
            "source": "harness",
            "power_limit_w": self.world.device.tdp_w,
            "link": cluster.link if self.nodes == 1 else cluster.fabric,
            "ranks_per_node": cluster.devices_per_node,
            "rank_map": self._rank_map().to_dict(),
            "format": "bf16",
        }

    def _rank_map(self) -> RankMap:
        """Ranks in order of their nodes, those of each joined by its links."""
        nodes = tuple(node for node in range(self.nodes) for _ in range(self.world.cluster.devices_per_node))
        return RankMap(nodes, nodes, self.world.cluster.link, self.world.cluster.fabric)

    def probe(self) -> dict[str, Any]:
        """The sheet: what is said of the device, not what is true."""
        return asdict(self.world.device)

    def ask(self, case: Case, lost: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """The columns of one case."""
        try:
            kernel, launches = self._built(case)
        except Exception as error:
            return {"status": _status(error), "error": first_line(error)}
        true_us = latency_us(
            self.world, case.op, kernel_behind(self.world, case.op, case.backend, kernel), case.cache, launches
        )
        clock, _ = clock_kept(self.world, case.op, true_us)
        steady = true_us >= SETTLES_US and clock < 1.0 - FALL
        if steady:
            true_us *= held_back(self.world, case.op, true_us)
        seed = zlib.crc32(f"{self.world.name} {self.world.seed} {case}".encode())
        values = true_us * np.exp(self.world.chip.noise * np.random.default_rng(seed).standard_normal(SAMPLES))
        timer = "cuda_event" if KINDS[case.op.kind].collective else "cuda_graph"
        timing = summarise(Collected(values, True, False, 0), 10, timer, case.cache)
        columns = {name: value for name, value in timing.columns().items() if name != "cache"}
        mhz = self.world.device.clock_mhz * (clock if steady else 1.0)
        told = {"clocks": "steady" if steady else "burst", "sm_clock_mhz": mhz}
        return {"status": "ok", **columns, "kernel": kernel, **told}

    def _built(self, case: Case) -> tuple[str | None, tuple[Launch, ...]]:
        if KINDS[case.op.kind].collective:
            self._refuse(case)
            return None, ()
        return self.emulator.run(case.op, case.backend)

    def _refuse(self, case: Case) -> None:
        """Unsupported where the harness's ranks, or a package on this machine, refuse a collective."""
        RankGroup._way(SimpleNamespace(settings=self.settings), case)  # type: ignore[arg-type]
        refusals = {way.backend: way.refusal for way in ways(case.op, self.world.device, ENGINE)}
        inside = LINKS[case.op.link] != "pcie"
        if why := refusals.get(case.backend) or lacking(case.op, case.backend, self.world.device):
            raise Unsupported(why)
        if not inside and case.backend.startswith(("deep_ep", "vllm:", "flashinfer:")):
            raise Unsupported(f"{case.backend} needs NVLink")

    def close(self) -> None:
        """Nothing to end."""
