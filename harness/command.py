"""What a run of a plan shows on stderr and how it ends, for ``python -m opcast.harness`` and torchrun's ranks alike."""

from __future__ import annotations

import shutil
import sys

from .campaign import WHOLE, Measurer, Progress, Summary, run
from .parts import CampaignPart, announce
from .plan import CampaignPlan

BAR = 28


def execute(
    plan: CampaignPlan, store_path: str, quiet: bool, measurer: Measurer | None = None, part: CampaignPart = WHOLE
) -> int:
    """Run a plan, or a part of it, and report on stderr; the exit code."""
    from ..datasets.store import Store

    report = None if quiet or not sys.stderr.isatty() else show
    try:
        store = Store(store_path)
        announce(store.path, plan, part.count)
        summary = run(plan, store, report, measurer, part)
    except (OSError, ValueError) as error:
        return refuse(str(error))
    except KeyboardInterrupt:
        print("interrupted before the first case: nothing was measured", file=sys.stderr)
        return 130
    finally:
        if report:
            print(file=sys.stderr)
    if not quiet:
        print(describe(summary), file=sys.stderr)
    return 130 if summary.outcome == "interrupted" else 0


def refuse(message: str) -> int:
    """Print one line to stderr; the exit code of bad input."""
    print(message, file=sys.stderr)
    return 2


def show(progress: Progress) -> None:
    """Redraw the progress line of a terminal."""
    width = shutil.get_terminal_size().columns
    print("\r" + progress_line(progress)[: width - 1].ljust(width - 1), end="", file=sys.stderr, flush=True)


def progress_line(progress: Progress) -> str:
    """One line: a bar, counts, the time left, what went wrong, the last case."""
    reached = progress.done + progress.waiting
    filled = BAR * reached // max(progress.total, 1)
    bar = "#" * filled + "-" * (BAR - filled)
    failed = "".join(f" {count} {status}" for status, count in progress.statuses.items() if status != "ok")
    time_left = "" if progress.eta_s is None else f" {duration(progress.eta_s)} left"
    return f"[{bar}] {reached}/{progress.total}{time_left}{failed}  {progress.case}"


def duration(seconds: float) -> str:
    """``1:02:03`` or ``2:03``."""
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds_left:02d}" if hours else f"{minutes}:{seconds_left:02d}"


def describe(summary: Summary) -> str:
    """What a run did, in one to a few lines."""
    counts = ", ".join(f"{count} {status}" for status, count in sorted(summary.statuses.items())) or "none"
    lines = [
        f"{summary.run_id} on {summary.device_id}: {summary.done} of {summary.total} cases in the store; "
        f"measured now: {counts}, in {duration(summary.elapsed_s)}"
    ]
    if summary.restarts:
        lines.append(f"{summary.restarts} times a case ended its worker, which was replaced")
    if summary.drift:
        lines.append(f"largest drift of a canary: {max(summary.drift.values()):.1%}")
    if summary.outcome != "complete":
        why = "interrupted" if summary.outcome == "interrupted" else "the deadline has passed"
        lines.append(f"{why}: run the same command again for the other {summary.remaining} cases")
    return "\n".join(lines)
