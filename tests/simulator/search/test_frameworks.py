"""Every name in the tables of launch files is one that its framework's own parser or configuration has.

``OPCAST_FRAMEWORKS`` names a folder with the unpacked wheels of vllm, sglang, sglang-router, torchtitan, megatron-core
and megatron-bridge (docs/search.md says how to make one); nothing of them is imported, so that they need no GPU. A
framework that is not there is skipped.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from opcast.simulator.search.launch import MEGATRON_BRIDGE, TORCHTITAN
from opcast.simulator.search.served.kubernetes import router_words
from opcast.simulator.search.served.launch import SGLANG, VLLM

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
}


def tree(path: str) -> ast.Module:
    """The parsed file of a framework; skips where it is not there."""
    if not (FOLDER / path).is_file():
        pytest.skip(f"{path} is not there (OPCAST_FRAMEWORKS)")
    return ast.parse((FOLDER / path).read_text(encoding="utf-8"))


def arguments(path: str) -> set[str]:
    """What ``add_argument`` is called with in a file; of names made by a prefix what follows it."""
    return {name for call in ast.walk(tree(path)) if isinstance(call, ast.Call) for name in _names(call)}


def _names(call: ast.Call) -> Iterator[str]:
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "add_argument":
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
