"""Where campaigns run: what is generated for Slurm and Kubernetes, and what is refused in a line."""

from __future__ import annotations

import base64
import gzip
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from opcast.datasets.devices import Device
from opcast.datasets.store import Store
from opcast.harness.environment import cpu_device_id
from opcast.harness.parts import announce
from opcast.harness.plan import CampaignPlan, build_plan
from opcast.jobs import campaign_status
from opcast.jobs.cli import main
from opcast.jobs.launching.places import Slurm, place_of
from opcast.jobs.launching.slurm import executor_of, parameters
from opcast.jobs.show import BadInputError

TINY = ["campaign.budget_s=1", "+settings.device=cpu"]


def test_the_manifest_of_a_job_fits_the_schema_and_carries_the_plan(tmp_path: Path) -> None:
    pytest.importorskip("kubernetes_validate")
    import kubernetes_validate

    path = tmp_path / "job.yaml"
    where = ["where=kubernetes", "where.image=me/opcast:1", "where.claim=store", f"where.manifest={path}"]
    assert main(["profile", *TINY, *where, "where.parts=12", f"store={tmp_path / 's'}"]) == 0
    plan, job = yaml.safe_load_all(path.read_text())
    for each in (plan, job):
        kubernetes_validate.validate(each, "1.31", strict=True)
    packed = base64.b64decode(plan["binaryData"]["plan.json.gz"])
    assert CampaignPlan.from_json(gzip.decompress(packed).decode()).cases
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"]) == ("Indexed", 12)
    container = spec["template"]["spec"]["containers"][0]
    assert container["args"] == ["--part", "$(PART)/12"]
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["where=kubernetes", "where.image=x"], "where.claim"),
        (["where=kubernetes", "where.image=x", "where.claim=y", "where.version='1.2'"], "1.2"),
        (
            ["where=kubernetes", "where.image=x", "where.claim=y", "where.version='1.99'"],
            "where.version=1.99: no schema",
        ),
        (["where=slurm", "where.parts=0"], "where.parts=0"),
        (["where=slurm", "+where.nonsense=1"], "nonsense"),
        (["where=slurm", "where.container=x", "where.runtime=aptainer"], "apptainer"),
        (["where=slurm", "where.mounts=/data"], "where.container"),
        (["where=slurm", "part=1/2"], "leave out where=slurm"),
        (["part=9/8"], "as 3/8"),
        (["campaign=active"], "steps="),
        (["campaign=active", "active.points=0", "steps=[x]"], "active.points"),
        (["campaign=model", 'steps=["model=nonsense_9b"]'], "nonsense_9b"),
        (["campaign=model", "steps=[3]"], "steps=[3]"),
        (["nonsense"], "status"),
    ],
)
def test_bad_settings_are_one_line(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "kubernetes" in words[0]:
        pytest.importorskip("kubernetes_validate")
    tiny = TINY if not words[0].startswith("campaign=") else TINY[1:]
    assert main(["profile", *tiny, f"store={tmp_path}", *words]) == 2
    assert says in capsys.readouterr().err


def test_what_slurm_is_asked_for() -> None:
    place = Slurm(
        parts=4, gpus=1, container="nvcr.io#opcast", mounts="/data:/data", exclusive=True, extra={"mem": "8G"}
    )
    made = parameters(place, "full-1")
    assert made["array_parallelism"] == 4
    assert made["gpus_per_node"] == 1
    assert made["srun_args"] == ["--container-image=nvcr.io#opcast", "--container-mounts=/data:/data"]
    assert made["additional_parameters"] == {"requeue": True, "mem": "8G"}
    assert "partition" not in made
    assert (made["cpus_per_task"], made["mem"]) == (4, "0")
    assert parameters(Slurm(cpus=2, memory_gib=16), "full-1")["mem"] == "16384M"
    defaults = parameters(Slurm(cpus=None, memory_gib=None), "full-1")
    assert not {"cpus_per_task", "mem"} & set(defaults)


@pytest.mark.parametrize(
    ("place", "runs"),
    [
        (Slurm(), f"{sys.executable} -u -m submitit"),
        (Slurm(python="/opt/my env/python"), "/opt/my env/python -u -m submitit"),
        (
            Slurm(container="nvcr.io#me/opcast", mounts="/data:/data"),
            "--container-image=nvcr.io#me/opcast --container-mounts=/data:/data python3 -u -m submitit",
        ),
        (
            Slurm(container="/images/opcast.sif", mounts="/data:/data,/home", gpus=1, runtime="apptainer"),
            "apptainer exec --nv --bind /data:/data,/home /images/opcast.sif python3 -u -m submitit",
        ),
        (
            Slurm(container="docker://me/opcast", runtime="singularity", python="/venv/bin/python"),
            "singularity exec docker://me/opcast /venv/bin/python -u -m submitit",
        ),
    ],
)
def test_the_script_of_a_part_in_its_container(
    place: Slurm, runs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitit = pytest.importorskip("submitit", reason="Slurm is asked with submitit (the extra cluster)")
    monkeypatch.setattr(submitit.SlurmExecutor, "affinity", classmethod(lambda cls: 2))  # as where Slurm is
    executor = executor_of(place, tmp_path, "full-1")
    script = executor._make_submission_file_text(executor._submitit_command_str, "job")
    (line,) = [" ".join(shlex.split(line)) for line in script.splitlines() if line.startswith("srun ")]
    assert runs in line
    assert ("#SBATCH --requeue" in script, "export OPCAST_NODE=$SLURMD_NODENAME" in script) == (True, True)
    for word in ("container-image", "exec "):
        assert (word in line) == (word in runs)


def test_what_slurm_refuses_is_no_campaign(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slurm.conf").write_text("\n")  # a file that is missing is waited for, a minute long
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    assert main(["profile", *TINY, "where=slurm", "where.parts=2", f"store={tmp_path}"]) == 2
    assert "Slurm" in capsys.readouterr().err
    assert not list(tmp_path.glob("campaigns/*.json"))


def test_places_are_checked() -> None:
    with pytest.raises(BadInputError, match="moon"):
        place_of({"name": "moon"})
    assert place_of({"name": "here"}).parts == 1


def test_the_status_of_a_store_without_campaigns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "status", f"store={tmp_path}", "format=json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert told["campaigns"] == []
    assert main(["profile", "status", f"store={tmp_path / 'none'}"]) == 2


@pytest.mark.slow
def test_watching_follows_a_campaign_of_another_process_to_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    store, sizes = Store(tmp_path / "store"), {"low": 1, "high": 512}
    figures = {"compute_units": 1, "clock_mhz": 1.0, "vector_tflops": 1.0, "memory_gib": 1.0, "memory_gbps": 1.0}
    names = {"id": cpu_device_id(1), "name": "test", "vendor": "cpu", "architecture": "test"}
    figures |= {"tensor_tflops": {"fp32": 1.0}, "l2_mib": 1.0, "l2_gbps": 1.0}
    store.save_device(Device.from_dict({**names, **figures}))
    settings = {"device": "cpu", "threads": 1, "pin": False, "case_budget_s": 0.2, "ci_width": 0.001, "batch_size": 2}
    cases = [{"kind": "gelu", "sample": 8, "rows": sizes, "cols": sizes}]
    plan = build_plan({"name": "watched", "dtype": "fp32", "settings": settings, "cases": cases})
    (tmp_path / "plan.json").write_text(plan.to_json())
    announce(store.path, plan, 1)
    seen: list[tuple[int, int]] = []
    drawn = campaign_status.status_table

    def noting(found: Any, price: float | None) -> Any:
        seen.append((found.done, found.cases))
        return drawn(found, price)

    monkeypatch.setattr(campaign_status, "status_table", noting)
    monkeypatch.setattr(campaign_status, "EVERY_S", 0.2)
    command = [sys.executable, "-m", "opcast.harness", str(tmp_path / "plan.json"), str(store.path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as campaign:
        assert main(["profile", "status", "watch=true", f"store={store.path}", "price_per_gpu_hour=2"]) == 0
        assert campaign.wait(60) == 0
    count = len(plan.cases)
    assert (seen[0], seen[-1]) == ((0, count), (count, count))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert f"{count} of {count} cases" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "device"),
    [
        (["where=slurm"], None),
        (["where=ray"], None),
        (["where=ray", "+settings.device=cuda"], None),
        (["plan_out=plan.json"], None),
        (["where=slurm", "where.gpus=1"], "cuda"),
        (["where=slurm", "+settings.device=cuda"], "cuda"),
        (["where=slurm", "+settings.device=cpu"], "cpu"),
        (["where=ray", "where.gpus=0"], "cpu"),
        (["where=kubernetes", "where.image=x", "where.claim=y"], "cuda"),
        (["plan_out=plan.json", "+settings.device=cuda"], "cuda"),
    ],
)
def test_a_campaign_that_runs_elsewhere_measures_the_device_of_its_nodes(words: list[str], device: str | None) -> None:
    """This machine's processor is not what eight GPU nodes are held for."""
    from opcast.jobs.composing import compose
    from opcast.jobs.profile import with_node_device

    pytest.importorskip("torch")
    config = compose("profile", words)
    if device is None:
        with pytest.raises(BadInputError, match=r"where\.gpus=1|settings\.device=cuda"):
            with_node_device(config, place_of(config["where"]))
        return
    settled = with_node_device(config, place_of(config["where"]))
    assert {**settled["campaign"]["settings"], **settled["settings"]}["device"] == device
