"""The local web page: what it lists and shows, what it refuses, and that it only reads."""

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
import warnings

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from safetensors.torch import load

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of newer versions, which would rather have another package than httpx
    from starlette.testclient import TestClient

import coterie as ct
from coterie import testing
from coterie.serve import access, stream
from coterie.serve.app import SHOWN, application
from coterie.serve.index import Index
from coterie.serve.stamps import Stamps

HOSTILE = "<script>alert(1)</script>"
TOKEN = "a token that is long enough"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run, which tests copy."""
    out = tmp_path_factory.mktemp("trained") / "run"
    task = ct.Task.classifier(ct.models.MLP(64, 16, 10))
    ct.fit(ct.IFCA(k=3), task, testing.ragged(), rounds=4, out=out, device="cpu")
    return out


@pytest.fixture
def root(tmp_path, trained):
    """A folder with a finished run, a nested one and one that has just begun its third round."""
    folder = tmp_path / "runs"
    for name in ("whole", "sweep/k=3/seed 0", "going"):
        shutil.copytree(trained, folder / name)
    shutil.rmtree(folder / "going" / "final")
    events = folder / "going" / "events.jsonl"
    lines = [line for line in events.read_text().splitlines(keepends=True) if '"round"' in line.partition(",")[0]]
    events.write_text("".join(lines[:2]) + lines[2][:40])
    return folder


def client(root, token=None, host="127.0.0.1", **options):
    return TestClient(application(root, host=host, port=1, token=token), base_url=f"http://{host}", **options)


def rows(answer):
    """The rows of the list by name: the text of their cells."""
    assert answer.status_code == 200
    cells = [re.findall(r"<td.*?</td>", row, re.DOTALL) for row in answer.text.split("<tbody>")[-1].split("</tr>")]
    plain = [[re.sub(r"<[^>]*>", " ", cell).split() for cell in row] for row in cells if row]
    return {" ".join(row[1]): [" ".join(cell) for cell in row[2:]] for row in plain}


def content(folder):
    """All there is below a folder: what, when and how large."""
    found = {}
    for path in sorted(folder.rglob("*")):
        told = path.lstat()
        found[str(path)] = told.st_mtime_ns, told.st_size, told.st_mode
    return found


def test_the_list_says_how_each_run_stands(root):
    listed = rows(client(root).get("/"))
    assert set(listed) == {"whole", "sweep/k=3/seed 0", "going"}
    assert listed["whole"][:2] == ["finished", "4 of 4"]
    assert listed["whole"][2].endswith("accuracy") and listed["whole"][3] == "ifca"
    assert listed["going"][:2] == ["running", "2 of 4"]
    for name in ("events.jsonl", "config.toml"):
        os.utime(root / "going" / name, (1, 1))
    assert rows(client(root).get("/"))["going"][0] == "stopped"


def test_the_list_filters_sorts_and_pages(root):
    for i in range(SHOWN):
        shutil.copytree(root / "going", root / "many" / f"r{i:03d}")
    page = client(root)
    assert len(rows(page.get("/"))) == SHOWN
    assert len(rows(page.get("/?page=2"))) == 3 and len(rows(page.get("/?page=99999"))) == 3
    assert set(rows(page.get("/?q=finished"))) == {"whole", "sweep/k=3/seed 0"}
    assert set(rows(page.get("/?q=SEED+ifca"))) == {"sweep/k=3/seed 0"}
    names = list(rows(page.get("/?sort=name&order=down")))
    assert names == sorted(names, reverse=True)
    assert list(rows(page.get("/?sort=progress&order=down")))[:2] == ["sweep/k=3/seed 0", "whole"]
    for odd in ("/?sort=__class__&order=x&page=-1", "/?page=1e9&q=%00%ff", "/?q=" + "x" * 5000):
        assert page.get(odd).status_code == 200
    assert "No run has all" in page.get("/?q=nothing-like-it").text


def test_a_list_does_not_wait_for_all_runs_to_be_read(root):
    index = Index(root)
    first = index.rows(patience=-1)
    assert {row.status(time.time()) for row in first} == {"unread"} and len(first) == len(index.rows(patience=-1))
    assert "unread" not in {row.status(time.time()) for row in index.rows()}
    assert not any(row.unread for row in index.rows(patience=-1))  # what is known stays known
    assert [row.changed for row in first] == sorted((row.changed for row in first), reverse=True)


def test_runs_that_are_not_read_yet_are_read_meanwhile(root, monkeypatch):
    asked, whole = [], Index.rows

    def slowly(index, patience):
        asked.append(patience)
        return whole(index, -1 if len(asked) == 1 else patience)

    monkeypatch.setattr(Index, "rows", slowly)
    monkeypatch.setattr("coterie.serve.app.FRESH", 0.0)
    with client(root) as asking:
        assert 'class="badge unread"' in asking.get("/").text
        assert 'class="badge finished"' in asking.get("/").text
    assert len(asked) >= 3  # both lists, and meanwhile


def test_an_empty_folder_is_a_page(tmp_path):
    assert "no run folders here yet" in client(tmp_path).get("/").text


def test_only_what_was_added_is_read_again(root):
    index, events = Index(root), root / "going" / "events.jsonl"
    index.rows()
    whole = {row.name: row for row in index.rows()}
    at = index._known["going"].tally.read
    assert at == sum(len(line) for line in events.read_bytes().splitlines(keepends=True)[:2])
    text = (root / "whole" / "events.jsonl").read_text().splitlines(keepends=True)
    third = next(line for line in text if '"round": 3,' in line)
    with events.open("a") as f:
        f.write(third[40:])
    again = {row.name: row for row in index.rows()}
    assert again["going"].done == 3 and again["whole"] is whole["whole"]
    events.write_text(third)  # a run that was resumed: shorter than before
    assert index.row("going").done == 1
    shutil.rmtree(root / "going")
    assert "going" not in {row.name for row in index.rows()} and "going" not in index._known


@pytest.mark.parametrize("name", ["whole", "sweep/k=3/seed 0", "going"])
def test_pages_of_a_run(root, name):
    page, address = client(root), f"/runs/{name}".replace(" ", "%20")
    live = page.get(address)
    assert live.status_code == 200 and '<div id="live"' in live.text and "<svg" in live.text
    body = page.get(f"{address}/body").text
    assert body.strip() in live.text and "<html" not in body
    report = page.get(f"{address}/report.html")
    assert report.headers["content-disposition"].startswith("attachment") and "<svg" in report.text
    assert "EventSource" not in report.text


def test_models_are_downloaded_as_they_are(root):
    answer = client(root).get("/runs/whole/models/cluster-0.safetensors")
    assert answer.content == (root / "whole" / "final" / "cluster-0.safetensors").read_bytes()
    assert load(answer.content) and "attachment" in answer.headers["content-disposition"]
    for other in ("cluster-99.safetensors", "result.json", "../config.toml", "cluster-0.safetensors/.."):
        assert client(root).get(f"/runs/whole/models/{other}").status_code == 404


def test_runs_are_compared(root):
    (root / "torn" / "final").mkdir(parents=True)
    (root / "torn" / "config.toml").write_text("[")
    page = client(root)
    both = page.get("/compare", params={"run": ["whole", "sweep/k=3/seed 0", "going"]})
    assert both.status_code == 200 and "Runs beside each other" in both.text
    assert "Not shown: torn" in page.get("/compare?run=whole&run=torn").text
    assert page.get("/compare?run=torn").status_code == 200
    assert page.get("/compare?run=whole&run=none").status_code == 404
    assert page.get("/compare").status_code == 400
    assert page.get("/compare?" + "&".join(f"run={i}" for i in range(51))).status_code == 400


def test_a_run_whose_name_ends_as_a_part_does_is_a_run(root):
    for name in ("a/body", "b/events", "c/models/cluster-0.safetensors"):
        shutil.copytree(root / "whole", root / name)
        assert '<div id="live"' in client(root).get(f"/runs/{name}").text
        assert "<html" not in client(root).get(f"/runs/{name}/body").text


# Reads only


def test_nothing_is_ever_written_or_run(root, tmp_path):
    mark = tmp_path / "executed"
    (root / "going" / "final").mkdir()
    (root / "going" / "final" / "cluster-0.safetensors").write_bytes(b"cos\nsystem\n(S'touch %s'\ntR." % bytes(mark))
    (root / "going" / "conftest.py").write_text(f"open({str(mark)!r}, 'w')")
    before, page = content(root), client(root)
    for name in ("whole", "going", "sweep/k=3/seed%200"):
        for part in ("", "/body", "/report.html", "/models/cluster-0.safetensors"):
            assert page.get(f"/runs/{name}{part}").status_code == 200
    assert page.get("/").status_code == page.get("/compare?run=whole&run=going").status_code == 200
    assert content(root) == before and not mark.exists()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_reading_is_answered(root, method):
    for path in ("/", "/runs/whole", "/runs/whole/events", "/compare"):
        assert client(root).request(method, path).status_code == 405


def test_head_has_no_content_and_ends(root):
    for path in ("/", "/runs/whole", "/runs/whole/events", "/runs/whole/models/cluster-0.safetensors"):
        answer = client(root).head(path)
        assert answer.status_code == 200 and not answer.content


# Text stays text


def test_hostile_names_stay_text(root, trained):
    long = "x" * 10_000
    folder = root / HOSTILE.replace("/", "_") / "a\x07\x1b[2J\nb\u202e"
    shutil.copytree(trained, folder)
    config = (folder / "config.toml").read_text()
    named = config.replace('name = "ifca"', f'name = "{HOSTILE}{long}"', 1)
    (folder / "config.toml").write_text(named)
    result = json.loads((folder / "final" / "result.json").read_text())
    names = [HOSTILE, long, "\x00\x1b[31m", '"><img src=x onerror=alert(1)>']
    result["ids"] = [names[i % 4] + str(i) for i in range(len(result["labels"]))]
    result["warnings"] = [HOSTILE]
    (folder / "final" / "result.json").write_text(json.dumps(result))
    page = client(root)
    listed = page.get("/")
    (address,) = re.findall(r'href="(/runs/%3Cscript[^"]*)"', listed.text)
    (key,) = re.findall(r'value="(%3Cscript[^"]*)"', listed.text)
    answers = [listed, page.get(f"/?q={HOSTILE}"), page.get("/compare", params={"run": [key, "whole"]})]
    answers += [page.get(address + part) for part in ("", "/body", "/report.html")]
    for answer in answers:
        assert answer.status_code == 200
        scripts = re.findall(r"<script.*?>", answer.text, re.IGNORECASE)
        assert scripts in ([], ["<script>"]) and "alert(1)</script>" not in answer.text
        assert "<img" not in answer.text and not re.search("[\x00-\x08\x0b-\x1f\u202e]", answer.text)
        assert len(answer.text) < 400_000


def test_names_that_are_no_text_have_addresses(root, trained):
    folder = os.fsdecode(os.fsencode(str(root)) + b"/caf\xe9")
    shutil.copytree(trained, folder)
    page = client(root)
    assert "/runs/caf%E9" in page.get("/").text
    assert page.get("/runs/caf%E9").status_code == 200
    assert page.get("/compare?run=caf%25E9&run=whole").status_code == 200


def test_only_scripts_of_the_page_itself_may_run(root):
    for path in ("/", "/runs/whole", "/compare?run=whole"):
        policy = client(root).get(path).headers["content-security-policy"]
        scripts = re.search("script-src ([^;]*)", policy)[1]
        assert scripts.startswith("'sha256-") and "unsafe" not in scripts
        for part in ("default-src 'none'", "style-src 'unsafe-inline'", "img-src data:", "connect-src 'self'"):
            assert part in policy


def test_every_answer_has_the_headers(root):
    for path in ("/", "/runs/whole/body", "/runs/none", "/nowhere", "/runs/whole/models/cluster-0.safetensors"):
        headers = client(root).get(path).headers
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
        assert headers["content-security-policy"].startswith("default-src 'none'")


# Broken runs

BROKEN = {
    "config.toml": ["", "[", "algorithm = 3", "\x00", '[run]\nrounds = "x"\n[algorithm]\nname=1\n[data]\nname=[]\n'],
    "events.jsonl": [
        '{"event": "rou\n', "[]\n", "3\n", "null\n", '{"event": "round"}\n', '{"event": "round", "members": 3}\n',
        '{"event": "round", "round": "x", "loss": {}, "seconds": [], "acc": "y", "per_cluster": 1, "members": "z"}\n',
        "[" * 100_000 + "\n", '{"round": 1}\n', '{"event": "round", "round": 1e999, "seconds": NaN}\n',
    ],
    "final/result.json": [
        "", "{", "[]", "{}", '{"labels": 3, "score": 1}', '{"labels": [], "score": "x", "metric": []}', "9" * 5000,
        '{"labels": [{}], "score": null, "metric": "accuracy", "per_cluster": {"x": 1}}',
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in BROKEN.items() for text in texts])
def test_a_broken_run_is_shown_as_that(root, name, text):
    (root / "whole" / name).write_text(text)
    page = client(root)
    listed = rows(page.get("/"))
    assert len(listed) == 3  # the others are there too
    shown = page.get("/runs/whole")
    assert shown.status_code == page.get("/runs/whole/body").status_code == 200
    status = next(cells[0] for row, cells in listed.items() if row.startswith("whole"))
    assert status == "damaged" or "This run is damaged" in shown.text or "<svg" in shown.text
    if name == "config.toml":
        assert status == "damaged" and "This run is damaged" in shown.text
    assert page.get("/runs/whole/report.html").status_code in (200, 409)
    assert page.get("/compare?run=whole&run=going").status_code == 200


@pytest.mark.parametrize("missing", ["config.toml", "events.jsonl", "final/result.json", "final", "checkpoints"])
def test_missing_files_take_nothing_down(root, missing):
    path = root / "whole" / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    page = client(root)
    listed = rows(page.get("/"))
    assert page.get("/runs/whole").status_code == 200
    status = next(cells[0] for row, cells in listed.items() if row.startswith("whole"))
    assert status == {"config.toml": "damaged", "checkpoints": "finished", "events.jsonl": "finished"}.get(
        missing, "running"
    )


def test_bytes_that_are_no_text_are_damage(root):
    for name in BROKEN:
        (root / "whole" / name).write_bytes(b"\xff\xfe\x00")
    assert client(root).get("/runs/whole").status_code == 200
    listed = rows(client(root).get("/"))
    assert any(cells[0] == "damaged" for cells in listed.values())


def test_pipes_and_links_in_a_run_are_not_read(root, tmp_path):
    secret = tmp_path / "secret.toml"
    secret.write_text('[algorithm]\nname = "the secret"\n[data]\nname = "d"\n[run]\nrounds = 1\n')
    (root / "whole" / "config.toml").unlink()
    (root / "whole" / "config.toml").symlink_to(secret)
    (root / "going" / "events.jsonl").unlink()
    os.mkfifo(root / "going" / "events.jsonl")
    page = client(root)
    for path in ("/", "/runs/whole", "/runs/going", "/compare?run=whole&run=going"):
        answer = page.get(path)
        assert answer.status_code == 200 and "the secret" not in answer.text
    assert page.get("/runs/whole/models/cluster-0.safetensors").status_code == 404


# Paths


def test_nothing_outside_the_folder_is_served(root, tmp_path, trained):
    outside = tmp_path / "outside"
    shutil.copytree(trained, outside)
    (root / "link").symlink_to(outside)
    (root / "up").symlink_to("..")
    shutil.copytree(trained, root / ".hidden")
    shutil.copytree(trained, root / "1" / "2" / "3" / "4" / "5")
    model = root / "whole" / "final" / "cluster-1.safetensors"
    model.unlink()
    model.symlink_to(outside / "final" / "cluster-1.safetensors")
    page = client(root)
    tried = [
        "../outside", "%2e%2e/outside", "%2e%2e%2foutside", "..%5coutside", "whole/../../outside", "link", "up/outside",
        "/" + str(outside), str(outside), "%2F" + str(outside)[1:], ".hidden", "1/2/3/4/5", "whole%00", ".", "",
        "whole/.", "./whole", "whole//body", "%252e%252e/outside", "x" * 3000, "whole/final", "link/../whole",
    ]  # fmt: skip
    for name in tried:
        for part in ("", "/body", "/events", "/report.html", "/models/cluster-0.safetensors"):
            scope_path = f"/runs/{name}{part}"
            status, _ = asyncio.run(raw(root, scope_path))
            assert status == 404, scope_path
    assert page.get("/runs/whole/models/cluster-1.safetensors").status_code == 404
    assert page.get("/compare", params={"run": ["../outside"]}).status_code == 404
    assert set(rows(page.get("/"))) == {"whole", "sweep/k=3/seed 0", "going"}


async def raw(root, path, headers=((b"host", b"127.0.0.1"),), query=b""):
    """An answer to an address that no client has tidied up: its status and its headers."""
    from urllib.parse import unquote

    sent = []
    scope = {
        "type": "http", "method": "HEAD", "path": unquote(path), "raw_path": path.encode(), "query_string": query,
        "headers": list(headers), "root_path": "", "scheme": "http", "http_version": "1.1", "server": ("127.0.0.1", 1),
    }  # fmt: skip

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    await application(root, host="127.0.0.1", port=1)(scope, receive, send)
    return sent[0]["status"], sent[0]["headers"]


# Who may read


def test_other_hosts_demand_a_token():
    access.check("127.0.0.1", None)
    access.check("::1", None)
    access.check("localhost", None)
    for host in ("0.0.0.0", "::", "192.168.0.7", "example.org"):
        with pytest.raises(ValueError, match="--token"):
            access.check(host, None)
        access.check(host, TOKEN)
    with pytest.raises(ValueError, match="at least 12"):
        access.check("0.0.0.0", "short")


def test_the_command_refuses_with_one_line(coterie, root, tmp_path, monkeypatch):
    monkeypatch.delenv("COTERIE_TOKEN", raising=False)
    for words, said in (
        ((root, "--host", "0.0.0.0"), "--token"),
        ((tmp_path / "none",), "is not a folder"),
        ((root / "whole",), "run folder itself"),
    ):
        code, _, error = coterie("serve", *words)
        assert code == 2 and said in error and error.count("\n") == 1
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, _, error = coterie("serve", root, "--port", taken.getsockname()[1])
    assert code == 2 and "cannot be used" in error
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, _, error = coterie("serve", root)
    assert code == 2 and "pip install coterie[serve]" in error and error.count("\n") == 1


@pytest.mark.parametrize("path", ["/", "/runs/whole", "/runs/whole/events", "/runs/none", "/compare", "/nowhere"])
def test_without_the_token_nothing_is_told(root, path):
    page = client(root, TOKEN, host="0.0.0.0")
    for answer in (
        page.get(path),
        page.get(path, params={"token": TOKEN + "x"}),
        page.get(path, headers={"Authorization": "Bearer wrong"}),
        page.get(path, headers={"Authorization": f"Basic {TOKEN}"}),
        page.get(path, headers={"Cookie": f"coterie-1={TOKEN}"}),  # the cookie holds its digest
        page.get(path, headers={"Cookie": "coterie-1=é; ;;=".encode("latin-1")}),
        page.post(path),
    ):
        assert answer.status_code == 401 and "set-cookie" not in answer.headers and "whole" not in answer.text


def test_the_token_lets_in(root):
    assert client(root, TOKEN).get("/", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    page = client(root, TOKEN)
    first = page.get("/", params={"q": "whole", "token": TOKEN})
    cookie = first.headers["set-cookie"]
    assert first.status_code == 200 and "HttpOnly" in cookie and "SameSite=Strict" in cookie and TOKEN not in cookie
    assert first.headers["refresh"] == "0; url=/?q=whole"  # the address with the token does not stay
    again = page.get("/?q=whole")  # the same page, which the server keeps for a while
    assert again.status_code == 200 and "refresh" not in again.headers and "set-cookie" not in again.headers
    assert page.get("/runs/whole").status_code == 200


def test_tokens_are_compared_in_constant_time(root, monkeypatch):
    compared = []
    same = access.hmac.compare_digest
    monkeypatch.setattr(access.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or same(a, b))
    client(root, TOKEN).get("/?token=x")
    assert (b"x", TOKEN.encode()) in compared and len(compared) == 3  # all three, whichever is right


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "", "evil.example:8750", "[::2]", "localhost.x"]
)
def test_another_name_for_this_machine_is_refused(root, host):
    status, _ = asyncio.run(raw(root, "/", [(b"host", host.encode())]))
    assert status == 400


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:99", "127.0.0.1:8750", "[::1]:8750", "[::1]"])
def test_its_own_names_are_served(root, host):
    status, _ = asyncio.run(raw(root, "/", [(b"host", host.encode())]))
    assert status == 200


# Events


def test_a_message_for_every_change(root, monkeypatch):
    monkeypatch.setattr(stream, "PAUSE", 0.01)
    folder, ended = root / "going", []

    async def watch():
        events = stream.changes(folder, Stamps.of(folder).version, lambda: bool(ended))
        assert (await anext(events)).startswith("retry:")
        assert "still here" in await anext(events)
        with (folder / "events.jsonl").open("a") as f:
            f.write(" ")
        told = await anext(events)
        assert told == f"id: {(now := Stamps.of(folder).version)}\ndata: {now}\n\n"
        (folder / "final").mkdir()
        (folder / "final" / "result.json").write_text("{}")
        assert "data:" in await anext(events)
        ended.append(True)
        assert [line async for line in events] == []
        late = stream.changes(folder, "what was seen before", lambda: False)
        await anext(late)
        assert "data:" in await anext(late)

    asyncio.run(asyncio.wait_for(watch(), 20))


@pytest.fixture
def served(root):
    """A real server on a free port, in a process of its own."""
    command = [sys.executable, "-m", "coterie", "serve", str(root), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process, process.stdout.readline().split()[0]
    finally:
        process.kill()
        process.communicate(timeout=20)


def test_a_real_server_streams_and_ends(served, root):
    process, address = served
    assert address.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(f"{address}runs/going/events", timeout=20) as events:
        assert events.headers["content-type"].startswith("text/event-stream")
        while not events.readline().startswith(b"data:"):
            pass
        begin = time.monotonic()
        with (root / "going" / "events.jsonl").open("a") as f:
            f.write("\n")
        while not events.readline().startswith(b"data:"):
            pass
        assert time.monotonic() - begin < 10
        process.terminate()  # with somebody watching
        assert events.read() is not None
    assert process.wait(20) != 0
    assert process.stderr.read() == ""
