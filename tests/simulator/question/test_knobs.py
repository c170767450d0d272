"""Every knob turns something: each field of a plan, a framework and a workload, and each option, changes an answer.

``KNOBS`` has a row for each: a setting, the case in which it matters, and the value that it takes. A knob without a row
fails, and so does a row whose answer stays as it was. A new knob needs a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from opcast.datasets.clusters import load_cluster
from opcast.datasets.devices import load_device
from opcast.simulator.engines import build_engine
from opcast.simulator.passes.reorder import reorder
from opcast.simulator.question.kernels import KernelChoice, MatVec, ReducedNorm, Unpacking
from opcast.simulator.question.options import CHECKS, OF_INFERENCE, OF_TRAINING, PlanOptions, table
from opcast.simulator.question.plan import Parallel, Plan, PlanError, Stack, load_stack
from opcast.simulator.question.work import Work
from opcast.simulator.simulate import simulate
from opcast.simulator.trace.stored_formats import ModuleRule, WeightFormat

H100 = load_device("h100_sxm")
NODE = load_cluster("dgx_h100")
SHIPPED = Path(__file__).resolve().parents[3] / "models" / "shipped"
LLAMA = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8}
DROPPED = ("wall_time_s", "parallel", "precision", "workload", "timeline")  # what a report repeats of its question


@dataclass(frozen=True)
class Case:
    """A small question: the model's family, how it is run, and who answers."""

    family: str = "llama"
    kind: str = "train"
    stack: str = "torch"
    nodes: int = 1
    predicted: bool = False
    parallel: Mapping[str, Any] = field(default_factory=dict)
    framework: Mapping[str, Any] = field(default_factory=dict)
    work: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)

    def with_(self, part: str, name: str, value: Any) -> Case:
        """The case with one setting of a part changed."""
        if part == "options":
            return replace(self, plan={**self.plan, "options": {**self.plan.get("options", {}), name: value}})
        return replace(self, **{part: {**getattr(self, part), name: value}})


TRAIN, DECODE = Case(), Case(kind="decode", stack="vllm")
MANY = {"prompts": ((32, 0),) * 64, "decodes": ((4, 99),)}
SERVED = Case(kind="batch", stack="vllm", work={"prompts": ((64, 64),), "decodes": ((4, 99),)})
PROMPT = Case(kind="prefill", stack="vllm")
MOE = Case("qwen3_moe", parallel={"ep": 4}, stack="megatron")
SEEING = Case("mistral3", kind="prefill", stack="vllm", work={"images": 1, "image_px": 32})
FSDP = Case(parallel={"zero_stage": 3})
BESIDE = Case(  # exchanges of keys and gathers of weights at a time
    parallel={"cp": 4, "zero_stage": 3},
    framework={"overlap": ("cp", "dp"), "cuda_graph": True, "gap_us": 0.0},
    work={"seq_len": 1024},
)
PIPELINE = Case(parallel={"pp": 2}, work={"global_batch": 32})
CONTEXT = Case(parallel={"cp": 4}, work={"seq_len": 1024})
ON_HOST = replace(FSDP, plan={"offload": ("optimizer",)})

