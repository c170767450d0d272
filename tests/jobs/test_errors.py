"""What goes wrong is one line and an exit code; with ``format=json`` one object, too. Nothing ends in a traceback."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from opcast import jobs
from opcast.datasets.installing import install_command
from opcast.jobs import cli, listing
from opcast.jobs.cli import main
from opcast.jobs.composing import any_help
from opcast.jobs.show import CONFIG_DIRECTORY

GEMM = ["predict", "op=gemm", "op.m=4096", "op.n=4096", "op.k=4096", "device=h100_sxm"]
FLOWS = ["device=h100_sxm", "cluster=dgx_h100", "network=flow"]
STEP = ["simulate", "model=tiny_llama_100m", "device=h100_sxm"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPCAST_HOME", str(tmp_path))
    return tmp_path


def broken(config: dict[str, object]) -> int:
    raise RuntimeError("a bug\nof two lines")


def test_what_nobody_foresaw_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(listing, "run", broken)
    assert main(["list", "ops"]) == 1
    captured = capsys.readouterr()
    assert captured.err == (
        "opcast: unexpected RuntimeError: a bug of two lines, please report; OPCAST_DEBUG=1 shows the traceback\n"
    )
    assert captured.out == ""
    assert main(["list", "ops", "format=json"]) == 1
    assert "a bug" in json.loads(capsys.readouterr().out)["error"]
    monkeypatch.setenv("OPCAST_DEBUG", "1")
    assert main(["list", "ops"]) == 1
    assert "in broken" in capsys.readouterr().err


def test_bad_input_with_json_is_one_object_on_stdout(capsys: pytest.CaptureFixture[str]):
    assert main([*GEMM, "device=h100_sx", "format=json"]) == 2
    captured = capsys.readouterr()
    error = json.loads(captured.out)["error"]
    assert "h100_sxm" in error
    assert captured.err == f"opcast: {error}\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        # values of another kind, and what was taken away
        ([*GEMM, "op.dtype=null"], "gemm.dtype=null must be a dtype"),
        ([*GEMM, "op.m=true"], "gemm.m=true is not an integer"),
        ([*GEMM, "engine=5"], "engine=5 must be settings of their own"),
        ([*GEMM, "engine.order=5"], "engine.order=5 must be a list"),
        ([*GEMM, "store=null"], "store=null must be a folder"),
        ([*GEMM, "store=/etc/passwd"], "is a file, not a folder"),
        ([*GEMM, "predictors=5"], "predictors=5 must be a folder"),
        (["predict", "op=gemm", "~device"], "device was taken away with ~device"),
        (
            ["simulate", "model=tiny_llama_100m", "~device", "device.tdp_w=3"],
            "device.tdp_w is of a device that was taken away",
        ),
        (["simulate", "model=tiny_llama_100m", "precision.quantization=[1]"], "quantization=[1] must be a format"),
        (["validate", "truth=x.csv", "details=foo"], "details=foo must be true or false"),
        ([*STEP, "model.config=null"], "model.config=None must be settings"),
        ([*STEP, "workload=null"], "workload=null does not exist; choose from batch"),
        (["profile", "campaign.cases=5"], "campaign.cases=5 must be a list"),
        (["profile", "campaign.canaries=[5]"], "campaign.canaries=[5] must be a list"),
        # models that cannot be
        ([*STEP, "model.config.num_attention_heads=0"], "num_attention_heads=0 must be a whole number"),
        ([*STEP, "model.config.num_hidden_layers=1000000"], "more than the 1,000 that are simulated"),
        ([*STEP, "model.config.num_attention_heads=32", "model.config.num_key_value_heads=3"], "3 key and value heads"),
        ([*STEP, "workload.seq_len=10000000"], "more than the 4,000,000 tokens"),
        ([*STEP, "model=builtins:exit"], "the function ended the process"),
        (["predict", "op=all_reduce", "op.size_bytes=1", "op.ranks=1000000000", *FLOWS], "larger than the 8 devices"),
        (["predict", "op=all_reduce", "op.size_bytes=1", "op.ranks=8", *FLOWS, "cluster.nodes=20000"], "the 65,536"),
        ([*STEP, "cluster=dgx_h100", "cluster.nodes=1000000000"], "more than the 1,048,576 devices"),
        ([*STEP, "workload.global_batch=8000000000"], "more than the 65,536 that are simulated"),
        ([*STEP, "+engine.oder=1"], "did you mean engine.order?"),
        ([*STEP, "+precision.foo=1"], "precision.foo is no setting"),
        ([*STEP, "model=bert_base"], "it has 512 positions, not 2048; take workload.seq_len=512"),
        ([*STEP, "cluster=dgx_h100", "cluster.devices_per_node=1", "parallel.tp=2"], "divide the 1 device of"),
        ([*STEP, "model.config.num_hidden_layers=1", "cluster=dgx_h100", "parallel.pp=8"], "has 1 layer; take"),
        ([*STEP, "cluster=dgx_h100", "parallel.tp=16"], "does not divide the 8 devices of dgx_h100; take parallel.tp="),
        # settings that do not exist
        ([*GEMM, "+foo=1"], "foo is no setting of `opcast predict`"),
        ([*GEMM, "+chache=cold"], "did you mean cache?"),
        (
            ["profile", "coverage", "nosuch=1"],
            "`opcast profile coverage`; `opcast profile coverage --help` lists",
        ),
        (["search", "serving", "+precision.foo=1"], "precision.foo is no setting of `opcast search serving`"),
        (["profile", "coverage", "hello"], "`opcast profile coverage` takes no word 'hello'"),
        (["profile", "coverage", "--foo"], "--foo is no flag of `opcast profile coverage`"),
        (["profile", "coverage", "~model"], "`opcast profile coverage` needs it"),
        ([*GEMM, "op.mm=3"], "did you mean op.m"),
        ([*STEP, "workload.seqlen=3"], "did you mean workload.seq_len"),
        ([*STEP, "workload=decode", "+workload.seq_len=4"], "workload.seq_len is no setting of workload=decode"),
        ([*GEMM, "cluster=h100"], "did you mean dgx_h100"),
        (["list", "devices", "models"], "takes one of devices, models at a time"),
        # files under a name that says another format
        (["plan", "picture=job.png"], "picture=job.png would be SVG under another name: take picture=job.svg"),
        ([*GEMM, "report=net.pdf"], "report=net.pdf would be HTML under another name: take report=net.html"),
        # names of another place, and words
        ([*GEMM, "device=h10"], "did you mean h100 or"),
        ([*GEMM, "device=cpuu"], "did you mean cpu?"),
        ([*GEMM, "device=none.yaml"], "there is no such file, nor a device of that name"),
        ([*GEMM, f"device={CONFIG_DIRECTORY}/cluster/dgx_h100.yaml"], "device has no figure 'device'"),
        ([*STEP, f"cluster={CONFIG_DIRECTORY}/device/h100_sxm.yaml"], "cluster has no figure 'vendor'"),
        (
            ["search", "serving", "model=bloom_560m", "cluster=dgx_h100", "precision.kv_dtype=fp4"],
            "kv_dtype='fp4' is not",
        ),
        (["serving", "polcy=vllm"], "did you mean scheduler.policy or autoscale.policy?"),
        (["serving", "rate=4"], "did you mean traffic.rate"),
        (["simulate", "tp=8"], "did you mean parallel.tp"),
        (["search", "servng"], "did you mean serving?"),
        (["search", "serving", "comapre"], "did you mean compare?"),
        (["predict", "gemm"], "did you mean op=gemm?"),
        (["simulate", "llama3_8b"], "did you mean model=llama3_8b?"),
        (["simulate", "h100"], "did you mean device=h100?"),
        # what nobody can work with
        ([*GEMM, "op.m=" + "9" * 400], "9... cannot be read: it has a number of more than 300 digits"),
        ([*GEMM, "op.m=" + "9" * 5000], "it has a number of more than 300 digits"),
        ([*GEMM, "op.m=" + "[" * 10_000 + "]" * 10_000], "[... cannot be read: it is nested more than 20 deep"),
        ([*GEMM, "op.m=1e400"], "gemm.m=inf is not an integer"),
        ([*STEP, "+model.config.x=" + "{a: " * 30 + "1" + "}" * 30], "cannot be read: it is nested more than 20 deep"),
        (["profile", "campaign.cases=[{kind: gemm, sample: 1000000, m: 1, n: 1, k: 1}]"], "the 200,000 cases"),
        # what Hydra does not read
        ([*GEMM, "op.m=٣"], "op.m=٣ cannot be read: settings are written name=value"),
        ([*GEMM, "op.m=[1,"], "op.m=[1, cannot be read"),
        ([*GEMM, "--foo"], "--foo is no flag of `opcast predict`"),
        ([*GEMM, "--cfg=foo"], "--cfg takes job, hydra, all, not 'foo'"),
        ([*GEMM, "--multirun=3"], "--multirun takes no value"),
        ([*GEMM, "--resolve"], "--resolve goes with --cfg job"),
        ([*GEMM, "device=h100_sxm,a100_sxm_80gb"], "add --multirun"),
        (["train", "op=gemm,copy"], "write a list as op=[gemm,copy]"),
        ([*GEMM, "+device=h100_sxm"], "without + or ~"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], says: str):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    "arguments",
    [["predict", "--hydra-help"], ["list", "--cfg", "job", "--resolve"], ["simulate", "--version"], ["--version"]],
)
def test_flags_that_only_show_something_exit_with_0(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(arguments) == 0
    assert capsys.readouterr().out


def test_a_sweep_prints_one_object_a_line_and_its_worst_exit_code(home: Path):
    command = [sys.executable, "-P", "-m", "opcast.jobs.cli", *GEMM, "format=json", "--multirun"]
    done = subprocess.run([*command, "op.m=64,-1,128"], capture_output=True, text=True, cwd=home)
    assert done.returncode == 2
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [sorted({"error", "latency_us"} & set(line)) for line in lines] == [
        ["latency_us"],
        ["error"],
        ["latency_us"],
    ]


def test_a_package_that_is_not_installed_is_named_with_its_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    from importlib.metadata import requires

    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not there
    assert main(["simulate", "model=gpt2", "workload=prefill", "device=h100", f"home={tmp_path}"]) == 2
    assert capsys.readouterr().err == (f"opcast: this needs torch, which is not installed: {install_command('hf')}\n")
    for package, extra in cli.EXTRAS.items():
        found = [line for line in requires("opcast") or () if line.startswith(package) and f'"{extra}"' in line]
        assert found or package == "torch"  # opcast[hf] has it by opcast[torch]


def test_help_that_is_no_text_is_not_checked(monkeypatch: pytest.MonkeyPatch):
    """Python 3.14 checks the help of each argument, and Hydra gives it an object."""
    checked = []
    monkeypatch.setattr(
        argparse._ActionsContainer, "_check_help", lambda self, action: checked.append(action.help), raising=False
    )
    parser: Any = argparse.ArgumentParser(add_help=False)
    with any_help():
        parser._check_help(argparse.Action(["--text"], "text", help="words"))
        parser._check_help(argparse.Action(["--object"], "object", help=object()))  # type: ignore[arg-type]
    assert checked == ["words"]
    parser._check_help(argparse.Action(["--text"], "text", help="again"))
    assert checked == ["words", "again"]


def test_devices_have_short_names(capsys: pytest.CaptureFixture[str]):
    assert main([*GEMM, "device=h100", "format=json"]) == 0
    assert json.loads(capsys.readouterr().out)["device"] == "h100_sxm"
    assert main([*GEMM, "device=H100x"]) == 2
    assert "did you mean h100" in capsys.readouterr().err


def test_a_store_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str], home: Path):
    assert main([*GEMM, f"store={home}/sotre"]) == 0
    assert "sotre does not exist: only measurements that come with opcast are read" in capsys.readouterr().err
    assert main(GEMM) == 0
    assert capsys.readouterr().err == ""  # the usual one need not be there


@pytest.mark.parametrize("place", ["", "missing/plan.json", "/proc/plan.json"])
def test_a_plan_that_cannot_be_written(capsys: pytest.CaptureFixture[str], home: Path, place: str):
    assert main(["profile", f"plan_out={home / place}", "+settings.device=cpu"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_plan_is_one_object(capsys: pytest.CaptureFixture[str], home: Path):
    assert main(["profile", f"plan_out={home / 'plan.json'}", "+settings.device=cpu", "format=json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["cases"] == len(json.loads((home / "plan.json").read_text())["cases"])


@pytest.mark.parametrize("content", ["[[[[", "[" * 100_000, "{}", "[]", "\x00\xff"])
def test_garbage_is_no_kineto_trace(capsys: pytest.CaptureFixture[str], home: Path, content: str):
    (home / "trace.json").write_text(content)
    code = main(["import", "source=kineto", f"path={home / 'trace.json'}", "device=h100_sxm", "format=json"])
    captured = capsys.readouterr()
    assert code in (0, 2)  # a file among many that cannot be read is counted
    assert "trace.json" in captured.out
    assert "unexpected" not in captured.err


def test_a_folder_in_the_place_of_a_cached_graph(capsys: pytest.CaptureFixture[str], home: Path):
    assert main(STEP) == 0
    for graph in (home / "graphs").glob("*.json.gz"):
        graph.unlink()
        graph.mkdir()
    assert main(STEP) == 0


def test_training_on_too_few_rows_fails(capsys: pytest.CaptureFixture[str], home: Path):
    table = home / "rows.csv"
    rows = "".join(f"{m},4096,4096,{m}\n" for m in (64, 128, 256))
    table.write_text("m,n,k,us\n" + rows)
    (home / "map.yaml").write_text(
        "kind: gemm\ncolumns: {m: m, n: n, k: k, latency_us: {column: us, unit: us}}\n"
        "constants: {dtype: bf16, device_id: h100_sxm, backend: torch, measured_at: 2025-01-31, license: MIT}\n"
    )
    assert main(["import", "source=csv", f"path={table}", f"mapping={home / 'map.yaml'}"]) == 0
    capsys.readouterr()
    assert main(["train", "device=h100_sxm", "op=gemm", "tracking=null", "format=json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert "too few" in said["error"] or "rows" in said["error"]


def heed_ctrl_c():
    """Tests that run behind a shell's ``&`` inherit that SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_is_130_before_the_first_case_too(home: Path):
    command = [
        sys.executable,
        "-P",
        "-m",
        "opcast.jobs.cli",
        "profile",
        "campaign=quick",
        "campaign.settings.device=cpu",
    ]
    environment = os.environ | {"OPCAST_HOME": str(home), "PYTHONFAULTHANDLER": "1"}
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=heed_ctrl_c)
    deadline = time.monotonic() + 60
    while not (home / "store").exists() and time.monotonic() < deadline and child.poll() is None:
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    try:
        _, err = child.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGABRT)  # then it says where it was
        _, err = child.communicate()
    assert child.returncode == 130, err
    assert "Traceback" not in err


