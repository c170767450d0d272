"""Execution traces as JSON, of which there are four kinds, all called Chakra's.

- PyTorch's host trace (schema 1.0.1 flat, from 1.0.2 on nested), and the same with devices, as a linker leaves it
- what Chakra's jsonizer prints: protobuf's JSON, one object right after the other
- the ``workload_graph`` that the feeder reads from ``.json``
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..files import write_atomically
from .builder import Attribute, TraceBuilder
from .protobuf import open_unpacked
from .schema import ARMS, FEEDER_ARMS, NodeKind, TraceFileError
from .table import IO_FIELDS, ExecutionTrace

HOST_ATTRIBUTES = {
    "rf_id": "uint64", "fw_parent": "uint64", "seq_id": "int64", "scope": "uint64", "tid": "uint64", "fw_tid": "uint64",
    "op_schema": "string", "kernel_backend": "string", "kernel_file": "string",
}  # fmt: skip
LINKED_ATTRIBUTES = {"ts": "double", "cat": "string", "ph": "string", "stream": "int64", "pg_name": "string",
          "exclusive_dur": "double", "external_id": "string"}  # fmt: skip
GRAPH_ATTRIBUTES = ("tensor_size", "comm_type", "comm_priority", "comm_size", "comm_src", "comm_dst", "comm_tag")
FORM_ERRORS = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError)
"""What values of another kind than a form has raise."""

Object = Mapping[str, Any]


def read_json(path: Path) -> ExecutionTrace:
    """A trace in any of the forms. TraceFileError for what is none, naming the node."""
    try:
        return _read_form(path, list(_read_objects(path)))
    except FORM_ERRORS as error:
        if isinstance(error, TraceFileError):
            raise error if str(path) in str(error) else TraceFileError(f"{path}: {error}") from None
        raise TraceFileError(f"{path} does not begin as an execution trace does: {str(error)[:80]}") from None


def is_profile(path: Path) -> bool:
    """Whether a JSON file is one of the PyTorch profiler; of what is no JSON, no."""
    with open_unpacked(path) as file:
        start = file.read(1 << 16).decode("utf-8", "replace")
    if '"nodes"' in start or '"workload_graph"' in start:
        return False
    return '"traceEvents"' in start or '"deviceProperties"' in start or '"schemaVersion"' in start


def _read_form(path: Path, objects: list[Object]) -> ExecutionTrace:
    first = objects[0]
    if isinstance(first.get("workload_graph"), list):
        return _build(
            path, first["workload_graph"], TraceBuilder(_head_attributes(first, ("workload_name", "soc"))), _graph_node
        )
    if isinstance(first.get("nodes"), list) and "schema" in first:
        about = [(name, arm, first[name]) for name, arm in (("schema", "string"), ("pid", "uint64"), ("time", "string"),
                 ("start_ts", "uint64"), ("finish_ts", "uint64")) if first.get(name) is not None]  # fmt: skip
        flat = str(first["schema"]).startswith("1.0.1")
        return _build(path, first["nodes"], TraceBuilder(about, ""), _flat_node if flat else _host_node)
    if "traceEvents" in first:
        raise TraceFileError(f"{path} is a trace of the PyTorch profiler, no execution trace: link it to one")
    if len(objects) > 1 or "version" in first:
        head = TraceBuilder(
            [_proto_attribute(attribute) for attribute in first.get("attr", ())], str(first.get("version", ""))
        )
        return _build(path, objects[1:], head, _proto_node)
    raise TraceFileError(f"{path} is JSON, but no execution trace: it has neither nodes nor a workload_graph")


def _read_objects(path: Path) -> Iterator[Object]:
    """The objects of a file, one right after the other."""
    with open_unpacked(path) as file:
        try:
            text = file.read().decode()
        except (OSError, EOFError, ValueError) as error:
            raise TraceFileError(f"{path} is broken off or damaged: {str(error)[:80]}") from None
    decode, at, count = json.JSONDecoder().raw_decode, 0, 0
    while True:
        while at < len(text) and text[at] in " \t\r\n":
            at += 1
        if at == len(text):
            break
        try:
            value, at = decode(text, at)
        except (ValueError, RecursionError) as error:
            raise TraceFileError(f"{path} is broken off or no JSON: {str(error)[:80]}") from None
        if not isinstance(value, dict):
            raise TraceFileError(f"{path} is JSON, but no execution trace: it holds {type(value).__name__}")
        count += 1
        yield value
    if not count:
        raise TraceFileError(f"{path} is empty: it holds no execution trace")


def _build(
    path: Path, nodes: Iterable[Any], builder: TraceBuilder, add: Callable[[TraceBuilder, Object], None]
) -> ExecutionTrace:
    for index, node in enumerate(nodes):
        try:
            add(builder, node)
        except TraceFileError as error:
            raise TraceFileError(f"{path}: {error}") from None
        except FORM_ERRORS as error:
            id = node.get("id", node.get("Id")) if isinstance(node, Mapping) else None
            label = f"node {id}" if id is not None else f"node number {index + 1} of the file"
            why = f"lacks {error}" if isinstance(error, KeyError) else str(error)[:80]
            raise TraceFileError(f"{path}: {label} is not as this form has it: {why}") from None
    return builder.trace()


def _head_attributes(first: Object, names: Iterable[str]) -> list[Attribute]:
    return [(name, "string", first[name]) for name in names if first.get(name) is not None]


# --- of PyTorch ----------------------------------------------------------------------------------------


def _flat_node(builder: TraceBuilder, node: Object) -> None:
    """Schema 1.0.1: everything beside each other."""
    sides = [[repr(node[f"{side}{column}"]) for column in ("s", "_shapes", "_types")] for side in ("input", "output")]
    attributes = [(name, HOST_ATTRIBUTES[name], node[name]) for name in HOST_ATTRIBUTES if name in node]
    _add_host(builder, node, node["parent"], sides, attributes)


def _host_node(builder: TraceBuilder, node: Object) -> None:
    """Schema 1.0.2 and later: inputs and outputs of their own, attributes with their kinds."""
    attributes = [(attribute["name"], attribute["type"], attribute["value"]) for attribute in node.get("attrs", ())]
    sides = []
    for side in ("inputs", "outputs"):
        sides.append([repr(node[side].get(column, [])) for column in IO_FIELDS])
        if "strides" in node[side]:
            attributes.append((f"{side}_strides", "string", repr(node[side]["strides"])))
    _add_host(builder, node, node["ctrl_deps"], sides, attributes)


def _add_host(
    builder: TraceBuilder, node: Object, parent: Any, sides: list[list[str]], attributes: list[Attribute]
) -> None:
    parents = parent if isinstance(parent, list) else [] if parent is None else [parent]
    present = {name for name, _, _ in attributes}
    attributes += [
        (name, arm, node[name])
        for name, arm in LINKED_ATTRIBUTES.items()
        if node.get(name) is not None and name not in present
    ]
    on_device = str(node.get("cat")) in ("kernel", "gpu_memcpy", "gpu_memset")
    dependency_lists = [node[name] for name in ("sync_dep", "inter_thread_dep") if node.get(name)]
    builder.add(
        int(node["id"]),
        str(node["name"]),
        NodeKind.COMP,
        start_us=node.get("ts") or 0,
        duration_us=node.get("inclusive_dur") or node.get("dur") or 0,
        control=[int(id) for id in parents if id != node["id"]],
        data=[int(id) for ids in dependency_lists for id in (ids if isinstance(ids, list) else [ids])],
        inputs=sides[0],
        outputs=sides[1],
        attributes=[("is_cpu_op", "bool", not on_device), *attributes],
    )


# --- of the feeder -------------------------------------------------------------------------------------


def _graph_node(builder: TraceBuilder, node: Object) -> None:
    attributes = [("is_cpu_op", "bool", bool(node.get("is_cpu_op", False)))]
    attributes += [(name, FEEDER_ARMS[name], node[name]) for name in GRAPH_ATTRIBUTES if node.get(name) is not None]
    control = node.get("ctrlDeps") or []
    builder.add(
        int(node["Id"]), str(node["Name"]), int(node["NodeType"]), duration_us=node.get("runtime") or 0,
        control=[int(id) for id in control], data=[int(id) for id in node.get("data_deps") or []],
        attributes=attributes,
    )  # fmt: skip


# --- of protobuf ---------------------------------------------------------------------------------------


def _proto_node(builder: TraceBuilder, node: Object) -> None:
    sides = [
        None if name not in node else [str(node[name].get(column, "")) for column in IO_FIELDS]
        for name in ("inputs", "outputs")
    ]
    docs = {item["name"]: item["docString"] for item in node.get("attr", ()) if "docString" in item}
    kind = node.get("type", 0)
    builder.add(
        int(node.get("id", 0)), str(node.get("name", "")),
        NodeKind[str(kind).removesuffix("_NODE")] if isinstance(kind, str) else int(kind),
        start_us=int(node.get("startTimeMicros", 0)), duration_us=int(node.get("durationMicros", 0)),
        control=[int(id) for id in node.get("ctrlDeps", ())], data=[int(id) for id in node.get("dataDeps", ())],
        inputs=sides[0], outputs=sides[1], docs=docs,
        attributes=[_proto_attribute(attribute) for attribute in node.get("attr", ())],
    )  # fmt: skip


def _proto_attribute(attribute: Object) -> Attribute:
    for key, value in attribute.items():
        arm = key.removesuffix("Val").removesuffix("List")
        if arm in ARMS:
            values = value.get("values", []) if key.endswith("List") else [value]
            if arm == "bytes":
                values = [base64.b64decode(item) for item in values]
            elif arm in ("double", "float"):
                values = [float(item) for item in values]
            elif arm not in ("string", "bool"):
                values = [int(item) for item in values]
            return str(attribute.get("name", "")), arm + ("_list" if key.endswith("List") else ""), (
                values if key.endswith("List") else values[0]
            )  # fmt: skip
    return str(attribute.get("name", "")), "", None


def write_json(path: Path, trace: ExecutionTrace) -> Path:
    """Write a trace as Chakra's jsonizer prints it. TraceFileError where that cannot be."""

    def fill(unfinished: Path) -> None:
        with open(unfinished, "w") as file:
            head = {"version": trace.version} if trace.version else {}
            file.write(json.dumps({**head, **_attributes_in_json(trace, None)}, indent=2))
            for row in range(len(trace)):
                file.write(json.dumps(_in_json(trace, row), indent=2))

    return write_atomically(path, fill, TraceFileError, "the trace ")


