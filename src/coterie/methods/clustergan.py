"""ClusterGAN under FedAvg: one generative model for all points, whose codes have a cluster in them.

ClusterGAN: Latent Space Clustering in Generative Adversarial Networks
    Sudipto Mukherjee, Himanshu Asnani, Eugene Lin, Sreeram Kannan. AAAI 2019.
Efficient Clustering Frameworks for Federated Learning Systems
    Jichan Chung. UCB/EECS-2023-212, Section 4.2, which takes it as a baseline for UIFCA.

A code is (z_n, z_c), with z_n normal and z_c the one-hot of a cluster. A generator makes points of codes so that a
critic cannot tell them from real ones, and an encoder finds the codes of what was generated. A real point's cluster is
the one that the encoder finds likeliest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import grad

from coterie.core.cohort import Cohort
from coterie.core.key import Key
from coterie.core.local import gradient_of, membership, remembered
from coterie.core.method import Needs, PointMethod, Report
from coterie.core.optimisers import SGD, Adam, Moments, Optimiser
from coterie.core.pytree import Params, flat, stack, take, to_server, unflat
from coterie.core.registry import register
from coterie.core.settings import setting
from coterie.core.step import ClientStep, Local, Reply, client_step
from coterie.core.sums import slot_mean
from coterie.core.task import Data, Networks, Task

SPREAD = 0.1  # standard deviation of z_n: so little that clusters of codes do not overlap
BETAS = (0.5, 0.9)  # Adam's
TINY = 1e-12  # under a root, whose slope is infinite at 0
_DRAWS = 7  # stream under a client's key


class State(NamedTuple):
    """What the server knows after a round."""

    theta: Params  # generator, critic and encoder, stacked (1, …)
    members: Tensor  # points of each cluster (k,), under the model that the last round began with
    moved: Tensor  # points that have another cluster under it than under the one before
    clients: int
    round: int


class _Player(NamedTuple):
    """A network on its way: its parameters side by side, and what the optimiser remembers."""

    at: Tensor
    moments: Moments


@register("clustergan")
@dataclass(frozen=True)
class ClusterGAN(PointMethod):
    """Every round, the mean of the networks that clients have trained on their own points.

    The settings are the original's but for the step size; the report has SGD with lr = 5e-3 in place of Adam.

    Args:
        k: K, the clusters; those of the task's networks.
        steps: Generator steps of a client in a round.
        critic: Critic steps before each of them.
        batch: Points of a step, drawn with replacement.
        lr: Step size. The original's 1e-4 is for images and many thousands of steps.
        optimiser: "adam" or "sgd". Adam's moments begin anew in every round: with β₂ = 0.9 they forget within ten steps
            anyway, and clients need not keep them.
        penalty: How heavily the critic's slope counts where it is not 1.
        beta_n: How heavily the encoder's error in z_n counts.
        beta_c: How heavily its error in z_c counts.

    Example:
        >>> import coterie as ct
        >>> federation = ct.data.gaussian_clusters(k=2, seed=0, points=100, d=2)
        >>> task = ct.Task.adversarial(ct.models.GAN((2,), k=2, dz=2, hidden=(8,)))
        >>> run = ct.fit(ct.ClusterGAN(k=2, steps=2), task, federation, rounds=2)
        >>> run.assign(federation.train.x).shape
        (200,)
    """

    needs = Needs(task="adversarial", points=True)
    quick = {"lr": 1e-3, "steps": 1, "critic": 2, "batch": 8}

    k: int = setting(low=1)
    steps: int = setting(20, low=1)
    critic: int = setting(5, low=1)
    batch: int = setting(64, low=1)
    lr: float = setting(3e-3, low=0)
    optimiser: Literal["adam", "sgd"] = "adam"
    penalty: float = setting(10.0, low=0)
    beta_n: float = setting(10.0, low=0)
    beta_c: float = setting(10.0, low=0)

    def start(self, task: Task, cohort: Cohort, key: Key) -> State:
        """Networks, drawn at random."""
        self._networks(task)
        self.check_points(cohort)
        theta = stack([task.init(key.fold(0))])
        return State(theta, torch.zeros(self.k), torch.zeros(()), cohort.population, 0)

    def round(self, state: State, cohort: Cohort) -> tuple[State, Report]:
        """Let all clients train, and average, weighted by their points."""
        sums = cohort.combine(self.train, take(state.theta, 0))
        theta = slot_mean(sums._replace(update=sums.update["theta"]), otherwise=state.theta)
        members, moved = (to_server(sums.update[name][0].round()) for name in ("members", "moved"))
        after = State(theta, members, moved, state.clients, state.round + 1)
        return after, Report(cohort.clients, sums.note["loss"])

    @client_step
    def train(self, task: Task) -> ClientStep:
        """A client's share of a round: in turn, several steps of the critic, and one of generator and encoder.

        The loss that is reported is the encoder's, at the model that was sent.
        """
        networks = self._networks(task)

        def run(theta: Params, local: Local) -> Reply:
            x, mask, codes = local.data.x, local.data.mask, self._codes(local.draws)
            loss = self._decoding(networks, theta, networks.generate(theta, codes[0, -1]), codes[0, -1])
            label = _labels(networks, theta, x)
            before = remembered(local.memory, len(label)) if isinstance(local.memory, Tensor) else label
            # What is sent is multiplied by the client's points, so counts are sent as shares.
            share = mask / mask.sum().clamp(min=1)
            update = {
                "theta": self._trained(networks, theta, x, codes, local.draws),
                "members": membership(label, self.k, share).sum(0),
                "moved": ((label != before) * share).sum(),
            }
            return Reply(update, mask.sum(), note={"loss": loss}, memory=label)

        def draw(n: int, key: Key, when: tuple[int, ...]) -> dict[str, Tensor]:
            g = key.fold(_DRAWS, *when).generator()
            return {
                "rows": torch.randint(max(1, n), (self.steps, self.critic, self.batch), generator=g),
                "between": torch.rand(self.steps, self.critic, self.batch, generator=g),
                "normal": torch.randn(self.steps, self.critic + 1, self.batch, networks.dz, generator=g),
                "cluster": torch.randint(self.k, (self.steps, self.critic + 1, self.batch), generator=g),
            }

        return ClientStep(run, draw, {"loss": "mean"})

    @client_step
    def points(self, task: Task) -> ClientStep:
        """The encoder's cluster of every row."""
        networks = self._networks(task)

        def run(theta: Params, local: Local) -> Reply:
            return Reply(note={"label": _labels(networks, take(theta, 0), local.data.x)})

        return ClientStep(run)

    def assign_points(self, state: State, task: Task, data: Data) -> Tensor:
        """The encoder's cluster of every row."""
        return _labels(self._networks(task), take(state.theta, 0), data.x)

    def models(self, state: State) -> Params:
        """The one model, which tells all clusters apart."""
        return state.theta

    def changed(self, before: State, after: State) -> int:
        """Points that changed their cluster."""
        return int(after.moved)

    def _trained(self, networks: Networks, theta: Params, x: Tensor, codes: Tensor, draws: dict[str, Tensor]) -> Params:
        """The networks after all steps on rows x, for codes (steps, critic + 1, batch, dz + k)."""
        judge = {n: p for n, p in theta.items() if n.startswith("critic.")}
        maker = {n: p for n, p in theta.items() if n not in judge}
        # Parameters lie side by side: a step is then a few operations, however many layers there are.
        critic, player = self._begin(judge), self._begin(maker)
        for rows, part, z in zip(draws["rows"], draws["between"], codes, strict=True):
            real = x[rows.flatten()]
            made = networks.generate(unflat(player.at, maker), z[:-1].flatten(0, 1))
            between = made + part.reshape(-1, *[1] * (x.dim() - 1)) * (real - made)
            for batch in zip(*(v.split(self.batch) for v in (real, made, between)), strict=True):
                critic = self._step(critic, lambda p, batch=batch: self._criticism(networks, unflat(p, judge), *batch))
            fixed = unflat(critic.at, judge)
            player = self._step(
                player, lambda p, z=z[-1], fixed=fixed: self._play(networks, {**unflat(p, maker), **fixed}, z)
            )
        end = {**unflat(critic.at, judge), **unflat(player.at, maker)}
        return {n: end[n] for n in theta}  # in the order in which they came

    def _codes(self, draws: dict[str, Tensor]) -> Tensor:
        """Codes (…, dz + k) of what was drawn."""
        cluster = draws["cluster"][..., None] == torch.arange(self.k, device=draws["cluster"].device)
        return torch.cat([SPREAD * draws["normal"], cluster.to(draws["normal"])], -1)

    def _criticism(self, networks: Networks, theta: Params, real: Tensor, made: Tensor, between: Tensor) -> Tensor:
        """The critic's loss: it should think much of real points and little of others, with a slope of 1."""
        opinion = networks.judge(theta, torch.cat([made, real]))
        return (opinion[: len(made)] - opinion[len(made) :]).mean() + self.penalty * steepness(networks, theta, between)

    def _play(self, networks: Networks, theta: Params, z: Tensor) -> Tensor:
        """The loss of generator and encoder: what the critic thinks of generated points, and whether z is found."""
        made = networks.generate(theta, z)
        return self._decoding(networks, theta, made, z) - networks.judge(theta, made).mean()

    def _decoding(self, networks: Networks, theta: Params, made: Tensor, z: Tensor) -> Tensor:
        """How far the encoder is from the codes that points were made of."""
        found = networks.encode(theta, made)
        by_number = (found - z)[:, : networks.dz].square().mean()
        by_cluster = -(found[:, networks.dz :].log_softmax(-1) * z[:, networks.dz :]).sum(-1).mean()
        return self.beta_n * by_number + self.beta_c * by_cluster

    def _begin(self, theta: Params) -> _Player:
        at = flat(theta, 0)
        return _Player(at, self._optimiser.begin({"at": at}))

    def _step(self, now: _Player, loss: Callable[[Tensor], Tensor]) -> _Player:
        slope, _ = gradient_of(lambda p: loss(p["at"]), {"at": now.at})
        after, moments = self._optimiser.step({"at": now.at}, slope, now.moments, now.at.new_full((), self.lr))
        return _Player(after["at"], moments)

    @property
    def _optimiser(self) -> Optimiser:
        return Adam(beta1=BETAS[0], beta2=BETAS[1]) if self.optimiser == "adam" else SGD()

    def _networks(self, task: Task) -> Networks:
        if task.networks is None:
            kind = task.spec.get("kind", "custom")
            raise ValueError(f"ClusterGAN: the task must be a Task.adversarial, got a task of kind '{kind}'")
        if task.networks.k != self.k:
            raise ValueError(f"ClusterGAN: k must be that of the task's networks, {task.networks.k}, got {self.k}")
        return task.networks


def steepness(networks: Networks, theta: Params, x: Tensor) -> Tensor:
    """The gradient penalty: how far the critic's slope at these rows is from 1, squared, in the mean."""
    slope = grad(lambda at: networks.judge(theta, at).sum())(x)
    length = (slope.flatten(1).square().sum(1) + TINY).sqrt()
    return (length - 1).square().mean()


def _labels(networks: Networks, theta: Params, x: Tensor) -> Tensor:
    """The cluster that the encoder finds likeliest for every row."""
    return networks.encode(theta, x)[:, networks.dz :].argmax(-1)
