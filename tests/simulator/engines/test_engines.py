"""Which engine answers: an exact measurement, else a predictor, else physics."""

from __future__ import annotations

import dataclasses
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from opcast.datasets.clusters import load_cluster
from opcast.datasets.devices import load_device, overridden
from opcast.datasets.ops import KINDS, make_op
from opcast.datasets.schema import Measurement
from opcast.datasets.store import Store
from opcast.datasets.vocabulary import OpColumns
from opcast.models import labs, power
from opcast.models.choice import OTHER_FORMAT
from opcast.models.intervals import UNCALIBRATED_FACTOR
from opcast.models.registry import Registry
from opcast.models.training import train
from opcast.simulator.engines import EngineError, ask, build_engine
from opcast.simulator.predict.columns import predict_columns
from opcast.simulator.predict.ops import predict_ops, with_power
from opcast.simulator.question.plan import load_stack
from opcast.simulator.step.build import engine_of

DEVICE = load_device("h100_sxm")
SHIPPED = Path(__file__).resolve().parents[3] / "models" / "shipped"


def measured(m: int, latency_us: float, cache: str = "warm", backend: str = "torch") -> Measurement:
    return Measurement(
        op=make_op("gemm", m=m, n=4096, k=4096),
        device_id=DEVICE.id,
        run_id="test",
        measured_at=datetime(2026, 1, 1, tzinfo=UTC),
        latency_us=latency_us,
        latency_p10_us=latency_us * 0.98,
        latency_p90_us=latency_us * 1.03,
        cache=cache,
        backend=backend,
    )


@pytest.fixture
def knowledge(tmp_path: Path) -> tuple[Path, Path]:
    """A store with a made-up law (twice the roofline-like time of a product) and the predictors trained on it."""
    store = Store(tmp_path / "store")
    store.write([measured(m, 20.0 + m * 0.06) for m in range(128, 8192, 128)], "test")
    train(store, DEVICE, registry=Registry(tmp_path / "predictors"))
    return tmp_path / "store", tmp_path / "predictors"


def test_an_exact_measurement_wins(knowledge: tuple[Path, Path]):
    engine = build_engine(DEVICE, [knowledge[0]], [knowledge[1]])
    found = predict_ops([make_op("gemm", m=1024, n=4096, k=4096)], DEVICE, engine)[0]
    assert found.engine == "measured"
    assert found.latency_us == pytest.approx(20.0 + 1024 * 0.06)
    assert found.low_us < found.latency_us < found.high_us
    assert found.predictor is None


def test_an_unseen_shape_is_learned_and_close(knowledge: tuple[Path, Path]):
    engine = build_engine(DEVICE, [knowledge[0]], [knowledge[1]])
    found = predict_ops([make_op("gemm", m=3000, n=4096, k=4096)], DEVICE, engine)[0]
    assert found.engine == "learned"
    assert found.latency_us == pytest.approx(20.0 + 3000 * 0.06, rel=0.1)
    assert found.in_envelope
    assert found.predictor


def test_a_kind_without_data_is_analytical(knowledge: tuple[Path, Path]):
    engine = build_engine(DEVICE, [knowledge[0]], [knowledge[1]])
    found = predict_ops([make_op("rms_norm", rows=4096, cols=4096)], DEVICE, engine)[0]
    assert found.engine == "analytical"
    assert found.latency_us >= found.roofline_us


def test_far_outside_the_interval_widens(knowledge: tuple[Path, Path]):
    engine = build_engine(DEVICE, [], [knowledge[1]])
    inside, outside = (
        predict_ops([make_op("gemm", m=m, n=n, k=4096)], DEVICE, engine)[0] for m, n in ((3000, 4096), (3000, 65536))
    )
    assert not outside.in_envelope
    assert outside.high_us / outside.latency_us > inside.high_us / inside.latency_us


