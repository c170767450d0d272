"""The model and the device of steps whose communication shares links: small enough for thousands of events a second."""

from __future__ import annotations

from opcast.datasets.devices import load_device

H100 = load_device("h100_sxm")
TINY = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "vocab_size": 8192,
}
