"""Profiler traces: a kernel finds its operator, the operator its op; the rest is counted by name and reason."""

from __future__ import annotations

import gzip
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opcast.datasets.ops import KINDS, LINKS
from opcast.datasets.sources import kineto
from opcast.datasets.sources.importing import ImportReport, SourceError, import_into
from opcast.datasets.sources.kineto_ops import MAPPED, Unmapped, op_of
from opcast.datasets.sources.options import ImportOptions
from opcast.datasets.store import Store

H100 = "NVIDIA H100 80GB HBM3"
F32, BF16 = "float", "c10::BFloat16"
SGEMM = "ampere_sgemm_128x64_nn"
Event = dict[str, Any]


class Recorder:
    """Writes a trace: operators one after another on one thread, each with the kernels that it launches."""

    def __init__(self, legacy: bool = False) -> None:
        self.events: list[Event] = [{"ph": "M", "name": "process_name"}, {"ph": "i", "name": "mark", "s": "g"}]
        self.now, self.correlation, self.legacy = 1000.0, 0, legacy

    def event(self, category: str, name: str, start: float, length: float, tid: int = 1, **arguments: Any) -> Event:
        old = {"cpu_op": "Operator", "kernel": "Kernel", "cuda_runtime": "Runtime"}
        cat = old[category] if self.legacy else category
        made = {
            "ph": "X",
            "cat": cat,
            "name": name,
            "pid": 7,
            "tid": tid,
            "ts": start,
            "dur": length,
            "args": arguments,
        }
        self.events.append(made)
        return made

    def operator(
        self,
        name: str,
        dims: list[Any],
        types: list[str] | None = None,
        kernels: list[tuple[str, float]] | None = None,
        inside: str = "",
        **arguments: Any,
    ) -> None:
        """One call; ``inside`` wraps it into an operator without kernels of its own."""
        start, launched = self.now, kernels if kernels is not None else [(SGEMM, 50.0)]
        length = 10.0 * (len(launched) + 2)
        if inside:
            self.event("cpu_op", inside, start - 1, length + 2, **{"Input Dims": dims})
        given = {"Input Dims": dims, "Input type": types if types is not None else [BF16] * len(dims)}
        self.event("cpu_op", name, start, length, **{k: v for k, v in given.items() if v}, **arguments)
        for place, (kernel, microseconds) in enumerate(launched):
            self.kernel(kernel, microseconds, start + 10.0 * (place + 1))
        self.now += length + 5

    def kernel(self, name: str, microseconds: float, launched: float | None = None, **arguments: Any) -> None:
        """A kernel and, where it was launched by the host, the launch."""
        self.correlation += 1
        if launched is not None:
            self.event("cuda_runtime", "cudaLaunchKernel", launched, 3.0, correlation=self.correlation)
        self.event(
            "kernel", name, self.now + 500, microseconds, 99, device=0, correlation=self.correlation, **arguments
        )

    def write(self, file: Path, device: str = H100, **more: Any) -> Path:
        trace = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": device}],
            "traceEvents": self.events,
            **more,
        }
        data = json.dumps(trace).encode()
        file.write_bytes(gzip.compress(data) if file.suffix == ".gz" else data)
        return file


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def imported(store: Store, recorder: Recorder, tmp_path: Path, **options: str) -> ImportReport:
    return import_into(store, "kineto", recorder.write(tmp_path / "trace.json"), ImportOptions(**options))


def only(store: Store, kind: str) -> dict[str, Any]:
    """The one row of a kind."""
    (row,) = store.read(kind).to_pylist()
    return row


@pytest.mark.parametrize(
    ("name", "dims", "expected"),
    [
        ("aten::mm", [[512, 768], [768, 1024]], (1, 512, 1024, 768)),
        ("aten::addmm", [[1024], [512, 768], [768, 1024], [], []], (1, 512, 1024, 768)),
        ("aten::bmm", [[16, 128, 64], [16, 64, 256]], (16, 128, 256, 64)),
        ("aten::baddbmm", [[16, 128, 256], [16, 128, 64], [16, 64, 256]], (16, 128, 256, 64)),
        ("aten::linear", [[2, 256, 768], [1024, 768], [1024]], (1, 512, 1024, 768)),
    ],
)
def test_products(
    store: Store, recorder: Recorder, tmp_path: Path, name: str, dims: list[Any], expected: tuple[int, ...]
) -> None:
    recorder.operator(name, dims)
    imported(store, recorder, tmp_path)
    row = only(store, "gemm")
    assert (row["batch"], row["m"], row["n"], row["k"]) == expected
    assert (row["latency_us"], row["dtype"], row["device_id"]) == (50.0, "bf16", "h100_sxm")


