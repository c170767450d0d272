"""No text of a call names code, a file or a place on the hub: every field of every body, taken from the bodies."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from opcast.jobs.service.app import create_app
from opcast.jobs.service.naming import ANY, admit, rule_of
from opcast.jobs.service.settings import ServiceSettings
from opcast.simulator.question.canonical import RequestError

from .conftest import OwnServer, own_server
from .test_traversal import BODIES, OP, within

CODE = "def f(*_):\n    open('/etc/hostname').read()\n\n\nf()\n"
ODD = (  # no field takes them
    *("evil_mod:f", "sys:exit", "os:nosuch", "/etc/passwd", "../../etc/passwd", "~/.bashrc", "${oc.env:HOME}"),
    *("kernels-community/x", "hf-hub:org/x", "file:///etc/passwd"),
)
PLAIN = ("evil_mod", "sentinel.yaml", "__class__")  # the first two lie in the server's folder
SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
}
OF_CONFIGS = (  # settings that transformers looks up, loads or imports by, at some time or other
    *("_attn_implementation", "attn_implementation", "_attn_implementation_internal", "_experts_implementation"),
    *("experts_implementation", "auto_map", "trust_remote_code", "torch_dtype", "dtype", "router_dtype", "model_type"),
    *("hidden_act", "architectures", "backbone", "use_pretrained_backbone", "architecture", "_name_or_path", "name"),
    *("quantization_config", "text_config", "vision_config", "rope_scaling", "layer_types", "tokenizer_class"),
    *("generation_config", "base_model_tp_plan", "cache_implementation", "__class__", "get_text_config"),
)


def fields(schema: Mapping[str, Any], parts: Mapping[str, Any], text: str) -> Iterator[Any]:
    """Values with a text in one place of a schema: in each field, as an item of it, and as a name of its own."""
    if "$ref" in schema:
        yield from fields(parts[schema["$ref"].rpartition("/")[2]], parts, text)
        return
    for each in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
        yield from fields(each, parts, text)
    if schema.get("type") in (None, "string", "integer", "number", "boolean"):
        yield text
    if schema.get("type") in (None, "array"):
        yield [text]
    for value in fields(schema["items"], parts, text) if isinstance(schema.get("items"), Mapping) else ():
        yield [value]
    for name, own in schema.get("properties", {}).items():
        for value in fields(own, parts, text):
            yield {name: value}
    if schema.get("type") == "object":
        yield {text: text}


@cache
def description() -> dict[str, Any]:
    """How the service describes itself, from its own bodies."""
    return create_app(ServiceSettings()).openapi()


def changes(path: str, text: str) -> list[dict[str, Any]]:
    """What puts a text into each field of a call's body, one at a time."""
    described = description()
    schema = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    made = (each for each in fields(schema, described["components"]["schemas"], text) if isinstance(each, dict))
    return [json.loads(one) for one in dict.fromkeys(map(json.dumps, made))]


def configurations(text: str) -> Iterator[dict[str, Any]]:
    """Configurations of a model with a text in one place each."""
    for name in OF_CONFIGS:
        for value in (text, [text], {"": text}, {"quant_method": text, "backbone": text, "_attn_implementation": text}):
            yield {**SMALL, name: value}


