"""What a report says of the model itself: what its checkpoint has that the work did not run as it is stored."""

from __future__ import annotations

from ..question.plan import Plan
from ..question.work import Work
from ..trace import Model


def model_notes(model: Model, work: Work, plan: Plan) -> tuple[str, ...]:
    """Lines about the model: weights that a training step unpacks."""
    from ..trace.models import resolve

    source = resolve(model)
    method = (source.quantization or {}).get("quant_method")
    if work.kind == "train" and method and not plan.quantization:
        named = "other formats are set by precision=…"
        return (f"the checkpoint stores weights as {method}: they are trained unpacked, in {plan.precision}; {named}",)
    return ()
