"""Profiles become traces that run as they ran; the parts of their time are those of the profile."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.datasets.traces.checks import check_trace, find_problems
from opcast.datasets.traces.classes import CLASSES, GAP, class_codes
from opcast.datasets.traces.groups import RankedTraces
from opcast.datasets.traces.linking import link_profile
from opcast.datasets.traces.matching import match_host
from opcast.datasets.traces.profiles import Profile, read_profile
from opcast.datasets.traces.reading import read_trace
from opcast.datasets.traces.schema import TraceFileError
from opcast.datasets.traces.table import ExecutionTrace
from opcast.jobs.cli import main
from opcast.simulator.execution.analysis import account, covered_us, late_ranks, recorded_times
from opcast.simulator.execution.run import read_run, simulate_run


def runs_as_it_ran(profile: Profile, trace: ExecutionTrace) -> None:
    """The trace has no cycle; every node runs when it ran; device time is that of the profile."""
    assert [line for line in check_trace(trace, "t") if "has no comm_" not in line] == []
    made = simulate_run(RankedTraces({0: trace}))
    node = made.joint.node[0]
    assert np.allclose(made.executions.start_us[node], trace.exact_start_us, atol=1e-3)
    codes = class_codes(trace)
    own = ~np.isin(codes, [CLASSES.index("host"), CLASSES.index("gap")])
    for lane in {str(event["args"].get("stream")) for event in profile.device}:
        events = [event for event in profile.device if str(event["args"].get("stream")) == lane]
        start = np.array([float(event["ts"]) for event in events])
        whole = covered_us(start, start + np.array([float(event["dur"]) for event in events]))
        here = own & (trace.column("stream", -1, "int64") == int(lane))
        assert float(trace.exact_us[here].sum()) == pytest.approx(whole, rel=1e-6, abs=1e-3)


PAIRS = [
    ("hta/benchmark_simple_add_trace.json.gz", "hta/benchmark_simple_add_et.json.gz", "external id", 28),
    pytest.param("param/linear_kineto.json.gz", "param/linear_et.json.gz", "order of names", 926,
                 marks=pytest.mark.slow),
    pytest.param("hta/nccl_data.json.gz", "param/resnet_1gpu_et.1.0.3-chakra.0.0.4.json.gz", "record function id",
                 14346, marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.reference
@pytest.mark.parametrize(("kineto", "host", "how", "count"), PAIRS)
def test_a_pair_is_matched_and_runs_as_it_ran(
    kineto: str, host: str, how: str, count: int, reference_data: Path
) -> None:
    folder = reference_data / "data" / "traces"
    profile = read_profile(folder / kineto)
    found = match_host(profile.host, read_trace(folder / host), folder / host)
    assert (found.how, len(found.rows)) == (how, count)
    trace, report = link_profile(profile, found)
    assert report.launched == report.kernels
    assert report.matched == count
    runs_as_it_ran(profile, trace)


ALONE = ["hta/benchmark_result_2869224_1695835535_trace.json.gz", "hta/event_sync_trace.json.gz",
         "tracelens/sglang_Qwen3-8B_decode.json.gz",
         "tracelens/h100_gaunernst_bert-small-uncased__1016001.json.gz"]  # fmt: skip
SLOW = ["hta/rank0.json.gz", "hta/sampled_rank-0.json.gz", "hta/trace_diff_control_a100.json.gz",
        "tracelens/b200_vllm_tp8_eager_trace.json.gz", "tracelens/mi300x_resnet_act_checkpoint.json.gz",
        "tracelens/h100_Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
        "kineto/v100_resnet50_2021_worker0.1623143089861.pt.trace.json.gz"]  # fmt: skip


@pytest.mark.reference
@pytest.mark.parametrize("name", [*ALONE, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)])
def test_a_profile_alone_runs_as_it_ran(name: str, reference_data: Path) -> None:
    profile = read_profile(reference_data / "data" / "traces" / name)
    runs_as_it_ran(profile, link_profile(profile)[0])


@pytest.mark.reference
@pytest.mark.slow
def test_the_account_agrees_with_that_of_hta(reference_data: Path) -> None:
    """HolisticTraceAnalysis 0.5.0 on the same file: idle 77.78 %, compute 17.26 %, the rest 4.97 % of device time.

    It rounds starts up and ends down to whole microseconds. Its idle time is 1.1 points above ours, because it leaves
    the last step of the profiler out: with ``include_last_profiler_step=True`` it says idle 76.68 %, compute 17.11 %.
    """
    profile = read_profile(reference_data / "data" / "traces" / "hta" / "nccl_data.json.gz")
    trace, _ = link_profile(profile)
    codes = class_codes(trace)
    device = ~np.isin(codes, [CLASSES.index("host"), CLASSES.index("gap")])
    begin, stop = (each + profile.begin_us for each in recorded_times(trace))
    begin, stop = np.ceil(begin), np.floor(stop)
    start, end = begin[device], stop[device]
    whole = end.max() - start.min()
    kernels = device & np.isin(codes, [CLASSES.index(each) for each in ("gemm", "attention", "elementwise", "other")])
    compute = covered_us(begin[kernels], stop[kernels]) / whole
    busy = covered_us(start, end) / whole
    assert compute == pytest.approx(0.1711, abs=0.002)
    assert 1 - busy == pytest.approx(0.7668, abs=0.005)


@pytest.mark.reference
@pytest.mark.slow
def test_kernels_without_a_launch_are_idle_time_to_hta(reference_data: Path) -> None:
    """HolisticTraceAnalysis 0.5.0 says 69.01 % idle, with its last step: it leaves out 872 kernels that ran, whose
    launch the profile does not have. All of them together are busy 4.6 points longer."""
    path = reference_data / "data" / "traces" / "hta" / "rank0.json.gz"
    with gzip.open(path) as file:
        events = [each for each in json.load(file)["traceEvents"] if each.get("ph") == "X" and "dur" in each]
    launches = {each["args"].get("correlation") for each in events if each.get("cat") == "cuda_runtime"}
    device = [each for each in events if each.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    launched = [each for each in device if each["args"]["correlation"] in launches]
    starts, ends = (np.array([each["ts"] + after * each["dur"] for each in device], float) for after in (0, 1))
    span = ends.max() - starts.min()

    def idle(some: list[dict[str, Any]]) -> float:
        begin, end = (np.array([each["ts"] + after * each["dur"] for each in some], float) for after in (0, 1))
        return float(1 - covered_us(begin, end) / span)

    assert len(device) - len(launched) == 872
    assert idle(launched) == pytest.approx(0.6901, abs=0.001)
    trace, _ = link_profile(read_profile(path))
    codes = class_codes(trace)
    begin, stop = recorded_times(trace)
    ran = ~np.isin(codes, [CLASSES.index("host"), CLASSES.index("gap")])
    ours = 1 - covered_us(begin[ran], stop[ran]) / (stop[ran].max() - begin[ran].min())
    assert ours == pytest.approx(idle(device), abs=0.002)
    assert ours == pytest.approx(0.644, abs=0.002)


@pytest.mark.reference
def test_eight_ranks_of_one_run_meet_at_their_collectives(
    reference_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = reference_data / "data" / "traces" / "param"
    for name in ("dlrm_kineto", "dlrm_pytorch_et"):
        with tarfile.open(folder / f"{name}.tar.gz") as packed:
            packed.extractall(tmp_path, filter="data")
    asked = ["trace", "link", f"path={tmp_path / 'dlrm_kineto'}", f"host={tmp_path / 'dlrm_pytorch_et'}"]
    assert main([*asked, f"output={tmp_path / 'run'}", "format=json"]) == 0
    reports = json.loads(capsys.readouterr().out)["ranks"]
    assert all(report["matched"] >= 1620 for report in reports.values())
    assert find_problems(tmp_path / "run") == []
    run = read_run(tmp_path / "run")
    made = simulate_run(run)
    assert len(made.joint.calls) == 8
    for trace, rank in zip(run.traces.values(), run.traces, strict=True):
        node = made.joint.node[rank]
        assert made.executions.end_us[node].max() == pytest.approx(
            float((trace.exact_start_us + trace.exact_us).max()), rel=0.02
        )
    assert late_ranks(run)[0].rank == 7  # its calls are the shortest: the others waited for it
    assert main(["trace", "analyse", f"path={tmp_path / 'run'}", f"report={tmp_path / 'a.html'}", "format=json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["by_rank"]) == 8
    assert all(
        each["compute_us"] + each["exposed_us"] + each["idle_us"] == pytest.approx(each["total_us"])
        for each in found["by_rank"]
    )
    assert "Stragglers" in (tmp_path / "a.html").read_text()


EVENT = st.tuples(
    st.floats(0, 50), st.floats(0, 20), st.integers(1, 2), st.booleans(), st.floats(-3, 40), st.floats(0, 30)
)


@settings(max_examples=60)
@given(found=st.lists(EVENT, min_size=1, max_size=14), waits=st.booleans())
def test_any_profile_runs_as_it_ran(found: list[Any], waits: bool) -> None:
    host, device = [], []
    for place, (ts, dur, thread, launches, delay, length) in enumerate(found):
        arguments = {"correlation": place} if launches else {}
        host.append({"cat": "cuda_runtime" if launches else "cpu_op", "name": "launch" if launches else "aten::mm",
                     "pid": 1, "tid": thread, "ts": ts, "dur": dur, "args": arguments})  # fmt: skip
        if launches:
            device.append({"cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": max(ts + delay, 0.0),
                           "dur": length, "args": {"correlation": place, "device": 0, "stream": 7}})  # fmt: skip
    if waits:
        host.append({"cat": "cuda_runtime", "name": "cudaStreamSynchronize", "pid": 1, "tid": 1, "ts": 20.0,
                     "dur": 60.0, "args": {"correlation": 1000}})  # fmt: skip
    profile = Profile(Path("p.json"), None, host, device, {})
    runs_as_it_ran(profile, link_profile(profile)[0])


def test_a_host_trace_of_another_run_is_refused(tmp_path: Path) -> None:
    host = [
        {"cat": "cpu_op", "name": f"aten::a{i}", "pid": 1, "tid": 1, "ts": float(i), "dur": 1.0, "args": {}}
        for i in range(9)
    ]
    other = {"schema": "1.1.0", "nodes": [
        {"id": i, "name": f"aten::b{i}", "ctrl_deps": 1, "inputs": {}, "outputs": {}, "attrs": []} for i in range(1, 9)
    ]}  # fmt: skip
    (tmp_path / "et.json").write_text(json.dumps(other))
    with pytest.raises(TraceFileError, match=r"no host trace of this profile's run: 0% of its operators"):
        match_host(host, read_trace(tmp_path / "et.json"), tmp_path / "et.json")


def test_what_is_no_profile_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.json.gz"
    bad.write_bytes(gzip.compress(b'{"traceEvents": [{"ph": "X"'))
    assert main(["trace", "link", f"path={bad}", f"output={tmp_path / 'o'}"]) == 2
    assert main(["trace", "analyse", f"path={bad}"]) == 2
    (tmp_path / "none.json").write_text('{"traceEvents": []}')
    assert main(["trace", "link", f"path={tmp_path / 'none.json'}", f"output={tmp_path / 'o'}"]) == 2
    assert capsys.readouterr().err.count("\n") == 3


def event(category: str, name: str, at_us: float, us: float, **arguments: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": at_us, "dur": us, "args": arguments}


LAUNCHES = [event("cuda_runtime", "cudaLaunchKernel", 10.0 * i, 9.0, correlation=i) for i in range(4)]
COUNTERS = [event("cuda_profiler_range", "kernel_name_0", 10.0 * i, 5.0, smsp__inst_executed=9) for i in range(4)]
OPERATORS = [event("cpu_op", "aten::mm", 10.0 * i, 9.0) for i in range(4)]
CCP = [event("mtia_ccp_events", "FC", 10.0 * i, 5.0) for i in range(3)]


@pytest.mark.parametrize(
    ("events", "says"),
    [
        (LAUNCHES + COUNTERS, "4 calls of the host that launch or copy; 4 cuda_profiler_range, which opcast does not"),
        (OPERATORS + CCP, "3 mtia_ccp_events, which opcast does not read"),
        ([*OPERATORS, event("gpu_memcpy", "Memcpy HtoD", 5.0, 1.0, stream=7)], "1 copies"),
    ],
)
def test_a_profile_without_kernels_of_a_device_says_so(
    events: list[dict[str, Any]], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Host time is not shown as compute, in text, JSON, page and linked traces."""
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert main(["trace", "link", f"path={path}", f"output={tmp_path / 'linked'}"]) == 0
    assert f"no kernels were recorded ({says}" in capsys.readouterr().err
    for given_path in (path, tmp_path / "linked"):
        page = tmp_path / "page.html"
        assert main(["trace", "analyse", f"path={given_path}", "format=json", f"report={page}"]) == 0
        (rank,) = json.loads(capsys.readouterr().out)["by_rank"]
        assert rank["blind"]
        assert f"no kernels were recorded ({says}" in rank["note"]
        assert rank["compute_us"] <= 1.0  # the copy
        assert says.partition(",")[0] in page.read_text()
        assert main(["trace", "analyse", f"path={given_path}"]) == 0
        assert capsys.readouterr().out.count("not recorded") == 3
    explained = ["trace", "explain", f"predicted={tmp_path / 'linked'}", f"measured={path}"]
    assert main(explained) == 2
    assert "no kernels were recorded" in capsys.readouterr().err


