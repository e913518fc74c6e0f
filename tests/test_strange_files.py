"""Run folders that strangers have touched: of 500 damaged or hostile files, each ends in one line or correctly."""

import bz2
import gzip
import io
import json
import lzma
import os
import random
import re
import resource
import shutil
import signal
import socket
import tomllib
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import coterie as ct
from coterie.callbacks import trackers
from coterie.runs.config import build
from coterie.storage import archives, snapshot
from coterie.tables.reading import read_table

CASES, BATCH = 500, 25
COMMANDS = ("show", "assign", "report", "resume")
SECONDS = 120  # after which a command counts as hung, which takes a tenth of a second
MEMORY = 6 * 2**30  # bytes that a command may ask for besides

RUN = """
[algorithm]
{algorithm}
[task]
kind = "classifier"
model = {{ name = "mlp", sizes = [64, 4, 10] }}
[data]
name = "permuted_digits"
clients = 8
groups = 2
[run]
rounds = 3
executor = "sequential"
device = "cpu"
[[callbacks]]
name = "checkpoint"
[[callbacks]]
name = "noted"
"""
ALGORITHMS = {
    "ifca": 'name = "ifca"\nk = 2\nrestarts = 1',
    "cfl": 'name = "cfl"\nschedule = [1]\npatience = 1\nholdout = 0.0',
}


@ct.register("noted", "callback")
@dataclass
class Noted(trackers._Tracker):
    """A tracker that only keeps its notes, trackers.json."""

    package, extra = "json", ""

    def _connect(self, settings, name, path, known):
        return known or "1"

    def _write(self, numbers, step):
        pass

    def _conclude(self, numbers, warnings, step):
        pass

    def _close(self, *, whole):
        pass


class Folders:
    """Whole run folders, and what comes of them if nothing is touched."""

    def __init__(self, base):
        self.base, self.models = base, {}
        rng = np.random.default_rng(0)
        np.savez(base / "new.npz", x=rng.normal(size=(6, 64)).astype(np.float32), y=rng.integers(0, 10, 6))
        for name, algorithm in ALGORITHMS.items():
            text = RUN.format(algorithm=algorithm)
            (base / f"{name}.toml").write_text(text.replace("rounds = 3", "rounds = 4"))
            built = build(tomllib.loads(text))
            fit = {"callbacks": built.callbacks, **built.run}
            ct.fit(built.algorithm, built.task, built.federation, out=base / name, **fit)
            longer = {**fit, "rounds": 4, "out": base / f"{name}-longer"}
            ct.fit(built.algorithm, built.task, built.federation, **longer)
            self.models[name] = _models(base / f"{name}-longer")

    def files(self, name):
        return sorted(p.relative_to(self.base / name) for p in (self.base / name).rglob("*") if p.is_file())


def _models(folder):
    return [file.read_bytes() for file in sorted((folder / "final").glob("cluster-*"))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return Folders(tmp_path_factory.mktemp("strange"))


# --- what strangers do ----------------------------------------------------------------------------------------------

VALUES = [None, True, -1, 0, 10**6, 10**18, 10**30, 10**400, 1e308, float("nan"), float("inf"), "", "x", "\x1b[2J[red]",
          [], {}, [[]], {"a": 1}, [None], [1e999, "x"], list(range(40))]  # fmt: skip


def _flip(path, rng):
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 3])):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def _truncate(path, rng):
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def _noise(path, rng):
    path.write_bytes(rng.randbytes(rng.choice([1, 100, 5000])))


def _double(path, rng):
    path.write_bytes(path.read_bytes() * 2)


def _empty(path, rng):
    path.write_bytes(b"")


def _gone(path, rng):
    path.unlink()


def _instead(make):
    def replace(path, rng):
        path.unlink()
        make(path)

    replace.__name__ = make.__name__
    return replace


def folder(path):
    path.mkdir()


def dangling(path):
    path.symlink_to(path.with_name("nowhere"))


def loop(path):
    path.symlink_to(path.name)


def device(path):
    path.symlink_to("/dev/zero")


def elsewhere(path):
    path.symlink_to("/etc/passwd")


def listener(path):
    at = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{at}/{path.name}"[:100])
    os.close(at)


def _deep(path, rng):
    depth = rng.choice([90, 1000, 20_000])
    tables = ["a = " + "[" * depth, "a = " + "{ b = " * depth, "a." * depth + "b = 1"]
    lists = ["[" * depth + "]" * depth, '{"a":' * depth, '{"event": "round", "round": ' + "[" * depth]
    path.write_text(rng.choice(tables if path.suffix == ".toml" else lists) + "\n")


def _places(value, at=()):
    """The paths to all values in a value of JSON."""
    yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from _places(each, (*at, key))