def _in_json(trace: ExecutionTrace, row: int) -> dict[str, Any]:
    """One node; what is 0 or empty is left out, 64 bits are text, as protobuf has it."""
    kind = int(trace.kind[row])
    plain: dict[str, Any] = {
        "id": str(trace.ids[row]) if trace.ids[row] else None,
        "name": trace.name_of(row) or None,
        "type": None
        if not kind
        else f"{NodeKind(kind).name}_NODE"
        if kind in {kind.value for kind in NodeKind}
        else kind,
        "ctrlDeps": [str(id) for id in trace.control.row(row)] or None,
        "dataDeps": [str(id) for id in trace.data.row(row)] or None,
        "startTimeMicros": str(trace.start_us[row]) if trace.start_us[row] else None,
        "durationMicros": str(trace.duration_us[row]) if trace.duration_us[row] else None,
    }
    fields = {name: value for name, value in plain.items() if value is not None}
    for name, column in (("inputs", trace.inputs), ("outputs", trace.outputs)):
        if column[row, 0] >= 0:
            fields[name] = {
                io_field: trace.words[word] for io_field, word in zip(IO_FIELDS, column[row], strict=True) if word
            }
    return fields | _attributes_in_json(trace, row)


def _attributes_in_json(trace: ExecutionTrace, row: int | None) -> dict[str, Any]:
    attributes, words = (trace.about, trace.words) if row is None else (trace.attributes, trace.words)
    first, forms = row or 0, []
    for index, (name, arm, value) in enumerate(attributes.items(first, words), int(attributes.offsets[first])):
        form: dict[str, Any] = {"name": name} if name else {}
        if attributes.doc[index]:
            form["docString"] = words[attributes.doc[index]]
        plain = arm.removesuffix("_list")
        if arm and plain == arm:
            form[f"{plain}Val"] = _value_in_json(value, plain)
        elif arm:
            values = [_value_in_json(item, plain) for item in value]
            form[f"{plain}List"] = {"values": values} if values else {}
        forms.append(form)
    return {"attr": forms} if forms else {}


def _value_in_json(value: Any, arm: str) -> Any:
    if arm == "bytes":
        return base64.b64encode(value).decode()
    if arm in ("double", "float"):
        if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        return value if arm == "double" else float(str(np.float32(value)))
    return str(value) if arm.endswith("64") else value
