"""Named tuples that machine code passes by their address: numba would copy all their fields at each call.

The event loop hands three of them from function to function: hundreds of words. :func:`by_address` writes one down once
and gives a value that has its fields, each of which is read where it is used; named tuples inside are given so, too.
What stands behind the address never changes while it is used, and LLVM is told so.
"""

from __future__ import annotations

import hashlib
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import models
from numba.core.datamodel.registry import register_default
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, intrinsic, lower_getattr_generic


class ByAddress(types.Type):
    """The address of a named tuple of numba's type ``named``. Its name is short, as it is part of that of functions."""

    def __init__(self, named: Any) -> None:
        self.named = named
        super().__init__(f"{named.instance_class.__name__}_{hashlib.sha256(named.name.encode()).hexdigest()[:8]}")

    @property
    def mangling_args(self) -> tuple[str, tuple[()]]:
        """The short name, in the names of functions."""
        return self.name, ()


@register_default(ByAddress)
class AddressModel(models.PrimitiveModel):
    """An address without a type of its own: functions are the same for all tuples that look alike."""

    def __init__(self, manager: Any, kind: ByAddress) -> None:
        super().__init__(manager, kind, ir.IntType(8).as_pointer())


@intrinsic
def by_address(_context: Any, named: Any) -> Any:
    """A named tuple, by its address. It lives as long as the function that asks for it."""

    def write(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = cgutils.alloca_once_value(builder, values[0])
        address = builder.bitcast(pointer, ir.IntType(8).as_pointer())
        # LLVM is told below that what is read never changes: it must not see here that it was written before.
        hide = ir.FunctionType(address.type, [address.type])
        return builder.asm(hide, "", "=r,0,~{memory}", [address], side_effect=True)

    return ByAddress(named)(named), write


@infer_getattr
class FieldTypes(AttributeTemplate):
    """What type a field has."""

    key = ByAddress

    def generic_resolve(self, kind: ByAddress, name: str) -> Any:  # type: ignore[override]
        """That of the tuple; a tuple inside it is by address."""
        if name not in kind.named.fields:
            return None
        field = kind.named.types[kind.named.fields.index(name)]
        return ByAddress(field) if isinstance(field, types.NamedTuple) else field


@lower_getattr_generic(ByAddress)
def read_field(context: Any, builder: Any, kind: ByAddress, address: Any, name: str) -> Any:
    """The value of a field, or the address of a tuple inside."""
    pointer = builder.bitcast(address, context.get_value_type(kind.named).as_pointer())
    field = cgutils.gep_inbounds(builder, pointer, 0, kind.named.fields.index(name))
    if isinstance(kind.named.types[kind.named.fields.index(name)], types.NamedTuple):
        return builder.bitcast(field, address.type)
    return load(builder, field)


def load(builder: Any, pointer: Any) -> Any:
    """What stands at a pointer, word by word, so that words that nobody uses are not read."""
    kind = pointer.type.pointee
    if not isinstance(kind, ir.LiteralStructType | ir.ArrayType):
        word = builder.load(pointer)
        word.set_metadata("invariant.load", builder.module.add_metadata([]))
        return word
    value = ir.Constant(kind, ir.Undefined)
    for index in range(len(kind.elements) if isinstance(kind, ir.LiteralStructType) else kind.count):
        value = builder.insert_value(value, load(builder, cgutils.gep_inbounds(builder, pointer, 0, index)), index)
    return value
