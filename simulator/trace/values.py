"""Real values beside fake tensors, for what a model decides by looking at numbers.

A fake tensor has a shape but no content, so code that asks ``(mask == 0).all()`` cannot run on it. Everything
that follows from token positions, masks and expert choices is small, though: :class:`Values` computes it for
real, next to the fake computation, and answers such questions. A value is kept per storage, so that views and
in-place updates need no bookkeeping. Where experts are chosen from scores that nobody has computed,
:func:`route_balanced` chooses for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from .workload import TraceError, parse_load

if TYPE_CHECKING:
    import torch

# Beyond these sizes contents are not computed: what is decided by value is decided on masks, positions and routes.
FLOAT_LIMIT_BYTES = 4 * 2**20
INTEGER_LIMIT_BYTES = 32 * 2**20  # four million positions or routes
MASK_LIMIT_BYTES = 128 * 2**20  # 11k x 11k positions


def expert_counts(tokens: int, topk: int, experts: int, load: str) -> list[int]:
    """Tokens that each expert gets of ``tokens`` · ``topk`` choices, none more than ``tokens``; sums to all of them.

    What full experts cannot take goes to the others by their shares, so that the first ones of a steeper load have no
    less. TraceError when ``load`` lists shares for another number of experts.
    """
    name, numbers = parse_load(load)
    if name == "shares" and len(numbers) != experts:
        raise TraceError(f"expert_load gives {len(numbers)} shares, the model chooses among {experts} experts")
    shares = list(numbers) if name == "shares" else [1.0] * experts
    if name == "zipf":
        shares = [1 / (rank + 1) ** numbers[0] for rank in range(experts)]
    choices = tokens * topk
    exact = _share_out(shares, tokens, choices)
    counts = [min(int(value), tokens) for value in exact]
    order = sorted(range(experts), key=lambda e: counts[e] - exact[e])
    while (missing := choices - sum(counts)) > 0:  # by largest remainder, past the full ones
        room = [e for e in order if counts[e] < tokens][:missing]
        for expert in room:
            counts[expert] += 1
    return counts


def _share_out(shares: list[float], maximum: int, choices: int) -> list[float]:
    """``choices`` by shares, none above ``maximum``: what is beyond that goes to the others by their shares."""
    filled = [0.0] * len(shares)
    by_share = sorted((e for e, share in enumerate(shares) if share > 0), key=lambda e: -shares[e])
    total, remainder = math.fsum(shares), float(choices)
    for position, expert in enumerate(by_share):
        if shares[expert] / total * remainder <= maximum:  # all that are left have room
            for open_expert in by_share[position:]:
                filled[open_expert] = shares[open_expert] / total * remainder
            break
        filled[expert] = float(maximum)
        remainder -= maximum
        total = math.fsum(shares[other] for other in by_share[position + 1 :])
        if remainder <= 0 or total <= 0:
            break
    return filled


def route_balanced(rows: int, topk: int, experts: int, load: str) -> torch.Tensor:
    """int64 [rows, topk]: distinct experts for every row, spread by ``load``."""
    import torch

    counts = torch.tensor(expert_counts(rows, topk, experts, load))
    return torch.repeat_interleave(torch.arange(experts), counts).view(topk, rows).t().contiguous()


class Values:
    """Contents of fake storages, by the id that ``storage_id`` gives a tensor."""

    def __init__(self, storage_id: Callable[[torch.Tensor], int], expert_load: str) -> None:
        self._storage_id = storage_id
        self._expert_load = expert_load
        self._known: dict[int, torch.UntypedStorage] = {}

    def forget(self, storage_id: int) -> None:
        self._known.pop(storage_id, None)

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The real content of a fake tensor, or None when it depends on weights or data."""
        import torch

        if not _is_fake(tensor):
            return tensor
        storage = self._known.get(self._storage_id(tensor))
        if storage is None:
            return None
        with torch._C._DisableTorchDispatch():
            content = torch.empty(0, dtype=tensor.dtype)
            return content.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    def item(self, tensor: torch.Tensor, where: str) -> Any:
        """The number in a fake scalar; TraceError when nobody knows it."""
        import torch

        value = self.of(tensor)
        if value is None:
            raise TraceError(
                f"{where or 'the model'} decides by the value of a tensor that depends on weights or data, "
                "which a trace without weights does not have"
            )
        with torch._C._DisableTorchDispatch():
            return value.item()

    def known_arguments(self, tree: Any) -> Any:
        """The argument tree with contents in place of fake tensors, or None when one of them is unknown."""
        import torch
        from torch.utils._pytree import tree_map_only

        missing: list[torch.Tensor] = []

        def look_up(tensor: torch.Tensor) -> torch.Tensor:
            value = self.of(tensor)
            if value is None:
                missing.append(tensor)
                return tensor
            return value

        real = tree_map_only(torch.Tensor, look_up, tree)
        return None if missing else real

    def follow(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        inputs: Sequence[torch.Tensor],
        ids: Sequence[int],
        written: Sequence[int],
        result: Any,
    ) -> None:
        """Compute what ``func`` just did on fake tensors for real, where its inputs are known and it is small.

        ``ids`` are the storages of ``inputs``, ``written`` those that it updated in place.
        """
        import torch

        constant = all(n in self._known or not _is_fake(t) for n, t in zip(ids, inputs, strict=True))
        if func is torch.ops.aten.topk.default and not constant:
            topk = result[1].shape[-1]
            return self._choose_experts(result[1], inputs[0].shape[-1], result[1].numel() // topk, topk)
        if func is torch.ops.aten.argmax.default and not constant and result.shape == inputs[0].shape[:-1]:
            sequence = result.shape[-1] if result.dim() else 1  # of which an expert takes as many as it has room for
            return self._choose_experts(result, inputs[0].shape[-1], sequence, 1)
        outputs = [out for out in _result_list(result) if isinstance(out, torch.Tensor)]
        if not constant or not outputs or torch.Tag.nondeterministic_seeded in func.tags:
            return self._unknown(written)
        if all(self._storage_id(out) in self._known for out in outputs) and not written:
            return None  # views of what is known already
        if any(_tensor_bytes(out) > _limit(func, out) for out in outputs) or _is_blank(func, outputs[0]):
            return self._unknown(written)
        real = self.known_arguments((args, kwargs))
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            try:
                computed = _result_list(func(*real[0], **real[1]))
            except (NotImplementedError, RuntimeError):  # an operator for another device, say
                return self._unknown(written)
            for fake, value in zip(outputs, computed, strict=True):
                self.assign(fake, value)
        return None

    def assign(self, fake: torch.Tensor, value: torch.Tensor) -> None:
        """Make ``value`` the content of ``fake``, in the layout that ``fake`` claims."""
        import torch

        storage_id = self._storage_id(fake)
        if storage_id in self._known:
            return
        with torch._C._DisableTorchDispatch():
            if value.stride() != fake.stride() or value.storage_offset() != fake.storage_offset():
                size = fake.untyped_storage().nbytes() // fake.element_size()
                flat = torch.zeros(size, dtype=fake.dtype)
                value = flat.as_strided(fake.shape, fake.stride(), fake.storage_offset()).copy_(value)
            self._known[storage_id] = value.untyped_storage()

    def _choose_experts(self, indices: torch.Tensor, experts: int, rows: int, topk: int) -> None:
        """Assigns ``topk`` experts to each of ``rows`` rows, and the same again to the next ones."""
        import torch

        if _tensor_bytes(indices) > INTEGER_LIMIT_BYTES:
            return
        with torch._C._DisableTorchDispatch():
            experts_of_rows = route_balanced(rows, topk, experts, self._expert_load)
            self.assign(
                indices, experts_of_rows.repeat(indices.numel() // experts_of_rows.numel(), 1).view(indices.shape)
            )

    def _unknown(self, written: Sequence[int]) -> None:
        for storage_id in written:
            self.forget(storage_id)


def group_sizes(offsets: torch.Tensor) -> tuple[int, ...]:
    """Rows of each group from the running ends that grouped products take."""
    ends = [0, *(int(end) for end in offsets.tolist())]
    return tuple(end - start for start, end in pairwise(ends))


def mask_window(mask: torch.Tensor) -> tuple[int, int] | None:
    """(causal, window) of an attention mask [..., queries, keys], judged by a sample of its rows.

    (0, 0) when every query sees every key; None when it is neither that nor a causal or sliding one.
    """
    rows = mask.reshape(-1, *mask.shape[-2:])[0] if mask.dim() > 1 else mask[None]
    queries, keys = rows.shape
    sample = sorted({round(i * (queries - 1) / 15) for i in range(16)})
    visible = rows[sample] == 0 if rows.is_floating_point() else rows[sample] != 0
    counts = visible.sum(-1).tolist()
    if all(count == keys for count in counts):
        return (1, 0) if queries == 1 else (0, 0)
    last = [keys - queries + i for i in sample]
    if not all(bool(row[end]) and not bool(row[end + 1 :].any()) for row, end in zip(visible, last, strict=True)):
        return None
    window = max(counts)
    if any(count != min(window, end + 1) for count, end in zip(counts, last, strict=True)):
        return None
    return 1, window if window < keys else 0


def _result_list(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _is_fake(tensor: torch.Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def _is_blank(func: Any, out: torch.Tensor) -> bool:
    """Whether memory was only reserved, for numbers that somebody else will provide (a checkpoint's weights)."""
    name = func._schema.name.partition("::")[2]
    return out.is_floating_point() and name.removeprefix("new_").startswith("empty")


def _tensor_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _limit(func: Any, tensor: torch.Tensor) -> int:
    """Bytes up to which a result is computed; ``where`` turns boolean masks into additive ones."""
    if tensor.dtype.itemsize == 1 or func._schema.name == "aten::where":
        return MASK_LIMIT_BYTES
    return FLOAT_LIMIT_BYTES if tensor.is_floating_point() or tensor.is_complex() else INTEGER_LIMIT_BYTES
