"""Which class of transformers a configuration is built as, and what is said of those that no step can run.

Decoders, encoders, and encoders with a decoder are told by transformers' own lists. A wrapper of a language model with
an encoder of images is built whole and loses what is not its language model, unless images are looked at. Where only
the language model of a wrapper is known, that is what is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...datasets.near import likeliest
from .models import LANGUAGE_KEYS, language_of
from .workload import TraceError, Workload

OTHER_INPUTS = {  # lists of transformers -> what such models work on
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": "images",
    "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES": "images",
    "MODEL_FOR_BACKBONE_MAPPING_NAMES": "images",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES": "sound",
    "MODEL_FOR_CTC_MAPPING_NAMES": "sound",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES": "sound",
}
FACTORY_HINT = "give it as module:callable that returns a module and a function of its inputs"


def known_config(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration itself, or the part of it that transformers knows; TraceError where there is none.

    A language model of a wrapper by itself (``qwen3_vl_text``), which no list has, is put into its wrapper.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    settings, lists = dict(config), _model_types()
    kind = str(settings["model_type"])
    wrapper = kind.removesuffix("_text")
    if kind not in lists["decoders"] and wrapper != kind and wrapper in lists["wrappers"]:
        return {"model_type": wrapper, "text_config": settings}
    if kind in CONFIG_MAPPING_NAMES:
        return settings
    for key in LANGUAGE_KEYS:
        inner = settings.get(key)
        if isinstance(inner, Mapping) and inner.get("model_type") in CONFIG_MAPPING_NAMES:
            return dict(inner)
    near = ", ".join(likeliest(kind, sorted(lists["decoders"]), most=4))
    raise TraceError(
        f"model {name}: its code is not part of transformers (model_type={kind!r}): set model_type to that of a model "
        f"built alike{f' ({near}?)' if near else ''}, or give your own as module:callable"
    )


def choose_loader(name: str, config: Any, workload: Workload) -> Any:
    """transformers' factory for a configuration; TraceError for models that do not work on tokens."""
    import transformers as hf

    kind, lists = config.model_type, _model_types()
    if kind in lists["wrappers"] and (workload.images or kind not in lists["decoders"]):
        return hf.AutoModelForImageTextToText
    if translates(config) and kind in lists["translators"]:
        return hf.AutoModelForSeq2SeqLM
    if encodes(config):
        return hf.AutoModelForMaskedLM if workload.training else hf.AutoModel
    if kind in lists["decoders"] and not translates(config):
        return hf.AutoModelForCausalLM
    raise TraceError(f"model {name}: {type(config).__name__} {_describe_inputs(kind)}: {FACTORY_HINT}")


def _describe_inputs(kind: str) -> str:
    from transformers.models.auto import modeling_auto

    inputs = (works_on for list_, works_on in OTHER_INPUTS.items() if kind in getattr(modeling_auto, list_, {}))
    input_kind = next(inputs, "")
    return f"works on {input_kind}, not on tokens" if input_kind else "is of no model that generates or encodes tokens"


def _model_types() -> dict[str, Mapping[str, Any]]:
    """Types of models by what transformers builds of them."""
    from transformers.models.auto import modeling_auto as auto

    names: Any = auto
    return {
        "decoders": names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "wrappers": names.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        "translators": names.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }


def encodes(config: Any) -> bool:
    """Whether a configuration is an encoder's: every token sees all others, and none is generated."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    generates = getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False)
    return getattr(config, "model_type", None) in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not generates


def translates(config: Any) -> bool:
    """Whether a configuration is that of an encoder with a decoder, as T5's."""
    return bool(getattr(config, "is_encoder_decoder", False))


def wraps(config: Any) -> bool:
    """Whether a configuration has a language model and an encoder of images."""
    return getattr(config, "vision_config", None) is not None and language_of(config.to_dict()) is not None