def test_the_order_is_the_users(knowledge: tuple[Path, Path]):
    engine = build_engine(DEVICE, [knowledge[0]], [knowledge[1]], order=["analytical"])
    assert ask(engine, [make_op("gemm", m=1024, n=4096, k=4096)]).engine[0] == "analytical"
    with pytest.raises(EngineError, match="choose from measured, learned, transfer, network, analytical"):
        build_engine(DEVICE, [], [], order=["oracle"])


def test_a_warm_measurement_does_not_answer_for_a_cold_op(tmp_path: Path):
    Store(tmp_path).write([measured(64, 1.0)], "test")
    engine = build_engine(DEVICE, [tmp_path], [])
    op = make_op("gemm", m=64, n=4096, k=4096)
    assert ask(engine, [op], "warm").engine[0] == "measured"
    assert ask(engine, [op], "cold").engine[0] == "analytical"


def test_a_named_backend_answers_and_torch_is_the_usual_one(tmp_path: Path):
    Store(tmp_path).write([measured(64, 9.0), measured(64, 5.0, backend="triton:gemm")], "test")
    op = make_op("gemm", m=64, n=4096, k=4096)
    assert ask(build_engine(DEVICE, [tmp_path], []), [op]).latency_us[0] == 9.0
    assert ask(build_engine(DEVICE, [tmp_path], [], backend="triton:gemm"), [op]).latency_us[0] == 5.0


@pytest.mark.parametrize("device", ["h100_sxm", "b200_sxm", "a100_sxm_80gb", "rtx_4090", "mi300x"])
def test_no_interval_reaches_below_what_the_device_can_do(device: str) -> None:
    """Where the prediction itself is not below the roofline; from one op and from columns alike."""
    on, rng = load_device(device), np.random.default_rng(7)
    engine = build_engine(on, [], [SHIPPED])
    sizes = {name: 2 ** rng.integers(4, 15, 60) for name in ("m", "n", "k")}
    tokens = {"batch": 2 ** rng.integers(0, 8, 60), "seq_kv": 2 ** rng.integers(7, 16, 60)}
    heads = {"heads_q": 32, "heads_kv": 8, "head_dim": 128, "v_head_dim": 128, "seq_q": 1}
    rows = {"rows": 2 ** rng.integers(4, 16, 60), "cols": 2 ** rng.integers(8, 15, 60)}
    asked = [
        make_op(kind, **{name: int(values[at]) for name, values in drawn.items()}, **fixed)
        for kind, drawn, fixed in (("gemm", sizes, {}), ("attention_decode", tokens, heads), ("rms_norm", rows, {}))
        for at in range(60)
    ]
    found = predict_ops(asked, on, engine)
    able = [each for each in found if each.latency_us >= each.roofline_us]
    assert len(able) > 100
    assert all(each.roofline_us <= each.low_us <= each.latency_us for each in able)
    gemms = asked[:60]
    columns = {name: np.array([op.dims[at] for op in gemms]) for at, name in enumerate(KINDS["gemm"].names)}
    in_columns = predict_columns(OpColumns("gemm", columns, "bf16", "bf16"), on, engine).low_us
    assert in_columns.tolist() == pytest.approx([each.low_us for each in found[:60]])


def test_a_measured_op_may_be_faster_than_the_datasheet(tmp_path: Path) -> None:
    Store(tmp_path).write([measured(4096, 130.0)], "test")
    op = make_op("gemm", m=4096, n=4096, k=4096)
    found = predict_ops([op], DEVICE, build_engine(DEVICE, [tmp_path], []))[0]
    assert found.engine == "measured"
    assert found.low_us < found.latency_us < found.roofline_us


@pytest.mark.parametrize("wanted", ["vllm", "vllm-0.24.0", "vllm-0.24.0:linear"])
def test_a_framework_or_version_is_a_wish_for_measured_rows_too(tmp_path: Path, wanted: str):
    Store(tmp_path).write([measured(64, 9.0), measured(64, 5.0, backend="vllm-0.24.0:linear")], "test")
    op = make_op("gemm", m=64, n=4096, k=4096)
    found = ask(build_engine(DEVICE, [tmp_path], [], backend=wanted), [op])
    assert (found.engine[0], found.latency_us[0]) == ("measured", 5.0)
    assert ask(build_engine(DEVICE, [tmp_path], [], backend="vll"), [op]).engine[0] == "analytical"