@pytest.mark.parametrize(
    ("strides", "kernel", "layout"),
    [
        ([[768, 1], [1, 768]], "x", "nt"),
        ([[768, 1], [1024, 1]], "x", "nn"),
        ([[1, 512], [1024, 1]], "x", "tn"),
        ([], "sm80_xmma_gemm_f32_tn_n", "nt"),
        ([], "ampere_sgemm_64x32_nn", "nn"),
        ([], "volta_sgemm_128x64_nt", "tn"),
    ],
)
def test_layouts(
    store: Store, recorder: Recorder, tmp_path: Path, strides: list[Any], kernel: str, layout: str
) -> None:
    more = {"Input Strides": strides} if strides else {}
    recorder.operator("aten::mm", [[512, 768], [768, 1024]], kernels=[(kernel, 50.0)], **more)
    imported(store, recorder, tmp_path)
    assert ("nn", "nt", "tn")[only(store, "gemm")["layout"]] == layout


def test_fp32_on_tensor_cores_is_tf32(store: Store, recorder: Recorder, tmp_path: Path) -> None:
    tensor = "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x128_16x4_nn_align4>"
    recorder.operator("aten::mm", [[512, 768], [768, 1024]], [F32, F32], [(tensor, 20.0)])
    recorder.operator("aten::mm", [[512, 768], [768, 512]], [F32, F32], [(SGEMM, 50.0)])
    imported(store, recorder, tmp_path)
    found = {(row["n"], row["dtype"], row["out_dtype"]) for row in store.read("gemm").to_pylist()}
    assert found == {(1024, "tf32", "fp32"), (512, "fp32", "fp32")}


def test_the_innermost_operator_has_the_kernel_and_all_of_its_kernels(
    store: Store, recorder: Recorder, tmp_path: Path
) -> None:
    recorder.operator(
        "aten::mm", [[64, 8192], [8192, 64]], kernels=[("splitK", 30.0), ("reduce", 5.0)], inside="aten::linear"
    )
    imported(store, recorder, tmp_path)
    row = only(store, "gemm")
    assert (row["m"], row["k"], row["latency_us"]) == (64, 8192, 35.0)


def test_calls_of_one_shape_are_repeats(store: Store, recorder: Recorder, tmp_path: Path) -> None:
    for microseconds in (50.0, 52.0, 60.0):
        recorder.operator("aten::mm", [[512, 768], [768, 1024]], kernels=[(SGEMM, microseconds)])
    report = imported(store, recorder, tmp_path)
    row = only(store, "gemm")
    assert (row["latency_us"], row["latency_min_us"], row["iterations"], report.merged) == (52.0, 50.0, 3, 2)


def test_a_launch_on_another_thread_finds_no_operator_here(store: Store, recorder: Recorder, tmp_path: Path) -> None:
    recorder.operator("aten::mm", [[512, 768], [768, 1024]])
    recorder.operator("aten::mm", [[512, 768], [768, 512]])
    recorder.events[-2]["tid"] = 2
    report = imported(store, recorder, tmp_path)
    assert only(store, "gemm")["n"] == 1024
    assert [(r.rows, r.reason.split(":")[0]) for r in report.rejected] == [(1, "kernels")]


@pytest.mark.parametrize(
    ("name", "dims", "concrete", "causal"),
    [
        (
            "aten::_flash_attention_forward",
            [[2, 512, 16, 64], [2, 512, 4, 64], [2, 512, 4, 64], [], []],
            ["", "", "", "", "", "512", "512", "0.", "True", "False"],
            1,
        ),
        (
            "aten::_scaled_dot_product_flash_attention",
            [[2, 16, 512, 64], [2, 4, 512, 64], [2, 4, 512, 64], []],
            ["", "", "", "0.", "False", "False"],
            0,
        ),
        (
            "aten::_efficient_attention_forward",
            [[2, 512, 16, 64], [2, 512, 4, 64], [2, 512, 4, 64], [], [], []],
            ["", "", "", "", "", "", "512", "512", "0.", "1"],
            1,
        ),
    ],
)
def test_attention(
    store: Store, recorder: Recorder, tmp_path: Path, name: str, dims: list[Any], concrete: list[str], causal: int
) -> None:
    recorder.operator(name, dims, **{"Concrete Inputs": concrete})
    imported(store, recorder, tmp_path)
    row = only(store, "attention_prefill")
    assert (row["batch"], row["heads_q"], row["heads_kv"], row["seq_q"], row["seq_kv"]) == (2, 16, 4, 512, 512)
    assert (row["head_dim"], row["v_head_dim"], row["causal"]) == (64, 64, causal)


