"""Which model is meant: a shipped name, a folder, a config.json, a hub id or a function that makes a module.

Nothing here imports torch or transformers: a graph that is in the cache must be found without them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...datasets.installing import install_command
from ...datasets.model_names import MODEL_DIRECTORY, ShippedModel, canonical_name, shipped_ids, shipped_model
from ...datasets.near import did_you_mean
from ...datasets.reading import read_json, read_yaml
from .workload import TraceError

HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")
FACTORY = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")

HUB_TIMEOUT_S = 5.0
HUB_REFUSALS = {
    "Gated": "gives it only to those who accepted its terms (set HF_TOKEN)",
    "NotFound": "has no such model, or no config.json in it",
    "Validation": "has no such names",
}
SIZE_SETTINGS = (  # settings of a configuration that are whole numbers of at least 1
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings", "n_embd", "n_head", "n_layer", "n_positions", "d_model"),
)
QUANTIZATION_KEYS = ("quantization_config", "compression_config")  # where a configuration has the format of weights
LANGUAGE_KEYS = ("text_config", "llm_config", "language_config")  # the language model of a configuration with several
QUANT_CONFIG_FILE = "hf_quant_config.json"
CHECKPOINT_SETTINGS = (  # settings that say where weights, code and words came from; a trace does without
    *("_name_or_path", "name_or_path", "base_model_name_or_path", "_commit_hash", "transformers_version"),
    *("auto_map", "custom_pipelines", "trust_remote_code", "task_specific_params", "license", "license_link"),
)
DTYPE_NAMES = re.compile(r"(torch\.)?(auto|half|float|double|bool|(b?float|u?int|complex)\d+(_\w+)?)")
DTYPE_SETTINGS = ("dtype", "torch_dtype", "router_dtype")  # what transformers looks up as an attribute of torch
MAX_DEPTH = 20  # mappings and lists of a configuration within each other
MAX_LAYERS = 1000
MAX_EXPERTS = 4096
MAX_SIZE = 2**31 - 1

Factory = Callable[[], Any]
Model = str | Mapping[str, Any] | Factory


@dataclass(frozen=True)
class Source:
    """A model that has been found but not built.

    ``config`` is its transformers configuration, or None for a ``factory`` (a function, or ``module:callable``).
    ``identity`` is what a cached graph is keyed by; None means that nothing identifies the model, so that its
    graphs are not cached. ``quantization`` is what its checkpoint says of the format of weights, ``quantized_in``
    where; ``dtype`` is that of weights which are in no other format, in torch's words (empty: it does not say).
    """

    name: str
    config: Mapping[str, Any] | None
    factory: str | Factory | None
    identity: str | None
    quantization: Mapping[str, Any] | None = None
    quantized_in: str = ""
    dtype: str = ""

    @property
    def language(self) -> Mapping[str, Any]:
        """The configuration of its language model; empty for a factory."""
        config = self.config or {}
        return {**config, **(language_of(config) or {})}


def known_models() -> dict[str, str]:
    """Shipped models: name and where its shape was published."""
    return {
        path.stem: str(_read_shipped(path.stem).get("source", "")) for path in sorted(MODEL_DIRECTORY.glob("*.yaml"))
    }


def resolve(model: Model) -> Source:
    """Find a model; TraceError in one line when there is none.

    ``model`` is a name in conf/model or another spelling of it (:mod:`...datasets.model_names`), a folder with a
    config.json, such a file, a hub id (``org/name``), ``module:callable``, a transformers configuration as a mapping
    with ``model_type``, or a function that returns a module. A factory may also return (module, function): the function
    is given the workload and returns example inputs, a tuple or a mapping.
    """
    if isinstance(model, Mapping):
        return _from_config(str(model.get("name", model.get("model_type", "config"))), model)
    if callable(model):
        return Source(getattr(model, "__name__", type(model).__name__), None, model, None)
    name = str(model).strip()
    shipped = canonical_name(name)
    if shipped in shipped_ids():
        return _from_config(shipped, _read_shipped(shipped).get("config", {}))
    if FACTORY.match(name):
        return Source(name, None, name, _factory_identity(name))
    path = Path(name).expanduser()
    if path.exists():
        return _from_path(path)
    if (match := shipped_model(name)) is not None:
        return _from_other_name(name, match)
    if HUB_ID.match(name):
        return _from_hub(name)
    hint = did_you_mean(shipped, shipped_ids(), "`opcast list models` names them")
    raise TraceError(f"unknown model {name!r}; {hint} (a folder, config.json, org/name or module:callable will do too)")


def _from_other_name(name: str, shipped: ShippedModel) -> Source:
    """A shipped model by another name of it, with the format of weights that the name tells."""
    source = _from_config(shipped.id, _read_shipped(shipped.id).get("config", {}))
    if shipped.quantization is None:
        return source
    quantization = shipped.quantization or None
    return replace(source, quantization=quantization, quantized_in=f"its name, {name}" if quantization else "")


def language_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The part of a wrapper's configuration that is its language model; None where there is none."""
    return next((config[key] for key in LANGUAGE_KEYS if isinstance(config.get(key), Mapping)), None)