def _changed(value, at, rng):
    """The value with another one somewhere, or without it."""
    if not at:
        return rng.choice(VALUES)
    inner = dict(value) if isinstance(value, dict) else list(value)
    if rng.random() < 0.2:
        del inner[at[0]]
    else:
        inner[at[0]] = _changed(inner[at[0]], at[1:], rng)
    return inner


def _reshaped(value, rng):
    places = list(_places(value))
    shallow = [at for at in places if len(at) < 3]
    return _changed(value, rng.choice(rng.choice([places, shallow])), rng)


def _other_json(path, rng):
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    which = rng.randrange(len(lines))
    lines[which] = json.dumps(_reshaped(json.loads(lines[which]), rng))
    path.write_text("\n".join(lines) + "\n")


def _other_toml(path, rng):
    values = ["-1", "0", "9" * 30, "1e400", "nan", '"x"', "[]", "[1, [2]]", "{ a = 1 }", "true", '"\\u001b[2J"']
    lines = path.read_text().splitlines()
    which = rng.choice([i for i, line in enumerate(lines) if "=" in line])
    if rng.random() < 0.2:
        del lines[which]
    else:
        lines[which] = re.sub(r"= .*", lambda _: f"= {rng.choice(values)}", lines[which])
    path.write_text("\n".join(lines) + "\n")


def _other_tensors(path, rng):
    """A file that is whole, digest and all, but holds something else."""
    with safe_open(path, framework="pt") as file:
        tensors, header = {n: file.get_tensor(n) for n in file.keys()}, file.metadata() or {}  # noqa: SIM118
    name = rng.choice(sorted(tensors))
    change = rng.choice(["nan", "dtype", "shape", "gone", "tree", "tree"])
    if change == "nan" and tensors[name].is_floating_point():
        tensors[name] = torch.full_like(tensors[name], rng.choice([float("nan"), float("inf")]))
    elif change == "dtype":
        tensors[name] = tensors[name].to(rng.choice([torch.float64, torch.int32, torch.bool, torch.bfloat16]))
    elif change == "shape":
        tensors[name] = tensors[name].reshape(-1)[: rng.choice([0, 1, 2])].clone()
    elif change == "gone":
        del tensors[name]
    elif "tree" in header:
        header["tree"] = json.dumps(_reshaped(json.loads(header["tree"]), rng))
    if "tree" in header:
        header["digest"] = snapshot._digest(header["tree"], tensors)
    save_file(tensors, path, header or None)


ANY = [_flip, _flip, _truncate, _noise, _double, _empty, _gone,
       *map(_instead, (folder, os.mkfifo, dangling, loop, device, elsewhere, listener))]  # fmt: skip
OWN = {".json": [_other_json, _deep], ".jsonl": [_other_json, _deep], ".toml": [_other_toml, _deep],
       ".safetensors": [_other_tensors]}  # fmt: skip


