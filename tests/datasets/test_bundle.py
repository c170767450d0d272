"""Bundles: what goes in comes out, without names; what is damaged is refused; sites are told apart in training."""

from __future__ import annotations

import json
import tarfile
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from opcast.datasets.bundle import BundleError, pack, read
from opcast.datasets.device_names import figures_of_file
from opcast.datasets.devices import Device, load_device
from opcast.datasets.ops import make_op
from opcast.datasets.schema import Measurement
from opcast.datasets.sources.importing import import_into
from opcast.datasets.sources.tables import SourceError
from opcast.datasets.store import Store
from opcast.jobs.cli import main
from opcast.models.sites import compared, for_any_site, without_effects
from opcast.models.table import tables
from opcast.models.training import fit


def store_of(path: Path, factor: float = 1.0, seed: int = 0) -> Store:
    store, random = Store(path), np.random.default_rng(seed)
    rows = []
    for i in range(60):
        size = {"rows": 2 ** (4 + i % 10), "cols": 128 * (1 + i // 10)}
        op = make_op("gelu", **size, dtype="bf16")
        latency = (3.0 + size["rows"] * size["cols"] * 2e-6) * factor * float(np.exp(0.01 * random.standard_normal()))
        told = {"device_id": "h100_sxm", "backend": "torch", "node": "node-secret01", "source_ref": "/home/me/runs"}
        at = datetime.now(UTC)
        rows.append(Measurement(op=op, status="ok", run_id="full-1", measured_at=at, latency_us=latency, **told))
    failed = {"device_id": "h100_sxm", "backend": "torch", "error": "died on host node17.example.org"}
    op = make_op("gelu", rows=1, cols=1, dtype="bf16")
    rows.append(Measurement(op=op, status="error", run_id="full-1", measured_at=datetime.now(UTC), **failed))
    store.write(rows, "full-1")
    return store


def test_a_device_that_nobody_else_has_comes_with_its_rows(tmp_path: Path) -> None:
    own = Device.from_dict({**load_device("h100_sxm").to_dict(), "id": "rare_9000", "name": "Rare 9000", "sources": {}})
    store = Store(tmp_path / "a")
    store.save_device(own)
    op = make_op("gelu", rows=64, cols=64, dtype="bf16")
    told = {"device_id": own.id, "backend": "torch", "run_id": "full-1", "latency_us": 3.0, "status": "ok"}
    store.write([Measurement(op=op, measured_at=datetime.now(UTC), **told)], "full-1")
    pack(store, tmp_path / "rare.tar.gz", "lab-one", "CC-BY-4.0")
    other = Store(tmp_path / "b")
    assert import_into(other, "bundle", tmp_path / "rare.tar.gz").rows_written == 1
    assert other.known_device("rare_9000").memory_gbps == own.memory_gbps


def test_reports_and_logs_travel_beside_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store_of(tmp_path / "a")
    path, note = tmp_path / "gpu.tar.gz", tmp_path / "machine.txt"
    note.write_text("one H100\n")
    words = [f"store={tmp_path / 'a'}", f"output={path}", "site=lab-one", "license=CC-BY-4.0"]
    assert main(["data", "bundle", *words, f"attach=[{note}]"]) == 0
    manifest, members = read(path)
    assert members["attached/machine.txt"] == b"one H100\n"
    assert set(manifest.files["attached/machine.txt"]) == {"sha256"}
    assert import_into(Store(tmp_path / "b"), "bundle", path).rows_written == 60
    for attached, says in (
        (f"[{tmp_path}/none.txt]", "none.txt cannot be read"),
        (f"[{note},{note}]", "two files"),
        ("x", "list"),
    ):
        assert main(["data", "bundle", *words, f"attach={attached}"]) == 2
        assert says in capsys.readouterr().err


def test_rows_come_back_without_what_tells_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store_of(tmp_path / "a")
    path = tmp_path / "gpu.tar.gz"
    words = [f"store={tmp_path / 'a'}", f"output={path}", "site=lab-one", "license=CC-BY-4.0", "format=json"]
    assert main(["data", "bundle", *words]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 61
    with tarfile.open(path) as bundle:
        content = b"".join(bundle.extractfile(each).read() for each in bundle)  # type: ignore[union-attr]
    assert not [word for word in (b"secret01", b"/home/me", b"node17") if word in content]
    other = Store(tmp_path / "b")
    assert import_into(other, "bundle", path).rows_written == 60
    assert import_into(other, "bundle", path).skipped == 60
    made = other.read("gelu")
    assert set(made["source"].to_pylist()) == {"site:lab-one"}
    assert set(made["license"].to_pylist()) == {"CC-BY-4.0"}
    assert set(made["node"].to_pylist()).isdisjoint({"node-secret01"})
    one = Store(tmp_path / "a").read("gelu").sort_by([("rows", "ascending"), ("cols", "ascending")])
    two = made.sort_by([("rows", "ascending"), ("cols", "ascending")])
    assert one["latency_us"].to_pylist() == two["latency_us"].to_pylist()
    with pytest.raises(BundleError, match="no measurements of its own"):
        pack(other, path, "lab-two", "MIT")


def test_a_damaged_bundle_is_refused_whole(tmp_path: Path) -> None:
    path = tmp_path / "gpu.tar.gz"
    pack(store_of(tmp_path / "a"), path, "lab", "MIT")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BundleError, match="no bundle"):
        read(path)
    path.write_bytes(whole)
    with tarfile.open(path) as bundle, tarfile.open(tmp_path / "forged.tar.gz", "w:gz") as forged:
        for member in bundle:
            content = bundle.extractfile(member).read()  # type: ignore[union-attr]
            if member.name.startswith("rows/"):
                content = content[:-20] + bytes(20)
            (tmp_path / "member").write_bytes(content)
            forged.add(tmp_path / "member", member.name)
    with pytest.raises(SourceError, match="is damaged: get the bundle again"):
        import_into(Store(tmp_path / "b"), "bundle", tmp_path / "forged.tar.gz")
    with pytest.raises(BundleError, match="site="):
        pack(Store(tmp_path / "a"), path, "My Lab!", "MIT")


def test_two_sites_are_learned_as_one_in_the_middle_with_their_spread_in_the_interval(tmp_path: Path) -> None:
    assert figures_of_file("h100_sxm")
    merged = Store(tmp_path / "all")
    for site, factor in (("lab-a", 0.95), ("lab-b", 1.05), ("lab-c", 1.0)):
        path = tmp_path / f"{site}.tar.gz"
        pack(store_of(tmp_path / site, factor, seed=len(site) + int(factor * 100)), path, site, "MIT")
        import_into(merged, "bundle", path)
    (table,) = tables("gelu", merged.read("gelu"), load_device("h100_sxm"))
    sites = compared(table)
    assert sites is not None
    assert sites.shared == 60
    assert sites.effects["site:lab-b"] - sites.effects["site:lab-a"] == pytest.approx(np.log(1.05 / 0.95), abs=0.01)
    assert sites.spread == pytest.approx(0.05, abs=0.01)
    middle = without_effects(table, sites)
    assert compared(middle).spread < 0.01  # type: ignore[union-attr]
    outcome = fit(table)
    assert outcome.result["sites"]["spread"] == sites.spread
    found = outcome.predictor.predict_frame(table.frame())
    inside = (found.low_us <= table.latency_us) & (table.latency_us <= found.high_us)
    assert inside.mean() > 0.9
    plain = fit(middle).predictor.intervals
    assert (outcome.predictor.intervals.half_width > plain.half_width + 0.02).all()
    assert (for_any_site(plain, sites).half_width > plain.half_width).all()
