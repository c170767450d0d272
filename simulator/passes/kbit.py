"""Frozen weights in few bits under adapters that train (QLoRA, Dettmers et al. 2023, arXiv 2305.14314).

Each product with such a weight, in the forward pass and in the backward pass, first unpacks all of it into a 16-bit
copy, which dies with the product: ``MatMul4Bit`` of bitsandbytes calls ``dequantize_4bit`` in both, and keeps the
packed weight alone in between. So do the layers of GPTQ and AWQ that train. Where the scales are packed, too (double
quantization), they are unpacked before (``dequantize_blockwise``), and their mean is added. The head of the language
model and adapters stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil

from ...datasets.dtypes import itemsize
from ..graph import Node
from ..question.plan import Plan, PlanError
from .rewriting.draft import Draft, Item, Section
from .rewriting.lifetimes import free_after_last_use, freed_tensors
from .rewriting.match import expand
from .rewriting.nodes import Ids, elementwise

PRODUCTS = ("gemm", "grouped_gemm")
SIXTEEN_BITS = ("bf16", "fp16")


def check_kbit(plan: Plan, frozen: bool, able: str) -> None:
    """PlanError for packed weights without adapters beside them, or with ranks that would have to cut them."""
    name, p = plan.quantization, plan.parallel
    if not frozen:
        raise PlanError(
            f"quantization={name} is for inference, and for frozen weights beside adapters (QLoRA): take "
            f"workload.lora_rank=16; training of all weights can take {able}"
        )
    cut = [f"parallel.{axis}={getattr(p, axis)}" for axis in ("tp", "ep") if getattr(p, axis) > 1]
    if cut:
        raise PlanError(
            f"{', '.join(cut)} would cut weights that are packed as {name}, which bitsandbytes cannot; take "
            "parallel.zero_stage=3"
        )


@dataclass(frozen=True)
class KbitFormat:
    """How frozen weights are packed: their dtype, and the bytes of a scale for each ``block`` of them."""

    dtype: str
    block: int
    scale_bytes: float

    @property
    def packed_scales(self) -> bool:
        """Whether the scales are stored in few bits, too (double quantization)."""
        return self.dtype == "nf4" and self.scale_bytes < itemsize("fp32")


@dataclass(frozen=True)
class Packed:
    """A weight in few bits: its elements, and the format that they are packed in."""

    numel: int
    format: KbitFormat


@dataclass
class KbitWeights:
    """One rewrite of a draft: frozen matrices are packed, and unpacked before each product that reads them.

    ``format_of`` has the format of a node by its path and source, None where its weights stay in 16 bits.
    """

    draft: Draft
    format_of: Callable[[str, str], KbitFormat | None]
    packed: dict[int, Packed] = field(default_factory=dict)  # by any id of a weight
    scaled: set[int] = field(default_factory=set)  # weights whose scales are there

    def run(self) -> None:
        """Rewrite every section, then settle lifetimes."""
        released = freed_tensors(self.draft)
        self.packed = self._find_weights()
        expand(self.draft.sections, self._unpack)
        for tensor, packed in self.packed.items():
            self.draft.sizes[tensor] = ceil(packed.numel * itemsize(packed.format.dtype))
            self.draft.dtypes[tensor] = self.draft.code(packed.format.dtype)
        free_after_last_use(self.draft, released)

    def _find_weights(self) -> dict[int, Packed]:
        """Every frozen matrix that nothing but products in few bits reads."""
        weights: dict[int, Packed] = {}
        others: set[int] = set()
        for section, item in self.draft.walk():
            for tensor in self._is_frozen(item.node):
                ids, kbit_format = section.ids(tensor).tolist(), self._format(item.node, tensor)
                if kbit_format is None:
                    others.update(ids)
                else:
                    weights.update(dict.fromkeys(ids, Packed(self.draft.numel(tensor), kbit_format)))
        return {tensor: packed for tensor, packed in weights.items() if tensor not in others}

    def _is_frozen(self, node: Node) -> list[int]:
        draft = self.draft
        return [t for t in node.reads if draft.role(t) == "frozen" and draft.dtype(t) in SIXTEEN_BITS]

    def _format(self, node: Node, tensor: int) -> KbitFormat | None:
        """How a weight of a product is packed; None for one that is added as a bias, or read by anything else."""
        if node.kind not in PRODUCTS or self.draft.numel(tensor) <= node.work.n:
            return None
        return self.format_of(node.path, node.source)

    def _unpack(self, section: Section, item: Item) -> list[Item]:
        """The kernels that unpack what a product reads, and the product, which reads the copies."""
        copies: dict[int, int] = {}
        kernels: list[Item] = []
        for tensor in (t for t in item.node.reads if t in self.packed):
            numel, stored = self.packed[tensor].numel, self.packed[tensor].format
            copies[tensor] = self.draft.local(section, numel * itemsize("bf16"), "bf16")
            reads = (tensor, *self._scales(section, tensor))
            kernels += self._scales_unpacked(section, item.node, self.packed[tensor]) if stored.packed_scales else []
            kernels.append(_kernel("dequantize_4bit", numel, item.node, reads, copies[tensor], stored.dtype))
        if copies:
            item.read_instead(copies)
        return [*kernels, item]

    def _scales(self, section: Section, tensor: int) -> tuple[int, ...]:
        """The scales of a weight, made where it is first read; later readers find them in memory."""
        ids, packed = section.ids(tensor).tolist(), self.packed[tensor]
        if self.scaled.issuperset(ids):
            return ()
        self.scaled.update(ids)
        size = max(ceil(packed.numel / packed.format.block) * packed.format.scale_bytes, 4)
        return (self.draft.local(section, size, "uint8", "buffer"),)

    def _scales_unpacked(self, section: Section, near: Node, packed: Packed) -> list[Item]:
        """Scales that are packed themselves in fp32, and their mean added."""
        count = ceil(packed.numel / packed.format.block)
        scales = self.draft.local(section, count * itemsize("fp32"), "fp32")
        first = _kernel("dequantize_blockwise", count, near, (), scales, "uint8", "fp32")
        return [first, _kernel("add_", count, near, (scales,), scales, "fp32", "fp32")]


def _kernel(name: str, numel: int, near: Node, reads: Ids, result: int, dtype: str, out_dtype: str = "bf16") -> Item:
    source = f"bitsandbytes.{name}"
    return Item(elementwise(source, numel, near, reads, (result,), dtype, out_dtype, fn="cast"))
