"""A task: how a model starts, what it loses on a row, how it scores. Kinds of model differ only here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from coterie.core.augment import CropFlip
from coterie.core.checks import check_counts, check_density, check_labels, check_targets, check_words
from coterie.core.features import features_of, jacobian_of
from coterie.core.first_layer import FirstLinear
from coterie.core.key import Key
from coterie.core.losses import (
    cross_entropy,
    doubt,
    is_right,
    poisson,
    poisson_deviance,
    squared_error,
    surprise,
    word_cross_entropy,
)
from coterie.core.making import Init, Maker
from coterie.core.mixing import mean_exponential, mean_output, mean_probability
from coterie.core.module import BatchNorm, PureModule, name_of
from coterie.core.module_task import Apart, ModuleFunctions, PerRow
from coterie.core.networks import Networks, part
from coterie.core.pytree import Params, leaves
from coterie.core.settings import check_type, validate

if TYPE_CHECKING:
    from coterie.storage.inputs import Inputs


Source = nn.Module | Callable[[], nn.Module]  # a module, or a function that builds one

SHARE = "share"  # the entry of a mixture that says how much of each of its models (j,) goes into it


class Data(NamedTuple):
    """Rows of one client (n, …), or of many (c, n, …)."""

    x: Tensor
    y: Tensor
    mask: Tensor  # 1 for a real row, 0 for padding


@dataclass(frozen=True, eq=False)
class Trunk:
    """The frozen layers of a task's model, and the task of the layers after them.

    Attributes:
        see: From rows to features, which nothing in a run changes.
        head: The task on features. Its parameters are those of the whole task.
        row: The features of one row, as an example.
    """

    see: Callable[[Tensor], Tensor]
    head: Task
    row: Tensor


def _no_ensemble() -> Task:
    raise ValueError("Task: only a task made from a module knows how to mix the outputs of models")


@dataclass(frozen=True)
class Task:
    """Three pure functions, and the name of the score.

    Attributes:
        init: `init(key) -> Params`, a freshly drawn model.
        loss: `loss(params, data) -> (n,)`, one value per row.
        score: `score(params, data) -> (n,)`, what an analyst would look at, one value per row.
        metric: What the mean of `score` is called: "accuracy", "mse", "deviance", "nats".
        check: `check(data)` says what is wrong with rows, None if they suit the model.
        first_layer: `first_layer(x)` takes the model apart after a linear first layer; None if it has none.
        trunk: `trunk(x)` takes the model apart after layers that are frozen, tried on some rows; None if there are none
            such, or why it is not possible.
        features: `features(x)` is φ(x) (n, d), the gradient of a single output with respect to all parameters side by
            side, under squared loss. Of a model that is linear in its parameters, ⟨φ(x), θ⟩ is the output; see
            `coterie.core.features`. None for other tasks.
        jacobian: `jacobian(x)` is the same for each output (n, c, d), under the losses of classes and counts; None for
            other tasks.
        from_moments: `from_moments(mean, covariance)` are the likeliest parameters of a density that has a closed form;
            None for others.
        location: Names of a density's parameters that say where its rows lie rather than how they are spread.
        networks: Those of an adversarial task; None for others.
        train: `train(params, data, seed) -> (n,), moved`: the loss of each row in training, with dropout masks and
            crops that follow from a seed, and the buffers that training has moved. None where training is the same as
            scoring.
        functions: What a task that is made from a module does with it; None for others.
        predict: `predict(output)` is what a user would read off an output: of a classifier the class, of counts the
            expected one.
        ensemble: `ensemble()` is the task of several models together. Its Params lead with an axis of models (j, …), as
            `core.pytree.stack` makes them, and its loss and score are those of the models' mixed output: the mean of
            the probabilities or of the expected counts, of a regressor the mean output. An entry `SHARE` (j,) weighs
            them; without it they count alike. Its `init` draws an ensemble of one.
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
    trunk: Callable[[Tensor], Trunk | str | None] = field(default=lambda x: None, repr=False)
    features: Callable[[Tensor], Tensor] | None = field(default=None, repr=False)
    jacobian: Callable[[Tensor], Tensor] | None = field(default=None, repr=False)
    from_moments: Callable[[Tensor, Tensor], Params] | None = field(default=None, repr=False)
    location: tuple[str, ...] = ()
    networks: Networks | None = field(default=None, repr=False)
    train: Callable[[Params, Data, Tensor], tuple[Tensor, Params]] | None = field(default=None, repr=False)
    functions: ModuleFunctions | None = field(default=None, repr=False)
    predict: Callable[[Tensor], Tensor] = field(default=lambda out: out, repr=False)
    ensemble: Callable[[], Task] = field(default=_no_ensemble, repr=False)
    spec: dict[str, Any] = field(default_factory=dict)

    @property
    def moving(self) -> tuple[str, ...]:
        """Names of a model's tensors that are buffers, such as BatchNorm's statistics: averaged, but not trained."""
        return () if self.functions is None else self.functions.pure.moving

    @property
    def personal(self) -> Params:
        """What never leaves a client, as each begins with it: all of BatchNorm, where that is "local"."""
        return {} if self.functions is None else self.functions.pure.personal

    @property
    def same_start(self) -> bool:
        """Whether all models begin as the same one: the module that was given."""
        return self.functions is not None and self.functions.make.same

    @property
    def draws(self) -> bool:
        """Whether training may need random numbers, for dropout or for crops of images."""
        return self.functions is not None and self.functions.draws

    @classmethod
    def classifier(
        cls,
        module: Source,
        *,
        init: Init = "random",
        batch_norm: BatchNorm = "average",
        augment: CropFlip | None = None,
    ) -> Task:
        """Cross-entropy and accuracy for a module that returns one logit per class.

        Args:
            module: As for `from_module`.
            init: As for `from_module`.
            batch_norm: As for `from_module`.
            augment: As for `from_module`.
        """
        return cls.from_module(
            module,
            loss=cross_entropy,
            score=is_right,
            metric="accuracy",
            init=init,
            batch_norm=batch_norm,
            augment=augment,
            check=check_labels,
            mix=mean_probability,
            predict=lambda out: out.argmax(-1),
            spec={
                "kind": "classifier",
                **_spec(module, batch_norm),
                **({"augment": augment.spec} if isinstance(augment, CropFlip) else {}),
            },
        )

    @classmethod
    def regressor(cls, module: Source, *, init: Init = "random", batch_norm: BatchNorm = "average") -> Task:
        """Squared loss (y - f(x))², summed over the outputs; the score is the mean squared error.

        Args:
            module: As for `from_module`.
            init: As for `from_module`.
            batch_norm: As for `from_module`.
        """
        return cls.from_module(
            module,
            loss=squared_error,
            score=squared_error,
            metric="mse",
            init=init,
            batch_norm=batch_norm,
            check=check_targets,
            spec={"kind": "regressor", **_spec(module, batch_norm)},
        )

    @classmethod
    def counts(cls, module: Source, *, init: Init = "random", batch_norm: BatchNorm = "average") -> Task:
        """Poisson regression for a module with one output, the log of the expected count; `predict` gives that count.

        The loss is minus the log-likelihood, the score the deviance: twice what it exceeds its least by.

        Args:
            module: As for `from_module`.
            init: As for `from_module`.
            batch_norm: As for `from_module`.
        """
        return cls.from_module(
            module,
            loss=poisson,
            score=poisson_deviance,
            metric="deviance",
            init=init,
            batch_norm=batch_norm,
            check=check_counts,
            mix=mean_exponential,
            predict=torch.exp,
            spec={"kind": "counts", **_spec(module, batch_norm)},
        )

    @classmethod
    def language_model(cls, module: Source, *, init: Init = "random", batch_norm: BatchNorm = "average") -> Task:
        """Cross-entropy of the next word for a module that returns one logit per word at every position.

        The loss of a row is the mean over its positions; the score is the same, in nats per word.

        Args:
            module: As for `from_module`.
            init: As for `from_module`.
            batch_norm: As for `from_module`.
        """
        return cls.from_module(
            module,
            loss=word_cross_entropy,
            score=word_cross_entropy,
            metric="nats",
            init=init,
            batch_norm=batch_norm,
            check=check_words,
            mix=mean_probability,
            predict=lambda out: out.argmax(-1),
            spec={"kind": "language_model", **_spec(module, batch_norm)},
        )

    @classmethod
    def density(cls, module: nn.Module) -> Task:
        """Negative log-likelihood for a module that returns one log-likelihood per row; y plays no part in it.

        A module may have a function `from_moments` and names of parameters in `location`: see the attributes. If it
        takes only values of some range, as those of pixels, it says so in `between`.
        """
        task = cls.from_module(
            module,
            loss=surprise,
            score=surprise,
            metric="nats",
            check=check_density,
            mix=mean_exponential,
            spec={"kind": "density", **_spec(module)},
        )
        return replace(
            task,
            from_moments=getattr(module, "from_moments", None),
            location=tuple(getattr(module, "location", ())),
            trunk=lambda x: None,  # its moments are those of the rows
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
            loss=doubt,
            score=doubt,
            metric="nats",
            mix=mean_probability,
            spec={"kind": "adversarial", **_spec(module)},
        )
        parts = (part(module, name) for name in ("generator", "critic", "encoder"))
        networks = Networks(*parts, dz=cast(int, module.dz), k=cast(int, module.k))
        return replace(task, networks=networks, trunk=lambda x: None)  # they make rows, too

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
        module: Source,
        loss: PerRow,
        score: PerRow | None = None,
        metric: str | None = None,
        *,
        init: Init = "random",
        batch_norm: BatchNorm = "average",
        carry: Sequence[str] = (),
        augment: CropFlip | None = None,
        check: Callable[[Tensor, Tensor], str | None] = lambda out, y: None,
        mix: Callable[[Tensor, Tensor], Tensor] | None = None,
        predict: Callable[[Tensor], Tensor] = lambda out: out,
        spec: dict[str, Any] | None = None,
    ) -> Task:
        """A task from any `nn.Module`.

        Parameters with `requires_grad` False stay as they are: they are not trained and not sent. Tied parameters stay
        tied. Dropout is on in training only, with masks that follow from the run's seed.

        Args:
            module: A module, or a function that builds one. It takes rows, or if these are tuples or dicts the entries
                as its arguments, and returns a tensor, or an object with `logits`.
            loss: `loss(output, y) -> (n,)`, such as `nn.CrossEntropyLoss(reduction="none")`.
            score: `score(output, y) -> (n,)`; None scores by the loss.
            metric: The name of the mean score.
            init: "random": every model is drawn anew, by its layers' `reset_parameters` (all of torch's have one).
                "module": every model begins with the module's own parameters, such as pretrained ones.
            batch_norm: "average": BatchNorm's parameters and statistics are averaged as all others are. "local": each
                client keeps its own, and sends neither (FedBN).
            carry: Names of buffers that training moves, which are then sent and averaged. Those of torch's own layers
                need not be named. All other buffers are constants.
            augment: What is done to images: `CropFlip(size)` gives the module random crops in training, and the centre
                wherever it is scored; None gives it rows as they are.
            check: Looks at an output and the targets; returns what is wrong with them, or None.
            mix: `mix(outs, shares)`: the outputs (j, n, …) of j models as one (n, …), by their shares (j,); None takes
                the weighted mean.
            predict: What a user would read off an output.
            spec: A plain description, for the run folder.

        Raises:
            ValueError: A layer cannot be drawn anew, or not be used in a federation; names it.
        """
        make = Maker(module, init)
        if batch_norm not in ("average", "local"):
            raise ValueError(f"Task: batch_norm must be 'average' or 'local', got {batch_norm!r}")
        pure = PureModule(make(0), batch_norm, carry)
        if not pure.kinds.trained:
            raise ValueError(f"Task: {pure.name} has no parameter that could be trained and sent")
        check_type("Task: augment", augment, CropFlip | None)
        if augment is not None:
            validate(augment)
        functions = ModuleFunctions(make, pure, loss, score or loss, check, mix or mean_output, augment=augment)
        return cls._of(functions, metric or ("loss" if score is None else "score"), predict, spec or {})

    @classmethod
    def _of(cls, own: ModuleFunctions, metric: str, predict: Callable[[Tensor], Tensor], spec: dict[str, Any]) -> Task:
        def mixed(params: Params, data: Data) -> Tensor:
            models, share = apart(params)
            return own.mixed(models, data.x, data.mask, share)

        def ensemble() -> Task:
            return cls(
                init=lambda key: {name: p[None] for name, p in own.init(key).items()},
                loss=lambda params, data: own.loss(mixed(params, data), data.y),
                score=lambda params, data: own.score(mixed(params, data), data.y),
                metric=metric,
                check=own.check,
            )

        def output(params: Params, x: Tensor) -> Tensor:
            return own.output(params, x, x.new_ones(len(x)))

        plain = own.augment is None  # closed forms would see the centre of every image only
        squared, other = own.loss is squared_error and plain, own.loss in (cross_entropy, poisson) and plain
        trunks: dict[tuple[torch.Size, torch.dtype], Trunk | str | None] = {}  # by the kind of a row

        def trunk(x: Tensor) -> Trunk | str | None:
            kind = x.shape[1:], x.dtype
            if kind not in trunks:
                found = own.cut(x)
                if isinstance(found, Apart):
                    row = found.see(x[:1].cpu())[0].detach()
                    found = Trunk(found.see, cls._of(found.head, metric, predict, spec), row)
                trunks[kind] = found
            return trunks[kind]

        return cls(
            init=own.init,
            loss=own.losses,
            score=own.scores,
            metric=metric,
            check=own.check,
            first_layer=own.first_layer,
            trunk=trunk,
            features=features_of(output, own.pure.shapes, own.first_layer) if squared else None,
            jacobian=jacobian_of(output, own.pure.shapes) if other else None,
            train=own.training,
            functions=own,
            predict=predict,
            ensemble=ensemble,
            spec=spec,
        )

    def serving(self, params: Params) -> Task:
        """The task of a client's own model: that of an ensemble if it is a mixture, else this one."""
        return self.ensemble() if SHARE in params else self

    def state_dict(self, params: Params) -> Params:
        """A model as the `load_state_dict` of its module takes it."""
        if self.functions is None:
            return {n: x.detach().cpu() for n, x in params.items()}
        return self.functions.pure.state_dict(params)

    def taking(self, inputs: Inputs | None) -> Task:
        """The task whose module is given the parts of a row as several inputs.

        Args:
            inputs: Of a federation's rows; None where a row is one input.
        """
        if inputs is None or self.functions is None or self.functions.inputs == inputs:
            return self
        return self.of_functions(replace(self.functions, inputs=inputs), self.spec)

    def of_functions(self, functions: ModuleFunctions, spec: dict[str, Any] | None = None) -> Task:
        """The same kind of task from another module, or one that is used otherwise.

        Args:
            functions: What is done with it.
            spec: A plain description; None for none.
        """
        return self._of(functions, self.metric, self.predict, spec or {})


def _spec(module: Source, batch_norm: BatchNorm = "average") -> dict[str, Any]:
    """What a description says besides the kind: the model, and how BatchNorm is done where that is not as usual."""
    model = {"model": module.spec} if isinstance(module, nn.Module) and hasattr(module, "spec") else {}
    return {**model, "batch_norm": batch_norm} if batch_norm != "average" else model


def apart(mixture: Params) -> tuple[Params, Tensor]:
    """The models of a mixture (j, …), and their shares (j,): equal ones where it names none."""
    models = {name: p for name, p in mixture.items() if name != SHARE}
    first = leaves(models)[0]
    return models, mixture.get(SHARE, first.new_full((len(first),), 1 / len(first)))
