"""OneShot: every client solves its own problem once, the server groups the solutions, and each group trains a model.

Robust Federated Learning in a Heterogeneous Environment
    Avishek Ghosh, Justin Hong, Dong Yin, Kannan Ramchandran. 2019 (arXiv:1906.06629), Algorithm 1; `by="kmeans"`.

Federated Learning with Hierarchical Clustering of Local Updates to Improve Training on Non-IID Data
    Christopher Briggs, Zhong Fan, Peter Andras. IJCNN 2020, Algorithm 1; `by="hierarchical"`.

Efficient Distribution Similarity Identification in Clustered Federated Learning via Principal Angles
    Saeed Vahidian, Mahdi Morafah, Weijia Wang, and others. AAAI 2023 (PACFL), Algorithms 1 and 2; `by="angles"`.

The IFCA paper compares itself with the first on FEMNIST. In all three the server groups clients once, from one reply of
each; after that every group is trained by FedAvg, and nobody changes the group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.key import Key
from coterie.core.method import Groups, Needs, Report
from coterie.core.pytree import Params, exact, leaves, put_rows, stacked, take, tree_map
from coterie.core.registry import register
from coterie.core.settings import setting
from coterie.core.step import ClientStep, Local, Reply, client_step
from coterie.core.sums import slot_mean
from coterie.core.task import Task
from coterie.core.train import Models, Train
from coterie.parts.doubts import Doubting
from coterie.parts.hierarchy import Linkage, cut, cut_below, cut_by_silhouette, embedded, merges
from coterie.parts.kmeans import farthest, lloyd, nearest_centres, seeded, spread
from coterie.parts.local_training import LocalTraining
from coterie.parts.server_step import ServerStep
from coterie.parts.tournament import averages, squared_distances

SEEDS, LLOYD = 20, 100  # random starts of k-means beside a farthest-first one, and the steps of each
FAR = 1e3  # times the usual way from the start: whose solution is farther has diverged
NO_RANK = 1e-6  # of the largest singular value: a direction with less is one that no row has
_ORDER, _SEEDS, _REFERENCES = 1, 2, 3  # streams under the key of the start


class State(NamedTuple):
    """What the server knows after a round."""

    theta: Params  # the clusters' models (k, …)
    labels: Tensor  # each client's cluster (m,), fixed; -1 for one that was not there yet when clients were compared
    round: int
    moments: Any = ()  # what the server's optimiser remembers of each model (k, …)


@register("one_shot")
@dataclass(frozen=True)
class OneShot(LocalTraining, ServerStep, Doubting):
    """Compare clients once, by what they learn alone or by their data; then train one model for each group by FedAvg.

    Args:
        k: Number of clusters. Without it "hierarchical" takes the cut with the largest silhouette, out of 2 to 20
            clusters of two clients each in the mean; and one cluster if points of a single normal distribution with the
            same covariance have a silhouette as large in one of 39 draws (`parts/hierarchy.py`).
        by: "kmeans": k-means of the clients' solutions, the best of 20 starts by k-means++ and a farthest-first one.
            "hierarchical": the solutions' Euclidean distances and a linkage. "angles": the sum of the principal angles
            between the clients' data subspaces, in degrees, and a linkage; the server gets singular vectors of every
            client's rows, which are like typical rows.
        steps: Local steps by which a client solves its own problem, with `lr`, `batch`, `optimiser` and `clip` as in
            the rounds. Not for "angles".
        linkage: How the distance of two clusters follows from those of their clients; None takes "ward", and "average"
            for angles.
        threshold: In place of `k`: clusters at a larger distance than this are not merged. Not for "kmeans"; "angles"
            needs this or `k`.
        directions: p, the leading singular vectors that each client sends, for "angles". Every client needs more rows.

    Example:
        >>> import coterie as ct
        >>> federation = ct.data.rotated_digits(clients=16, seed=0)
        >>> task = ct.Task.classifier(ct.models.MLP(64, 32, 10))
        >>> run = ct.fit(ct.OneShot(by="hierarchical"), task, federation, rounds=5, seed=0)
        >>> len(run.models), run.ari
        (4, 1.0)
    """

    needs = Needs(gather=True)
    quick = {"steps": 10}

    k: int | None = setting(None, low=1)
    by: Literal["kmeans", "hierarchical", "angles"] = "kmeans"
    steps: int = setting(100, low=1)
    linkage: Linkage | None = None
    threshold: float | None = setting(None, low=0)
    directions: int = setting(3, low=1)

    def start(self, task: Task, cohort: Cohort, key: Key) -> State:
        """Lines 1 to 5: compare all clients, and give each cluster its first model."""
        self._check(cohort)
        begin = task.init(key.fold(0))  # line 1
        if self.by == "angles":
            apart = self._angles(cohort)  # lines 2-3
            some, solved, weight = cohort, tree_map(lambda x: x.expand(len(cohort), *x.shape), begin), None
        else:
            some, solved, weight = self._solved(begin, cohort)  # lines 2-3
            apart = squared_distances({n: x for n, x in solved.items() if n not in task.moving}).sqrt()
        own = self._grouped(apart.numpy(), some.numbers, key)  # line 4
        if self.k and (found := int(own.max()) + 1) < self.k:
            cohort.log(f"OneShot: {found} clusters in place of k={self.k}: too few clients differ from each other")
        weight = leaves(solved)[0].new_ones(len(own)) if weight is None else weight
        theta = averages(solved, weight, own == torch.arange(int(own.max()) + 1)[:, None])  # line 5
        labels = torch.full((cohort.population,), -1)
        labels[some.clients] = own
        return State(theta, labels, 0, self.begin_server(theta, task))

    def round(self, state: State, cohort: Cohort) -> tuple[State, Report]:
        """Lines 7 to 10: FedAvg in every cluster."""
        state, chosen = self._placed(state, cohort.sample(self.fraction))
        if not len(chosen):  # all participants are yet to be placed
            return state._replace(round=state.round + 1), Report(chosen.clients, torch.zeros(0))
        k = stacked(state.theta)
        sent = Models(state.theta, self.step_size(state.round), label=torch.arange(k))
        sums = chosen.combine(self.step, sent, slots=k, rows=state.labels[chosen.clients])  # lines 7-9
        mean = slot_mean(sums, otherwise=state.theta)  # line 10
        theta, moments = self.advance(state.theta, mean, sums.weight, state.moments, cohort.task)
        after = state._replace(theta=theta, moments=moments, round=state.round + 1)
        return after, Report(chosen.clients, sums.note["loss"])

    @client_step
    def solve(self, task: Task) -> Train:
        """Line 2 at one client: its own problem, from the common start."""
        by = self.descend()
        alone = replace(by.optimiser, keep=False)  # what it remembers is of no cluster
        return Train(replace(by, tau=self.steps, epochs=None, optimiser=alone), weights=self.weights)

    @client_step
    def subspace(self, task: Task) -> ClientStep:
        """Line 2 at one client, by angles: the leading singular vectors of its rows, which are not centred."""

        def run(_: Any, local: Local) -> Reply:
            x = (local.data.x.flatten(1) * local.data.mask[:, None]).double()
            _, size, vectors = torch.linalg.svd(x, full_matrices=False)
            rank = (size > NO_RANK * size[0]).sum()
            return Reply({"vectors": vectors[: self.directions].to(local.data.x.dtype)}, note={"rank": rank})

        return ClientStep(run, as_they_are=True)

    @client_step
    def step(self, task: Task) -> Train:
        """Line 8 at one client: train the cluster's model."""
        return Train(self.descend(), weights=self.weights)

    def models(self, state: State) -> Params:
        """One for each cluster."""
        return state.theta

    def labels(self, state: State) -> Tensor:
        """The clusters that the start has found."""
        return state.labels

    def place(self, state: State, cohort: Cohort) -> Tensor:
        """Where clients are; one that is not known, or on other rows than those it trains on, by the lowest loss."""
        known = state.labels[cohort.clients] if cohort.part == "train" else torch.full((len(cohort),), -1)
        new = (known < 0).nonzero().flatten()
        return put_rows(known, new, super().place(state, cohort.only(new))) if len(new) else known

    def own_choice(self) -> None:
        """Clients do not choose."""

    def join(self, state: State, newcomers: Cohort) -> State:
        """Newcomers are placed by the lowest loss; before the first round they wait, for models may be all the same."""
        own = super().place(state, newcomers) if state.round else torch.full((len(newcomers),), -1)
        return state._replace(labels=torch.cat([state.labels, own]))

    def adopt(self, state: State, groups: Groups, task: Task) -> tuple[OneShot, State]:
        """Models and labels are replaced; the server's optimiser begins anew."""
        method = self if self.k is None else replace(self, k=stacked(groups.models))
        moments = self.begin_server(groups.models, task)
        return method, state._replace(theta=groups.models, labels=groups.labels, moments=moments)

    def grows(self) -> bool:
        """Any number of models will do."""
        return True

    # --- lines 2 to 4: how clients are compared -------------------------------------------------------------------

    def _solved(self, begin: Params, cohort: Cohort) -> tuple[Cohort, Params, Tensor]:
        """The clients that did not diverge, their solutions (c, …), and how heavily each counts; others come later."""
        reply = cohort.gather(self.solve, Models(begin, self.step_size(0)))
        moved = [(x - begin[n].to(x)).reshape(len(x), -1).square().sum(1) for n, x in reply.update.items()]
        length = torch.stack(moved).sum(0).sqrt()
        usual = length[length.isfinite()].median() if bool(length.isfinite().any()) else 0.0
        fine = length.isfinite() & (length <= FAR * usual)
        for i in (~fine).nonzero().flatten().tolist():
            name = cohort.federation.name(int(cohort.clients[i]))
            cohort.log(f"OneShot: {name} is not compared: its own solution diverges; a smaller lr may help")
        at = fine.nonzero().flatten()
        if len(at) < (self.k or 1):
            told = f"{len(at)} of {len(cohort)} clients find one, {self.k or 1} must"
            raise ValueError(f"OneShot: the clients' own solutions diverge: {told}; lr={self.lr:g} is too large")
        return cohort.only(at.cpu()), take(reply.update, at), reply.weight[at.to(reply.weight.device)]

    def _angles(self, cohort: Cohort) -> Tensor:
        """The sum of the principal angles between clients' subspaces, in degrees (c, c)."""
        reply = cohort.gather(self.subspace, ())
        if bool((flat := reply.note["rank"] < self.directions).any()):
            i = int(flat.int().argmax())
            name, rank = cohort.federation.name(int(cohort.clients[i])), int(reply.note["rank"][i])
            raise ValueError(f"OneShot: directions is {self.directions}, but the rows of {name} have rank {rank}")
        return angle_sums(exact(reply.update["vectors"]))

    def _grouped(self, apart: np.ndarray, numbers: Tensor, key: Key) -> Tensor:
        """Line 4: the cluster of each client (c,), by distances; the first client's is 0.

        Clients are brought into an order that follows from their names, so that ties do not depend on their places.
        """
        order = key.fold(_ORDER).shuffle(numbers).numpy()
        found = np.empty(len(order), dtype=int)
        found[order] = self._clusters(apart[np.ix_(order, order)], key) if len(order) > 1 else 0
        first = np.unique(found, return_index=True)[1]
        return torch.from_numpy(first.argsort().argsort()[np.unique(found, return_inverse=True)[1]])

    def _clusters(self, apart: np.ndarray, key: Key) -> np.ndarray:
        if self.k is not None and self.by == "kmeans":
            return k_means(torch.from_numpy(embedded(apart)), self.k, key.fold(_SEEDS)).numpy()
        if self.k is not None:
            return cut(merges(apart, self._linkage), self.k)
        if self.threshold is not None:
            return cut_below(merges(apart, self._linkage), self.threshold)
        return cut_by_silhouette(apart, self._linkage, key.fold(_REFERENCES).generator())

    @property
    def _linkage(self) -> Linkage:
        return self.linkage or ("average" if self.by == "angles" else "ward")

    def _placed(self, state: State, chosen: Cohort) -> tuple[State, Cohort]:
        """Participants that were not compared go where the loss is lowest; in the first round they take no part."""
        new = (state.labels[chosen.clients] < 0).nonzero().flatten()
        if not len(new):
            return state, chosen
        if not state.round:
            return state, chosen.without(chosen.clients[new])
        labels = put_rows(state.labels, chosen.clients, self.place(state, chosen))
        return state._replace(labels=labels), chosen

    def _check(self, cohort: Cohort) -> None:
        m, least = len(cohort), int(cohort.sizes.argmin())
        if self.k is None and self.by == "kmeans":
            raise ValueError("OneShot: by='kmeans' needs k, got None; by='hierarchical' can do without")
        if self.k is not None and self.k > m:
            raise ValueError(f"OneShot: k must be at most the number of clients, {m}, got {self.k}")
        if self.threshold is not None and (self.k is not None or self.by == "kmeans"):
            given = "by='kmeans'" if self.by == "kmeans" else f"k={self.k}"
            raise ValueError(f"OneShot: threshold is for by='hierarchical' or 'angles' without k, got {given}")
        if self.by != "angles":
            return
        if self.k is None and self.threshold is None:
            raise ValueError("OneShot: by='angles' needs k or a threshold in degrees, got neither")
        if self.linkage == "ward":
            raise ValueError("OneShot: linkage='ward' is for Euclidean distances, and angles are none: 'average'")
        row = cohort.federation.train.x[0]
        if not row.is_floating_point() or self.directions > row.numel():
            given = f"{row.dtype} of shape {tuple(row.shape)}"
            raise ValueError(f"OneShot: by='angles' takes rows of at least {self.directions} real numbers, got {given}")
        if self.directions >= int(cohort.sizes[least]):
            who = f"{cohort.federation.name(int(cohort.clients[least]))} has {int(cohort.sizes[least])}"
            raise ValueError(
                f"OneShot: directions={self.directions} needs more rows than that on every client, or the singular "
                f"vectors would be the rows, but {who}"
            )


