"""Work on images: their tokens go before the text of every sequence."""

from __future__ import annotations

from dataclasses import replace

from ..question.work import Work
from ..trace import Model
from ..trace.models import resolve


def with_images(model: Model, work: Work) -> Work:
    """The work with sequences as long as text and images together. TraceError for a model that sees none."""
    if not work.images:
        return work
    from ..trace.build import load_config
    from ..trace.image_tokens import image_size

    source = resolve(model)
    config = load_config(source).to_dict() if source.config is not None else {"model_type": source.name}
    tokens = work.images * image_size(config, work.image_px).tokens
    return replace(work, seq_len=work.seq_len + tokens, input_len=work.input_len + tokens)
