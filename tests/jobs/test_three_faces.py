"""The same question through the command line, Python and HTTP has the same answer, figure by figure.

Questions are drawn at random from a table of what may be asked; what is left out of a question is every face's default.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient

import opcast
from opcast.jobs import questions, sweeping
from opcast.jobs.cli import main
from opcast.jobs.composing import as_override, compose
from opcast.jobs.questions import sources_of
from opcast.jobs.resolve import request_of
from opcast.jobs.service import bodies
from opcast.jobs.service.app import create_app
from opcast.jobs.service.settings import ServiceSettings
from opcast.simulator.question.calibration import SHIPPED
from opcast.simulator.question.sources import Sources
from opcast.simulator.serving.studies import sweep_values, ways_values

SEED, FEW, QUESTIONS = 20261126, 3, 60
SLOW_VERBS = ("serving", "search", "search serving", "posttrain")  # three questions take ten seconds and more
IN_EVERY_RUN = {
    "search": 4,
    "search serving": 4,
    "serving": 4,
    "fleet": 3,
    "posttrain": 4,
}  # of verbs whose answers take long; of others as below
USUALLY = 8  # each is answered three times; all of them: --every-model
TIMES = ("wall_time_s",)  # what an answer says of itself
Drawn = dict[str, tuple[str, tuple[Any, ...]]]  # name in Python and HTTP -> words of the command line, values


@dataclass(frozen=True)
class Verb:
    """What is asked of a verb: in each question ``base``, and of ``drawn`` some at random."""

    words: str
    path: str
    base: dict[str, tuple[str, Any]]
    drawn: Drawn
    most: int = 4


STEP: Drawn = {
    "precision": ("precision", ("bf16", "fp8", "fp16")),
    "power_cap_w": ("power_cap_w", (300, 450)),
    "price_per_gpu_hour": ("price_per_gpu_hour", (2.5,)),
    "calibration": ("calibration", ("none", "shipped", "own")),
    "backend": ("backend", ("torch",)),
    "engines": ("engine.order", (["network", "analytical"], ["measured", "network", "analytical"])),
}
LAYOUT: Drawn = {
    "tp": ("parallel.tp", (1, 2, 4)),
    "pp": ("parallel.pp", (1, 2)),
    "nodes": ("cluster.nodes", (1, 2)),
    "nic_gbps": ("cluster.nic_gbps", (25.0,)),
    "stack": ("stack", ("megatron", "torch", "trtllm", "vllm")),
    "options": ("options", ({"cuda_graph": True},)),
    "stragglers": ("stragglers", ([{"device": 1, "slowdown": 1.5}],)),
    "network": ("network", ("analytical", "auto")),
}
TRAINED: Drawn = {
    "seq_len": ("workload.seq_len", (128, 256)),
    "micro_batch": ("workload.micro_batch", (1, 2)),
    "recompute": ("workload.recompute", ("none", "full")),
    "zero_stage": ("parallel.zero_stage", (0, 1, 3)),
    "lora_rank": ("workload.lora_rank", (8,)),
    "offload": ("offload", (["optimizer"],)),
    "fault_draw": ("fault_draw", ({"count": 1, "seed": 1, "bandwidth": 0.5},)),
}
TRAFFIC: Drawn = {
    "traffic": (
        "traffic",
        (
            {"requests": 40, "rate": 20.0},
            {"requests": 40, "arrival": "closed", "concurrency": 8},
            {"requests": 40, "rate": 40.0, "input": {"kind": "uniform", "low": 100, "high": 900}},
            {"requests": 40, "arrival": "gamma", "cv": 3.0, "seed": 3},
            {"requests": 40, "arrival": "daily", "rate": 20.0, "day_s": 4.0, "swing": 0.8},
        ),
    ),
    "scheduler": (
        "scheduler",
        (
            {"policy": "sglang", "mixed_chunk": True},
            {"policy": "trtllm"},
            {"max_seqs": 8, "max_tokens": 512},
            {"policy": "sarathi", "chunk": 256},
            {"prefix_caching": True},
        ),
    ),
    "slo": ("slo", ({"ttft_ms": 100.0}, {"tpot_ms": 20.0, "share": 0.5})),
    "replicas": ("replicas", (2, 3)),
    "router": ("router", ("random", "least_outstanding", "scorers")),
    "speculation": ("speculation", ({"tokens": 2}, {"tokens": 3, "acceptance": 0.5})),
    "intervals": ("intervals", (False,)),
    "attention_dp": ("attention_dp", (2,)),
    "lora": ("lora", ({"adapters": 5, "max_loras": 2, "gib": 0.1, "adapter_us": 100.0, "token_us": 1.0},)),
    "eplb": ("eplb", ({"drift": 100, "experts": 16, "ranks": 4, "token_us": 20.0},)),
    "images": ("images", ({"share": 0.5, "encode_ms": 20.0},)),
}
SEARCHED: Drawn = {
    "objectives": ("objectives", (["tokens_per_s"], ["step_time", "cost"])),
    "constraints": ("constraints", (["peak_gib <= 60"],)),
    "top": ("top", (3,)),
    "prune": ("prune", ([], ["memory"])),
    "noise_floor": ("noise_floor", (0.0, 0.1)),
    "exhaustive_up_to": ("exhaustive_up_to", (100,)),
    "seed": ("seed", (1,)),
    "seq_len": ("workload.seq_len", (128,)),
    **{name: STEP[name] for name in ("precision", "power_cap_w", "price_per_gpu_hour", "calibration")},
}
SERVED: Drawn = {
    "input_len": ("input_len", (256, 2000)),
    "output_len": ("output_len", (32,)),
    "slo": ("slo", ({"tpot_ms": 20.0},)),
    "link_gbps": ("link_gbps", (25.0,)),
    "link_us": ("link_us", (100.0,)),
    "objectives": ("objectives", (["ttft", "tpot"],)),
    "constraints": ("constraints", (["kv_share <= 0.9"],)),
    "top": ("top", (3,)),
    "noise_floor": ("noise_floor", (0.1,)),
    "confirm": ("confirm", (1,)),
    **{name: STEP[name] for name in ("precision", "price_per_gpu_hour", "calibration")},
}
POST_TRAINED: Drawn = {
    **{name: STEP[name] for name in ("precision", "price_per_gpu_hour")},
    **{name: TRAINED[name] for name in ("micro_batch", "recompute", "lora_rank")},
    "tp": ("parallel.tp", (1, 2)),
    "method": ("method", ("sft", "dpo", "ppo", "grpo")),
    "responses": ("responses", (2, 4)),
    "rollout": (
        "rollout",
        ({"tp": 2}, {"kv_fraction": 0.5, "token_us": 16.0}, {"engine": "sglang", "async_scheduling": False}),
    ),
    "reward": ("reward", ({"seconds": 3.0}, {"model": "tiny_llama_100m"})),
    "placement": ("placement", ("apart", "search")),
    "kl": ("kl", (0.0,)),
    "partial": ("partial", (0.5,)),
    "epochs": ("epochs", (2,)),
    "packing": ("packing", ("bins", "none")),
    "log_prob_micro_batch": ("log_prob_micro_batch", (2,)),
    "offload_gbps": ("offload_gbps", (4.0,)),
    "swap_reference": ("swap_reference", (True,)),
    "sync_tensor_us": ("sync_tensor_us", (2000.0,)),
    "energy": ("energy", ({"pue": 1.3, "node_w": 2000.0, "grid_g_per_kwh": 350.0},)),
}
PLANNED: Drawn = {
    "checkpoint": (
        "checkpoint",
        ({"every_steps": 100}, {"store_gbps": 1.0, "asynchronous": True}, {"every_minutes": 5.0, "size_gb": 30.0}),
    ),
    "failures": ("failures", ({"fleet": "opt_175b"}, {"per_node_year": 40.0, "spread": 0.2}, {"fleet": "none"})),
    "restart": ("restart", ({"minutes": 30.0, "manual_share": 0.5},)),
    "ramp": ("ramp", ({"start": 16, "increment": 16, "sequences": 4000},)),
    "evaluation": ("evaluation", ({"every_steps": 50, "sequences": 64},)),
    "energy": ("energy", ({"pue": 1.3, "grid_g_per_kwh": 350.0, "node_w": 2000.0},)),
    "slow": ("slow", ({"per_node_year": 20.0},)),
    "spares": ("spares", (1,)),
    "seed": ("seed", (7,)),
    "price_per_gpu_hour": STEP["price_per_gpu_hour"],
}
TINY = ("model", "tiny_llama_100m")
NODE = ("cluster", "dgx_h100")
MEMORY = ("kv", {"blocks": 4000})
LAW = ("law", {"base_us": 5000, "decode_us": 20, "prefill_token_us": 60})
OF_SPACE = {"tp": [1, 2], "pp": [1], "micro_batch": [1, 2], "recompute": ["none"]}
VERBS = {
    "simulate": Verb("simulate", "/v1/simulate", {"model": TINY, "cluster": NODE}, {**STEP, **LAYOUT, **TRAINED}),
    "decode": Verb(
        "simulate",
        "/v1/simulate",
        {"model": TINY, "device": ("device", "h100_sxm"), "workload": ("workload", "decode")},
        {
            **STEP,
            "batch": ("workload.batch", (1, 8)),
            "input_len": ("workload.input_len", (100, 2000)),
            "cache": ("workload.cache", ("static",)),
            "expert_load": ("workload.expert_load", ("zipf:0.5",)),
            "kv_dtype": ("precision.kv_dtype", ("fp8",)),
        },
    ),
    "law": Verb(
        "serving",
        "/v1/serving",
        {"law": LAW, "kv": MEMORY, "traffic": ("traffic", {"requests": 30})},
        TRAFFIC,
    ),
    "fleet": Verb(
        "serving",
        "/v1/serving",
        {
            "law": LAW,
            "kv": MEMORY,
            "traffic": ("traffic", {"requests": 30, "arrival": "daily", "rate": 20.0, "day_s": 2.0, "swing": 0.8}),
            "failures": ("failures", {"mtbf_h": 0.0005, "repair_s": 0.2, "requests": "migrate"}),
            "cold_start": ("cold_start", {"store_gbps": 2.0, "weights_gb": 0.5, "engine_s": 0.1}),
        },
        {
            "second_kind": ("second_kind", ({"replicas": 2, "max_seqs": 4}, {"replicas": 1, "max_tokens": 512})),
            "autoscale": ("autoscale", ({"policy": "queue", "target": 2.0, "max_replicas": 4, "interval_s": 0.5},)),
            "router": TRAFFIC["router"],
            "slo": TRAFFIC["slo"],
        },
    ),
    "serving": Verb(
        "serving",
        "/v1/serving",
        {
            "model": TINY,
            "device": ("device", "h100_sxm"),
            "kv": MEMORY,
            "traffic": ("traffic", {"requests": 30, "rate": 10.0}),
        },
        {
            **{name: TRAFFIC[name] for name in ("slo", "replicas", "router", "intervals")},
            "traffic": ("traffic", TRAFFIC["traffic"][1][:2]),
            "scheduler": ("scheduler", ({"policy": "trtllm"}, {"prefix_caching": True})),
            "price_per_gpu_hour": STEP["price_per_gpu_hour"],
            "decode_pool": ("decode_pool", ({"replicas": 1, "link_us": 50.0},)),
        },
    ),
    "search": Verb(
        "search",
        "/v1/search",
        {"model": TINY, "cluster": NODE, "global_batch": ("workload.global_batch", 16), "space": ("space", OF_SPACE)},
        SEARCHED,
    ),
    "compare": Verb(
        "compare",
        "/v1/compare/chips",
        {"model": TINY, "cluster": NODE, "others": ("others", ["dgx_h200"])},
        {
            "power_caps_w": ("power_caps_w", ([500, 300],)),
            "prices": ("prices", ({"dgx_h100": 2.0}, {"dgx_h100": 2.0, "dgx_h200": 3.0})),
            "price_per_kwh": ("price_per_kwh", (0.1,)),
            "pue": ("pue", (1.2,)),
            "measure_minutes": ("measure_minutes", (0, 10.0)),
            "price_per_gpu_hour": STEP["price_per_gpu_hour"],
            "precision": STEP["precision"],
            "workload": ("workload", ("train", "decode", "generate")),
            "tp": LAYOUT["tp"],
        },
    ),
    "upgrade": Verb(
        "upgrade",
        "/v1/upgrade",
        {"model": TINY, "device": ("device", "h100_sxm")},
        {
            "changes": ("changes", (["nccl"], ["cublas", "triton"])),
            "minutes": ("minutes", (2.0, 1.1)),
            "precision": STEP["precision"],
            "workload": ("workload", ("train", "decode", "generate")),
        },
    ),
    "plan": Verb(
        "plan",
        "/v1/plan",
        {
            "model": TINY,
            "cluster": NODE,
            "seq_len": ("workload.seq_len", 128),
            "global_batch": ("workload.global_batch", 64),
            "tokens": ("tokens", 1e11),
            "lives": ("lives", 60),
        },
        PLANNED,
    ),
    "posttrain": Verb(
        "posttrain",
        "/v1/posttrain",
        {
            "model": TINY,
            "cluster": NODE,
            "seq_len": ("workload.seq_len", 128),
            "prompts": ("prompts", 16),
            "lives": ("lives", 60),
            "batches": ("batches", 2),
            "prompt_len": ("prompt_len", {"mean": 20}),
            "response_len": ("response_len", {"mean": 60, "std": 40}),
        },
        POST_TRAINED,
    ),
    "search serving": Verb(
        "search serving",
        "/v1/search/serving",
        {
            "model": TINY,
            "cluster": NODE,
            "space": ("space", {"tp": [1, 2], "batch": [8, 16], "max_tokens": [2048], "pools": ["together"]}),
        },
        SERVED,
        2,
    ),
}
BODIES = {
    "simulate": bodies.SimulateBody,
    "serving": bodies.ServingBody,
    "search": bodies.SearchBody,
    "plan": bodies.PlanBody,
    "posttrain": bodies.PostTrainBody,
    "compare": bodies.CompareBody,
    "upgrade": bodies.UpgradeBody,
    "search_serving": bodies.ServedSearchBody,
}
CALLS: dict[str, Callable[..., Any]] = {
    "simulate": opcast.simulate,
    "serving": opcast.serving,
    "search": opcast.search,
    "plan": opcast.plan,
    "posttrain": opcast.posttrain,
    "compare": opcast.compare_chips,
    "upgrade": opcast.upgrade,
    "search serving": opcast.search_serving,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a calibration of its own, which takes twice as long as what ships."""
    made = tmp_path_factory.mktemp("faces")
    known = json.loads(SHIPPED.read_text())
    for effect in known["effects"]:
        effect["value"] += math.log(2) / 4
    (made / "calibration.json").write_text(json.dumps(known))
    return made


