"""Native models to graphs: ``trace(model, Workload(...), precision, cache_dir)``.

``known_models`` lists the shipped ones, ``TraceError`` is what every refusal raises. ``steps`` holds the very calls
that are traced, to be run for real.
"""

from .entry import trace
from .models import Model, known_models
from .workload import TraceError, Workload

__all__ = ["Model", "TraceError", "Workload", "known_models", "trace"]
