"""What the service counts, for Prometheus."""

from __future__ import annotations

import time

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .guard import App, Message, Receive, Scope, Send

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5, 10, 60)


class Measures:
    """Requests by route and status, their seconds, how many are under way, and ops predicted."""

    media_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("opcast_requests", "Requests answered", ("route", "status"), registry=registry)
        self.seconds = Histogram(
            "opcast_request_seconds", "Seconds to an answer", ("route",), buckets=SECONDS, registry=registry
        )
        self.under_way = Gauge("opcast_requests_under_way", "Requests under way", registry=registry)
        self.predicted = Counter("opcast_ops_predicted", "Ops predicted", registry=registry)

    def ops(self, count: int) -> None:
        """So many ops were predicted."""
        self.predicted.inc(count)

    def text(self) -> bytes:
        """All of it in Prometheus's text format."""
        return generate_latest(self.registry)


class Measured:
    """Counts the requests to ``app`` under their route's pattern (never their path: those are without end)."""

    def __init__(self, app: App, measures: Measures) -> None:
        self.app, self.measures = app, measures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        began, status = time.perf_counter(), "500"

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        self.measures.under_way.inc()
        try:
            await self.app(scope, receive, sending)
        finally:
            self.measures.under_way.dec()
            route = getattr(scope.get("route"), "path", "none")
            self.measures.requests.labels(route, status).inc()
            self.measures.seconds.labels(route).observe(time.perf_counter() - began)
