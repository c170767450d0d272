"""Low-precision products: which run in fewer bits, what is rounded for them, and what weights then weigh.

``plan.quantization`` names a recipe (:data:`RECIPES`). Products with weights take its format: forward, input gradient
and weight gradient alike, dense and grouped, and keep the dtype of their results. The head of the language model,
routers and attention stay as they are, and so do modules that ``options.quantize_skip`` (a regular expression)
matches. Where a checkpoint says it of each module, ``plan.weight_rules`` decide (:mod:`.product_formats`).

An operand is rounded once, by a ``quantize`` node, for all products that read it. In training the weight's gradient
multiplies along the other dimension, for which a second, transposed copy is made with the first, and kept for the
backward pass in place of the 16-bit tensor (Transformer Engine's cast-transpose; DeepSeek-V3, arXiv 2412.19437, sec.
3.3). Frameworks with ``stack.rounds_both`` make both in one kernel, and their products of FP8 with one scale a tensor
need no transposed copy where matrix units take operands either way (compute capability 10: ``transformer_engine``,
``nvte_is_non_tn_fp8_gemm_supported``). Weights are rounded once a step, in its first micro-batch; what their rounded
copies weigh is not counted. Frozen ones are rounded before the first step, and their products need no transposed
copies of activations. Where they lie in memory in FP8 alone (``options.fp8_params``) and matrix units take one layout,
the product of the input's gradient makes a transposed copy of its weight each time (Transformer Engine 1.x,
``weight_fp8.transpose_2d()`` of ``_Linear.backward``; 2.x keeps it instead, for as much memory again). Adapters stay in
16 bits. With ``options.fp8_scaling=current`` the maximum is found in a pass of its
own; with ``rowwise`` each row is rounded by its own as it is read, along both dimensions. NVFP4 has a scale of the
tensor above those of its blocks, whose maximum is always found first, and what is rounded along the columns is turned
before (a Hadamard transform), by a kernel of its own (Transformer Engine, ``NVFP4Quantizer::quantize_impl``; torchao's
nvfp4_training does the same).

``w4.84a16`` says the bits of a weight, its scales included: weights as llama.cpp, ExLlama and others store them.

``tf32`` is no recipe of this kind: fp32 products run on matrix units as they are.

In inference weights are stored in the recipe's format with their scales. ``plan.kv_dtype`` (fp8 or int8)
stores keys and values so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import groupby
from math import ceil
from typing import NamedTuple

import numpy as np

from ...datasets.dtypes import itemsize, weight_bits
from ...datasets.loading import nearest
from ...datasets.ops import KINDS, LAYOUT, Op, make_op
from ..graph import Block, Graph, Node, shift_path
from ..question.plan import Plan, PlanError
from ..trace.stored_formats import WeightFormat
from .fusion.remake import Use, names_in_section
from .kbit import KbitFormat, KbitWeights, check_kbit
from .micro_batches import REFRESH
from .pipeline import slice_block
from .product_formats import ProductFormats
from .rewriting.draft import Draft, Item, Section
from .rewriting.lifetimes import free_after_last_use, freed_tensors
from .rewriting.match import distinct, expand
from .rewriting.nodes import Ids, kernel

HIGH = ("bf16", "fp16")
PRODUCTS = ("gemm", "grouped_gemm", "fused_moe")
EITHER_WAY_SM = 10  # compute capability whose FP8 products take operands in any layout (not 12's)
TRANSPOSE = "fused.transpose"
ROWWISE = "rowwise"  # of ``options.fp8_scaling``


@dataclass(frozen=True)
class Recipe:
    """A way to run products in fewer bits.

    ``activation`` is the format inputs are rounded to (empty: they stay), ``weight`` the one weights are stored in,
    ``block`` the elements that share a scale (0: one per row or tensor), ``scale_bytes`` what one scale of a weight
    weighs and ``weight_block`` how many elements it is for. ``copies``: how the transposed operand of a weight gradient
    comes about: ``quantize`` (its blocks lie the other way), ``copy``; empty: the recipe is for inference, and for
    frozen weights where activations stay (:mod:`.kbit`). With ``of_tensor`` the blocks' scales have one of the whole
    tensor above them, which training finds first. ``product`` is the format of ops in inference (empty: the recipe's
    own name).
    """

    activation: str
    weight: str
    block: int = 0
    weight_block: int = 0
    scale_bytes: float = 4.0
    copies: str = ""
    of_tensor: bool = False
    product: str = ""


RECIPES: dict[str, Recipe] = {
    "fp8": Recipe("fp8", "fp8", copies="copy"),
    "fp8_block": Recipe("fp8_block", "fp8_block", 128, 128 * 128, copies="quantize"),
    "mxfp8": Recipe("mxfp8", "mxfp8", 32, 32, 1.0, "quantize"),
    "nvfp4": Recipe("nvfp4", "nvfp4", 16, 16, 1.0, "quantize", of_tensor=True),
    "int8": Recipe("int8", "int8"),
    "w8a16": Recipe("", "int8", weight_block=128, scale_bytes=2.0),
    "w4a16": Recipe("", "int4", weight_block=128, scale_bytes=2.0),
    "w4a8": Recipe("fp8", "int4", weight_block=128, scale_bytes=2.0),
    "mxfp4a16": Recipe("", "mxfp4", weight_block=32, scale_bytes=1.0),
    "mxfp4a8": Recipe("mxfp8", "mxfp4", 32, 32, 1.0),
    "nf4": Recipe("", "nf4", weight_block=64, scale_bytes=1 + 4 / 256, product="w4a16"),
}


PREPARED = ("nf4",)
"""Formats of bitsandbytes: what is trained beside such weights is prepared by peft (:mod:`..trace.kbit`)."""


def quantize(graph: Graph, plan: Plan) -> Graph:
    """The graph with products in ``plan.quantization`` and its cache in ``plan.kv_dtype``; itself where none is.

    PlanError names a format that no recipe knows, or one that cannot train.
    """
    kv_dtype = plan.kv_dtype or "same"
    attention = plan.settings.attention_dtype
    if not plan.quantization and kv_dtype == "same" and not attention:
        return graph
    if plan.quantization == "tf32":
        return _tf32(graph)
    formats = ProductFormats(plan)
    graph = _layers_apart(graph, formats) if formats.by_layer else graph
    draft = Draft(graph)
    if kv_dtype != "same":
        _store_keys(draft, kv_dtype)
    if attention:
        _attend(draft, attention)
    if plan.quantization:
        recipe = _recipe(plan.quantization)
        training = any(item.node.phase == "backward" for _, item in draft.walk())
        if training and not recipe.copies:
            _keep_packed(draft, plan, formats)
        else:
            _Rounding(draft, plan, formats, training).run()
    quantized = draft.graph()
    before, after = ([node.op for node, _ in version.weighted()] for version in (graph, quantized))
    return graph if kv_dtype == "same" and not attention and before == after else quantized


def _keep_packed(draft: Draft, plan: Plan, formats: ProductFormats) -> None:
    """Frozen weights in a format that is for inference; PlanError where that cannot be."""
    able = ", ".join(name for name, known in RECIPES.items() if known.copies)
    if _recipe(plan.quantization).activation:
        raise PlanError(f"quantization={plan.quantization} is for inference; training can take {able}")
    check_kbit(plan, any(draft.role(t) == "frozen" for t in range(len(draft.roles))), able)

    def kbit(path: str, source: str) -> KbitFormat | None:
        weight_format = formats.of(path.removesuffix(".base"), source)  # what stands beside an adapter
        recipe = None if weight_format is None else recipe_of(weight_format)
        return None if recipe is None else KbitFormat(recipe.weight, recipe.weight_block, recipe.scale_bytes)

    KbitWeights(draft, kbit).run()


def _layers_apart(graph: Graph, formats: ProductFormats) -> Graph:
    """The graph with repetitions apart whose products are packed in other ways: a pattern may name layers."""
    blocks: list[Block] = []
    for block in graph.blocks:
        first = 0
        for _, repetitions in groupby(_formats_of(block, formats)):
            count = len(list(repetitions))
            blocks.append(slice_block(block, first, count, None))
            first += count
    return replace(graph, blocks=tuple(blocks)) if len(blocks) > len(graph.blocks) else graph


def _formats_of(block: Block, formats: ProductFormats) -> list[tuple[WeightFormat | None, ...]]:
    """By repetition: how the weights of each product are packed."""
    products = [node for node in block.nodes if node.kind in PRODUCTS]
    named = list(dict.fromkeys((node.path, node.source) for node in products))
    moved = [at * block.stride for at in range(block.repeat)]
    return [
        tuple(formats.of(shift_path(path, block.stack, layers), source) for path, source in named) for layers in moved
    ]


def shard_scales(graph: Graph, plan: Plan) -> Graph:
    """The graph with scales for as many elements as its weights have by now: what ranks hold a part of.

    Passes that share weights out know nothing of the scales beside them.
    """
    if plan.quantization not in RECIPES:
        return graph
    draft, formats = Draft(graph), ProductFormats(plan)
    for section, item in draft.walk():
        node, reads = item.node, item.node.reads
        weight_format = formats.of(node.path, node.source) if node.kind in PRODUCTS else None
        recipe = weight_format and recipe_of(weight_format)
        if not recipe or not recipe.weight_block:
            continue
        stored = [t for t in reads if draft.role(t) in ("weight", "frozen") and draft.dtype(t) == recipe.weight]
        scales = [t for t in reads if draft.role(t) == "buffer" and draft.dtype(t) == "uint8"]
        if len(stored) == len(scales):
            for weight, scale in zip(stored, scales, strict=True):
                draft.sizes[section.ids(scale)] = _scale_bytes(recipe, draft.numel(weight))
    return draft.graph()


def _scale_bytes(recipe: Recipe, numel: int) -> float:
    """Bytes of the scales of a weight of so many elements."""
    return max((ceil(numel / recipe.weight_block) if recipe.weight_block else 1) * recipe.scale_bytes, 4)


def _tf32(graph: Graph) -> Graph:
    """The graph with fp32 products on matrix units, which round what they read by themselves."""
    draft = Draft(graph)
    for _, item in draft.walk():
        op = item.node.op
        if op is not None and op.kind in ("gemm", "grouped_gemm") and op.dtype == "fp32":
            item.change(op=op.replace(dtype="tf32", out_dtype="fp32"))
    return draft.graph()


def _recipe(name: str) -> Recipe:
    bits = 0.0 if name in RECIPES else weight_bits(name)
    if bits:
        return Recipe("", f"int{bits:g}", scale_bytes=0.0)  # its scales are in its bits
    if name not in RECIPES:
        raise PlanError(f"quantization={name!r} has no recipe; {nearest(name, RECIPES, 'known:')}")
    return RECIPES[name]


@lru_cache
def recipe_of(weight_format: WeightFormat) -> Recipe:
    """The recipe of a format of weights, with its own scales."""
    usual = _recipe(weight_format.name)
    block, scale_bytes = weight_format.group or usual.weight_block, weight_format.scale_bytes or usual.scale_bytes
    return replace(usual, weight_block=block, scale_bytes=scale_bytes)


Rounded = dict[tuple[int, str, bool], int]  # tensor, format, whether along the other dimension -> its rounded copy
ABSORBED = ("fused.absorb_keys", "fused.absorb_values")  # engines keep these weights in 16 bits, one matrix a head


class _Product(NamedTuple):
    """A product whose operands are rounded, where it stands, and how."""

    section: Section
    node: Node
    op: Op
    recipe: Recipe


@dataclass
class _Rounding:
    """One rewrite of a draft: what was rounded already, and what stands ready for the backward pass."""

    draft: Draft
    plan: Plan
    formats: ProductFormats
    training: bool
    released: np.ndarray = field(init=False)
    kept: dict[int, tuple[Section, int, int]] = field(default_factory=dict)  # by any id: made in, tensor, its copy
    stored: dict[int, tuple[Section, Recipe]] = field(default_factory=dict)  # weights of products

    def run(self) -> None:
        """Rewrite every section, then settle lifetimes."""
        self.released = freed_tensors(self.draft)
        others: set[int] = set()
        for section in self.draft.sections:
            rounded: Rounded = {}
            items: list[Item] = []
            for item in section.items:
                weight_format = self._format(item.node)
                if weight_format is not None:
                    items += self._round(section, item, weight_format, rounded)
                else:
                    others.update(t for t in item.node.reads if self._weight(t))
                written = set(item.node.writes)  # what is written anew has to be rounded anew
                for key in [key for key in rounded if key[0] in written]:
                    rounded.pop(key)
                items.append(item)
            section.items = items
        for tensor, (section, recipe) in self.stored.items():
            if tensor not in others and self._is_stored(tensor):
                self._store(section, tensor, recipe)
        free_after_last_use(self.draft, self.released)

    def _is_stored(self, tensor: int) -> bool:
        """Whether a weight lies in memory as products read it: all of inference, frozen ones where the plan says so."""
        return not self.training or (self.plan.settings.fp8_params and self.draft.role(tensor) == "frozen")

    def _weight(self, tensor: int) -> bool:
        return self.draft.role(tensor) in ("weight", "frozen")

    def _format(self, node: Node) -> WeightFormat | None:
        """How the weights of a product with (or for) them are packed; None for any other node and in 16 bits."""
        if node.kind not in PRODUCTS or node.work.dtype not in HIGH:
            return None
        if node.source in ABSORBED:
            return None
        of_weight = any(self._weight(t) for t in node.reads) or any(
            self.draft.role(t) == "gradient" for t in node.writes
        )
        return self.formats.of(node.path, node.source) if of_weight else None

    def _round(self, section: Section, item: Item, weight_format: WeightFormat, rounded: Rounded) -> list[Item]:
        """Give a product its format; the nodes that round what it reads."""
        node, op, recipe = item.node, item.node.work, recipe_of(weight_format)
        product = _Product(section, node, op, recipe)
        weights_of_node = [t for t in node.reads if self._weight(t) and self._matrix(t, op)]
        trained = not weights_of_node or any(self.draft.role(t) == "weight" for t in weights_of_node)
        operands = [t for t in node.reads if recipe.activation and self._operand(t, op)]
        self.stored.update((t, (section, recipe)) for t in weights_of_node)
        across = op.kind != "fused_moe" and op.layout == LAYOUT.choices.index("tn")
        names = {t: self._standing(section, item, (t, recipe.activation, across), rounded) for t in operands}
        fresh = [t for t, name in names.items() if name < 0]
        kernels = self._operands(product, fresh, rounded, self.training and trained) if fresh else []
        names.update((t, rounded[t, recipe.activation, across]) for t in fresh)
        if self.training and node.phase == "forward":
            kernels += self._weights(product, [t for t in weights_of_node if self.draft.role(t) == "weight"])
        if recipe.copies == "copy" and node.phase == "backward" and not self._takes_either_way:
            stored = [t for t in weights_of_node if self._is_stored(t)]
            kernels += [self._transpose(product, t) for t in stored]
        changed = op.replace(dtype=recipe.product or weight_format.name, out_dtype=op.out_dtype)
        item.compute(changed, reads=distinct(names.get(t, t) for t in node.reads))
        return kernels

    def _transpose(self, product: _Product, weight: int) -> Item:
        """The node that transposes a stored weight for the product of its input's gradient.

        That product goes on reading the weight, by which the ranks that share it out know it.
        """
        dtype = product.recipe.weight
        copy = self._copy(product.section, weight, dtype)
        op = make_op("copy", size_bytes=ceil(self.draft.numel(weight) * itemsize(dtype)), dtype="uint8")
        return Item(kernel(op, TRANSPOSE, product.node, (weight,), (copy,)))

    def _matrix(self, tensor: int, op: Op) -> bool:
        """Whether a weight is a matrix of a dtype that the recipe rounds, not a bias."""
        larger = op.kind == "fused_moe" or self.draft.numel(tensor) > op.n
        return larger and self.draft.dtype(tensor) in HIGH

    def _operand(self, tensor: int, op: Op) -> bool:
        """Whether a tensor is a matrix that the product multiplies: 16 bits wide, and not just a row or a count."""
        wide = self.draft.dtype(tensor) in HIGH and self.draft.role(tensor) in ("activation", "input")
        return bool(wide and self.draft.sizes[tensor] > 2 * _tokens(op))

    def _standing(self, section: Section, item: Item, key: tuple[int, str, bool], rounded: Rounded) -> int:
        """The rounded copy of an operand kept since the forward pass or made for an earlier product; -1 for none."""
        tensor = key[0]
        if item.node.phase == "backward" and tensor in self.kept:
            source, original, copy = self.kept[tensor]
            names = names_in_section(source, original, [copy], Use(section, item, tensor))
            if names:
                section.steps.update({name: step for name, step in names.items() if step})
                return next(iter(names))
        return rounded.get(key, -1)

    def _operands(self, product: _Product, tensors: Sequence[int], rounded: Rounded, both: bool) -> list[Item]:
        """The nodes that round operands side by side, along ``both`` dimensions where their weight has a gradient."""
        section, node, op, recipe = product
        copies: list[tuple[int, ...]] = []
        for transposed in (False, True)[: 1 + both]:
            copies.append(tuple(self._copy(section, t, recipe.activation) for t in tensors))
            keys = ((t, recipe.activation, transposed) for t in tensors)
            rounded.update(zip(keys, copies[-1], strict=True))
        if both and node.phase != "backward":
            for tensor, copy in zip(tensors, copies[1], strict=True):
                self.kept.update((int(i), (section, tensor, copy)) for i in section.ids(tensor))
        numel = sum(map(self.draft.numel, tensors))
        rows = _tokens(op) if numel % _tokens(op) == 0 else 1
        return self._nodes(product, tuple(tensors), copies, rows, numel // rows)

    def _weights(self, product: _Product, tensors: Sequence[int]) -> list[Item]:
        """The nodes that round weights, in the first micro-batch of a step."""
        if not tensors:
            return []
        cols = product.op.k
        rows = ceil(sum(map(self.draft.numel, tensors)) / cols)
        copies = tuple(self._copy(product.section, t, product.recipe.weight) for t in tensors)
        kernels = self._nodes(product, tuple(tensors), [copies], rows, cols)
        for item in kernels:
            item.change(source=f"{REFRESH}{item.node.source}")
        return kernels

    def _copy(self, section: Section, tensor: int, dtype: str) -> int:
        return self.draft.local(section, ceil(self.draft.numel(tensor) * itemsize(dtype)), dtype)

    def _nodes(self, product: _Product, tensors: Ids, copies: Sequence[Ids], rows: int, cols: int) -> list[Item]:
        """Rounding of [rows, cols] elements into each of the copies."""
        section, node, _, recipe = product
        items: list[Item] = []

        def add(op: Op, name: str, reads: Ids, writes: Ids) -> None:
            items.append(Item(kernel(op, f"fused.{name}", node, reads, writes)))

        dtype, out = self.draft.dtype(tensors[0]), self.draft.dtype(copies[0][0])
        whole = make_op("quantize", rows=rows, cols=cols, block=recipe.block, dtype=dtype, out_dtype=out)
        scaling = "" if recipe.block else self.plan.settings.fp8_scaling
        reads = tensors
        if scaling == "current" or (recipe.of_tensor and self.training):
            scale = self.draft.local(section, 4, "fp32")
            add(whole.replace(part="scale", block=0), "amax", tensors, (scale,))
            reads = (*tensors, scale)
            whole = whole if recipe.block else whole.replace(part="apply")
        first, *others = copies
        if others and self._at_once(recipe, scaling):
            either_way = recipe.copies == "copy" and self._takes_either_way
            both = whole if either_way else whole.replace(part="both")
            add(both, "quantize", reads, (*first, *others[0]))
            return items
        add(whole, "quantize", reads, first)
        for copy in others:
            if recipe.copies == "copy" and scaling != ROWWISE:
                size = ceil(rows * cols * itemsize(out))
                add(make_op("copy", size_bytes=size, dtype="uint8"), "transpose", first, copy)
            else:
                add(whole, "quantize", reads, copy)
        return items

    def _at_once(self, recipe: Recipe, scaling: str) -> bool:
        """Whether one kernel writes what is rounded along both dimensions."""
        return self.plan.stack.rounds_both and not recipe.of_tensor and scaling != ROWWISE

    @cached_property
    def _takes_either_way(self) -> bool:
        """Whether products of FP8 read what is rounded along the rows as their transposed operand, too."""
        return int(self.plan.figures.sm) == EITHER_WAY_SM

    def _store(self, section: Section, tensor: int, recipe: Recipe) -> None:
        """Store a weight in the recipe's format, its scales beside it."""
        draft, ids = self.draft, section.ids(tensor)
        if draft.dtype(tensor) not in HIGH:
            return
        numel = draft.numel(tensor)
        draft.sizes[ids] = ceil(numel * itemsize(recipe.weight))
        draft.dtypes[ids] = draft.code(recipe.weight)
        scales = draft.local(section, _scale_bytes(recipe, numel), "uint8", "buffer")
        for item in section.items:
            if tensor in item.node.reads and item.node.source != TRANSPOSE:
                item.change(reads=(*item.node.reads, scales))


