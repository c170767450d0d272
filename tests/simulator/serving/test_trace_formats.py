"""Files of real traffic: each family gives the same two requests, and a bad file is one line with row and column."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from opcast.jobs.cli import main
from opcast.simulator.question.canonical import RequestError
from opcast.simulator.question.traffic import Lengths, RequestTraffic
from opcast.simulator.serving.requests import stream
from opcast.simulator.serving.trace_formats.rows import RequestTraceError


def lines(*records: dict[str, Any]) -> str:
    return "\n".join(json.dumps(record) for record in records) + "\n"


def conversation(*texts: str) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": "human", "value": text} for text in texts]}


OWN = "arrival_s,input_tokens,output_tokens\n"
OWN_ROW: dict[str, Any] = {"arrival_s": 0, "input_tokens": 5, "output_tokens": 5}
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
BURST_2 = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
GUIDE = [
    {"request_start_time": 6.5, "prompt_tokens": 200, "output_tokens": 20},
    {"start_time": 6.0, "prompt_tokens": 100, "output_tokens": 10},
]
GUIDE_NEW = [
    {
        "info": {"timings": {"request_start": 6.0 + place / 2}},
        "input_metrics": {"text_tokens": 100 * (place + 1)},
        "output_metrics": {"text_tokens": 10 * (place + 1)},
    }
    for place in range(2)
]


def aiperf(start_ns: int, prompt: int, answer: int, **more: Any) -> dict[str, Any]:
    metrics = {
        "input_sequence_length": {"value": prompt},
        "output_sequence_length": {"value": answer, "unit": "tokens"},
    }
    about = {"request_start_ns": start_ns, "benchmark_phase": "profiling"} | more
    return {"metadata": about, "metrics": metrics, "error": None}


def log(created: Any, prompt: int, answer: int) -> dict[str, Any]:
    return {"created": created, "usage": {"prompt_tokens": prompt, "completion_tokens": answer}, "user": "somebody"}


WITH_TIMES = {
    "burst_v1.csv": BURST + "5,ChatGPT,100,10,110,Conversation log\n5.5,ChatGPT,200,20,220,API log\n",
    "burst_v2.csv": BURST_2 + "5.0,a-b,43,GPT-4,100,10,110,API log\n5.5,c,2,GPT-4,200,20,220,API log\n",
    "azure_2024.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,100,10\n"
    "2024-05-10 00:00:00.509930+00:00,200,20\n",
    "vllm.json": json.dumps({"completed": 2, "input_lens": [200, 100], "output_lens": [20, 10], "errors": ["", ""],
                             "start_times": [7.5, 7.0], "ttfts": [0.1, 0.1]}),
    "guidellm.json": json.dumps({"benchmarks": [{"requests": {"successful": GUIDE, "errored": []}}]}),
    "guidellm_new.json": json.dumps({"benchmarks": [{"requests": {"successful": GUIDE_NEW}}]}),
    "aiperf.jsonl": lines(aiperf(10**18, 100, 10), aiperf(10**18 + 5 * 10**8, 200, 20)),
    "inference_perf.json": json.dumps([
        {"start_time": 3.0, "end_time": 4.0, "info": {"input_tokens": 100, "output_tokens": 10}, "error": None},
        {"start_time": 3.5, "info": {"request_metrics": {"text": {"input_tokens": 200}},
                                     "response_metrics": {"output_tokens": 20}}},
    ]),
    "openai.jsonl": lines(log(1700000000.5, 200, 20), log(1700000000, 100, 10)),
    "gateway.csv": "startTime,prompt_tokens,completion_tokens\n2026-01-01T00:00:00Z,100,10\n"
    "2026-01-01T00:00:00.5Z,200,20\n",
    "epoch_ms.jsonl": lines({"ts": 1700000000000, "input_tokens": 100, "output_tokens": 10},
                            {"ts": 1700000000500, "input_tokens": 200, "output_tokens": 20}),
}  # fmt: skip


@pytest.mark.parametrize("name", WITH_TIMES)
def test_a_family_is_told_by_its_own_names(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(WITH_TIMES[name])
    found = stream(RequestTraffic(trace=str(tmp_path / name)))
    (requests,) = found.chunks
    assert requests.arrival_us.tolist() == pytest.approx([0, 500_000], abs=1)
    assert requests.input.tolist() == [100, 200]
    assert requests.output.tolist() == [10, 20]
    assert not found.notes
    for setting in ("requests", "rate"):
        with pytest.raises(RequestError, match=f"traffic.{setting} makes requests"):
            stream(RequestTraffic(trace=str(tmp_path / name), **{setting: 7}))
    with pytest.raises(RequestError, match=r"traffic.arrival=gamma is not read"):
        stream(RequestTraffic(trace=str(tmp_path / name), arrival="gamma"))


WITHOUT_TIMES = {
    "sharegpt.json": json.dumps([conversation("x" * 397, "y" * 40, "z"), conversation("x" * 800, "y" * 80)]),
    "sglang.jsonl": lines(
        {"backend": "sglang", "input_lens": [100, 200], "output_lens": [10, 20], "ttfts": [0.1, 0.2]}
    ),
}


@pytest.mark.parametrize("name", WITHOUT_TIMES)
def test_lengths_alone_come_at_a_rate(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(WITHOUT_TIMES[name])
    trace = str(tmp_path / name)
    found = stream(RequestTraffic(trace=trace, arrival="constant", rate=4.0))
    (requests,) = found.chunks
    assert requests.arrival_us.tolist() == [0, 250_000]
    assert requests.input.tolist() == [100, 200]
    assert requests.output.tolist() == [10, 20]
    assert "requests come as traffic.arrival and traffic.rate say" in found.notes[-1]
    assert stream(RequestTraffic(trace=trace, requests=1)).requests == 1
    with pytest.raises(RequestError, match=r"traffic.input makes requests"):
        RequestTraffic(trace=trace, input=Lengths(mean=3))


def test_a_tokenizer_counts_the_texts_of_sharegpt(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    counter = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    counter.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    counter.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat.json").write_text(json.dumps([conversation("how long is it", "three words only")]))
    traffic = RequestTraffic(trace=str(tmp_path / "chat.json"), tokenizer=str(tmp_path / "tokenizer.json"))
    (requests,) = stream(traffic).chunks
    assert (requests.input.tolist(), requests.output.tolist()) == ([4], [3])
    with pytest.raises(RequestTraceError, match=r"is no file: name the tokenizer.json"):
        stream(RequestTraffic(trace=traffic.trace, tokenizer="none.json"))


def test_what_is_left_out_or_not_simulated_is_said(tmp_path: Path) -> None:
    files = {
        "burst.csv": (BURST + "5,GPT-3,9,1,10,x\n6,GPT-4,9,0,9,x\n7,GPT-4,9,9,18,x\n", "1 of 3 requests are left out"),
        "lmm.csv": ("TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n"
                    "2025-01-01 00:00:00,2,90,5\n2025-01-01 00:00:01,0,9,5\n",
                    "1 of 2 requests have images (2 in all): their encoder is not simulated"),
        "aiperf.jsonl": (lines(aiperf(5, 9, 9), aiperf(6, 9, 9) | {"error": {"code": 500}},
                               aiperf(1, 9, 9, benchmark_phase="warmup")),
                         "1 of 2 requests are left out: they are of the warm-up"),
        "bench.json": (json.dumps({"input_lens": [9, 9], "output_lens": [9, 0], "start_times": [1, 2]}),
                       "1 of 2 requests are left out: they failed"),
    }  # fmt: skip
    for name, (text, said) in files.items():
        (tmp_path / name).write_text(text)
        assert any(said in note for note in stream(RequestTraffic(trace=str(tmp_path / name))).notes), name


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("burst.csv", BURST + "5,GPT-4,9,1,10,x\n6,GPT-4,ten,1,11,x\n", "row 2: Request tokens=ten is no number"),
        ("burst.csv", BURST + "5,GPT-4,1,0,1,x\n6,GPT-4,1,1,2,x\n7,GPT-4,1.5,1,2,x\n", "row 3: Request tokens=1.5"),
        ("chat.json", json.dumps([{"conversations": "hello"}]), "row 1: conversations=hello must be a list"),
        ("chat.json", json.dumps([conversation("a", "b"), {"conversations": [{}]}]), "row 2: conversations="),
        ("chat.json", json.dumps([conversation("a")]), "none of its 1 requests is left: no first prompt"),
        ("sums.json", json.dumps({"completed": 5, "total_input_tokens": 9}), "run the benchmark with --save-detailed"),
        ("runs.jsonl", lines({"input_lens": [1]}, {"input_lens": [1]}), "has 2 runs: keep the line of one run"),
        ("cut.json", json.dumps({"input_lens": [1, 2], "output_lens": [1]}), "lists of unlike lengths"),
        ("guide.json", json.dumps({"benchmarks": [{}, {}]}), "has 2 benchmarks: keep one"),
        ("guide.json", json.dumps({"benchmarks": [{"requests": {"successful": []}}]}), "no request that was answered"),
        ("air.jsonl", lines(aiperf(5, 9, 9), aiperf(6, "x", 9)), "row 2: input_sequence_length=x is no number"),  # type: ignore[arg-type]
        ("log.jsonl", lines(log("2026-01-01T00:00:00Z", 5, 5), log("noon", 5, 5)), "row 2: time=noon is no time"),
        ("log.jsonl", lines(log("2026-01-01T00:00:00Z", 5, 5), log(1767225601, 5, 5)),
         "is a number, the first is a date"),
        ("own.csv", OWN + "1767225600,5,5\n2026-01-01T00:00:01Z,5,5\n",
         "row 2: arrival_s=2026-01-01T00:00:01Z is a date"),
        ("own.csv", OWN + "100000000000000,5,5\n", "row 1: arrival_s=100000000000000 is later than 1e+11 s"),
        ("own.jsonl", lines(OWN_ROW | {"arrival_s": 1e308}), "row 1: arrival_s=1e+308 is later than"),
        ("own.jsonl", lines(OWN_ROW, OWN_ROW | {"input_tokens": True}), "row 2: input_tokens=True is no number"),
        ("own.jsonl", lines(OWN_ROW | {"arrival_s": False}), "row 1: arrival_s=False is no number"),
        ("own.jsonl", lines(OWN_ROW | {"input_tokens": [5]}), "row 1: input_tokens=[5] is no number"),
        ("own.csv", OWN + "0,5,5\n1,,5\n", "row 2 has no input_tokens"),
        ("own.jsonl", lines(OWN_ROW, OWN_ROW | {"arrival_s": None}), "row 2 has no arrival_s"),
        ("bench.json", json.dumps({"input_lens": [9, None], "output_lens": [9, 9]}), "row 2 has no input_lens"),
        ("own.jsonl", lines(OWN_ROW | {"prefix_id": ["a"]}), "row 1: prefix_id=['a'] is no name"),
        ("burst.jsonl", lines({"Timestamp": 5, "Model": ["a"], "Request tokens": 9, "Response tokens": 9}),
         "Model=['a'] is no name"),
        ("list.json", "[1, 2]", "row 1 is no object of JSON: 1"),
        ("empty.json", "[]", "has no requests"),
        ("deep.json", "[" * 100_000, "row 1 is no JSON"),
        ("other.json", '{"a": 1}', "lacks the columns arrival_s, input_tokens, output_tokens: it has a"),
    ],
)  # fmt: skip
def test_a_bad_file_is_one_line_and_exit_code_2(
    tmp_path: Path, name: str, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert main(["serving", f"traffic.trace={path}", "law.base_us=100", "kv.blocks=100"]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert str(path) in shown.err
    assert shown.err.count("\n") == 1


def test_the_notes_of_a_trace_are_in_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "chat.json"
    path.write_text(WITHOUT_TIMES["sharegpt.json"])
    law = ["law.base_us=8000", "kv.blocks=2000", "traffic.rate=50"]
    assert main(["serving", f"traffic.trace={path}", *law, "format=json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["completed"] == 2
    assert any("a quarter of the characters" in note for note in answer["notes"])


def test_a_named_format_that_a_file_is_not_of_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("arrival_s,input_tokens,output_tokens\n0,1,1\n")
    with pytest.raises(RequestTraceError, match=r"not of traffic.trace_format=guidellm"):
        stream(RequestTraffic(trace=str(tmp_path / "a.csv"), trace_format="guidellm"))
    with pytest.raises(RequestError, match=r"traffic.tokenizer=x is of a file"):
        RequestTraffic(tokenizer="x")


def test_what_a_file_lacks_is_told_before_settings_that_it_makes_idle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.csv"
    ask = ["serving", f"traffic.trace={path}", "traffic.rate=4", "law.base_us=100", "kv.blocks=100"]
    for text, said in (
        (None, "does not exist"),
        ("a,b\n1,2\n", "lacks the columns"),
        (OWN + "0,x,5\n", "input_tokens=x"),
        (OWN + "0,5,5\n", "traffic.rate makes requests"),
    ):
        if text is not None:
            path.write_text(text)
        assert main(ask) == 2
        assert said in capsys.readouterr().err


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(lines(OWN_ROW, OWN_ROW), encoding="utf-8-sig")
    assert stream(RequestTraffic(trace=str(path))).requests == 2
    path = tmp_path / "run.json"
    path.write_text(json.dumps([OWN_ROW]), encoding="utf-8-sig")
    assert stream(RequestTraffic(trace=str(path))).requests == 1


def test_mooncake_may_be_parquet_and_have_dates(tmp_path: Path) -> None:
    moments = pd.to_datetime(["2026-01-01T00:00:00.0Z", "2026-01-01T00:00:00.5Z"])
    lengths = {"input_length": [700, 700], "output_length": [5, 5], "hash_ids": [[1, 2], [1, 3]]}
    for name, times in (("ms", [0, 500]), ("dates", moments), ("texts", moments.strftime("%Y-%m-%dT%H:%M:%S.%fZ"))):
        path = tmp_path / f"{name}.parquet"
        pd.DataFrame({"timestamp": times} | lengths).to_parquet(path)
        found = stream(RequestTraffic(trace=str(path)))
        (requests,) = found.chunks
        assert requests.arrival_us.tolist() == [0, 500_000], name
        assert found.keys.tolist() == [1, 2, 1, 3]
