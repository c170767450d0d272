"""Low-rank adapters (LoRA) as frameworks that train them are told of them; what none can be told is a LaunchError."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .launch_errors import LaunchError
from .launch_point import Launch

WITH_ADAPTERS = ("megatron-bridge", "deepspeed", "accelerate")  # the last two by PEFT
BRIDGE_LINEARS = {  # products of Megatron-Bridge's peft (megatron/bridge/peft/lora.py) -> Linears that each stands for
    "linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "linear_proj": ("self_attn.o_proj",),
    "linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "linear_fc2": ("mlp.down_proj",),
}
PEFT = """from peft import LoraConfig, get_peft_model
LINEARS = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and re.search({modules!r}, n)]
model = get_peft_model(model, LoraConfig(r={rank}, lora_dropout={dropout}, target_modules=LINEARS))
"""


def check_trained_weights(launch: Launch, framework: str) -> None:
    """LaunchError for weights that a framework cannot be told to leave as they are."""
    work = launch.request.work
    if work.frozen:
        raise LaunchError(
            f"workload.frozen={work.frozen!r} cannot be written: no framework has a setting for it; leave it out"
        )
    if work.lora_rank and framework not in WITH_ADAPTERS:
        raise LaunchError(f"{framework} has no setting for adapters: take framework={', '.join(WITH_ADAPTERS)}")


def bridge_linears(launch: Launch) -> list[str] | None:
    """The products of Megatron-Bridge that ``workload.lora_modules`` names; None without adapters."""
    work = launch.request.work
    if not work.lora_rank:
        return None
    if launch.model("kv_lora_rank", "num_experts", "num_local_experts", "n_routed_experts"):
        raise LaunchError("adapters of experts and latent attention are not spelled here: take framework=accelerate")
    named = {
        product: [bool(re.search(work.lora_modules, f"model.layers.0.{name}")) for name in linears]
        for product, linears in BRIDGE_LINEARS.items()
    }
    for product, hits in named.items():
        if any(hits) and not all(hits):
            linears = ", ".join(name.rpartition(".")[2] for name in BRIDGE_LINEARS[product])
            raise LaunchError(f"{product} is one product of Megatron-Bridge: name all of {linears} in lora_modules")
    return [product for product, hits in named.items() if all(hits)]


def linears_pattern(products: Sequence[str]) -> str:
    """The ``workload.lora_modules`` of products of Megatron-Bridge. KeyError for one that is none."""
    return "|".join(name.rpartition(".")[2] for product in products for name in BRIDGE_LINEARS[product])


def peft_lines(launch: Launch) -> str:
    """What PEFT is told in a training script; nothing without adapters."""
    work = launch.request.work
    if not work.lora_rank:
        return ""
    return PEFT.format(modules=work.lora_modules, rank=work.lora_rank, dropout=work.lora_dropout)