@pytest.fixture(scope="module")
def client(home: Path) -> Iterator[TestClient]:
    """The service in this process; the answers come from a process of its own."""
    settings = ServiceSettings(workers=1, home=str(home), sources=Sources.at(str(home)))
    with TestClient(create_app(settings), base_url="http://127.0.0.1") as made:
        yield made


def drawn(verb: Verb, chance: random.Random) -> dict[str, Any]:
    """A question: some settings with a value each, by their names in Python and HTTP."""
    names = chance.sample(sorted(verb.drawn), chance.randint(0, min(verb.most, len(verb.drawn))))
    return {name: chance.choice(verb.drawn[name][1]) for name in names}


def words(verb: Verb, asked: dict[str, Any]) -> list[str]:
    """The question as it is typed."""
    all_of_it = verb.base | {name: (verb.drawn[name][0], value) for name, value in asked.items()}
    return [word for path, value in all_of_it.values() for word in typed(path, value)]


def typed(path: str, value: Any) -> list[str]:
    """A setting as words: of a mapping a word for each value within it."""
    if isinstance(value, dict) and path not in ("fault_draw", "law"):
        return [word for name, each in value.items() for word in typed(f"{path}.{name}", each)]
    if isinstance(value, str) and ":" not in value:
        return [f"{path}={value}"]
    return [f"{path}=" + re.sub(r'"(\w+)":', r"\1: ", json.dumps(value))]


