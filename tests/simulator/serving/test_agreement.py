"""What ``serving`` says of an iteration is what ``simulate`` says of the same batch, for every shipped model."""

from __future__ import annotations

from pathlib import Path

import pytest

from opcast.datasets.clusters import load_cluster
from opcast.simulator.question.plan import load_stack
from opcast.simulator.question.requests import SimulateRequest
from opcast.simulator.question.sources import Sources
from opcast.simulator.question.work import Work
from opcast.simulator.serving.surrogate import HeldOut, Surrogate, stepper
from opcast.simulator.serving.tabulate import Extent, TablePoints, tabulated
from opcast.simulator.workbench import Workbench

MODELS = sorted(path.stem for path in (Path(__file__).parents[3] / "conf" / "model").glob("*.yaml"))
ENCODERS = ("bert_base", "bert_large")
EXTENT = Extent(sequences=64, tokens=512, context=8192)  # longer than any window
POINTS = TablePoints(rows=(16, 64), tokens=(64, 288, 576), samples=(16, 64), attending=(16, 64), contexts=(256, 512))
BATCHES = (
    Work("batch", decodes=((64, 511),)),
    Work("batch", decodes=((16, 255),)),
    Work("batch", decodes=((32, 511),), prompts=((256, 127),)),
)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    home = str(tmp_path_factory.mktemp("home"))
    return Workbench(Sources.at(home, order=("network", "analytical"), calibration="none"))


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ENCODERS])
def test_an_iteration_takes_as_long_in_serving_as_simulated(name: str, bench: Workbench) -> None:
    request = SimulateRequest(
        model=name, cluster=load_cluster("dgx_h100"), device="h100_sxm", stack=load_stack("vllm"), sources=bench.sources
    )
    simulate, engine = stepper(request, bench)
    own = Surrogate(tabulated(simulate, engine, EXTENT, POINTS), HeldOut(0, 0, 0, 0, 0))
    for work in BATCHES:
        print(name, work.decodes, work.prompts, own.iteration_us(work) / simulate(work).total_us - 1)