def test_one_query_is_decoding(store: Store, recorder: Recorder, tmp_path: Path) -> None:
    dims = [[2, 16, 1, 64], [2, 4, 512, 64], [2, 4, 512, 64], []]
    concrete = {"Concrete Inputs": ["", "", "", "0.", "False"]}
    recorder.operator("aten::_scaled_dot_product_flash_attention", dims, **concrete)
    imported(store, recorder, tmp_path)
    assert only(store, "attention_decode")["seq_kv"] == 512


def test_rows_and_elements(store: Store, recorder: Recorder, tmp_path: Path) -> None:
    recorder.operator("aten::native_layer_norm", [[4, 512, 1024], [], [1024], [1024], []])
    recorder.operator("_C::rms_norm", [[2048, 4096], [2048, 4096], [4096], []])
    recorder.operator("aten::_softmax", [[8, 512, 512], [], []], **{"Concrete Inputs": ["", "-1", "False"]})
    recorder.operator("aten::add", [[2048, 4096], [2048, 4096], []])
    recorder.operator("aten::mul", [[2048, 1024], [1024], []])
    recorder.operator("aten::silu", [[2048, 2048]])
    rope = {"Concrete Inputs": ["", "", "", "128", "", "True"]}
    recorder.operator("_C::rotary_embedding", [[2048], [2048, 4096], [2048, 1024], [], [], []], **rope)
    imported(store, recorder, tmp_path)
    norm, rms, soft = only(store, "layer_norm"), only(store, "rms_norm"), only(store, "softmax")
    assert (norm["rows"], norm["cols"], rms["rows"], rms["cols"]) == (2048, 1024, 2048, 4096)
    assert (soft["rows"], soft["cols"]) == (4096, 512)
    elements = {(row["numel"], row["inputs"], row["fn"]) for row in store.read("elementwise").to_pylist()}
    assert elements == {(2048 * 4096, 2, 0), (2048 * 1024, 1, 0), (2048 * 2048, 1, 2)}
    assert (only(store, "rope")["heads"], only(store, "rope")["head_dim"]) == (40, 128)
    assert only(store, "rms_norm")["backend"] == "vllm:vllm"


def test_casts_and_reductions(store: Store, recorder: Recorder, tmp_path: Path) -> None:
    dense = {"Input Strides": [[4096, 1], [4096, 1], []]}
    recorder.operator("aten::copy_", [[512, 4096], [512, 4096], []], [BF16, F32, "Scalar"], **dense)
    recorder.operator("aten::sum", [[64, 128, 4096], [], []], **{"Concrete Inputs": ["", "[0, 1]", "False"]})
    imported(store, recorder, tmp_path)
    cast, summed = only(store, "elementwise"), only(store, "reduce")
    assert (cast["numel"], cast["fn"], cast["dtype"], cast["out_dtype"]) == (512 * 4096, 3, "fp32", "bf16")
    assert (summed["outer"], summed["length"], summed["inner"]) == (1, 8192, 4096)