Row = tuple[Case, Any]
KNOBS: dict[str, dict[str, Row]] = {
    "parallel": {
        "tp": (TRAIN, 2),
        "pp": (TRAIN, 2),
        "vpp": (PIPELINE, 2),
        "dp": (replace(TRAIN, parallel={"tp": 2}), 2),  # refused: four of eight devices would have nothing to do
        "cp": (replace(CONTEXT, parallel={}), 2),
        "ep": (replace(MOE, parallel={}), 4),
        "etp": (MOE, 2),
        "zero_stage": (TRAIN, 3),
        "shard": (FSDP, 2),
        "sequence_parallel": (Case(parallel={"tp": 4}), True),
        "schedule": (PIPELINE, "gpipe"),
        "cp_style": (CONTEXT, "allgather"),
        "stages": (PIPELINE, (1, 3)),
        "order": (replace(TRAIN, nodes=2, parallel={"tp": 4, "pp": 2}), "tp-cp-pp-dp"),
        "placement": (replace(TRAIN, nodes=2, parallel={"tp": 4}), "round_robin"),
    },
    "framework": {
        "fusion": (TRAIN, ("rms_norm",)),
        "attention": (TRAIN, "unfused"),
        "products": (replace(TRAIN, framework={"cuda_graph": True}), "cublas_12_1"),
        "int8_results": (
            replace(PROMPT, family="bert", stack="fastertransformer_fused", plan={"quantization": "int8"}),
            "int32",
        ),
        "layouts": (replace(TRAIN, framework={"cuda_graph": True}), ("qkv",)),
        "all_logits": (PROMPT, True),
        "master_weights": (TRAIN, True),
        "half_shards": (replace(FSDP, framework={"master_weights": True}), True),
        "host_bytes": (ON_HOST, 46.0),
        "host_threads": (ON_HOST, 8),
        "loss": (TRAIN, "chunks:4"),
        "gradient_dtype": (TRAIN, "fp32"),
        "moment_dtype": (TRAIN, "fp32"),
        "fused_gradients": (Case(framework={"gradient_dtype": "fp32"}, work={"global_batch": 16}), True),
        "converts_gradients": (Case(framework={"gradient_dtype": "fp32"}, work={"global_batch": 16}), True),
        "gradient_clipping": (TRAIN, True),
        "repeats_keys": (replace(CONTEXT, family="qwen3_moe", framework={"cuda_graph": True}), True),
        "rounds_both": (replace(TRAIN, plan={"quantization": "fp8"}, framework={"cuda_graph": True}), True),
        "keep_gathered": (Case(parallel={"tp": 4, "sequence_parallel": True}), True),
        "adapter_exchange": (
            Case(parallel={"tp": 4, "sequence_parallel": True}, work={"lora_rank": 8}, framework={"cuda_graph": True}),
            "gather",
        ),
        "overlap": (FSDP, ()),
        "tensor_chunks": (
            Case(parallel={"tp": 4, "sequence_parallel": True}, framework={"overlap": ("tp",), "cuda_graph": True}),
            False,
        ),
        "bucket_mib": (Case(framework={"overlap": ("dp",), "cuda_graph": True}), 0.1),
        "bucket_buffer": (FSDP, True),
        "compute_slowdown": (Case(parallel={"zero_stage": 3}, framework={"overlap": ("dp",), "cuda_graph": True}), 2.0),
        "communication_slowdown": (
            Case(parallel={"zero_stage": 3}, framework={"overlap": ("dp",), "cuda_graph": True}),
            2.0,
        ),
        "cuda_graph": (TRAIN, True),
        "recompute_early_stop": (replace(TRAIN, plan={"recompute": "full"}), False),
        "gap_us": (TRAIN, 3.0),
        "eager": (replace(TRAIN, stack="megatron"), True),
        "issue_us": (TRAIN, {"*": 50.0}),
        "prompt_issue_us": (PROMPT, 80.0),
        "check_us": (Case(nodes=2, work={"global_batch": 16}), 100.0),
        "check_inside_us": (Case(parallel={"tp": 4}, framework={"check_us": 1.0}), 100.0),
        "share_us": (Case(parallel={"zero_stage": 1}, framework={"overlap": ("dp",)}), 100.0),
        "ring_factor": (Case(parallel={"tp": 4, "sequence_parallel": True}, framework={"cuda_graph": True}), 1.5),
        "step_us": (replace(TRAIN, nodes=2, parallel={"tp": 4}), {"*": 100.0, "all_reduce": 100.0}),
        "send_us": (PIPELINE, 500.0),
        "waits_for_routing": (replace(MOE, stack="torch"), True),
        "ep_mode": (MOE, "alltoall"),
        "backend": (replace(DECODE, predicted=True), "trtllm"),
        "kernels": (replace(DECODE, predicted=True), (KernelChoice("gemm", "bf16", "trtllm:torch_flow", "a test"),)),
        "mat_vecs": (replace(DECODE, predicted=True), (MatVec(16, 0.05, "a test", most_rows=256),)),
        "unpackings": (
            replace(DECODE, predicted=True, plan={"quantization": "w4a16"}, work={"batch": 64}),
            (Unpacking(0.01, "a test"),),
        ),
        "packs_head": (replace(DECODE, plan={"quantization": "w8a16"}), True),
        "reduced_norms": (replace(DECODE, parallel={"tp": 2}, stack="vllm"), (ReducedNorm("a test", ranks=4),)),
        "collectives": (replace(DECODE, predicted=True, parallel={"tp": 8}), "trtllm"),
        "kv_dtype": (replace(DECODE, plan={"quantization": "fp8"}), {"fp8": "fp8"}),
        "windows": (replace(DECODE, family="gemma2", work={"input_len": 64}), "alike"),
        "context_gib": (TRAIN, 3.0),
        "fragmentation": (TRAIN, 0.5),
        "step_overhead_us": (TRAIN, 1000.0),
        "scale": (TRAIN, {"h100_sxm": {"*": 2.0}}),
    },
    "work": {
        "prompts": (SERVED, ((64, 0),)),
        "decodes": (SERVED, ((16, 100),)),
        "samples": (replace(SERVED, predicted=True, work=MANY), 1),
        "padded_tokens": (SERVED, 512),
        "kind": (TRAIN, "prefill"),
        "seq_len": (TRAIN, 128),
        "micro_batch": (Case(work={"global_batch": 16}), 2),
        "global_batch": (TRAIN, 16),
        "batch": (DECODE, 16),
        "input_len": (DECODE, 512),
        "output_len": (replace(DECODE, kind="generate"), 9),
        "cache": (replace(DECODE, stack="torch"), "static"),
        "expert_load": (MOE, "zipf:1"),
        "data_loading_ms": (TRAIN, 5.0),
        "frozen": (TRAIN, "mlp"),
        "lora_rank": (TRAIN, 8),
        "lora_modules": (replace(TRAIN, work={"lora_rank": 8}), "proj"),
        "lora_dropout": (replace(TRAIN, work={"lora_rank": 8}), 0.1),
        "mtp_layers": (TRAIN, 1),
        "images": (SEEING, 2),
        "image_px": (SEEING, 64),
    },
    "plan": {
        "micro_batches": (replace(DECODE, parallel={"pp": 2}), 2),
        "recompute": (TRAIN, "full"),
        "offload": (TRAIN, ("optimizer",)),
        "precision": (TRAIN, "fp16"),
        "quantization": (replace(TRAIN, family="wide"), "fp8"),
        "weight_rules": (replace(DECODE, plan={"quantization": "fp8"}), (ModuleRule(WeightFormat("fp8"), ("mlp",)),)),
        "notes": (TRAIN, ("said",)),
        "kv_dtype": (DECODE, "fp8"),
        "passes": (FSDP, (f"{reorder.__module__}:reorder",)),
        "slow_devices": (TRAIN, {3: 2.0}),
        "explicit_links": (BESIDE, True),
        "calibration": (TRAIN, "shipped"),
    },
    "options": {
        "allocator": (TRAIN, "native"),
        "capacity": (MOE, 2.0),
        "cuda_graph": (TRAIN, True),
        "dispatch_dtype": (MOE, "fp8"),
        "ep_mode": (MOE, "alltoall"),
        "ep_overlap": (replace(MOE, framework={"cuda_graph": True}), True),
        "expert_load": (MOE, "zipf:1"),
        "flat_parameters": (FSDP, True),
        "attention_dtype": (replace(TRAIN, family="wide"), "fp8"),
        "fp8_params": (
            replace(TRAIN, family="wide", work={"lora_rank": 8}, plan={"quantization": "fp8"}),
            True,
        ),
        "fp8_scaling": (replace(TRAIN, family="wide", plan={"quantization": "fp8"}), "current"),
        "gather_dtype": (FSDP, "fp32"),
        "kv_dtype": (DECODE, "fp8"),
        "loss": (TRAIN, "liger"),
        "quantize_skip": (replace(TRAIN, family="wide", plan={"quantization": "fp8"}), "mlp"),
        "real_tokens": (PROMPT, 0.5),
        "recompute_early_stop": (replace(TRAIN, plan={"recompute": "full"}), False),
        "reduce_every_micro_batch": (replace(FSDP, work={"global_batch": 16}), False),
        "reshard_after_forward": (FSDP, False),
        "sampling": (PROMPT, "top_p"),
        "sequence_lengths": (CONTEXT, (512, 256, 256)),
        "token_drop": (replace(MOE, work={"expert_load": "zipf:1"}), True),
        "without": (TRAIN, ("host_issue",)),
        "zigzag": (CONTEXT, False),
    },
}
KINDS_OF_KNOB: dict[str, set[str]] = {
    "parallel": {each.name for each in fields(Parallel)},
    "framework": {each.name for each in fields(Stack)}
    - {"id", "name", "family", "sources", "multiplies"},  # what it is called, and of checkpoints (test_as_stored.py)
    "work": {each.name for each in fields(Work)},
    "plan": {each.name for each in fields(Plan)}
    - {
        "parallel",
        "cluster",
        "stack",
        "options",
        "settings",
        "calibrated",
        "context",
        "device",
    },  # own parts, and what the question says
    "options": set(CHECKS),
}
REFUSED = {("parallel", "dp"): "take parallel.dp=4"}


