"""The CUDA kernels, run on a CPU thread by thread: compiled by g++, with a barrier for a barrier (blocks.h)."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from coterie.core.first_layer import FirstLinear, Head
from coterie.core.pytree import leaves
from coterie.core.train import Descend
from coterie.engines import kernels
from coterie.engines.descent import Work, descend

SOURCES = Path(kernels.__file__).parent
BLOCKS = Path(__file__).with_name("blocks.h")
HEAD = Head("w", "b")
SPLIT = FirstLinear("W", "b0", lambda *a: a[1], HEAD, squared=False, logits=False)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture
def on_cpu(monkeypatch, tmp_path):
    """Kernels are launched on the CPU."""

    def launch(name, sizes, blocks, args, device):
        size = kernels._sizes(name, *sizes)
        library = ctypes.CDLL(str(_library(name, size, args, tmp_path)))
        assert library.launch(blocks, size["THREADS"], ctypes.c_size_t(size["bytes"]), *(_as_c(arg) for arg in args))

    monkeypatch.setattr(kernels, "_launch", launch)


def _library(name, size, args, folder):
    """A shared library with a function `launch` that runs all blocks of a kernel."""
    built = folder / f"{name}-{'-'.join(map(str, size.values()))}.so"
    if built.exists():
        return built
    kernel = (SOURCES / f"{name}.cu").read_text().replace("extern __shared__ char memory[];", "")
    types = [re.sub(r"\w+$", "", p).strip() for p in re.search(rf" {name}\(([^)]*)\)", kernel)[1].split(",")]
    assert len(types) == len(args)
    names = [f"a{i}" for i in range(len(types))]
    given = ", ".join(f"{t} {n}" for t, n in zip(types, names, strict=True))
    source = folder / f"{name}.cpp"
    source.write_text(
        "".join(f"#define {key} {value}\n" for key, value in size.items() if key != "bytes")
        + f'#include "{BLOCKS}"\n{(SOURCES / "head.cu").read_text()}{kernel}\n'
        + f'extern "C" int launch(int blocks, int threads, size_t bytes, {given}) {{\n'
        + f"    return run(blocks, threads, bytes, sizeof(Shared), [=] {{ {name}({', '.join(names)}); }});\n}}\n"
    )
    command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread", str(source), "-o", str(built)]
    subprocess.run(command, check=True)
    return built


def _as_c(arg):
    if isinstance(arg, Tensor):
        assert arg.is_contiguous()
        return ctypes.c_void_p(arg.data_ptr())
    return ctypes.c_double(arg) if isinstance(arg, float) else ctypes.c_int(arg)


def work(rows, columns=33, classes=5, clients=2, starts=2):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(clients, rows, 90, generator=g)
    mask = (torch.rand(clients, rows, generator=g) > 0.1).float()
    rest = {"w": (clients, starts, classes, columns), "b": (clients, starts, classes)}
    return Work(
        x,
        torch.randint(classes, (clients, rows), generator=g),
        mask / mask.sum(1, keepdim=True),
        torch.randn(clients, starts, rows, columns, generator=g),
        x @ x.mT / 30 + 1,
        {name: torch.randn(shape, generator=g) for name, shape in rest.items()},
        torch.tensor(0.1),
    )


@pytest.mark.parametrize("prox", [0.0, 0.3])
@pytest.mark.parametrize("way", [kernels.descend_on_chip, kernels.descend_by_turns])
@pytest.mark.parametrize("rows", [7, 70])
def test_a_kernel_does_what_descend_does(way, rows, prox, on_cpu):
    by = Descend(4, prox=prox)
    fast, slow = way(HEAD, by, work(rows)), descend(SPLIT, by, work(rows))
    for ours, theirs in zip(leaves(fast), leaves(slow), strict=True):
        assert ours.shape == theirs.shape and torch.allclose(ours, theirs, atol=1e-5)


def test_columns_of_a_multiple_of_a_warp_and_many_classes(on_cpu):
    by, given = Descend(3), {"columns": 64, "classes": 12, "clients": 1, "starts": 1}
    for way in (kernels.descend_on_chip, kernels.descend_by_turns):
        fast, slow = way(HEAD, by, work(40, **given)), descend(SPLIT, by, work(40, **given))
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(leaves(fast), leaves(slow), strict=True))
