"""Rows of served runs: so many clients at a time, each with one request after another, on an engine of a version."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from .cells import Cells
from .hardware import hardware_of
from .inference import options
from .published import known
from .rows import DecodeWorkers, PublishedLayout, Row, ServingRow, TruthError, UnsupportedRow
from .shapes import model_of

STACKS = ("vllm", "sglang", "trtllm")
SHORTEST = 0.8  # of the nominal length, where lengths are drawn
APART = "disagg"
STARTED = (
    *("max_tokens", "chunk", "kv_fraction", "wait_iterations", "wait_share", "graphs", "block_tokens", "clients"),
    *(
        "max_seqs",
        "without_seat",
        "shared_seats",
        "balance_iterations",
        "gather_iterations",
        "decode_seqs",
        "decode_kv_fraction",
    ),
)


def serving_row(cells: Cells, folder: Path) -> ServingRow:
    """One run, on replicas that do both or on workers that prefill and workers that decode.

    TruthError says what keeps it from being simulated.
    """
    cells = known(replace(cells, values={**cells.values, "clients": f"{clients_of(cells)}"}), "serving")
    stack = cells.text("stack")
    if stack not in STACKS:
        raise TruthError(f"the engine {stack!r} is not known")
    ttft, tpot = cells.positive("ttft_ms"), cells.positive("tpot_ms")
    if ttft is None or tpot is None:
        raise TruthError("neither TTFT nor TPOT is published")
    apart = cells.text("mode") == APART
    layout = layout_of(cells, "prefill_" if apart else "")
    isl, osl = _whole(cells, "input_len_tokens"), _whole(cells, "output_len_tokens")
    name, config = model_of(cells, folder, isl + osl)
    clients_per = 1 if cells.has("attention_dp") or apart else layout.dp  # where no ranks are told, clients are of one
    concurrency = _whole(cells, "clients") * clients_per
    shortest = 1.0 if cells.text("lengths") == "fixed" else SHORTEST
    tokens = osl * (1 + shortest) / 2
    throughput = concurrency * tokens / (ttft + (tokens - 1) * tpot) * 1e3  # Little's law of a closed loop
    decoding = decode_workers(cells) if apart else None
    return ServingRow(
        id=cells.id,
        hardware=hardware_of(cells, devices_of(layout)),
        measured={"ttft": ttft, "tpot": tpot, "throughput": throughput},
        tags={
            "system": cells.text("gpu_canon") or cells.text("gpu"),
            "model": (cells.text("model") or name).rpartition("/")[2],
            "backend": stack,
            "precision": cells.text("precision"),
            "lengths": f"{isl}/{osl}",
            "attention": "data parallel" if (decoding.layout if decoding else layout).dp > 1 else "tensor parallel",
            "pools": "apart" if apart else "one",
        },
        model=name,
        config=config,
        framework=stack,
        layout=layout,
        precision="bf16",
        quantization=cells.text("quantization"),
        memory="device",
        options=options(cells),
        concurrency=concurrency,
        input_len=isl,
        output_len=osl,
        shortest=shortest,
        version=cells.text("version"),
        serving={name: value for name in STARTED if (value := cells.number(f"serving_{name}")) is not None},
        decoding=decoding,
    )


def clients_of(cells: Cells) -> int:
    """Requests at a time: as the row says, else those of a rank times all ranks that decode."""
    if cells.has("concurrency"):
        return _whole(cells, "concurrency")
    prefix = "decode_" if cells.text("mode") == APART else ""
    workers = _whole(cells, "decode_workers") if prefix else 1
    return _whole(cells, f"{prefix}batch_size") * workers * _whole(cells, f"{prefix}attention_dp")


def decode_workers(cells: Cells) -> DecodeWorkers:
    """How many workers prefill and decode, and the layout of those that decode."""
    layout = layout_of(cells, "decode_")
    prefill, decode = (_whole(cells, f"{pool}_workers") for pool in ("prefill", "decode"))
    return DecodeWorkers(prefill, decode, layout, hardware_of(cells, devices_of(layout)))


def devices_of(layout: PublishedLayout) -> int:
    """GPUs of a replica."""
    return layout.tp * layout.dp * layout.pp


def layout_of(cells: Cells, prefix: str = "") -> PublishedLayout:
    """Degrees of a row: tensor and attention-data ranks, expert ranks among all of them.

    Where tensor and expert ranks of experts are alike, expert ranks were counted once more (64 = 8 x 8 and 4 = 2 x 2
    on 8 and 2 GPUs: those rows take as long as rows of so many GPUs); not in pools of their own (``prefix``). Where no
    attention-data ranks are told, they are as many as ranks of experts are more than tensor ranks. TruthError where the
    degrees of experts do not fill the GPUs.
    """
    named = ("tp", "attention_dp", "pp", "ep", "etp")
    tp, dp, pp, ep, etp = (max(_whole(cells, f"{prefix}{name}"), 1) for name in named)
    if not cells.has(f"{prefix}attention_dp"):
        dp = max(ep * etp // (tp * pp), 1)
    if ep > 1 and ep == etp and not prefix:
        tp, dp = (tp // ep, dp) if tp % ep == 0 else (tp, max(dp // ep, 1))
        etp = 1
    if ep > 1 and ep * etp != tp * dp:
        etp = max(tp * dp // ep, 1)
        if ep * etp != tp * dp:
            raise TruthError(f"{ep} expert ranks do not fill tp x dp = {tp * dp}")
    return PublishedLayout(tp=tp, pp=pp, dp=dp, ep=ep, etp=etp if dp > 1 else 1)


def distinct(rows: Iterable[Row]) -> tuple[list[Row], list[UnsupportedRow]]:
    """Rows without later copies of the same measurement: all that was measured, to the hundredths that some keep."""
    unique: list[Row] = []
    copies: list[UnsupportedRow] = []
    ids: dict[tuple[object, ...], str] = {}
    for row in rows:
        if not isinstance(row, ServingRow):
            unique.append(row)
            continue
        key = (round(row.measured["ttft"], 2), round(row.measured["tpot"], 2), row.tags["system"])
        if key in ids:
            copies.append(UnsupportedRow(row.id, f"a copy of {ids[key]}", row.source))
        else:
            ids[key] = row.id
            unique.append(row)
    return unique, copies


def with_peer(rows: Iterable[Row], path: Path) -> list[Row]:
    """Served runs with what another tool predicted of them, where ``TABLE_peer_predictions.csv`` is beside the table
    (columns ``id``, ``aic_ttft_ms``, ``aic_tpot_ms``)."""
    beside = path.with_name(f"{path.stem}_peer_predictions.csv")
    if not beside.is_file():
        return list(rows)
    with beside.open(newline="", encoding="utf-8-sig") as file:
        by_id = {line["id"]: line for line in csv.DictReader(file)}
    joined = []
    for row in rows:
        line = by_id.get(row.id) if isinstance(row, ServingRow) else None
        if line is not None:
            peer = {name: float(line[f"aic_{name}_ms"]) for name in ("ttft", "tpot")}
            row = replace(row, peer=peer)
        joined.append(row)
    return joined


def _whole(cells: Cells, column: str) -> int:
    """A count that a table may have written as a decimal number; 1 where it is blank."""
    value = cells.number(column)
    return 1 if value is None else round(value)
