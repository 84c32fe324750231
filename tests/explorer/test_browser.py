"""The explorer in headless Chromium. `SCREENSHOTS=FOLDER` also writes the pictures of docs/explore.md there."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import psutil
import pytest
import torch


pytest.importorskip("gradio", reason="needs the extra `explore`")
pytest.importorskip("playwright", reason="needs playwright")

from playwright.sync_api import Browser, Page, expect, sync_playwright
from transformers import LlamaForCausalLM

from diffllama import DiffLlamaForCausalLM
from diffllama.configuration import baseline
from examples.draw_maps import TEXT
from support.tiny_models import tiny_model, tiny_tokenizer


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]

RECALL_MODEL = Path(__file__).parents[2] / "examples/recall_model"

SERVER = """
import sys, time

def look(event, arguments):
    address = arguments[1] if event == "socket.connect" else arguments[:1] if event == "socket.getaddrinfo" else None
    if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "localhost", "::1", None):
        print("OUTSIDE", event, address, file=sys.stderr, flush=True)

sys.addaudithook(look)
from diffllama.explorer.chat import Progress
count = Progress.__call__
Progress.__call__ = lambda *arguments, **options: time.sleep(0.01) or count(*arguments, **options)
from diffllama.__main__ import main
main()
"""
"""Runs the command with a model as slow as large ones, and reports connections that leave the machine."""


@dataclass
class Server:
    """A running `diffllama explore`."""

    process: subprocess.Popen[str]
    address: str
    log: Path


def explore(log: Path, *words: object) -> Iterator[Server]:
    """Run the command until the test ends, and check that it made no connection that leaves the machine."""
    command = [sys.executable, "-c", SERVER, "explore", *map(str, words), "--port", "0"]
    with log.open("w") as stream, subprocess.Popen(command, stdout=stream, stderr=stream, text=True) as process:
        try:
            while "Open http://" not in log.read_text():
                assert process.poll() is None, log.read_text()
                time.sleep(0.1)
            address = log.read_text().partition("Open ")[2].split()[0]
            yield Server(process, address, log)
        finally:
            process.terminate()
    assert "OUTSIDE" not in log.read_text()
    assert "Traceback" not in log.read_text()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny V1, and a Llama of its sizes."""
    folder = tmp_path_factory.mktemp("models")
    model = tiny_model("v1", max_position_embeddings=2048)
    model.save_pretrained(folder / "differential")
    torch.manual_seed(0)
    LlamaForCausalLM(baseline(model.config)).save_pretrained(folder / "llama")
    for name in ("differential", "llama"):
        tiny_tokenizer().save_pretrained(folder / name)
    return folder / "differential", folder / "llama"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, folders: tuple[Path, Path]) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log.txt"
    yield from explore(log, folders[0], "--baseline", folders[1])


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=[*options, "--disable-sync", "--no-first-run"]
        )
        yield browser
        browser.close()


WAIT = 30_000


def open_page(browser: Browser, url: str, width: int = 1280, height: int = 800) -> Page:
    """Open a page of its own visitor. Requests that leave the machine, errors and dialogs are collected."""
    page = browser.new_context(viewport={"width": width, "height": height}, accept_downloads=True).new_page()
    page.set_default_timeout(WAIT)
    page.faults = []
    page.on("request", lambda request: outside(page, request.url))
    page.on("pageerror", lambda error: page.faults.append(str(error)))
    page.on("dialog", lambda dialog: (page.faults.append(dialog.message), dialog.dismiss()))
    page.goto(url)
    wait_until_ready(page)
    return page


def wait_until_ready(page: Page) -> None:
    """Wait until the page has been built and has restored what its address says."""
    page.locator("html[data-view]").wait_for(state="attached")


def outside(page: Page, url: str) -> None:
    """Collect a request that leaves the machine."""
    if urlsplit(url).scheme not in ("data", "blob") and urlsplit(url).hostname != "127.0.0.1":
        page.faults.append(url)


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Page]:
    page = open_page(browser, server.address)
    yield page
    assert page.faults == []
    page.context.close()


def view(page: Page, name: str) -> None:
    """Select a tab."""
    page.get_by_role("tab", name=name).click()


