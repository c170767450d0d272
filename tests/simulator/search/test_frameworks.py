"""Every name in the tables of launch files is one that its framework's own parser or configuration has.

``OPCAST_FRAMEWORKS`` names a folder with the unpacked wheels of vllm, sglang, sglang-router, torchtitan, megatron-core
and megatron-bridge (docs/search.md says how to make one); nothing of them is imported, so that they need no GPU. A
framework that is not there is skipped. No package on PyPI has the parsers of Megatron-LM (``megatron/training``) and of
TensorRT-LLM (whose package there is a stub): they are read where a checkout of the sources lies in the folder too.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from opcast.simulator.search import accelerate
from opcast.simulator.search.architecture import megatron_model
from opcast.simulator.search.launch import MADE_UP, MEGATRON_BRIDGE, MEGATRON_LM, TORCHTITAN
from opcast.simulator.search.launch_errors import LaunchError
from opcast.simulator.search.served.dynamo import TRTLLM as DYNAMO_TRTLLM
from opcast.simulator.search.served.kubernetes import router_words
from opcast.simulator.search.served.launch import SGLANG, TRTLLM, VLLM
from opcast.simulator.trace.models import known_models, resolve

FOLDER = Path(os.environ.get("OPCAST_FRAMEWORKS", "nowhere"))
BRIDGE = {  # first part of an override -> files and classes of its fields
    "model": (
        ("megatron/core/model_parallel_config.py", "ModelParallelConfig"),
        ("megatron/core/transformer/transformer_config.py", "TransformerConfig"),
        ("megatron/bridge/models/gpt_provider.py", "GPTModelProvider"),
    ),
    "ddp": (("megatron/core/distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),),
    "train": (("megatron/bridge/training/config.py", "TrainingConfig"),),
    "checkpoint": (("megatron/bridge/training/config.py", "CheckpointConfig"),),
    "comm_overlap": (("megatron/bridge/training/comm_overlap.py", "CommOverlapConfig"),),
    "peft": (("megatron/bridge/peft/lora.py", "LoRA"),),
}


OF_THE_PARSER = {  # arguments of Megatron-LM's own parser (core 0.16) that are no fields of megatron-core or -bridge
    "--disable-bias-linear",
    "--group-query-attention",
    "--mock-data",
    "--no-gradient-accumulation-fusion",
    "--no-overlap-p2p-communication",
    "--norm-epsilon",
    "--num-virtual-stages-per-pipeline-rank",
    "--swiglu",
    "--untie-embeddings-and-output-weights",
    "--use-rope-scaling",
}


def tree(path: str) -> ast.Module:
    """The parsed file of a framework; skips where it is not there."""
    if not (FOLDER / path).is_file():
        pytest.skip(f"needs {path}: name the folder of the frameworks' checkouts in OPCAST_FRAMEWORKS")
    return ast.parse((FOLDER / path).read_text(encoding="utf-8"))


def arguments(path: str) -> set[str]:
    """What ``add_argument`` or ``option`` is called with in a file; of names made by a prefix what follows it."""
    return {name for call in ast.walk(tree(path)) if isinstance(call, ast.Call) for name in _names(call)}


def _names(call: ast.Call) -> Iterator[str]:
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in ("add_argument", "option"):
        return
    for each in call.args:
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value
        elif isinstance(each, ast.JoinedStr):
            yield "".join(part.value for part in each.values if isinstance(part, ast.Constant))


def fields(path: str, name: str) -> set[str]:
    """The annotated fields of a class."""
    classes = [node for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef) and node.name == name]
    return {
        line.target.id
        for each in classes
        for line in each.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }


def test_torchtitan_knows_its_settings() -> None:
    path = "torchtitan/config/configs.py"
    known = {"training": "TrainingConfig", "parallelism": "ParallelismConfig"}
    for name in TORCHTITAN:
        head, _, key = name.partition(".")
        assert head == "activation_checkpoint" or key in fields(path, known[head]), name


def test_vllm_knows_its_arguments() -> None:
    known = arguments("vllm/engine/arg_utils.py") | arguments("vllm/entrypoints/common/cli_args.py")
    made = {"--" + each.replace("_", "-") for each in fields("vllm/entrypoints/common/cli_args.py", "FrontendArgs")}
    made |= {
        "--" + each.replace("_", "-") for each in fields("vllm/entrypoints/common/cli_args.py", "BaseFrontendArgs")
    }
    assert set(VLLM) <= known | made


def test_sglang_knows_its_arguments() -> None:
    tree("sglang/srt/server_args.py")
    found: set[str] = set()
    for path in sorted((FOLDER / "sglang/srt/arg_groups/fields").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add("--" + node.target.id.replace("_", "-"))
    assert set(SGLANG) <= found


def test_its_router_knows_what_a_manifest_says() -> None:
    known = arguments("sglang_router/router_args.py")
    assert {word for word in router_words() if word.startswith("--")} <= known | {"--host", "--port"}


def test_megatron_bridge_knows_its_overrides() -> None:
    for name in MEGATRON_BRIDGE:
        head, _, field = name.partition(".")
        if head == "mixed_precision":
            continue
        assert any(field in fields(*place) for place in BRIDGE[head]), name


def test_megatron_bridge_has_the_recipes_of_mixed_precision() -> None:
    from opcast.simulator.search.launch import RECIPES

    defined = {
        node.name
        for node in ast.walk(tree("megatron/bridge/training/mixed_precision.py"))
        if isinstance(node, ast.FunctionDef)
    }
    assert {"fp16_mixed", *RECIPES.values()} <= defined


def any_fields(paths: list[str]) -> set[str]:
    """The annotated fields of all classes of some files."""
    classes = [node for path in paths for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)]
    lines = [line for each in classes for line in each.body if isinstance(line, ast.AnnAssign)]
    return {line.target.id for line in lines if isinstance(line.target, ast.Name)}


def as_arguments(names: set[str]) -> set[str]:
    """Fields as Megatron-LM spells them on its command line."""
    return {"--" + name.replace("_", "-") for name in names}


def told_to_megatron() -> set[str]:
    """Every argument that some shipped model, layout or run brings."""
    told = {*MEGATRON_LM, *MADE_UP, "--tokenizer-type", "--tokenizer-model"}
    for name in known_models():
        with contextlib.suppress(LaunchError):
            told |= set(megatron_model(dict(resolve(name).language)))
    return told


def test_accelerate_knows_its_settings() -> None:
    known = (FOLDER / "accelerate/commands/launch.py", FOLDER / "accelerate/utils/launch.py")
    tree("accelerate/commands/launch.py")
    text = "".join(path.read_text(encoding="utf-8") for path in known)
    own = ast.walk(ast.parse(Path(accelerate.__file__).read_text(encoding="utf-8")))
    names = {node.value for node in own if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    told = {name for name in names if re.fullmatch(r"(fsdp|parallelism_config)_[a-z_]+", name)} - {"fsdp_config"}
    assert len(told) > 6
    assert {name for name in told if name not in text} == set()


def flag_names(path: str) -> set[str]:
    """What Dynamo calls ``add_argument`` with: names by keyword."""
    keywords = [word for call in ast.walk(tree(path)) if isinstance(call, ast.Call) for word in call.keywords]
    return {word.value.value for word in keywords if word.arg == "flag_name" and isinstance(word.value, ast.Constant)}


def test_dynamo_knows_the_roles_of_its_workers() -> None:
    tree("dynamo/vllm/backend_args.py")
    assert set(DYNAMO_TRTLLM) <= flag_names("dynamo/trtllm/backend_args.py")
    for name in ("vllm", "sglang", "trtllm"):
        told = "".join(path.read_text(encoding="utf-8") for path in (FOLDER / "dynamo" / name).glob("*.py"))
        assert "--disaggregation-mode" in told
    assert "--router-mode" in (FOLDER / "dynamo/frontend/frontend_args.py").read_text(encoding="utf-8")


def test_what_megatron_lm_is_told_are_fields_of_its_core() -> None:
    """Megatron-LM makes most of its arguments of these fields; its parser itself is on no package index."""
    tree("megatron/core/transformer/transformer_config.py")
    rooms = [FOLDER / "megatron" / room for room in ("core", "bridge/training", "bridge/models")]
    paths = [str(path.relative_to(FOLDER)) for room in rooms for path in sorted(room.rglob("*.py"))]
    assert told_to_megatron() - as_arguments(any_fields(paths)) == OF_THE_PARSER


def test_megatron_lm_knows_its_arguments() -> None:
    known = arguments("megatron/training/arguments.py")
    configs = [str(path.relative_to(FOLDER)) for path in sorted((FOLDER / "megatron/training/config").glob("*.py"))]
    configs += [path for path, _ in BRIDGE["model"][:2] + BRIDGE["ddp"] if (FOLDER / path).is_file()]
    assert told_to_megatron() <= known | as_arguments(any_fields(configs))


def test_tensorrt_llm_knows_its_options() -> None:
    assert set(TRTLLM) <= arguments("tensorrt_llm/commands/serve.py")
    known = any_fields(["tensorrt_llm/llmapi/llm_args.py"])
    assert {"enable_attention_dp", "cache_transceiver_config", "backend"} <= known
