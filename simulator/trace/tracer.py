"""Recording what a step runs: every operator call, on which tensors, from which module.

Fake tensors have shapes and strides but no memory, so a model of any size can be run. :class:`Tracer` stands
above torch's fake mode, sees each operator as the dispatcher does (below autograd, as kernels are called), and
writes it down as a :class:`Call`.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from ..graph import NO_CALLS, HostCalls, layer_of
from .calls import Call, Storage, View
from .values import Values, group_sizes, mask_window
from .workload import TraceError

aten = torch.ops.aten

# Calls that only reserve memory or wrap a number: the host's time, no kernel's.
_NO_WORK = "empty empty_like empty_strided empty_permuted new_empty new_empty_strided scalar_tensor lift_fresh"
NO_WORK = frozenset(f"aten.{name}" for name in _NO_WORK.split())
GROUPED_PRODUCTS = frozenset(
    ("aten._grouped_mm", "transformers.grouped_mm_fallback", "transformers.grouped_mm_fallback_backward")
)


class Signature(NamedTuple):
    """What the tracer needs to know of an operator's schema."""

    name: str
    names: tuple[str, ...]
    written: tuple[str, ...]


@cache
def signature(func: Any) -> Signature:
    schema = func._schema
    written = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    namespace, name = schema.name.split("::")
    return Signature(f"{namespace}.{name}", tuple(a.name for a in schema.arguments), written)


