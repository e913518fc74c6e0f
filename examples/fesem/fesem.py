"""FeSEM: k-means of the clients' models, as one file outside of coterie.

Multi-Center Federated Learning
    Ming Xie, Guodong Long, Tao Shen, Tianyi Zhou, Xianzhi Wang, Jing Jiang, Chengqi Zhang. 2021 (arXiv:2108.08647).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from coterie.core import (
    Cohort,
    Key,
    Models,
    Needs,
    Params,
    Report,
    Task,
    Train,
    client_step,
    flat,
    put_rows,
    register,
    setting,
    slot_mean,
    slot_sum,
    stack,
    take,
    unflat,
)
from coterie.parts import Choosing, LocalTraining, kmeans


class State(NamedTuple):
    """All that FeSEM knows after a round."""

    theta: Params  # the centres, one model per cluster (k, …)
    labels: Tensor  # each client's cluster (m,), -1 until it takes part
    round: int


@register("fesem")
@dataclass(frozen=True)
class FeSEM(LocalTraining, Choosing):
    """Clients train from the model of their cluster; the server does a step of k-means with what they send.

    Args:
        k: Number of clusters.
    """

    needs = Needs(gather=True)  # the server sees every client's model

    k: int = setting(low=1)

    def start(self, task: Task, cohort: Cohort, key: Key) -> State:
        """One model for all: the first round tells the clusters apart."""
        if self.k > len(cohort):
            raise ValueError(f"FeSEM: k must be at most the number of clients, {len(cohort)}, got {self.k}")
        return State(stack([task.init(key)] * self.k), torch.full((cohort.population,), -1), 0)

    def round(self, state: State, cohort: Cohort) -> tuple[State, Report]:
        """Everybody trains; then one step of k-means."""
        chosen = cohort.sample(self.fraction)
        sent = Models(state.theta, self.step_size(state.round), label=torch.arange(self.k))
        own = state.labels[chosen.clients].clamp(min=0)
        reply = chosen.gather(self.train, sent, slots=self.k, rows=own)
        trained, centres = flat(reply.update), flat(state.theta)
        if state.round == 0 and len(trained) >= self.k:
            centres = kmeans(trained, self.k)
        label = torch.cdist(trained, centres).argmin(1)  # E-step: the nearest centre
        before = unflat(centres, take(state.theta, 0))
        theta = slot_mean(slot_sum(reply._replace(slot=label), self.k), otherwise=before)  # M-step: the mean
        labels = put_rows(state.labels, chosen.clients, label)
        return State(theta, labels, state.round + 1), Report(chosen.clients, reply.note["loss"])

    @client_step
    def train(self, task: Task) -> Train:
        """What one client does: a few steps of gradient descent on its own rows."""
        return Train(self.descend(), self.k, weights=self.weights)

    def models(self, state: State) -> Params:
        """The centres."""
        return state.theta

    def labels(self, state: State) -> Tensor:
        """The clusters as the server knows them."""
        return state.labels

    def join(self, state: State, newcomers: Cohort) -> State:
        """Clients that come later are placed by their loss."""
        return state._replace(labels=torch.cat([state.labels, self.place_new(state, newcomers)]))
