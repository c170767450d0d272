"""A real run on this processor, explained against a simulated prediction of it: what was put into it comes out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from opcast.jobs.cli import main

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256}  # fmt: skip
SLEEP_S, STEPS = 0.4, 3
RUN = f"""
import sys, time, torch
from opcast.harness.collecting import collect
from opcast.jobs.real_run import load
cause, model, folder = sys.argv[1:]
run = load({{"model": model, "precision": "fp32", "device": "cpu", "threads": 1,
             "workloads": {{"prefill": {{"kind": "prefill", "batch": 1, "seq_len": 32}}}}}})["prefill"]
run()
if cause == "slow":  # each silu sleeps inside the operator
    def silu(x):
        time.sleep({SLEEP_S})
        return x * torch.sigmoid(x)
    library = torch.library.Library("aten", "IMPL")
    library.impl("silu", silu, "CPU")
with collect(folder) as step:
    for _ in range({STEPS}):
        run()
        if cause == "sleep":
            time.sleep({SLEEP_S})
        step()
"""
WORK_S, TWO_STEPS = 0.25, 3
TWO = f"""
import os, sys, time, torch, torch.distributed as dist
from opcast.harness.collecting import collect
rank, store, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
torch.set_num_threads(1)
a, g = torch.randn(512, 512), torch.randn(1 << 12)
def compute():
    until = time.perf_counter() + {WORK_S}
    while time.perf_counter() < until:
        a @ a
for cause in ("beside", "apart"):
    compute()
    dist.all_reduce(g)
    with collect(os.path.join(folder, cause), rank) as step:
        for each in range(2):  # meet without a collective: the profiler of one rank may take a second to begin
            open(store + cause + str(rank), "w").close()
            while not os.path.exists(store + cause + str(each)):
                time.sleep(0.001)
        for _ in range({TWO_STEPS}):
            if rank:
                time.sleep({WORK_S})
            work = dist.all_reduce(g, async_op=True)
            if cause == "apart":
                work.wait()
            time.sleep({WORK_S} * (cause == "apart")) if rank else compute()
            work.wait()
            step()
"""

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def run(program: str, *arguments: str) -> None:
    command = [sys.executable, "-P", "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_what_was_put_into_a_run_is_its_largest_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    model = str(tmp_path / "config.json")
    figures = {"name": "processor", "vendor": "cpu", "architecture": "zen4", "compute_units": 1, "clock_mhz": 3000,
               "memory_gib": 16, "memory_gbps": 10, "l2_mib": 1, "l2_gbps": 50, "tensor_tflops": "{fp32: 0.05}",
               "vector_tflops": 0.05}  # fmt: skip
    device = ["device=cpu", "device.id=processor", *(f"+device.{name}={value}" for name, value in figures.items())]
    asked = [f"model={model}", *device, "workload=prefill", "workload.input_len=32", "engine.order=[analytical]"]
    assert main(["simulate", *asked, f"chakra={tmp_path / 'predicted'}", "format=json"]) == 0
    for cause, expected in (("sleep", ("device idle", "all")), ("slow", ("op error", "elementwise"))):
        run(RUN, cause, model, str(tmp_path / cause))
        runs = [f"predicted={tmp_path / 'predicted'}", f"measured={tmp_path / cause / 'profile'}"]
        capsys.readouterr()
        assert main(["trace", "explain", *runs, f"steps={STEPS}", "format=json"]) == 0
        found = json.loads(capsys.readouterr().out)
        first = found["causes"][0]
        assert (first["cause"], first["what"].split()[0]) == expected
        parts = sum(each["difference_us"] for each in found["causes"])
        assert parts == pytest.approx(found["gap_us"], rel=0.05)
        assert first["difference_us"] >= 0.6 * SLEEP_S * 1e6  # the last sleep comes after all operators
        assert all(each["advice"].startswith("opcast ") for each in found["causes"])


@pytest.mark.slow
def test_a_removed_overlap_is_the_largest_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two real ranks over gloo: while rank 1 is late, rank 0 computes beside its all-reduce, then behind it.

    So the all-reduce is long without a core of its own, and products take as long however busy the machine is.
    """
    command = [sys.executable, "-P", "-c", TWO]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path / "store"), str(tmp_path)], env=ENVIRONMENT)
             for rank in range(2)]  # fmt: skip
    assert [each.wait() for each in ranks] == [0, 0]
    of = {cause: tmp_path / cause / "profile" for cause in ("beside", "apart")}
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "profile.0.json").write_bytes((of["apart"] / "profile.0.json").read_bytes())
    for measured, what in ((of["apart"], "waiting"), (tmp_path / "alone", "all_reduce")):
        capsys.readouterr()
        runs = [f"predicted={of['beside']}", f"measured={measured}"]
        assert main(["trace", "explain", *runs, "steps=1", "format=json"]) == 0
        found = json.loads(capsys.readouterr().out)
        first = found["causes"][0]
        assert (first["cause"], first["what"]) == ("lost overlap", what), found["causes"]
        assert first["difference_us"] == pytest.approx(TWO_STEPS * WORK_S * 1e6, rel=0.3)
        assert sum(each["difference_us"] for each in found["causes"]) == pytest.approx(found["gap_us"], rel=0.05)
