"""``opcast new``: files of devices and clusters of one's own, which every verb then takes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import opcast
from opcast.datasets.clusters import cluster_of_file, known_clusters, load_cluster
from opcast.datasets.devices import device_of_file, known_devices, load_device
from opcast.datasets.installing import install_command
from opcast.jobs.cli import main
from opcast.jobs.new import own_figures


@pytest.mark.parametrize("like", known_devices())
def test_every_device_can_be_begun_with(like: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(own_figures("device", "mine", like))
    made, known = device_of_file(file).to_dict(), load_device(like).to_dict()
    assert made["id"] == made["name"] == "mine"
    for name in set(known) - {"id", "name", "sources"}:
        assert made[name] == known[name], name


@pytest.mark.parametrize("like", known_clusters())
def test_every_cluster_can_be_begun_with(like: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(own_figures("cluster", "mine", like))
    made, known = cluster_of_file(file).to_dict(), load_cluster(like).to_dict()
    assert {name for name in known if made[name] != known[name]} <= {"id", "name", "sources"}


def test_a_new_device_and_cluster_are_taken_by_verbs_and_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "device", "my_gpu", "like=h100"]) == 0
    assert "edit my_gpu.yaml" in capsys.readouterr().err
    assert main(["new", "cluster", "my_cluster", "like=dgx_h100", "to=own.yaml", "format=json"]) == 0
    assert json.loads(capsys.readouterr().out)["file"] == "own.yaml"
    text = Path("my_gpu.yaml").read_text()
    Path("my_gpu.yaml").write_text(text.replace("memory_gbps: 3352", "memory_gbps: 6704"))
    home, ask = f"home={tmp_path}", ["predict", "op=elementwise", "op.numel=100000000", "format=json"]
    answers = []
    for device in ("h100_sxm", "my_gpu.yaml"):
        assert main([*ask, f"device={device}", "engine.order=[analytical]", home]) == 0
        answers.append(json.loads(capsys.readouterr().out)["latency_us"])
    assert answers[1] < 0.7 * answers[0]
    here = opcast.predict(
        "elementwise", "my_gpu.yaml", numel=100_000_000, dtype="bf16", engines=["analytical"], home=str(tmp_path)
    )
    assert here.latency_us == pytest.approx(answers[1])
    collective = ["predict", "op=all_reduce", "op.size_bytes=1GiB", "op.ranks=8", "cluster=own.yaml", home]
    assert main([*collective, "device=my_gpu.yaml"]) == 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], "say what is new"),
        (["gpu", "x"], "say what is new"),
        (["device"], "needs a name"),
        (["device", "../x"], "needs a name"),
        (["device", "h100_sxm", "like=h100_sxm"], "ships with opcast"),
        (["device", "h100", "like=h100_sxm"], "h100 ships with opcast"),
        (["device", "mine"], "say which device it is like"),
        (["device", "mine", "like=h101_sxm"], "unknown device 'h101_sxm'"),
        (["cluster", "mine", "like=dgx_h100", "to=/no/such/place.yaml"], "there is no folder"),
        (["cluster", "mine", "like=dgx_h100", "to={a: 1}"], "must be a path"),
    ],
)
def test_what_cannot_be_begun(given: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", *given]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("name", ["on", "off", "007"])
def test_a_name_stays_a_text(name: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(own_figures("device", name, "h100_sxm"))
    assert device_of_file(file).id == name
    file.write_text(own_figures("cluster", name, "dgx_h100"))
    assert cluster_of_file(file).id == name


def test_a_file_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("mine: true")
    assert main(["new", "device", "mine", "like=h100", f"to={file}"]) == 2
    assert "exists" in capsys.readouterr().err
    assert file.read_text() == "mine: true"


def test_what_is_missing_is_brought_by_this_environment_s_own_pip() -> None:
    assert install_command("api").startswith(f"{sys.executable} -m pip install")
    assert install_command("api").endswith("[api]'")
