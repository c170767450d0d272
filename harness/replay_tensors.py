"""Tensors and calls of operators that a host trace of PyTorch recorded, made anew with random values.

A tensor of a trace is ``[tensor, storage, offset, elements, bytes of one, device]``. What no earlier call made is
allocated on the device of the replay, all that share a storage in one buffer: whole numbers are 0, so that they are
valid as indices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..datasets.traces.calls import TENSOR_TYPES, TraceCall, tensor_types
from .cases.base import TORCH_DTYPES, Unsupported
from .environment import free_memory_bytes

MOST_OF_FREE = 0.9  # of the free memory that one tensor may take
TILE = 1 << 16
MOST_BYTES = 1 << 40
Key = tuple[int, ...]


def is_tensor(value: Any) -> bool:
    """Whether a value of a trace is a tensor."""
    return isinstance(value, (list, tuple)) and len(value) == 6 and isinstance(value[5], str)


def key_of(value: Sequence[Any]) -> Key:
    """What tells tensors of a trace apart."""
    return tuple(int(item) for item in value[:5])


@dataclass(frozen=True)
class Place:
    """A tensor that a call takes: where it lies in its storage, and of what form it is."""

    key: Key
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def storage(self) -> tuple[int, torch.dtype]:
        return self.key[1], self.dtype


def places_of(call: TraceCall) -> list[Place]:
    """The tensors that an operator takes. Unsupported for types that torch has no tensors of."""
    places: list[Place] = []
    for value, shape, type_text in zip(call.values, call.shapes, call.types, strict=True):
        names = tensor_types(type_text)
        if not names:
            continue
        tensors = [value] if is_tensor(value) else [item for item in value if is_tensor(item)]
        shapes = [shape] if is_tensor(value) else [item for item in shape if isinstance(item, (list, tuple))]
        for tensor, form, name in zip(tensors, shapes, names, strict=False):
            if name not in TENSOR_TYPES:
                raise Unsupported(f"tensors of {name}")
            dtype = getattr(torch, TORCH_DTYPES[TENSOR_TYPES[name]])
            places.append(Place(key_of(tensor), tuple(int(size) for size in form), dtype))
    return places


@dataclass
class TensorPool:
    """Tensors by what tells them apart. What a call made stands under its own key while a call ``wanted`` it."""

    device: str
    extents: dict[tuple[int, torch.dtype], int] = field(default_factory=dict)
    storages: dict[tuple[int, torch.dtype], torch.Tensor] = field(default_factory=dict)
    held: dict[Key, torch.Tensor] = field(default_factory=dict)
    wanted: set[Key] = field(default_factory=set)

    def expect(self, tensor_place: Place) -> None:
        """Let the storage of a tensor be large enough for it."""
        elements = tensor_place.key[2] + max(math.prod(tensor_place.shape), tensor_place.key[3])
        if elements * tensor_place.dtype.itemsize > MOST_BYTES:
            raise Unsupported(f"a tensor of {elements:,} elements")
        self.extents[tensor_place.storage] = max(self.extents.get(tensor_place.storage, 0), elements)

    def get(self, tensor_place: Place) -> torch.Tensor:
        """The tensor, allocated where nobody made it."""
        if tensor_place.key not in self.held:
            if tensor_place.storage not in self.storages:
                self.storages[tensor_place.storage] = self._filled(
                    self.extents[tensor_place.storage], tensor_place.dtype
                )
            begin, count = tensor_place.key[2], math.prod(tensor_place.shape)
            self.held[tensor_place.key] = self.storages[tensor_place.storage][begin : begin + count].view(
                tensor_place.shape
            )
        return self.held[tensor_place.key]

    def keep(self, values: Iterable[Any], result: Any) -> None:
        """What a call returned, under the keys that the trace has for it."""
        tensors = [result] if isinstance(result, torch.Tensor) else list(_tensors(result))
        keys = list(recorded_keys(values))
        if len(tensors) == len(keys):
            self.held.update((key, tensor) for key, tensor in zip(keys, tensors, strict=True) if key in self.wanted)

    def drop(self, places: Iterable[Place]) -> None:
        """Let tensors go, and storages that none of the held ones lies in."""
        for tensor_place in places:
            self.held.pop(tensor_place.key, None)
            if not any(key[1] == tensor_place.key[1] for key in self.held):
                self.storages.pop(tensor_place.storage, None)

    def _filled(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        needed, free = count * dtype.itemsize, free_memory_bytes(self.device)
        if needed > MOST_OF_FREE * free:  # a process that takes too much memory is killed without a word
            raise Unsupported(f"a tensor of {needed / 2**30:,.1f} GiB; {free / 2**30:,.1f} GiB are free")
        if not dtype.is_floating_point:
            return torch.zeros(count, dtype=dtype, device=self.device)
        tile = torch.rand(min(count, TILE), device=self.device).to(dtype)
        return tile.repeat(-(-count // TILE) or 1)[:count].clone()


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    for item in result if isinstance(result, (list, tuple)) else ():
        if isinstance(item, torch.Tensor):
            yield item
        else:
            yield from _tensors(item)


def recorded_keys(values: Iterable[Any]) -> Iterator[Key]:
    """The keys of all tensors among values, those in lists too."""
    for value in values:
        if is_tensor(value):
            yield key_of(value)
        elif isinstance(value, (list, tuple)):
            yield from recorded_keys(value)


def operator_of(call: TraceCall) -> tuple[Callable[..., Any], Any]:
    """The operator of a schema, and the schema. Unsupported where this torch has no such operator."""
    try:
        schema: Any = torch._C.parse_schema(call.schema)
        space, _, name = schema.name.partition("::")
        return getattr(getattr(getattr(torch.ops, space), name), schema.overload_name or "default"), schema
    except (AttributeError, RuntimeError) as error:
        raise Unsupported(f"no operator {call.schema.partition('(')[0]}: {str(error).splitlines()[0][:80]}") from None


def arguments_of(call: TraceCall, schema: Any, pool: TensorPool) -> tuple[list[Any], dict[str, Any]]:
    """What an operator is called with. Unsupported for arguments that a trace cannot tell."""
    places = iter(places_of(call))
    plain: list[Any] = []
    named: dict[str, Any] = {}
    for argument, value, kind in zip(schema.arguments, call.values, call.types, strict=False):
        arguments = _argument(value, kind, places, pool)
        if argument.kwarg_only:
            named[argument.name] = arguments
        else:
            plain.append(arguments)
    return plain, named


def _argument(value: Any, kind: str, places: Iterator[Place], pool: TensorPool) -> Any:
    if tensor_types(kind):
        if is_tensor(value):
            return pool.get(next(places))
        return [pool.get(next(places)) if is_tensor(item) else None for item in value]
    if kind in ("Int", "Bool", "Double", "String"):
        return value
    if kind == "None" or value in (None, "None", ""):
        return None
    if kind == "Device":
        return torch.device(pool.device)
    if kind.startswith("GenericList") and isinstance(value, (list, tuple)) and "Object" not in kind:
        return list(value)
    raise Unsupported(f"arguments of type {kind[:40]}")
