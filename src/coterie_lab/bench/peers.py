"""Simulations of our workloads with other libraries, each in a separate process with its recommended settings.

The benchmark calls `time_peer`. It writes a `Job` to a file, starts `python -m coterie_lab.bench.peers NAME FOLDER` and
reads a `Timing` back. With separate processes, threads do not disturb each other, a library that crashes costs one
line, and peak memory is that of the library. Libraries are imported by name, so that none has to be installed.
"""

from __future__ import annotations

import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from coterie.core.federation import Packed
from coterie.core.pytree import Params
from coterie.models import MODELS
from coterie.storage import snapshot
from coterie_lab.bench.loop import loss

ROUNDS = 3  # timed, after one round to warm up, which also gives the resulting models
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "PFL_PYTORCH_DEVICE": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}

log = logging.getLogger("coterie")


class Job(NamedTuple):
    """A round to run, as arrays and numbers: full-batch steps of every client, then the mean of each cluster."""

    data: Packed
    models: Params  # (k, …), at the start of the round
    spec: dict[str, Any]  # the table that describes the model, such as {"name": "mlp", "sizes": …}
    lr: float
    tau: int

    @property
    def k(self) -> int:
        """Number of clusters; with one the round is FedAvg."""
        return len(next(iter(self.models.values())))

    @property
    def clients(self) -> list[tuple[Tensor, Tensor]]:
        """The rows of every client; all clients have the same number of rows."""
        return [self.data.client(i) for i in range(len(self.data.offsets) - 1)]


class Timing(NamedTuple):
    """The time and memory that a library took for a round, and the resulting models."""

    seconds: float
    models: Params  # (k, …), after one round
    peak_mib: float | None
    labels: Tensor | None = None  # the cluster that each client chose, where the library says it


class PeerFailed(Exception):
    """A library is installed but did not complete the round; the message says why."""


