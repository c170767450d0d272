"""Policies of schedulers, one module each, by the names of :data:`...question.serving.POLICIES`.

A module has the function that forms a batch and a ``POLICY`` that says what its engine has by itself. What they follow
stands in docs/serving.md#policies, engine by engine.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

from ....datasets.loading import choice
from ...question.canonical import RequestError
from ...question.serving import POLICIES
from ..chain import chain
from ..own import guard, load_function
from ..queues import nobody_new
from ..rules import SchedulerRules
from ..state import LoopState
from .policy import Again, Form, Policy

MODULES = tuple(import_module(f"{__name__}.{name}") for name in POLICIES)
TABLE: dict[str, Policy] = {name: module.POLICY for name, module in zip(POLICIES, MODULES, strict=True)}


def policy_of(name: str) -> Policy:
    """The policy of a name, or a user's own: ``module:POLICY``, or ``module:function`` that forms batches.

    RequestError where there is no such thing.
    """
    if ":" not in name:
        choice(RequestError, "scheduler.policy", name, POLICIES)
        return TABLE[name]
    user_policy = load_function("scheduler.policy", name)
    policy = user_policy if isinstance(user_policy, Policy) else Policy(name, user_policy)
    return replace(policy, name=name, form=guard("scheduler.policy", name, policy.form), repeats=False)


def link_form(code: int, form: Form, others: Form) -> Form:
    """A function that forms batches as ``form`` does where the policy is ``code``, else as ``others``."""

    def form_one(state: LoopState, rules: SchedulerRules, rank: int, batch: int, now_us: float) -> None:
        if rules.policy == code:
            form(state, rules, rank, batch, now_us)
        else:
            others(state, rules, rank, batch, now_us)

    return form_one


def link_again(code: int, again: Again, others: Again) -> Again:
    """The same of a function that says whether a batch comes again."""

    def again_one(state: LoopState, rules: SchedulerRules, rank: int) -> bool:
        if rules.policy == code:
            return again(state, rules, rank)
        return others(state, rules, rank)

    return again_one


FORMS = chain(link_form, [policy.form for policy in TABLE.values()])
AGAIN = chain(link_again, [policy.again for policy in TABLE.values()], nobody_new)
form_batch, same_again = FORMS[-1], AGAIN[-1]
