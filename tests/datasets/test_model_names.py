"""Names of models and GPUs as people write them, against what they mean."""

from __future__ import annotations

import pytest

from opcast.datasets.device_names import shipped_device_id
from opcast.datasets.devices import DeviceError, load_device
from opcast.datasets.model_names import shipped_ids, shipped_model
from opcast.simulator.trace.models import resolve, shipped_source

SAME = {
    "Qwen/Qwen3-32B": "qwen3_32b",
    "zai-org/GLM-5": "glm_5",
    "meta-llama/Meta-Llama-3.1-8B-Instruct": "llama3_1_8b",
    "deepseek-ai/DeepSeek-V3-0324": "deepseek_v3",
    "openai/gpt-oss-120b": "gpt_oss_120b",
    "Llama-3-8B": "llama3_8b",
    "llama-3.1-8b": "llama3_1_8b",
    "Llama-2-7b-chat-hf": "llama2_7b",
    "facebook/opt-1.3b": "opt_1_3b",
    "facebook/opt-13b": "opt_13b",
    "google/gemma-3-27b-it": "gemma3_27b",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistral_7b",
    "zai-org/GLM-4.5": "glm4_5_355b_a32b",
    "Qwen/Qwen3-30B-A3B-Thinking-2507": "qwen3_30b_a3b",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "llama4_scout",
    "moonshotai/Kimi-K2-Thinking": "kimi_k2_5",
    "mistralai/Mistral-7B-Instruct-v0.1": "mistral_7b_v0_1",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": "llama3_1_8b",
    "Qwen/Qwen2.5-Coder-7B": "qwen2_5_7b",
    "Qwen/Qwen2-72B-Instruct": "qwen2_5_72b",
    "lmsys/vicuna-13b-v1.5": "llama2_13b",
    "huggyllama/llama-65b": "llama_65b",
    "01-ai/Yi-34B-Chat": "yi_34b",
    "codellama/CodeLlama-34b-Instruct-hf": "codellama_34b",
    "microsoft/phi-4": "phi4",
    "allenai/OLMo-2-1124-7B-Instruct": "olmo2_7b",
    "EleutherAI/pythia-6.9b": "pythia_6_9b",
    "CohereForAI/c4ai-command-r-plus": "command_r_plus_104b",
    "bigcode/starcoder2-15b": "starcoder2_15b",
}
STORED = {
    "nvidia/Qwen3-32B-NVFP4": ("qwen3_32b", {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "Qwen/Qwen3-32B-FP8": ("qwen3_32b", {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "nvidia/Llama-3.1-8B-Instruct-FP8": ("llama3_1_8b", {"quant_method": "fp8"}),
    "Qwen/Qwen2.5-7B-Instruct-AWQ": ("qwen2_5_7b", {"quant_method": "awq", "bits": 4}),
    "unsloth/gpt-oss-20b-BF16": ("gpt_oss_20b", {}),
}
OTHER = (
    *("mistralai/Mistral-7B-Instruct-v0.9", "microsoft/Phi-3-medium-128k-instruct", "Qwen/Qwen2.5-7B-Instruct-1M"),
    *("Qwen/Qwen2.5-VL-7B", "moonshotai/Kimi-K2.6", "llama3", "mods:MLP", "./llama3_8b", "/tmp/Llama-3-8B", "a/b/c"),
)


@pytest.mark.parametrize(("name", "meant"), SAME.items())
def test_usual_spellings(name: str, meant: str) -> None:
    found = shipped_model(name)
    assert found is not None
    assert (found.id, found.quantization) == (meant, None)


@pytest.mark.parametrize(("name", "meant"), STORED.items())
def test_a_name_tells_the_format_of_weights(name: str, meant: tuple[str, dict[str, object]]) -> None:
    found = shipped_model(name)
    assert found is not None
    assert (found.id, found.quantization) == meant
    source = resolve(name)
    assert source.config == resolve(meant[0]).config
    assert source.quantization == (meant[1] or None)


@pytest.mark.parametrize("name", OTHER)
def test_other_models_are_none_of_these(name: str) -> None:
    assert shipped_model(name) is None


def test_every_shipped_model_is_known_by_its_name_and_one_by_its_hub_id() -> None:
    for each in shipped_ids():
        found = shipped_model(each)
        assert found is not None
        assert found.id == each
        source = shipped_source(each)
        of_hub = shipped_model(source) if source else found
        assert of_hub is not None
        assert shipped_source(of_hub.id) == source  # two names may be of one hub id


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("H800", "h800_sxm"),
        ("H100-SXM5-80GB", "h100_sxm"),
        ("NVIDIA H100 80GB HBM3", "h100_sxm"),
        ("A100", "a100_sxm_80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100_sxm_40gb"),
        ("Tesla V100-PCIE-16GB", "v100_pcie_16gb"),
        ("NVIDIA GeForce RTX 4090", "rtx_4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx_pro_6000_server"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_gpus_by_the_names_of_drivers_and_shops(name: str, meant: str) -> None:
    assert load_device(name).id == meant


@pytest.mark.parametrize("name", ["h100_sxn", "h10", "my_h100_sxm", "RTX 4090 Laptop GPU", "NVIDIA Graphics Device"])
def test_other_gpus_are_unknown(name: str) -> None:
    assert shipped_device_id(name) == ""
    with pytest.raises(DeviceError, match="unknown device"):
        load_device(name)