def test_measured_rows_and_predictors_are_chosen_in_one_order(knowledge: tuple[Path, Path], tmp_path: Path):
    """Without ``torch`` the registry's lines decide, then the number of rows; the exact name goes before both."""
    few, many, other = "vllm-0.24.0:linear", "vllm-0.24.0:marlin", "trtllm-1.3.0:cublas"
    sizes = {few: 1, many: 2, other: 3}
    latency = {few: 5.0, many: 6.0, other: 7.0}
    rows = [measured(64 * (n + 1), us, backend=name) for name, us in latency.items() for n in range(sizes[name])]
    store, registry = Store(tmp_path / "mixed"), Registry(tmp_path / "ours")
    store.write(rows, "test")
    predictor = Registry(knowledge[1]).find("gemm", DEVICE.id)
    assert predictor is not None
    for at, (name, count) in enumerate(sizes.items()):
        slower = dataclasses.replace(predictor.correction, offset=predictor.correction.offset + at)
        card = {**predictor.card, "n": count}
        registry.register(dataclasses.replace(predictor, correction=slower, backend=name, card=card))
    op = make_op("gemm", m=64, n=4096, k=4096)

    def chosen(wanted: str | None) -> tuple[str, str]:
        engine = build_engine(DEVICE, [store.path], [registry.root], ["measured"], wanted)
        learned = build_engine(DEVICE, [], [registry.root], ["learned"], wanted)
        (us,) = ask(engine, [op]).latency_us
        return next(name for name in latency if latency[name] == us), str(ask(learned, [op]).predictor[0])

    for lines, wanted, backend in (
        ("", None, other),
        ("", "vllm", many),
        ("vllm\n", None, many),
        (f"{few}\n", None, few),
        (f"{few}\n", "vllm", few),
        ("", few, few),
    ):
        (registry.root / "default").write_text(lines)
        assert chosen(wanted) == (backend, f"gemm@{backend}/h100_sxm@1")


def test_every_interval_has_the_one_coverage_whoever_answers(knowledge: tuple[Path, Path], root: Path):
    """Samples, formula and law know theirs of another share of cases; all are brought to nine in ten."""
    half_normal = 1.6448536 / 1.2815516
    cluster = load_cluster("dgx_h100")
    engine = build_engine(DEVICE, [knowledge[0]], [knowledge[1]], cluster=cluster)
    ops = [
        make_op("gemm", m=1024, n=4096, k=4096),
        make_op("gemm", m=3000, n=4096, k=4096),
        make_op("all_reduce", size_bytes=2**26, ranks=8, ranks_per_node=8, link="nvlink"),
        make_op("rms_norm", rows=4096, cols=4096),
    ]
    found = predict_ops(ops, DEVICE, engine)
    assert [each.engine for each in found] == ["measured", "learned", "network", "analytical"]
    assert {each.coverage for each in found} == {0.9}
    exact, _, ring, law = found
    assert exact.high_us / exact.latency_us == pytest.approx(1.03**half_normal)
    assert exact.low_us / exact.latency_us == pytest.approx(0.98**half_normal)
    assert ring.high_us / ring.latency_us == pytest.approx(1.13**half_normal)
    assert law.high_us / law.latency_us == pytest.approx(UNCALIBRATED_FACTOR)


