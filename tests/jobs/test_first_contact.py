"""`opcast quickstart` from end to end on machines that are not there: GPUs from P4 to GB300, slices, and what is ill.

Everything runs in this process on small shapes: the campaign's worker and the process of real steps are called instead
of started. What is checked is that each device gets its answer, under its own name, in a format that it has.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opcast.datasets.devices import load_device
from opcast.datasets.store import Store
from opcast.harness import accelerator, campaign
from opcast.harness.measuring import abilities, measured_figures, outcome
from opcast.harness.plan import Case, Settings, build_plan
from opcast.jobs import profile, quickstart, real_run
from opcast.jobs.cli import main
from opcast.jobs.composing import compose
from opcast.jobs.show import BadInputError
from opcast.tests.harness import fake_cuda as fake_cuda_module
from opcast.tests.harness.fake_cuda import FakeGpu, FakeMachine, fake_cuda, to_json

SMALL = [
    "model.config.hidden_size=64",
    "model.config.intermediate_size=96",
    "model.config.num_attention_heads=2",
    "model.config.num_key_value_heads=1",
    "model.config.num_hidden_layers=1",
    "model.config.vocab_size=128",
    "cores=all",
    "rounds=1",
    "train.seq_len=8",
    "prefill.seq_len=8",
    "decode.seq_len=8",
    "repeats={train: 1, prefill: 1, decode: 1}",
    "operator_repeats=1",
    "tracking=null",
    "format=json",
]
CAMPAIGN = {
    "name": "first",
    "settings": {"device": "auto", "case_budget_s": 0.001, "canary_every": 0},
    "dtype": {"cpu": "fp32", "cuda": "bf16"},
    "cases": [
        {"kind": "gemm", "m": [8, 16, 24], "n": [64, 96], "k": [32, 48], "cache": ["warm"]},
        {"kind": "elementwise", "numel": [64, 256], "inputs": 1, "dtype": {"cpu": "fp32", "cuda": ["bf16", "fp32"]}},
    ],
}


class InProcess:
    """A campaign's worker in this process."""

    restarts = 0

    def __init__(self, settings: Settings, ranks: int = 1) -> None:
        self.settings = settings

    def start(self) -> dict[str, Any]:
        return abilities(self.settings, None)

    def probe(self) -> dict[str, Any]:
        return measured_figures(self.settings.device)

    def ask(self, case: Case, lost: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        return outcome(case, self.settings)

    def interrupt(self) -> None: ...

    def close(self) -> None: ...


class RealStepsHere(real_run.RealRunner):
    """Real steps in this process."""

    def __enter__(self) -> RealStepsHere:
        self.runs: dict[str, real_run.RealRun] = {}
        self.load(self.model, self.workloads)
        return self

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        return self._checked(real_run.answer(json.loads(json.dumps(request)), self.runs))


@pytest.fixture(autouse=True)
def in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "Supervisor", InProcess)
    monkeypatch.setattr(quickstart, "RealRunner", RealStepsHere)
    monkeypatch.setattr(accelerator, "ask", accelerator.look)


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces, which all devices of a format share."""
    return tmp_path_factory.mktemp("graphs")


def run(home: Path, graphs: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[dict[str, Any], str]:
    """The answer of a quickstart and what it said."""
    config = compose("quickstart", [f"home={home}", f"graphs={graphs}", *SMALL, *more])
    assert quickstart.run({**config, "campaign": CAMPAIGN}) == 0
    said = capsys.readouterr()
    return json.loads(said.out), said.err


def gpu(name: str, sm: float, units: int, memory_gib: float, l2_mib: float, **more: Any) -> FakeGpu:
    major, minor = divmod(round(sm * 10), 10)
    kind = {"bf16": major >= 8, **more}
    return FakeGpu(name, (major, minor), units, memory_gib, l2_mib, **kind)


MATRIX = {
    "p4": (gpu("Tesla P4", 6.1, 20, 7.4, 2), "fp32"),
    "p100_pcie": (gpu("Tesla P100-PCIE-16GB", 6.0, 56, 15.9, 4), "fp16"),
    "v100_sxm": (gpu("Tesla V100-SXM2-32GB", 7.0, 80, 31.7, 6), "fp16"),
    "t4": (gpu("Tesla T4", 7.5, 40, 14.6, 4), "fp16"),
    "a100_sxm_80gb": (gpu("NVIDIA A100-SXM4-80GB", 8.0, 108, 79.2, 40), "bf16"),
    "a10g": (gpu("NVIDIA A10G", 8.6, 80, 22.1, 6), "bf16"),
    "rtx_4090": (gpu("NVIDIA GeForce RTX 4090", 8.9, 128, 23.5, 72), "bf16"),
    "l4": (gpu("NVIDIA L4", 8.9, 58, 22.0, 48), "bf16"),
    "h100_sxm": (gpu("NVIDIA H100 80GB HBM3", 9.0, 132, 79.1, 50), "bf16"),
    "b200_sxm": (gpu("NVIDIA B200", 10.0, 148, 178.4, 126), "bf16"),
    "gb300": (gpu("NVIDIA GB300", 10.3, 152, 276.5, 126), "bf16"),
    "rtx_5090": (gpu("NVIDIA GeForce RTX 5090", 12.0, 170, 31.4, 96), "bf16"),
    "mi300x": (gpu("AMD Instinct MI300X", 9.4, 304, 191.98, 4, hip=True), "bf16"),
}  # fmt: skip


@pytest.mark.parametrize("device_id", MATRIX)
def test_a_known_gpu_is_measured_under_its_name_in_a_format_it_has(
    device_id: str, tmp_path: Path, graphs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device, precision = MATRIX[device_id]
    with fake_cuda(device):
        found, said = run(tmp_path, graphs, capsys)
    assert found["device"] == device_id
    assert set(found["errors"]) == {"train", "prefill", "decode"}
    assert found["campaign"]["ok"] == found["campaign"]["cases"] > 10
    assert f"on {device.name} ({device_id}) in {precision}: measuring takes up to" in said
    store = Store(tmp_path / "store")
    assert store.device(device_id) is None
    assert set(store.read("gemm", device_id)["dtype"].to_pylist()) == {precision}
    assert load_device(device_id).supports(precision)


UNKNOWN = {
    "rtx_3050": gpu("NVIDIA GeForce RTX 3050", 8.6, 20, 7.7, 2, memory_gbps=200.0, l2_gbps=900.0, half_tflops=36.0),
    "h100_sxm_16sm_10gib": gpu("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.0, 16, 9.75, 6.25, memory_gbps=400.0),
}


@pytest.mark.parametrize("device_id", UNKNOWN)
@pytest.mark.parametrize("nvml", [True, False], ids=["nvml", "no_nvml"])
def test_an_unknown_gpu_or_slice_has_its_figures_measured_first_and_is_local_from_then_on(
    device_id: str, nvml: bool, tmp_path: Path, graphs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from opcast.jobs import predict

    with fake_cuda(UNKNOWN[device_id], nvml=nvml):
        found, said = run(tmp_path, graphs, capsys)
    assert found["device"] == device_id
    assert "figures (rates, memory, caches) are measured first" in said
    kept = Store(tmp_path / "store").device(device_id)
    assert kept is not None
    assert kept.memory_gbps == pytest.approx(UNKNOWN[device_id].memory_gbps, rel=0.02)
    assert kept.sources["tensor_tflops"].startswith("measured")
    asked = ["op=gemm", "op.m=64", "op.n=64", "op.k=64", "op.dtype=bf16", "device=local", "format=json"]
    assert predict.run(compose("predict", [f"home={tmp_path}", *asked])) == 0
    assert json.loads(capsys.readouterr().out)["device"] == device_id


def test_a_campaign_is_measured_in_the_format_that_the_device_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = compose("profile", [f"home={tmp_path}", "format=json"])
    with fake_cuda(MATRIX["t4"][0]):
        assert profile.run({**config, "campaign": CAMPAIGN}) == 0
    assert "Tesla T4 has no fast bf16: fp16 is measured in its place" in capsys.readouterr().err
    assert set(Store(tmp_path / "store").read("gemm", "t4")["dtype"].to_pylist()) == {"fp16"}


def test_a_campaign_on_a_gpu_that_is_ill_ends_before_it_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = compose("profile", [f"home={tmp_path}"])
    with fake_cuda(ill_after=2), pytest.raises(BadInputError, match="the GPU does not work"):
        profile.run({**config, "campaign": CAMPAIGN})
    assert not (tmp_path / "store").exists()


def test_a_worker_of_its_own_measures_a_gpu_and_says_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real processes: the question what is here, and the campaign's worker with its probe of an unknown device."""
    site = Path(fake_cuda_module.__file__).parent / "fake_cuda_site"
    monkeypatch.undo()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
    machine = FakeMachine([UNKNOWN["rtx_3050"]])
    monkeypatch.setenv("OPCAST_FAKE_CUDA", to_json(machine))
    here = accelerator.ask()
    assert (here.hardware, here.device_id, here.trouble) == ("cuda", "rtx_3050", "")
    spec = {**CAMPAIGN, "settings": {**CAMPAIGN["settings"], "device": "cuda"}, "cases": CAMPAIGN["cases"][:1]}
    summary = campaign.run(build_plan(spec), Store(tmp_path))
    assert (summary.device_id, summary.outcome, summary.statuses) == ("rtx_3050", "complete", {"ok": summary.total})
    assert Store(tmp_path).device("rtx_3050") is not None


