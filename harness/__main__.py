"""Run a plan where opcast's other parts are not installed: ``python -m opcast.harness PLAN.json STORE [--quiet]``.

Needs torch, numpy and pyarrow (triton for its kernels). Exit codes: 0 done, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from .campaign import Measurer, Progress, Summary, run
from .plan import Plan

BAR = 28


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, run the plan, print what was done."""
    parser = argparse.ArgumentParser(prog="python -m opcast.harness", description="Run a campaign's plan into a store.")
    parser.add_argument("plan", help="file written by Plan.to_json, as `opcast profile` makes it")
    parser.add_argument("store", help="folder of measurements; made when it is not there")
    parser.add_argument("--quiet", action="store_true", help="no progress, errors only")
    chosen = parser.parse_args(arguments)
    try:
        plan = Plan.from_json(Path(chosen.plan).read_text())
    except (OSError, UnicodeDecodeError, ValueError) as error:
        return _refuse(f"{chosen.plan}: {error}")
    return execute(plan, chosen.store, chosen.quiet)


def execute(plan: Plan, store_path: str, quiet: bool, measurer: Measurer | None = None) -> int:
    """Run a plan and report on stderr; the exit code."""
    from ..datasets.store import Store

    shown = None if quiet or not sys.stderr.isatty() else show
    try:
        summary = run(plan, Store(store_path), shown, measurer)
    except (OSError, ValueError) as error:
        return _refuse(str(error))
    finally:
        if shown:
            print(file=sys.stderr)
    if not quiet:
        print(describe(summary), file=sys.stderr)
    return 130 if summary.outcome == "interrupted" else 0


def _refuse(message: str) -> int:
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
    left = "" if progress.eta_s is None else f" {duration(progress.eta_s)} left"
    return f"[{bar}] {reached}/{progress.total}{left}{failed}  {progress.case}"


def duration(seconds: float) -> str:
    """``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


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


if __name__ == "__main__":
    sys.exit(main())
