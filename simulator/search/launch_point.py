"""A point as frameworks are told of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..question.plan import Parallel, Stack
from ..question.requests import SimulateRequest


@dataclass(frozen=True)
class Launch:
    """A point as a framework is told of it: what rows of its table read."""

    request: SimulateRequest
    config: Mapping[str, Any]

    @property
    def parallel(self) -> Parallel:
        """Degrees of parallelism."""
        return self.request.parallel

    @property
    def stack(self) -> Stack:
        """What the framework does."""
        assert self.request.stack is not None
        return self.request.stack

    @property
    def devices(self) -> int:
        """All GPUs."""
        assert self.request.cluster is not None
        return self.request.cluster.devices

    @property
    def dp(self) -> int:
        """Data ranks."""
        return self.devices // self.parallel.model_ranks

    def model(self, *names: str) -> Any:
        """A figure of the model's configuration, under the first name that it has."""
        return next((self.config[name] for name in names if self.config.get(name) is not None), None)
