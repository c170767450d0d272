"""The scores of ``tests/evidence/calibration_scores.json`` as they stand in the documents, and as a picture.

``--write`` puts them there.

Run after ``opcast calibrate`` has written new ones. A test holds that the documents say what the file says.

    python tests/benchmarks/scores.py [--write]
"""

from __future__ import annotations

import html
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FRONT, RESULTS = ROOT / "README.md", ROOT / "docs" / "results.md"
SERVED = ROOT / "tests" / "evidence" / "serving_host_scores.json"
PICTURE = ROOT / "docs" / "errors.svg"
WIDTH, LEFT, RIGHT, TOP, LINE = 800, 335, 105, 64, 18  # px
MOST = 60.0  # percent: what is beyond ends at the edge
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#24292f}.small{font-size:11px;fill:#57606a}"
    ".head{font-weight:600;font-size:14px}.end{text-anchor:end}.mid{text-anchor:middle}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#9198a1}[fill='#fff']{fill:#0d1117}"
    "[stroke='#24292f']{stroke:#e6edf3}[stroke='#d8dee4']{stroke:#3d444d}[stroke='#3f51b5']{stroke:#8c9eff}}"
)
NAMES = {  # a table, or what is over all of them -> its name on the page of results and in the picture
    "train_llm_foundry_mpt": "llm-foundry, A100 and H100",
    "train_megatron_bridge": "Megatron-Bridge, H100 to GB300",
    "train_simumax_b200": "SimuMax's B200 table",
    "train_megatron_sc21": "Megatron-LM and DeepSpeed, SC'21",
    "train_korthikanti22": "Megatron-LM, MLSys'23",
    "train_mlperf": "MLPerf",
    "train_torchtitan": "torchtitan, H100 at 500 W and H200",
    "train_torchtitan_quant": "torchtitan, B200",
    "train_vtrain_a100": "vTrain's A100 table",
    "train_nanotron_h100": "nanotron, deliberately bad layouts too",
    "train_llama3_paper": "Llama 3's paper",
    "train_nemo_automodel": "NeMo AutoModel",
    "infer_trtllm_static_v05_v071": "TensorRT-LLM 0.5 and 0.7, static batches",
    "infer_fastertransformer_gpt": "FasterTransformer GPT",
    "infer_fastertransformer_bert": "FasterTransformer's encoders",
    "infer_koyeb_a100": "vLLM on A100 (Koyeb)",
    "infer_imec_llama2": "Static batches of Llama-2 (NeMo)",
    "neusight_e2e_labels": "NeuSight's whole models, fp32",
    "all": "all runs together",
    "tables": "mean of the tables",
    "unseen": "mean of the unseen half",
    "looked_at": "mean of the other half",
}
ROWS = {  # how a row of the front page begins -> the table it is of
    "llm-foundry, A100 and H100": "train_llm_foundry_mpt",
    "vTrain's A100 table": "train_vtrain_a100",
    "Megatron-Bridge, H100 to GB300": "train_megatron_bridge",
    "SimuMax's B200 steps": "train_simumax_b200",
    "Llama 3's paper": "train_llama3_paper",
    "TensorRT-LLM 0.5 and 0.7": "infer_trtllm_static_v05_v071",
    "NeuSight's whole models, fp32": "neusight_e2e_labels",
    "all ": "all",
    "mean of the tables": "tables",
}
ROW = re.compile(r"^\| (?P<name>[^|]+) \| \d+ \|")
ERRORS = {  # a column of the documents -> the way of answering whose errors it shows
    "table left out": "table",
    "framework left out": "framework",
    "framework not seen": "framework",
    "chip left out": "chip",
    "half left out": "halves",
    "layout not seen": "halves",
    "fitted": "fitted",
    "physics": "physics",
    "roofline": "roofline",
    "constant share": "constant_share",
}
INSIDE = "inside"  # the column of the share of runs within the 90 % interval, with their framework left out

UNSEEN = "unseen"
LEDGER = ROOT / "tests" / "evidence" / "ledger"
NUMBER = re.compile(r"\b\d[\d,.]*\b")
LEFT_OUT = {"half": "halves", "table": "table", "framework": "framework", "chip": "chip"}
QUANTITIES = {"TPOT": "tpot", "TTFT": "ttft", "throughput": "throughput"}
GROUPS = {  # served runs -> their name
    "all": "all",
    "unseen": "the unseen half",
    "looked_at": "the other half",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "trtllm": "TensorRT-LLM",
    "h100_sxm": "H100",
    "h200_sxm": "H200",
    "b200_sxm": "B200",
    "b300_sxm": "B300",
}


