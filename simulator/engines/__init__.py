"""Who answers "how long does this op take?": measured, learned, transfer or analytical, and ``fused``, which tries all.

Others use :func:`build_engine`, :func:`ask` and :class:`Answers`.
"""

from .answers import Answers, Engine, Witness, ask, ask_ahead
from .fused import ORDER, EngineError, FusedEngine, build_engine

__all__ = ["ORDER", "Answers", "Engine", "EngineError", "FusedEngine", "Witness", "ask", "ask_ahead", "build_engine"]
