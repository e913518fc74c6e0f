"""The documentation: what it tells readers to run is run, and the site builds without a warning."""

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from coterie.core import registry

ROOT = Path(__file__).parent.parent
HOME = ROOT / "docs" / "index.md"
PRINTS = re.compile(r"^```python\n(?:(?!^```).)*^```\s+^```text$", re.MULTILINE | re.DOTALL)
GUIDES = [page for page in sorted((ROOT / "docs" / "how-to").glob("*.md")) if PRINTS.search(page.read_text("utf-8"))]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md")), *GUIDES]
BLOCK = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r'title="([^"]+)"')
SNIPPET = re.compile(r'^--8<-- "([^"]+)"$', re.MULTILINE)
LOADED = re.compile(r'(?:src|stylesheet" href)="(https?:[^"]+)"')
SOURCE = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src" / "coterie").rglob("*.py"))
WORDS = set(re.findall(r"\w+", SOURCE))
BARE = re.sub(r"\s+", "", SOURCE)
QUOTED = re.compile(r"`([^`]+)`")
NUMBER = re.compile(r"-?\d+\.\d+")
SLOW = ("tests every engine", "needs Flower's nodes")  # why a block may be marked with .no-run


def blocks(page):
    """Every block of a page: what stands behind its fence, and its text with included files."""
    for found in BLOCK.finditer(page.read_text(encoding="utf-8")):
        yield found["info"].strip(), SNIPPET.sub(lambda m: (ROOT / m[1]).read_text(encoding="utf-8"), found["text"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    """All blocks in one namespace, in order. A block with a title is a file, which later blocks may import.

    A block of text after one of Python that prints is what it prints.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    registry.owners()  # everything is loaded before, so that only the page's own classes are forgotten afterwards
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    before, names, printed = set(sys.modules), {"__name__": page.stem}, None
    try:
        for info, text in blocks(page):
            if title := TITLE.search(info):
                Path(title[1]).write_text(text, encoding="utf-8")
            elif info == "python":
                with contextlib.redirect_stdout(io.StringIO()) as printed:
                    exec(compile(text, f"{page.name}:{text.splitlines()[0]}", "exec"), names)
                continue
            elif info == "text" and printed is not None and printed.getvalue():
                assert_prints(printed.getvalue(), text)
            printed = None
    finally:
        for name in [n for n, m in sys.modules.items() if n not in before and _is_in(m, tmp_path)]:
            del sys.modules[name]


def assert_prints(printed, text):
    """The same words; numbers with a point may differ a little from machine to machine."""
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", text).split(), f"printed was:\n{printed}"
    numbers = [[float(n) for n in NUMBER.findall(each)] for each in (printed, text)]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.05, abs=0.005), f"printed was:\n{printed}"


def _is_in(module, folder):
    return Path(getattr(module, "__file__", None) or "/").is_relative_to(folder)


def test_the_home_page_shows_the_python_of_the_readme():
    shown, run = ([text for info, text in blocks(page) if info == "python"] for page in (HOME, ROOT / "README.md"))
    assert shown == run


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "methods").glob("*.md")), ids=lambda page: page.stem)
def test_the_code_beside_a_papers_lines_is_in_the_source(page):
    quoted = [code for cell in cells(page, "method", "code") for code in QUOTED.findall(cell)]
    gone = [code for code in quoted if not is_in_source(code)]
    assert not gone, f"these are not in the source: {gone}"


def is_in_source(code):
    """Whether there is a file, a name, a setting or a piece of code like this; "…" stands for anything."""
    if code.endswith(".py"):
        return (ROOT / "src" / "coterie" / code).is_file()
    if setting := re.fullmatch(r"(\w+)=\S+", code):
        return setting[1] in WORDS
    if re.fullmatch(r"[\w.]+", code):
        return code.rpartition(".")[2] in WORDS
    return all(_bare(part) in BARE for part in code.split("…"))


def cells(page, *columns):
    """The cells of some columns, of all tables that have the first of the columns and one with line numbers."""
    header = []
    for line in page.read_text(encoding="utf-8").splitlines():
        row = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        header = (header or row) if row else []
        if header and header[0] in ("lines", "paper", "report") and "method" in header:
            yield from (cell for name, cell in zip(header, row, strict=True) if name in columns)


def _bare(code):
    return re.sub(r"\s+", "", code)


def test_few_blocks_are_not_run():
    infos = [info for page in PAGES for info, _ in blocks(page) if "python" in info]
    kinds = {info if "title" not in info else "file" for info in infos}
    assert kinds <= {"python", "file", "{.python .no-run}"}, f"a block's fence is not known: {kinds}"
    assert sum("no-run" in info for info in infos) <= len(SLOW) and infos.count("python") >= 10


def test_the_site_builds_strictly(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = {path.relative_to(tmp_path / "site"): path.read_text() for path in (tmp_path / "site").rglob("*.html")}
    own = [name for name, cls in registry.known("method").items() if cls.__module__.startswith("coterie.")]
    assert own and all(f"<code>{name}</code>" in pages[Path("methods/index.html")] for name in own)
    loaded = {url for text in pages.values() for url in LOADED.findall(text)}
    assert not loaded, f"the site loads {loaded}"


def test_pictures_of_results_are_those_of_the_results():
    """Not copies, which stay as they are when a result is made again, nor files that hold a path."""
    pictures = sorted((ROOT / "docs/results").iterdir())
    assert len(pictures) > 20
    for picture in pictures:
        assert picture.is_symlink(), picture
        assert picture.resolve().parent in (ROOT / "experiments/results", ROOT / "benchmarks"), picture
        assert picture.read_bytes().startswith(b"\x89PNG"), picture


def test_every_test_that_the_threat_table_names_is_there():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs/explanation/trust.md").read_text()))
    source = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    assert len(named) > 30 and not named - set(re.findall(r"^def (test_\w+)", source, re.MULTILINE))
