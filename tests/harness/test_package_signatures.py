"""What opcast tells other packages, against the packages themselves; each part is skipped where its package is not.

Read off the sources, so that no GPU is needed: vLLM 0.33, FlashInfer 0.7, FlashAttention 2.8 and 3, DeepGEMM 2.8 and
DeepEP (2026-11-23): the first two from their wheels, the others in part, from excerpts of their sources.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path

import pytest

from .package_signatures import ARGUMENTS, signature

ASKED = [  # package, file, class or "", function, arguments that opcast gives by name, how many by place
    ("vllm", "_custom_ops.py", "", "rms_norm", (), 4),
    ("vllm", "_custom_ops.py", "", "rotary_embedding", (), 6),
    ("vllm", "_custom_ops.py", "", "scaled_fp8_quant", ("use_per_token_if_dynamic",), 1),
    ("vllm", "_custom_ops.py", "", "cutlass_scaled_mm", (), 5),
    (
        "vllm",
        "vllm_flash_attn/flash_attn_interface.py",
        "",
        "flash_attn_varlen_func",
        (
            *("max_seqlen_q", "cu_seqlens_q", "max_seqlen_k", "seqused_k", "block_table", "causal", "window_size"),
            "fa_version",
        ),
        3,
    ),
    (
        "vllm",
        "model_executor/layers/fused_moe/fused_moe.py",
        "",
        "fused_experts",
        ("global_num_experts", "expert_map"),
        5,
    ),
    ("flashinfer", "decode.py", "BatchDecodeWithPagedKVCacheWrapper", "__init__", ("use_tensor_cores",), 2),
    ("flashinfer", "decode.py", "BatchDecodeWithPagedKVCacheWrapper", "run", (), 2),
    (
        "flashinfer",
        "prefill.py",
        "BatchPrefillWithPagedKVCacheWrapper",
        "plan",
        ("causal", "window_left", "q_data_type", "kv_data_type"),
        8,
    ),
    ("flash_attn", "flash_attn_interface.py", "", "flash_attn_func", ("causal", "window_size"), 3),
    (
        "flash_attn",
        "flash_attn_interface.py",
        "",
        "flash_attn_with_kvcache",
        ("cache_seqlens", "block_table", "causal", "window_size"),
        3,
    ),
    ("deep_ep", "buffer.py|buffers/legacy.py", "Buffer", "low_latency_dispatch", ("use_fp8",), 4),
    ("deep_ep", "buffer.py|buffers/legacy.py", "Buffer", "__init__", ("low_latency_mode", "explicitly_destroy"), 3),
    ("deep_ep", "buffer.py|buffers/legacy.py", "Buffer", "clean_low_latency_buffer", (), 3),
]


@pytest.mark.parametrize(("package", "file", "owner", "name", "named", "placed"), ASKED)
def test_a_function_takes_what_it_is_given(
    package: str, file: str, owner: str, name: str, named: tuple[str, ...], placed: int
) -> None:
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"needs {package}: pip install it, on a machine with a GPU")
    files = [Path(found.origin).parent / each for each in file.split("|")]
    tree = ast.parse(next(path for path in files if path.exists()).read_text("utf-8"))
    scopes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == owner]
    inside = scopes[0].body if owner else tree.body
    made = [node.args for node in inside if isinstance(node, ast.FunctionDef) and node.name == name]
    assert made, f"{package} has no {name} any more"
    takes = made[-1]
    places = [each.arg for each in (*takes.posonlyargs, *takes.args) if each.arg != "self"]
    assert len(places) >= placed
    assert set(named) <= {*places, *(each.arg for each in takes.kwonlyargs)}


@pytest.mark.parametrize(("place", "source"), ARGUMENTS.items(), ids=lambda value: str(value[1])[:40])
def test_stand_ins_have_the_arguments_of_the_package(place: tuple[str, str], source: tuple[str, str]) -> None:
    """What the stand-ins of test_engine_kernels take, against the package where it is installed."""
    file, arguments = source
    root, _, rest = file.partition("/")
    found = importlib.util.find_spec(root)
    if found is None or found.origin is None:
        pytest.skip(f"needs {root}: pip install it, on a machine with a GPU")
    owner, _, name = place[1].rpartition(".")
    tree = ast.parse((Path(found.origin).parent / rest).read_text("utf-8"))
    scopes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == owner]
    inside = scopes[0].body if owner else tree.body
    takes = [node.args for node in inside if isinstance(node, ast.FunctionDef) and node.name == name][-1]
    theirs = [each.arg for each in (*takes.posonlyargs, *takes.args, *takes.kwonlyargs) if each.arg != "self"]
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    ours = [each.name for each in signature(arguments).parameters.values() if each.kind not in kinds]
    assert ours == theirs
