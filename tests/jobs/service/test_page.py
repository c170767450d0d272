"""The page in a real browser: every flow by its controls, without internet, light and dark, wide and narrow."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="the page is tested with playwright (the extra dev)")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="the page is tested in Chromium, which is not installed"),
]
OP = "op?kind=gemm&m=512&n=512&k=512&vary=m"
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


def test_an_op_is_asked_and_its_address_can_be_shared(page: Any, address: str, browser: Any) -> None:
    page.goto(address)
    page.fill("#field-m", "2048")
    page.click("button.main")
    page.wait_for_selector(".curve circle")
    latency = page.text_content(".big")
    assert latency is not None
    assert latency.endswith(("µs", "ms"))
    assert "m=2048" in page.url
    other = browser.new_page()
    other.goto(page.url)
    other.wait_for_selector(".big")
    assert other.text_content(".big") == latency
    other.close()


def test_another_kind_brings_its_own_fields(page: Any, address: str) -> None:
    page.goto(address)
    page.select_option("#field-kind", "all_reduce")
    page.wait_for_selector("#field-size_bytes")
    page.fill("#field-size_bytes", "1048576")
    page.fill("#field-ranks", "8")
    page.click("button.main")
    page.wait_for_selector(".big")
    assert page.query_selector("#field-m") is None


def test_a_bad_value_is_said_in_words(page: Any, address: str) -> None:
    page.goto(f"{address}/#op?kind=gemm&m=0&n=64&k=64")
    page.wait_for_selector("#error:not([hidden])")
    assert "m" in (page.text_content("#error") or "")


def test_a_step_shows_its_report_and_two_can_be_compared(page: Any, address: str) -> None:
    for seq_len in ("256", "512"):
        page.goto(f"{address}/#step?model=tiny_llama_100m&cluster=dgx_h100&tp=1&seq_len={seq_len}")
        page.wait_for_selector(f'pre:has-text("{seq_len}")', state="attached")
        report = page.frame_locator("iframe")
        report.locator("h1").wait_for()
        assert "tiny_llama_100m" in (report.locator("h1").text_content() or "")
        page.click("text=Pin to compare")
    page.click("#tab-compare")
    page.wait_for_selector("tbody tr")
    rows = page.locator("tbody tr").all_inner_texts()
    assert any(row.startswith("seq_len") and "256" in row and "512" in row for row in rows)
    assert any(row.startswith("step_time_s") and "%" in row for row in rows)


def test_a_search_leads_to_the_step_of_a_layout(page: Any, address: str) -> None:
    page.goto(
        f"{address}/#search?model=tiny_llama_100m&cluster=dgx_h100&global_batch=16&seq_len=256&tp=1,2&pp=1&recompute=none"
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
    page.wait_for_selector("iframe")
    assert page.url.partition("#")[2].startswith("step?model=tiny_llama_100m")


def test_ways_to_serve_lead_to_their_traffic(page: Any, address: str) -> None:
    page.goto(f"{address}/#ways?model=tiny_llama_100m&tp=1&batch=8,32&max_tokens=2048&input_len=256&output_len=64")
    page.wait_for_selector(".curve circle")
    assert "tokens/s a GPU" in (page.get_attribute(".curve circle", "aria-label") or "")
    assert "ways" in (page.text_content(".cards") or "")
    if page.query_selector(".curve circle[role=link]"):
        page.focus(".curve circle[role=link]")
        page.keyboard.press("Enter")
        page.wait_for_selector("#field-rate")
        assert page.url.partition("#")[2].startswith("serving?model=tiny_llama_100m")


def test_the_fabric_shows_its_links(page: Any, address: str) -> None:
    page.goto(f"{address}/#fabric?kind=all_reduce&cluster=dgx_h100&nodes=2&ranks=16&size_bytes=1048576")
    report = page.frame_locator("iframe")
    report.locator("svg").first.wait_for()
    assert "all_reduce" in (report.locator("h1").text_content() or "")


def test_a_whole_job_shows_its_lives(page: Any, address: str) -> None:
    page.goto(f"{address}/#job?model=tiny_llama_100m&seq_len=128&global_batch=64&tokens=10&nodes=1")
    frame = page.frame_locator("iframe")
    frame.locator("text=Progress of ten lives").first.wait_for()
    assert "days" in (frame.locator("body").text_content() or "")


def test_a_served_load(page: Any, address: str) -> None:
    page.goto(f"{address}/#serving?model=tiny_llama_100m&device=h100_sxm&requests=30&rate=20")
    page.wait_for_selector(".curve")
    assert "requests/s" in (page.text_content("#result") or "")


def test_the_keyboard_is_enough(page: Any, address: str) -> None:
    page.goto(address)
    page.wait_for_selector("button.main")
    page.focus("#field-k")
    page.keyboard.press("Control+A")
    page.keyboard.type("8192")
    page.keyboard.press("Enter")
    page.wait_for_selector(".big")
    assert "k=8192" in page.url


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "tab", ["op?kind=gemm&m=512&n=512&k=512&vary=m", "known", "compare", "step", "search", "serving", "ways", "fabric"]
)
def test_nothing_serious_for_axe_and_nothing_wider_than_a_phone(
    browser: Any, address: str, tab: str, scheme: str
) -> None:
    axe = pytest.importorskip("axe_core_python.sync_playwright", reason="axe checks pages (the extra dev)")
    context = browser.new_context(viewport=PHONE, color_scheme=scheme)
    made = context.new_page()
    made.goto(f"{address}/#{tab}")
    made.wait_for_selector(
        ".curve" if "vary" in tab else {"known": "table", "compare": "#result p"}.get(tab, "button.main")
    )
    found = axe.Axe().run(made)["violations"]
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
