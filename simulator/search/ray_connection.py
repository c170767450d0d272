"""The one way to a Ray: what Ray itself says goes to stderr, and a connection ends with what began it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ...datasets.installing import install_command


@contextmanager
def connected(error: type[Exception], setting: str, options: Mapping[str, Any]) -> Iterator[Any]:
    """The module ``ray``, connected by ``ray.init`` with these options; a connection of the caller's own is kept.

    Ray prints news of its nodes ("… has been marked dead …") on stdout from a thread of its own, whatever it is told;
    stdout belongs to the answer. ``error``, naming what was ``setting``, without Ray or where none answers.
    """
    try:
        import ray
        from ray._private import worker as driver
    except ImportError:
        raise error(f"{setting} needs Ray: {install_command('cluster')}") from None
    if ray.is_initialized():
        yield ray
        return
    printed = driver.print_worker_logs

    def on_stderr(lines: dict[str, Any], _stdout: Any, *others: Any, **named: Any) -> None:
        printed(lines, sys.stderr, *others, **named)

    driver.print_worker_logs = on_stderr
    try:
        try:
            ray.init(**{"log_to_driver": False, **options})
        except (TypeError, RuntimeError, ConnectionError, ValueError) as refused:
            what = "ray.init refuses" if isinstance(refused, TypeError | RuntimeError) else "no Ray answers to"
            raise error(f"{setting}: {what} {dict(options)}: {' '.join(str(refused).split())[:200]}") from None
        yield ray
    finally:
        ray.shutdown()
        driver.print_worker_logs = printed