@pytest.mark.parametrize(
    ("name", "dims", "more", "reason"),
    [
        ("aten::cudnn_convolution", [[8, 3, 224, 224]], {}, "no op kind"),
        ("aten::mm", [[512, 768], [512, 768]], {}, "mismatched"),
        ("aten::mm", [[0, 768], [768, 512]], {}, "empty"),
        ("aten::mm", [[512, 768], [768, 1024]], {"types": ["weird", "weird"]}, "type 'weird'"),
        ("aten::mm", [[512, 768], [768, 1024]], {"types": []}, "types were not recorded"),
        ("aten::add", [[512, 512], [512, 512]], {"types": [BF16, F32]}, "two types"),
        ("aten::add", [[512, 512], [512, 512]], {"Input Strides": [[1, 512], [512, 1]]}, "not contiguous"),
        ("aten::add", [[], []], {}, "without a shape"),
        ("aten::_softmax", [[8, 8], [], []], {"Concrete Inputs": ["", "0", "False"]}, "another axis"),
        ("aten::_flash_attention_forward", [[512, 16, 64]] * 3 + [[9], [9]], {}, "several lengths"),
        ("aten::_scaled_dot_product_flash_attention", [[2, 16, 512, 64]] * 3, {}, "not recorded"),
        ("aten::_scaled_dot_product_efficient_attention", [[2, 16, 512, 64]] * 3 + [[2, 16, 512, 512]], {}, "mask"),
    ],
)
def test_what_is_no_op_is_counted_by_name(
    store: Store, recorder: Recorder, tmp_path: Path, name: str, dims: list[Any], more: Any, reason: str
) -> None:
    recorder.operator("aten::mm", [[512, 768], [768, 2048]])
    for _ in range(2):
        recorder.operator(name, dims, **more)
    report = imported(store, recorder, tmp_path)
    assert [r.rows for r in report.rejected] == [2]
    assert report.rejected[0].reason.startswith(f"{name}: ")
    assert reason in report.rejected[0].reason
    assert only(store, "gemm")["n"] == 2048


def nccl(name: str = "allreduce", **changes: Any) -> dict[str, Any]:
    """Arguments of an NCCL kernel."""
    sizes = {"In msg nelems": 1 << 20, "Out msg nelems": 8 << 20, "Group size": 8, "dtype": "BFloat16"}
    splits = {"In split size": "[]", "Out split size": "[]", "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]"}
    return {"Collective name": name, **sizes, **splits, **changes}


@pytest.mark.parametrize(
    ("name", "kind", "size"),
    [
        ("allreduce", "all_reduce", 2 << 20),
        ("_allgather_base", "all_gather", 16 << 20),
        ("_reduce_scatter_base", "reduce_scatter", 2 << 20),
        ("all_to_allv", "all_to_all", 2 << 20),
        ("broadcast", "broadcast", 2 << 20),
    ],
)
def test_collectives(store: Store, recorder: Recorder, tmp_path: Path, name: str, kind: str, size: int) -> None:
    recorder.kernel("ncclDevKernel_X(args)", 500.0, **nccl(name))
    properties = [{"id": i, "name": H100} for i in range(8)]
    file = recorder.write(
        tmp_path / "trace.json", deviceProperties=properties, distributedInfo={"nccl_version": "2.21.5"}
    )
    import_into(store, "kineto", file)
    row = only(store, kind)
    assert (row["size_bytes"], row["ranks"], row["ranks_per_node"], LINKS[row["link"]]) == (size, 8, 8, "nvlink")
    assert (row["dtype"], row["backend"], row["nccl"]) == ("bf16", "nccl-2.21.5:nccl", "2.21.5")


def test_a_group_over_nodes(store: Store, recorder: Recorder, tmp_path: Path) -> None:
    recorder.kernel("ncclDevKernel_X(args)", 900.0, **nccl(**{"Group size": 2, "Process Group Ranks": "[0, 8]"}))
    file = recorder.write(tmp_path / "t.json", deviceProperties=[{"id": i, "name": H100} for i in range(8)])
    import_into(store, "kineto", file)
    row = only(store, "all_reduce")
    assert (row["ranks"], row["ranks_per_node"], LINKS[row["link"]]) == (2, 1, "ib")


def test_nccl_kernels_that_tell_too_little_are_counted(store: Store, recorder: Recorder, tmp_path: Path) -> None:
    recorder.operator("aten::mm", [[512, 768], [768, 1024]])
    recorder.kernel("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWork*)", 50.0)
    recorder.kernel("ncclDevKernel_X(args)", 50.0, **nccl("all_to_allv", **{"In split size": "[1, 2]"}))
    recorder.kernel("ncclDevKernel_X(args)", 50.0, **nccl("gather"))
    report = imported(store, recorder, tmp_path)
    reasons = sorted(r.reason for r in report.rejected)
    assert reasons == [
        "NCCL's all_to_allv: uneven splits",
        "NCCL's gather: no op kind for it",
        "an NCCL kernel without its arguments",
    ]


