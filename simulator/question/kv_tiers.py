"""Where keys and values of old requests are kept beside the GPU: host memory, SSD, a store that all replicas share."""

from __future__ import annotations

from dataclasses import dataclass

from ...datasets.loading import check_fields
from .canonical import RequestError
from .declaration import setting
from .unread import changed, refuse_unread

LOADS = ("async", "layers", "blocking")
SSD_GBPS = 6.9  # sequential read of one PCIe 4.0 x4 drive: Samsung PM9A3, data sheet (6,900 MB/s)
PCIE_SHARE = 0.8  # of the nominal rate of PCIe that large copies reach: 25 of 32 GB/s on PCIe 4.0 x16, as for swapping
OF_TIER = {  # the size of a tier -> what is read where there is that tier
    "host_gib": ("host_gbps", "load"),
    "ssd_gib": ("ssd_gbps",),
    "remote_gib": ("remote_gbps", "remote_us"),
}


@dataclass(frozen=True)
class KvTiers:
    """Tiers of the prefix cache below the GPU. Each size is in GiB, 0: there is none."""

    host_gib: float = setting(0.0, "of host memory, of a replica's GPUs together (vllm: kv-offloading-size)")
    host_gbps: float | None = setting(
        None, "GB/s between a GPU and host memory; null: 80 % of the device's PCIe, 25 without a device", positive=True
    )
    ssd_gib: float = setting(0.0, "of drives of a replica")
    ssd_gbps: float = setting(SSD_GBPS, "GB/s that they read, together", positive=True)
    remote_gib: float = setting(0.0, "of a store that all replicas share")
    remote_gbps: float = setting(50.0, "GB/s between it and a replica", positive=True)
    remote_us: float = setting(20.0, "until the first byte comes")
    load: str | None = setting(
        None,
        "async (others run meanwhile: vllm) | layers (beside the prompt, layer by layer: sglang) | blocking; null: as "
        "the engine has it",
        choices=LOADS,
    )

    def __post_init__(self) -> None:
        check_fields(self, RequestError, "tiers")
        for tier, names in OF_TIER.items():
            if not getattr(self, tier):
                refuse_unread(changed(self, names, "tiers."), f"without tiers.{tier}")
        if self.exist and not self.host_gib:
            raise RequestError(
                "tiers.ssd_gib and tiers.remote_gib need tiers.host_gib: all that is loaded goes through host memory"
            )

    @property
    def exist(self) -> bool:
        """Whether there is any tier."""
        return bool(self.host_gib or self.ssd_gib or self.remote_gib)