@lru_cache
def engine(predicted: bool, nodes: int) -> Any:
    order = ("learned", "network", "analytical") if predicted else ("network", "analytical")
    return build_engine(H100, [], [SHIPPED] if predicted else [], order, cluster=replace(NODE, nodes=nodes))


@pytest.fixture(scope="module")
def ask(small_model: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Any]:
    """A function: the answer to a case, without what only repeats the question."""
    graphs = tmp_path_factory.mktemp("graphs")
    known: dict[str, Any] = {}

    def answer(case: Case) -> Any:
        if repr(case) not in known:
            wide = {**LLAMA, "hidden_size": 2048, "intermediate_size": 8192}
            sizes = {"llama": LLAMA, "wide": wide, "bert": {"max_position_embeddings": 8192}}
            model = small_model(case.family if case.family != "wide" else "llama", 4, **sizes.get(case.family, {}))
            given = {"seq_len": 256, "global_batch": 8, "batch": 8, "input_len": 128, "output_len": 5, **case.work}
            work = Work(**{"kind": case.kind, **given})
            framework = replace(load_stack(case.stack), **case.framework)
            plan = Plan(Parallel(**case.parallel), replace(NODE, nodes=case.nodes), framework, **case.plan)
            report = simulate(model, work, plan, H100, engine(case.predicted, case.nodes), graphs)
            known[repr(case)] = {name: value for name, value in report.to_dict().items() if name not in DROPPED}
        return known[repr(case)]

    return answer


