"""The page in a real browser: every flow by its controls, without internet, light and dark, wide and narrow."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from opcast.jobs.cli import main
from opcast.jobs.service.encoding import encoded
from opcast.jobs.service.pages import EXAMPLES

playwright = pytest.importorskip("playwright.sync_api", reason="the page is tested with playwright (the extra dev)")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="the page is tested in Chromium, which is not installed"),
]
OP = "op?op.kind=gemm&op.m=512&op.n=512&op.k=512&vary=m"
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """A fresh page that reaches nothing but the service, and on which no script fails."""
    context = browser.new_context()
    troubles: list[str] = []
    asked: list[str] = []
    context.route("**/*", lambda route: route.continue_() if route.request.url.startswith(address) else route.abort())
    made = context.new_page()
    made.on("pageerror", lambda error: troubles.append(str(error)))
    made.on("request", lambda request: asked.append(request.url))
    made.set_default_timeout(60_000)
    yield made
    context.close()
    assert troubles == []
    assert [url for url in asked if not url.startswith((address, "blob:", "data:"))] == []


def is_in_view(page: Any, selector: str) -> bool:
    """Whether the top of an element can be seen: below the page's head and above the window's end."""
    script = """selector => { const { top } = document.querySelector(selector).getBoundingClientRect();
      return top >= document.querySelector('.top').offsetHeight - 1 && top < innerHeight - 40; }"""
    found: bool = page.evaluate(script, selector)
    return found


def test_an_op_is_asked_and_its_address_can_be_shared(page: Any, address: str, browser: Any) -> None:
    page.goto(address)
    page.wait_for_selector(".big")
    page.fill("#field-op-m", "2048")
    page.click("button.main")
    page.wait_for_selector('pre:has-text("2048")', state="attached")
    latency = page.text_content(".big")
    assert latency is not None
    assert latency.endswith(("µs", "ms"))
    assert "op.m=2048" in page.url
    other = browser.new_page()
    other.goto(page.url)
    other.wait_for_selector(".big")
    assert other.text_content(".big") == latency
    other.close()


def test_another_kind_brings_its_own_fields(page: Any, address: str) -> None:
    page.goto(address)
    page.select_option("#field-op-kind", "all_reduce")
    page.wait_for_selector("#field-op-size_bytes")
    page.fill("#field-op-size_bytes", "1048576")
    page.fill("#field-op-ranks", "8")
    page.click("button.main")
    page.wait_for_selector(".big")
    assert page.query_selector("#field-op-m") is None


def test_a_bad_value_is_said_in_words(page: Any, address: str) -> None:
    page.goto(f"{address}/#op?kind=gemm&m=0&n=64&k=64")
    page.wait_for_selector("#field-op-m-error")
    said = page.text_content("#field-op-m-error") or ""
    assert said.startswith("m: ")
    assert "m=0" in said
    assert page.get_attribute("#field-op-m", "aria-invalid") == "true"
    assert is_in_view(page, "#field-op-m-error")


def test_a_step_shows_its_report_and_two_can_be_compared(page: Any, address: str) -> None:
    for seq_len in ("256", "512"):
        page.goto(f"{address}/#step?model=tiny_llama_100m&cluster=dgx_h100&tp=1&seq_len={seq_len}")
        page.wait_for_selector(f'pre:has-text("{seq_len}")', state="attached")
        page.wait_for_selector(".report .plot .trace, .report .plot .point")
        assert page.locator("iframe").count() == 0
        assert "Step time" in (page.text_content(".report") or "")
        page.click("text=Pin to compare")
    page.evaluate("scrollTo(0, 600)")
    page.click("#tab-compare")
    page.wait_for_selector("#said")
    assert is_in_view(page, "#said")
    rows = page.locator("tbody tr").all_inner_texts()
    assert any(row.startswith("sequence length, tokens") and "256" in row and "512" in row for row in rows)
    assert any(row.startswith("step time") and " ms" in row and "%" in row for row in rows)
    assert "than the" in (page.text_content("#said") or "")
    assert "_s" not in (page.text_content("#result") or "")


def test_a_search_leads_to_the_step_of_a_layout(page: Any, address: str) -> None:
    page.goto(
        f"{address}/#search?model=tiny_llama_100m&cluster=dgx_h100&global_batch=16&seq_len=256&space.tp=1,2&space.pp=1&space.recompute=none"
    )
    page.wait_for_selector(".curve circle")
    assert "layouts" in (page.text_content(".cards") or "")
    assert page.locator("tbody tr").first.locator("td").first.bounding_box()["width"] < 60
    reason, shown = page.locator("td.note div").first, page.locator(".scroll").last
    assert "better" in reason.text_content()
    box, frame = reason.bounding_box(), shown.bounding_box()
    assert box["x"] + box["width"] <= frame["x"] + frame["width"], "a reason is wrapped, not cut off"
    page.focus(".curve circle")
    page.keyboard.press("Enter")
    page.wait_for_selector(".report .cards")
    assert page.url.partition("#")[2].startswith("step?model=tiny_llama_100m")


def test_ways_to_serve_lead_to_their_traffic(page: Any, address: str) -> None:
    page.goto(
        f"{address}/#ways?model=tiny_llama_100m&space.tp=1&space.batch=8,32&space.max_tokens=2048&input_len=256&output_len=64"
    )
    page.wait_for_selector(".curve circle", timeout=300_000)  # the event loop is compiled first, where nobody did
    assert "tokens/s a GPU" in (page.get_attribute(".curve circle", "aria-label") or "")
    assert "ways" in (page.text_content(".cards") or "")
    assert "tokens_per_s" not in (page.text_content("#result table") or "")
    if page.query_selector(".curve circle[role=link]"):
        page.focus(".curve circle[role=link]")
        page.keyboard.press("Enter")
        page.wait_for_selector("#field-traffic-rate")
        assert page.url.partition("#")[2].startswith("serving?model=tiny_llama_100m")


def test_the_fabric_shows_its_links(page: Any, address: str) -> None:
    page.goto(f"{address}/#fabric?kind=all_reduce&cluster=dgx_h100&nodes=2&ranks=16&size_bytes=1048576")
    page.wait_for_selector(".report svg")
    assert page.locator("iframe").count() == 0
    assert "Bus bandwidth" in (page.text_content(".report") or "")


def test_a_whole_job_shows_its_lives(page: Any, address: str) -> None:
    page.goto(f"{address}/#job?model=tiny_llama_100m&seq_len=128&global_batch=64&tokens=1e10&nodes=1")
    page.wait_for_selector(".report svg")
    report = page.text_content(".report") or ""
    assert "Progress of ten lives" in report
    assert "days" in report


def test_many_jobs_are_rows_by_their_axes(page: Any, address: str) -> None:
    page.goto(
        f"{address}/#sweep?model=tiny_llama_100m&seq_len=128&global_batch=64&tokens=1e9&axis.1=nodes&values.1=1,2"
        "&axis.2=failures.fleet&values.2=llama3,rsc1&step_time_s=0.1&checkpoint.size_gb=1&lives=20"
    )
    page.wait_for_selector("#result table")
    assert page.locator("#result tbody tr").count() == 4
    shown = page.text_content("#result") or ""
    assert "cluster.nodes" in shown
    assert "rsc1" in shown
    assert "opcast sweep plan" in (page.text_content("#answer") or "")


def test_chips_stand_side_by_side(page: Any, address: str) -> None:
    page.goto(
        f"{address}/#chips?model=tiny_llama_100m&cluster=dgx_h100&nodes=1&others=dgx_h200&seq_len=128&global_batch=64"
        "&power_caps_w=400"
    )
    page.wait_for_selector(".curve .bar")
    assert page.locator(".curve .bar").count() == 4
    shown = page.text_content("#result") or ""
    assert "dgx_h200 at 400 W" in shown
    assert "Fastest" in shown
    assert "price of" not in shown  # nobody gave one


def test_every_call_that_takes_fields_has_an_example(page: Any, address: str) -> None:
    page.goto(f"{address}/docs")
    described = page.evaluate("fetch('/openapi.json').then((answer) => answer.json())")
    bodies = {path for path, call in described["paths"].items() if "requestBody" in call.get("post", {})}
    assert bodies - {"/v1/predict/table"} <= set(EXAMPLES)


def test_a_served_load(page: Any, address: str) -> None:
    page.goto(f"{address}/#serving?model=tiny_llama_100m&device=h100_sxm&requests=30&rate=20")
    page.wait_for_selector(".curve")
    assert "requests/s" in (page.text_content("#result") or "")


def test_marks_of_times_that_are_close_are_not_alike(page: Any, address: str) -> None:
    page.goto(f"{address}/#serving?model=tiny_llama_100m&device=h100_sxm&requests=30&rate=5")
    page.wait_for_selector(".curve")
    marks = page.locator("svg.curve >> nth=1").locator("text").all_text_contents()
    times = [text for text in marks if not text.endswith("%")]
    assert len(times) == len(set(times)) == 4


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_a_method_without_rollout_is_asked_as_the_page_shows_it(page: Any, address: str, method: str) -> None:
    page.goto(f"{address}/#posttrain?model=tiny_llama_100m&cluster=dgx_h100&method={method}&prompts=8&lives=10")
    page.wait_for_selector(".report svg, .error:visible")
    assert "is not read with" not in (page.text_content("main") or "")
    assert page.locator(".report svg").count()


def test_the_keyboard_is_enough(page: Any, address: str) -> None:
    page.goto(address)
    page.wait_for_selector("button.main")
    page.focus("#field-op-k")
    page.keyboard.press("Control+A")
    page.keyboard.type("8192")
    page.keyboard.press("Enter")
    page.wait_for_selector(".big")
    assert "op.k=8192" in page.url


SIZES = [(390, 844), (1280, 850), (1920, 1080)]


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_ask_is_in_reach_and_the_answer_in_view(
    browser: Any, address: str, width: int, height: int, scheme: str
) -> None:
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.goto(f"{address}/#serving?model=tiny_llama_100m&device=h100_sxm&traffic.requests=30&traffic.rate=20&edit=1")
    page.wait_for_selector("button.main")
    ask = page.locator("button.main").bounding_box()
    assert ask["y"] + ask["height"] <= height, "Ask is in the window before anybody scrolls"
    page.focus("#field-slo-tpot_ms")
    page.click("button.main")
    page.wait_for_selector("#result .big")
    page.wait_for_function("document.querySelector('#status').textContent.startsWith('Answered')")
    assert is_in_view(page, "#result .card")
    page.fill("#field-model", "tiny_llama_100mm")
    page.click("button.main")
    page.wait_for_selector("#field-model-error")
    assert (page.text_content("#field-model-error") or "").startswith("model: ")
    assert is_in_view(page, "#field-model-error")
    context.close()


def test_the_first_view_is_an_answered_example(page: Any, address: str) -> None:
    page.set_viewport_size({"width": 1280, "height": 850})
    page.goto(address)
    page.wait_for_selector(".curve circle")
    assert "example" in (page.text_content("#status") or "")
    assert is_in_view(page, ".big")


def test_a_table_that_is_wider_than_a_phone_says_that_it_scrolls(page: Any, address: str) -> None:
    page.goto(f"{address}/#known?device=h100_sxm")
    page.wait_for_selector("tbody tr")
    assert page.locator(".sideways:visible").count() == 0
    page.set_viewport_size(PHONE)
    page.wait_for_selector(".sideways:visible")


@pytest.mark.parametrize(
    "question",
    [
        "step?model=tiny_llama_100m&cluster=dgx_h100&tp=2&seq_len=256&global_batch=8",
        "op?op.kind=all_reduce&op.size_bytes=1048576&op.ranks=8&cluster=dgx_h100&nodes=1",
        "serving?model=tiny_llama_100m&device=h100_sxm&traffic.requests=30&slo.ttft_ms=500&scheduler.cuda_graphs=8, 16",
    ],
)
def test_a_question_goes_along_as_a_command_and_in_python(
    page: Any, address: str, question: str, capsys: pytest.CaptureFixture[str], home: str
) -> None:
    page.goto(f"{address}/#{question}")
    page.wait_for_selector("#as-command", state="attached")
    shown = json.loads(page.text_content("#as-json") or "")
    words = shlex.split(page.text_content("#as-command") or "")
    assert main([*words[1:], "format=json", f"home={home}"]) == 0
    assert untimed(json.loads(capsys.readouterr().out)) == untimed(shown)
    code = (
        (page.text_content("#as-python") or "")
        .replace("print(answer.to_dict())", "")
        .replace(")\n", f", home={home!r})\n")
    )
    told: dict[str, Any] = {}
    exec(code, told)
    assert untimed(json.loads(encoded(told["answer"].to_dict()))) == untimed(shown)


def untimed(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without how long it took to find."""
    return {name: value for name, value in answer.items() if "wall_time" not in name}