def by_command(verb: Verb, asked: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    main([*verb.words.split(), *words(verb, asked), "format=json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def by_python(verb: Verb, asked: dict[str, Any], home: Path) -> dict[str, Any]:
    given = {name: value for name, (_, value) in verb.base.items()} | asked
    try:
        found = CALLS[verb.words](given.pop("model", None), home=home, **given)
    except ValueError as error:
        return {"error": str(error)}
    plain: dict[str, Any] = found.to_dict()
    return plain


def by_http(verb: Verb, asked: dict[str, Any], client: TestClient) -> dict[str, Any]:
    body = {name: value for name, (_, value) in verb.base.items()} | asked
    found = client.post(verb.path, json=body)
    if "event-stream" not in found.headers["content-type"]:
        answer: dict[str, Any] = found.json()
        return answer if found.status_code == 200 else {"error": answer["error"]["message"]}
    kind, data = found.text.strip().split("\n\n")[-1].split("\n")
    told: dict[str, Any] = json.loads(data.removeprefix("data: "))
    return told if kind == "event: answer" else {"error": told["message"]}


def figures(answer: Any) -> Any:
    """The answer without what it says of itself, as JSON has it."""
    if isinstance(answer, dict):
        return {name: figures(value) for name, value in answer.items() if name not in TIMES}
    if isinstance(answer, (list, tuple)):
        return [figures(value) for value in answer]
    return None if isinstance(answer, float) and not math.isfinite(answer) else answer


def ask(name: str, first: int, count: int, home: Path, client: TestClient, capsys: pytest.CaptureFixture[str]) -> int:
    """Asks so many questions of a verb through all faces, from the ``first`` on; returns how many had figures."""
    verb, chance, answered = VERBS[name], random.Random(f"{SEED} {name}"), 0
    for asked in [drawn(verb, chance) for _ in range(first + count)][first:]:
        command = figures(by_command(verb, asked, capsys))
        python, http = figures(by_python(verb, asked, home)), figures(by_http(verb, asked, client))
        if "error" in command:
            assert "unexpected" not in command["error"], (asked, command)
            assert "error" in python, (asked, command["error"], python)
            assert "error" in http, (asked, command["error"], http)
            continue
        answered += 1
        assert python == command, asked
        assert http == command, asked
    return answered


def shares() -> list[Any]:
    """The questions of each verb: a few in the fast lane, some more in every run, the rest with --every-model."""
    found = []
    for name in VERBS:
        some = IN_EVERY_RUN.get(name, USUALLY)
        few = [] if name in SLOW_VERBS else [pytest.mark.essential]
        slow = pytest.mark.slow
        found.append(pytest.param(name, 0, FEW, marks=few or [slow]))
        if some > FEW:
            found.append(pytest.param(name, FEW, some - FEW, marks=slow))
        found.append(pytest.param(name, some, QUESTIONS - some, marks=[slow, pytest.mark.sibling]))
    return found


@pytest.mark.parametrize(("name", "first", "count"), shares())
def test_three_faces_agree(
    name: str,
    first: int,
    count: int,
    home: Path,
    client: TestClient,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPCAST_HOME", str(home))
    assert ask(name, first, count, home, client, capsys) > count // 2


STUDIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "capacity": (lambda **given: opcast.serving_capacity(**given).to_dict(), {"slo": {"ttft_ms": 2000, "tpot_ms": 40}}),
    "sweep": (lambda **given: sweep_values(opcast.serving_sweep(**given)), {"rates": [2.0, 20.0]}),
    "compare": (lambda **given: ways_values(opcast.serving_ways(**given)), {"replicas": 2}),
}


@pytest.mark.parametrize("what", STUDIES)
def test_three_faces_agree_on_studies_of_traffic(
    what: str, home: Path, client: TestClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPCAST_HOME", str(home))
    call, settings = STUDIES[what]
    given = {"law": LAW[1], "kv": MEMORY[1], "traffic": {"requests": 30, "rate": 10.0}} | settings
    typed_words = [word for name, value in given.items() for word in typed(name, value)]
    main(["serving", what, *typed_words, "format=json", "workers=1"])
    command = figures(json.loads(capsys.readouterr().out))
    python = figures(json.loads(json.dumps(call(home=home, **given))))
    http = client.post(f"/v1/serving/{what}", json=given)
    assert http.status_code == 200, http.text
    assert python == command
    assert figures(http.json()) == command


def test_three_faces_agree_on_power_caps(
    home: Path, client: TestClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPCAST_HOME", str(home))
    given: dict[str, Any] = {
        "model": TINY[1],
        "device": "h100_sxm",
        "kv": MEMORY[1],
        "traffic": {"requests": 20, "rate": 5.0},
    }
    given |= {"power_caps_w": [400.0], "node_w": 2000.0, "pue": 1.2}
    typed_words = [word for name, value in given.items() for word in typed("model" if name == "model" else name, value)]
    main(["serving", "caps", *typed_words, "format=json", "workers=1"])
    command = figures(json.loads(capsys.readouterr().out))
    rows = opcast.serving_caps(home=home, **given)
    assert figures(json.loads(json.dumps([row.to_dict() for row in rows]))) == command["caps"]
    assert figures(client.post("/v1/serving/caps", json=given).json()) == command


def test_three_faces_agree_on_sweeps(
    home: Path, client: TestClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OPCAST_HOME", str(home))
    fixed = {"cluster": "dgx_h100", "global_batch": 64, "steps": 2000, "step_time_s": 2.0, "lives": 20}
    given: dict[str, Any] = {"model": TINY[1], **fixed, "checkpoint": {"size_gb": 100.0}}
    axes: dict[str, list[Any]] = {"nodes": [1, 2], "checkpoint.every_minutes": [5.0, 60.0], "lives": [20, 0]}
    paths = {setting.name: setting.path for setting in questions.settings("plan")}
    typed_words = [word for name, value in given.items() if name != "lives" for word in typed(paths[name], value)]
    typed_axes = [f"{paths.get(name, name)}={','.join(map(str, values))}" for name, values in axes.items()]
    table = tmp_path / "jobs.parquet"
    assert main(["sweep", "plan", *typed_words, *typed_axes, f"table={table}", "workers=1", "format=json"]) == 0
    assert json.loads(capsys.readouterr().out)["failed"] == 4
    command = rows_told(pq.read_table(table).to_pylist())
    python = opcast.sweep("plan", axes=axes, home=home, **given)
    assert (python.points, len(python.errors)) == (8, 4)
    assert rows_told(python.to_dict()["rows"]) == command
    stream = client.post("/v1/sweep", json={"verb": "plan", "axes": axes, **given}).text
    kind, data = stream.strip().split("\n\n")[-1].split("\n")
    assert kind == "event: answer", data
    answer = json.loads(data.removeprefix("data: "))
    assert rows_told(answer["rows"]) == command
    assert answer["axes"] == ["cluster.nodes", "checkpoint.every_minutes", "lives"]


def rows_told(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a sweep without what they are known by, whole numbers as they are: a table has one type for a column."""
    kept = ({name: value for name, value in row.items() if name not in sweeping.KEYS} for row in rows)
    return [{name: value for name, value in figures(row).items() if value is not None} for row in kept]


@pytest.mark.parametrize("axes", [{"nodes": []}, {"nodse": [1]}, {"model": ["/etc/passwd"]}, {"nodes": [1] * 200_000}])
def test_a_sweep_that_cannot_be_is_refused_over_http(axes: dict[str, Any], client: TestClient) -> None:
    body = {"verb": "plan", "model": "llama3_8b", "cluster": "dgx_h100", "steps": 10, "step_time_s": 1.0, "axes": axes}
    found = client.post("/v1/sweep", json=body)
    said = found.text
    assert found.status_code in (400, 422) or "event: error" in said
    assert "unexpected" not in said


@pytest.mark.parametrize("name", VERBS)
def test_three_faces_make_one_request(name: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same before anything is simulated: what costs minutes to answer is asked in milliseconds."""
    monkeypatch.setenv("OPCAST_HOME", str(home))
    verb, chance = VERBS[name], random.Random(f"{SEED} request of {name}")
    verb_name, server = verb.words.replace(" ", "_"), ServiceSettings(home=str(home), sources=Sources.at(str(home)))
    module = import_module(f"opcast.jobs.{verb_name}")
    for _ in range(2 * FEW):
        asked = drawn(verb, chance)
        given = {name: value for name, (_, value) in verb.base.items()} | asked
        try:
            given_words = getattr(module, "words", list)(words(verb, asked))
            command = request_of(verb_name, compose(verb_name, [as_override(module, word) for word in given_words]))
        except ValueError:
            continue
        sources = sources_of(verb_name, given, server.sources, server.home)
        python = questions.request_of(verb_name, given, sources)
        http = bodies.question_of(verb_name, BODIES[verb_name](**given), server)
        assert told(python) == told(command), asked
        assert told(http) == told(command), asked


def told(request: Any) -> Any:
    """A request as plain values; a model and a device are their names, however a face looked them up."""

    def named(value: Any) -> Any:
        if isinstance(value, dict):
            found = {name: named(each) for name, each in value.items()}
            for name in ("model", "device"):
                if isinstance(found.get(name), dict):
                    found[name] = found[name].get("id") or found[name].get("name")
            return found
        return [named(each) for each in value] if isinstance(value, list) else value

    return named(request.to_dict())
