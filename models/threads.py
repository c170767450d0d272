"""One thread for linear algebra: matrices of a table are small, and threads that wait for each other are slow.

BLAS starts a thread a processor and lets each spin until all are done. On a processor that is shared, a training that
takes one minute takes three so, and its last bits depend on how many processors there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_thread() -> Iterator[None]:
    """BLAS and OpenMP of this process on one thread; as before afterwards."""
    import scipy.linalg  # noqa: F401 - only libraries that are loaded can be told
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1):
        yield