class Caller:
    """One kept connection to a service."""

    def __init__(self, address: str) -> None:
        place = urlsplit(address)
        self.connection = HTTPConnection(place.hostname or "", place.port, timeout=120)

    def __call__(self, path: str, body: Any = None) -> tuple[int, str]:
        kind = {"Content-Type": "application/json"}
        self.connection.request("GET" if body is None else "POST", path, body and json.dumps(body), kind)
        answer = self.connection.getresponse()
        return answer.status, answer.read().decode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which names lie about that nobody should take up."""
    made = tmp_path_factory.mktemp("served")
    here = made / "here"
    (here / "evil_mod").mkdir(parents=True)
    (here / "evil_mod/__init__.py").write_text(CODE)
    (here / "ends.py").write_text(ENDS)
    for name in ("sentinel.yaml", "evil_mod/config.json"):
        (here / name).write_text(json.dumps(SMALL))
    return made


@pytest.fixture(scope="module")
def watched(folder: Path) -> Iterator[OwnServer]:
    with own_server(folder, "workers=1") as made:
        yield made


def place(changed: Any) -> str:
    """The field that a change is about, as the list of rules calls it."""
    names = []
    while isinstance(changed, (dict, list)):
        if isinstance(changed, dict):
            name, changed = next(iter(changed.items()))
            names.append(name)
        else:
            changed = changed[0]
    return ".".join(names)


def taken(changed: Any, text: str) -> bool:
    """Whether a text may stand in the field of a change."""
    at = place(changed)
    return at != "model" and rule_of(at).fullmatch(text) is not None


def asked(path: str, texts: Sequence[str], may: bool) -> list[dict[str, Any]]:
    """Bodies of a call with each text in each field where it may stand, or where it may not."""
    made = [each for text in texts for each in changes(path, text) if taken(each, text) == may]
    patterns = {place(each): each for each in made if rule_of(place(each)).pattern == ANY}  # matched: one is enough
    made = [each for each in made if place(each) not in patterns] + list(patterns.values()) if may else made
    return [within(BODIES[path], each) for each in made]


def check(watched: OwnServer, path: str, many: Iterable[Any], most: int) -> int:
    """Ask all of it; nothing fails, tells a folder of the server, or is imported or opened. How many there were."""
    call, count = Caller(watched.address), 0
    for body in many:
        status, answer = call(path, body)
        assert 200 <= status <= most, (body, answer)
        assert '"unexpected"' not in answer, (body, answer)
        assert str(watched.folder) not in answer, (body, answer)
        count += 1
    assert watched.seen() == []
    assert "Traceback" not in watched.said()
    return count


@pytest.mark.parametrize("path", sorted(BODIES))
def test_no_field_takes_code_or_a_file(path: str, watched: OwnServer, request: pytest.FixtureRequest) -> None:
    """What could name code or a file is refused in every field that is not expressly for more than names. Each text is
    tried in a third of the fields, in all with --every-model."""
    call, bodies = Caller(watched.address), asked(path, ODD, may=False)
    for body in bodies if request.config.getoption("--every-model") else bodies[::3]:
        status, answer = call(path, body)
        assert status in (400, 422), (body, answer)
    assert watched.seen() == []
    assert len(bodies) > 80


@pytest.mark.parametrize("text", ["liger", "whole", "chunks:8"])
def test_a_loss_is_named_as_on_the_command_line(text: str) -> None:
    admit({"options": {"loss": text}})


def test_no_question_of_a_table_names_code_or_a_file(watched: OwnServer) -> None:
    call = Caller(watched.address)
    known = [each["name"] for each in description()["paths"]["/v1/predict/table"]["post"]["parameters"]]
    assert "device" in known
    for name in known:
        for text in (each for each in ODD if not rule_of(name).fullmatch(each)):
            assert call(f"/v1/predict/table?{name}={quote(text, safe='')}", {})[0] in (400, 422), (name, text)
    assert watched.seen() == []


BAD: dict[str, tuple[str, Any, str]] = {  # what was 500 with a traceback: the call, and what is said of it
    "a dim called self": ("/v1/predict", {"op": {**OP["op"], "__proto__": {}, "self": 1}}, "no dimension '__proto__'"),
    "a dim called as an argument": (
        "/v1/predict",
        {"op": {**OP["op"], "kind_name": 1}},
        "no dimension 'kind_name'",
    ),
    "self alone": ("/v1/predict", {"op": {**OP["op"], "self": 1}}, "no dimension 'self'"),
    "a dtype that is none": ("/v1/simulate", {"model": {**SMALL, "torch_dtype": "__class__"}}, "is no dtype"),
    "a part of torch": ("/v1/simulate", {"model": {**SMALL, "text_config": {"dtype": "nn"}}}, "is no dtype"),
    "a method": ("/v1/simulate", {"model": {**SMALL, "get_text_config": 1}}, "model llama"),
    "a name of Python": ("/v1/simulate", {"model": {**SMALL, "__deepcopy__": 1}}, "no setting of a model"),
    "too many brackets": ("/v1/simulate", {"options": {"quantize_skip": "(" * 20_000}}, "20,000 characters"),
    "brackets too deep": ("/v1/simulate", {"options": {"quantize_skip": "(" * 950 + ")" * 950}}, "too deep"),
    "a count too large": ("/v1/simulate", {"frozen": "a{99999999999999}"}, "no regular expression"),
    "a body too deep": ("/v1/predict", {"op": json.loads("[" * 40 + "]" * 40)}, "within each other"),
    "this machine": ("/v1/predict", {"device": "local"}, "nothing was measured"),
}


def test_what_cannot_be_is_one_line(watched: OwnServer) -> None:
    """Refused in one line to the caller and one line in the log; no folder of the server is told."""
    call = Caller(watched.address)
    for name, (path, changed, said) in BAD.items():
        time.sleep(1.0 if name == next(iter(BAD)) else 0.15)  # the log has so many lines a second
        before = len(watched.said().splitlines())
        status, answer = call(path, {**BODIES[path], **changed})
        assert (status, said in answer) == (400, True), (name, answer)
        assert str(watched.folder) not in answer
        told = [line for line in watched.said().splitlines()[before:] if not line.startswith("opcast: … and")]
        assert len(told) == 1, (name, told)


def test_a_model_that_is_allowed_is_read_as_a_configuration(folder: Path, tmp_path: Path) -> None:
    """Of its folder only config.json is opened: no pickle, no code of its own, no weights."""
    model = tmp_path / "here/model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({**SMALL, "auto_map": {"AutoModelForCausalLM": "evil.M"}}))
    (model / "evil.py").write_text(CODE)
    for name in ("pytorch_model.bin", "model.pkl", "training_args.bin", "optimizer.pt"):
        (model / name).write_bytes(pickle.dumps(Ends()))
    with own_server(tmp_path, "allow=[./model]", "workers=1") as server:
        call, step = Caller(server.address), {**BODIES["/v1/simulate"], "model": "./model"}
        assert call("/v1/simulate", step)[0] == 200
        assert {line.rpartition("/")[2] for line in server.seen()} == {"config.json"}
        assert call("/v1/simulate", {**step, "model": "model"})[0] == 400


class Ends:
    """What ends the process that unpickles it."""

    def __reduce__(self) -> Any:
        return sys.exit, ()


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(BODIES))
def test_what_a_field_takes_is_not_looked_up(path: str, watched: OwnServer) -> None:
    """Names of what lies in the server's folder, and odd texts where patterns and kernels of tables may stand."""
    assert check(watched, path, asked(path, (ODD[0], *PLAIN), may=True), 422) > 8


