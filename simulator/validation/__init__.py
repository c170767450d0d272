"""Simulate the rows of a table of published results and say how far off the answers are, beside what others score.

Others use :func:`validate`, :class:`Validation` and :class:`ValidationSettings`.
"""

from .result import Validation
from .run import ValidationSettings, validate

__all__ = ["Validation", "ValidationSettings", "validate"]
