"""The pages of the service: the one that asks, and the one of all calls. Both are made when the service starts.

Neither needs anything from another site: scripts and styles stand in them, and Plotly comes from this service.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ...datasets.dtypes import BITS, WEIGHT_BITS
from ...datasets.reading import read_yaml
from ...simulator.html.page import PLOTLY, embed, rendered, script, style
from ..show import BadInputError
from .forms import FORMS, forms

HERE = Path(__file__).resolve().parent / "page"
SCRIPTS = ("base.js", "fields.js", "tabs.js", "charts.js", "sharing.js", "main.js")  # one scope, in this order
EXAMPLES: Mapping[str, Mapping[str, Any]] = read_yaml(HERE / "examples.yaml", BadInputError)  # of bodies, by path
TABS = (*((form["id"], form["tab"]) for form in FORMS), ("compare", "Compare"), ("known", "Predictors"))


def index() -> str:
    """The page that asks, its styles (those of reports, and its own) and its scripts inside."""
    scripts = "".join((HERE / name).read_text(encoding="utf-8") for name in SCRIPTS)
    return _rendered(
        "index.html.j2",
        forms=Markup(embed(forms())),
        dtypes=json.dumps(list(BITS | WEIGHT_BITS)),
        script=Markup(f'{script()}(() => {{\n  "use strict";\n{scripts}}})();\n'),
    )


def calls(described: Mapping[str, Any]) -> str:
    """The page of all HTTP calls, from the service's OpenAPI description."""
    text = (HERE / "calls.js").read_text(encoding="utf-8")
    return _rendered(
        "calls.html.j2", calls=operations(described), version=described["info"]["version"], script=Markup(text)
    )


def plotly() -> bytes:
    """The script that draws charts."""
    return gzip.decompress(PLOTLY.read_bytes())


def _rendered(template: str, **values: Any) -> str:
    own_style = (HERE / "page.css").read_text(encoding="utf-8")
    return rendered(HERE / template, tabs=TABS, style=Markup(style() + own_style), **values)


def operations(described: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each call of an OpenAPI description: method, path, what it does, parameters, fields of its body, an example."""
    entries = []
    for path, methods in described["paths"].items():
        for method, call in methods.items():
            content = call.get("requestBody", {}).get("content", {})
            schema = _resolved(described, content.get("application/json", {}).get("schema", {}))
            fields = [_field(described, name, inner) for name, inner in schema.get("properties", {}).items()]
            entries.append(
                {
                    "method": method.upper(),
                    "path": path,
                    "tag": (call.get("tags") or ["other"])[0],
                    "does": call.get("description", ""),
                    "parameters": [_parameter(parameter) for parameter in call.get("parameters", ())],
                    "takes": ", ".join(content),
                    "fields": fields,
                    "example": EXAMPLES.get(path, {}) if fields else None,
                    "answers": ", ".join(call.get("responses", {}).get("200", {}).get("content", {})),
                }
            )
    return entries


def _resolved(described: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema itself, where it is named."""
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    return described["components"]["schemas"][name] if name else schema


def _field(described: Mapping[str, Any], name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    default = schema.get("default")
    choices = [_resolved(described, choice) for choice in (schema, *schema.get("anyOf", ()))]
    return {
        "name": name,
        "type": " or ".join(_types(described, schema)),
        "default": "" if default in (None, "", [], {}) else json.dumps(default, ensure_ascii=False),
        "help": schema.get("description", ""),
        "inside": [inner for choice in choices for inner in choice.get("properties", {})],
    }


def _types(described: Mapping[str, Any], schema: Mapping[str, Any]) -> list[str]:
    """The types of a field in words, without null."""
    names = []
    for choice in schema.get("anyOf", [schema]):
        kind = _resolved(described, choice).get("type", "any")
        if kind == "array":
            kind = f"list of {' or '.join(_types(described, choice.get('items', {})))}"
        names.append("mapping" if kind == "object" else str(kind))
    return [name for name in dict.fromkeys(names) if name != "null"]


def _parameter(parameter: Mapping[str, Any]) -> dict[str, Any]:
    choices = [str(choice) for choice in parameter.get("schema", {}).get("enum", ())]
    return {"name": parameter["name"], "where": parameter["in"], "choices": choices}
