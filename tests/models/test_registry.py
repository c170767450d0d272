"""The registry of predictors: versions that never change, one of them current, safe with writers at once."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from opcast.models.predictor import Predictor, PredictorError
from opcast.models.registry import Registry
from opcast.models.training import TrainingOutcome


def variant(predictor: Predictor, shift: float, backend: str = "torch", rows: int = 100) -> Predictor:
    """The predictor with other arrays."""
    correction = dataclasses.replace(predictor.correction, offset=predictor.correction.offset + shift)
    return dataclasses.replace(predictor, correction=correction, backend=backend, card=dict(predictor.card, n=rows))


def test_an_empty_registry_knows_nothing(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "none")
    assert registry.find("gemm", "cpu_two_threads") is None
    assert registry.list() == []
    assert registry.backends("gemm", "cpu_two_threads") == []


def test_registering_makes_versions_and_the_last_is_current(outcome: TrainingOutcome, tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    first = registry.register(outcome.predictor)
    second = registry.register(variant(outcome.predictor, 0.1))
    assert (first.version, second.version) == ("1", "2")
    found = Registry(tmp_path).find("gemm", "cpu_two_threads")
    assert found is not None
    assert found.version == "2"
    assert [(entry.version, entry.current) for entry in registry.list()] == [("1", False), ("2", True)]
    assert registry.path(second) == tmp_path / "cpu_two_threads" / "gemm@torch" / "2"


def test_registering_the_same_again_writes_nothing(outcome: TrainingOutcome, tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    registry.register(outcome.predictor)
    assert registry.register(outcome.predictor).version == "1"
    assert len(registry.list()) == 1


def test_a_version_kept_back_is_promoted_later(outcome: TrainingOutcome, tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    registry.register(outcome.predictor)
    registry.register(variant(outcome.predictor, 0.1), promote=False)
    assert registry.find("gemm", "cpu_two_threads").version == "1"
    registry.promote(registry.list()[1])
    assert registry.find("gemm", "cpu_two_threads").version == "2"


def test_backends_stand_apart_and_torch_is_the_default(outcome: TrainingOutcome, tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    registry.register(variant(outcome.predictor, 0.1, "triton:gemm/x", 50))
    registry.register(variant(outcome.predictor, 0.2, "cublas", 900))
    assert registry.backends("gemm", "cpu_two_threads") == ["cublas", "triton:gemm/x"]
    assert registry.find("gemm", "cpu_two_threads").backend == "cublas"
    registry.register(variant(outcome.predictor, 0.3, "torch", 10))
    assert registry.find("gemm", "cpu_two_threads").backend == "torch"
    assert registry.find("gemm", "cpu_two_threads", "triton:gemm/x").backend == "triton:gemm/x"
    assert registry.find("gemm", "cpu_two_threads", "other") is None
    assert {entry.backend for entry in registry.list()} == {"torch", "cublas", "triton:gemm/x"}


def test_a_registry_notes_which_framework_answers_by_default(outcome: TrainingOutcome, tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    for rows, backend in ((10, "vllm-0.24.0:linear"), (20, "vllm-0.24.0:marlin"), (30, "trtllm-1.3.0rc20:cublas")):
        registry.register(variant(outcome.predictor, rows * 1e-3, backend, rows))
    assert registry.default_backend("gemm", "cpu_two_threads") == "trtllm-1.3.0rc20:cublas"
    (tmp_path / "default").write_text("# as most serve\n\nsglang\nvllm\n")
    assert registry.preferences() == ("sglang", "vllm")
    assert registry.default_backend("gemm", "cpu_two_threads") == "vllm-0.24.0:marlin"
    (tmp_path / "default").write_text("vllm-0.24.0:linear\n")
    assert registry.find("gemm", "cpu_two_threads").backend == "vllm-0.24.0:linear"
    registry.register(variant(outcome.predictor, 0.1, "torch", 1))
    assert registry.default_backend("gemm", "cpu_two_threads") == "torch"


def test_a_backend_may_be_named_by_its_framework(outcome: TrainingOutcome, tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    for rows, backend in ((10, "vllm-0.24.0:linear"), (20, "vllm-0.24.0:marlin"), (30, "vllmx:a")):
        registry.register(variant(outcome.predictor, rows * 1e-3, backend, rows))
    means = {
        "vllm": "vllm-0.24.0:marlin",
        "vllm-0.24.0": "vllm-0.24.0:marlin",
        "vllm-0.24.0:linear": "vllm-0.24.0:linear",
    }
    for wanted, backend in means.items():
        assert registry.matching("gemm", "cpu_two_threads", wanted) == backend
    assert registry.matching("gemm", "cpu_two_threads", "vll") is None
    assert registry.matching("gemm", "cpu_two_threads", None) == "vllmx:a"


def test_a_loaded_predictor_is_kept_until_its_files_change(outcome: TrainingOutcome, tmp_path: Path) -> None:
    path = Registry(tmp_path).path(Registry(tmp_path).register(outcome.predictor))
    assert Registry(tmp_path).load(path) is Registry(tmp_path).load(path)
    (path / "model.npz").write_bytes(b"other")
    with pytest.raises(PredictorError, match="damaged or tampered"):
        Registry(tmp_path).load(path)


def test_writers_at_once_lose_nothing(outcome: TrainingOutcome, tmp_path: Path) -> None:
    variants = [variant(outcome.predictor, 0.01 * index) for index in range(8)]
    with ThreadPoolExecutor(8) as pool:
        versions = list(pool.map(lambda each: Registry(tmp_path).register(each).version, variants))
    assert sorted(versions, key=int) == [str(number) for number in range(1, 9)]
    assert not [path for path in tmp_path.rglob(".*") if path.is_file() or path.is_dir()]


def test_a_current_version_that_is_gone_is_named(outcome: TrainingOutcome, tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    registry.register(outcome.predictor)
    (tmp_path / "cpu_two_threads" / "gemm@torch" / "current").write_text("7\n")
    with pytest.raises(PredictorError, match="names version '7', which is not there"):
        registry.find("gemm", "cpu_two_threads")


DAMAGE = {
    "random bytes": lambda file: file.write_bytes(bytes(range(256))),
    "truncated": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "empty": lambda file: file.write_bytes(b""),
    "missing": lambda file: file.unlink(),
    "of something else": lambda file: file.write_bytes(b"{}"),
}


@pytest.mark.parametrize("file", ["model.npz", "card.json", "../current"])
@pytest.mark.parametrize("how", DAMAGE)
def test_no_other_backend_answers_for_a_damaged_predictor(
    outcome: TrainingOutcome, tmp_path: Path, how: str, file: str
) -> None:
    """Asked with its name, its framework or none: always a line that names the folder, never another's answer."""
    registry = Registry(tmp_path)
    path = registry.path(registry.register(variant(outcome.predictor, 0.0, "torch", 10)))
    registry.register(variant(outcome.predictor, 0.1, "vllm-0:other", 20))
    DAMAGE[how](path / file)
    if file == "../current" and how in ("missing", "truncated"):  # of one line; without it the newest version is meant
        assert registry.find("gemm", "cpu_two_threads") is registry.load(path)
        return
    for wanted in (None, "torch"):
        with pytest.raises(PredictorError, match=r"torch.*(train it again|remove)"):
            registry.find("gemm", "cpu_two_threads", registry.matching("gemm", "cpu_two_threads", wanted, "fp32"))
    assert registry.find("gemm", "cpu_two_threads", "vllm-0:other") is not None
    registry.register(variant(outcome.predictor, 0.0, "torch", 10))  # trained again
    found = registry.find("gemm", "cpu_two_threads")
    assert found is not None
    assert found.backend == "torch"
