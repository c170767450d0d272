"""How fast PyTorch's square products in fp32 run on devices that nobody gave a table, beside opcast's answers.

    python tests/benchmarks/lanes.py RATES.csv

RATES.csv has the columns device, size and tflops. Such rates are not ours, so none are here: the 36 that the documents
speak of are 30 products by ``torch.mm`` after 6, by the wall clock, as sent in to
https://github.com/zzc0721/torch-performance-test-data (issues have each size; where only ``database.md`` has a device,
its best of five sizes stands for 8,192). ``ISSUED`` and the energy of GA10x (``models/analytical/setting.py``) follow
from the devices that are marked; the others were not looked at for that.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np

from opcast import load_device
from opcast.datasets.devices import Device
from opcast.datasets.vocabulary import OpColumns
from opcast.models.analytical import latency_us
from opcast.models.analytical.setting import shares_slots
from opcast.models.registry import Registry
from opcast.simulator.engines.learned import LearnedEngine
from opcast.simulator.engines.transfer import TransferEngine

SHIPPED = Registry(Path(__file__).resolve().parents[2] / "models" / "shipped")
CHOSEN_BY = ("h20_sxm", "a100_sxm_80gb", "a800_sxm_80gb", "a40", "rtx_3080", "rtx_3090")


def square(size: int) -> dict[str, np.ndarray]:
    """The dims of one square product."""
    return {
        name: np.array([value]) for name, value in {"batch": 1, "m": size, "n": size, "k": size, "layout": 0}.items()
    }


def answered(device: Device, size: int) -> tuple[float, float]:
    """TFLOP/s of a square fp32 product by opcast's engines, and by physics alone."""
    columns, flops = square(size), 2.0 * size**3 / 1e6
    engines = (LearnedEngine(device, [SHIPPED]), TransferEngine(device, [SHIPPED]))
    found = [each.answer("gemm", columns, "fp32", "fp32", "warm").latency_us[0] for each in engines]
    law = latency_us(OpColumns("gemm", columns, "fp32", "fp32"), device)[0]
    known = next((each for each in found if np.isfinite(each)), law)
    return float(flops / known), float(flops / law)


def main() -> None:
    """Answer each, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rates", type=Path)
    rates = parser.parse_args().rates
    print("| device | size | of peak | loads in slots | measured | physics | opcast, % |\n" + "| --- " * 7 + "|")
    missed: dict[bool, list[float]] = {True: [], False: []}
    for row in csv.DictReader(rates.open(encoding="utf-8")):
        device, size, rate = load_device(row["device"]), int(row["size"]), float(row["tflops"])
        known, law = answered(device, size)
        chosen = device.id in CHOSEN_BY
        missed[chosen].append(100.0 * (known / rate - 1.0))
        share, slots = rate / device.tensor_rate("fp32"), "yes" if shares_slots(device) else ""
        mark = " (chosen by)" if chosen else ""
        print(
            f"| {device.id}{mark} | {size} | {share:.2f} | {slots} | {rate} | {law:.1f} | {missed[chosen][-1]:+.0f} |"
        )
    for chosen, errors in missed.items():
        name = "devices that chose" if chosen else "the others"
        print(f"{name}: median error {np.median(np.abs(errors)):.1f} %, median {np.median(errors):+.1f} %")


if __name__ == "__main__":
    main()
