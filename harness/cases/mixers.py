"""Mixers of tokens beside attention: scans through a state, short convolutions, attention to chosen tokens.

``torch`` writes them out in products, as models do without a package; ``mamba_ssm``, ``fla`` and ``causal_conv1d`` are
the kernels that frameworks run.

Log-decays are small and negative, keys of length 1, so that states stay bounded however
often an op runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ...datasets.mixer_ops import KDA, SSD
from ...datasets.ops import Op
from .attention import CUDA
from .base import Inputs, Run, Unsupported, case
from .packages import package
from .rows import same_dtype

if TYPE_CHECKING:
    import torch

DECAY = 0.02  # of a state by one token, about
QUERIES = 64  # whose chosen keys are gathered together


def _shaped(op: Op) -> None:
    """Unsupported for heads that do not share their keys evenly, or another output format."""
    same_dtype(op)
    if op.heads % op.groups:
        raise Unsupported(f"{op.heads} heads do not share {op.groups} groups of keys evenly")


def scan_operands(op: Op, inputs: Inputs, *tokens: int) -> tuple[torch.Tensor, ...]:
    """Queries, keys [batch, *tokens, groups, state], values [.., heads, width], log-decays and gates [.., heads]."""
    _shaped(op)
    shape = (op.batch, *tokens)
    query, key = (inputs.normal(*shape, op.groups, op.state_dim, dtype=op.dtype) for _ in range(2))
    value = inputs.normal(*shape, op.heads, op.head_dim, dtype=op.dtype)
    wide = (op.state_dim,) if op.rule == KDA else ()
    decay = -DECAY * inputs.normal(*shape, op.heads, *wide, dtype="fp32").abs()
    gate = inputs.normal(*shape, op.heads, dtype=op.dtype).sigmoid()
    return query, key / key.norm(dim=-1, keepdim=True), value, decay, gate


def scan(
    op: Op, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, gate: torch.Tensor
) -> torch.Tensor:
    """The chunked form in fp32 (arXiv 2405.21060, listing 1; 2406.06484, sec. 3.2): [batch, seq, heads, width]."""
    import torch
    from torch.nn import functional

    heads_per_group, size = op.heads // op.groups, min(op.chunk, op.seq)
    fill = -op.seq % size

    def chunks(x: torch.Tensor) -> torch.Tensor:
        """[batch, heads, chunks, size, ..]"""
        x = functional.pad(
            x.float().transpose(1, 2).flatten(3) if x.dim() > 3 else x.float().transpose(1, 2)[..., None],
            (0, 0, 0, fill),
        )
        return x.unflatten(2, (-1, size))

    q, k = (chunks(x.repeat_interleave(heads_per_group, 2)) for x in (query, key))
    v, g, beta = chunks(value), chunks(decay).cumsum(3), chunks(gate)
    into, out, last = q * g.exp(), k * (-g).exp(), g[..., -1:, :]
    scores, values, carried_state = (into @ out.transpose(3, 4)).tril(), v, None
    if op.rule != SSD:
        system = (beta * k * g.exp()) @ out.transpose(3, 4)
        solve = partial(torch.linalg.solve_triangular, system.tril(-1), upper=False, unitriangular=True)
        values, carried_state = solve(beta * v), solve(beta * k * g.exp())
    decayed = k * (last - g).exp()
    state = v.new_zeros(op.batch, op.heads, op.state_dim, op.head_dim)
    results = []
    for c in range(q.shape[2]):
        new = values[:, :, c] if carried_state is None else values[:, :, c] - carried_state[:, :, c] @ state
        results.append(into[:, :, c] @ state + scores[:, :, c] @ new)
        state = state * last[:, :, c].exp().transpose(2, 3) + decayed[:, :, c].transpose(2, 3) @ new
    return torch.cat(results, 2)[:, :, : op.seq].transpose(1, 2).to(value.dtype)


@case("linear_attention_prefill")
def prefill(op: Op, inputs: Inputs) -> Run:
    """Products of chunks, and a loop over them."""
    return partial(scan, op, *scan_operands(op, inputs, op.seq))


@case("linear_attention_backward", capturable=lambda op: False)
def backward(op: Op, inputs: Inputs) -> Run:
    """Autograd's pass over the chunked form, its engine included."""
    import torch

    operands = [x.requires_grad_() for x in scan_operands(op, inputs, op.seq)]
    with torch.enable_grad():
        out = scan(op, *operands)
    gradient = inputs.normal(*out.shape, dtype=op.dtype)
    used = operands[:-1] if op.rule == SSD else operands
    return partial(torch.autograd.grad, out, used, gradient, retain_graph=True)


