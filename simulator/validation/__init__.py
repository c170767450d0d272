"""Simulate the rows of a table of published results and say how far off the answers are, beside what others score.

Others use :func:`validate`, :class:`Validation` and :class:`Setting`.
"""

from .result import Validation
from .run import Setting, validate

__all__ = ["Setting", "Validation", "validate"]
