"""Attention and feed-forward layers of a pool that decodes on GPUs of their own."""

from __future__ import annotations

from dataclasses import dataclass

from ...datasets.loading import check_fields
from .canonical import RequestError
from .declaration import setting


@dataclass(frozen=True)
class FfnApart:
    """Feed-forward layers and experts of the pool that decodes on ``ffn_gpus`` of their own, which all of its replicas
    share. Without them nothing is read of the rest."""

    ffn_gpus: int = setting(0, "that only have feed-forward layers or experts, for all that decode; 0: none apart")
    micro_batches: int = setting(
        3, "of an iteration, of which one is with attention while another is with experts", least=1
    )
    gbps: float = setting(50.0, "GB/s of a GPU between the two: a NIC of 400 Gbit/s", positive=True)
    us: float = setting(10.0, "of every transfer until its first byte comes, once for each layer and way")
    token_bytes: float | None = setting(
        None, "of a token's row as it moves; null: as wide as the model, in 16 bits; 0 without a model"
    )
    copies: int | None = setting(
        None, "of a row that go out: experts of a token; null: as the model has them, else 1", least=1
    )
    layers: int | None = setting(None, "of the model; null: as it has them, 1 without a model", least=1)
    ffn_us: float | None = setting(
        None, "of feed-forward layers of an iteration by hand, beside ffn_token_us; null: as their kernels take"
    )
    ffn_token_us: float | None = setting(None, "and of each token of a micro-batch, on one GPU; more share them out")

    def __post_init__(self) -> None:
        check_fields(self, RequestError, "afd")
        if (self.ffn_us is None) != (self.ffn_token_us is None):
            raise RequestError("afd.ffn_us and afd.ffn_token_us stand in place of kernels together: give both")

    @property
    def exist(self) -> bool:
        """Whether any GPU has feed-forward layers alone."""
        return bool(self.ffn_gpus)