def damage(path, rng):
    """Do something to a file, and say what."""
    own = OWN[path.suffix]
    change = rng.choice([*ANY, *own * (len(ANY) // len(own))])
    change(path, rng)
    return change.__name__.strip("_")


# --- what must come of it -------------------------------------------------------------------------------------------


class Hung(BaseException):
    """No command catches it."""


@contextmanager
def guarded():
    """Have what hangs, or asks for all memory, fail."""

    def hung(*_):
        raise Hung(f"still at work after {SECONDS} s")

    before, limits = signal.signal(signal.SIGALRM, hung), resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, limits[1]))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def words(command, name, base, run):
    """The command line."""
    return {
        "show": ("show", run),
        "assign": ("assign", run, base / "new.npz"),
        "report": ("report", run, "--out", run.with_suffix(".html")),
        "resume": ("run", base / f"{name}.toml", "--out", run, "--resume"),
    }[command]


def verdict(command, code, out, err):
    """What is wrong with how a command ended, None if nothing is."""
    told = [line for line in err.splitlines() if line.startswith("coterie: ")]
    if (code, len(told)) not in ((0, 0), (2, 1)) or "Traceback" in err or "\x1b" in out + err:
        return f"{command} ended with {code}: {out[-200:]} {err}"
    return None if code == 0 or err.endswith(told[-1] + "\n") else f"{command} said {err}"


def tried(case, folders, coterie, tmp_path):
    """Damage a file of a run folder, try commands on it, and return what went wrong."""
    rng, run = random.Random(case), tmp_path / f"run-{case}"
    name = rng.choice(list(ALGORITHMS))
    shutil.copytree(folders.base / name, run)
    file = rng.choice(folders.files(name))
    how, code = damage(run / file, rng), 2
    for command in (COMMANDS[case % 3], *("resume",) * (case % 2)):
        try:
            with guarded():
                code, out, err = coterie(*words(command, name, folders.base, run))
        except BaseException as error:
            wrong = f"{command} ended with {type(error).__name__}: {error}"
        else:
            wrong = verdict(command, code, out, err)
        if wrong:
            return f"case {case}: {name}/{file}, {how}: {wrong}"
    if command == "resume" and code == 0 and how != "other_tensors" and _models(run) != folders.models[name]:
        return f"case {case}: {name}/{file}, {how}: resumed to other models"
    shutil.rmtree(run)
    return None


@pytest.mark.parametrize("batch", range(CASES // BATCH))
def test_a_strange_file_ends_in_one_line_or_correctly(batch, folders, coterie, tmp_path):
    cases = range(batch * BATCH, (batch + 1) * BATCH)
    wrong = [found for case in cases if (found := tried(case, folders, coterie, tmp_path))]
    assert not wrong, "\n".join(wrong)


# --- one by one -----------------------------------------------------------------------------------------------------


def test_names_neither_steer_the_terminal_nor_are_markup(folders, coterie, tmp_path):
    run, bad = tmp_path / "run", "[red]\x1b[2J\u202ex[/red]"
    shutil.copytree(folders.base / "cfl", run)
    result = json.loads((run / "final" / "result.json").read_text())
    result |= {"metric": bad, "device": bad, "warnings": [bad], "report": bad}
    (run / "final" / "result.json").write_text(json.dumps(result))
    config = (run / "config.toml").read_text().replace('"permuted_digits"', json.dumps(bad))
    (run / "config.toml").write_text(config)
    code, out, _ = coterie("show", run)
    assert code == 0 and out.count(r"[red]\x1b[2J\u202ex[/red]") >= 5
    assert not {"\x1b", "\u202e"} & {*out}
    with np.load(folders.base / "new.npz") as new:
        np.savez(tmp_path / "new.npz", x=new["x"], y=new["y"], client=np.full(6, bad))
    code, out, _ = coterie("assign", folders.base / "ifca", tmp_path / "new.npz")
    assert code == 0 and r"[red]\x1b[2J\u202ex[/red]" in out and "\x1b" not in out
    code, _, err = coterie("show", tmp_path / bad)
    assert code == 2 and r"\x1b[2J" in err and "\x1b" not in err


def test_a_small_npz_that_asks_for_much_memory_is_refused(folders, coterie, tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "ALWAYS", 2**20)
    file = tmp_path / "new.npz"
    np.savez_compressed(file, x=np.zeros((2**20, 1)))
    code, _, err = coterie("assign", folders.base / "ifca", file)
    assert code == 2 and re.fullmatch(r"coterie: .*new.npz has [\d,]+ bytes and unpacks to more than [\d,]+: .*\n", err)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (10**12,)})
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x.npy", header.getvalue() + bytes(80))
    code, _, err = coterie("assign", folders.base / "ifca", file)
    assert code == 2 and "x.npy does not hold an array (1000000000000,) of float64" in err and err.count("\n") == 1


@pytest.mark.parametrize("suffix", ["gz", "xz", "bz2"])
def test_a_small_table_that_unpacks_to_much_is_refused(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(archives, "ALWAYS", 2**20)
    file = tmp_path / f"table.csv.{suffix}"
    with {"gz": gzip, "xz": lzma, "bz2": bz2}[suffix].open(file, "wt") as table:
        table.write("a,b\n" + "1,2\n" * 2**20)
    with pytest.raises(ValueError, match=rf"table.csv.{suffix} has [\d,]+ bytes and unpacks to more than"):
        read_table(file)
    monkeypatch.setattr(archives, "ALWAYS", 2**26)
    assert len(read_table(file)) == 2**20


def test_a_folder_that_leads_back_to_itself_is_looked_through_once(folders, coterie, tmp_path):
    shutil.copytree(folders.base / "ifca", tmp_path / "runs" / "ifca")
    for name in ("a", "b", "c"):
        (tmp_path / "runs" / name).symlink_to(tmp_path / "runs")
    with guarded():
        code, _, _ = coterie("report", tmp_path / "runs", "--out", tmp_path / "report.html")
    assert code == 0


def test_an_analysed_table_s_files_are_read_as_carefully(tmp_path, coterie):
    (tmp_path / "new.csv").write_text("client,x,y\na,1,2\n")
    for content in ("{}", "[" * 10_000, '{"clients": ["a"]}', '{"clients": 3}'):
        (tmp_path / "preparation.json").write_text(content)
        code, _, err = coterie("assign", tmp_path, tmp_path / "new.csv")
        assert code == 2 and "preparation.json is damaged" in err and err.count("\n") == 1
