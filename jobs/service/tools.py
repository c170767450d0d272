"""``opcast mcp``: the questions of the service as tools of the Model Context Protocol, over stdin and stdout.

Each call goes through the service itself, in this process: the same bodies, limits, answers and refusals as over HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mcp.server.lowlevel import Server

from ...datasets.installing import install_command
from ..show import BadInputError
from .settings import ServiceSettings, settings_of

if TYPE_CHECKING:
    import httpx
    from fastapi import FastAPI
    from mcp.server.lowlevel import Server

LIST = "list_known"
CALLS = {  # tool -> the call of the service that it is
    name: f"/v1/{name.replace('_', '/')}"
    for name in (
        *("predict", "predict_batch", "simulate", "compare_chips", "plan", "posttrain", "upgrade"),
        *("serving", "serving_capacity", "serving_sweep", "serving_compare", "serving_caps"),
        *("search", "search_serving", "sweep"),
    )
}
LISTED = "/v1/{what}"
ADDRESS = "http://127.0.0.1"
DEFINED, OF_SERVICE = "#/$defs/", "#/components/schemas/"
HELLO = (
    "opcast forecasts how long LLM training and inference take on GPU clusters. list_known names devices, clusters, "
    "models and ops; simulate times one step, serving a served load, search and search_serving find the best layout. "
    "Times carry 90 % intervals (low_us, high_us and the like): quote them."
)


def run(config: dict[str, Any]) -> int:
    """Answer until stdin ends; returns the exit code."""
    known = {name: value for name, value in asdict(ServiceSettings()).items() if name not in ("sources", "token")}
    settings = settings_of({**known, "allow": [], "token_file": None, **config})
    try:
        import anyio

        from .app import create_app

        anyio.run(answer, create_app(settings))
    except ImportError as error:
        raise BadInputError(f"`opcast mcp` needs {error.name}: {install_command('mcp')}") from None
    return 0


async def answer(app: FastAPI) -> None:
    """Speak over stdin and stdout until stdin ends."""
    from mcp.server.stdio import stdio_server

    async with stdio_server() as (reads, writes), app.router.lifespan_context(app), caller(app) as client:
        server = server_of(app, client)
        await server.run(reads, writes, server.create_initialization_options())


def caller(app: FastAPI) -> httpx.AsyncClient:
    """Who calls the service in this process."""
    import httpx

    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=ADDRESS, timeout=None)


def server_of(app: FastAPI, client: httpx.AsyncClient) -> Server[Any]:
    """The tools, and what becomes of a call."""
    import mcp_types as types

    tools = [types.Tool(**tool) for tool in tools_of(app.openapi())]

    async def list_tools(_: Any, __: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=tools)

    async def call_tool(_: Any, asked: types.CallToolRequestParams) -> types.CallToolResult:
        ok, value = await called(client, asked.name, asked.arguments or {})
        told = value if isinstance(value, dict) else {"items": value}
        text = [types.TextContent(type="text", text=json.dumps(value))]
        return types.CallToolResult(content=list(text), structured_content=told, is_error=not ok)

    return Server(
        "opcast", version=str(app.version), instructions=HELLO, on_list_tools=list_tools, on_call_tool=call_tool
    )


def tools_of(schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Names, descriptions and input schemas of the tools, as the service declares its calls."""
    parts = schema["components"]["schemas"]
    what = schema["paths"][LISTED]["get"]["parameters"][0]["schema"]
    listing = {"type": "object", "properties": {"what": what}, "required": ["what"], "additionalProperties": False}
    tools = [{"name": LIST, "description": "What opcast knows by name.", "input_schema": with_parts(listing, parts)}]
    for name, path in CALLS.items():
        call = schema["paths"][path]["post"]
        body = call["requestBody"]["content"]["application/json"]["schema"]
        own = dict(parts[body["$ref"].removeprefix(OF_SERVICE)])
        about = str(call["description"]).partition(": server-sent events")[0]
        tools.append({"name": name, "description": about, "input_schema": with_parts(own, parts)})
    return tools


def with_parts(schema: dict[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """A schema that stands by itself, with the parts that it refers to."""
    needed: dict[str, Any] = {}
    waiting = [schema]
    while waiting:
        text = json.dumps(waiting.pop())
        for name, part in parts.items():
            if f'"{OF_SERVICE}{name}"' in text and name not in needed:
                needed[name] = part
                waiting.append(part)
    whole = {**schema, "$defs": needed} if needed else schema
    return dict(json.loads(json.dumps(whole).replace(OF_SERVICE, DEFINED)))


async def called(client: httpx.AsyncClient, name: str, arguments: Mapping[str, Any]) -> tuple[bool, Any]:
    """(whether there is an answer, the answer or the refusal) of a call."""
    if name == LIST:
        response = await client.get(LISTED.format(what=arguments.get("what")))
    elif name in CALLS:
        response = await client.post(CALLS[name], json=dict(arguments))
    else:
        return False, {
            "error": {"code": "not_found", "message": f"there is no tool {name!r}: {', '.join((LIST, *CALLS))}"}
        }
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        kind, _, data = response.text.rstrip().rpartition("event: ")[2].partition("\n")
        value = json.loads(data.removeprefix("data: "))
        return kind == "answer", value if kind == "answer" else {"error": value}
    return response.is_success, response.json()