def ask(page: Page, message: str) -> None:
    """Send a message."""
    page.locator("#message textarea").fill(message)
    page.locator("#send").click()


def set_tokens(page: Page, count: int) -> None:
    """Set the most tokens of an answer. What is typed in the first moment after the settings open can be lost."""
    page.get_by_role("button", name="Settings").click()
    number, slider = (page.locator(f"#max-tokens input[type={kind}]") for kind in ("number", "range"))
    for _ in range(50):
        number.fill(str(count))
        number.press("Tab")
        if slider.input_value() == str(count):
            return
        time.sleep(0.2)
    raise AssertionError("The slider does not follow the number.")


def conversation(page: Page, at: int = 0) -> str:
    """Return the text of a conversation."""
    return page.locator(f"#chat-{at}").inner_text()


def values(page: Page, name: str, at: int = 0) -> list[list[float]]:
    """Return the numbers of a heat map as Plotly has them."""
    return (
        page.locator(f"#{name} .js-plotly-plot")
        .nth(at)
        .evaluate("plot => Array.from(plot._fullData[0].z, row => Array.from(row))")
    )


def shows(page: Page, name: str, count: int) -> None:
    """Wait until a row of figures has `count` of them."""
    expect(page.locator(f"#{name} .main-svg >> nth=0")).to_be_visible(timeout=WAIT)
    expect(page.locator(f"#{name} .js-plotly-plot")).to_have_count(count, timeout=WAIT)


def own_maps(folder: Path, text: str, layer: int, head: int) -> torch.Tensor:
    """Return the differential map of a head, as the model returns it."""
    model = DiffLlamaForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        ids = tiny_tokenizer()(text, return_tensors="pt").input_ids
        return model(ids, output_attentions=True).attentions[layer][0, head]


def test_both_models_answer_with_their_speed(page: Page) -> None:
    set_tokens(page, 40)
    ask(page, "w7 w8 w9")
    for at in range(2):
        expect(page.locator(f"#speed-{at}")).to_contain_text("40 tokens, ", timeout=WAIT)
        expect(page.locator(f"#speed-{at}")).to_contain_text("tokens/s")
        assert "w7 w8 w9" in conversation(page, at)
    assert conversation(page, 0) != conversation(page, 1)
    ask(page, "w20")
    expect(page.locator("#chat-1")).to_contain_text("w20", timeout=WAIT)


def test_answer_is_streamed_and_can_be_stopped(page: Page, server: Server) -> None:
    threads = psutil.Process(server.process.pid).num_threads()
    set_tokens(page, 1024)
    ask(page, "w7 w8")
    expect(page.locator("#speed-0")).to_contain_text("tokens/s", timeout=WAIT)
    page.locator("#stop").click()
    time.sleep(1)
    stopped = conversation(page)
    time.sleep(1)
    assert conversation(page) == stopped
    assert "1024 tokens" not in page.locator("#speed-0").inner_text()
    assert psutil.Process(server.process.pid).num_threads() <= threads + 1


HOSTILE = "<script>alert('script')</script><img src=x onerror=\"alert('image')\">![x](http://192.0.2.1/x.png)"


def test_texts_are_escaped(page: Page) -> None:
    set_tokens(page, 4)
    ask(page, HOSTILE)
    expect(page.locator("#chat-0")).to_contain_text("<script>alert('script')</script>", timeout=WAIT)
    expect(page.locator("#speed-1")).to_contain_text("4 tokens", timeout=WAIT)
    view(page, "Maps")
    page.locator("#maps-text textarea").fill(HOSTILE)
    page.locator("#show-maps").click()
    shows(page, "heads", 3)
    time.sleep(0.5)  # the page's faults are checked at the end of every test