def test_ctrl_c_inside_generated_code_is_130_too(tmp_path: Path):
    """``python -m`` ends by the signal when Ctrl-C came inside ``exec`` of a text, as dataclasses do, caught or not."""
    (tmp_path / "interrupted.py").write_text(
        "import sys\nfrom opcast.jobs import cli\n"
        "cli.run = lambda *_: exec('raise KeyboardInterrupt')\n"
        "sys.argv[1:] = ['list']\n"
        "sys.exit(cli.main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "interrupted"], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (130, "opcast: interrupted; what was measured is kept\n")


def test_ctrl_c_that_python_loses_comes_again():
    """A weak reference's callback, as imports have, is no place for an exception: Python drops it."""
    program = (
        "import signal, sys, time, weakref\nfrom opcast.jobs import cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Thing: pass\n"
        "def lose():\n"
        "    thing = Thing()\n"
        "    kept = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))\n"
        "    del thing\n"
        "    time.sleep(60)\n"
        "cli.run = lambda *_: lose()\n"
        "sys.argv[1:] = ['list']\n"
        "sys.exit(cli.main())\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "opcast: interrupted; what was measured is kept\n")


def test_an_answer_that_nobody_reads_and_a_full_disk_behind_stdout(home: Path):
    command = [sys.executable, "-P", "-m", "opcast.jobs.cli", "list", "models", "format=json"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "opcast: the answer cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    ("layout", "batch"),
    [
        ([], 8),
        (["parallel.pp=4"], 32),
        (["parallel.tp=4", "cluster.devices_per_node=4"], 1),
        (["parallel.pp=2", "workload.micro_batch=2"], 64),
    ],
)
def test_a_batch_that_nobody_gave_fills_the_layout(capsys: pytest.CaptureFixture[str], layout: list[str], batch: int):
    step = ["simulate", "model=tiny_llama_100m", "cluster=dgx_h100", "workload.seq_len=128", *layout, "format=json"]
    assert main(step) == 0
    found = json.loads(capsys.readouterr().out)
    micro = 2 if "workload.micro_batch=2" in layout else 1
    assert found["parallel"]["micro_batches"] * found["parallel"]["dp"] * micro == batch
    told = [note for note in found["notes"] if f"workload.global_batch={batch}, as none was given" in note]
    assert len(told) == (batch > 1)
    assert main([*step, f"workload.global_batch={batch}"]) == 0
    same = json.loads(capsys.readouterr().out)
    assert same["step_time_s"] == found["step_time_s"]
    assert not [note for note in same["notes"] if "as none was given" in note]


def test_a_step_that_waits_for_launches_is_told_so(capsys: pytest.CaptureFixture[str]):
    small = ["simulate", "model=tiny_llama_100m", "device=h100_sxm", "workload.seq_len=64", "format=json"]
    assert main(small) == 0
    found = json.loads(capsys.readouterr().out)
    gain = (found["step_time_s"] - found["breakdown"]["host_s"]) * 1e3
    assert any(f"with CUDA graphs the step would take about {gain:.3g} ms" in note for note in found["notes"])
    assert main([*small, "workload.seq_len=8192", "model.config.max_position_embeddings=8192"]) == 0
    assert not any("CUDA graphs" in note for note in json.loads(capsys.readouterr().out)["notes"])


def test_what_the_time_is_made_of_adds_up(capsys: pytest.CaptureFixture[str]):
    step = ["simulate", "model=tiny_llama_100m", "cluster=dgx_h100", "parallel.tp=2", "parallel.pp=2"]
    assert main(step) == 0
    first, _, second = capsys.readouterr().out.partition("its ops, overlapped ones in full")
    table = first.partition("where the time goes")[2]
    shares = [float(line.split()[-1][:-1]) for line in table.splitlines() if line.rstrip().endswith("%")]
    assert sum(shares) == pytest.approx(100.0, abs=0.05 * len(shares) + 0.01)
    assert "all_reduce" in second


def test_a_table_of_which_nothing_is_simulated_fails(capsys: pytest.CaptureFixture[str], reference_data: Path):
    table = reference_data / "truth" / "train_llama3_paper.csv"
    assert main(["validate", f"truth={table}", "cluster.nic_gbps=-1", "format=json"]) == 2
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["error"].startswith(f"none of the {found['rows']} rows of train_llama3_paper was simulated: ")
    assert "cluster.nic_gbps=-1" in captured.out


def test_what_is_missing_is_offered_with_this_environment_s_own_pip() -> None:
    """One place has the words; the first set-up and what fetches ns-3 go by the name alone."""
    room = Path(jobs.__file__).resolve().parent.parent
    own = ("datasets/installing.py", "jobs/bootstrap.py", "simulator/network/packet.py")
    said = [
        str(path.relative_to(room))
        for part in ("datasets", "harness", "models", "simulator", "jobs")
        for path in sorted((room / part).rglob("*.py"))
        if re.search(r"pip install '?opcast\[", path.read_text(encoding="utf-8"))
    ]
    assert set(said) <= set(own)