class Stopwatch:
    """Times rounds, whose ends the caller reports. The time that it needs itself is not counted."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._answers: list[Params] = []
        self._peak: float | None = None
        self._begin = time.perf_counter()

    def round_ended(self, models: Callable[[], Params]) -> None:
        """Record the time of a round, and after the first round its models.

        Args:
            models: Returns the models.
        """
        self._seconds.append(time.perf_counter() - self._begin)
        if not self._answers:
            self._answers.append(models())
        self._peak = _peak_mib(_launched())  # now, while the library's workers are alive
        self._begin = time.perf_counter()

    def timing(self) -> Timing:
        """Return the median time of all rounds but the first, the models and the peak memory."""
        return Timing(statistics.median(self._seconds[1:]), self._answers[0], self._peak)


def run_fedjax(job: Job) -> Timing:
    """Time fedjax: HypCluster, or FedAvg for one model, on its default jitted backend.

    Args:
        job: The round.
    """
    jax: Any = import_module("jax")
    jax.tree_map = jax.tree_util.tree_map  # fedjax 0.0.17 still uses the name that jax has removed
    fedjax: Any = import_module("fedjax")
    starts = [{n: jax.numpy.asarray(x[j].numpy()) for n, x in job.models.items()} for j in range(job.k)]
    algorithm = _fedjax_algorithm(job)
    state = algorithm.init(starts if job.k > 1 else starts[0])
    clients = [
        (i, fedjax.ClientDataset({"x": x.numpy(), "y": y.numpy()}), jax.random.PRNGKey(i))
        for i, (x, y) in enumerate(job.clients)
    ]
    watch = Stopwatch()
    for _ in range(1 + ROUNDS):
        after, _ = algorithm.apply(state, clients)
        found = jax.block_until_ready(after.cluster_params if job.k > 1 else [after.params])
        watch.round_ended(lambda each=found: {n: torch.tensor(np.stack([m[n] for m in each])) for n in job.models})
    return watch.timing()


def _fedjax_algorithm(job: Job) -> Any:
    fedjax: Any = import_module("fedjax")
    losses, rows = _fedjax_losses(job), len(job.clients[0][0])
    # By default it makes a single pass over the rows, which is one step, whatever the number of steps.
    steps = fedjax.ShuffleRepeatBatchHParams(rows, num_epochs=None, num_steps=job.tau, skip_shuffle=True)
    local, server = fedjax.optimizers.sgd(job.lr), fedjax.optimizers.sgd(1.0)
    if job.k > 1:
        choose = fedjax.PaddedBatchHParams(rows)
        return fedjax.algorithms.hyp_cluster.hyp_cluster(losses, local, server, choose, steps)
    gradient = import_module("fedjax.core.models").grad(losses)
    return fedjax.algorithms.fed_avg.federated_averaging(gradient, local, server, steps)


def _fedjax_losses(job: Job) -> Callable[[Any, Any, Any], Any]:
    """Return the loss function of every row for the same model: linear layers with ReLU between them."""
    relu, cross_entropy = import_module("jax.nn").relu, import_module("fedjax").metrics.unreduced_cross_entropy_loss
    names = list(job.models)
    layers = list(zip(names[::2], names[1::2], strict=True))

    def losses(params: Any, batch: Any, rng: Any) -> Any:
        out = batch["x"]
        for number, (weight, bias) in enumerate(layers):
            out = (relu(out) if number else out) @ params[weight].T + params[bias]
        return (out[:, 0] - batch["y"]) ** 2 if job.data.y.is_floating_point() else cross_entropy(batch["y"], out)

    return losses


def run_pfl(job: Job) -> Timing:
    """Time pfl: FedAvg on its simulated backend, with one worker process per core, started by torchrun.

    Args:
        job: The round.
    """
    model: Any = import_module("pfl.model.pytorch").PyTorchModel  # import first: it sets pfl's framework to torch
    data, algorithms, settings = (import_module(f"pfl.{part}") for part in ("data", "algorithm", "hyperparam"))
    dataset = import_module("pfl.data.pytorch").PyTorchTensorDataset
    users = [dataset(rows) for rows in job.clients]
    federation = data.FederatedDataset(users.__getitem__, data.get_user_sampler("minimize_reuse", range(len(users))))
    learner, watch = Learner(job), Stopwatch()
    algorithms.FederatedAveraging().run(
        # It always evaluates in its first round, which is the warm-up round.
        algorithms.NNAlgorithmParams(1 + ROUNDS, 1 + ROUNDS, train_cohort_size=len(users), val_cohort_size=None),
        import_module("pfl.aggregate.simulate").SimulatedBackend(federation, federation),
        model(learner, torch.optim.SGD, torch.optim.SGD(learner.parameters(), 1.0)),
        settings.NNTrainHyperParams(local_batch_size=None, local_num_epochs=job.tau, local_learning_rate=job.lr),
        callbacks=[_pfl_callback(lambda: watch.round_ended(learner.models))],
    )
    return watch.timing()


class Learner(nn.Module):
    """A module with the two methods that pfl requires, `loss` and `metrics`."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.module = _module(job.spec)
        self.module.load_state_dict({n: x[0] for n, x in job.models.items()})

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss that is minimised."""
        return loss(self.module, x, y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        """Return no metrics."""
        return {}

    def models(self) -> Params:
        """Return the current parameters, as those of one cluster."""
        return {n: p.detach()[None].clone() for n, p in self.module.named_parameters()}


def _pfl_callback(after_round: Callable[[], None]) -> Any:
    base: Any = import_module("pfl.callback.base").TrainingProcessCallback
    no_metrics = import_module("pfl.metrics").Metrics

    class Callback(base):
        def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Any]:
            after_round()
            return False, no_metrics()

    return Callback()


def run_flower(job: Job) -> Timing:
    """Time Flower: FedAvg on the Ray backend, with one actor per core.

    A client reads its rows from a file, because messages contain no data.

    Args:
        job: The round.
    """
    everyone = len(job.clients)  # otherwise the first round uses only the nodes registered by then
    strategy: Any = import_module("flwr.serverapp.strategy").FedAvg(
        fraction_evaluate=0.0, min_train_nodes=everyone, min_available_nodes=everyone
    )
    record: Any = import_module("flwr.app").ArrayRecord
    app: Any = import_module("flwr.serverapp").ServerApp()
    watch = Stopwatch()

    def report(t: int, arrays: Any) -> None:
        if t > 0:  # 0 is before the first round
            watch.round_ended(lambda: {n: x[None].clone() for n, x in arrays.to_torch_state_dict().items()})

    @app.main()
    def serve(grid: Any, context: Any) -> None:
        start = record({n: x[0] for n, x in job.models.items()})
        strategy.start(grid, start, num_rounds=1 + ROUNDS, evaluate_fn=report)

    with tempfile.TemporaryDirectory() as folder:
        for i, rows in enumerate(job.clients):
            snapshot.save(Path(folder) / str(i), rows)
        client = _flower_client(Path(folder), job.spec, job.lr, job.tau)
        resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
        import_module("flwr.simulation").run_simulation(app, client, everyone, backend_config=resources)
    return watch.timing()


def _flower_client(folder: Path, spec: dict[str, Any], lr: float, tau: int) -> Any:
    flower: Any = import_module("flwr.app")
    app: Any = import_module("flwr.clientapp").ClientApp()

    @app.train()
    def train(message: Any, context: Any) -> Any:
        x, y = snapshot.load(folder / str(context.node_config["partition-id"]), {})
        module = _module(spec)
        module.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimiser = torch.optim.SGD(module.parameters(), lr)
        for _ in range(tau):
            optimiser.zero_grad()
            loss(module, x, y).backward()
            optimiser.step()
        arrays, weight = flower.ArrayRecord(module.state_dict()), flower.MetricRecord({"num-examples": len(x)})
        return flower.Message(flower.RecordDict({"arrays": arrays, "metrics": weight}), reply_to=message)

    return app


class Peer(NamedTuple):
    """A library that can run the round, and how to start it."""

    run: Callable[[Job], Timing]
    modules: tuple[str, ...]  # must all be installed
    clusters: bool = False  # whether it supports more than FedAvg
    launcher: tuple[str, ...] = ()


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={os.cpu_count()}")
PEERS = {
    "fedjax": Peer(run_fedjax, ("jax", "fedjax"), clusters=True),
    "pfl": Peer(run_pfl, ("pfl",), launcher=TORCHRUN),
    "flower": Peer(run_flower, ("flwr", "ray")),
}


def installed() -> list[str]:
    """Return the libraries that are installed, and log a warning that names the others."""
    there = {name: all(find_spec(module) for module in peer.modules) for name, peer in PEERS.items()}
    if missing := [name for name, found in there.items() if not found]:
        log.warning("not installed: %s (pip install 'coterie[bench]')", ", ".join(missing))
    return [name for name, found in there.items() if found]


def time_peer(name: str, job: Job) -> Timing:
    """Run a round with another library in a separate process.

    Args:
        name: Name of the library in `PEERS`.
        job: The round.

    Raises:
        PeerFailed: The process ended without a result.
    """
    with tempfile.TemporaryDirectory() as folder:
        snapshot.save(Path(folder) / "job", job)
        command = [sys.executable, *PEERS[name].launcher, "-m", "coterie_lab.bench.peers", name, folder]
        done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False)
        if (timing := Path(folder) / "timing").exists():
            return snapshot.load(timing, {"Timing": Timing})
        error = Path(folder) / "error"
        raise PeerFailed(error.read_text().splitlines()[0] if error.exists() else f"exit code {done.returncode}")


def main(name: str, folder: Path) -> None:
    """Run the job in a folder with one of the libraries; `time_peer` starts this in a process.

    Args:
        name: Name of the library in `PEERS`.
        folder: The folder, which holds the job and gets the timing or the error.
    """
    try:
        timing = PEERS[name].run(snapshot.load(folder / "job", {"Job": Job, "Packed": Packed}))
    except Exception as error:
        (folder / "error").write_text(f"{type(error).__name__}: {error}")
        raise
    if os.environ.get("RANK", "0") == "0":  # all of torchrun's workers have the same result
        snapshot.save(folder / "timing", timing)


def _module(spec: dict[str, Any]) -> nn.Module:
    """Build the model that a table describes."""
    values = dict(spec)
    kind = MODELS[values.pop("name")]
    return kind(*values.pop("sizes", ()), **values)


def _launched() -> int:
    """Return the id of the process that `time_peer` started: torchrun, or this one."""
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()


def _peak_mib(root: int) -> float | None:
    """Return the sum of the peak resident sizes of a process and its descendants; None if the system has no /proc."""
    parents, peaks = {}, {}
    for file in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):  # the process has ended meanwhile
            status = dict(line.split(":\t", 1) for line in file.read_text().splitlines() if ":\t" in line)
            pid = int(status["Pid"])
            parents[pid], peaks[pid] = int(status["PPid"]), int(status.get("VmHWM", "0 kB").split()[0])
    family = [root] if root in peaks else []
    for pid in family:  # grows during the loop
        family += [child for child, parent in parents.items() if parent == pid]
    return sum(peaks[pid] for pid in family) / 1024 if family else None


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
