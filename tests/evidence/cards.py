"""The cards of a folder of predictors as one page: what each was learned from, and how far it was off.

``python tests/evidence/cards.py FOLDER`` writes ``FOLDER/README.md``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from opcast.models.registry import Entry, Registry

PAGE = "README.md"
HEAD = """# Predictors that come with opcast

One folder a predictor: `<device>/<kind>@<backend>/<version>/` with `model.npz` (plain arrays, no pickle) and
`card.json` (device figures, range of sizes, source and licence of the data, evaluation, interval, date, hash).
`current` names the version in use. A backend is `<framework>-<version>:<kernel>`; of each framework, the newest version
that has the kind is here, and kernels for wide expert parallelism that only an older one has. `default` says which
framework answers when none is named, `kinship.json` how far answers for other devices were off; `power/` holds models
of watts. `opcast list predictors` lists them; a predictor of yours for the same device goes first.

Learned from {sources} ({licences}). Nothing of those tables is in here but what trees keep of them. To make them again:

```bash
pip install 'opcast[data]'
opcast import source=aiconfigurator store=tables
opcast train device=h100_sxm store=tables predictors=mine tracking=null
```

Those of PyTorch's own kernels are from NeuSight's tables and Vidur's (`opcast import source=neusight path=…`), with
`predictor.candidates=[calibrated,lightgbm]`: trees go on as they end where a device is asked about larger sizes.

Those of aiter are of tuned kernels (ROCm/aiter's configurations: the best of all that were tried, arguments taking
turns in memory, so that they stand for a warm and a cold cache; 304 units are MI300X or MI325X, 256 MI355X or MI350X)
and of its attention kernels in assembly (op_tests/cpp/mha/README.md; backward passes with the atomics that training
takes: in fp32 on MI300X, where those in 16 bits overflow, in 16 bits on MI355X),
those of LLMServingSim of layers on RTX cards and on TPU v6e (without `o_proj`, whose weights stayed on the chip between
calls; `predictor.eager=true` for decode attention, whose shortest calls look like a host's), those of InferSim of
DeepGEMM, FlashInfer and FlashAttention 3 on H20 and H800. Tables of these with opcast's names for columns need no
mapping (`opcast import source=csv path=…`).

Errors are of rows held out whole (`split` in the card says which), in percent of the measured time; coverage is of 90 %
intervals. Roofline is the median error of the roofline alone.
"""
COLUMNS = "| kind | backend | formats | rows | median | mean | p90 | coverage | roofline |\n" + "| --- " * 9 + "|\n"


def page(entries: Iterable[Entry]) -> str:
    """Markdown of the current predictors, a table a device."""
    current = [entry for entry in entries if entry.current]
    cards = [(entry, entry.card) for entry in current]
    parts = [HEAD.format(sources=_listed(cards, "source"), licences=_listed(cards, "license"))]
    for device in sorted({entry.device_id for entry in current}):
        rows = [_row(entry, card) for entry, card in cards if entry.device_id == device]
        parts.append(f"\n## {device}\n\n{COLUMNS}" + "".join(rows))
    return "".join(parts)


def _row(entry: Entry, card: Mapping[str, Any]) -> str:
    errors = [f"{card[f'test_{name}_ape']:.1f}" for name in ("median", "mean", "p90")]
    roofline = f"{card['roofline_median_ape']:.0f}" if "roofline_median_ape" in card else ""
    coverage = f"{card['coverage']:.0%}" if "coverage" in card else ""
    formats = " ".join(card["dtypes"])
    cells = (entry.kind, f"`{entry.backend}`", formats, f"{card['n']:,}", *errors, coverage, roofline)
    return "| " + " | ".join(cells) + " |\n"


def _listed(cards: Iterable[tuple[Entry, Mapping[str, Any]]], name: str) -> str:
    listed = {source for _, card in cards for source in card.get("sources", {}).get(name, ())}
    return ", ".join(sorted(listed)) or "unknown"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / PAGE).write_text(page(Registry(folder).list()), "utf-8")