@case("linear_attention_decode")
def decode(op: Op, inputs: Inputs) -> Run:
    """One token of each sequence, its state changed in place."""
    query, key, value, decay, gate = scan_operands(op, inputs)
    state = inputs.normal(op.batch, op.heads, op.state_dim, op.head_dim, dtype="fp32")
    heads_per_group = op.heads // op.groups

    def run() -> torch.Tensor:
        q, k = (x.float().repeat_interleave(heads_per_group, 1).unsqueeze(-1) for x in (query, key))
        v = value.float().unsqueeze(-2)
        state.mul_(decay.exp().unflatten(-1, (-1, 1)) if op.rule == KDA else decay.exp()[..., None, None])
        if op.rule != SSD:
            v = gate.float()[..., None, None] * (v - (state * k).sum(-2, keepdim=True))
        state.add_(k * v)
        return (state * q).sum(-2).to(value.dtype)

    return run


# --- packages ------------------------------------------------------------------------------------------


def _ruled(*rules: int) -> Callable[[Op, str], bool]:
    return lambda op, device: op.rule in rules


@case("linear_attention_prefill", "mamba_ssm:chunk_scan", devices=CUDA, when=_ruled(SSD))
def mamba_scan(op: Op, inputs: Inputs) -> Run:
    """``mamba_chunk_scan_combined``, whose decay is time step times A."""
    return partial(_mamba(op, inputs))


@case("linear_attention_backward", "mamba_ssm:chunk_scan", devices=CUDA, when=_ruled(SSD), capturable=lambda op: False)
def mamba_scan_backward(op: Op, inputs: Inputs) -> Run:
    """Autograd's pass over ``mamba_chunk_scan_combined``."""
    return _through_autograd(op, inputs, _mamba(op, inputs))


def _mamba(op: Op, inputs: Inputs) -> Any:
    import torch

    function = package("mamba_ssm.ops.triton.ssd_combined", inputs).mamba_chunk_scan_combined
    query, key, value, decay, _ = scan_operands(op, inputs, op.seq)
    a = -torch.ones(op.heads, device=value.device)
    return partial(function, value, (-decay).to(value.dtype), a, key, query, min(op.chunk, op.seq))


@case("linear_attention_decode", "mamba_ssm:state_update", devices=CUDA, when=_ruled(SSD))
def mamba_update(op: Op, inputs: Inputs) -> Run:
    """``selective_state_update`` on states [batch, heads, width, state]."""
    import torch

    function = package("mamba_ssm.ops.triton.selective_state_update", inputs).selective_state_update
    query, key, value, decay, _ = scan_operands(op, inputs)
    state = inputs.normal(op.batch, op.heads, op.head_dim, op.state_dim, dtype="fp32")
    a = -torch.ones(op.heads, device=value.device)[:, None, None].expand(op.heads, op.head_dim, op.state_dim)
    step = (-decay).to(value.dtype)[..., None].expand(op.batch, op.heads, op.head_dim)
    return partial(function, state, value, step, a, key, query)


