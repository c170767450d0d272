"""Why a body is refused before anybody reads it as a question: its fields by name, in the words of the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from ...datasets.loading import nearest

LONGEST = 80  # characters of a value that is shown
KINDS = {  # what pydantic says is wrong -> what the value must be
    **dict.fromkeys(("string_type",), "a word"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing", "finite_number"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type", "mapping_type"), "names with values"),
    **dict.fromkeys(("list_type", "tuple_type"), "a list"),
}
LIMITS = {  # and what it must be where a figure of the error says so
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "string_too_long": "at most {max_length:,} characters long",
    "too_long": "at most {max_length:,} entries long",
    "literal_error": "{expected}",
}


def complaint(errors: Sequence[Mapping[str, Any]], body: Any, body_class: Any = None) -> str:
    """The first field that is wrong and what it must be, as one line; ``body_class`` says which fields there are."""
    first = errors[0]
    names, value = location_of(first, body)
    where = ".".join(names) or "the body"
    kind, limits = first["type"], first.get("ctx") or {}
    if kind == "json_invalid":
        return f"the body is no JSON: {limits.get('error', 'it cannot be read')}"
    if kind == "missing":
        return f"{where} is missing: give it"
    if kind == "extra_forbidden":
        return f"{where} is no setting of this call; {nearest(names[-1], fields_at(body_class, names[:-1]))}"
    if kind == "value_error":
        return str(limits.get("error", first["msg"]))
    allowed = [text for error in errors if location_of(error, body)[0] == names and (text := must_be(error))]
    if not allowed:
        return f"{where}: {first['msg']}"
    text = repr(value)
    quoted = text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
    return f"{where}={quoted} must be {' or '.join(dict.fromkeys(allowed))}"


def fields_at(body_class: Any, names: Sequence[str]) -> tuple[str, ...]:
    """The fields of a body, or of the part of it that ``names`` lead to."""
    for name in names:
        field = getattr(body_class, "model_fields", {}).get(name)
        parts = get_args(field.annotation) if field is not None else ()
        body_class = next((option for option in parts if hasattr(option, "model_fields")), None)
    return tuple(getattr(body_class, "model_fields", ()))


def must_be(error: Mapping[str, Any]) -> str:
    """What a value must be by an error, as the end of a sentence; "" where that is not known."""
    kind = error["type"]
    return KINDS.get(kind) or (LIMITS[kind].format(**error["ctx"]) if kind in LIMITS else "")


def location_of(error: Mapping[str, Any], body: Any) -> tuple[list[str], Any]:
    """The names that lead to what an error is about, and its value; without what pydantic says of the field's type."""
    source, *keys = error["loc"] or ("body",)
    if source != "body":
        return [str(key) for key in keys], error.get("input")
    names: list[str] = []
    for key in keys:
        if (isinstance(body, Mapping) and key in body) or (
            isinstance(body, list) and isinstance(key, int) and key < len(body)
        ):
            body = body[key]
        elif error["type"] != "missing":
            break
        names.append(str(key))
    return names, body