def _tokens(op: Op) -> int:
    """Rows of a product's activations."""
    if op.kind != "gemm":
        return op.tokens
    return op.k if op.layout == LAYOUT.choices.index("tn") else op.m


def _attend(draft: Draft, dtype: str) -> None:
    """Attention in few bits: what comes in is rounded before it, in the backward pass the gradient of the result."""

    def with_cast(section: Section, item: Item) -> list[Item]:
        op = item.node.op
        if op is None or op.kind not in ("attention_prefill", "attention_backward") or op.dtype not in HIGH:
            return [item]
        queries, both = op.heads_q * op.head_dim, op.head_dim + op.v_head_dim
        cols = queries + op.heads_kv * both if op.kind == "attention_prefill" else op.heads_q * op.v_head_dim
        rows = op.batch * op.seq_q
        rounded = draft.local(section, rows * cols * itemsize(dtype), dtype)
        cast = make_op("quantize", rows=rows, cols=cols, dtype=op.dtype, out_dtype=dtype)
        before = Item(kernel(cast, "fused.quantize", item.node, item.node.reads[:1], (rounded,)))
        item.change(op=op.replace(dtype=dtype, out_dtype=op.dtype), reads=(*item.node.reads, rounded))
        item.free(rounded)
        return [before, item]

    expand(draft.sections, with_cast)


def _store_keys(draft: Draft, kv_dtype: str) -> None:
    """Keep keys and values in another format."""
    cache = np.array([draft.role(t) == "cache" for t in range(len(draft.sizes))], dtype=bool)
    for code, name in enumerate(list(draft.dtype_names)):
        if name in HIGH:
            mine = cache & (draft.dtypes == code)
            draft.sizes[mine] = draft.sizes[mine] // 2
            draft.dtypes[mine] = draft.code(kv_dtype)
    for _, item in draft.walk():
        op = item.node.op
        if op is not None and "kv_dtype" in KINDS[op.kind].names and item.node.phase == "forward":
            changed = op.replace(kv_dtype=kv_dtype)
            item.compute(changed)
