"""Every setting of ``opcast simulate`` changes an answer or writes a file; a new setting needs a row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from opcast.jobs.cli import main
from opcast.jobs.questions import of_command
from opcast.jobs.show import CONFIG_DIRECTORY

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 1024,
}
NODE = ["cluster=dgx_h100", "workload.seq_len=256", "workload.global_batch=8", "engine.order=[network,analytical]"]
PAIR = [*NODE, "cluster.nodes=2", "workload.global_batch=16"]

CHANGES: dict[str, tuple[list[str], list[str]]] = {  # what else is asked, and what changes the answer
    "device": (["device=h100_sxm"], ["device=a100_sxm_80gb"]),
    "model": (NODE, ["model=tiny_llama_100m"]),
    "workload": (["cluster=dgx_h100"], ["workload=decode"]),
    "lora_rank": (NODE, ["workload.lora_rank=8"]),
    "lora_modules": ([*NODE, "workload.lora_rank=8"], ["workload.lora_modules=proj"]),
    "lora_dropout": ([*NODE, "workload.lora_rank=8"], ["workload.lora_dropout=0.1"]),
    "mtp_layers": (NODE, ["workload.mtp_layers=1"]),
    "frozen": (NODE, ["workload.frozen=embed"]),
    "precision": (NODE, ["precision=fp8"]),
    "cluster": (["device=h100_sxm", "workload.seq_len=256"], ["cluster=dgx_h100"]),
    "parallel": (NODE, ["parallel.tp=2"]),
    "stack": (NODE, ["stack=torch"]),
    "expand": (NODE, ["expand=0"]),
    "within_s": (NODE, ["within_s=0.05"]),
    "strict": (NODE, ["strict=true"]),
    "price_per_gpu_hour": (NODE, ["price_per_gpu_hour=2"]),
    "micro_batches": (
        ["cluster=dgx_h100", "workload=decode", "workload.batch=4", "parallel.pp=2"],
        ["micro_batches=2"],
    ),
    "power_cap_w": (NODE, ["power_cap_w=200"]),
    "offload": (NODE, ["offload=[optimizer]"]),
    "passes": ([*NODE, "parallel.zero_stage=3"], ["passes=[opcast.simulator.passes.reorder:reorder]"]),
    "options": (NODE, ["options.cuda_graph=true"]),
    "network": (NODE, ["network=flow"]),
    "faults": (PAIR, ["faults=[{link: nic0-leaf0, bandwidth: 0.1}]"]),
    "fault_draw": (PAIR, ["fault_draw={count: 4, seed: 1, bandwidth: 0.1}"]),
    "faults_study": (PAIR, ["faults_study={samples: 4, count: 1, seed: 0, bandwidth: 0.1}"]),
    "stragglers": (NODE, ["stragglers=[{device: 3, slowdown: 2}]"]),
    "backend": (["cluster=dgx_h100", "workload=decode", "stack=torch", "parallel.tp=8"], ["backend=vllm"]),
    "calibration": (NODE, ["calibration=none"]),
    "engine": (NODE, ["engine.order=[learned,network,analytical]"]),
}
WRITES = {"report": "step.html", "trace": "step.json.gz", "simai": "workload.txt", "chakra": "run", "graphs": "graphs"}
READ = {
    "store",
    "predictors",
    "home",
    "format",
    "hydra",
    "durations",
    "policy",
    "algorithm",
    "window",
    "detail",
    "launch",
}  # what tests of stores, formats, traces, tables, launch files turn
WORKLOAD = {"lora_rank", "lora_modules", "lora_dropout", "mtp_layers", "frozen"}  # settings of a group
REFUSALS = {"expand": "expand=0", "strict": "strict"}  # answers that are refused, for a reason that names the setting

Ask = Callable[[list[str]], tuple[int, dict[str, Any], str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small model's config.json."""
    folder = tmp_path_factory.mktemp("knobs")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


@pytest.fixture
def ask(model: Path, capsys: pytest.CaptureFixture[str]) -> Ask:
    """A function: exit code, answer and what was said on stderr."""

    def asked(arguments: list[str]) -> tuple[int, dict[str, Any], str]:
        code = main(["simulate", f"model={model}", *arguments, "format=json"])
        out, err = capsys.readouterr()
        found = json.loads(out)
        found.pop("wall_time_s", None)
        return code, found, err + str(found.get("error", ""))

    return asked


def test_every_setting_has_a_row() -> None:
    names: set[str] = {each.path.partition(".")[0] for each in of_command("simulate")}
    for file in ("base", "simulate"):
        composed = yaml.safe_load((Path(CONFIG_DIRECTORY) / f"{file}.yaml").read_text())
        names |= composed.keys() - {"defaults"}
        for group in composed.get("defaults", ()):
            names |= {name for name in group if " " not in name} if isinstance(group, dict) else set()
    assert names == CHANGES.keys() - WORKLOAD | WRITES.keys() | READ, (
        "add a row with a question whose answer the setting changes"
    )


@pytest.mark.parametrize("name", CHANGES)
def test_every_setting_turns_something(name: str, ask: Ask) -> None:
    asked, change = CHANGES[name]
    code, usual, said = ask(asked)
    assert code == 0, said
    code, changed, said = ask([*asked, *change])
    if name in REFUSALS:
        assert code == 2
        assert REFUSALS[name] in said
    else:
        assert code == 0, said
        assert changed != usual


@pytest.mark.parametrize("name", WRITES)
def test_every_file_is_written(name: str, tmp_path: Path, ask: Ask) -> None:
    code, _, said = ask([*NODE, f"{name}={tmp_path / WRITES[name]}"])
    assert code == 0, said
    path = tmp_path / WRITES[name]
    assert (any(path.iterdir()) if path.is_dir() else path.stat().st_size) > 0
