"""What ``serving`` says of an iteration is what ``simulate`` says of the same batch, for every architecture."""

from __future__ import annotations

import pytest

from opcast.datasets.clusters import load_cluster
from opcast.simulator.question.plan import load_stack
from opcast.simulator.question.requests import SimulateRequest
from opcast.simulator.question.sources import Sources
from opcast.simulator.question.work import Work
from opcast.simulator.serving.steps import steps_of
from opcast.simulator.serving.surrogate import Surrogate
from opcast.simulator.serving.tabulate import Extent, TablePoints, tabulate
from opcast.simulator.trace.context import context_of
from opcast.simulator.trace.models import resolve
from opcast.simulator.workbench import Workbench

from ..architectures import ENCODERS, architectures

IN_CACHE = {"gemma3_1b": 0.05}  # windows of 64 sequences stay in the last-level cache, and less of them beside a prompt
CONTEXT = 4095  # of 64 sequences, which no last-level cache holds
POINTS = TablePoints(rows=(16,), tokens=(64,), samples=(16,), attending=(16,), contexts=(128,), prompts=(256,))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    home = str(tmp_path_factory.mktemp("home"))
    return Workbench(Sources.at(home, order=("network", "analytical"), calibration="none"))


@pytest.mark.parametrize("name", architectures((*ENCODERS, "neusight_switch_xl_4")))
def test_an_iteration_takes_as_long_in_serving_as_simulated(name: str, bench: Workbench) -> None:
    """By physics alone, whose times grow with every size; the tables' axes have the sizes of the batches."""
    request = SimulateRequest(
        model=name, cluster=load_cluster("dgx_h100"), device="h100_sxm", stack=load_stack("vllm"), sources=bench.sources
    )
    steps = steps_of(request, bench)
    context = min(CONTEXT, context_of(resolve(name).config or {}) - 1)
    own = Surrogate(tabulate(steps.simulate_all, steps.kernels, Extent(64, 256, context + 1), POINTS))
    for decodes, prompts in (((64, context), ()), ((16, context), ()), ((64, context), ((256, 0),))):
        work = Work("batch", decodes=(decodes,), prompts=prompts)
        off = own.iteration_us(work) / steps.simulate(work).total_us - 1
        assert abs(off) < (IN_CACHE.get(name, 0.01) if prompts else 0.01), work