def table_of(name: str) -> str | None:
    """The table that a row is of, None for rows of other scores."""
    return next((table for start, table in ROWS.items() if name.startswith(start)), None)


def rewritten(text: str, scores: dict[str, dict[str, dict[str, float]]]) -> str:
    """A document with the scores of the file in its marked parts, and in the rows of the front page."""
    lines = text.splitlines()
    for at, heads, _, table in score_rows(text):
        lines[at] = f"| {' | '.join(_cells(lines[at], heads, scores[table]))} |"
    made = "\n".join(lines) + "\n"
    parts = {"headline": headline, "scores": scored, "coverage": covered}
    for name, part in (*parts.items(), ("refused", lambda _: refused()), ("served", lambda _: served())):
        if f"<!-- {name} -->" in made:
            marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
            said = part(scores)
            made = marked.sub(lambda found, said=said: f"{found[1]}{said}\n{found[2]}", made)
    return made


def headline(scores: dict[str, dict[str, dict[str, float]]]) -> str:
    """What the front page says of the half of the sources that nobody looks into."""
    of = scores[UNSEEN]["framework"]
    tables = sum(name.startswith(f"{UNSEEN} ") for name in scores)
    return (
        f"In the mean of {tables} tables half of the runs are within {of['median']:.1f} %, nine of ten within "
        f"{of['p90']:.1f} %, and {100 * of['coverage']:.0f} % are inside their 90 % interval."
    )


def refused() -> str:
    """How many rows of each table have no answer, and why, by the newest release in the ledger."""
    import pyarrow.parquet as pq

    lines = ["| table | rows answered | refused | why |", "| --- | --- | --- | --- |"]
    releases = sorted(LEDGER.glob("*.parquet"))
    rows = pq.read_table(releases[-1]).to_pylist() if releases else []
    for table in dict.fromkeys(row["table"] for row in rows):
        answered = {row["id"] for row in rows if row["table"] == table and row["predicted"] is not None}
        why = Counter(NUMBER.sub("N", row["why"]) for row in rows if row["table"] == table and row["why"])
        reasons = "; ".join(f"{count} × {text.replace('|', '/')}" for text, count in why.most_common(3))
        rest = len(why) - 3
        lines.append(
            f"| {table} | {len(answered)} | {why.total()} | {reasons}{f'; {rest} other reasons' if rest > 0 else ''} |"
        )
    return "\n".join(lines)


def scored(scores: dict[str, dict[str, dict[str, float]]]) -> str:
    """Every table's errors under every way of answering."""
    heads = ["table left out", "framework left out", "chip left out", "half left out"]
    heads += ["fitted", "physics", "roofline", "constant share"]
    lines = [f"| runs | rows | {' | '.join(heads)} |", "|" + " --- |" * (len(heads) + 2)]
    for table, name in NAMES.items():
        cells = _cells(f"| {name} | | {' | '.join('' for _ in heads)} |", ["runs", "rows", *heads], scores[table])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def served() -> str:
    """Errors of served runs whose group was left out, and how many of these runs their intervals hold."""
    scores = json.loads(SERVED.read_text())
    lines = [f"| runs | rows | {' | '.join(f'{name} | inside' for name in QUANTITIES)} |", "|" + " --- |" * 8]
    for group, name in GROUPS.items():
        of = [scores[group]["groups"][quantity] for quantity in QUANTITIES.values()]
        cells = " | ".join(f"{e['median']:.1f} / {e['p90']:.1f} | {100 * e['coverage']:.0f} %" for e in of)
        lines.append(f"| {name} | {of[0]['rows']} | {cells} |")
    return "\n".join(lines)


def score_rows(text: str) -> Iterator[tuple[int, list[str], str, str]]:
    """Rows of a document that show scores: their line, the heads of their columns, their name and their table."""
    heads: list[str] = []
    for at, line in enumerate(text.splitlines()):
        cells = [cell.strip() for cell in line.strip("| ").split("|")] if line.startswith("|") else []
        if not cells:
            heads = []
        elif cells[1:2] == ["rows"]:
            heads = cells if ERRORS.keys() & set(cells) else []
        elif heads and (match := ROW.match(line)) and (table := table_of(match["name"])):
            yield at, heads, match["name"], table


