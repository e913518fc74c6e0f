"""Candidates: models shrunk by different amounts, of which those are taken that find held-out points likeliest.

Points that are wrongly assigned hold on to their cluster if its model has overfitted them, which UIFCA's report leaves
as an open problem (Section 4.3). Our answer is to shrink models towards what the clusters have in common.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.key import Key
from coterie.core.local import each_model
from coterie.core.pytree import Params, stacked, take, to_server, tree_map
from coterie.core.step import ClientStep, Local, Reply, client_step
from coterie.core.task import Task
from coterie.parts.closed_form import ClosedForm
from coterie.parts.held_out import held_out, surprise
from coterie.parts.mixture import own_shares
from coterie.parts.restarts import Restarts
from coterie.parts.shrinkage import Moments

PULLS = (0.0, 0.1, 1.0)  # strengths of shrinking that are tried
RIDGE = 1e-3  # at least, of the models that judge: they see fewer points than the others
SETTLED = 0.02  # the share of points that change their cluster below which a restart begins to shrink
_MODELS = 6  # stream under a key


class Candidates(ClosedForm, Restarts):
    """For methods with `mixture` and `shrink`.

    Their states hold `theta`, `moments`, `held`, `sizes`, `shrinks` and `round`.
    """

    mixture: bool
    shrink: bool
    renew: bool

    @abstractmethod
    def averaged(self, theta: Params, pull: Tensor, sizes: Tensor, cohort: Cohort) -> Params:
        """Models (r, k, …) trained on the points that are not held out, those of each restart pulled together."""

    @property
    @abstractmethod
    def favours_first(self) -> bool:
        """Whether the first restart is kept unless another is clearly better."""

    @abstractmethod
    def drawn_models(self, task: Task, key: Key) -> Params:
        """Random models (r, k, …)."""

    def chosen(self, state: Any, cohort: Cohort) -> tuple[Params, Tensor, Tensor]:
        """The models of every restart, shrunk as strongly as makes held-out points likeliest.

        Held-out points train no model that they judge: one that had seen them would pass for a good one. Restarts that
        do not shrink yet are left alone.

        Returns:
            The models, how strongly they were shrunk (r,), and, if clients judged, how unlikely held-out points are
            (r,). Where the first restart is k-FED's and the others are variations of it, these have to be better by a
            standard error.
        """
        pulls = torch.tensor(PULLS if self.weighs(cohort.task) and bool(state.shrinks.any()) else PULLS[:1])
        judged = self.compares or len(pulls) > 1
        tried, share = {}, state.sizes
        if not isinstance(state.moments, Moments):
            tried, share = self._trained(state, pulls, cohort)
        elif judged:
            tried, share = self._unseen(state, pulls, cohort.task)
        unlikely = apart = torch.zeros(self.restarts, len(pulls))
        if judged:
            sent = {"theta": tree_map(lambda x: x.flatten(0, 1), tried), "share": share}
            found = to_server(cohort.combine(self.judge, sent).update)
            unlikely, apart = (found[name][0].reshape(unlikely.shape) for name in ("unlikely", "apart"))
        best = torch.where(state.shrinks, unlikely.argmin(1), 0)
        if isinstance(state.moments, Moments):
            theta = self.fitted(state.theta, state.moments, pulls[best], cohort.task, self.ridge, state.round)
        else:
            theta = take(tried, best + len(pulls) * torch.arange(self.restarts))
        quality = unlikely + apart.sqrt()  # by one standard error of the difference, or it may be chance
        return theta, pulls[best], quality.gather(1, best[:, None])[:, 0]

    @client_step
    def judge(self, task: Task) -> ClientStep:
        """How unlikely held-out points are under the mixture of each candidate's models (r·c,).

        And the squared differences, point by point, from the same candidate of the first restart, if that is favoured.
        """
        mixes = self.mixes(task)

        def run(sent: dict[str, Any], local: Local) -> Reply:
            losses = each_model(lambda t: task.loss(t, local.data))(sent["theta"])
            losses, share = losses.unflatten(0, sent["share"].shape), sent["share"]
            if mixes:
                share = own_shares(losses, share, local.data.mask * (local.draws["held"] <= 0))
            each = surprise(losses, share, local).unflatten(0, (self.restarts, -1))
            apart = (each - each[:1]).square().sum(2) if self.favours_first else torch.zeros_like(each[..., 0])
            return Reply({"unlikely": each.sum(2).flatten(), "apart": apart.flatten()}, memory=local.memory)

        return ClientStep(run, draw_held_out)

    def mixes(self, task: Task) -> bool:
        """Whether points count for every cluster, each by how likely it is to be in it."""
        return self.mixture and self.has_closed_form(task)

    def weighs(self, task: Task) -> bool:
        """Whether models may be shrunk, so that points are held out to judge how strongly."""
        return self.shrink and (bool(task.location) or self.has_closed_form(task))

    def pulled(self, theta: Params, share: Tensor, pull: Tensor, task: Task) -> Params:
        """All parameters but those of location nearer to their mean over clusters, by each restart's `pull` (r,)."""

        def nearer(x: Tensor) -> Tensor:
            common = torch.einsum("rk,rk...->r...", share.to(x), x)[:, None]
            return torch.lerp(x, common.expand_as(x), pull.to(x).reshape(-1, *[1] * (x.dim() - 1)))

        return {name: x if name in task.location else nearer(x) for name, x in theta.items()}

    def _trained(self, state: Any, pulls: Tensor, cohort: Cohort) -> tuple[Params, Tensor]:
        """Models for every restart and strength (r·c, k, …), by averaging; and their shares of the mixture."""
        begin = self.drawn_models(cohort.task, cohort.key.fold(_MODELS, state.round)) if self.renew else state.theta
        begin, sizes = tree_map(lambda x: x.repeat_interleave(len(pulls), 0), (begin, state.sizes))
        theta = self.averaged(begin, pulls.repeat(self.restarts), sizes, cohort)
        return theta, sizes / sizes.sum(1, keepdim=True)

    def _unseen(self, state: Any, pulls: Tensor, task: Task) -> tuple[Params, Tensor]:
        """The same in closed form, of sums without the held-out points."""
        seen = state.moments.less(state.held).each(len(pulls))
        number = seen.number.where(seen.number > 1, 0.0)  # of one point there is no model that has not seen the others
        old = tree_map(lambda x: x.repeat_interleave(len(pulls), 0), state.theta)
        ridge = max(self.ridge, RIDGE)
        theta = self.fitted(old, seen, pulls.repeat(self.restarts), task, ridge, state.round)
        return theta, (number / number.sum(1, keepdim=True).clamp(min=1)).float()


def draw_held_out(n: int, key: Key, when: tuple[int, ...]) -> dict[str, Any]:
    """For steps whose one random choice is which points are held out."""
    return {"held": held_out(n, key)}


def for_each_candidate(own: Tensor, theta: Params) -> Tensor:
    """The members of all models of `theta` (r·c·k, n), of which every restart has c candidates, from own (r, k, n)."""
    candidates = stacked(theta) // (own.shape[0] * own.shape[1])
    return own[:, None].expand(-1, candidates, -1, -1).flatten(0, 2)
