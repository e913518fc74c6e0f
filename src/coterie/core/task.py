"""A task: how a model starts, what it loses on a row, how it scores. Kinds of model differ only here."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from coterie.core.checks import check_density, check_labels, check_targets, check_words
from coterie.core.features import features_of
from coterie.core.first_layer import FirstLinear, split_first_linear
from coterie.core.key import Key
from coterie.core.losses import cross_entropy, squared_error, word_cross_entropy
from coterie.core.module import Constants, builder, name_of, outside, refuse
from coterie.core.pytree import Params, leaves, take


class Data(NamedTuple):
    """Rows of one client (n, …), or of many (c, n, …)."""

    x: Tensor
    y: Tensor
    mask: Tensor  # 1 for a real row, 0 for padding


class Networks(NamedTuple):
    """The networks of an adversarial task, each a pure function of the parameters of all and of rows or codes.

    A code (n, dz + k) is dz numbers, and then a cluster's one-hot; an encoder gives logits in its place.
    """

    generate: Callable[[Params, Tensor], Tensor]  # from codes to rows
    judge: Callable[[Params, Tensor], Tensor]  # from rows to the critic's opinion of each (n, 1)
    encode: Callable[[Params, Tensor], Tensor]  # from rows to codes
    dz: int
    k: int


def _no_ensemble() -> Task:
    raise ValueError("Task: only a task made from a module knows how to mix the outputs of models")


@dataclass(frozen=True)
class Task:
    """Three pure functions, and the name of the score.

    Attributes:
        init: `init(key) -> Params`, a freshly drawn model.
        loss: `loss(params, data) -> (n,)`, one value per row.
        score: `score(params, data) -> (n,)`, what an analyst would look at, one value per row.
        metric: What the mean of `score` is called: "accuracy", "mse", "nats".
        check: `check(data)` says what is wrong with rows, None if they suit the model.
        first_layer: `first_layer(x)` takes the model apart after a linear first layer; None if it has none.
        features: `features(x)` is φ(x) (n, d), the gradient of a single output with respect to all parameters side by
            side, under squared loss. Of a model that is linear in its parameters, ⟨φ(x), θ⟩ is the output; see
            `coterie.core.features`. None for other tasks.
        from_moments: `from_moments(mean, covariance)` are the likeliest parameters of a density that has a closed form;
            None for others.
        location: Names of a density's parameters that say where its rows lie rather than how they are spread.
        networks: Those of an adversarial task; None for others.
        ensemble: `ensemble()` is the task of several models together. Its Params lead with an axis of models (j, …), as
            `core.pytree.stack` makes them, and its loss and score are those of the models' mixed output: the mean of
            the probabilities, of a regressor the mean output. Its `init` draws an ensemble of one.
        spec: A plain description from which the command line can build the task again; empty for a user's module.

    Example:
        >>> task = Task.classifier(nn.Linear(4, 3))
        >>> theta = task.init(Key.of(0))
        >>> rows = Data(torch.zeros(5, 4), torch.zeros(5, dtype=torch.long), torch.ones(5))
        >>> task.loss(theta, rows).shape
        torch.Size([5])
    """

    init: Callable[[Key], Params]
    loss: Callable[[Params, Data], Tensor]
    score: Callable[[Params, Data], Tensor]
    metric: str
    check: Callable[[Data], str | None] = field(default=lambda rows: None, repr=False)
    first_layer: Callable[[Tensor], FirstLinear | None] = field(default=lambda x: None, repr=False)
    features: Callable[[Tensor], Tensor] | None = field(default=None, repr=False)
    from_moments: Callable[[Tensor, Tensor], Params] | None = field(default=None, repr=False)
    location: tuple[str, ...] = ()
    networks: Networks | None = field(default=None, repr=False)
    ensemble: Callable[[], Task] = field(default=_no_ensemble, repr=False)
    spec: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def classifier(cls, module: nn.Module) -> Task:
        """Cross-entropy and accuracy for a module that returns one logit per class."""
        return cls.from_module(
            module,
            loss=cross_entropy,
            score=lambda out, y: (out.argmax(-1) == y).float(),
            metric="accuracy",
            check=check_labels,
            mix=_mean_probability,
            spec={"kind": "classifier", **_spec(module)},
        )

    @classmethod
    def regressor(cls, module: nn.Module) -> Task:
        """Squared loss (y - f(x))², summed over the outputs; the score is the mean squared error."""
        return cls.from_module(
            module,
            loss=squared_error,
            score=squared_error,
            metric="mse",
            check=check_targets,
            spec={"kind": "regressor", **_spec(module)},
        )

    @classmethod
    def language_model(cls, module: nn.Module) -> Task:
        """Cross-entropy of the next word for a module that returns one logit per word at every position.

        The loss of a row is the mean over its positions; the score is the same, in nats per word.
        """
        return cls.from_module(
            module,
            loss=word_cross_entropy,
            score=word_cross_entropy,
            metric="nats",
            check=check_words,
            mix=_mean_probability,
            spec={"kind": "language_model", **_spec(module)},
        )

    @classmethod
    def density(cls, module: nn.Module) -> Task:
        """Negative log-likelihood for a module that returns one log-likelihood per row; y plays no part in it.

        A module may have a function `from_moments` and names of parameters in `location`: see the attributes. If it
        takes only values of some range, as those of pixels, it says so in `between`.
        """
        task = cls.from_module(
            module,
            loss=_surprise,
            score=_surprise,
            metric="nats",
            check=check_density,
            mix=lambda outs: outs.logsumexp(0) - math.log(len(outs)),
            spec={"kind": "density", **_spec(module)},
        )
        return replace(
            task, from_moments=getattr(module, "from_moments", None), location=tuple(getattr(module, "location", ()))
        )

    @classmethod
    def adversarial(cls, module: nn.Module) -> Task:
        """Clusters by a generator, a critic and an encoder, such as those of `coterie.models.GAN`.

        They are trained against each other (see `ClusterGAN`), by losses of whole batches. The loss of a row, which is
        also its score, is how much the encoder doubts its cluster: -log of the likeliest one's probability. y plays no
        part in it.

        Args:
            module: Has submodules `generator`, `critic` and `encoder`, the numbers `dz` and `k` of a code, and returns
                the encoder's logits.
        """
        missing = [n for n in ("generator", "critic", "encoder", "dz", "k") if not hasattr(module, n)]
        if missing:
            raise ValueError(
                f"Task.adversarial: {name_of(module)} has no {', '.join(missing)}; models.GAN has all of them"
            )
        task = cls.from_module(
            module,
            loss=_doubt,
            score=_doubt,
            metric="nats",
            mix=_mean_probability,
            spec={"kind": "adversarial", **_spec(module)},
        )
        parts = (_part(module, name) for name in ("generator", "critic", "encoder"))
        return replace(task, networks=Networks(*parts, dz=cast(int, module.dz), k=cast(int, module.k)))

    @classmethod
    def distance(cls) -> Task:
        """Squared distance of a row to a centre, for methods whose models are centres."""

        def squared(params: Params, data: Data) -> Tensor:
            return (data.x.flatten(1) - params["centre"]).square().sum(1)

        def init(key: Key) -> Params:
            raise ValueError("Task.distance: there is no centre to begin with; only KFED finds centres")

        return cls(init, squared, squared, "squared distance", spec={"kind": "distance"})

    @classmethod
    def from_module(
        cls,
        module: nn.Module | Callable[[], nn.Module],
        loss: Callable[[Tensor, Tensor], Tensor],
        score: Callable[[Tensor, Tensor], Tensor],
        metric: str,
        check: Callable[[Tensor, Tensor], str | None] = lambda out, y: None,
        mix: Callable[[Tensor], Tensor] = lambda outs: outs.mean(0),
        spec: dict[str, Any] | None = None,
    ) -> Task:
        """A task from any `nn.Module`.

        Args:
            module: A module whose layers have `reset_parameters` (all of torch's do), or a function that builds one.
            loss: `loss(output, y) -> (n,)`.
            score: `score(output, y) -> (n,)`.
            metric: The name of the mean score.
            check: Looks at an output and the targets; returns what is wrong with them, or None.
            mix: The outputs (j, n, …) of j models as one (n, …), for `ensemble`.
            spec: A plain description, for the run folder.

        Raises:
            ValueError: The module mixes the rows of a batch (BatchNorm), or draws random numbers (Dropout), or has a
                layer that cannot be drawn anew. Buffers are taken as constants; `check` refuses those that change.
        """
        build = builder(module)
        template = build(0)
        refuse(template)
        constants = Constants(template)
        skeleton = template.to("meta")

        def init(key: Key) -> Params:
            return {name: p.detach().clone() for name, p in build(key.seed()).named_parameters()}

        def forward(params: Params, data: Data) -> Tensor:
            return functional_call(skeleton, {**params, **constants.on(data.x.device)}, (data.x,))

        def mixed(params: Params, data: Data) -> Tensor:
            models = len(leaves(params)[0])
            return mix(torch.stack([forward(take(params, j), data) for j in range(models)]))

        def ensemble() -> Task:
            return cls(
                init=lambda key: {name: p[None] for name, p in init(key).items()},
                loss=lambda params, data: loss(mixed(params, data), data.y),
                score=lambda params, data: score(mixed(params, data), data.y),
                metric=metric,
                check=verify,
            )

        def verify(rows: Data) -> str | None:
            module = build(0)
            try:
                with torch.no_grad():
                    out = module(rows.x[:1].cpu())
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                why = f" ({error})" if isinstance(error, ValueError) else ""  # what torch says is of its own matters
                given = f"rows of shape {tuple(rows.x.shape[1:])} and type {rows.x.dtype}"
                kind = rows.x.dtype != torch.float32 and "type" in str(error)
                return f"{name_of(skeleton)} does not take {given}{why}{'; give float32' if kind else ''}"
            return constants.changed(module) or outside(module, rows.x) or check(out, rows.y)

        return cls(
            init=init,
            loss=lambda params, data: loss(forward(params, data), data.y),
            score=lambda params, data: score(forward(params, data), data.y),
            metric=metric,
            check=verify,
            first_layer=lambda x: split_first_linear(build(), loss, x),
            features=features_of(skeleton) if loss is squared_error else None,
            ensemble=ensemble,
            spec=spec or {},
        )


def _part(module: nn.Module, name: str) -> Callable[[Params, Tensor], Tensor]:
    """One submodule, as a function of the whole module's parameters."""
    skeleton, prefix = copy.deepcopy(module.get_submodule(name)).to("meta"), f"{name}."

    def forward(params: Params, x: Tensor) -> Tensor:
        own = {n.removeprefix(prefix): p for n, p in params.items() if n.startswith(prefix)}
        return functional_call(skeleton, own, (x,))

    return forward


def _spec(module: nn.Module) -> dict[str, Any]:
    return {"model": module.spec} if hasattr(module, "spec") else {}


def _mean_probability(outs: Tensor) -> Tensor:
    """The log of the mean over models of the probabilities that their logits (j, n, …, classes) give."""
    return outs.log_softmax(-1).logsumexp(0) - math.log(len(outs))


def _surprise(out: Tensor, y: Tensor) -> Tensor:
    return -out


def _doubt(out: Tensor, y: Tensor) -> Tensor:
    return -out.log_softmax(-1).amax(-1)