FLA = {False: ("gated_delta_rule", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")}
FLA[True] = ("kda", "chunk_kda", "fused_recurrent_kda")


def _fla(op: Op, inputs: Inputs, which: int) -> Any:
    names = FLA[op.rule == KDA]
    return getattr(package(f"fla.ops.{names[0]}", inputs), names[which])


def _fla_operands(op: Op, inputs: Inputs, tokens: int) -> dict[str, torch.Tensor]:
    """Operands with a key head for each value head, by the names of the kernels' arguments: their order has changed."""
    query, key, value, decay, gate = scan_operands(op, inputs, tokens)
    heads_per_group = op.heads // op.groups
    heads = {"q": query.repeat_interleave(heads_per_group, 2), "k": key.repeat_interleave(heads_per_group, 2)}
    return {**heads, "v": value, "g": decay, "beta": gate}


@case("linear_attention_prefill", "fla:chunk", devices=CUDA, when=_ruled(1, KDA))
def fla_chunk(op: Op, inputs: Inputs) -> Run:
    """``chunk_gated_delta_rule`` or ``chunk_kda``."""
    return partial(_fla(op, inputs, 1), **_fla_operands(op, inputs, op.seq))


@case("linear_attention_backward", "fla:chunk", devices=CUDA, when=_ruled(1, KDA), capturable=lambda op: False)
def fla_chunk_backward(op: Op, inputs: Inputs) -> Run:
    """Autograd's pass over ``chunk_gated_delta_rule`` or ``chunk_kda``."""
    return _through_autograd(op, inputs, fla_chunk(op, inputs))


@case("linear_attention_decode", "fla:recurrent", devices=CUDA, when=_ruled(1, KDA))
def fla_recurrent(op: Op, inputs: Inputs) -> Run:
    """``fused_recurrent_gated_delta_rule`` or ``fused_recurrent_kda`` of one token."""
    state = inputs.normal(op.batch, op.heads, op.state_dim, op.head_dim, dtype="fp32")
    return partial(_fla(op, inputs, 2), **_fla_operands(op, inputs, 1), initial_state=state, output_final_state=True)


def _through_autograd(op: Op, inputs: Inputs, forward: Any) -> Run:
    """Gradients of all floating operands of a prepared call."""
    import torch

    def own(value: Any) -> Any:
        return value.detach().requires_grad_() if isinstance(value, torch.Tensor) else value

    inputs_, named = [own(x) for x in forward.args], {name: own(x) for name, x in forward.keywords.items()}
    operands = [x for x in (*inputs_, *named.values()) if isinstance(x, torch.Tensor)]
    with torch.enable_grad():
        output = forward.func(*inputs_, **named)
    out = output[0] if isinstance(output, tuple) else output
    if inputs.outline:
        return lambda: out
    gradient = inputs.normal(*out.shape, dtype=op.dtype)
    return partial(torch.autograd.grad, out, operands, gradient, retain_graph=True, allow_unused=True)


# --- short convolutions --------------------------------------------------------------------------------


def _convolution(op: Op, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """x [1, cols, rows], channels next to each other in memory, and weights [cols, width]."""
    same_dtype(op)
    x = inputs.normal(1, op.rows, op.cols, dtype=op.dtype).transpose(1, 2)
    return x, inputs.normal(op.cols, op.width, dtype=op.dtype)


def convolve(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """SiLU of each channel's sum over the tokens up to its own."""
    from torch.nn import functional

    padded = functional.pad(x, (weight.shape[1] - 1, 0))
    return functional.silu(functional.conv1d(padded, weight.unsqueeze(1), groups=weight.shape[0]))


@case("causal_conv1d")
def causal_conv1d(op: Op, inputs: Inputs) -> Run:
    """``F.conv1d`` with a group for each channel, and SiLU; ``update`` shifts the kept tokens in place."""
    from torch.nn import functional

    x, weight = _convolution(op, inputs)
    if not op.update:
        return partial(convolve, x, weight)
    kernel_weight, rows = inputs.normal(op.rows, op.cols, op.width, dtype=op.dtype), x[0].t()

    def run() -> torch.Tensor:
        kernel_weight.copy_(kernel_weight.roll(-1, -1))
        kernel_weight[..., -1] = rows
        return functional.silu((kernel_weight * weight).sum(-1))

    return run


@case("causal_conv1d", "causal_conv1d:fn", devices=CUDA)
def packaged_conv1d(op: Op, inputs: Inputs) -> Run:
    """The package's kernels, with SiLU."""
    module = package("causal_conv1d", inputs)
    x, weight = _convolution(op, inputs)
    if not op.update:
        return partial(module.causal_conv1d_fn, x, weight, activation="silu")
    kernel_weight = inputs.normal(op.rows, op.cols, op.width, dtype=op.dtype)
    return partial(module.causal_conv1d_update, x[0].t().contiguous(), kernel_weight, weight, activation="silu")


@case("causal_conv1d_backward", capturable=lambda op: False)
def causal_conv1d_backward(op: Op, inputs: Inputs) -> Run:
    """Autograd's pass over ``F.conv1d`` and SiLU."""
    import torch

    x, weight = (operand.requires_grad_() for operand in _convolution(op, inputs))
    with torch.enable_grad():
        out = convolve(x, weight)
    gradient = inputs.normal(1, op.rows, op.cols, dtype=op.dtype).transpose(1, 2)
    return partial(torch.autograd.grad, out, (x, weight), gradient, retain_graph=True)


# --- sparse attention ----------------------------------------------------------------------------------


def _choice(op: Op) -> None:
    """Unsupported for more queries than positions, more chosen than there are, or another format of the cache."""
    if op.seq_q > op.seq_kv or op.topk > op.seq_kv:
        raise Unsupported(f"{op.seq_q} queries cannot choose {op.topk} of {op.seq_kv} positions")
    if op.kind.startswith("sparse_attention"):
        same_dtype(op)
        if op.kv_dtype or op.heads_q % op.heads_kv:
            raise Unsupported("torch takes kv_dtype=same and query heads that share key heads evenly")
        if op.latent and op.v_head_dim > op.head_dim:
            raise Unsupported(f"values of {op.v_head_dim} are no part of keys of {op.head_dim}")


@case("sparse_index_prefill")
@case("sparse_index_decode")
def sparse_index(op: Op, inputs: Inputs) -> Run:
    """Scores of all heads by one product, their weighted sum, and ``torch.topk`` of what each query sees."""
    import torch

    _choice(op)
    query = inputs.normal(op.batch, op.seq_q * op.heads, op.head_dim, dtype=op.dtype)
    key = inputs.normal(op.batch, op.seq_kv, op.head_dim, dtype=op.dtype).transpose(1, 2)
    weights = inputs.normal(op.batch, op.seq_q, 1, op.heads, dtype=op.dtype)
    visible_keys = torch.ones(op.seq_q, op.seq_kv, dtype=torch.bool, device=inputs.device).tril(op.seq_kv - op.seq_q)

    def run() -> torch.Tensor:
        scores = (query @ key).relu_().unflatten(1, (op.seq_q, op.heads))
        return (weights @ scores).squeeze(2).masked_fill_(~visible_keys, -float("inf")).topk(op.topk).indices

    return run


def chosen_operands(op: Op, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [batch, seq_q, heads_q, width], keys and values [batch, seq_kv, heads_kv, ..], chosen tokens' indices."""
    _choice(op)
    query = inputs.normal(op.batch, op.seq_q, op.heads_q, op.head_dim, dtype=op.dtype)
    key = inputs.normal(op.batch, op.seq_kv, op.heads_kv, op.head_dim, dtype=op.dtype)
    latent = key[..., : op.v_head_dim]
    value = latent if op.latent else inputs.normal(op.batch, op.seq_kv, op.heads_kv, op.v_head_dim, dtype=op.dtype)
    return query, key, value, inputs.integers(op.batch, op.seq_q, op.topk, high=op.seq_kv)


def attend(op: Op, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Attention of each query to its own tokens, some queries at a time: [batch, seq_q, heads_q, v_head_dim]."""
    import torch

    sequence = torch.arange(op.batch, device=query.device)[:, None, None]
    results = []
    for start in range(0, op.seq_q, QUERIES):
        chosen_keys = indices[:, start : start + QUERIES]
        keys, values = key[sequence, chosen_keys].transpose(2, 3), value[sequence, chosen_keys].transpose(2, 3)
        grouped = query[:, start : start + QUERIES].unflatten(2, (op.heads_kv, -1)) / op.head_dim**0.5
        results.append((torch.softmax(grouped @ keys.transpose(3, 4), -1) @ values).flatten(2, 3))
    return torch.cat(results, 1)


@case("sparse_attention_prefill")
@case("sparse_attention_decode")
def sparse_attention(op: Op, inputs: Inputs) -> Run:
    """Chosen keys and values gathered, two products and a softmax."""
    return partial(attend, op, *chosen_operands(op, inputs))


@case("sparse_attention_backward", capturable=lambda op: False)
def sparse_attention_backward(op: Op, inputs: Inputs) -> Run:
    """Autograd's pass over the gathered form."""
    import torch

    query, key, value, indices = chosen_operands(op, inputs)
    operands = [x.requires_grad_() for x in ((query, key) if op.latent else (query, key, value))]
    with torch.enable_grad():
        out = attend(op, query, key, key[..., : op.v_head_dim] if op.latent else value, indices)
    gradient = inputs.normal(*out.shape, dtype=op.dtype)
    return partial(torch.autograd.grad, out, operands, gradient, retain_graph=True)
