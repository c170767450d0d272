"""``opcast mcp``: tools over stdio, with the schemas, answers and refusals of the service."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import httpx
import jsonschema
import pytest

from opcast.jobs.service.app import create_app
from opcast.jobs.service.settings import ServiceSettings
from opcast.jobs.service.tools import CALLS, LIST, called, caller, tools_of
from opcast.simulator.question.sources import Sources

GEMM = {"op": {"kind": "gemm", "m": 512, "n": 512, "k": 512, "dtype": "bf16"}, "device": "h100_sxm"}


@pytest.fixture(scope="module", autouse=True)
def _mcp() -> None:
    """The package, loaded when a test wants it."""
    pytest.importorskip("mcp", reason="needs mcp: pip install 'opcast[mcp]'")


@pytest.fixture
def settings(tmp_path: Path) -> ServiceSettings:
    return ServiceSettings(home=str(tmp_path), sources=Sources.at(str(tmp_path)))


def ask(settings: ServiceSettings, work: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
    async def whole() -> Any:
        app = create_app(settings)
        async with app.router.lifespan_context(app), caller(app) as client:
            return await work(client)

    return anyio.run(whole)


def test_tools_have_the_schemas_of_the_service(settings: ServiceSettings) -> None:
    tools = {tool["name"]: tool for tool in tools_of(create_app(settings).openapi())}
    assert set(tools) == {LIST, *CALLS}
    for tool in tools.values():
        jsonschema.Draft202012Validator.check_schema(tool["input_schema"])
        assert tool["description"]
    jsonschema.validate(GEMM, tools["predict"]["input_schema"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**GEMM, "devise": 1}, tools["predict"]["input_schema"])
    assert "server-sent" not in tools["search"]["description"]


def test_answers_and_refusals_are_those_of_http(settings: ServiceSettings) -> None:
    refused = {"model": "/etc/passwd", "cluster": "dgx_h100"}

    async def work(client: httpx.AsyncClient) -> None:
        ok, answer = await called(client, "predict", GEMM)
        assert ok
        assert answer == (await client.post("/v1/predict", json=GEMM)).json()
        ok, answer = await called(client, "serving", refused)
        assert not ok
        assert answer == (await client.post("/v1/serving", json=refused)).json()
        ok, answer = await called(client, "serving", {"calibrate": "/etc/passwd", "model": "llama3_8b"})
        assert not ok
        assert "which is taken over HTTP only where" in answer["error"]["message"]
        job = {
            "verb": "plan",
            "model": "llama3_8b",
            "cluster": "dgx_h100",
            "steps": 10,
            "step_time_s": 1.0,
            "lives": 20,
            "global_batch": 64,
        }
        ok, answer = await called(client, "sweep", {**job, "checkpoint": {"size_gb": 1}, "axes": {"nodes": [1, 2]}})
        assert ok
        assert [row["cluster.nodes"] for row in answer["rows"]] == [1, 2]
        ok, answer = await called(client, "guess", {})
        assert not ok
        assert "no tool 'guess'" in answer["error"]["message"]
        ok, devices = await called(client, LIST, {"what": "devices"})
        assert ok
        assert any("h100_sxm" in device.values() for device in devices["devices"])

    ask(settings, work)


@pytest.mark.slow
def test_an_assistant_starts_it_and_asks(tmp_path: Path) -> None:
    from mcp.client.session import ClientSession
    from mcp.client.stdio import StdioServerParameters, stdio_client

    words = ["-m", "opcast.jobs.cli", "mcp", f"home={tmp_path}", "workers=1"]

    async def talk() -> None:
        async with (
            stdio_client(StdioServerParameters(command=sys.executable, args=words)) as (reads, writes),
            ClientSession(reads, writes) as session,
        ):
            await session.initialize()
            assert {tool.name for tool in (await session.list_tools()).tools} == {LIST, *CALLS}
            answer = await session.call_tool("predict", GEMM)
            assert not answer.is_error
            assert answer.structured_content["latency_us"] > 0
            found = await session.call_tool(
                "search", {"model": "tiny_llama_100m", "cluster": "dgx_h100", "seq_len": 512, "global_batch": 8}
            )
            assert not found.is_error, found.content
            assert found.structured_content["best"]

    anyio.run(talk)
