"""The pictures of pages in README and docs: `make screenshots` takes them of a demo that it runs first."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Playwright, sync_playwright

HERE = Path(__file__).parent / "screenshots"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync"]
SHOTS = {
    "report": (1400, 1500, "light"),
    "report-phone-dark": (390, 1600, "dark"),
    "list": (1400, 460, "light"),
}


def main() -> None:
    """Run the demo and photograph its report and the list of its runs."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as tools:
        subprocess.run([sys.executable, "-m", "coterie", "demo", "--out", f"{folder}/demo"], check=True)
        with _served(folder) as address:
            _taken(tools, folder, address)


@contextmanager
def _served(folder: str) -> Iterator[str]:
    """The address at which runs are listed."""
    command = [sys.executable, "-m", "coterie", "serve", f"{folder}/demo", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split()[0]
        finally:
            server.terminate()


def _taken(tools: Playwright, folder: str, address: str) -> None:
    """Take all pictures."""
    report = Path(folder, "demo", "report.html").as_uri()
    browser = tools.chromium.launch(executable_path="/usr/bin/chromium", args=FLAGS)
    for name, (width, height, scheme) in SHOTS.items():
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        page.goto(address if name.startswith("list") else report)
        page.screenshot(path=HERE / f"{name}.png")
    browser.close()


if __name__ == "__main__":
    main()