def test_a_measurement_is_never_certain_and_a_predictor_no_surer_than_the_samples_it_learned_from(tmp_path: Path):
    """A row without percentiles has no width of its own; a law without noise would be learned to the last digit."""
    noisy = [dataclasses.replace(measured(m, 20.0 + m * 0.06), latency_p10_us=None) for m in range(128, 8192, 128)]
    noisy[0] = dataclasses.replace(noisy[0], latency_p90_us=None)
    noisy[1:] = [
        dataclasses.replace(row, latency_p10_us=row.latency_us * 0.8, latency_p90_us=row.latency_us * 1.25)
        for row in noisy[1:]
    ]
    store = Store(tmp_path / "store")
    store.write(noisy, "test")
    train(store, DEVICE, registry=Registry(tmp_path / "predictors"))
    engine = build_engine(DEVICE, [store.path], [tmp_path / "predictors"])
    ops = [make_op("gemm", m=m, n=4096, k=4096) for m in (128, 1024, 3000)]
    bare, exact, learned = predict_ops(ops, DEVICE, engine)
    assert [each.engine for each in (bare, exact, learned)] == ["measured", "measured", "learned"]
    assert bare.low_us < bare.latency_us < bare.high_us
    assert learned.high_us / learned.latency_us >= 0.999 * exact.high_us / exact.latency_us
    assert exact.high_us / exact.latency_us > 1.25


@pytest.mark.parametrize("device_id", ["a100_sxm_80gb", "h100_sxm", "l40s"])
@pytest.mark.parametrize("stack", [None, "vllm", "torch"])
def test_fewer_bits_of_weights_never_cost_a_decode_step_time(device_id: str, stack: str | None) -> None:
    device = load_device(device_id)
    engine = build_engine(device, [], [SHIPPED])
    engine = engine if stack is None else engine_of(load_stack(stack), engine)
    for n, k in ((128, 8192), (1024, 8192), (8192, 1024), (28672, 8192)):
        ops = [make_op("gemm", dtype, m=1, n=n, k=k) for dtype in ("bf16", "w8a16", "w4a16")]
        us = ask(engine, ops, "cold").latency_us
        assert us[1] < 1.3 * us[0], (n, k)  # unpacking takes time where a kernel is mostly its launch
        assert us[2] < 1.05 * us[1], (n, k)
    assert us[2] < 0.45 * us[0]  # large enough for bytes to count alone


@pytest.mark.parametrize("device_id", ["rtx_4090", "h100_sxm", "a100_sxm_80gb", "b200_sxm"])
def test_what_nobody_timed_is_no_faster_than_peak(device_id: str) -> None:
    """Rows of an RTX 4090 are at clocks above its data sheet's: that says nothing of TF32, or of larger products."""
    device = load_device(device_id)
    engine = build_engine(device, [], [SHIPPED])
    ops = [make_op("gemm", m=m, n=m, k=m, dtype=dtype) for dtype in ("tf32", "bf16", "int8") for m in (4096, 16384)]
    answers = predict_ops(ops, device, engine)
    for found in answers:  # a table that never saw a format is not said to have timed it
        other = found.engine == "learned" and found.op["dtype"] not in ("bf16", "fp16")
        assert (found.clause == OTHER_FORMAT) == (other and "SmoothQuant" not in str(found.predictor)), found
    beyond = [found for found in answers if not found.in_envelope]
    assert beyond
    assert all(found.latency_us >= found.roofline_us * (1 - 1e-9) for found in beyond)


def test_what_no_engine_answers_is_refused_with_the_way_out(knowledge) -> None:
    store, _ = knowledge
    engine = build_engine(DEVICE, [store], [], ("measured",))
    assert predict_ops([make_op("gemm", m=256, n=4096, k=4096)], DEVICE, engine)[0].engine == "measured"
    with pytest.raises(
        EngineError, match=r"engine.order=\[measured\] answers gemm .*m=257 .*; measure it, or add analyt"
    ):
        predict_ops([make_op("gemm", m=m, n=4096, k=4096) for m in (256, 257)], DEVICE, engine)


