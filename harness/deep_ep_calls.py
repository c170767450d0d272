"""DeepEP's kernels for the exchange between experts, where the package is installed (github.com/deepseek-ai/DeepEP).

``normal`` moves each token once to every rank that holds one of its experts, with a layout that is worked out once and
then reused, as a second micro-batch or the backward pass does; ``low_latency`` moves it once for each expert, without
waiting for the host. Combining moves the rows of a dispatch back, in bf16. Tokens travel in bf16 or in fp8 with a scale
for 128 elements. ``deep_ep:elastic`` is the buffer of release 2, as vLLM 0.33 calls it: ``normal`` as for prompts (rows
laid out by expert, the host waits for their number), ``low_latency`` as for decoding in graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..datasets.ops import Op
from .cases.base import Unsupported
from .cases.packages import EXTRAS, package
from .collective_calls import CallSetting, ReadyCollective

LOW_LATENCY = 1  # of the dim mode
SHARED_BYTES = 1 << 30  # of NVLink, or of RDMA, that the kernels of the normal mode go through
MOST_FAST_TOKENS = 256  # of the low-latency mode, whose memory grows with them
ELASTIC = "deep_ep:elastic"
BLOCK = 128  # elements of a token in fp8 that share a scale
COMMON_NODE = 8  # ranks that reach each other over NVLink


Key = tuple[Any, ...]
Sent = tuple[torch.Tensor, Callable[[], Any], Callable[[], Any], torch.Tensor]  # tokens, there, back, what came
Exchange = Callable[[CallSetting], Sent]


def buffer_key(op: Op, members: tuple[int, ...], backend: str = "deep_ep") -> Key:
    """What two cases have in common that go through the same memory; that of the low-latency mode has a shape."""
    if backend == ELASTIC:
        return (members, backend, max(op.tokens, MOST_FAST_TOKENS), op.hidden, op.topk, op.dtype)
    shape = (max(op.tokens, MOST_FAST_TOKENS), op.hidden, op.experts) if op.mode == LOW_LATENCY else ()
    return (members, op.mode, *shape)


@dataclass
class SharedBuffer:
    """The memory that one group of ranks shares: made in seconds, by all of them, and ended by all.

    Ending it waits for every rank of its group, and NVSHMEM of the low-latency mode exists once in a process. So ranks
    end it together, before any of them makes another; they see the same cases in the same order, so that they agree.
    """

    buffer: Any = None
    key: Key = ()

    def make_way(self, key: Key = ()) -> None:
        """End what other cases went through. Every rank calls this before a case, whether it takes part or not."""
        if key != self.key and self.buffer is not None:
            ended, self.buffer = self.buffer, None
            ended.destroy()
        self.key = key

    def normal(self, group: Any) -> Any:
        """The memory of the normal mode."""
        if self.buffer is None:
            apart = SHARED_BYTES if group.size() > COMMON_NODE else 0
            self.buffer = _made(package("deep_ep").Buffer, group, SHARED_BYTES, apart)
        return self.buffer

    def fast(self, group: Any, op: Op) -> Any:
        """The memory of the low-latency mode, for as many tokens as are measured, clean for this op's."""
        kind, experts, ranks = package("deep_ep").Buffer, op.experts, group.size()
        if self.buffer is None:
            most = max(op.tokens, MOST_FAST_TOKENS)
            needed = kind.get_low_latency_rdma_size_hint(most, op.hidden, ranks, experts)
            mode = {"low_latency_mode": True, "num_qps_per_rank": experts // ranks}
            self.buffer = _made(kind, group, 0, needed, **mode)
        self.buffer.clean_low_latency_buffer(op.tokens, op.hidden, experts)
        return self.buffer

    def elastic(self, group: Any, op: Op) -> Any:
        """The memory of release 2, of which the buffer chooses its size itself."""
        if self.buffer is None:
            self.buffer = package("deep_ep").ElasticBuffer(
                group=group,
                num_max_tokens_per_rank=max(op.tokens, MOST_FAST_TOKENS),
                hidden=op.hidden,
                num_topk=op.topk,
                use_fp8_dispatch=op.dtype != "bf16",
                explicitly_destroy=True,
            )
        return self.buffer


def _made(kind: Any, *sizes: Any, **mode: Any) -> Any:
    """A buffer that ends when it is told to. Unsupported where DeepEP ends it whenever Python collects it."""
    try:
        return kind(*sizes, **mode, explicitly_destroy=True)
    except TypeError as error:
        raise Unsupported(f"this DeepEP is too old ({error}): {EXTRAS['deep_ep']} of 2025-06 or later") from error


BUFFERS = SharedBuffer()


def _routed(s: CallSetting) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens [tokens, hidden], the topk experts of each (int64) and their weights (fp32)."""
    op = s.op
    if op.experts % op.ranks or op.topk > op.experts:
        raise Unsupported(f"top {op.topk} of {op.experts} experts on {op.ranks} ranks: they must divide evenly")
    if op.dtype not in ("bf16", "fp8", "fp8_block") or op.out_dtype != "bf16":
        raise Unsupported("DeepEP takes tokens in bf16 or fp8 and returns bf16: set dtype and out_dtype=bf16")
    if op.dtype != "bf16" and op.hidden % BLOCK:
        raise Unsupported(f"DeepEP's fp8 has a scale for {BLOCK} elements: hidden must be a multiple of that")
    if op.sms:
        raise Unsupported("DeepEP chooses its multiprocessors itself: set sms=0")
    generator = torch.Generator().manual_seed(s.rank)
    experts = torch.rand(op.tokens, op.experts, generator=generator).topk(op.topk, dim=-1)[1].to(s.device)
    return s.rows(op.tokens, "bf16"), experts, torch.ones(op.tokens, op.topk, device=s.device)


def _sent(s: CallSetting, tokens: torch.Tensor) -> Any:
    """Tokens as they travel: themselves, or in fp8 with their scales [tokens, hidden / 128]."""
    if s.op.dtype == "bf16":
        return tokens
    scales = torch.ones(s.op.tokens, s.op.hidden // BLOCK, device=tokens.device)
    return tokens.to(torch.float8_e4m3fn), scales


def _back(arrived: Any) -> torch.Tensor:
    """What experts make of the rows that came, in bf16."""
    rows = arrived[0] if isinstance(arrived, tuple) else arrived
    return rows if rows.dtype == torch.bfloat16 else torch.ones(rows.shape, dtype=torch.bfloat16, device=rows.device)


def _exchange(s: CallSetting) -> Sent:
    """What is sent, a call that dispatches it, a call that combines what came, and what came."""
    op = s.op
    tokens, experts, weights = _routed(s)
    if op.mode == LOW_LATENCY:
        buffer = BUFFERS.fast(s.group, op)

        def dispatch_fast() -> Any:
            return buffer.low_latency_dispatch(tokens, experts, op.tokens, op.experts, use_fp8=op.dtype != "bf16")

        arrived, _, handle, _, _ = dispatch_fast()
        arrived = _back(arrived)
        return (
            tokens,
            dispatch_fast,
            lambda: buffer.low_latency_combine(arrived, experts, weights, handle),
            arrived,
        )
    buffer = BUFFERS.normal(s.group)
    per_rank, per_node, per_expert, inside, _ = buffer.get_dispatch_layout(experts, op.experts)
    sent = _sent(s, tokens)
    arrived, _, _, _, handle, _ = buffer.dispatch(
        sent,
        topk_idx=experts,
        topk_weights=weights,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=inside,
        num_tokens_per_expert=per_expert,
    )
    rows = _back(arrived)
    return tokens, lambda: buffer.dispatch(sent, handle=handle), lambda: buffer.combine(rows, handle), rows


def _elastic(s: CallSetting) -> Sent:
    """The same through the buffer of release 2."""
    op = s.op
    tokens, experts, weights = _routed(s)
    sent, buffer, fast = _sent(s, tokens), BUFFERS.elastic(s.group, op), op.mode == LOW_LATENCY

    def there() -> Any:
        return buffer.dispatch(
            x=sent,
            topk_idx=experts,
            topk_weights=weights,
            num_experts=op.experts,
            num_max_tokens_per_rank=1 << (op.tokens - 1).bit_length() if fast else None,
            do_expand=not fast,
            do_cpu_sync=not fast,
            async_with_compute_stream=False,
        )

    arrived, _, _, handle, _ = there()
    rows = _back(arrived)
    return tokens, there, lambda: buffer.combine(x=rows, handle=handle, topk_weights=None), rows


def dispatch(exchange: Exchange, s: CallSetting) -> ReadyCollective:
    """Tokens to the ranks of their experts."""
    tokens, there, _, arrived = exchange(s)
    return ReadyCollective(there, tokens, arrived)


def combine(exchange: Exchange, s: CallSetting) -> ReadyCollective:
    """Rows of experts back to their tokens' ranks, and their sums there."""
    tokens, _, back, arrived = exchange(s)
    return ReadyCollective(back, arrived, tokens)


ELASTIC_CALLS, DEEP_EP = (
    {"ep_dispatch": partial(dispatch, exchange), "ep_combine": partial(combine, exchange)}
    for exchange in (_elastic, _exchange)
)