def _cells(line: str, heads: list[str], scores: dict[str, dict[str, float]]) -> list[str]:
    cells = [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")]
    for at, head in enumerate(heads):
        if head == "rows":
            cells[at] = f"{scores['fitted']['rows']:.0f}"
        elif head == INSIDE:
            cells[at] = f"{100 * scores['framework']['coverage']:.0f} %"
        elif how := ERRORS.get(head):
            cells[at] = " / ".join(f"{scores[how][what]:.1f}" for what in ("median", "mean", "p90"))
    return cells


def covered(scores: dict[str, dict[str, dict[str, float]]]) -> str:
    """How intervals did on every table."""
    lines = [f"| runs | {' | '.join(f'{name} left out' for name in LEFT_OUT)} |", "|" + " --- |" * (len(LEFT_OUT) + 1)]
    for table, name in NAMES.items():
        of = [scores[table][how] for how in LEFT_OUT.values()]
        cells = " | ".join(
            f"{100 * each['coverage']:.0f} %, {each['width']:.2f}, {each['interval_score']:.2f}" for each in of
        )
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


def drawn(scores: dict[str, dict[str, dict[str, float]]]) -> str:
    """The errors with the framework left out as SVG: bars to the median, lines to the 90th percentile, best first.

    Of each table the runs count whose source is in the half that nobody looks into.
    What is beside each bar is the median by physics alone.
    """
    names = {f"{UNSEEN} {table}": name for table, name in NAMES.items()} | {UNSEEN: "mean of these tables"}
    order = sorted(
        (each for each in names if each in scores and each != UNSEEN),
        key=lambda each: scores[each]["framework"]["median"],
    )
    height = TOP + LINE * (len(order) + 1) + 42
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img"><style>{STYLE}</style>',
        f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#fff"/>',
        _text(16, 24, "Errors of predicted step times, in percent, when no run of the framework was known", "head"),
        _text(16, TOP - 12, "published runs", "small"),
        _text(WIDTH - 16, TOP - 12, "median / p90", "small end"),
    ]
    for mark in range(0, int(MOST), 10):
        parts.append(f'<path d="M{_x(mark):.1f} {TOP - 6}V{height - 36}" stroke="#d8dee4"/>')
        parts.append(_text(_x(mark), TOP - 12, f"{mark} %", "small mid"))
    for at, table in enumerate([UNSEEN, *order]):
        of, y, physics = scores[table]["framework"], TOP + LINE * at + LINE / 2, scores[table]["physics"]["median"]
        hue = "#24292f" if table == UNSEEN else "#3f51b5"
        parts += [
            _text(16, y + 4, f"{names[table]} ({of['rows']:.0f})"),
            f'<path d="M{_x(0):.1f} {y}H{_x(of["p90"]):.1f}" stroke="{hue}" stroke-width="1.5" opacity=".55"/>',
            f'<path d="M{_x(0):.1f} {y}H{_x(of["median"]):.1f}" stroke="{hue}" stroke-width="9"/>',
            f'<circle cx="{_x(physics):.1f}" cy="{y}" r="3.5" fill="#fff" stroke="#d9660a"/>',
            _text(WIDTH - 16, y + 4, f"{of['median']:.1f} / {of['p90']:.1f}", "end"),
        ]
    legend = "bar: half of the runs are within, line: nine of ten, ring: the median by physics alone. In brackets: runs"
    return "\n".join([*parts, _text(16, height - 14, legend, "small"), "</svg>", ""])


def _x(percent: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * min(percent, MOST) / MOST


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{html.escape(text)}</text>'


def main() -> int:
    """Show which documents differ from the scores, or write them."""
    scores = json.loads((ROOT / "tests" / "evidence" / "calibration_scores.json").read_text())
    different = 0
    for path in (FRONT, RESULTS):
        text = path.read_text()
        new = rewritten(text, scores)
        different += new != text
        print(f"{path.name}: {'as in the file' if new == text else 'differs'}")
        if "--write" in sys.argv[1:]:
            path.write_text(new)
    picture = drawn(scores)
    different += not PICTURE.exists() or PICTURE.read_text() != picture
    if "--write" in sys.argv[1:]:
        PICTURE.write_text(picture)
    return 0 if "--write" in sys.argv[1:] else different


if __name__ == "__main__":
    sys.exit(main())
