"""What tests of serving share: the event loop in plain Python, so that no test waits for a compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from opcast.simulator.question.serving import ServingRequest
from opcast.simulator.serving import serve as serving
from opcast.simulator.serving.replica import by_hand


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Serve a request whose iteration times are given by hand, in plain Python, with everything kept."""
    monkeypatch.setattr(serving, "worth_compiling", lambda outputs: False)

    def play(request: ServingRequest, decoder: Any = None, iterations: int = 2000) -> serving.ServedTraffic:
        assert request.law is not None
        kv = request.kv
        replica = by_hand(request.law, kv.blocks, kv.block_tokens, kv.bytes_per_token)
        return serving.serve(request, replica, decoder, serving.Keeping(iterations=iterations, requests=True))

    return play
