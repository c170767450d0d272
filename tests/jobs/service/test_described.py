"""Calls made at random from the service's own description: nothing of them is a failure of the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from opcast.jobs.service.guard import ARROW

pytestmark = pytest.mark.slow
LONG = ("/v1/search", "/v1/serving", "/v1/simulate")  # those that may start minutes of work


def as_bytes(_: Any, value: Any) -> bytes:
    """Whatever was drawn for a table, as bytes that are none."""
    return value if isinstance(value, bytes) else str(value).encode()


@pytest.fixture(scope="module")
def limited(serve: Any) -> Any:
    """A service that lets nothing take long."""
    with serve(workers=1, timeout_s=3, search_s=3, batch=1000) as address:
        yield address


def test_nothing_that_the_description_allows_fails(limited: str) -> None:
    schemathesis = pytest.importorskip("schemathesis", reason="calls are drawn by it: pip install 'opcast[dev]'")
    schemathesis.serializer(ARROW)(as_bytes)
    described = schemathesis.openapi.from_url(f"{limited}/openapi.json", timeout=60)
    operations = [found.ok() for found in described.get_all_operations()]
    assert len(operations) > 10
    for operation in operations:
        asking(operation, limited, 4 if operation.path.startswith(LONG) else 15)()


def asking(operation: Any, address: str, examples: int) -> Callable[[], None]:
    """A function that makes so many calls of one kind."""

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def ask(case: Any) -> None:
        answer = case.call(base_url=address, timeout=60)
        assert answer.status_code < 500 or answer.status_code == 504, f"{case.as_curl_command()}\n{answer.text}"

    return ask