def test_the_categories_of_2021(store: Store, tmp_path: Path) -> None:
    recorder = Recorder(legacy=True)
    recorder.operator("aten::mm", [[512, 768], [768, 1024]], [F32, F32])
    import_into(store, "kineto", recorder.write(tmp_path / "old.pt.trace.json.gz", "Tesla V100-SXM2-32GB"))
    assert (only(store, "gemm")["device_id"], only(store, "gemm")["dtype"]) == ("v100_sxm", "fp32")


def test_time_is_that_of_the_trace(store: Store, recorder: Recorder, tmp_path: Path) -> None:
    recorder.operator("aten::mm", [[512, 768], [768, 1024]])
    file = recorder.write(tmp_path / "t.json", baseTimeNanoseconds=1751410836000000000)
    import_into(store, "kineto", file)
    assert only(store, "gemm")["measured_at"].isoformat() == "2025-07-01T23:00:36+00:00"


def test_a_gpu_that_is_not_known_is_called_as_it_is_printed(store: Store, recorder: Recorder, tmp_path: Path) -> None:
    recorder.operator("aten::mm", [[512, 768], [768, 1024]])
    file = recorder.write(tmp_path / "t.json", device="AMD Radeon Graphics")
    with pytest.raises(SourceError, match=r"'AMD Radeon Graphics'.* device=…"):
        import_into(store, "kineto", file)
    assert store.devices() == []


def test_a_trace_that_names_no_device_asks_for_it(store: Store, recorder: Recorder, tmp_path: Path) -> None:
    recorder.operator("aten::mm", [[512, 768], [768, 1024]])
    file = recorder.write(tmp_path / "t.json", device="")
    with pytest.raises(SourceError, match="say device="):
        import_into(store, "kineto", file)
    import_into(store, "kineto", file, ImportOptions(device="mi300x"))
    with pytest.raises(SourceError, match=r"calls itself 'AMD Radeon Graphics'.*say device="):
        import_into(store, "kineto", recorder.write(tmp_path / "u.json", device="AMD Radeon Graphics"))
    assert store.devices() == ["mi300x"]


def test_a_trace_without_shapes_or_kernels_says_how_to_record_it(store: Store, tmp_path: Path) -> None:
    bare = Recorder()
    bare.operator("aten::mm", [], [])
    with pytest.raises(SourceError, match="record_shapes=True"):
        imported(store, bare, tmp_path)
    host = Recorder()
    host.operator("aten::mm", [[2, 2], [2, 2]], kernels=[])
    with pytest.raises(SourceError, match=r"has no kernels.*CUDA activities"):
        imported(store, host, tmp_path)


def test_truncated_and_foreign_files(store: Store, recorder: Recorder, tmp_path: Path) -> None:
    recorder.operator("aten::mm", [[512, 768], [768, 1024]])
    whole = recorder.write(tmp_path / "a.json.gz").read_bytes()
    plain = gzip.decompress(whole)
    for name, data in (("b.json.gz", whole[:-30]), ("c.json", plain[:-30]), ("d.json", b"[1]"), ("e.json", b"{}")):
        (tmp_path / name).write_bytes(data)
    report = import_into(store, "kineto", tmp_path)
    assert report.rows_written == 1
    reasons = sorted(r.reason for r in report.rejected)
    assert len(reasons) == 4
    assert sum("truncated" in reason for reason in reasons) == 2
    assert sum("no traceEvents" in reason for reason in reasons) == 2


ANY = st.recursive(
    st.none() | st.integers(-2, 5) | st.sampled_from(["", "0", "True", F32, BF16, "[0]"]),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)


SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=4), max_size=6)
ARGUMENTS = {"Input Dims": SHAPES | ANY, "Input Strides": SHAPES | ANY, "Input type": ANY, "Concrete Inputs": ANY}


@given(st.sampled_from(sorted(MAPPED)), st.fixed_dictionaries(ARGUMENTS))
def test_arguments_of_any_form_are_an_op_or_a_reason(name: str, arguments: dict[str, Any]) -> None:
    recorder = Recorder()
    recorder.event("cpu_op", name, 10, 20, **arguments)
    recorder.kernel("k", 1.0, launched=15)
    events = kineto.spans({"traceEvents": recorder.events})
    ((call, _, _),) = kineto.operator_calls(events, [event for event in events if event["cat"] == "kernel"])
    with suppress(Unmapped):
        found = op_of(call)
        assert set(found.dims) <= set(KINDS[found.kind].names)


