"""Native models to graphs: ``trace(model, Workload(...), precision, cache_dir)``.

``known_models`` lists the shipped ones, ``TraceError`` is what every refusal raises. ``steps`` holds the very calls
that are traced, to be run for real.
"""

from .entry import trace
from .models import known_models
from .workload import TraceError, Workload

__all__ = ["TraceError", "Workload", "known_models", "trace"]