@pytest.mark.parametrize("part", KINDS_OF_KNOB)
def test_every_knob_has_a_row(part: str) -> None:
    assert set(KNOBS[part]) == KINDS_OF_KNOB[part], "add a row to KNOBS with a case in which the knob matters"


@pytest.mark.parametrize(("part", "name"), [(part, name) for part, rows in KNOBS.items() for name in rows])
def test_every_knob_turns_something(part: str, name: str, ask: Callable[[Case], Any]) -> None:
    case, value = KNOBS[part][name]
    if (part, name) in REFUSED:
        with pytest.raises(PlanError, match=REFUSED[part, name]):
            ask(case.with_(part, name, value))
        return
    assert ask(case.with_(part, name, value)) != ask(case), f"{part}.{name}={value} changes nothing in {case}"


@pytest.mark.parametrize("name", sorted(OF_TRAINING | OF_INFERENCE))
def test_options_of_one_kind_of_work_are_refused_by_the_other(name: str, ask: Callable[[Case], Any]) -> None:
    value = KNOBS["options"][name][1]
    other = DECODE if name in OF_TRAINING else TRAIN
    with pytest.raises(PlanError, match=rf"options\.{name}=.* is for {'training' if other is DECODE else 'inference'}"):
        ask(other.with_("options", name, value))


def test_the_documentation_has_the_options_with_their_help() -> None:
    said = (Path(__file__).resolve().parents[3] / "docs" / "passes.md").read_text()
    assert table() in said, "put the output of opcast.simulator.question.options.table() there"


def test_options_that_are_null_are_as_if_not_given() -> None:
    for each in fields(PlanOptions):
        given = Plan(Parallel(zero_stage=3), NODE, options={each.name: None})
        assert given.settings == PlanOptions()
        assert given.reshards_after_forward
        assert given.reduces_every_micro_batch
    assert not Plan(Parallel(), NODE, options={"zigzag": False}).settings.zigzag
    assert Plan(Parallel(), NODE, options={"mine": 1}, passes=("a:b",)).settings == PlanOptions()
