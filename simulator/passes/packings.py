"""Which products run in few bits, and how their weights are packed: by the plan's format, or its checkpoint's rules."""

from __future__ import annotations

import re

from ..question.plan import Plan
from ..trace.stored import Packing, modules_of

SKIP = re.compile(r"lm_head|embed_out|(^|\.)(output|score|gate|router|lora_[ab])$")


class Packings:
    """The packing of every product with weights under a plan."""

    def __init__(self, plan: Plan) -> None:
        self.rules, self.usual = plan.packings, Packing(plan.quantization)
        self.own = re.compile(str(plan.options.get("quantize_skip") or "(?!)"))
        self.by_layer = bool(self.rules or plan.options.get("quantize_skip"))
        self._known: dict[tuple[str, str], Packing | None] = {}

    def of(self, path: str, source: str) -> Packing | None:
        """How the weights of a node are packed; None where they and its product stay in 16 bits."""
        key = path, source
        if key not in self._known:
            self._known[key] = self._found(path, source)
        return self._known[key]

    def _found(self, path: str, source: str) -> Packing | None:
        if self.own.search(path):
            return None
        left_out = SKIP.search(path) is not None
        if not self.rules:
            return None if left_out else self.usual
        names = modules_of(path, source)
        rule = next((each for each in self.rules if any(map(each.covers, names))), None)
        if rule is None or not rule.packing.format or (left_out and not any(map(rule.names_it, names))):
            return None
        return rule.packing
