"""What is asked before an upgrade, as frozen data."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...datasets.loading import choice
from ..question.canonical import RequestError
from ..question.declaration import setting
from ..question.requests import SimulateRequest, StepQuestion
from .libraries import CHANGES

MOST_MINUTES = 24 * 60.0


@dataclass(frozen=True)
class UpgradeRequest(StepQuestion):
    """What of the ``step`` may move when ``changes`` are installed, and what to measure of it in ``minutes``."""

    step: SimulateRequest = field(default_factory=lambda: SimulateRequest(model="llama3_8b"), metadata={"hidden": True})
    changes: tuple[str, ...] = setting(
        ("engine",), f"what gets another version: {', '.join(CHANGES)}; engine, driver and cuda touch every kernel"
    )
    minutes: float = setting(10.0, "of measuring at the most, once before and once after the upgrade")

    def __post_init__(self) -> None:
        names = (self.changes,) if isinstance(self.changes, str) else tuple(self.changes)
        object.__setattr__(self, "changes", names)
        if not names:
            raise RequestError("nothing changes: name what gets another version, such as changes=[nccl]")
        for name in names:
            choice(RequestError, "changes", name, CHANGES)
        if (
            isinstance(self.minutes, bool)
            or not isinstance(self.minutes, (int, float))
            or not 0 < self.minutes <= MOST_MINUTES
        ):
            raise RequestError(f"minutes={self.minutes!r} must be more than 0, and at most a day")
        if self.step.file is not None:
            raise RequestError("workload=simai names no model: take a workload such as train or decode")