def test_clicked_head_shows_the_models_own_map(page: Page, folders: tuple[Path, Path]) -> None:
    text = "w7 w8 w9 w10 w7 w8 w11"
    view(page, "Maps")
    page.locator("#maps-text textarea").fill(text)
    page.locator("#show-maps").click()
    shows(page, "overview", 1)
    shows(page, "heads", 3)
    assert [len(values(page, "overview")), len(values(page, "overview")[0])] == [2, 4]
    box = page.locator("#overview .nsewdrag").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 2.5 / 4, box["y"] + box["height"] * 0.75)  # layer 1, head 2
    expect(page.locator("#maps-link textarea")).to_have_value(link_with("layer=1&head=2"), timeout=WAIT)
    expected = own_maps(folders[0], text, 1, 2)
    torch.testing.assert_close(torch.tensor(values(page, "heads", 2)), expected, atol=1e-5, rtol=0)
    first, second = (torch.tensor(values(page, "heads", at)) for at in range(2))
    torch.testing.assert_close(first - second, expected, atol=1e-5, rtol=0)

    plot, n = page.locator("#heads .js-plotly-plot").nth(2), len(expected)
    area = plot.locator(".nsewdrag")
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 2.4 / n, box["y"] + box["height"] * 4.4 / n)
    page.mouse.move(box["x"] + box["width"] * 2.5 / n, box["y"] + box["height"] * 4.5 / n)
    shown = f"“4 w7” attends to “2 w9”: {expected[4, 2]:.6f}"[:-2]  # the last digits differ by rounding
    expect(plot.locator(".hoverlayer")).to_contain_text(shown, timeout=WAIT)


def link_with(end: str) -> re.Pattern[str]:
    """Return a pattern of a link with this end."""
    return re.compile(re.escape(end) + "$")


def test_transformer_shows_its_one_map(browser: Browser, server: Server) -> None:
    query = urlencode({"view": "maps", "text": "w7 w8 w9", "model": "llama", "layer": 1, "head": 3})
    page = open_page(browser, f"{server.address}/#{query}")
    shows(page, "heads", 1)
    assert torch.tensor(values(page, "heads")).sum(-1).tolist() == pytest.approx([1, 1, 1], abs=1e-5)
    assert page.locator("#maps-text textarea").input_value() == "w7 w8 w9"
    expect(page.locator("#maps-link textarea")).to_have_value(page.url, timeout=WAIT)
    assert page.faults == []
    page.context.close()


def test_long_text_is_refused_on_the_page(page: Page) -> None:
    view(page, "Maps")
    page.locator("#maps-text textarea").fill("w7 " * 513)
    page.locator("#show-maps").click()
    message = "The text has 513 tokens for differential. The limit is 512: shorten it."
    expect(page.get_by_text(message)).to_be_visible(timeout=WAIT)


def test_figures_and_their_numbers_are_downloaded(page: Page, tmp_path: Path) -> None:
    view(page, "Maps")
    page.locator("#maps-text textarea").fill("w7 w8 w9")
    page.locator("#show-maps").click()
    shows(page, "heads", 3)
    plot = page.locator("#heads .js-plotly-plot").nth(2)
    assert page.locator("[data-title*='hare'], [data-title*='loud']").count() == 0
    for title, name in {
        "Download plot": "layer_0_head_0_3.png",
        "Download the numbers as JSON": "layer_0_head_0_3.json",
    }.items():
        plot.hover()
        with page.expect_download() as download:
            plot.locator(f"[data-title^='{title}']").click()
        assert download.value.suggested_filename == name
        download.value.save_as(tmp_path / name)
    assert (tmp_path / "layer_0_head_0_3.png").read_bytes().startswith(b"\x89PNG")
    (trace,) = json.loads((tmp_path / "layer_0_head_0_3.json").read_text())
    assert trace["x"] == trace["y"] == ["0 w7", "1 w8", "2 w9"]
    assert trace["z"] == values(page, "heads", 2)


def test_needle_shows_the_parts_of_each_layer(page: Page) -> None:
    view(page, "Needle")
    page.locator("#needle-text textarea").fill("w7 w8 [[w9 w10]] w11")
    page.get_by_label("absolute").check()
    page.locator("#measure").click()
    shows(page, "bars", 2)
    sums = page.locator("#bars .js-plotly-plot").evaluate_all(
        "plots => plots.map(plot => plot._fullData.map(trace => Array.from(trace.y)))"
    )
    for parts in sums:
        assert [sum(layer) for layer in zip(*parts, strict=True)] == pytest.approx([1, 1], abs=1e-5)
    page.locator("#needle-text textarea").fill("w7 w8")
    page.locator("#measure").click()
    expect(page.get_by_text("The text must mark one answer as [[answer]], found 0.")).to_be_visible(timeout=WAIT)


