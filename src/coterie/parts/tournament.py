"""A start that finds groups: many candidates for the k models, of which those are kept that serve clients best."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.core.cohort import Cohort
from coterie.core.key import Key
from coterie.core.local import model_losses, personal_of, pick
from coterie.core.pytree import Params, leaves, take, tree_map
from coterie.core.registry import register
from coterie.core.settings import setting
from coterie.core.step import ClientStep, Local, Reply, client_step
from coterie.core.task import Task
from coterie.core.train import Descend, Models, Rows, Train
from coterie.parts.starts import Start

HELD_OUT = Rows(holdout=0.2)
LEARNT = 0.5  # of the first loss: models that are no better do not tell their clients apart yet


@register("tournament", "start")
@dataclass(frozen=True)
class Tournament(Start):
    """Train some clients alone from one start, average those that learn alike, and keep the k averages that serve best.

    Clients train in bouts, until one has begun at half of the first loss. The server joins clients whose models are
    close, by Ward's criterion, weighted by their rows. Candidates are the last `groups`·k groups and all their unions,
    each with the mean of its models. Every client then says how they serve it: it would choose among them by the rows
    that it trained on, and is judged by a fifth of its rows that it held out. The server drops candidates one by one,
    always the one that is missed least. So a client that is like no other is nobody's centre, and a small group that
    nothing else serves is kept. It needs `gather`: the server sees those clients' models.

    Args:
        clients: How many clients train, at most.
        steps: Full-batch gradient steps of a bout.
        bouts: How many there are at most.
        lr: Their step size; None takes the algorithm's own.
        groups: Groups for each of the k models; there are twice as many candidates.
    """

    clients: int = setting(200, low=1)
    steps: int = setting(100, low=1)
    bouts: int = setting(10, low=1)
    lr: float | None = setting(None, low=0)
    groups: int = setting(3, low=1)

    def __call__(self, k: int, lr: float, task: Task, cohort: Cohort, key: Key) -> Params:
        """Train, average, and choose k of the averages."""
        some = cohort.sample(max(k, self.clients) / len(cohort))
        first, last = self._trained(task.init(key.fold(0)), torch.tensor(lr if self.lr is None else self.lr), some)
        finite = [x.reshape(len(x), -1).isfinite().all(1) for x in leaves(last.update)]
        sound = torch.stack(finite).all(0).nonzero().flatten()
        if len(sound) < k:  # training diverges, and whoever asked will say so
            return take(last.update, torch.arange(k))
        trained, weight = take(last.update, sound), last.weight[sound]
        apart = squared_distances({n: x for n, x in trained.items() if n not in task.moving})
        found = averages(trained, weight, branches(apart, weight.cpu(), min(len(sound), self.groups * k)))
        served = some.fold(self.bouts).gather(self.serve, found).note
        rows = first.note["held_rows"].to(first.note["held"])  # counts are on the CPU, losses where they were computed
        by, rows = ("held", rows) if bool((rows > 0).any()) else ("loss", torch.ones_like(rows))
        # Whoever is served by nobody better than by a model that knows nothing has no say.
        ignorant = first.note[by].maximum(first.note[by].sum() * rows / rows.sum())
        judged = served[by].nan_to_num(nan=torch.inf).minimum(ignorant[:, None])
        return take(found, best_served(served["loss"].cpu(), judged.cpu(), k).to(weight.device))

    def _trained(self, start: Params, rate: Tensor, some: Cohort) -> tuple[Reply, Reply]:
        """The replies of the first bout and of the last."""
        first = last = some.gather(self.train, Models(start, rate))
        for bout in range(1, self.bouts):
            if last.note["loss"].mean() < LEARNT * first.note["loss"].mean():  # the losses when the bout began
                break
            last = some.fold(bout).gather(self.train, Models(last.update, rate), rows=torch.arange(len(some)))
        return first, last

    @client_step
    def train(self, task: Task) -> Train:
        """Full-batch steps on the rows that are not held out."""
        return Train(Descend(self.steps), weights="size", rows=HELD_OUT)

    @client_step
    def serve(self, task: Task) -> ClientStep:
        """How badly each candidate serves a client: the mean loss on rows of training, the sum on those held out."""

        def run(theta: Params, local: Local) -> Reply:
            used, held = (pick(local.data, local.draws[purpose]) for purpose in ("train", "held"))
            losses = [model_losses(task, theta, rows, personal_of(local.memory)) for rows in (used, held)]
            return Reply(note={"loss": losses[0], "held": losses[1] * held.mask.sum()})

        return ClientStep(run, HELD_OUT.draw)


def squared_distances(models: Params) -> Tensor:
    """Between all of some models (m, …): (m, m)."""
    rows = [(x - x.mean(0)).reshape(len(x), -1) for x in models.values()]
    inner = torch.stack([x @ x.T for x in rows]).sum(0).double().cpu()
    return (inner.diagonal() + inner.diagonal()[:, None] - 2 * inner).clamp(min=0)


def branches(distances: Tensor, weight: Tensor, groups: int) -> Tensor:
    """The last groups of points that Ward's criterion leaves, and their unions up to everybody.

    It joins the two groups whose union adds least to the squares within: w_a·w_b / (w_a + w_b) times the squared
    distance of their centres. A light point adds little wherever it goes, so it makes no group of its own.

    Args:
        distances: Squared distances between the points (m, m).
        weight: How heavily each point counts (m,).
        groups: How many groups there are when unions begin to count.

    Returns:
        Who is in each (2·groups - 1, m), as booleans.

    Example:
        >>> x = torch.tensor([0.0, 0.1, 5.0, 9.0])
        >>> branches((x - x[:, None]).square(), torch.ones(4), 3).long().tolist()
        [[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 1, 1], [1, 1, 1, 1]]
    """
    m, d, w = len(weight), distances.double().clone(), weight.double().clone()
    members, alive, same = torch.eye(m, dtype=torch.bool), torch.ones(m, dtype=torch.bool), torch.eye(m) > 0
    found = [] if groups < m else list(members.clone())
    for left in range(m - 1, 0, -1):
        cost = d * w * w[:, None] / (w + w[:, None])
        a, b = sorted(divmod(int(cost.masked_fill(same | ~(alive & alive[:, None]), torch.inf).argmin()), m))
        share = w[b] / (w[a] + w[b])
        d[a] = d[:, a] = (1 - share) * d[a] + share * d[b] - share * (1 - share) * d[a, b]  # of the union's centre
        members[a] |= members[b]
        w[a], alive[b] = w[a] + w[b], False
        if left <= groups:
            found.extend(members[alive].clone() if left == groups else members[a].clone()[None])
    return torch.stack(found)


def averages(models: Params, weight: Tensor, members: Tensor) -> Params:
    """The weighted mean of the models (m, …) of each group (groups, …), from who is in it (groups, m)."""
    share = members.to(weight) * weight
    share = share / share.sum(1, keepdim=True)
    return tree_map(lambda x: torch.tensordot(share.to(x), x, 1), models)


def best_served(choose: Tensor, judge: Tensor, k: int) -> Tensor:
    """The k of c models that serve clients best: others are dropped one by one, then swapped in as long as it helps.

    Args:
        choose: The loss of every client under every model (m, c), by which it chooses one of those kept.
        judge: The loss that counts (m, c). On rows by which it did not choose, more models are not better by chance.
        k: How many are kept.

    Example:
        >>> loss = torch.tensor([[0.1, 0.2, 5.0], [0.2, 0.1, 5.0], [5.0, 5.0, 0.1]])
        >>> best_served(loss, loss, 2).tolist()
        [1, 2]
    """
    choose, kept = choose.nan_to_num(nan=torch.inf), list(range(choose.shape[1]))
    while len(kept) > k:
        kept.pop(int(_without_each(choose[:, kept], judge[:, kept])[1].sum(0).argmin()))
    now = judge[:, kept].gather(1, choose[:, kept].argmin(1, keepdim=True)).sum()
    while True:
        loss, judged = _without_each(choose[:, kept], judge[:, kept])
        pairs = zip(choose.T[..., None], judge.T[..., None], strict=True)
        price = torch.stack([torch.where(new < loss, own, judged).sum(0) for new, own in pairs])  # (c, k)
        price[kept] = torch.inf
        if not price.min() < now:
            return torch.tensor(kept)
        now = price.min()  # computed anew it could differ where choices tie, and the search would never end
        new, old = divmod(int(price.argmin()), k)
        kept[old] = new


def _without_each(choose: Tensor, judge: Tensor) -> tuple[Tensor, Tensor]:
    """What each client would choose by, and be judged by, if one of n models were missing: (m, n) each."""
    choose, judge = (torch.nn.functional.pad(x, (0, 1), value=torch.inf) for x in (choose, judge))  # nobody is left
    best, second = choose.topk(2, dim=1, largest=False).indices.split(1, 1)
    instead = torch.where(torch.arange(choose.shape[1] - 1) == best, second, best)
    return choose.gather(1, instead), judge.gather(1, instead)
