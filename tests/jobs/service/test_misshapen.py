"""Bodies that are refused before they are a question: one line in plain words, none of the validator's."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import pytest

from opcast.jobs.service.app import create_app
from opcast.jobs.service.settings import ServiceSettings

from .test_traversal import BODIES

OP, STEP = BODIES["/v1/predict"], BODIES["/v1/simulate"]
JARGON = re.compile(
    r"Input should|Field required|Extra inputs|dictionary|valid |instance of|constrained|pydantic|\bdict\b"
)
CASES: dict[str, tuple[str, Any, str]] = {
    "nothing": ("/v1/predict", {}, "op is missing: give it"),
    "a list": ("/v1/predict", [], "the body=[] must be names with values"),
    "a number for an op": ("/v1/predict", {**OP, "op": 5}, "op=5 must be names with values"),
    "another name": ("/v1/predict", {**OP, "devise": "x"}, "devise is no setting of this call; did you mean device?"),
    "a name inside": ("/v1/search", {"space": {"tq": [1]}}, "space.tq is no setting of this call; did you mean tp?"),
    "one of two kinds": ("/v1/simulate", {**STEP, "model": 5}, "model=5 must be a word or names with values"),
    "a word": ("/v1/simulate", {**STEP, "seq_len": "x"}, "seq_len='x' must be a whole number"),
    "a flag for a number": ("/v1/plan", {"setbacks": True}, "setbacks=True must be a number"),
    "too much": ("/v1/simulate", {**STEP, "seq_len": 2**60}, "must be at most 9007199254740992"),
    "a word in a list": ("/v1/serving/sweep", {"rates": ["a"]}, "rates.0='a' must be a number"),
    "an op without a kind": ("/v1/predict/batch", {"ops": [OP["op"], {"m": 3}]}, "ops.1.kind is missing: give it"),
    "a file": ("/v1/serving", {"calibrate": 5}, "calibrate is not taken over HTTP: it names a file"),
    "a part": ("/v1/simulate/report?part=x", STEP, "part='x' must be 'page' or 'body'"),
    "a list of things": ("/v1/things", None, "what='things' must be 'devices', 'clusters'"),
    "no address": ("/nothing", None, "there is no such address here; /docs lists all"),
    "another method": ("/health", {}, "this address takes another method; /docs lists all"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_body_that_is_none_is_refused_in_plain_words(name: str) -> None:
    path, body, says = CASES[name]

    async def asked() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(ServiceSettings()))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await (client.get(path) if body is None else client.post(path, json=body))

    answer = asyncio.run(asked())
    message = answer.json()["error"]["message"]
    assert 400 <= answer.status_code < 500
    assert says in message
    assert "\n" not in message
    assert not JARGON.search(message)
