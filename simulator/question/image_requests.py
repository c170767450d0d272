"""Requests with images: how many, how long each is as tokens, and which GPUs encode them."""

from __future__ import annotations

from dataclasses import dataclass

from ...datasets.loading import check_fields
from .canonical import RequestError
from .declaration import setting


@dataclass(frozen=True)
class VisionTransformer:
    """An image encoder by its sizes: patches of an image, layers, width, width within a layer, heads."""

    patches: int
    layers: int
    hidden: int
    inter: int
    heads: int


ENCODERS = {  # by the configurations of their publishers on Hugging Face
    "clip_vit_l_336": VisionTransformer(577, 24, 1024, 4096, 16),  # openai/clip-vit-large-patch14-336
    "siglip_so400m_384": VisionTransformer(729, 27, 1152, 4304, 16),  # google/siglip-so400m-patch14-384
    "siglip_so400m_896": VisionTransformer(4096, 27, 1152, 4304, 16),  # the same in google/gemma-3-4b-it, 896 pixels
    "internvit_300m_448": VisionTransformer(1025, 24, 1024, 4096, 16),  # OpenGVLab/InternViT-300M-448px
}


@dataclass(frozen=True)
class ImageRequests:
    """Images of requests and their encoder. Without a ``share`` nothing is read of the rest."""

    share: float = setting(0.0, "of the requests that have images", most=1)
    count: int = setting(1, "images of such a request", least=1)
    tokens: int = setting(576, "of the prompt that an image becomes, beside its text", least=1)
    encoder: str = setting(
        "clip_vit_l_336", f"{' | '.join(ENCODERS)}: how long an image takes on the device", choices=tuple(ENCODERS)
    )
    encode_ms: float | None = setting(None, "of one image; null: as the encoder takes, which needs a model")
    gpus: int = setting(0, "that only encode, for all replicas together; 0: the GPUs that prefill do it")
    embedding_bytes: float | None = setting(None, "of a token of an image; null: as wide as the model, in 16 bits")
    gbps: float = setting(50.0, "GB/s from a GPU that encodes to one that prefills: a NIC of 400 Gbit/s", positive=True)
    us: float = setting(20.0, "until the first byte comes")

    def __post_init__(self) -> None:
        check_fields(self, RequestError, "images")

    @property
    def exist(self) -> bool:
        """Whether any request has images."""
        return bool(self.share)

    @property
    def most_tokens(self) -> int:
        """Tokens that images add to a prompt at most."""
        return self.count * self.tokens if self.exist else 0
