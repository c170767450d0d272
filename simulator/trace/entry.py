"""From a model and a workload to its graph: out of the cache, or traced, folded and put there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..graph import Graph
from . import cache
from .fold import assemble, fold
from .models import Model, Source, resolve
from .nodes import describe_gaps
from .optimizer import add_adamw
from .workload import PRECISIONS, TraceError, Workload, choose

if TYPE_CHECKING:
    from torch import nn


def trace(model: Model, workload: Workload, precision: str = "bf16", cache_dir: str | Path | None = None) -> Graph:
    """The graph of one step of a model.

    ``model`` is whatever :func:`.models.resolve` takes. ``precision`` is the format of weights and activations
    (``fp32``, ``bf16``, ``fp16``). ``cache_dir`` keeps graphs between calls; a graph found there is returned
    without importing torch. TraceError (a ValueError) says in one line what cannot be traced and why.
    """
    choose("precision", precision, PRECISIONS)
    source = resolve(model)
    directory = None if cache_dir is None or source.identity is None else Path(cache_dir)
    name = cache.graph_name(source, workload, precision)
    cached = None if directory is None else cache.load_graph(directory, name)
    if cached is not None:
        return cached
    graph = trace_source(source, workload, precision)
    if directory is not None:
        with suppress(OSError):  # a full disk, or a folder in its place: the next call traces again
            cache.save_graph(directory, name, graph)
    return graph


def trace_source(source: Source, workload: Workload, precision: str, every_layer: bool = False) -> Graph:
    """Trace a found model. Of layers that are alike only a few are run, unless ``every_layer`` says otherwise."""
    graph = None
    if source.config is not None and not every_layer:
        graph = _trace_few_layers(source, workload, precision)
    if graph is None:
        graph = _trace_folded(source, workload, precision, None)
    if workload.training and workload.optimizer == "adamw":
        graph = add_adamw(graph)
    return replace(graph, model_flops=model_flops(graph, workload), notes=describe_gaps(graph))


def _trace_folded(source: Source, workload: Workload, precision: str, config: Any) -> Graph:
    from .build import build
    from .capture import capture

    with foreign_code(source, workload):
        step = capture(lambda: build(source, workload, precision, config), workload)
    properties = {"name": source.name, "parameters": step.parameters, "model_flops": 0.0}
    return fold(assemble(step.nodes, step.tensors, **properties))


@contextmanager
def foreign_code(source: Source, workload: Workload) -> Iterator[None]:
    """Within, whatever a model's own code raises is a TraceError in one line."""
    from .amiss import explained

    try:
        yield
    except TraceError:
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] in cache.PACKAGES:
            raise  # the command names what brings it
        hint = describe_overlong(source, workload) or explained(error, source.config)
        raise TraceError(f"model {source.name} does not run workload={workload.kind}: {hint}") from error


def describe_overlong(source: Source, workload: Workload) -> str:
    """What to do where a sequence is longer than the positions that a model has; "" where it is not."""
    config = source.language
    positions = config.get("max_position_embeddings") or config.get("n_positions")
    new = int(workload.kind == "decode")  # the token that a decode step makes has a position, too
    if not isinstance(positions, int) or workload.seq_len + new <= positions:
        return ""
    name = "seq_len" if workload.training else "input_len"
    return f"it has {positions} positions, not {workload.seq_len + new}; take workload.{name}={positions - new}"


def _trace_few_layers(source: Source, workload: Workload, precision: str) -> Graph | None:
    """The graph of all layers from a trace of a few, or None when the model does not allow it."""
    from .build import build_structure, load_config
    from .deepen import MIN_ROUNDS, DeepenError, add_unread_tensors, deepen
    from .depth import layer_kinds, per_layer_settings, plan_depth, shorten_config

    with foreign_code(source, workload):
        config = load_config(source)
        structure = build_structure(source, workload, precision, config)
        # where backward ends in the first layer that trains, this one is unlike those after it
        depth = plan_depth(structure, config, MIN_ROUNDS + workload.trains_part)
        if depth is None:
            return None
        try:
            short = shorten_config(config, depth.traced)
            short_stack = build_structure(source, workload, precision, short).get_submodule(depth.stack)
        except (ValueError, AttributeError, TypeError):
            return None  # the configuration ties other settings to the number of layers
        text = config.get_text_config()
        expected_kinds = layer_kinds(structure.get_submodule(depth.stack), text, per_layer_settings(text))[
            : depth.traced
        ]
        if layer_kinds(short_stack, short.get_text_config(), per_layer_settings(text)) != expected_kinds:
            return None
    try:
        graph = deepen(_trace_folded(source, workload, precision, short), depth.stack, depth.first, depth.missing)
    except DeepenError:
        return None
    module_bytes = _module_bytes(structure)
    if resident_bytes(graph) != module_bytes:
        graph = add_unread_tensors(graph, depth.traced, depth.missing)
    if resident_bytes(graph) != module_bytes:
        return None
    trained = {id(p): p.numel() for p in structure.parameters() if p.requires_grad}
    return replace(graph, parameters=sum(trained.values()))


def resident_bytes(graph: Graph) -> int:
    """Bytes of parameters and buffers."""
    return sum(t.size_bytes * t.count for t in graph.tensors if t.role in ("weight", "frozen", "buffer"))


def _module_bytes(module: nn.Module) -> int:
    sizes = {id(t): t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers())}
    return sum(sizes.values())


def model_flops(graph: Graph, workload: Workload) -> float:
    """Matrix products and attention of the forward pass, in training with those of its backward pass.

    Backward costs two forwards, and less where it computes less: no gradient of inputs or of frozen weights. What it
    computes beyond that (attention's scores again) is not the model's, unless part of the model is frozen.
    """
    forward = phase_flops(graph, "forward")
    if not workload.training:
        return forward
    backward = phase_flops(graph, "backward")
    return forward + (backward if workload.trains_part else min(backward, 2 * forward))


def phase_flops(graph: Graph, phase: str) -> float:
    """Matrix products and attention of a phase."""
    flops = 0.0
    for node, times in graph.weighted():
        if node.phase == phase and node.op is not None:
            cost = node.op.cost
            flops += times * float(cost.flops) if cost.unit == "tensor" else 0.0
    return flops
