"""Which products run in few bits, and how their weights are packed: by the plan's format, or its checkpoint's rules."""

from __future__ import annotations

import re
from functools import lru_cache

from ..question.plan import Plan
from ..trace.stored_formats import ModuleRule, WeightFormat, modules_of

SKIP = re.compile(r"lm_head|embed_out|(^|\.)(output|score|gate|router|lora_[ab])$")
HEAD = re.compile(r"lm_head|embed_out|(^|\.)output$")  # of the language model


@lru_cache(maxsize=32)
def _by_module(rules: tuple[ModuleRule, ...]) -> dict[tuple[str, str], WeightFormat | None]:
    """What was found by these rules: a search asks for the same modules under many plans."""
    return {}


class ProductFormats:
    """The format of every product with weights under a plan."""

    def __init__(self, plan: Plan) -> None:
        self.rules, self.usual = plan.weight_rules, WeightFormat(plan.quantization)
        self.own = re.compile(plan.settings.quantize_skip or "(?!)")
        self.by_layer = bool(self.rules or plan.settings.quantize_skip)
        self.packs_head = plan.stack.packs_head
        self._known = _by_module(self.rules) if self.rules and not plan.settings.quantize_skip else {}

    def of(self, path: str, source: str) -> WeightFormat | None:
        """How the weights of a node are packed; None where they and its product stay in 16 bits."""
        key = path, source
        if key not in self._known:
            self._known[key] = self._find_format(path, source)
        return self._known[key]

    def _find_format(self, path: str, source: str) -> WeightFormat | None:
        if self.own.search(path):
            return None
        left_out = SKIP.search(path) is not None and not (self.packs_head and not self.rules and HEAD.search(path))
        if not self.rules:
            return None if left_out else self.usual
        names = modules_of(path, source)
        rule = next((candidate for candidate in self.rules if any(map(candidate.covers, names))), None)
        if rule is None or not rule.weights.name or (left_out and not any(map(rule.names_it, names))):
            return None
        return rule.weights