def test_of_two_gpus_the_first_of_torch_is_measured_whatever_nvml_counts(
    tmp_path: Path, graphs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = gpu("NVIDIA L4", 8.9, 58, 22.0, 48, clock_mhz=2040.0, uuid="aaaa")
    second = gpu("NVIDIA H100 80GB HBM3", 9.0, 132, 79.1, 50, clock_mhz=1980.0, uuid="bbbb")
    with fake_cuda(first, second, nvml_order=(1, 0)):
        found, _ = run(tmp_path, graphs, capsys)
    assert found["device"] == "l4"
    clocks = Store(tmp_path / "store").read("gemm", "l4")["sm_clock_mhz"].to_pylist()
    assert clocks
    assert clocks == pytest.approx([2040.0] * len(clocks))


def test_a_gpu_for_one_process_is_given_to_one_at_a_time(
    tmp_path: Path, graphs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_work: list[str] = []

    class Watched(RealStepsHere):
        def __enter__(self) -> RealStepsHere:
            assert "campaign" not in at_work
            at_work.append("real steps")
            return super().__enter__()

    def measure(*arguments: Any, **named: Any) -> Any:
        assert "real steps" not in at_work
        at_work.append("campaign")
        try:
            return original(*arguments, **named)
        finally:
            at_work.remove("campaign")

    original = quickstart.measure
    monkeypatch.setattr(quickstart, "measure", measure)
    monkeypatch.setattr(quickstart, "RealRunner", Watched)
    with fake_cuda(exclusive=True):
        found, said = run(tmp_path, graphs, capsys)
    assert found["device"] == "h100_sxm"
    assert "takes one process at a time" in said
    assert at_work == ["real steps"]


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ({"ill_after": 2}, "the GPU does not work (CUDA error: an illegal memory access was encountered)"),
        ({"old_driver": True, "driver": "470.82"}, "the driver (470.82) is too old for it or the GPU is lost"),
        ({"off_the_bus": True}, "too old for it or the GPU is lost"),
    ],
    ids=["ill", "old_driver", "off_the_bus"],
)
def test_a_gpu_that_cannot_be_used_is_said_in_one_line_and_the_cpu_is_taken(
    trouble: dict[str, Any],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "0000:65:00.0").mkdir()
    monkeypatch.setattr(accelerator, "NVIDIA_GPUS", tmp_path)
    said: list[str] = []
    monkeypatch.setattr(quickstart, "say", said.append)
    with fake_cuda(**trouble):
        assert quickstart.choose_hardware("auto").hardware == "cpu"
    assert len(said) == 1
    assert words in said[0]
    assert said[0].endswith("going on with the CPU")
    with fake_cuda(**trouble), pytest.raises(BadInputError, match="or use hardware=cpu"):
        quickstart.choose_hardware("cuda")


def test_what_is_measured_is_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    for models in ("one", "all"):
        assert main(["quickstart", "device=h100_sxm", f"models={models}"]) == 2
        said = capsys.readouterr().err
        assert "device=h100_sxm: opcast quickstart measures this machine; hardware=cuda or cpu" in said
        assert said.count("\n") == 1


def test_a_gpu_that_falls_ill_while_it_is_measured_loses_no_row(
    tmp_path: Path, graphs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_cuda(ill_after=1500), pytest.raises((RuntimeError, ValueError)):
        run(tmp_path, graphs, capsys)
    rows = Store(tmp_path / "store").read("gemm", "h100_sxm", status=None)
    assert "ok" in rows["status"].to_pylist()
