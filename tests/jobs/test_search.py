"""``opcast search``: what cannot be asked ends with one line and exit code 2; an answer is one object."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opcast.jobs import resolve
from opcast.jobs.cli import main
from opcast.jobs.composing import compose

STEP = "model=llama3_8b cluster=dgx_h100 workload.global_batch=64"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("model=llama3_8b workload.global_batch=8", "cluster"),
        ("model=llama3_8b cluster=dgx_h100", "a search needs one batch for all layouts"),
        (f"{STEP} space.rules=['tp>9']", "none of 504 points meets the rule 'tp>9'"),
        (f"{STEP} space.rules=['tp>4'] constraints=['tp<3']", "no point can meet both"),
        (f"{STEP} space.tp=[0]", "space.tp=0 must be a whole number of at least 1"),
        (f"{STEP} space.tq=[1]", "did you mean space.tp"),
        (f"{STEP} space.tp=3", "the space is empty: "),
        (f"{STEP} parallel.tp=2", "parallel.tp=2 is an axis of the search"),
        (f"{STEP} objectives=[fast]", "objectives='fast' is not one of"),
        (f"{STEP} framework=megatron", "framework=megatron is none that trains"),
        (f"{STEP} workers=-1", "workers=-1 must be a whole number"),
        (f"{STEP} report=/no/such/place.html", "there is no folder"),
        ("compare 1", "`opcast search compare` needs two points"),
        (f"compare tp=1 {STEP}", "`opcast search compare` needs two points"),
        ("compare=[1] " + STEP, "compare=[1] must be two points"),
        (f"compare 1 2 {STEP}", "name its folder with points=FOLDER"),
        (f"compare tp=1 tp=x {STEP}", "tp=x must be a whole number"),
    ],
)
def test_what_cannot_be_asked(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", *words.split()]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.slow
def test_an_answer_is_one_object_with_a_page_and_a_launch_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = f"space.tp=1 space.pp=1 space.micro_batch=1 workers=1 report={tmp_path}/a.html launch={tmp_path}/a.txt"
    assert main(["search", *STEP.split(), *own.split(), f"points={tmp_path}/found", "format=json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["evaluated"] + found["pruned"] == found["points"]
    assert found["best"][0]["rank"] == 1
    assert "--micro-batch-size 1" in (tmp_path / "a.txt").read_text()
    assert 100_000 < (tmp_path / "a.html").stat().st_size < 1_500_000
    launch = f"launch={tmp_path}/a.txt"
    assert main(["simulate", launch, "cluster=dgx_h100", "format=json"]) == 0
    back = json.loads(capsys.readouterr().out)
    assert (back["step_time_s"], back["memory"]["peak_gib"]) == (
        found["best"][0]["step_time_s"],
        found["best"][0]["peak_gib"],
    )
    assert main(["simulate", launch, "cluster=dgx_h100", "model=llama3_70b"]) == 2
    assert "starts another model than llama3_70b" in capsys.readouterr().err
    script = tmp_path / "a.txt"
    script.write_text(script.read_text().replace("(dgx_h100)", "(mine)"))
    assert main(["simulate", launch]) == 2
    assert "add cluster=dgx_h100" in capsys.readouterr().err
    assert list((tmp_path / "found").glob("part-*.parquet"))


SERVED = "serving model=llama3_8b cluster=dgx_h100"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("serving model=llama3_8b", "a search needs a cluster"),
        (f"{SERVED} space.tp=3", "the space is empty: "),
        (f"{SERVED} space.tq=[1]", "did you mean space.tp"),
        (f"{SERVED} space.ratio=['a']", "must be replicas that prefill and that decode"),
        (f"{SERVED} objectives=[goodput]", "objectives=[goodput] needs what users expect"),
        (f"{SERVED} constraints=['ttft_ms<1'] space.rules=['tp>batch+']", "is no expression"),
        (f"{SERVED} crew.engine=mpi", "crew.engine"),
        (f"{SERVED} points=/no/such/place.parquet", "there is no folder"),
        ("serving compare 1", "needs two ways: ranks, or settings such as 'tp=2 batch=64'"),
        ("serving compare tp=1 model=llama3_8b cluster=dgx_h100", "`opcast search serving compare` needs two ways"),
        (f"{SERVED} compare=[1]", "compare=[1] must be two ways"),
        ("serving compare 1 2 model=llama3_8b cluster=dgx_h100", "name its file with points=FILE"),
        ("serving compare tp=1 tp=x model=llama3_8b cluster=dgx_h100", "tp=x must be a whole number"),
        (f"{STEP} crew.engine=dask", "crew.engine"),
        ("serving model=llama3_8b cluster=dgx_h100 framework=tgi", "framework=tgi is none that serves"),
    ],
)
def test_what_cannot_be_asked_of_serving(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", *words.split()]) == 2
    assert says in capsys.readouterr().err


def test_where_all_points_are_left_out_the_answer_says_why_and_the_code_is_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    too_large = f"serving model=llama3_70b cluster=dgx_h100 space.tp=1 space.batch=8 home={tmp_path} format=json"
    assert main(["search", *too_large.split()]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["best"], found["evaluated"], found["pruned"]) == ([], 0, found["points"])
    assert "no point of the space can run" in found["error"]
    assert "leave no KV memory" in found["pruned_by"]["memory"]["why"]


@pytest.mark.parametrize(
    ("words", "policies"),
    [
        ("framework=sglang", ("sglang",)),
        ("framework=llm-d", ("vllm",)),
        ("framework=kubernetes", ()),
        ("framework=sglang space.policy=vllm", ("vllm",)),
    ],
)
def test_a_framework_says_whose_policy_is_searched(words: str, policies: tuple[str, ...]) -> None:
    config = compose("search_serving", f"model=llama3_8b cluster=dgx_h100 {words}".split())
    assert resolve.request_of("search_serving", config).space.policy == policies


@pytest.mark.slow
def test_ways_to_serve_are_one_object_with_a_page_and_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = "space.tp=[1,2] space.batch=[8,32] space.max_tokens=2048 input_len=256 output_len=64"
    out = f"points={tmp_path}/p.parquet report={tmp_path}/a.html format=json"
    out += f" launch={tmp_path}/a.yaml framework=kubernetes"
    assert main(["search", *SERVED.split(), *own.split(), *out.split()]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["evaluated"] + found["pruned"] == found["points"]
    assert found["best"][0]["rank"] == 1
    assert "kind: Deployment" in (tmp_path / "a.yaml").read_text()
    assert 100_000 < (tmp_path / "a.html").stat().st_size < 1_500_000
    assert (tmp_path / "p.parquet").is_file()