def test_a_search_tells_how_far_it_is_and_can_be_cancelled(page: Any, address: str) -> None:
    page.goto(f"{address}/#search?model=llama3_8b&cluster=dgx_h100&nodes=8&global_batch=512&seq_len=4096")
    page.wait_for_selector("#cancel:visible")
    page.wait_for_selector("#progress:visible")
    assert is_in_view(page, "#answer")
    page.click("#cancel")
    page.wait_for_selector("#cancel", state="hidden")
    assert page.text_content("#status") == "Cancelled."
    assert page.text_content("#result") == ""


def test_all_calls_are_told_and_tried_without_internet(page: Any, address: str) -> None:
    page.goto(f"{address}/docs")
    described = page.evaluate("fetch('/openapi.json').then((answer) => answer.json())")
    told = page.locator("main > section h2").all_inner_texts()
    assert sorted(told) == sorted(
        f"{method.upper()} {path}" for path, methods in described["paths"].items() for method in methods
    )
    call = page.locator("section", has=page.get_by_text("POST /v1/predict", exact=True))
    call.get_by_text(re.compile("fields of the body")).click()
    call.get_by_text("Try it").click()
    assert "h100_sxm" in call.locator("textarea").input_value()
    assert "power_cap_w" in (call.locator("table").text_content() or "")
    call.get_by_text("Send").click()
    page.wait_for_function("[...document.querySelectorAll('pre')].some((each) => each.textContent.startsWith('200'))")


