"""The servers that a way to serve consists of: one role that does both, or one that prefills and one that decodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .request import LAYOUT, OF_PREFILL, ServedSearchRequest

BOTH, PREFILL, DECODE = "", "prefill", "decode"
PORTS = {BOTH: 8000, PREFILL: 8100, DECODE: 8200}
BOOTSTRAP_PORT = 8998


@dataclass(frozen=True)
class ServedRole:
    """The servers of a role (``prefill``, ``decode``, or both where it is empty): what rows of the tables read."""

    role: str
    tp: int
    pp: int
    dp: int
    ep: int
    batch: int
    max_tokens: int
    max_len: int
    quantization: str
    kv_dtype: str
    replicas: int

    @property
    def ranks(self) -> int:
        """Tensor and data ranks."""
        return self.tp * self.dp

    @property
    def devices(self) -> int:
        """GPUs of a server."""
        return self.tp * self.pp * self.dp


def roles(request: ServedSearchRequest, row: Mapping[str, Any]) -> list[ServedRole]:
    """The servers of a point: one role, or one that prefills and one that decodes."""
    max_len = request.input_len + request.output_len
    asked = request.step.kv_dtype or str(request.step.options.get("kv_dtype") or "")
    kv_dtype = "" if asked == "same" else asked
    rest = {"max_len": max_len, "quantization": row["precision"], "kv_dtype": kv_dtype}
    degrees = dict(zip(("tp", "pp", "dp", "ep"), (row[name] for name in LAYOUT), strict=True))
    own = {**degrees, "batch": row["batch"], **rest, "replicas": row["replicas"]}
    if row["pools"] == "together":
        return [ServedRole(BOTH, max_tokens=row["max_tokens"], **own)]
    first = dict(zip(("tp", "pp", "dp", "ep"), (row[name] for name in OF_PREFILL), strict=True))
    prompts = max(row["max_tokens"] // request.input_len, 1)
    one = ServedRole(
        PREFILL, **first, batch=prompts, max_tokens=row["max_tokens"], **rest, replicas=row["prefill_replicas"]
    )
    return [one, ServedRole(DECODE, max_tokens=max(row["batch"], 256), **own)]
