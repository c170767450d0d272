"""Colours of both themes, and which kind of op wears which.

Pages and figures name a colour (``var(--blue)``); the value is chosen by theme when the page is drawn. Hues have one
lightness per theme (OKLCH 0.56 in light, 0.74 in dark), so that all read equally well on the page and their labels
read on them; a kind's backward pass wears the stronger shade of its hue.
"""

from __future__ import annotations

from ...datasets.ops import KINDS

# name -> (light theme, dark theme)
SURFACES = {
    "page": ("#f6f7f9", "#0f1216"),
    "surface": ("#ffffff", "#171b21"),
    "raised": ("#ffffff", "#222831"),
    "line": ("#dfe3e8", "#2d343e"),
    "grid": ("#e8ebef", "#272d36"),
    "text": ("#1b2129", "#e7ebf0"),
    "muted": ("#5a6572", "#9aa6b4"),
    "on-fill": ("#ffffff", "#0f1216"),
    "accent": ("#2a62b5", "#7fb2ff"),
    "good": ("#1d7a3f", "#6fce8c"),
    "fair": ("#8a5a00", "#e5b04d"),
    "poor": ("#b3332c", "#ff8d82"),
    "band-near": ("rgba(45,137,73,0.16)", "rgba(113,192,131,0.17)"),
    "band-far": ("rgba(45,137,73,0.08)", "rgba(113,192,131,0.09)"),
    "bar": ("rgba(42,98,181,0.16)", "rgba(127,178,255,0.20)"),
    "bar-measured": ("rgba(90,101,114,0.18)", "rgba(154,166,180,0.22)"),
    "phase": ("#c9d3df", "#3d4753"),
    "phase-strong": ("#b3c1d1", "#4b5766"),
}
HUES = {
    "blue": ("#3475c4", "#72aef9"),
    "blue-strong": ("#21538f", "#b3d4ff"),
    "cyan": ("#008399", "#61b9ce"),
    "cyan-strong": ("#005d6e", "#acdae6"),
    "teal": ("#098777", "#64bead"),
    "teal-strong": ("#006154", "#aedcd2"),
    "green": ("#2d8949", "#71c083"),
    "green-strong": ("#1c6232", "#b3debb"),
    "lime": ("#688011", "#9eb75f"),
    "lime-strong": ("#495b05", "#c9d8a9"),
    "yellow": ("#8e7100", "#c3a955"),
    "yellow-strong": ("#665000", "#dfd0a5"),
    "orange": ("#ae5c00", "#e49652"),
    "orange-strong": ("#7e4000", "#f4c7a3"),
    "red": ("#c44039", "#fd8175"),
    "red-strong": ("#8f2a26", "#ffbcb3"),
    "pink": ("#b84379", "#f082af"),
    "pink-strong": ("#852d56", "#fcbcd4"),
    "purple": ("#9154b9", "#c78fee"),
    "purple-strong": ("#683a86", "#e1c3f9"),
    "indigo": ("#6565cf", "#9a9fff"),
    "indigo-strong": ("#474697", "#c6ccff"),
    "brown": ("#95694c", "#cba185"),
    "brown-strong": ("#6b4a34", "#e4ccbc"),
    "grey": ("#6d7580", "#a3acb6"),
    "grey-strong": ("#4d535b", "#cdd1d8"),
}
PALETTE = SURFACES | HUES

# By purpose, so that kinds that stand in for one another in a model (rms_norm and layer_norm) share a colour.
HUE_OF_PURPOSE = {
    "product": "blue",
    "experts": "blue-strong",
    "attention": "orange",
    "decode": "yellow",
    "scan": "lime-strong",
    "convolution": "cyan-strong",
    "norm": "green",
    "softmax": "teal",
    "loss": "cyan",
    "activation": "pink",
    "pointwise": "purple",
    "reduction": "purple-strong",
    "rotary": "brown",
    "rounding": "brown-strong",
    "gather": "lime",
    "moe": "yellow-strong",
    "optimizer": "red",
    "copy": "grey-strong",
    "host": "grey",
}
UNMAPPED = "red-strong"
HUE_OF_ENGINE = {
    "measured": "green",
    "learned": "blue",
    "transfer": "cyan",
    "analytical": "purple",
    "bytes": UNMAPPED,
    "host": "grey",
}
HUES_OF_LABS = ("green", "blue", "cyan", "purple", "orange", "yellow", "pink", "grey")


def css(name: str) -> str:
    """How pages and figures refer to a colour."""
    return f"var(--{name})"


def of_kind(kind: str) -> str:
    """The colour of a kind of op, of ``host``, or of an operator that no kind covers."""
    if kind not in KINDS:
        return css("grey" if kind == "host" else UNMAPPED)
    if KINDS[kind].collective:
        return css("indigo" if kind.startswith("all_") else "indigo-strong")
    hue = HUE_OF_PURPOSE.get(KINDS[kind].purpose) or HUE_OF_PURPOSE.get(KINDS[kind].family, UNMAPPED)
    return css(f"{hue}-strong" if KINDS[kind].backward and not hue.endswith("-strong") else hue)


def of_error(error_percent: float) -> str:
    """``good`` within 10 %, ``fair`` within 25 %, else ``poor``; empty for what has no error."""
    if error_percent != error_percent:
        return ""
    size = abs(error_percent)
    return "good" if size <= 10.0 else "fair" if size <= 25.0 else "poor"
