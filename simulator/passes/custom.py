"""Passes and rules of one's own: a Python function named in the config as ``module:function``.

The module is looked up as Python does, the working directory first.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from ...datasets.loading import nearest
from ..graph import Graph
from ..question.plan import Plan, PlanError
from .verify import GraphError, verify


def load(name: str, what: str) -> Callable[..., Any]:
    """The function that ``module:function`` names; PlanError says in one line what is wrong with it."""
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise PlanError(f"{what} {name!r} is not of the form module:function")
    try:
        module = _imported(module_name)
    except Exception as error:
        raise PlanError(f"{what} {name!r}: cannot import {module_name}: {_one_line(error)}") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        offered = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise PlanError(
            f"{what} {name!r}: {module_name} has no function {function_name}; {nearest(function_name, offered)}"
        )
    return function


def load_pass(name: str) -> Callable[[Graph, Plan], Graph]:
    """A user's pass ``(graph, plan) -> graph``; what it raises or returns amiss becomes a PlanError that names it."""
    function = load(name, "pass")

    def checked(graph: Graph, plan: Plan) -> Graph:
        result = called(lambda: function(graph, plan), f"pass {name!r}")
        if not isinstance(result, Graph):
            raise PlanError(f"pass {name!r} returned {type(result).__name__}, not a Graph")
        try:
            verify(result)
        except GraphError as error:
            raise PlanError(f"pass {name!r} made a graph that does not fit together: {error}") from None
        return result

    return checked


def called(function: Callable[[], Any], what: str) -> Any:
    """What a user's function returns; whatever it raises becomes a PlanError that starts with ``what``."""
    try:
        return function()
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(f"{what} failed: {_one_line(error)}") from error


def _imported(module_name: str) -> Any:
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    finally:
        sys.path.remove(here)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
