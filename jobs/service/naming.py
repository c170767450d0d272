"""What a text of a call may name: one list for all fields of all bodies, and one check of a call before it is read.

A text can name code (an engine, a router, attention kernels), a file (a trace, a calibration) or a place on the hub.
Here it may be a plain name, unless :data:`RULES` has another pattern for its field, or the service was started with
this very text in ``allow``. So a new field takes plain names until a rule says more. The call is looked at as it came:
nothing has been imported or opened by then.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Coroutine, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from ...datasets.model_names import shipped_ids, shipped_model
from ...simulator.question.canonical import RequestError
from ...simulator.serving.trace_formats.drawn import drawn_names
from ...simulator.trace.models import CHECKPOINT_SETTINGS

LONGEST = 2000  # characters of a text
LONGEST_KEY = 200
DEEPEST = 24  # mappings and lists within each other
QUOTED = 60  # characters of a text in a message

ANY = r"[\s\S]*"
NONE = r"(?!)"
SETTING = r"(?![\s\S]*(\.\.|[/\\:~$\x00-\x1f\x7f]))[\s\S]*"  # what no file, code or variable can be written without
NAME = rf"(?![._]|[\s\S]*\.[A-Za-z_]\w*$){SETTING}"  # neither hidden, nor ending as files do
SPAN = r"(\.[^.]+)*"
TOLD = "|".join((*CHECKPOINT_SETTINGS, "quantization_config", "compression_config", "hf_quant_config"))

RULES = tuple(
    (re.compile(path), re.compile(text))
    for path, text in (
        # a model's configuration: what no trace reads, what chooses code, the rest
        (rf"model{SPAN}\.({TOLD}){SPAN}", ANY),
        (rf"model{SPAN}\.\w*_implementation\w*{SPAN}", "eager|sdpa|flex_attention|grouped_mm|batched_mm"),
        (rf"model{SPAN}\.\w*backbone\w*{SPAN}", NONE),
        (r"model\.name", r"(?!\.)[\w. -]+(/(?!\.)[\w.-]+)?"),
        (rf"model{SPAN}", SETTING),
        # files and questions within questions
        (r"traffic\.trace", "|".join(drawn_names()) or NONE),
        (rf"(decode_pool|second_kind)\.step{SPAN}|topology\.file|calibrate", NONE),
        ("calibration", "own|shipped|none"),  # any other is a file
        # more than a name, and nothing that is looked up: compared with what is known, parsed, or matched
        ("backend", r"[\w.+-]+(:[\w.+-]+)?"),
        (r"recompute|space\.recompute", r"\w+(:[\w,+-]*)?"),
        (r"expert_load|options\.expert_load", r"\w+(:[\d.eE+-]+)?|[\d.,eE+-]+"),
        (r"options\.loss", r"\w+(:\d+)?"),
        (r"space\.ratio", r"\d+:\d+"),
        (r"constraints|space\.rules|frozen|lora_modules|options\.quantize_skip", ANY),
        (r"[\s\S]*", NAME),
    )
)


class AdmittedRoute(APIRoute):
    """A route whose calls are looked at by :func:`admit` before anything is made of them."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, behind the check."""
        handler = super().get_route_handler()

        async def admitted(request: Request) -> Response:
            allow = request.app.state.allow
            for name, value in request.query_params.multi_items():
                admit({name: value}, allow)
            if self.body_field is not None:
                try:
                    body = await request.json()
                except (ValueError, RecursionError) as error:
                    raise RequestError(f"the body is no JSON: {_why(error)}") from None
                admit(body, allow)
            return await handler(request)

        return admitted


def admit(call: Any, allow: Collection[str] = (), path: str = "", depth: int = 0) -> None:
    """RequestError for a text at any depth of a call that may not stand in its field, and for a call too deep."""
    if depth > DEEPEST:
        raise RequestError(f"{path or 'the body'} has more than {DEEPEST} mappings or lists within each other")
    if isinstance(call, str):
        return _check(path, call, allow)
    if isinstance(call, Mapping):
        for key, value in call.items():
            if len(key) > LONGEST_KEY:
                raise RequestError(f"{path or 'the body'} has a name of {len(key):,} characters: {key[:QUOTED]}…")
            if isinstance(value, (str, Mapping, list)):
                field_name = key.replace(".", "_")
                admit(value, allow, f"{path}.{field_name}" if path else field_name, depth + 1)
    elif isinstance(call, list):
        for value in call:
            if isinstance(value, (str, Mapping, list)):
                admit(value, allow, path, depth + 1)


def _check(path: str, text: str, allow: Collection[str]) -> None:
    if fits(path, text) or text in allow:
        return
    if len(text) > LONGEST:
        raise RequestError(f"{path}={text[:QUOTED]}… has {len(text):,} characters: a text may have {LONGEST:,}")
    if path == "model":
        raise RequestError(
            f"model={shown(text)!r} is not offered here: take an id of GET /v1/models or send a transformers "
            "configuration; paths, hub ids and module:callable only where the server was started with allow=[…]"
        )
    raise RequestError(
        f"{path}={shown(text)} could name a file or code, which is taken over HTTP only where the service was "
        "started with it, as allow=[…]"
    )


@lru_cache(maxsize=4096)
def fits(path: str, text: str) -> bool:
    """Whether a text may stand in the field at a path, whatever is allowed besides."""
    if path == "model":
        return offered(text)
    return len(text) <= LONGEST and rule_of(path).fullmatch(text) is not None


@lru_cache(maxsize=4096)
def rule_of(path: str) -> re.Pattern[str]:
    """What a text may be in the field at a path, as ``space.recompute``; places in lists do not count."""
    return next(text for field, text in RULES if field.fullmatch(path))


def offered(model: str) -> bool:
    """Whether a model ships: by its id, or a usual spelling that is no folder of the server."""
    return model in shipped_ids() or (shipped_model(model) is not None and not Path(model).exists())


def shown(text: str) -> str:
    """The beginning of a text, as a message quotes it."""
    plain = json.dumps(text, ensure_ascii=False)[1:-1].encode(errors="backslashreplace").decode()  # half a character
    return plain if len(plain) <= QUOTED else f"{plain[:QUOTED]}…"


def _why(error: Exception) -> str:
    return "it is too deep" if isinstance(error, RecursionError) else " ".join(str(error).split())[:200]
