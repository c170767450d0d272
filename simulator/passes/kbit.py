"""Frozen weights in few bits under adapters that train (QLoRA, Dettmers et al. 2023, arXiv 2305.14314).

Each product with such a weight, in the forward pass and in the backward pass, first unpacks all of it into a 16-bit
copy, which dies with the product: ``MatMul4Bit`` of bitsandbytes calls ``dequantize_4bit`` in both, and keeps the
packed weight alone in between. So do the layers of GPTQ and AWQ that train. Where the scales are packed, too (double
quantization), they are unpacked before (``dequantize_blockwise``), and their mean is added. The head of the language
model and adapters stay as they are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING

from ...datasets.dtypes import itemsize
from ..graph import Node
from ..question.plan import Plan, PlanError
from .rewriting.draft import Draft, Item, Section
from .rewriting.lifetimes import free_after_last_use, freed
from .rewriting.nodes import elementwise

if TYPE_CHECKING:
    from .quantize import Recipe

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


@dataclass
class KbitWeights:
    """One rewrite of a draft: frozen matrices are packed, and unpacked before each product that reads them."""

    draft: Draft
    recipe: Recipe
    skip: re.Pattern[str]
    numel: dict[int, int] = field(default_factory=dict)  # elements of packed weights, by any of their ids
    scaled: set[int] = field(default_factory=set)  # those whose scales are there

    def run(self) -> None:
        """Rewrite every section, then settle lifetimes."""
        released = freed(self.draft)
        self.numel = self._packed()
        for section in self.draft.sections:
            items: list[Item] = []
            for item in section.items:
                items += self._unpack(section, item)
                items.append(item)
            section.items = items
        ids = list(self.numel)
        self.draft.sizes[ids] = [ceil(numel * itemsize(self.recipe.weight)) for numel in self.numel.values()]
        self.draft.dtypes[ids] = self.draft.code(self.recipe.weight)
        free_after_last_use(self.draft, released)

    def _packed(self) -> dict[int, int]:
        """Elements of every frozen matrix that nothing but products reads, by id."""
        read: dict[int, int] = {}
        others: set[int] = set()
        for section, item in self.draft.walk():
            for tensor in self._frozen(item.node):
                ids = section.ids(tensor).tolist()
                if self._multiplies(item.node, tensor):
                    read.update(dict.fromkeys(ids, self.draft.numel(tensor)))
                else:
                    others.update(ids)
        return {tensor: numel for tensor, numel in read.items() if tensor not in others}

    def _frozen(self, node: Node) -> list[int]:
        draft = self.draft
        return [t for t in node.reads if draft.role(t) == "frozen" and draft.dtype(t) in SIXTEEN_BITS]

    def _multiplies(self, node: Node, tensor: int) -> bool:
        """Whether a node is a product with a matrix, not one that adds it as a bias or is left in 16 bits."""
        product = node.op is not None and node.op.kind in PRODUCTS and self.skip.search(node.path) is None
        return product and node.op is not None and self.draft.numel(tensor) > node.op.n

    def _unpack(self, section: Section, item: Item) -> list[Item]:
        """The kernels that unpack what a product reads; the product reads the copies."""
        copies, made = {}, []
        for tensor in (t for t in item.node.reads if t in self.numel):
            numel = self.numel[tensor]
            copies[tensor] = self.draft.local(section, numel * itemsize("bf16"), "bf16")
            reads = (tensor, *self._scales(section, tensor))
            made += self._scales_unpacked(section, item.node, numel) if self.recipe.packed_scales else []
            made.append(self._kernel("dequantize_4bit", numel, item.node, reads, copies[tensor], self.recipe.weight))
        if copies:
            item.change(reads=tuple(copies.get(t, t) for t in item.node.reads))
        return made

    def _scales(self, section: Section, tensor: int) -> tuple[int, ...]:
        """The scales of a weight, made where it is first read; later readers find them in memory."""
        ids = section.ids(tensor).tolist()
        if self.scaled.issuperset(ids):
            return ()
        self.scaled.update(ids)
        size = max(ceil(self.numel[tensor] / self.recipe.weight_block) * self.recipe.scale_bytes, 4)
        return (self.draft.local(section, size, "uint8", "buffer"),)

    def _scales_unpacked(self, section: Section, near: Node, numel: int) -> list[Item]:
        """Scales that are packed themselves in fp32, and their mean added."""
        count = ceil(numel / self.recipe.weight_block)
        scales = self.draft.local(section, count * itemsize("fp32"), "fp32")
        first = self._kernel("dequantize_blockwise", count, near, (), scales, "uint8", "fp32")
        return [first, self._kernel("add_", count, near, (scales,), scales, "fp32", "fp32")]

    def _kernel(
        self, name: str, numel: int, near: Node, reads: tuple[int, ...], made: int, dtype: str, out_dtype: str = "bf16"
    ) -> Item:
        return Item(
            elementwise(
                f"bitsandbytes.{name}",
                numel,
                reads,
                (made,),
                phase=near.phase,
                path=near.path,
                dtype=dtype,
                out_dtype=out_dtype,
                fn="cast",
            )
        )