def test_events_of_another_form_are_passed_over(store: Store, recorder: Recorder, tmp_path: Path) -> None:
    recorder.operator("aten::mm", [[512, 768], [768, 1024]])
    recorder.events += [
        {"ph": "X", "cat": "kernel"},
        {"ph": "X", "cat": "cpu_op", "ts": "soon", "dur": 1},
        {"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 1, "args": None},
        {"ph": "X", "cat": "cpu_op", "name": None, "ts": 1, "dur": 1, "args": {"Input Dims": 3}},
    ]
    assert imported(store, recorder, tmp_path).rows_written == 1


@st.composite
def nested_operators(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Intervals on one thread, each inside another or beside it."""
    spans: list[tuple[int, int]] = []

    def fill(low: int, high: int, depth: int) -> None:
        while high - low >= 2 and draw(st.booleans()):
            start = draw(st.integers(low, high - 2))
            end = draw(st.integers(start + 2, high))
            spans.append((start, end))
            if depth < 3:
                fill(start + 1, end - 1, depth + 1)
            low = end + 1

    fill(0, 60, 0)
    return draw(st.permutations(spans))


@given(nested_operators(), st.integers(0, 60))
def test_a_launch_belongs_to_the_shortest_operator_around_it(spans: list[tuple[int, int]], launch: int) -> None:
    recorder = Recorder()
    for start, end in spans:
        recorder.event("cpu_op", f"{start}-{end}", start, end - start, **{"Input Dims": [[1]]})
    recorder.kernel("k", 1.0, launched=launch)
    events = kineto.spans({"traceEvents": recorder.events})
    ((call, _, _),) = kineto.operator_calls(events, [event for event in events if event["cat"] == "kernel"])
    around = [(end - start, -start, f"{start}-{end}") for start, end in spans if start <= launch <= end]
    assert call.name == (min(around)[2] if around else "")


TRACES = {
    "H100_Qwen1.5-0.5B": "tracelens/h100_Qwen_Qwen1.5-0.5B-Chat__1016005",
    "H100_bert-small": "tracelens/h100_gaunernst_bert-small-uncased__1016001",
    "H100_owlv2-large": "tracelens/h100_google_owlv2-large-patch14-ensemble__1016001",
    "H100_timesformer": "tracelens/h100_facebook_timesformer-base-finetuned-k400__1016002",
    "H100_vit-nsfw": "tracelens/h100_Falconsai_nsfw_image_detection__1016002",
    "A100_hta_ctrl": "hta/trace_diff_control_a100",
    "V100_hta_test": "hta/trace_diff_test_v100",
    "B200_eager": "tracelens/b200_vllm_tp8_eager_trace",
    "MI300X_Qwen1.5-0.5B": "tracelens/mi300x_Qwen_Qwen1.5-0.5B-Chat__1016005",
    "MI300X_sglang_Qwen3-8B_prefill": "tracelens/sglang_Qwen3-8B_prefilldecode",
    "MI300X_torch_compile": "tracelens/mi300x_torch_compile_triton",
}


@pytest.mark.reference
@pytest.mark.parametrize("source", TRACES)
def test_products_agree_with_those_derived_by_others(source: str, reference_data: Path) -> None:
    """Number of calls and median time of every product, of every trace: 220 of 220 rows."""
    import pandas as pd

    folder = reference_data / "data" / "traces"
    table = pd.read_csv(folder / "gemm_measurements.csv")
    spans = kineto.spans(kineto.load(folder / f"{TRACES[source]}.json.gz"))
    kernels = [e for e in spans if e.get("cat") in kineto.KERNELS and not kineto.is_collective(e)]
    found: dict[tuple[object, ...], list[float]] = {}
    for call, microseconds, _ in kineto.operator_calls(spans, kernels):
        if call.name in ("aten::mm", "aten::addmm", "aten::bmm"):
            dims = kineto.op_of(call).dims
            key = (call.name, *(dims[name] for name in ("batch", "m", "n", "k")))
            found.setdefault(key, []).append(microseconds)
    expected = table[table.source == source]
    assert len(expected) > 0
    for row in expected.itertuples():
        times = found[row.op, row.batch, row.M, row.N, row.K]
        assert len(times) == row.calls
        assert np.median(times) == pytest.approx(row.median_us, abs=0.006)
