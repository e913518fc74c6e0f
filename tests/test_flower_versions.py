"""Every release of Flower that pyproject.toml allows: a run on two real nodes, against the simulator.

The release that is installed here is what all other tests use. Any other has an environment of its own, on top of this
one and without what the release asks for besides: 1.42 wants newer versions of certifi and uv, which not every registry
has. Certificates of loopback are our own, and nothing is installed at run time, so a run needs neither.
"""

import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import coterie as ct
from coterie.core.pytree import stack
from coterie.runs.folder import read_models, read_result

pytestmark = pytest.mark.flower

RELEASES = ("1.41.0", "1.42.0")
TASK = '[task]\nkind = "classifier"\nmodel = { name = "mlp", sizes = [64, 16, 10] }\n'
CONFIG = f'{TASK}[algorithm]\nname = "ifca"\nk = 2\ntau = 5\ninit = "random"\n[run]\nrounds = 2\nevaluations = 1\n'
DATA = """
import coterie as ct

def federation(context):
    i = context.node_config["partition-id"]
    return ct.data.rotated_digits(clients=8, seed=0).select(range(4 * i, 4 * i + 4))
"""


@pytest.fixture(scope="module", params=[r for r in RELEASES if r != version("flwr")])
def python(request, tmp_path_factory):
    """The Python of an environment with another release of Flower; all else is found in this one."""
    folder = tmp_path_factory.mktemp("flower") / request.param
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (own / "beneath.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    got = subprocess.run([*pip, f"flwr=={request.param}"], capture_output=True, text=True, timeout=120)
    if got.returncode:
        pytest.skip(f"flwr {request.param} cannot be installed: {got.stderr.strip().splitlines()[-1]}")
    asked = [python, "-c", "import flwr; print(flwr.__version__)"]
    assert subprocess.run(asked, capture_output=True, text=True).stdout == f"{request.param}\n"
    return str(python)


def test_a_run_is_the_simulators(python, federation, tmp_path):
    def command_line(*words):
        asked = subprocess.run([python, "-m", "coterie", *words], capture_output=True, text=True, timeout=240)
        assert asked.returncode == 0, asked.stderr
        return asked.stdout

    app, out = tmp_path / "app", tmp_path / "run"
    command_line("flower", "init", str(app))
    (app / "data.py").write_text(DATA)
    (app / "mine.toml").write_text(CONFIG)
    with federation(tmp_path / "federation", 2, command_line) as lab:
        command_line("flower", "run", str(app / "mine.toml"), "--out", str(out), "--dir", str(lab.folder))
    task, clients = ct.Task.classifier(ct.models.MLP(64, 16, 10)), ct.data.rotated_digits(clients=8, seed=0)
    run = ct.fit(ct.IFCA(k=2, tau=5, init="random"), task, clients, rounds=2, evaluations=1)
    assert read_result(out)["labels"] == run.labels.tolist()
    models = stack(read_models(out))
    for n, x in run.algorithm.models(run.state).items():
        assert torch.allclose(models[n], x, rtol=1e-5, atol=1e-5), n
