"""Scans, short convolutions and sparse attention: what is run equals the recurrence or the mask, token by token."""

from __future__ import annotations

import importlib.util

import pytest

from opcast.datasets.ops import KINDS, Op, make_op

torch = pytest.importorskip("torch")

from opcast.harness.cases import Inputs, Unsupported, backends, prepare  # noqa: E402
from opcast.harness.cases.mixers import attend, chosen_operands, decode, mamba_scan, scan, scan_operands  # noqa: E402

RULES = ("ssd", "gated_delta", "kda")
SCAN = {"batch": 2, "heads": 4, "groups": 2, "head_dim": 6, "state_dim": 5}
CHOICE = {"heads_q": 4, "heads_kv": 2, "head_dim": 8, "v_head_dim": 6, "topk": 5}


def recurrence(op: Op, query, key, value, decay, gate, state=None):
    """Every state from the one before it (arXiv 2405.21060, eq. 1; arXiv 2412.06464, eq. 10), in float64."""
    each = op.heads // op.groups
    q, k = (x.double().repeat_interleave(each, 2) for x in (query, key))
    v, a, b = value.double(), decay.double().exp(), gate.double()
    state = torch.zeros(op.batch, op.heads, op.state_dim, op.head_dim).double() if state is None else state.double()
    out = torch.zeros_like(v)
    for t in range(v.shape[1]):
        state = state * (a[:, t].unsqueeze(-1) if op.rule == 2 else a[:, t][..., None, None])
        new = v[:, t]
        if op.rule:
            new = b[:, t].unsqueeze(-1) * (new - torch.einsum("bhnp,bhn->bhp", state, k[:, t]))
        state = state + torch.einsum("bhn,bhp->bhnp", k[:, t], new)
        out[:, t] = torch.einsum("bhnp,bhn->bhp", state, q[:, t])
    return out, state


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("seq", "chunk"), [(12, 4), (10, 4), (3, 8)])
def test_chunks_give_what_the_recurrence_gives(rule: str, seq: int, chunk: int):
    op = make_op("linear_attention_prefill", "fp32", **SCAN, seq=seq, chunk=chunk, rule=rule)
    operands = scan_operands(op, Inputs("cpu", 3), seq)
    torch.testing.assert_close(scan(op, *operands).double(), recurrence(op, *operands)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_a_token_changes_the_state_as_the_recurrence_does(rule: str):
    op = make_op("linear_attention_decode", "fp32", **SCAN, rule=rule)

    class Kept(Inputs):
        def normal(self, *shape, dtype):
            made = super().normal(*shape, dtype=dtype)
            self.last = made
            return made

    operands, inputs = scan_operands(op, Inputs("cpu", 5)), Kept("cpu", 5)
    run = decode(op, inputs)
    state = inputs.last
    expected, after = recurrence(op, *(x.unsqueeze(1) for x in operands), state=state.clone())
    torch.testing.assert_close(run().double(), expected[:, 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.double(), after, rtol=1e-4, atol=1e-5)


def test_chosen_tokens_are_attended_as_under_a_mask():
    for latent in (0, 1):
        op = make_op("sparse_attention_prefill", "fp32", **CHOICE, seq_q=7, seq_kv=20, latent=latent)
        query, key, value, _ = chosen_operands(op, Inputs("cpu", 1))
        indices = torch.stack([torch.randperm(20)[:5] for _ in range(7)])[None]
        q, k, v = (x.double().transpose(1, 2) for x in (query, key, value))
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        masked = torch.full((7, 20), -float("inf")).double().scatter_(1, indices[0], 0.0)
        expected = torch.softmax(q @ k.transpose(2, 3) / op.head_dim**0.5 + masked, -1) @ v
        torch.testing.assert_close(
            attend(op, query, key, value, indices).double(), expected.transpose(1, 2), rtol=1e-4, atol=1e-5
        )


SMALL = {
    "linear_attention_prefill": [{**SCAN, "seq": 10, "chunk": 4, "rule": rule} for rule in RULES],
    "linear_attention_backward": [{**SCAN, "seq": 10, "chunk": 4, "rule": rule} for rule in RULES],
    "linear_attention_decode": [{**SCAN, "rule": rule} for rule in RULES],
    "causal_conv1d": [{"rows": 9, "cols": 6}, {"rows": 4, "cols": 6, "update": "yes"}],
    "causal_conv1d_backward": [{"rows": 9, "cols": 6}],
    "sparse_index_prefill": [{"heads": 3, "head_dim": 4, "seq_q": 9, "seq_kv": 9, "topk": 4}],
    "sparse_index_decode": [{"batch": 2, "heads": 3, "head_dim": 4, "seq_q": 1, "seq_kv": 9, "topk": 4}],
    "sparse_attention_prefill": [{**CHOICE, "seq_q": 9, "seq_kv": 9}],
    "sparse_attention_decode": [{**CHOICE, "batch": 2, "seq_q": 1, "seq_kv": 9, "latent": "yes"}],
    "sparse_attention_backward": [{**CHOICE, "seq_q": 9, "seq_kv": 9, "latent": latent} for latent in ("no", "yes")],
}


def test_no_mixer_is_left_out():
    names = {name for name in KINDS if name.startswith(("linear_attention", "causal_conv1d", "sparse_"))}
    assert names == set(SMALL)


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_each_mixer_runs_here_and_packages_have_them_on_gpus(kind: str, dtype: str):
    for dims in SMALL[kind]:
        op = make_op(kind, dtype, **dims)
        made = prepare(op, backends(op, "cpu")[0], "cpu").run()
        for tensor in made if isinstance(made, tuple) else (made,):
            assert torch.isfinite(tensor.float()).all()
    scans = kind.startswith("linear_attention")
    packages = {name.partition(":")[0] for name in backends(op, "cuda")} - {"torch"}
    assert packages == ({"fla"} if scans else {"causal_conv1d"} if kind == "causal_conv1d" else set())


def test_packages_that_are_missing_say_how_to_get_them():
    if importlib.util.find_spec("mamba_ssm"):
        pytest.skip("mamba_ssm is installed")
    op = make_op("linear_attention_prefill", "bf16", **SCAN, seq=10)
    with pytest.raises(Unsupported, match="pip install mamba-ssm"):
        mamba_scan(op, Inputs("cpu", 1))


def test_shapes_without_meaning_are_refused():
    for kind, dims in (
        ("linear_attention_prefill", {**SCAN, "groups": 3, "seq": 4}),
        ("sparse_attention_prefill", {**CHOICE, "seq_q": 4, "seq_kv": 4}),
        ("sparse_index_prefill", {"heads": 1, "head_dim": 4, "seq_q": 9, "seq_kv": 4, "topk": 2}),
    ):
        with pytest.raises(Unsupported):
            prepare(make_op(kind, "fp32", **dims), "torch", "cpu")
