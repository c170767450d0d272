"""ShareGPT: conversations as texts. As vLLM's and SGLang's benchmarks take them, the first turn is the prompt, the
second one the answer; there are no times.

Tokens are those of a tokenizer (``tokenizer.json``) where one is named, else a quarter of the characters, rounded up:
OpenAI's rule of thumb for English (help.openai.com, "What are tokens and how to count them?").
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ....datasets.installing import install_command
from .rows import RequestRows, RequestTraceError, without

CHARACTERS_OF_TOKEN = 4
PROMPT, ANSWER = "conversations[0]", "conversations[1]"


def read_conversations(path: Path, records: list[Any], tokenizer: str | None) -> RequestRows:
    """The requests of ShareGPT's file. RequestTraceError for a turn that is no text."""
    import pandas as pd

    texts = [_first_turns(path, row, record) for row, record in enumerate(records, 1)]
    none = np.array([not prompt or not answer for prompt, answer in texts], bool)
    table, notes = without(pd.DataFrame(texts, columns=[PROMPT, ANSWER]), none, "no first prompt with an answer", path)
    for name in (PROMPT, ANSWER):
        table = table.assign(**{name: _lengths(table[name].tolist(), tokenizer)})
    if tokenizer is None:
        notes = (*notes, "tokens are a quarter of the characters: traffic.tokenizer=tokenizer.json counts them")
    return RequestRows(path, table, None, PROMPT, ANSWER, notes=notes)


def _first_turns(path: Path, row: int, record: Any) -> tuple[str, str]:
    """The first two texts of a conversation, empty where there are none."""
    turns = record.get("conversations", record.get("conversation")) if isinstance(record, dict) else None
    if not isinstance(turns, list):
        raise RequestTraceError(f"{path} row {row}: conversations={str(turns)[:60]} must be a list of turns")
    values = [turn.get("value", turn.get("content")) if isinstance(turn, dict) else None for turn in turns[:2]]
    texts = [value for value in values if isinstance(value, str)]
    if len(texts) < len(values):
        raise RequestTraceError(f"{path} row {row}: conversations={str(turns)[:60]} has a turn without a text (value)")
    return (texts[0], texts[1]) if len(texts) == 2 else ("", "")


def _lengths(texts: list[str], tokenizer: str | None) -> np.ndarray:
    """Tokens of each text, at least one; int64."""
    if tokenizer is None:
        return np.array([-(-len(text) // CHARACTERS_OF_TOKEN) for text in texts], np.int64)
    counter = _tokenizer(Path(tokenizer).expanduser())
    encoded = counter.encode_batch(texts, add_special_tokens=False)
    return np.array([max(len(text.ids), 1) for text in encoded], np.int64)


def _tokenizer(path: Path) -> Any:
    """A tokenizer of a file. RequestTraceError where there is none."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise RequestTraceError(
            f"traffic.tokenizer needs the package tokenizers: {install_command('hf')}, or leave it out"
        ) from None
    if not path.is_file():
        raise RequestTraceError(f"traffic.tokenizer={path} is no file: name the tokenizer.json of a model")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for a damaged file
        raise RequestTraceError(f"traffic.tokenizer={path} is no tokenizer: {str(error)[:80]}") from None
