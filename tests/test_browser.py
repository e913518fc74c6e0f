"""The pages in a real browser, beside a run that trains in another process."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

import coterie as ct
from coterie import testing

pytest.importorskip("starlette")
sync_api = pytest.importorskip("playwright.sync_api")

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")

QUIET = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
HOSTILE = "<script>alert(1)<"  # a folder's name has no slash
PATIENCE = 60_000  # milliseconds: other tests use the same cores
sync_api.expect.set_options(timeout=PATIENCE)

TRAIN = """
import sys, time
import coterie as ct
from coterie import testing
task = ct.Task.classifier(ct.models.MLP(64, 16, 10))
slow = lambda row, run: time.sleep(0.4)
ct.fit(ct.IFCA(k=3), task, testing.ragged(), rounds=400, out=sys.argv[1], device="cpu", callbacks=[slow])
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with finished runs, one of them with a hostile name."""
    folder = tmp_path_factory.mktemp("browser") / "runs"
    task = ct.Task.classifier(ct.models.MLP(64, 16, 10))
    ct.fit(ct.IFCA(k=3), task, testing.ragged(), rounds=4, out=folder / "first", device="cpu")
    ct.fit(ct.FedAvg(), task, testing.ragged(), rounds=4, out=folder / "nested" / "second", device="cpu")
    shutil.copytree(folder / "first", folder / HOSTILE)
    return folder


@pytest.fixture(scope="module")
def address(runs):
    """Where a server of the folder answers."""
    command = [sys.executable, "-m", "coterie", "serve", str(runs), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    yield process.stdout.readline().split()[0]
    process.terminate()
    process.communicate(timeout=30)


@pytest.fixture(scope="module")
def training(runs):
    """The name of a run that another process is training."""
    process = subprocess.Popen(
        [sys.executable, "-c", TRAIN, str(runs / "live")], env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    end = time.monotonic() + 60
    while not (runs / "live" / "events.jsonl").exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.2)
    yield "live"
    process.kill()
    process.wait(30)


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    """A page on which nothing may go wrong: no error on the console, no dialog."""
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    wrong = []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: (wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    yield page
    page.close()
    assert wrong == []


def rounds(page):
    return int(re.search(r"(\d+) of 400 rounds", page.locator("#live").inner_text())[1])


def test_a_new_round_appears_by_itself(page, address, training):
    page.goto(f"{address}runs/{training}")
    page.evaluate("window.unloaded = false; document.querySelector('#live details').open = true; scrollTo(0, 200)")
    page.locator("#live button").first.focus()
    at, before = page.evaluate("scrollY"), rounds(page)
    page.wait_for_function(
        "n => +document.querySelector('#live').innerText.match(/(\\d+) of 400 rounds/)[1] > n + 1", arg=before
    )
    assert page.evaluate("window.unloaded") is False  # the same document
    assert page.evaluate("document.activeElement.dataset.save") == "svg"
    assert page.evaluate("document.querySelector('#live details').open")
    assert abs(page.evaluate("scrollY") - at) < 60
    assert page.locator("#live [data-status]").inner_text() == "running"


def test_the_filter_filters_and_the_list_follows(page, address, training):
    page.goto(address)
    sync_api.expect(page.locator("tbody tr")).to_have_count(4)
    page.get_by_label("Filter by name").fill("second")
    sync_api.expect(page.locator("tbody tr")).to_have_count(1)
    assert "q=second" in page.url
    page.get_by_label("Filter by name").fill("running")
    sync_api.expect(page.locator("tbody tr td.name")).to_have_text(["live"])
    shown = page.locator("tbody tr").inner_text()
    page.wait_for_function("old => document.querySelector('tbody tr').innerText !== old", arg=shown)
    page.get_by_label("Filter by name").fill("")
    page.get_by_role("link", name="run", exact=True).click()
    sync_api.expect(page.locator("tbody tr td.name").first).to_have_text(HOSTILE)


def test_all_that_was_asked_for_is_shown_however_late_answers_are(page, address):
    page.add_init_script(
        "const soon = fetch; fetch = async (a) => (await new Promise((r) => setTimeout(r, 800)), soon(a))"
    )
    page.goto(f"{address}?q=second")
    sync_api.expect(page.locator("tbody tr")).to_have_count(1)
    page.get_by_label("Filter by name").fill("")
    page.get_by_role("link", name="run", exact=True).click()  # before the filter has asked
    sync_api.expect(page.locator("tbody tr td.name").first).to_have_text(HOSTILE)
    page.get_by_role("link", name="run", exact=True).click()
    page.get_by_label("Filter by name").fill("second")  # before the other order is there
    sync_api.expect(page.locator("tbody tr")).to_have_count(1)
    page.get_by_label("Filter by name").fill("")
    sync_api.expect(page.locator("tbody tr td.name").last).to_have_text(HOSTILE)
    assert "sort=name" in page.url


def test_chosen_runs_are_compared_whatever_the_filter_shows(page, address):
    page.goto(address)
    page.get_by_label("Compare first").check()
    page.get_by_label("Filter by name").fill("second")
    sync_api.expect(page.locator("tbody tr")).to_have_count(1)
    page.get_by_label("Compare nested/second").check()
    page.get_by_role("button", name="Compare the chosen runs").click()
    page.get_by_role("heading", name="Runs beside each other").wait_for()
    assert page.locator(".path a").all_inner_texts() == ["first", "nested/second"]


def test_a_model_is_downloaded(page, address, tmp_path):
    page.goto(f"{address}runs/first")
    with page.expect_download() as waiting:
        page.get_by_role("link", name="cluster-0.safetensors").click()
    waiting.value.save_as(tmp_path / "model.safetensors")
    assert load_file(tmp_path / "model.safetensors")
    with page.expect_download() as waiting:
        page.get_by_role("link", name="Report, as one file").click()
    assert waiting.value.suggested_filename == "first.html"
    assert "<svg" in Path(waiting.value.path()).read_text(encoding="utf-8")


def test_paper_is_white_whatever_the_screen_is(page, address):
    page.emulate_media(media="print", color_scheme="dark")
    page.goto(f"{address}runs/first")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator("#live button").first.is_hidden()


def test_a_saved_chart_has_its_legend(page, address):
    page.goto(f"{address}runs/first")
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Save Score over the rounds as SVG").click()
    saved = Path(waiting.value.path()).read_text(encoding="utf-8")
    assert saved.startswith("<svg") and "mean over clients</text>" in saved and "var(--" not in saved
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Save Score over the rounds as PNG").click()
    assert Path(waiting.value.path()).read_bytes().startswith(b"\x89PNG")


def test_hostile_names_stay_text(page, address):
    page.goto(address)
    page.get_by_role("link", name=HOSTILE).click()
    page.locator("#live figure").first.wait_for()
    assert page.locator(".path").inner_text() == HOSTILE
    assert page.locator("script").count() == 1


def test_a_script_in_the_page_is_not_run(browser, address):
    page = browser.new_page()
    page.goto(f"{address}runs/first")
    ran = """() => { const s = document.createElement("script"); s.textContent = "window.ran = 1";
                     document.body.append(s); return window.ran; }"""
    assert page.evaluate(ran) is None  # the policy knows the page's own by their hashes
    page.close()


def test_all_of_it_by_keyboard(page, address):
    page.goto(address)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.get_by_label("Filter by name").focus()
    page.keyboard.type("second")
    sync_api.expect(page.locator("tbody tr")).to_have_count(1)
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.type") == "checkbox":
            break
    page.keyboard.press("Space")
    assert page.get_by_label("Compare nested/second").is_checked()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.locator("#live").wait_for()
    assert page.url.endswith("/runs/nested/second")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("path", ["", "runs/first", "compare?run=first&run=nested/second"])
def test_pages_are_accessible(page, address, path, dark):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page.emulate_media(color_scheme="dark" if dark else "light")
    page.goto(address + path)
    for width in (1400, 390):
        page.set_viewport_size({"width": width, "height": 900})
        found = axe.Axe().run(page).response["violations"]
        grave = {v["id"]: [n["html"] for n in v["nodes"]][:3] for v in found if v["impact"] in ("serious", "critical")}
        assert grave == {}
        assert page.evaluate("document.documentElement.scrollWidth") <= width