class Tracer(TorchDispatchMode):
    """Runs operators on fake tensors, and records them between :meth:`phase` blocks.

    Use as a context manager around building the model and running it. ``calls`` and ``storages`` (by id) hold the
    record.
    """

    def __init__(self, expert_load: str = "balanced") -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.storages: list[Storage] = []
        self.values = Values(self.storage_id, expert_load)
        self._fake = FakeTensorMode()
        self._ids: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._phase = ""
        self._closed = False
        self._where = ""
        self.inside = ""
        self._pending: list[tuple[str, HostCalls]] = []

    def __enter__(self) -> Self:
        self._fake.__enter__()
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._fake.__exit__(kind, error, trace)

    # --- what the driver tells ---------------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record what runs inside as this phase of the step."""
        self._phase = name
        try:
            yield
        finally:
            self._phase = ""

    def move_to(self, path: str, calls: HostCalls) -> None:
        """What follows belongs to ``path``; ``calls`` is what the host did to get there."""
        self._where = path
        if self._phase and calls != NO_CALLS:
            self._pending.append((path, calls))

    def close(self) -> None:
        """Nothing that happens from here on is part of the step; what the host did last goes with the last call."""
        self._closed = True
        for _, calls in self._pending:
            self.calls[-1].host += calls
        self._pending.clear()

    def alive(self) -> list[int]:
        """Storages that exist now."""
        return sorted(self._alive)

    @property
    def where(self) -> str:
        return self._where

    # --- storages ----------------------------------------------------------------------------------------

    def storage_id(self, tensor: torch.Tensor) -> int:
        """The number of the storage behind a tensor; a new one for a storage not seen before."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        existing = self._ids.get(address)
        if existing is not None:
            return existing
        number = len(self.storages)
        self._ids[address] = number
        self.storages.append(Storage(storage.nbytes(), dtype_name(tensor.dtype)))
        self._alive[number] = weakref.ref(storage, partial(self._expired, address, number))
        return number

    def _expired(self, address: int, number: int, _: object) -> None:
        del self._ids[address], self._alive[number]
        self.values.forget(number)
        if self.calls and not self._closed:
            self.calls[-1].freed.append(number)

    def view(self, tensor: torch.Tensor) -> View:
        return View(self.storage_id(tensor), tuple(tensor.shape), tuple(tensor.stride()), dtype_name(tensor.dtype))

    # --- operators ---------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        schema = signature(func)
        arguments = dict(zip(schema.names, args, strict=False)) | kwargs
        inputs = list(_tensors(arguments.values()))
        ids = [self.storage_id(tensor) for tensor in inputs]
        written = tuple(
            dict.fromkeys(
                self.storage_id(t) for argument in schema.written for t in _tensors((arguments.get(argument),))
            )
        )
        result = self._run(func, args, kwargs, inputs)
        if result is not NotImplemented:
            self.values.follow(func, args, kwargs, inputs, ids, written, result)
        if self._phase:
            self._record(schema, arguments, inputs, ids, written, result)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any, inputs: Sequence[torch.Tensor]) -> Any:
        if func is aten._local_scalar_dense.default:
            return self.values.item(inputs[0], self._where)
        if func is aten._grouped_mm.default:
            return _grouped_product(*args, **kwargs)
        if func is aten.embedding.default:
            self._check_rows(*args[:2])
        try:
            return func(*args, **kwargs)
        except DynamicOutputShapeException:
            return self._sized_by_value(func, args, kwargs)

    def _check_rows(self, table: torch.Tensor, indices: torch.Tensor) -> None:
        """A real call would fail on an index beyond the table; so does this one."""
        content = self.values.of(indices)
        if content is not None and content.numel():
            with torch._C._DisableTorchDispatch():
                highest = int(content.max())
            if highest >= table.shape[0]:
                raise TraceError(
                    f"{self._where or 'the model'} has a table of {table.shape[0]} rows, and position {highest} is "
                    f"beyond it: take {highest - table.shape[0] + 1} less for workload.input_len, in training for "
                    "workload.seq_len"
                )

    def _sized_by_value(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operator whose shape depends on values, such as ``nonzero``."""
        real = self.values.known_arguments((args, kwargs))
        if real is None and func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
            return func(args[0], self._positions(args[1]), *args[2:], **kwargs)
        if real is None:
            raise TraceError(f"{self._where or 'the model'}: the size of {func} depends on weights or data")
        with torch._C._DisableTorchDispatch():
            content = func(*real[0], **real[1])
        is_sequence = isinstance(content, (tuple, list))
        contents = list(content) if is_sequence else [content]
        fakes = [torch.empty_strided(c.shape, c.stride(), dtype=c.dtype) for c in contents]
        for fake, value in zip(fakes, contents, strict=True):
            self.values.assign(fake, value)
        return tuple(fakes) if is_sequence else fakes[0]

    def _positions(self, indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Boolean masks among indices turned into the positions that they select."""
        positions: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or index.dtype != torch.bool:
                positions.append(index)
                continue
            content = self.values.of(index)
            if content is None:
                raise TraceError(f"{self._where or 'the model'}: a boolean index depends on weights or data")
            with torch._C._DisableTorchDispatch():
                where = content.nonzero(as_tuple=True)
            positions.extend(torch.empty(w.shape, dtype=torch.int64) for w in where)
        return positions

    def _record(
        self,
        schema: Signature,
        arguments: dict[str, Any],
        inputs: Sequence[torch.Tensor],
        ids: Sequence[int],
        written: tuple[int, ...],
        result: Any,
    ) -> None:
        outputs = list(_tensors((result,)))
        if schema.name == "aten.lift_fresh" and layer_of(self._where) is None:
            pass  # a new cache makes a counter for each layer, wherever it is made: too little to trace every layer for
        elif schema.name in NO_WORK or (schema.name == "aten.copy_" and arguments["self"] is arguments["src"]):
            self._pending.append((self._where, HostCalls(dispatch=1)))
        elif outputs and not written and all(self.storage_id(out) in ids for out in outputs):
            self._pending.append((self._where, HostCalls(views=1)))
        else:
            self._add(schema, arguments, inputs, outputs, written)

    def _add(
        self,
        schema: Signature,
        arguments: dict[str, Any],
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        written: tuple[int, ...],
    ) -> None:
        call = Call(
            name=schema.name,
            arguments={name: self._argument(value) for name, value in arguments.items()},
            inputs=tuple(self.view(tensor) for tensor in inputs),
            outputs=tuple(self.view(tensor) for tensor in outputs),
            written=written,
            path=self._where,
            phase=self._phase,
            inside=self.inside,
            of_view=bool(inputs) and inputs[0]._is_view(),
        )
        if schema.name in GROUPED_PRODUCTS:
            call.groups = self._look(arguments.get("offs"), group_sizes) or ()
        elif "attention" in schema.name:
            call.attended = self._look(arguments.get("attn_mask", arguments.get("attn_bias")), mask_window)
        self._settle(call)
        self.calls.append(call)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.view(value)
        if isinstance(value, (tuple, list)):
            return tuple(self._argument(item) for item in value)
        return dtype_name(value) if isinstance(value, torch.dtype) else value

    def _look(self, tensor: torch.Tensor | None, function: Callable[[torch.Tensor], Any]) -> Any:
        """What a function makes of a tensor's content; None when there is no tensor or its content is unknown."""
        content = None if tensor is None else self.values.of(tensor)
        if content is None:
            return None
        with torch._C._DisableTorchDispatch():
            return function(content)

    def _settle(self, call: Call) -> None:
        """Give the host's calls since the last node to this one, or to the last one when they were on its layer."""
        layer, last = layer_of(call.path), self.calls[-1] if self.calls else None
        for path, calls in self._pending:
            of_last = last is not None and layer_of(path) != layer and layer_of(path) == layer_of(last.path)
            target = last if of_last and last is not None else call
            target.host = target.host + calls
        self._pending.clear()


class ModulePaths:
    """Which module is running: forward by hooks on every module, backward by what forward has noted."""

    def __init__(self, tracer: Tracer, model: nn.Module) -> None:
        self._tracer = tracer
        self._names = {id(module): name for name, module in model.named_modules()}
        self._parameters = {id(p): name.rpartition(".")[0] for name, p in model.named_parameters()}
        self._stack: list[tuple[str, str]] = []
        self._marks: list[tuple[int, str]] = [(0, "")]

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Follow module calls while inside."""
        hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._stack.append((self._tracer.where, self._tracer.inside))
        self._tracer.inside = "Linear" if isinstance(module, torch.nn.Linear) else type(module).__name__
        self._go(self._names.get(id(module), self._tracer.where), HostCalls(modules=1))

    def _leave(self, module: nn.Module, _: Any, __: Any) -> None:
        path, self._tracer.inside = self._stack.pop()
        self._go(path, NO_CALLS)

    def _go(self, path: str, calls: HostCalls) -> None:
        self._marks.append((torch.autograd._get_sequence_nr(), path))
        self._tracer.move_to(path, calls)

    def follow_backward(self, loss: torch.Tensor) -> None:
        """Have every backward node say, when it begins, which module's forward it belongs to."""
        numbers = [number for number, _ in self._marks]
        visited, stack = set(), [loss.grad_fn]
        while stack:
            node = stack.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            stack.extend(following for following, _ in node.next_functions)
            variable = getattr(node, "variable", None)
            if variable is not None:
                path = self._parameters.get(id(variable), "")
            else:
                path = self._marks[bisect_right(numbers, node._sequence_nr()) - 1][1]
            node.register_prehook(partial(self._begin, path, node.name()))
            if variable is None:
                node.register_hook(self._end)

    def _begin(self, path: str, name: str, _: Any) -> None:
        self._tracer.inside = name
        self._tracer.move_to(path, HostCalls(autograd=1))

    def _end(self, _: Any, __: Any) -> None:
        """From here to the next node it is the engine that adds up gradients."""
        self._tracer.inside = ""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _grouped_product(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    """The shape of ``_grouped_mm`` for every dtype (torch's own rule for fake tensors knows bf16 only).

    Rows of the result start on 16 bytes, as ``aten/src/ATen/native/GroupedMMUtils.h`` has it.
    """
    shape: tuple[int, ...]
    if a.dim() == 2 and b.dim() == 2:
        shape = (0 if offs is None else offs.shape[0], a.shape[0], b.shape[1])
    elif a.dim() == 2:
        shape = (a.shape[0], b.shape[-1])
    else:
        shape = (a.shape[0], a.shape[1], b.shape[-1]) if b.dim() == 3 else (a.shape[1], b.shape[1])
    per_line = 16 // a.element_size()
    width = -(-shape[-1] // per_line) * per_line
    stride = (shape[-2] * width, width, 1)[-len(shape) :]
    return torch.empty_strided(shape, stride, dtype=out_dtype or a.dtype)


@contextmanager
def take_real_paths() -> Iterator[None]:
    """While inside, transformers takes for fake tensors the paths it takes for real ones.

    It asks whether a tensor is fake before it looks at values; here the values can be looked at.
    """
    try:
        from transformers.utils import import_utils
    except ImportError:
        yield
        return
    names = vars(import_utils)
    original = names.get("is_fake_tensor")
    names["is_fake_tensor"] = lambda _: False
    try:
        yield
    finally:
        names["is_fake_tensor"] = original
