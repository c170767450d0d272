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
from .classes import known_config, loader, wraps
from .kbit import prepare_kbit
from .models import Source
from .next_tokens import add_next_tokens
from .switches import settle_switches
from .vision import left_to_language
from .workload import TraceError, Workload

TORCH_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Built:
    """A module and, where it brought one, the function that makes its example inputs."""

    module: nn.Module
    example: Callable[[Workload], Any] | None = None


def load_config(source: Source) -> Any:
    """transformers' configuration object; TraceError when transformers does not take it."""
    from transformers import AutoConfig

    with quiet():
        config = known_config(source.name, copy.deepcopy(source.config or {}))  # some write into it
        model_type = config.pop("model_type")
        try:
            return AutoConfig.for_model(model_type, **config)
        except Exception as error:
            raise TraceError(f"model {source.name}: {one_line(error)}") from None


def build(source: Source, workload: Workload, precision: str, config: Any = None) -> Built:
    """The module with weights in ``precision``, randomly initialised unless the caller has turned that off.

    ``config`` is a changed configuration to build instead of the source's own.
    """
    dtype = getattr(torch, TORCH_DTYPES[precision])
    if source.factory is not None:
        made = _made(source, dtype)
        return Built(_as_trained(made.module, workload, source.name), made.example)
    config = copy.deepcopy(config) if config is not None else load_config(source)
    experts = {"experts_implementation": workload.experts} if workload.experts else {}
    with quiet():
        try:
            module = loader(source.name, config, workload).from_config(config, dtype=dtype, **experts)
        except TraceError:
            raise
        except Exception as error:
            raise TraceError(f"model {source.name}: {one_line(error)}") from None
    if wraps(config) and not workload.images:
        module = left_to_language(module)
    module.tie_weights()  # part of the initialisation that a trace leaves out
    settle_switches(module)
    if workload.training and workload.mtp_layers:
        add_next_tokens(module, workload.mtp_layers, source.name)
    return Built(_as_trained(module, workload, source.name))


def _as_trained(module: nn.Module, workload: Workload, name: str) -> nn.Module:
    """The module with what the workload trains of it, and what it keeps in few bits prepared for that."""
    if workload.trains_part:
        module = choose_trained(module, workload, name)
    return prepare_kbit(module) if workload.kbit else module


def structure(source: Source, workload: Workload, precision: str, config: Any = None) -> nn.Module:
    """The module on the meta device: parameters with shapes, no memory, no initialisation."""
    with torch.device("meta"), uninitialised():
        return build(source, workload, precision, config).module


def _made(source: Source, dtype: torch.dtype) -> Built:
    """What a factory returns: a module, or a module and the function that makes its example inputs."""
    factory = source.factory if callable(source.factory) else _imported(str(source.factory))
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        made = factory()
    except SystemExit:
        raise TraceError(f"model {source.name}: the function ended the process instead of returning a module") from None
    finally:
        torch.set_default_dtype(before)
    module, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module):
        raise TraceError(f"model {source.name}: the factory returned {type(made).__name__}, not an nn.Module")
    return Built(module, example)


def _imported(name: str) -> Callable[[], Any]:
    module, _, attribute = name.partition(":")
    try:
        target: Any = importlib.import_module(module)
        for part in attribute.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        raise TraceError(f"model {name}: {one_line(error)}") from None
    if not callable(target):
        raise TraceError(f"model {name}: {attribute} is a {type(target).__name__}, not a function")
    return target


def uninitialised() -> AbstractContextManager[Any]:
    """Leave out the random initialisation of weights, torch's and transformers'."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:
        return nullcontext()
    return no_init_weights()


@contextmanager
def new_on_conversion() -> Iterator[None]:
    """``module.to(dtype)`` gives a module new parameters: torch would swap fake ones in place, and then refuses to."""
    usual = nn.Module._apply

    def convert(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(function)
        with torch.no_grad():
            for name, held in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(function(held), held.requires_grad))
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, function(buffer))
        return module

    nn.Module._apply = convert  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = usual  # type: ignore[method-assign]


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' advice about configurations, and torch's tracebacks of what we catch, off the terminal."""
    loggers = {"transformers": logging.CRITICAL, "torch._subclasses.fake_tensor": logging.CRITICAL}
    before = {name: logging.getLogger(name).level for name in loggers}
    for name, level in loggers.items():
        logging.getLogger(name).setLevel(level)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