def angle_sums(vectors: Tensor) -> Tensor:
    """The sum of the principal angles of all pairs of subspaces, in degrees (m, m), from orthonormal rows (m, p, d).

    Example:
        >>> e = torch.eye(3)
        >>> angle_sums(torch.stack([e[[0, 1]], e[[0, 2]]]))
        tensor([[ 0., 90.],
                [90.,  0.]])
    """
    angles = [torch.linalg.svdvals(own @ vectors.mT).clamp(max=1).arccos().sum(1).rad2deg() for own in vectors]
    return torch.stack(angles).fill_diagonal_(0.0)


def k_means(points: Tensor, k: int, key: Key) -> Tensor:
    """The nearest of k centres to every point (m,): the best of several starts by k-means++ and a farthest-first one.

    Example:
        >>> k_means(torch.tensor([[0.0], [0.2], [5.0], [9.0]]), 2, Key.of(0)).unique_consecutive().numel()
        2
    """
    mask = points.new_ones(len(points))
    uniform = torch.rand(SEEDS, k, generator=key.generator(), dtype=points.dtype)
    starts = torch.cat([seeded(points, mask, uniform), farthest(points, mask, k)[None]])
    found = lloyd(points, mask, starts, LLOYD)
    return nearest_centres(points, found[spread(points, mask, found).argmin()][None])[0]
