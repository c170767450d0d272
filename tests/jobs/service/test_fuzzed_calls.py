"""Random bodies, addresses and methods of every call: always a documented status and JSON, never a surprise.

``OPCAST_FUZZ_TRIALS`` and ``OPCAST_FUZZ_SEED`` as in :mod:`..test_fuzz`, whose trials these are a part of. A trial
fails when its status is not in the table of docs/api.md or is 500, when its JSON is none or has NaN, when a folder of
the server or a traceback is told, or when a file is written beside the home.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from opcast.jobs.service.app import create_app
from opcast.jobs.service.settings import ServiceSettings
from opcast.simulator.question.sources import Sources

from ..fuzzing import body_of, damaged
from ..test_fuzz import OF_COMMANDS, SEED, TRIALS, WATCH, no_constant
from ..test_fuzz import place as place
from .test_traversal import BODIES

BLOCKS = 1  # each starts a process that answers
SECONDS = 12.0  # for a question or a search: a random one may be large, and 504 is an answer. Its worker is ended
# then, and a new one takes seconds on a busy machine: with less time the next question would be late for that alone
METHODS = ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD")
TAILS = ("", "/", "/x", "?part=body", "?part=x", "?part=page&part=", "?device=%00", "?%ff", "/%2e%2e", "?kind=gemm")
KINDS = ("application/json", "application/json", "text/plain", "application/vnd.apache.arrow.stream", "")


@asynccontextmanager
async def asked(home: Path) -> AsyncIterator[tuple[httpx.AsyncClient, dict[str, Any]]]:
    """Who calls the service in this process, and how the service describes itself."""
    settings = ServiceSettings(sources=Sources.at(str(home)), workers=1, timeout_s=SECONDS, search_s=SECONDS)
    app = create_app(settings)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, timeout=None) as client:
        client.base_url = httpx.URL("http://127.0.0.1")
        yield client, app.openapi()


def documented(root: Path) -> set[int]:
    """Statuses of the table in docs/api.md but 500, which nobody should see; and 200."""
    rows = re.findall(r"^\| ([0-9, ]+) \|", (root / "docs" / "api.md").read_text(), re.M)
    return {int(status) for row in rows for status in row.split(",")} - {500} | {200}


def fields_of(description: dict[str, Any], path: str) -> list[str]:
    """The fields that the body of a call may have."""
    schema = description["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return list(description["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["properties"])


def call_of(random: Random, description: dict[str, Any]) -> tuple[str, str, bytes, str]:
    """A method, an address, a body and its type."""
    path = random.choice(sorted(BODIES))
    body = body_of(random, BODIES[path], fields_of(description, path))
    content = json.dumps(body).encode()
    if random.random() < 0.85:
        return "POST", path, content, "application/json"
    if random.random() < 0.5:
        return "POST", path + random.choice(TAILS), damaged(random, content), random.choice(KINDS)
    known = random.choice([*sorted(description["paths"]), "/", "/docs", "/v1/nope", "/static/../x", "/metrics"])
    known = known.replace("{what}", random.choice(("devices", "stacks", "precisions", "x", "%00")))
    return random.choice(METHODS), known + random.choice(TAILS), b"", "application/json"


def wrong(answer: httpx.Response, statuses: set[int], home: Path) -> str:
    """What is wrong with an answer; "" where nothing is."""
    text = answer.text
    if answer.status_code not in statuses:
        return f"status {answer.status_code}"
    if "Traceback" in text or str(home) in text:
        return "tells how the server is made"
    kind = answer.headers.get("content-type", "")
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    try:
        values = [json.loads(line, parse_constant=no_constant) for line in lines]
        values += [json.loads(text, parse_constant=no_constant)] if kind.startswith("application/json") and text else []
    except ValueError:
        return "no JSON"
    errors = [value["error"] for value in values if isinstance(value, dict) and "error" in value]
    if answer.status_code >= 400 and not errors and answer.request.method != "HEAD":
        return "a refusal without an error"
    if any(error["code"] == "unexpected" or "\n" in error["message"] for error in errors):
        return "an error that nobody foresaw"
    return f"wrote {WATCH.strays}" if WATCH.strays else ""


@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_call_surprises_the_service(block: int, place: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed: list[str] = []
    statuses = documented(root)
    WATCH.words, WATCH.strays = (), ()

    async def all_calls() -> None:
        async with asked(place / "home") as (client, description):
            for trial in range(round(TRIALS * (1 - OF_COMMANDS) / 2) // BLOCKS):
                method, path, content, kind = call_of(Random(f"{SEED} {block} {trial}"), description)
                headers = {"Content-Type": kind} if kind else {}
                answer = await client.request(method, path, content=content, headers=headers)
                if said := wrong(answer, statuses, place):
                    failed.append(f"{method} {path} {content[:300]!r}: {said}: {answer.text[:200]}")

    asyncio.run(all_calls())
    assert not failed, "\n".join(failed)
    assert "Traceback" not in capsys.readouterr().err
    assert {path.name for path in place.iterdir()} <= {"home", "user", "tmp"}
