"""A predictor on disk: the same answers again, nothing heavy loaded, and every kind of damage named in one line."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from opcast.datasets.devices import Device, load_device
from opcast.datasets.ops import make_op
from opcast.models import predictor as predictor_module
from opcast.models.predictor import CARD, CHUNK, MODEL, Predictor, PredictorError, load, read_card
from opcast.models.training import TrainingOutcome

COLUMNS = {
    "batch": np.array([1, 1, 1]),
    "m": np.array([1, 64, 2**16]),
    "n": np.array([1024, 2048, 2**16]),
    "k": np.array([1024, 1024, 2**16]),
    "layout": np.array([1, 1, 1]),
}
LOADING = """\
import sys
import numpy as np
from opcast.models.predictor import load
predictor = load(sys.argv[1])
columns = {"batch": [1], "m": [64], "n": [1024], "k": [1024], "layout": [1]}
predictor.predict({name: np.array(values) for name, values in columns.items()}, "fp32")
print(sorted({"sklearn", "lightgbm", "numba", "pandas", "mlflow", "scipy", "torch", "pyarrow"} & set(sys.modules)))
"""


@pytest.fixture
def saved(outcome: TrainingOutcome, tmp_path: Path) -> Path:
    return outcome.predictor.save(tmp_path / "1")


def test_a_loaded_predictor_answers_as_the_trained_one(outcome: TrainingOutcome, saved: Path) -> None:
    mine, theirs = outcome.predictor.predict(COLUMNS, "fp32"), load(saved).predict(COLUMNS, "fp32")
    for each in ("latency_us", "low_us", "high_us", "in_envelope"):
        assert getattr(mine, each).tolist() == getattr(theirs, each).tolist()


def test_intervals_hold_the_answer_and_widen_outside(outcome: TrainingOutcome) -> None:
    made = outcome.predictor.predict(COLUMNS, "fp32")
    assert (made.low_us < made.latency_us).all()
    assert (made.latency_us < made.high_us).all()
    assert made.in_envelope.tolist() == [True, True, False]
    width = np.log(made.high_us / made.latency_us)
    assert width[2] > 1.5 * width[:2].max()


def test_another_device_is_outside_and_its_own_id_keeps_the_trained_figures(
    outcome: TrainingOutcome, gpu: Device
) -> None:
    predictor = outcome.predictor
    own = predictor.predict(COLUMNS, "fp32")
    probed_again = dataclasses.replace(predictor.device, memory_gbps=predictor.device.memory_gbps * 2)
    assert predictor.predict(COLUMNS, "fp32", None, probed_again).latency_us.tolist() == own.latency_us.tolist()
    other = predictor.predict(COLUMNS, "fp32", None, gpu)
    assert not other.in_envelope.any()
    assert (other.latency_us < own.latency_us).all()


def test_a_predictor_of_any_device_knows_those_like_its_donors(outcome: TrainingOutcome) -> None:
    stand_in = dataclasses.replace(load_device("h100_sxm"), id="any")
    trained = dataclasses.replace(
        outcome.predictor, device=stand_in, card={"device_figures": [load_device("h100_sxm").to_dict()]}
    )
    like, unlike = (trained.predict(COLUMNS, "fp32", None, load_device(name)) for name in ("h200_sxm", "b200_sxm"))
    assert like.in_envelope.tolist() == [True, True, False]
    assert not unlike.in_envelope.any()
    assert unlike.latency_us[2] < like.latency_us[2]
    assert (unlike.high_us / unlike.latency_us)[:2] == pytest.approx((like.high_us / like.latency_us)[:2], rel=0.5)


def test_a_list_of_ops_is_answered_in_its_order(outcome: TrainingOutcome) -> None:
    ops = [make_op("gemm", m=m, n=1024, k=512, dtype=dtype) for m in (8, 64) for dtype in ("fp32", "bf16")]
    whole = outcome.predictor.predict_ops(ops)
    alone = [float(outcome.predictor.predict_ops([op]).latency_us[0]) for op in ops]
    assert whole.latency_us.tolist() == pytest.approx(alone, rel=1e-12)
    assert whole.in_envelope.tolist() == [True, False, True, False]
    with pytest.raises(PredictorError, match="was asked about rms_norm"):
        outcome.predictor.predict_ops([make_op("rms_norm", rows=1, cols=8)])


def test_saving_twice_gives_the_same_bytes_and_overwrites_nothing(outcome: TrainingOutcome, saved: Path) -> None:
    again = outcome.predictor.save(saved.parent / "2")
    assert (again / MODEL).read_bytes() == (saved / MODEL).read_bytes()
    with pytest.raises(FileExistsError):
        outcome.predictor.save(saved)
    assert sorted(path.name for path in saved.parent.iterdir()) == ["1", "2"]


def test_loading_and_predicting_need_numpy_only(saved: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LOADING, str(saved)], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_single_warm_prediction_takes_milliseconds_at_most(outcome: TrainingOutcome) -> None:
    one = {name: values[:1] for name, values in COLUMNS.items()}
    times = []
    for _ in range(30):
        began = time.process_time()
        outcome.predictor.predict(one, "fp32")
        times.append(time.process_time() - began)
    assert np.median(times) < 5e-3


def edit_card(saved: Path, **changes: object) -> None:
    card = json.loads((saved / CARD).read_text())
    (saved / CARD).write_text(json.dumps(card | changes))


@pytest.mark.parametrize("name", ["format", "features_version"])
def test_another_version_is_refused_by_name(saved: Path, name: str) -> None:
    edit_card(saved, **{name: 99})
    with pytest.raises(PredictorError, match=r"predictor gemm v0 .* has .*99"):
        load(saved)


def test_other_feature_columns_are_refused(saved: Path) -> None:
    edit_card(saved, feature_names=["size_m"])
    with pytest.raises(PredictorError, match="feature columns differ"):
        load(saved)


def test_tampered_arrays_are_refused(saved: Path) -> None:
    data = bytearray((saved / MODEL).read_bytes())
    data[len(data) // 2] ^= 1
    (saved / MODEL).write_bytes(bytes(data))
    with pytest.raises(PredictorError, match="damaged or tampered"):
        load(saved)


def test_missing_parts_are_named(saved: Path) -> None:
    (saved / MODEL).unlink()
    with pytest.raises(PredictorError, match=r"lacks model\.npz"):
        load(saved)
    (saved / CARD).write_text("{")
    with pytest.raises(PredictorError, match="holds no predictor"):
        read_card(saved)
    with pytest.raises(PredictorError, match="holds no predictor"):
        load(saved.parent / "nowhere")


def test_pickled_arrays_are_refused(outcome: TrainingOutcome, saved: Path) -> None:
    import hashlib

    arrays = dict(np.load(saved / MODEL))
    arrays["correction.offset"] = np.array([{"a": 1}], dtype=object)
    with (saved / MODEL).open("wb") as file:
        np.savez(file, **arrays)
    edit_card(saved, sha256=hashlib.sha256((saved / MODEL).read_bytes()).hexdigest())
    with pytest.raises(PredictorError, match="incomplete"):
        load(saved)


def test_a_predictor_names_itself(outcome: TrainingOutcome) -> None:
    predictor: Predictor = outcome.predictor
    assert (predictor.name, predictor.coverage) == ("gemm@torch/cpu_two_threads", 0.9)


def random_ops(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    sizes = {name: rng.integers(1, 9000, count) for name in ("m", "n", "k")}
    return {"batch": np.ones(count, np.int64), **sizes, "layout": rng.integers(0, 2, count)}


def test_many_ops_are_answered_as_each_alone_in_any_order(outcome: TrainingOutcome) -> None:
    count = 2 * CHUNK + 77
    columns = random_ops(count)
    whole = outcome.predictor.predict(columns, "fp32")
    order = np.random.default_rng(1).permutation(count)
    shuffled = outcome.predictor.predict({name: values[order] for name, values in columns.items()}, "fp32")
    for name in ("latency_us", "low_us", "high_us", "in_envelope"):
        assert (getattr(shuffled, name) == getattr(whole, name)[order]).all()
    for row in (0, CHUNK - 1, CHUNK, count - 1):
        alone = outcome.predictor.predict({name: values[[row]] for name, values in columns.items()}, "fp32")
        assert (alone.latency_us[0], alone.high_us[0]) == (whole.latency_us[row], whole.high_us[row])


def test_one_core_answers_as_all_do(outcome: TrainingOutcome, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = random_ops(2 * CHUNK)
    before = outcome.predictor.predict(columns, "fp32").high_us
    monkeypatch.setattr(predictor_module, "_cores", lambda: 1)
    assert (outcome.predictor.predict(columns, "fp32").high_us == before).all()


def test_an_op_asked_again_is_answered_from_memory_and_the_same(outcome: TrainingOutcome, gpu: Device) -> None:
    predictor = dataclasses.replace(outcome.predictor)
    ops = [make_op("gemm", m=m, n=1024, k=512, dtype="fp32") for m in (8, 64, 8)]
    first, other = predictor.predict_ops(ops), predictor.predict_ops(ops, gpu)
    assert (predictor.predict_ops(ops).latency_us == first.latency_us).all()
    assert first.latency_us[0] == first.latency_us[2] != first.latency_us[1]
    assert (predictor.predict_ops(ops, gpu).latency_us == other.latency_us).all()
    assert (other.latency_us != first.latency_us).all()
    assert (predictor.predict_ops(ops, cache="cold").latency_us >= first.latency_us).all()
    assert len(predictor.predict_ops([])) == 0


def test_memory_is_bounded(outcome: TrainingOutcome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictor_module, "MEMO", 10)
    predictor = dataclasses.replace(outcome.predictor)
    ops = [make_op("gemm", m=m, n=64, k=64, dtype="fp32") for m in range(1, 40)]
    answers = [float(predictor.predict_ops([op]).latency_us[0]) for op in ops]
    assert len(predictor._memo) <= 10
    assert answers == predictor.predict_ops(ops).latency_us.tolist()


def test_a_single_op_seen_before_takes_microseconds(outcome: TrainingOutcome) -> None:
    op = make_op("gemm", m=64, n=1024, k=512, dtype="fp32")
    outcome.predictor.predict_ops([op])
    times = []
    for _ in range(200):
        began = time.process_time()
        outcome.predictor.predict_ops([op])
        times.append(time.process_time() - began)
    assert np.median(times) < 5e-5