@pytest.mark.parametrize("kind", [name for name, each in KINDS.items() if each.collective])
def test_a_collective_of_a_single_rank_moves_nothing_and_takes_no_time(kind: str) -> None:
    """NCCL launches no kernel for it, and steps have none: a table of more ranks says nothing of it."""
    dims = {"size_bytes": 1 << 30} if "size_bytes" in KINDS[kind].names else {}
    dims = dims or {"tokens": 4096, "hidden": 7168, "topk": 8, "experts": 256}
    for cluster in (None, load_cluster("dgx_h100")):
        engine = build_engine(DEVICE, [], [SHIPPED], cluster=cluster)
        alone, pair = predict_ops([make_op(kind, ranks=ranks, **dims) for ranks in (1, 2)], DEVICE, engine)
        assert (alone.latency_us, alone.low_us, alone.high_us, alone.roofline_us) == (0.0, 0.0, 0.0, 0.0)
        assert alone.bound == "latency"
        assert pair.latency_us > 10.0
    large, small = (make_op("all_reduce", size_bytes=size, ranks=1, norm="yes") for size in (1 << 30, 1 << 10))
    with_norm, floor = predict_ops([large, small], DEVICE, engine)
    assert with_norm.latency_us > 2 * (1 << 30) / DEVICE.memory_gbps / 1e3
    assert floor.latency_us > DEVICE.launch_us
    assert floor.low_us < floor.latency_us < floor.high_us


def test_answers_keep_the_order_of_a_mixed_list():
    ops = [make_op("gemm", m=8, n=8, k=8), make_op("copy", size_bytes=2**20), make_op("gemm", m=4096, n=4096, k=4096)]
    together = ask(build_engine(DEVICE, [], []), ops).latency_us
    alone = [ask(build_engine(DEVICE, [], []), [op]).latency_us[0] for op in ops]
    assert np.array_equal(together, alone)


def test_the_users_predictor_goes_before_the_shipped_one(knowledge: tuple[Path, Path], tmp_path: Path):
    shipped, users = Registry(knowledge[1]), Registry(tmp_path / "mine")
    engine = build_engine(DEVICE, [], [users.root, shipped.root])
    op = make_op("gemm", m=3000, n=4096, k=4096)
    assert predict_ops([op], DEVICE, engine)[0].predictor == "gemm@torch/h100_sxm@1"
    predictor = shipped.find("gemm", DEVICE.id)
    assert predictor is not None
    slower = dataclasses.replace(predictor.correction, offset=predictor.correction.offset + 1.0)
    users.register(dataclasses.replace(predictor, correction=slower, backend="mine-1:kernel"))
    before = predict_ops([op], DEVICE, build_engine(DEVICE, [], [shipped.root]))[0]
    found = predict_ops([op], DEVICE, build_engine(DEVICE, [], [users.root, shipped.root]))[0]
    assert found.predictor == "gemm@mine-1:kernel/h100_sxm@1"
    assert found.latency_us == pytest.approx(before.latency_us * np.e)
    named = predict_ops([op], DEVICE, build_engine(DEVICE, [], [users.root, shipped.root], backend="torch"))[0]
    assert named.predictor == "gemm@torch/h100_sxm@1"


def test_a_device_without_predictors_asks_those_that_know_any_but_a_cpu_does_not(knowledge: tuple[Path, Path]):
    registry, op = Registry(knowledge[1]), make_op("gemm", m=3000, n=4096, k=4096)
    predictor = registry.find("gemm", DEVICE.id)
    assert predictor is not None
    registry.register(dataclasses.replace(predictor, device=dataclasses.replace(DEVICE, id="any"), backend="vllm"))
    h200, cpu = load_device("h200_sxm"), dataclasses.replace(DEVICE, id="cpu_x", vendor="cpu")
    for backend in (None, "vllm", "vllm-0.24.0:linear"):
        found = predict_ops([op], h200, build_engine(h200, [], [registry.root], backend=backend))[0]
        assert found.predictor == "gemm@vllm/any@1"
    assert predict_ops([op], h200, build_engine(h200, [], [registry.root], backend="nccl"))[0].engine == "analytical"
    assert predict_ops([op], cpu, build_engine(cpu, [], [registry.root]))[0].engine == "analytical"
    assert predict_ops([op], DEVICE, build_engine(DEVICE, [], [registry.root]))[0].predictor == "gemm@torch/h100_sxm@1"


