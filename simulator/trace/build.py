"""From a found model to a module, for real, on fake tensors, or as bare structure on torch's meta device."""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .adapters import choose_trained
from .amiss import explained, one_line
from .classes import choose_loader, known_config, wraps
from .kbit import prepare_kbit
from .models import Source
from .next_tokens import add_next_tokens
from .switches import simplify_switches
from .vision import drop_vision
from .workload import TraceError, Workload

TORCH_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class BuiltModel:
    """A module and, where it brought one, the function that makes its example inputs."""

    module: nn.Module
    example: Callable[[Workload], Any] | None = None


def load_config(source: Source) -> Any:
    """transformers' configuration object; TraceError when transformers does not take it."""
    from transformers import AutoConfig

    with silence_libraries():
        config = known_config(source.name, copy.deepcopy(source.config or {}))  # some write into it
        model_type = config.pop("model_type")
        try:
            return AutoConfig.for_model(model_type, **config)
        except Exception as error:
            raise TraceError(f"model {source.name}: {explained(error, source.config)}") from None


def build(source: Source, workload: Workload, precision: str, config: Any = None) -> BuiltModel:
    """The module with weights in ``precision``, randomly initialised unless the caller has turned that off.

    ``config`` is a changed configuration to build instead of the source's own.
    """
    dtype = getattr(torch, TORCH_DTYPES[precision])
    if source.factory is not None:
        built = _call_factory(source, dtype)
        return BuiltModel(_prepare_training(built.module, workload, source.name), built.example)
    config = copy.deepcopy(config) if config is not None else load_config(source)
    experts = {"experts_implementation": workload.experts} if workload.experts else {}
    with silence_libraries():
        try:
            module = choose_loader(source.name, config, workload).from_config(config, dtype=dtype, **experts)
        except TraceError:
            raise
        except Exception as error:
            raise TraceError(f"model {source.name}: {explained(error, source.config)}") from None
    if wraps(config) and not workload.images:
        module = drop_vision(module)
    module.tie_weights()  # part of the initialisation that a trace leaves out
    simplify_switches(module)
    if workload.training and workload.mtp_layers:
        add_next_tokens(module, workload.mtp_layers, source.name)
    return BuiltModel(_prepare_training(module, workload, source.name))


def _prepare_training(module: nn.Module, workload: Workload, name: str) -> nn.Module:
    """The module with what the workload trains of it, and what it keeps in few bits prepared for that."""
    if workload.trains_part:
        module = choose_trained(module, workload, name)
    return prepare_kbit(module) if workload.kbit else module


def build_structure(source: Source, workload: Workload, precision: str, config: Any = None) -> nn.Module:
    """The module on the meta device: parameters with shapes, no memory, no initialisation."""
    with torch.device("meta"), skip_initialisation():
        return build(source, workload, precision, config).module


def _call_factory(source: Source, dtype: torch.dtype) -> BuiltModel:
    """What a factory returns: a module, or a module and the function that makes its example inputs."""
    factory = source.factory if callable(source.factory) else _import_factory(str(source.factory))
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        result = factory()
    except SystemExit:
        raise TraceError(f"model {source.name}: the function ended the process instead of returning a module") from None
    finally:
        torch.set_default_dtype(default_dtype)
    module, example = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(module, nn.Module):
        raise TraceError(f"model {source.name}: the factory returned {type(result).__name__}, not an nn.Module")
    return BuiltModel(module, example)


def _import_factory(name: str) -> Callable[[], Any]:
    module, _, attribute = name.partition(":")
    try:
        target: Any = importlib.import_module(module)
        for attribute_name in attribute.split("."):
            target = getattr(target, attribute_name)
    except (ImportError, AttributeError) as error:
        raise TraceError(f"model {name}: {one_line(error)}") from None
    if not callable(target):
        raise TraceError(f"model {name}: {attribute} is a {type(target).__name__}, not a function")
    return target


def skip_initialisation() -> AbstractContextManager[Any]:
    """Leave out the random initialisation of weights, torch's and transformers'."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:
        return nullcontext()
    return no_init_weights()


@contextmanager
def replace_on_conversion() -> Iterator[None]:
    """``module.to(dtype)`` gives a module new parameters: torch would swap fake ones in place, and then refuses to."""
    original = nn.Module._apply

    def convert(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(function)
        with torch.no_grad():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(function(parameter), parameter.requires_grad))
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, function(buffer))
        return module

    nn.Module._apply = convert  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


@contextmanager
def silence_libraries() -> Iterator[None]:
    """Keep transformers' advice about configurations, and torch's tracebacks of what we catch, off the terminal."""
    loggers = {"transformers": logging.CRITICAL, "torch._subclasses.fake_tensor": logging.CRITICAL}
    levels = {name: logging.getLogger(name).level for name in loggers}
    for name, level in loggers.items():
        logging.getLogger(name).setLevel(level)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
