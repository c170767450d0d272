"""Where campaigns run: what is generated for Slurm and Kubernetes, and what is refused in a line."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from opcast.harness.plan import CampaignPlan
from opcast.jobs.cli import main
from opcast.jobs.launching.places import Slurm, place_of
from opcast.jobs.launching.slurm import parameters
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
        (["where=slurm", "where.parts=0"], "where.parts=0"),
        (["where=slurm", "+where.nonsense=1"], "nonsense"),
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


def test_places_are_checked() -> None:
    with pytest.raises(BadInputError, match="moon"):
        place_of({"name": "moon"})
    assert place_of({"name": "here"}).parts == 1


def test_the_status_of_a_store_without_campaigns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "status", f"store={tmp_path}", "format=json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert told["campaigns"] == []
    assert main(["profile", "status", f"store={tmp_path / 'none'}"]) == 2