def test_what_matrix_units_taught_does_not_answer_for_ordinary_lanes(knowledge: tuple[Path, Path]):
    engine = build_engine(DEVICE, [], [knowledge[1]])
    found = [
        predict_ops([make_op("gemm", m=3000, n=4096, k=4096, dtype=dtype)], DEVICE, engine)[0].engine
        for dtype in ("fp16", "fp32")
    ]
    assert found == ["learned", "analytical"]


def test_a_variant_of_a_device_is_answered_by_its_predictors_and_physics(root: Path):
    shipped = [root / "models" / "shipped"]
    ops = [make_op("copy", size_bytes=2**30, dtype="bf16"), make_op("gemm", m=4096, n=4096, k=4096, dtype="bf16")]
    own = ask(build_engine(load_device("h100_sxm"), [], shipped, ("learned", "analytical")), ops)
    variant = ask(build_engine(load_device("h100_96gb_hbm2e"), [], shipped, ("learned", "analytical")), ops)
    assert variant.predictor.tolist() == own.predictor.tolist()
    assert "h100_sxm" in variant.predictor[1]
    assert 1.2 < variant.latency_us[0] / own.latency_us[0] < 1.5  # memory bound: 3352 to 2400 GB/s
    assert variant.latency_us[1] == pytest.approx(own.latency_us[1], rel=0.05)  # compute bound


@pytest.mark.parametrize("figures", [{"compute_units": 66}, {"clock_mhz": 915.0}], ids=str)
@pytest.mark.parametrize("order", [("learned",), ("analytical",)], ids=str)
def test_half_the_units_or_clock_take_a_product_about_twice_as_long(
    root: Path, figures: dict[str, float], order: tuple[str, ...]
):
    """Peak rates of a data sheet hold at its units and clock: whoever asks for fewer gets less of them."""
    asked = overridden(load_device("h100_sxm"), figures)
    op, copy = make_op("gemm", m=4096, n=4096, k=4096), make_op("copy", size_bytes=2**30)
    whole, half = (
        ask(build_engine(device, [], [root / "models" / "shipped"], order), [op]).latency_us[0]
        for device in (load_device("h100_sxm"), asked)
    )
    assert 1.85 < half / whole < 2.15
    moved = [ask(build_engine(d, [], [], ["analytical"]), [copy]).latency_us[0] for d in (DEVICE, asked)]
    assert moved[1] == pytest.approx(moved[0], rel=0.01)  # the memory stays as it is


def test_a_device_that_may_draw_less_is_slower_by_the_law_of_power(root: Path):
    """Compute at half the watts, memory hardly, what was asked for more than the data sheet not at all."""
    product, copy = make_op("gemm", m=8192, n=8192, k=8192), make_op("copy", size_bytes=2**28)
    ring = make_op("all_reduce", size_bytes=2**26, ranks=8, ranks_per_node=8, link="nvlink")

    def at(watts: float) -> np.ndarray:
        device = overridden(load_device("h100_sxm"), {"tdp_w": watts})
        ops = [product, copy, ring]
        found = predict_ops(ops, device, build_engine(device, [], [root / "models" / "shipped"]))
        return np.array([each.latency_us for each in with_power(found, ops, device)])

    usual, more, less, least = at(700.0), at(900.0), at(350.0), at(250.0)
    assert np.array_equal(usual, more)
    assert 1.1 < less[0] / usual[0] < 2.3
    assert less[0] < least[0]
    assert (least >= less).all()
    assert least[2] == usual[2]
    with pytest.raises(power.PowerError, match="a cap of 90 W"):
        at(90.0)


