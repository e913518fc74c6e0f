"""A cluster's model as ONNX and TorchScript, by the lines that the guide gives."""

from pathlib import Path

import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn

import coterie as ct

GUIDE = Path(__file__).parent.parent / "docs" / "how-to" / "runs.md"


@pytest.fixture(scope="module")
def run():
    g = torch.Generator().manual_seed(0)
    clients = [(torch.randn(12, 1, 6, 6, generator=g), torch.arange(12) % 3) for _ in range(4)]
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 3)
    )
    return ct.fit(ct.FedAvg(tau=2), ct.Task.classifier(net), ct.Federation.from_clients(clients), rounds=2)


@pytest.fixture
def x():
    return torch.randn(5, 1, 6, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of the exporter's own code
def test_onnx(run, x, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    do_as_the_guide_says("torch.onnx.export(", run, x)
    onnx.checker.check_model("cluster-0.onnx", full_check=True)
    model = ReferenceEvaluator("cluster-0.onnx")
    (out,) = model.run(None, {model.input_names[0]: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(out), run.module(0)(x).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torchscript(run, x, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    do_as_the_guide_says("torch.jit.trace(", run, x)
    torch.testing.assert_close(torch.jit.load("cluster-0.pt")(x), run.module(0)(x))


def do_as_the_guide_says(beginning, run, x):
    """Run the one line of the guide that begins like this."""
    (line,) = [line for line in GUIDE.read_text(encoding="utf-8").splitlines() if line.startswith(beginning)]
    exec(line, {"torch": torch, "run": run, "x": x})
