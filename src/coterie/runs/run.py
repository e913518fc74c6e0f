"""`Run`: what was learnt, how well it does, and how it came about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from coterie.core.cohort import Cohort
from coterie.core.federation import Array, Federation
from coterie.core.local import personal_of
from coterie.core.method import Method, PointMethod
from coterie.core.model_tree import ModelTree
from coterie.core.module_task import ModuleFunctions
from coterie.core.pytree import Params, beside, stack, stacked, take
from coterie.core.task import SHARE, Data, Task, apart
from coterie.engines import ENGINES, Vectorised
from coterie.runs import display
from coterie.runs.evaluate import Along, evaluate, margins
from coterie.runs.folder import read_models
from coterie.runs.scores import Scores

if TYPE_CHECKING:
    import pandas as pd

AT_ONCE = 4096  # rows that are predicted together


class Diverged(ValueError):
    """The loss stopped being a number. `run` holds the last good state."""

    def __init__(self, message: str, run: Run) -> None:
        super().__init__(message)
        self.run = run


class Move(NamedTuple):
    """A client that was moved to another group.

    Attributes:
        client: Its name; its position where clients have none.
        before: The cluster it was in.
        after: The cluster it is in now.
        since: The update, counted from 1, since which its rows spoke for that.
    """

    client: str | int
    before: int
    after: int
    since: int


@dataclass(frozen=True)
class Run:
    """What `fit` returns.

    Attributes:
        algorithm: The method, with its hyperparameters.
        state: All that it has learnt.
        history: One dict per round: loss, score (also per cluster), labels changed, groups, members per cluster, bytes
            down and up, seconds. The last round of an update has what it found, under "update".
        path: The run folder, None if nothing was written.
        warnings: What speaks against the result; it has been said in the log too.
    """

    algorithm: Method
    state: Any
    history: list[dict[str, Any]]
    path: Path | None
    _cohort: Cohort
    _score: Callable[[], Scores]
    _margins: np.ndarray | None = None  # of a run whose data are not here
    warnings: list[str] = field(default_factory=list)

    @cached_property
    def scores(self) -> Scores:
        """Every client scored with its model, chosen on its training rows."""
        return self._score()

    def __repr__(self) -> str:
        return str(display.card(self))

    def _repr_html_(self) -> str:
        return display.card(self).html()

    def plot(self, ax: Any = None) -> Any:
        """Draw the score over the rounds, with a thin line for each cluster, and return matplotlib's axes.

        Args:
            ax: The axes to draw on; None makes a figure, which a notebook shows by itself.
        """
        return display.plot(self, ax)

    @property
    def task(self) -> Task:
        """What was learnt."""
        return self._cohort.task

    @property
    def models(self) -> list[Params]:
        """One state dict per cluster; each loads into the task's module."""
        models = self.algorithm.models(self.state)
        if self.task.functions is None and self.path is not None and (stored := read_models(self.path)):
            return stored
        return [self.task.state_dict(take(models, j)) for j in range(stacked(models))]

    def module(self, cluster: int | None = None, *, client: int | str | None = None) -> nn.Module:
        """The module with a cluster's parameters, or with a client's, for scoring.

        Args:
            cluster: Its number.
            client: A client's name, or its position: the module of its cluster, with what it keeps to itself.
        """
        if (cluster is None) == (client is None):
            raise ValueError("module: give a cluster, such as run.module(0), or a client, such as run.module(client=3)")
        models, functions = self.algorithm.models(self.state), self._functions()
        k = stacked(models)
        if client is not None:
            own = self._model_of(self._position(client))
            if SHARE in own:
                raise ValueError("module: a client's own model is a mixture of the clusters' models; use run.predict")
            return functions.pure.loaded(own)
        if not isinstance(cluster, int) or not 0 <= cluster < k:
            raise ValueError(f"module: cluster must be a whole number from 0 to {k - 1}, got {cluster!r}")
        return functions.pure.loaded(take(models, cluster))

    def own_models(self) -> Params | None:
        """Every client's own model, stacked (m, …); None where clients are served by the model of their cluster.

        A mixture has an axis of models more, and their shares as `coterie.core.task.SHARE` (m, j).
        """
        if self.algorithm.own_model() is None:
            return None
        if self._cohort.engine.remote:
            raise ValueError("own_models: clients have models of their own, where their rows are")
        return self._own(self._cohort.uncharged(), torch.from_numpy(self.labels))

    def predict(
        self,
        x: Any,
        client: int | str | tuple[Any, Any] | None = None,
        *,
        probabilities: bool = False,
        deviations: bool = False,
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """What the models say of rows: of a classifier the class, of a regressor the value, of counts the expected one.

        Args:
            x: Rows, as clients have them.
            client: Whose rows these are: the name or the position of a client of the run, or a pair (x, y) of rows by
                which a new client is placed first. None where nothing is known of the client: then the clusters' models
                are mixed, each by its share of all clients.
            probabilities: Of a classifier, the probability of every class.
            deviations: Whether to return a pair: the values, and the standard deviation of each. Only some methods know
                them: see `MixedEffects`.
        """
        if self.algorithm.needs.points:
            raise ValueError(
                f"predict: {type(self.algorithm).__name__} groups points; run.assign(x) has their clusters"
            )
        rows = self._rows(x)
        models, task = self.algorithm.models(self.state), self.task
        if client is None:
            members = self.algorithm.members(self.state).to(torch.float32)
            theta, shares = models, members / members.sum().clamp(min=1)
        else:
            known = isinstance(client, int | str | np.integer)
            own = self._model_of(self._position(client)) if known else self._model_for(client)
            theta, shares = apart(own if SHARE in own else stack([own]))
        used = (shares > 0 if bool((shares > 0).any()) else torch.ones_like(shares) > 0).nonzero().flatten()
        out = self._outputs(take(theta, used), shares[used], rows)
        if deviations:
            return task.predict(out).cpu().numpy(), self._deviations(rows, client)
        if probabilities:
            if task.metric != "accuracy":
                raise ValueError(f"predict: only a classifier has probabilities; this task is scored by {task.metric}")
            return out.softmax(-1).cpu().numpy()
        return task.predict(out).cpu().numpy()

    def to_frame(self) -> pd.DataFrame:
        """One row per client: its name, cluster, score, margin and number of training rows.

        The margin is how much worse the best of the other clusters' models would serve it, by the mean loss on its
        training rows; NaN where there is one cluster only, or one for every client.
        """
        import pandas as pd

        federation = self._cohort.federation
        return pd.DataFrame(
            {
                "client": list(federation.ids or range(len(federation))),
                "cluster": self.labels,
                "score": self.scores.per_client,
                "margin": self.margins,
                "rows": federation.train.sizes.numpy(),
            }
        )

    @cached_property
    def margins(self) -> np.ndarray:
        """How much worse the best other cluster would serve each client (m,)."""
        known = self._margins
        return margins(self.algorithm, self.state, self._cohort, self.labels) if known is None else known

    @property
    def labels(self) -> np.ndarray:
        """The cluster of every client."""
        return self.scores.labels

    @property
    def accuracy(self) -> float:
        """Mean accuracy over clients, each with the model of its cluster."""
        if self.scores.metric != "accuracy":
            raise AttributeError(f"this task has no accuracy; it is scored by {self.scores.metric}: see run.score")
        return self.scores.mean

    @property
    def score(self) -> float:
        """The mean over clients of the task's own score."""
        return self.scores.mean

    @property
    def ari(self) -> float | None:
        """Adjusted Rand index of the labels against the true groups; None where those are not known."""
        return self.scores.clustering.get("ari")

    @property
    def purity(self) -> float | None:
        """The share of clients, or of points, that belong to the commonest group of their cluster; None if unknown."""
        return self.scores.clustering.get("purity")

    def assign(self, x: Any, y: Array | None = None) -> int | np.ndarray:
        """The cluster of a client that was not there; of methods that group points, the cluster of each row of x.

        Nothing is sent anywhere: a client that has the models can do it by itself.
        """
        if y is None and not self.algorithm.needs.points:
            raise ValueError(f"assign: {type(self.algorithm).__name__} places a client by its rows x and targets y")
        return assign(self.algorithm, self.state, self.task, self._rows(x), y, self._cohort.federation.columns)

    @property
    def tree(self) -> ModelTree:
        """The tree of models that the algorithm left behind; `print(run.tree)` draws it."""
        if (tree := self.algorithm.tree(self.state)) is None:
            raise AttributeError(f"{type(self.algorithm).__name__} makes no tree of models")
        return tree

    def draw_tree(self, path: str | Path) -> None:
        """Write a picture of the tree."""
        from coterie.runs import plots

        fig = plots.figure(5.5, 4)
        plots.tree(fig.subplots(), self.tree.outline(), len(self.history))
        plots.save(fig, Path(path))

    def evaluate(
        self,
        choose_on: Literal["train", "test"] = "train",
        along: Along = "leaf",
        federation: Federation | None = None,
    ) -> Scores:
        """Score every client again, or others.

        Args:
            choose_on: Its cluster is chosen on its "train" or its "test" rows.
            along: With the model of its cluster ("leaf"); where there is a tree also with that at the "root", or with
                the ensemble of the models on the "path".
            federation: Clients that took no part, placed as `assign` places a new one; None for those of the run.
        """
        if federation is None:
            return evaluate(self.algorithm, self.state, self._cohort, choose_on, along)
        federation.check(self.task)
        return evaluate(self.algorithm, self.state, self.cohort_of(federation), choose_on, along, strangers=True)

    def update(
        self,
        federation: Federation,
        *,
        rounds: int = 10,
        patience: int = 3,
        out: str | Path | None = None,
        overwrite: bool = False,
    ) -> Run:
        """Go on with clients as they are now: some joined, some left, some have other rows.

        Clients are matched by their names. Newcomers are placed as `assign` places them. A client whose rows speak for
        another group trains no model, and is moved there once they have in `patience` updates in a row. Clients that no
        model serves get one of their own if rows that it was not trained on are clearly better served by it.

        Args:
            federation: The clients of now, with their rows of now.
            rounds: How many rounds to train.
            patience: Updates in a row in which a client's rows must speak for the same other group.
            out: The run folder to write; None writes nothing. It is written when the update is done.
            overwrite: Replace the run that is in `out`, if there is one.

        Returns:
            The run as it is now; this one stays as it is. `run.updates` and `run.moved` tell what has changed.

        Raises:
            ValueError: The method or the run cannot be updated, or the input is bad.
        """
        from coterie.runs.update import update

        return update(self, federation, rounds, patience, out, overwrite)

    @property
    def updates(self) -> list[dict[str, Any]]:
        """What each update found, the first one first: how many clients joined, left, moved and wait, and the score.

        Scores are means over the clients of now, on their rows of now, `before` and `after` the update.
        """
        return [row["update"] for row in self.history if "update" in row]

    @property
    def moved(self) -> list[Move]:
        """The clients that the last update moved; none if there was no update."""
        return [Move(*each) for each in self.updates[-1]["moves"]] if self.updates else []

    def cohort_of(self, federation: Federation) -> Cohort:
        """Other clients, simulated: on the same kind of engine as the run's, if that was simulated too."""
        own = self._cohort.engine.in_the_open()
        make = ENGINES.get(own.name, Vectorised)
        return Cohort(make(federation, own.task, own.key, own.device, precision=own.precision))

    # --- one client ---------------------------------------------------------------------------------------------------

    def _position(self, client: int | str | np.integer) -> int:
        """The position of a client by its name or number."""
        federation = self._cohort.federation
        names = federation.ids or ()
        if isinstance(client, str) and client in names:
            return names.index(client)
        if isinstance(client, str) or not 0 <= client < len(federation):
            shown = ", ".join(names[:3]) if names else f"0 to {len(federation) - 1}"
            raise ValueError(f"there is no client {client!r}; they are {shown}{', …' if len(names) > 3 else ''}")
        return int(client)

    def _alone(self, rows: Any) -> Federation:
        """A new client, that is all clients there are."""
        if not isinstance(rows, tuple | list) or len(rows) != 2:
            raise ValueError(f"client must be a name, a position, or a pair (x, y) of rows, got {type(rows).__name__}")
        client = Federation.from_clients([(self._rows(rows[0]), rows[1])], columns=self._cohort.federation.columns)
        client.check(self.task)
        return client

    def _model_for(self, rows: Any) -> Params:
        """The model of a client that took no part: that of its cluster, or one of its own."""
        newcomer, j = self._alone(rows), int(self.assign(*rows))
        if self.algorithm.own_model() is None:
            return take(self.algorithm.models(self.state), j)
        return take(self._own(self.cohort_of(newcomer), torch.tensor([j])), 0)

    def _model_of(self, i: int) -> Params:
        """The model of a client's cluster with what the client keeps to itself, or a model of its own."""
        engine, name = self._cohort.engine, self._cohort.federation.name(i)
        j = int(self.labels[i])
        if j < 0:
            raise ValueError(f"{name} is in no cluster that the server knows of")
        if self.algorithm.own_model() is not None:
            if engine.remote:
                raise ValueError(f"{name} has a model of its own, where its rows are; give these as a pair (x, y)")
            return take(self._own(self._cohort.only([i]).uncharged(), torch.tensor([j])), 0)
        if self.task.personal and engine.name == "flower":
            raise ValueError(f"{name} keeps a part of its model to itself, on its node (batch_norm='local')")
        theta = take(self.algorithm.models(self.state), j)
        return {**theta, **beside(next(iter(theta.values())), personal_of(self._cohort.ledger.memory.get(i)))}

    def _own(self, clients: Cohort, clusters: Tensor) -> Params:
        """The models that clients of these clusters make of what they are served with, on their training rows."""
        served, own = self.algorithm.served(self.state), self.algorithm.own_model()
        assert own is not None  # all callers have looked
        rows = None if served.whole else clusters
        at = clients.at(max(0, len(self.history) - 1))  # as when they were scored
        return at.gather(own, served.message, slots=len(self.algorithm.members(self.state)), rows=rows).update.theta

    def _deviations(self, x: Any, client: Any) -> np.ndarray:
        """The standard deviations of predictions, for a client as in `predict`."""
        if client is None:
            data = None
        elif isinstance(client, int | str | np.integer):
            data = _data_of(self._cohort.federation, self._position(client))
        else:
            data = _data_of(self._alone(client), 0)
        rows = Federation.from_clients([(x, None)]).train.x
        return self.algorithm.deviations(self.state, self.task, data, rows).cpu().numpy()

    def _functions(self) -> ModuleFunctions:
        if self.task.functions is None:
            raise ValueError(
                "the run has no module here: load it with its task, ct.load(folder, task=Task.classifier(net))"
            )
        return self.task.functions

    def _rows(self, x: Any) -> Any:
        """Rows as the federation packs them."""
        inputs = self._cohort.federation.inputs
        if inputs is None:
            return x
        if not isinstance(x, tuple | Mapping):
            raise ValueError(f"rows must be a tuple or a dict of inputs, as the clients' are, got {type(x).__name__}")
        return inputs.pack(x)

    def _outputs(self, theta: Params, shares: Tensor, x: Any) -> Tensor:
        """The mixed output of models (j, …) on rows."""
        functions, device = self._functions(), next(iter(theta.values())).device
        if not len(x):
            raise ValueError("predict: x has no rows")
        rows = Federation.from_clients([(x, None)]).train.x
        if wrong := functions.takes(rows):
            raise ValueError(f"predict: {wrong}")
        with torch.no_grad():
            each = (part.to(device) for part in rows.split(AT_ONCE))
            return torch.cat([functions.mixed(theta, x, x.new_ones(len(x)), shares.to(device)) for x in each])


def assign(
    algorithm: Method, state: Any, task: Task, x: Array, y: Array | None, columns: tuple[str, ...] | None = None
) -> int | np.ndarray:
    """The cluster of one client with these rows, or of each of its points; a table's columns go by their names."""
    targets = torch.zeros(len(x), dtype=torch.long) if y is None else y
    client = Federation.from_clients([(x, targets)], columns=columns)
    client.check(task)
    device = next(iter(algorithm.models(state).values())).device
    rows = Data(client.train.x, client.train.y, torch.ones(len(client.train.x)))
    rows = Data(*(v.to(device) for v in rows))
    if isinstance(algorithm, PointMethod):
        return algorithm.assign_points(state, task, rows).cpu().numpy()
    return algorithm.assign(state, task, rows)


def _data_of(federation: Federation, i: int) -> Data:
    """The training rows of one client."""
    x, y = federation.train.client(i)
    return Data(x, y, torch.ones(len(x)))
