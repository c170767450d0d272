"""The pages of the service: the one that asks, and the one of all calls. Both are made when the service starts.

Neither needs anything from another site: scripts and styles stand in them, and Plotly comes from this service.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...datasets.dtypes import BITS, WEIGHT_BITS
from ...simulator.html.page import PLOTLY, embed, rendered, script, style
from .forms import FORMS, forms

HERE = Path(__file__).resolve().parent / "page"
SCRIPTS = ("base.js", "fields.js", "tabs.js", "charts.js", "sharing.js", "main.js")  # one scope, in this order
TABS = (*((form.id, form.tab) for form in FORMS), ("compare", "Compare"), ("known", "Predictors"))


def index() -> str:
    """The page that asks, its styles (those of reports, and its own) and its scripts inside."""
    from markupsafe import Markup

    scripts = "".join((HERE / name).read_text(encoding="utf-8") for name in SCRIPTS)
    return _rendered(
        "index.html.j2",
        forms=Markup(embed(forms())),
        dtypes=json.dumps(list(BITS | WEIGHT_BITS)),
        script=Markup(f'{script()}(() => {{\n  "use strict";\n{scripts}}})();\n'),
    )


def calls(described: Mapping[str, Any]) -> str:
    """The page of all HTTP calls, from the service's OpenAPI description."""
    from markupsafe import Markup

    text = (HERE / "calls.js").read_text(encoding="utf-8")
    return _rendered(
        "calls.html.j2", calls=operations(described), version=described["info"]["version"], script=Markup(text)
    )


def plotly() -> bytes:
    """The script that draws charts."""
    return gzip.decompress(PLOTLY.read_bytes())


def _rendered(template: str, **values: Any) -> str:
    from markupsafe import Markup

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


JOB = {
    "model": "llama3_8b",
    "cluster": "dgx_h100",
    "nodes": 4,
    "seq_len": 4096,
    "global_batch": 256,
    "tokens": 1e12,
    "tp": 2,
    "zero_stage": 1,
}
SERVED: dict[str, Any] = {"model": "llama3_8b", "device": "h100_sxm", "traffic": {"rate": 4, "requests": 200}}
POST_TRAINED: dict[str, Any] = {
    "model": "llama3_8b",
    "method": "grpo",
    "cluster": "dgx_h100",
    "prompts": 64,
    "responses": 8,
    "seq_len": 4096,
    "tp": 2,
    "zero_stage": 1,
}
EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/predict": {"op": {"kind": "gemm", "m": 4096, "n": 4096, "k": 4096, "dtype": "bf16"}, "device": "h100_sxm"},
    "/v1/predict/batch": {
        "ops": [{"kind": "gemm", "m": size, "n": 4096, "k": 4096, "dtype": "bf16"} for size in (1024, 4096)],
        "device": "h100_sxm",
    },
    "/v1/predict/report": {
        "op": {"kind": "all_reduce", "size_bytes": 67108864, "ranks": 16, "dtype": "bf16"},
        "cluster": "dgx_h100",
        "nodes": 2,
    },
    "/v1/simulate": {"model": "llama3_8b", "workload": "decode", "device": "h100_sxm", "input_len": 1024, "batch": 1},
    "/v1/simulate/report": {"model": "llama3_8b", "workload": "decode", "device": "h100_sxm", "input_len": 1024},
    "/v1/compare/chips": {
        "model": "llama3_8b",
        "workload": "decode",
        "cluster": "dgx_h100",
        "nodes": 1,
        "others": ["dgx_h200"],
        "input_len": 1024,
        "batch": 8,
        "prices": {"dgx_h100": 2.5, "dgx_h200": 3.1},
    },
    "/v1/plan": JOB,
    "/v1/plan/report": JOB,
    "/v1/posttrain": POST_TRAINED,
    "/v1/posttrain/report": POST_TRAINED,
    "/v1/upgrade": {"model": "llama3_8b", "workload": "decode", "device": "h100_sxm", "changes": ["cublas"]},
    "/v1/serving": SERVED,
    "/v1/serving/capacity": {**SERVED, "slo": {"ttft_ms": 500, "tpot_ms": 30}},
    "/v1/serving/sweep": {**SERVED, "rates": [2, 8]},
    "/v1/serving/compare": {**SERVED, "replicas": 2},
    "/v1/serving/caps": {**SERVED, "power_caps_w": [500, 300]},
    "/v1/search": {
        "model": "llama3_8b",
        "cluster": "dgx_h100",
        "seq_len": 4096,
        "global_batch": 64,
        "space": {"tp": [1, 2], "pp": [1], "micro_batch": [1], "recompute": ["none"]},
    },
    "/v1/search/serving": {
        "model": "llama3_8b",
        "cluster": "dgx_h100",
        "nodes": 1,
        "space": {"tp": [1, 2], "batch": [32], "max_tokens": [2048], "pools": ["together"]},
    },
    "/v1/sweep": {"verb": "plan", **JOB, "axes": {"nodes": [4, 8], "failures.fleet": ["llama3", "rsc1"]}},
}


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