def test_categories_that_are_not_read_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernels = [event("kernel", "gemm", 10.0 * i + 9, 5.0, correlation=i, stream=7, device=0) for i in range(4)]
    (tmp_path / "p.json").write_text(json.dumps({"traceEvents": LAUNCHES + kernels + CCP}))
    assert main(["trace", "analyse", f"path={tmp_path / 'p.json'}", "format=json"]) == 0
    (rank,) = json.loads(capsys.readouterr().out)["by_rank"]
    assert (rank["note"], rank["blind"]) == ("opcast does not read 3 mtia_ccp_events of it", False)
    assert rank["compute_us"] == pytest.approx(20.0)


def test_a_run_on_a_processor_needs_no_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    beside = [event("cuda_runtime", "cudaGetDeviceCount", 1.0, 1.0), event("python_function", "train", 0.0, 40.0)]
    (tmp_path / "p.json").write_text(json.dumps({"traceEvents": OPERATORS + beside}))
    assert main(["trace", "analyse", f"path={tmp_path / 'p.json'}", "format=json"]) == 0
    (rank,) = json.loads(capsys.readouterr().out)["by_rank"]
    assert (rank["note"], rank["blind"]) == ("", False)
    assert rank["compute_us"] > 30.0


def test_gaps_are_no_work() -> None:
    host = [
        {"cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": at, "dur": 1.0, "args": {}} for at in (0.0, 9.0)
    ]
    trace, report = link_profile(Profile(Path("p.json"), None, host, [], {}))
    assert [trace.name_of(row) for row in range(len(trace))] == ["aten::mm", GAP, "aten::mm"]
    assert report.gap_us == 8.0
    assert account(trace, 0, *recorded_times(trace)).compute_us == 2.0  # the operators, on a processor alone


SMALL = ("chakra/1.0.2-chakra.0.0.4.tgz", "chakra/feeder_tests_trace.tar.gz", "chakra/json_trace.tar.gz",
         "hta/benchmark_simple_add_et.json.gz", "hta/benchmark_simple_add_trace.json.gz", "hta/triton_example.json.gz",
         "param/pt2_et.json.tar.gz", "tracelens/sglang_Qwen3-8B_decode.json.gz",
         "tracelens/mi300x_resnet_act_checkpoint.json.gz", "tracelens/mi300x_torch_compile_triton.json.gz")  # fmt: skip


@pytest.mark.reference
@pytest.mark.slow
def test_real_traces_are_read_converted_and_simulated(root: Path, reference_data: Path, tmp_path: Path) -> None:
    """The benchmark of all real traces, on the small ones: those of RCCL do not say which collective they are."""
    for name in SMALL:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(reference_data / "data" / "traces" / name)
    script = [sys.executable, "-P", str(root / "tests" / "benchmarks" / "real_traces.py"), str(tmp_path), "--json"]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == len(SMALL) + 1  # one archive holds two
    assert sum(each["matched"] != "" for each in found) == 1
    assert max(abs(each["communication_off"]) for each in found) < 0.02