def test_what_users_expect_leaves_the_picture_its_room(page: Any, address: str) -> None:
    page.goto(f"{address}/#serving?model=tiny_llama_100m&device=h100_sxm&traffic.requests=30&slo.ttft_ms=100000")
    page.wait_for_selector(".curve")
    path = page.locator(".curve .line").first.evaluate(
        "(line) => [line.getBBox().width, line.ownerSVGElement.viewBox.baseVal.width]"
    )
    assert path[0] > 0.7 * path[1]
    assert "users expect" in (page.text_content("#result") or "")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "tab", [OP, "known", "compare", "step", "job", "chips", "search", "serving", "ways", "fabric", "calls"]
)
def test_nothing_serious_for_axe_and_nothing_wider_than_a_phone(
    browser: Any, address: str, tab: str, scheme: str
) -> None:
    axe = pytest.importorskip("axe_core_python.sync_playwright", reason="axe checks pages (the extra dev)")
    context = browser.new_context(viewport=PHONE, color_scheme=scheme)
    made = context.new_page()
    made.goto(f"{address}/docs" if tab == "calls" else f"{address}/#{tab}")
    made.wait_for_selector(
        ".curve"
        if "vary" in tab
        else {"known": "table", "compare": "#result p", "calls": "section"}.get(tab, "button.main")
    )
    rules = {"runOnly": ["color-contrast"]} if scheme == "dark" else {}  # the scheme changes colours alone
    found = axe.Axe().run(made, options={"resultTypes": ["violations"], **rules})["violations"]
    serious = {each["id"]: each["nodes"][0]["html"] for each in found if each["impact"] in ("serious", "critical")}
    assert serious == {}
    assert made.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    context.close()


def test_a_token_is_asked_for(serve: Any, browser: Any) -> None:
    with serve(token="a-token-of-24-characters") as address:
        made = browser.new_page()
        made.goto(address)
        made.wait_for_selector("#token-form:not([hidden])")
        made.fill("#token", "a-token-of-24-characters")
        made.click("#token-form button")
        made.wait_for_selector("button.main")
        made.click("button.main")
        made.wait_for_selector(".big")
        made.close()