def test_reload_during_an_answer(page: Page, server: Server) -> None:
    threads = psutil.Process(server.process.pid).num_threads()
    set_tokens(page, 1024)
    ask(page, "w7 w8")
    expect(page.locator("#speed-0")).to_contain_text("tokens/s", timeout=WAIT)
    page.reload()
    wait_until_ready(page)
    time.sleep(1)
    assert psutil.Process(server.process.pid).num_threads() <= threads + 1  # the generation has ended, too
    expect(page.locator("#message textarea")).to_have_value("w7 w8", timeout=WAIT)  # from the link
    set_tokens(page, 10)
    ask(page, "w9 w10")
    expect(page.locator("#speed-1")).to_contain_text("10 tokens", timeout=WAIT)
    assert "w7" not in conversation(page).split()[:2]


def test_two_visitors_do_not_see_each_others_text(browser: Browser, server: Server) -> None:
    visitors = [open_page(browser, server.address) for _ in range(2)]
    words = ("w40 w41", "w50 w51")
    for visitor, word in zip(visitors, words, strict=True):
        set_tokens(visitor, 100)
        ask(visitor, word)
    for visitor in visitors:
        expect(visitor.locator("#speed-1")).to_contain_text("100 tokens", timeout=WAIT)
    for visitor, own, other in zip(visitors, words, words[::-1], strict=True):
        assert own in conversation(visitor, 0)
        assert own in conversation(visitor, 1)
        assert other not in visitor.content()
        assert visitor.faults == []
        visitor.context.close()


@pytest.mark.parametrize("tab", ["Chat", "Maps", "Needle"])
def test_page_fits_a_telephone(browser: Browser, server: Server, tab: str) -> None:
    page = open_page(browser, server.address, width=390, height=844)
    view(page, tab)
    button = {"Maps": "#show-maps", "Needle": "#measure"}.get(tab)
    if button:
        page.locator(button).click()
        shows(page, {"Maps": "heads", "Needle": "bars"}[tab], {"Maps": 3, "Needle": 2}[tab])
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.faults == []
    page.context.close()


NEEDLE = TEXT.replace("[ London sister]", "[[[ London sister]]]", 1).removesuffix("[ London")


def test_pictures_of_the_documentation(browser: Browser, tmp_path: Path) -> None:
    """The trained model of the repository, as docs/explore.md shows it."""
    folder = Path(os.environ.get("SCREENSHOTS") or tmp_path)
    for server in explore(tmp_path / "log.txt", RECALL_MODEL):
        page = open_page(browser, server.address)
        set_tokens(page, 2)
        ask(page, TEXT)
        expect(page.locator("#chat-0")).to_contain_text("sister", timeout=WAIT)
        page.get_by_role("button", name="Settings").click()
        page.evaluate("scrollTo(0, 0)")
        time.sleep(0.5)
        page.screenshot(path=folder / "explore_chat.png")
        views = {
            "maps": ({"text": TEXT, "layer": 1, "head": 1}, "heads", 3),
            "needle": ({"before": "", "text": NEEDLE, "question": "[ London", "kind": "signed"}, "bars", 1),
        }
        for name, (settings, figures, count) in views.items():
            page.goto(f"{server.address}/#{urlencode({'view': name} | settings)}")
            page.reload()
            shows(page, figures, count)
            page.locator(f"#{figures}").scroll_into_view_if_needed()
            time.sleep(0.5)
            page.screenshot(path=folder / f"explore_{name}.png", full_page=True)
        narrow = open_page(browser, page.url, width=390, height=844)
        shows(narrow, "bars", 1)
        narrow.screenshot(path=folder / "explore_narrow.png", full_page=True)
        assert page.faults == narrow.faults == []
        page.context.close()
        narrow.context.close()
    assert {file.name for file in folder.glob("explore_*.png")} == {
        f"explore_{name}.png" for name in ("chat", "maps", "needle", "narrow")
    }