def shipped_config(name: str) -> Mapping[str, Any]:
    """The transformers configuration of a shipped model; empty for a name that is none."""
    is_shipped = (MODEL_DIRECTORY / f"{name}.yaml").is_file()
    return dict(_read_shipped(name).get("config", {})) if is_shipped else {}


def shipped_source(name: str) -> str:
    """The hub id that a shipped model's configuration is of, as ``Qwen/Qwen3-32B``; empty where it is of none."""
    is_shipped = (MODEL_DIRECTORY / f"{name}.yaml").is_file()
    match = (
        re.match(r"https://huggingface\.co/([\w.-]+/[\w.-]+)/", str(_read_shipped(name).get("source", "")))
        if is_shipped
        else None
    )
    return match.group(1) if match else ""


@lru_cache(maxsize=64)
def _read_shipped(name: str) -> Mapping[str, Any]:
    return read_yaml(MODEL_DIRECTORY / f"{name}.yaml", TraceError, f"model {name}")


def _from_config(name: str, config: Mapping[str, Any], quant_config: Mapping[str, Any] | None = None) -> Source:
    """A source for a configuration. Weights' formats are left out: a trace has no weights to unpack.

    ``quant_config`` is what an ``hf_quant_config.json`` says of the format, where the configuration says nothing.
    """
    if not config.get("model_type"):
        raise TraceError(f"model {name}: the configuration has no model_type, so transformers cannot know its class")
    _check_sizes(name, config)
    settings = {key: value for key, value in config.items() if key not in ("name", *QUANTIZATION_KEYS)}
    quantization, source = _quantization(config), "quantization_config of its config.json"
    for language_key in LANGUAGE_KEYS:
        if isinstance(settings.get(language_key), Mapping):
            quantization = quantization or _quantization(settings[language_key])
            settings[language_key] = {
                key: value for key, value in settings[language_key].items() if key not in QUANTIZATION_KEYS
            }
    if not quantization:
        quantization, source = quant_config, f"its {QUANT_CONFIG_FILE}"
    settings = _shape_settings(name, settings, "model.config")
    return Source(
        name, settings, None, "config:" + digest(settings), quantization, source if quantization else "", _dtype(config)
    )


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a configuration says of the format of its weights; where that is no mapping, it is taken for the method."""
    quantization = next((config[key] for key in QUANTIZATION_KEYS if config.get(key)), None)
    return quantization if quantization is None or isinstance(quantization, Mapping) else {"quant_method": quantization}


def _dtype(config: Mapping[str, Any]) -> str:
    """The dtype that a configuration or its language model names, as ``float16``."""
    parts = (config, *(config[key] for key in LANGUAGE_KEYS if isinstance(config.get(key), Mapping)))
    dtypes = (section.get(key) for section in parts for key in ("dtype", "torch_dtype"))
    return str(next((dtype for dtype in dtypes if isinstance(dtype, str)), "")).removeprefix("torch.")


def _shape_settings(name: str, value: Any, setting: str, depth: int = 0) -> Any:
    """A configuration without what only says where a checkpoint came from, in the parts of it too.

    TraceError for what Python or torch would take for one of their own names, and for what is too deep to be one.
    """
    if depth > MAX_DEPTH:
        raise TraceError(f"model {name}: {setting} has more than {MAX_DEPTH} mappings or lists within each other")
    if isinstance(value, (list, tuple)):
        return [_shape_settings(name, item, setting, depth + 1) for item in value]
    if not isinstance(value, Mapping):
        return value
    for key, item in value.items():
        if str(key).startswith("__"):
            raise TraceError(f"model {name}: {setting} has {str(key)[:60]!r}, which is no setting of a model")
        if key in DTYPE_SETTINGS and isinstance(item, str) and not DTYPE_NAMES.fullmatch(item):
            raise TraceError(f"model {name}: {setting}.{key}={item[:60]!r} is no dtype, such as bfloat16")
    settings = {key: item for key, item in value.items() if key not in CHECKPOINT_SETTINGS}
    return {key: _shape_settings(name, item, f"{setting}.{key}", depth + 1) for key, item in settings.items()}


def _check_sizes(name: str, config: Mapping[str, Any]) -> None:
    """TraceError for a size that no model can have, or that would take hours to build."""
    for key in SIZE_SETTINGS:
        value = config.get(key)
        valid = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_SIZE
        per_layer = isinstance(value, (list, tuple))  # a size for each layer
        if value is not None and not valid and not per_layer:
            bound = f"at most {MAX_SIZE:,}" if isinstance(value, int) and value > MAX_SIZE else "at least 1"
            raise TraceError(f"model {name}: model.config.{key}={value!r} must be a whole number of {bound}")
    for keys, maximum in (
        (("num_hidden_layers", "n_layer"), MAX_LAYERS),
        (("num_experts", "num_local_experts", "n_routed_experts"), MAX_EXPERTS),
    ):
        for key in keys:
            value = config.get(key)
            if isinstance(value, int) and value > maximum:
                raise TraceError(
                    f"model {name}: model.config.{key}={value} is more than the {maximum:,} that are simulated"
                )
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
        raise TraceError(
            f"model {name}: {heads} attention heads cannot share {groups} key and value heads evenly; "
            "take a divisor for model.config.num_key_value_heads"
        )


def _from_path(path: Path) -> Source:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise TraceError(f"model {path}: the folder has no config.json")
    config = read_json(file, TraceError, f"model {file}")
    if not isinstance(config, dict):
        raise TraceError(f"model {file}: not a transformers configuration (a JSON object)")
    return _from_config(
        (path if path.is_dir() else path.resolve().parent).resolve().name, config, _read_quant_config(file)
    )


def _read_quant_config(file: Path) -> Mapping[str, Any] | None:
    """What the ``hf_quant_config.json`` beside a config.json says, as ModelOpt writes it; None where there is none."""
    path = file.parent / QUANT_CONFIG_FILE
    if not path.is_file():
        return None
    quant_config = read_json(path, TraceError, f"model {path}")
    if not isinstance(quant_config, dict):
        raise TraceError(f"model {path}: not what ModelOpt writes (a JSON object)")
    return quant_config


def _from_hub(name: str) -> Source:
    """The config.json of a hub id: from the local hub cache, else by downloading it."""
    try:
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
    except ImportError:
        raise TraceError(f"model {name}: reading from the hub needs transformers: {install_command('hf')}") from None
    try:
        cached = try_to_load_from_cache(name, "config.json")
        if not isinstance(cached, str):
            get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=HUB_TIMEOUT_S)  # asks once, unlike a download
            cached = hf_hub_download(name, "config.json")
    except Exception as error:
        error_name = type(error).__name__
        reason = next(
            (reason_text for word, reason_text in HUB_REFUSALS.items() if word in error_name),
            f"cannot be reached ({error_name})",
        )
        shipped = did_you_mean(canonical_name(name.rpartition("/")[2]), shipped_ids())
        raise TraceError(
            f"model {name}: does not come along, is not in the local hub cache, and the hub {reason}; "
            f"{f'{shipped} Or give' if shipped else 'give'} a folder or config.json instead"
        ) from None
    _fetch_quant_config(name, Path(cached))
    return replace(_from_path(Path(cached)), name=name)


@lru_cache(maxsize=64)
def _fetch_quant_config(name: str, file: Path) -> None:
    """Have the hub's ``hf_quant_config.json`` beside a cached config.json that says nothing of formats."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    if try_to_load_from_cache(name, QUANT_CONFIG_FILE) is None and "quantization_config" not in file.read_text(
        encoding="utf-8"
    ):
        with suppress(Exception):  # whatever the hub answers: most models have none
            hf_hub_download(name, QUANT_CONFIG_FILE, etag_timeout=HUB_TIMEOUT_S)


def _factory_identity(name: str) -> str:
    """Identity of ``module:callable``: the module's file. TraceError when there is no such module."""
    module = name.partition(":")[0]
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise TraceError(f"model {name}: there is no module {module!r} to import (is its folder on PYTHONPATH?)")
    origin = Path(spec.origin) if spec.origin else None
    content = origin.read_bytes() if origin is not None and origin.is_file() else b""
    return f"factory:{name}:{hashlib.sha256(content).hexdigest()}"


def digest(value: Any) -> str:
    """A hash of plain values, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
