"""A decoder's dimensions, from a transformers configuration: parameters and model FLOPs in closed form.

They serve what needs no simulation: MFU and its constant-MFU baseline, and FLOP/s as step times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .rows import Hardware

UNGATED = {"gpt2", "gptj", "gpt_neox", "opt", "bloom", "mpt", "falcon"}


@dataclass(frozen=True)
class Dimensions:
    """Sizes of a decoder. ``qkvo`` is the number of weights of one attention, ``head_dims`` what one (query, key)
    pair multiplies in all heads; ``experts`` 0 is a dense model; ``dense_layers`` come before those with experts.
    """

    layers: int
    hidden: int
    vocab: int
    tied: bool
    qkvo: int
    head_dims: int
    ffn: int
    gated: bool
    experts: int = 0
    topk: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0

    @property
    def matrices(self) -> int:
        """Matrices of one feed-forward."""
        return 3 if self.gated else 2

    def layer_weights(self, active: bool) -> float:
        """Weights of all layers' matrices; ``active`` counts the experts that one token visits."""
        dense = self.qkvo + self.matrices * self.hidden * self.ffn
        if not self.experts:
            return float(self.layers * dense)
        visited = self.topk if active else self.experts
        routed = self.matrices * self.hidden * (visited * self.expert_ffn + self.shared_ffn)
        router = self.hidden * self.experts
        return float(self.dense_layers * dense + (self.layers - self.dense_layers) * (self.qkvo + routed + router))

    @property
    def parameters(self) -> float:
        """All weights of matrices and embeddings (biases and norms, a thousandth, are left out)."""
        return self.layer_weights(False) + self.vocab * self.hidden * (1 if self.tied else 2)

    def flops_per_token(self, seq_len: int) -> float:
        """Model FLOPs of a training step per token: 6 per active weight, 12·layers·heads·head_dim·seq_len of attention.

        Narayanan et al. (arXiv 2104.04473, sec. 5.1) and PaLM (arXiv 2204.02311, app. B): masks are not discounted,
        the logits count, the embedding does not.
        """
        attention = 6.0 * self.layers * self.head_dims * seq_len
        return 6.0 * (self.layer_weights(True) + self.vocab * self.hidden) + attention


def dimensions_of(config: Mapping[str, Any]) -> Dimensions | None:
    """The dimensions that a configuration gives, None for one whose shape is not that of a plain decoder."""
    inner = config.get("text_config")
    flat = {**config, **inner} if isinstance(inner, Mapping) else dict(config)

    def first(*names: str, default: Any = None) -> Any:
        return next((flat[name] for name in names if flat.get(name) is not None), default)

    kind = str(config.get("model_type"))
    layers, heads = first("num_hidden_layers", "n_layer", "n_layers"), first("num_attention_heads", "n_head", "n_heads")
    hidden, vocab = first("hidden_size", "n_embd", "d_model"), first("vocab_size")
    if not all(isinstance(value, int) for value in (layers, hidden, heads, vocab)):
        return None
    ffn = first("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
    ffn = ffn or int(first("expansion_ratio", default=4)) * hidden
    qkvo, head_dims = _attention(flat, first, hidden, heads)
    experts = first("num_local_experts", "n_routed_experts", "num_experts", default=0)
    expert_ffn = first("moe_intermediate_size", "intermediate_size", default=ffn) if experts else 0
    shared = int(first("n_shared_experts", default=0)) * expert_ffn
    interleaved = layers // int(first("interleave_moe_layer_step", default=1))
    dense_layers = int(first("first_k_dense_replace", default=layers - interleaved)) if experts else 0
    return Dimensions(
        layers=layers,
        hidden=hidden,
        vocab=vocab,
        tied=bool(first("tie_word_embeddings", default=kind in UNGATED)),
        qkvo=qkvo,
        head_dims=head_dims,
        ffn=ffn,
        gated=kind not in UNGATED,
        experts=experts,
        topk=first("num_experts_per_tok", default=1) if experts else 0,
        expert_ffn=expert_ffn,
        shared_ffn=shared,
        dense_layers=dense_layers,
    )


def run_tags(
    precision: str, name: str, config: Mapping[str, Any], hardware: Hardware, framework: str
) -> dict[str, str]:
    """What rows of any table are grouped by in reports."""
    sizes = dimensions_of(config)
    architecture = "MoE" if sizes is not None and sizes.experts else "dense"
    values = {"framework": framework, "gpu": hardware.gpu, "precision": precision, "model": name}
    return {**values, "architecture": architecture}


def _attention(config: Mapping[str, Any], first: Any, hidden: int, heads: int) -> tuple[int, int]:
    """(weights of one attention, elements that one pair of positions multiplies): plain, grouped, latent."""
    latent = config.get("kv_lora_rank")
    if latent:
        nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
        low = config.get("q_lora_rank")
        query = low * (hidden + heads * (nope + rope)) if low else hidden * heads * (nope + rope)
        keys = hidden * (latent + rope) + latent * heads * (nope + value)
        return query + keys + heads * value * hidden, heads * (nope + rope + value)
    head_dim = first("head_dim", default=hidden // heads)
    one = config.get("multi_query") and not config.get("new_decoder_architecture")
    kv_heads = 1 if one else first("num_key_value_heads", "num_kv_heads", default=heads)
    return 2 * hidden * head_dim * (heads + kv_heads), 2 * heads * head_dim
