"""Words that both pages use: names of workloads, and the terms a reader may look up."""

from __future__ import annotations

WORKLOADS = {
    "train": "Training step",
    "prefill": "Prefill (TTFT)",
    "decode": "Decode step (TPOT)",
    "generate": "Generation",
    "batch": "Iteration of an engine",
}
ENGINES = {
    "measured": "this very shape was measured on this device",
    "learned": "a predictor trained on measurements of other shapes",
    "transfer": "predictors of the nearest measured devices, on this one's figures",
    "analytical": "a formula over FLOPs, bytes and the device's figures",
    "bytes": "no kind covers the operator: its bytes at memory bandwidth",
    "host": "time in which no operator runs",
}
TERMS = {
    "APE": "absolute percentage error: |predicted − measured| / measured.",
    "signed error": "predicted / measured − 1. Above zero the prediction was too long, below zero too short.",
    "interval": "the range that is expected to hold the real value as often as its coverage says (0.9: nine in ten).",
    "TTFT": "time to first token: how long the prompt takes (prefill).",
    "TPOT": "time per output token: one decode step, in which each sequence gains one token.",
    "MFU": "model FLOPs utilisation: the arithmetic that the model defines, over what the device could do meanwhile.",
    "HFU": "hardware FLOPs utilisation: the same for the arithmetic that was executed, recomputation included.",
    "roofline": "the shortest time that peak arithmetic and memory bandwidth allow.",
    "host time": "Python, the framework's dispatch and autograd between operators. A CPU computes in the same thread, "
    "so it adds up; a GPU hides it while the host can launch ahead.",
    "held-out": "shapes that the predictor had not seen when it answered.",
    "call site": "one call in one module; the same call in every layer counts as one, and * stands for the layer.",
}
CLUSTER_TERMS = {
    "micro-batch": "the part of a batch that goes through the pipeline at once.",
    "bubble": "time in which a pipeline stage waits for others.",
    "exposed": "communication during which nothing computes: it makes the step longer.",
}
STEP_TERMS = ("interval", "TTFT", "TPOT", "MFU", "HFU", "host time", "call site")


def workload(name: str) -> str:
    """A workload's name in a heading."""
    return WORKLOADS.get(name, name)


def terms(*names: str) -> tuple[tuple[str, str], ...]:
    """Glossary entries; all when none is named."""
    return tuple((name, (TERMS | CLUSTER_TERMS)[name]) for name in names or TERMS)
