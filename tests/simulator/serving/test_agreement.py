"""What ``serving`` says of an iteration is what ``simulate`` says of the same batch, for every shipped model."""

from __future__ import annotations

from pathlib import Path

import pytest

from opcast.datasets.clusters import load_cluster
from opcast.simulator.question.plan import load_stack
from opcast.simulator.question.requests import SimulateRequest
from opcast.simulator.question.sources import Sources
from opcast.simulator.question.work import Work
from opcast.simulator.serving.context import context_of
from opcast.simulator.serving.surrogate import HeldOut, Surrogate, stepper
from opcast.simulator.serving.tabulate import Extent, TablePoints, tabulated
from opcast.simulator.trace.models import resolve
from opcast.simulator.workbench import Workbench

MODELS = sorted(path.stem for path in (Path(__file__).parents[3] / "conf" / "model").glob("*.yaml"))
ENCODERS = ("bert_base", "bert_large")
WINDOWED = ("gemma2_2b", "gemma3_1b")  # soft caps, windows shorter than the context and of another width
CONTEXT = 1023  # of sequences that decode: longer than small caches, and than the narrowest windows
POINTS = TablePoints(rows=(16,), tokens=(64,), samples=(16,), attending=(16,), contexts=(128, CONTEXT), prompts=(256,))
BATCHES = (
    Work("batch", decodes=((64, CONTEXT),)),
    Work("batch", decodes=((16, CONTEXT),)),
    Work("batch", decodes=((64, CONTEXT),), prompts=((256, 0),)),
)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    home = str(tmp_path_factory.mktemp("home"))
    return Workbench(Sources.at(home, order=("network", "analytical"), calibration="none"))


def cases() -> list[object]:
    marks = {name: pytest.mark.essential for name in WINDOWED}
    return [pytest.param(name, marks=marks.get(name, ())) for name in MODELS if name not in ENCODERS]


@pytest.mark.parametrize("name", cases())
def test_an_iteration_takes_as_long_in_serving_as_simulated(name: str, bench: Workbench) -> None:
    """By physics alone, whose times grow with every size; the tables' axes have the sizes of the batches."""
    request = SimulateRequest(
        model=name, cluster=load_cluster("dgx_h100"), device="h100_sxm", stack=load_stack("vllm"), sources=bench.sources
    )
    simulate, engine = stepper(request, bench)
    extent = Extent(sequences=64, tokens=256, context=min(8192, context_of(resolve(name).config or {})))
    own = Surrogate(tabulated(simulate, engine, extent, POINTS), HeldOut(0, 0, 0, 0, 0))
    for work in BATCHES:
        off = own.iteration_us(work) / simulate(work).total_us - 1
        print(f"OFF {name} {100 * off:.2f}", work.prompts)
        if abs(off) > 0.01: print("BAD", name)