def test_a_configuration_names_no_code(watched: OwnServer) -> None:
    """Odd texts are refused in a model's configuration, but where no trace reads them."""
    call, read = Caller(watched.address), 0
    for text in ODD:
        for config in configurations(text):
            try:
                admit({"model": config})
            except RequestError:
                status, answer = call("/v1/simulate", {**BODIES["/v1/simulate"], "model": config})
                assert status == 400, (config, answer)
                read += 1
    assert watched.seen() == []
    assert read > 800


@pytest.mark.slow
def test_what_a_configuration_may_say_is_not_looked_up(watched: OwnServer) -> None:
    """What no trace reads is left out, and names of what lies in the server's folder stay names."""
    made = []
    for text in PLAIN[:2]:
        for config in configurations(text):
            with suppress(RequestError):
                admit({"model": config})
                made.append({**BODIES["/v1/simulate"], "model": config})
    assert check(watched, "/v1/simulate", made, 400) > 40


def test_what_the_operator_allows_runs_in_a_process_of_its_own(folder: Path, tmp_path: Path) -> None:
    """An engine that the service was started with is called, and may end its process: the service stays."""
    shutil.copytree(folder / "here", tmp_path / "here")
    with own_server(tmp_path, "allow=[evil_mod:f,ends:f,ends:die]", "workers=1") as server:
        call, op = Caller(server.address), BODIES["/v1/predict"]
        assert call("/v1/predict", {**op, "engines": ["sys:exit"]})[0] == 400
        assert server.seen() == []
        assert call("/v1/predict", {**op, "engines": ["evil_mod:f"]})[0] == 400  # it makes no engine
        assert any(line.endswith("evil_mod/__init__.py") for line in server.seen())
        status, answer = call("/v1/predict", {**op, "engines": ["ends:f"]})
        assert (status, "SystemExit" in answer) == (400, True)
        status, answer = call("/v1/predict", {**op, "engines": ["ends:die"]})
        assert (status, "exit code" in answer) == (500, True)
        assert call("/v1/predict", op)[0] == 200
        assert call("/v1/predict", {**op, "engines": ["ends:f"]})[0] == 400  # the process was replaced
        assert server.process.poll() is None
        assert "Traceback" not in server.said()


ENDS = """
import os, sys
f = sys.exit
def die(device):
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("path", ["backend", "model", "recompute"])
def test_half_a_character_is_refused_in_words_that_can_be_sent(path: str) -> None:
    with pytest.raises(RequestError) as refused:
        admit({path: "\ud800"})
    assert "\\ud800" in str(refused.value)
    assert str(refused.value).encode()
