"""Classes of requests that share replicas: their shares, who goes first, what each expects; and who may come in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...datasets.loading import check_fields, number
from .canonical import RequestError
from .declaration import setting

QUEUES = ("fcfs", "priority")
MOST_CLASSES = 64
MOST_PRIORITY = 1_000_000_000
TARGETS = ("ttft_ms", "tpot_ms", "e2e_ms")


@dataclass(frozen=True)
class ServingTargets:
    """What users expect, in milliseconds; null: nothing. ``share`` of the requests must meet all of it."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    share: float = 0.9

    def __post_init__(self) -> None:
        check_fields(self, RequestError, "slo")
        if not 0 < self.share <= 1:
            raise RequestError(f"slo.share={self.share} must be a share above 0 and at most 1")

    @property
    def named(self) -> bool:
        """Whether anything is expected."""
        return any(getattr(self, name) is not None for name in TARGETS)


@dataclass(frozen=True)
class RequestClass:
    """A class of requests. ``share`` is its weight among all; a lower ``priority`` goes first, as in vLLM. Targets that
    are null are those of ``slo``."""

    name: str
    share: float = 1.0
    priority: int = 0
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise RequestError("traffic.classes: every class needs a name, such as {name: chat, priority: 0}")
        number(RequestError, f"traffic.classes {self.name}: share", self.share)
        if not isinstance(self.priority, int) or isinstance(self.priority, bool):
            raise RequestError(f"traffic.classes {self.name}: priority={self.priority!r} must be a whole number")
        if abs(self.priority) > MOST_PRIORITY:
            least_most = f"-{MOST_PRIORITY:,} to {MOST_PRIORITY:,}"
            raise RequestError(f"traffic.classes {self.name}: priority={self.priority} must be from {least_most}")
        for name in TARGETS:
            if getattr(self, name) is not None:
                number(RequestError, f"traffic.classes {self.name}: {name}", getattr(self, name))

    @property
    def targets_named(self) -> bool:
        """Whether it expects anything of its own."""
        return any(getattr(self, name) is not None for name in TARGETS)


def check_classes(classes: Sequence[RequestClass]) -> None:
    """RequestError for classes that cannot be told apart, or of which none has a share."""
    names = [kind.name for kind in classes]
    if len(names) > MOST_CLASSES:
        raise RequestError(f"traffic.classes has {len(names)} classes: at most {MOST_CLASSES} can be told apart")
    for name in names:
        if names.count(name) > 1:
            raise RequestError(f"traffic.classes has {name!r} twice: give each class a name of its own")
    if classes and not any(kind.share for kind in classes):
        raise RequestError("traffic.classes: every share is 0, so that nobody comes: give one of them a share")


@dataclass(frozen=True)
class Admission:
    """Who may come in: what a server or a gateway rejects at once, so that others wait less. Null: no limit."""

    max_requests: int | None = setting(
        None, "of a replica, waiting or running; more are rejected (vllm: max-num-queued-reqs)"
    )
    max_prompt_tokens: int | None = setting(
        None, "of a replica's prompts not computed yet, at which nobody comes in (vllm: max-num-queued-tokens)"
    )
    max_queue: int | None = setting(
        None,
        "that wait on a rank (sglang: max-queued-requests); with scheduler.queue=priority the last of them makes room",
    )
    rate: float | None = setting(None, "requests a second that a gateway lets in, over all replicas")
    burst: int = setting(1, "and so many at once after a pause", least=1)

    def __post_init__(self) -> None:
        check_fields(self, RequestError, "admission")
        if self.rate == 0:
            raise RequestError("admission.rate=0 lets nobody in: leave it out, or give requests a second")
        if self.burst != 1 and self.rate is None:
            raise RequestError(f"admission.burst={self.burst} is of a rate: give admission.rate, requests a second")