def test_an_op_asked_again_takes_microseconds(knowledge: tuple[Path, Path]):
    engine = build_engine(DEVICE, [knowledge[0]], [knowledge[1]])
    op = make_op("gemm", m=3000, n=4096, k=4096)
    first = predict_ops([op, op], DEVICE, engine)
    assert first[0] == first[1] == predict_ops([op], DEVICE, engine)[0]
    assert predict_ops([op], DEVICE, engine, "cold")[0].cache == "cold"
    times = []
    for _ in range(100):
        began = time.process_time()
        predict_ops([op], DEVICE, engine)
        times.append(time.process_time() - began)
    assert np.median(times) < 1e-4


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize(("gpu", "cluster"), [("h100_sxm", "dgx_h100"), ("a100_sxm_80gb", "dgx_a100")])
def test_beyond_its_table_a_collective_goes_on_at_the_networks_rate(
    gpu: str, cluster: str, kind: str, ranks: int
) -> None:
    """One answer with and without a cluster, no jump at the table's end (512 MiB), and the network's in the end."""
    device, node = load_device(gpu), load_cluster(cluster)
    ops = [make_op(kind, size_bytes=2**29 * step // 4, ranks=ranks, ranks_per_node=ranks) for step in range(4, 65, 2)]
    alone, joined, formula = (
        ask(engine, ops).latency_us
        for engine in (
            build_engine(device, [], [SHIPPED]),
            build_engine(device, [], [SHIPPED], cluster=node),
            build_engine(device, [], [SHIPPED], cluster=node, order=["network", "learned", "analytical"]),
        )
    )
    assert np.allclose(alone, joined)
    assert np.all(np.diff(alone) > 0)
    size = np.array([op.dims[0] for op in ops])
    rate = size / alone
    assert np.all(np.abs(np.diff(np.log(rate))) < 0.12)  # of half of the table's end more each
    assert abs(np.log(alone[-1] / formula[-1])) < 0.05


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_beyond_the_most_ranks_of_its_table_a_collective_grows_as_the_networks_does(kind: str) -> None:
    """GB200's tables end at four GPUs, its NVLink domain at 72: what was measured stays the base of what follows."""
    device, rack = load_device("gb200"), load_cluster("gb200_nvl72")
    sizes = 2 ** np.arange(14, 31, 2)
    by_ranks = {
        ranks: [make_op(kind, size_bytes=int(size), ranks=ranks, ranks_per_node=ranks) for size in sizes]
        for ranks in (4, 8, 16, 72)
    }
    engine = build_engine(device, [], [SHIPPED], cluster=rack)
    network = build_engine(device, [], [SHIPPED], cluster=rack, order=["network"])
    known, law = ask(engine, by_ranks[4]), ask(network, by_ranks[4])
    assert (np.asarray(known.engine) == "learned").all()
    for ranks in (8, 16, 72):
        answer, formula = ask(engine, by_ranks[ranks]), ask(network, by_ranks[ranks])
        assert (np.asarray(answer.engine) == "learned").all()
        small = sizes <= 2**28
        assert np.allclose((answer.latency_us / known.latency_us)[small], (formula.latency_us / law.latency_us)[small])
        assert (answer.low_us <= answer.latency_us).all()
        assert (answer.high_us / answer.latency_us >= 0.999 * formula.high_us / formula.latency_us)[small].all()


def test_another_labs_table_has_a_wider_interval_than_ones_own(knowledge: tuple[Path, Path]) -> None:
    """What shipped predictors learned from was timed elsewhere; rows of one's own machine are the machine."""
    op = make_op("gemm", m=3000, n=4096, k=4096)
    own = ask(build_engine(DEVICE, [], [knowledge[1]], order=["learned"]), [op])
    theirs = ask(build_engine(DEVICE, [], [SHIPPED], order=["learned"]), [op])
    known = Registry(knowledge[1]).find("gemm", DEVICE.id)
    assert known is not None
    columns = {name: np.array([size]) for name, size in zip(KINDS["gemm"].names, op.dims, strict=True)}
    assert own.high_us == pytest.approx(known.predict(columns, "bf16").high_us)
    assert np.log(theirs.high_us / theirs.latency_us) >= labs.widths()["gemm"][2]
    assert np.log(theirs.latency_us / theirs.low_us) >= labs.widths()["gemm"][2]
