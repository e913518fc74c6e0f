"""The engine of private runs: clients bound their replies, and a method gets sums with noise."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coterie.core.engine import SAMPLE, Engine, Exchange, Ledger, Spent
from coterie.core.pytree import Params, tree_map
from coterie.core.step import Reply, derived, step_name
from coterie.core.sums import Sums
from coterie.core.train import Models, Train
from coterie.privacy import Privacy
from coterie.privacy.accounting import Release, added, epsilon_of, noise_for
from coterie.privacy.bounded import Bounded, grid, trains

_NOISE = 3  # stream under the key of all clients
COUNTS, BITS = 0.1, 0.05  # of 1/z²: what is spent on the weights, and on the bits of an adaptive bound
PACE = 0.2  # of an adaptive bound: it changes by a factor of at most e^PACE in an exchange
FEW = 2.0  # standard deviations of its weight below which a slot counts as empty


class Deviations(NamedTuple):
    """Standard deviations of the noise of one exchange: of updates, of weights, and of bits where there are any."""

    update: float
    weight: float
    within: float | None = None

    @classmethod
    def of(cls, noise: float, clip: float, *, adaptive: bool) -> Deviations:
        """Those with which one client's contribution, each part over its deviation, is no longer than 1/z.

        Args:
            noise: z.
            clip: The longest update. Weights are at most 1, and bits ±½.
            adaptive: Whether there are bits.

        Example:
            >>> d = Deviations.of(2.0, 3.0, adaptive=True)
            >>> round(((3 / d.update) ** 2 + (1 / d.weight) ** 2 + (0.5 / d.within) ** 2) ** -0.5, 6)
            2.0
        """
        within = noise / 2 / math.sqrt(BITS) if adaptive else None
        return cls(noise * clip / math.sqrt(1 - COUNTS - adaptive * BITS), noise / math.sqrt(COUNTS), within)


class Private(Engine):
    """An engine that asks the clients of another one for bounded replies, and adds noise to their sums.

    Around an engine of the secure sum, the clients add the noise themselves, each its part of it. Every exchange is
    charged to the ledger's account, and refused by `Spent` where it would exceed the budget.

    Args:
        inner: The engine that runs the clients' steps.
        settings: Settings of privacy, with a noise multiplier.
        distributed: Whether the inner engine is one of the secure sum, so that clients add the noise.
    """

    def __init__(self, inner: Any, settings: Privacy, *, distributed: bool = False) -> None:
        super().__init__(inner.federation, inner.task, inner.key, inner.device, inner.precision)
        self.name, self.leads, self.remote, self.sums_only = inner.name, inner.leads, inner.remote, inner.sums_only
        self.inner, self.settings, self.distributed = inner, settings, distributed

    def in_the_open(self) -> Engine:
        """The engine for scores, which are outside of what is protected."""
        return self.inner.in_the_open()

    def invite(self, numbers: Tensor, when: tuple[int, ...], fraction: float) -> tuple[Tensor, float]:
        """Each client by itself with this chance (Poisson sampling), perhaps nobody; on real nodes unforeseeably.

        Whoever is asked takes part, in a secure sum too: who sends nothing would add no noise.
        """
        chances = self.key.fold(SAMPLE, *when).chances(numbers)
        if self.remote:
            chances = torch.from_numpy(np.random.default_rng().random(len(numbers)))
        return (chances < fraction).nonzero().flatten(), 1.0

    def gather(self, exchange: Exchange) -> Reply:
        """Raise a ValueError: noise is added to sums, not to single replies."""
        raise ValueError(
            f"privacy: {step_name(exchange.step)} needs every client's own reply (gather), and of a private run the "
            "server gets nothing but sums with noise; choose another method or start, or leave privacy out"
        )

    def combine(self, exchange: Exchange) -> Sums:
        """Ask for bounded replies, and return their sums with noise. Labels are hidden, losses are not told."""
        self._check(exchange)
        account = exchange.ledger.account
        clip, settings = account.get("clip", self.settings.clip), self.settings
        deviations = Deviations.of(self._noise, clip, adaptive=settings.quantile is not None)
        self._charge(exchange)
        sums, within = (self._secret if self.distributed else self._open)(exchange, clip, deviations)
        if settings.quantile is not None and within is not None:
            share = min(max(within / _expected(exchange, self.federation) + 0.5, 0.0), 1.0)
            account["clip"] = clip * math.exp(-PACE * (share - settings.quantile))
        return self._restored(exchange, sums, deviations)

    def told(self, row: dict[str, Any], ledger: Ledger) -> dict[str, Any]:
        """A row of the history without losses, with ε and with the number of participants that was to be expected."""
        releases, settings, told = _releases(ledger), self.settings, {**row, "loss": None, "epsilon": 0.0}
        if releases:
            told["epsilon"] = epsilon_of(releases, settings.delta, distributed=self.distributed)
        if releases and not self.distributed:
            told["participants"] = round(releases[-1].rate * len(self.federation))
        return told if settings.quantile is None else {**told, "clip": ledger.account.get("clip", settings.clip)}

    # --- the two ways to add noise ---------------------------------------------------------------------------------

    def _open(self, exchange: Exchange, clip: float, deviations: Deviations) -> tuple[Sums, float | None]:
        """The sums with the server's noise, and that of the bits if they are needed."""
        sums = self._asked(exchange, Bounded(*_owned(exchange), clip))
        moment = sum(r.times for r in _releases(exchange.ledger))
        seeded, system = self.key.fold(_NOISE, *exchange.when, moment).generator(), np.random.default_rng()

        def noised(x: Tensor, deviation: float) -> Tensor:
            if self.remote:  # from the system, with 128 bits: of a seed, torch's generators use 32
                noise = torch.from_numpy(np.asarray(system.standard_normal(x.shape)))
            else:
                noise = torch.randn(x.shape, generator=seeded, dtype=torch.float64)
            return x + (deviation * noise).to(x)

        bits = (sums.note["within"].double() - 0.5).sum().cpu()  # there is one start, so one bit of each client
        update = tree_map(lambda x: noised(x, deviations.update), sums.update)
        weight = noised(sums.weight, deviations.weight)
        within = None if deviations.within is None else float(noised(bits, deviations.within))
        return sums._replace(update=update, weight=weight), within

    def _secret(self, exchange: Exchange, clip: float, deviations: Deviations) -> tuple[Sums, float | None]:
        """The opened sums, to which every client has added its part of the noise."""
        # As many parts as clients must answer add up to all of the noise; the others' come on top.
        parts = math.sqrt(self.inner.least(exchange))
        each = tuple(d / parts for d in deviations if d is not None)
        finest = min(grid(d)[0] for d in each)
        if finest < (step := self.inner.rounding(exchange)):
            raise ValueError(
                f"privacy: the secure sum rounds to multiples of {step:.2g}, and the noise to {finest:.2g}; lower its "
                f"clip (in fit, secure=SecureSum(clip=…))"
            )
        bounded = Bounded(*_owned(exchange), clip, each, exchange.slots, seeded=not self.remote)
        found = self._asked(exchange, bounded)
        total = found.update
        within = float(total["within"][0]) if "within" in total else None
        return Sums(total["update"], total["weight"], found.note), within

    def _asked(self, exchange: Exchange, bounded: Bounded) -> Sums:
        """The sums of bounded replies. Bytes are those to be expected, for how many took part is not to be known."""
        ledger = replace(exchange.ledger, bytes_down=0, bytes_up=0)
        asked, empty = exchange._replace(step=bounded.step, ledger=ledger), not len(exchange.clients)
        if empty:  # one client tells the form of the sums, and no more
            rows = asked.rows.new_zeros(1, *asked.rows.shape[1:]) if isinstance(asked.rows, Tensor) else asked.rows
            asked = asked._replace(clients=torch.tensor([0]), rows=rows, ledger=replace(ledger, memory={}))
        sums = self.inner.combine(asked)
        share = _expected(exchange, self.federation) / len(asked.clients)
        exchange.ledger.charge(round(asked.ledger.bytes_down * share), round(asked.ledger.bytes_up * share))
        if not empty:
            return sums
        none = {n: x[:0] for n, x in sums.note.items()}
        return sums._replace(update=tree_map(torch.zeros_like, sums.update), weight=0 * sums.weight, note=none)

    # --- before and after ------------------------------------------------------------------------------------------

    @property
    def _noise(self) -> float:
        assert self.settings.noise is not None  # `resolved` has seen to it
        return self.settings.noise

    def _check(self, exchange: Exchange) -> None:
        step, name = exchange.step(self.task), step_name(exchange.step)
        if isinstance(step, Train) and (step.starts or 1) > 1:
            raise ValueError(f"privacy: {name} compares restarts by losses, which are not told; set restarts = 1")

    def _charge(self, exchange: Exchange) -> None:
        """Add an exchange to the account, if there is room for it."""
        settings, ledger = self.settings, exchange.ledger
        # The server of a secure sum knows who takes part, so that sampling hides nobody from it.
        releases = added(_releases(ledger), 1.0 if self.distributed else exchange.rate, self._noise)
        epsilon = epsilon_of(releases, settings.delta, distributed=self.distributed)
        if epsilon > settings.epsilon:
            raise Spent(
                f"privacy: the next exchange would bring epsilon to {epsilon:.4g}, above {settings.epsilon:g} (delta = "
                f"{settings.delta:g}, noise = {self._noise:.4g})"
            )
        ledger.account["releases"] = releases

    def _restored(self, exchange: Exchange, sums: Sums, deviations: Deviations) -> Sums:
        """Sums as the method knows them: of models in place of changes, without slots that are all noise."""
        there = sums.weight >= FEW * deviations.weight
        weight = torch.where(there, sums.weight, 0.0)

        def slots(x: Tensor, like: Tensor) -> Tensor:
            return x.to(like).reshape(-1, *[1] * (like.dim() - 1))

        update = tree_map(lambda x: torch.where(slots(there, x) > 0, x, 0.0), sums.update)
        if trains(exchange.step(self.task)):
            begin = _sent(exchange, update)
            update = tree_map(lambda x, b: x + slots(weight, x) * b.to(x), update, begin)
        return Sums(update, weight, self._notes(exchange, sums), weight.round().long().cpu())

    def _notes(self, exchange: Exchange, sums: Sums) -> dict[str, Tensor]:
        """What stands in the place of every client's notes: -1 where they are hidden, 0 where they are not told."""
        secrecy, c = derived(exchange.step, self.task).secrecy, len(exchange.clients)
        filled = {}
        for name, x in sums.note.items():
            if name == "within":
                continue
            if name not in secrecy:
                raise ValueError(
                    f"privacy: {step_name(exchange.step)} tells the server every client's '{name}', and of a private "
                    "run it gets nothing but sums with noise; choose another method, or leave privacy out"
                )
            hidden = secrecy[name] == "hidden"
            filled[name] = torch.full((c, *x.shape[1:]), -1) if hidden else torch.zeros(c, *x.shape[1:])
        return filled


def resolved(settings: Privacy, rounds: int, rate: float, *, distributed: bool) -> Privacy:
    """Settings with a noise multiplier, which is found where none is given.

    Args:
        settings: The settings.
        rounds: How many exchanges there are, if the settings do not say.
        rate: The share of clients in each.
        distributed: Whether clients add the noise.
    """
    if settings.noise is not None:
        return settings
    times, share = settings.exchanges or rounds, 1.0 if distributed else min(rate, 1.0)
    noise = noise_for(settings.epsilon, settings.delta, share, times, distributed=distributed)
    return replace(settings, noise=noise)


def _releases(ledger: Ledger) -> tuple[Release, ...]:
    return tuple(Release(*r) for r in ledger.account.get("releases", ()))


def _owned(exchange: Exchange) -> tuple[Any, str]:
    """Whose step it is, and its name."""
    return exchange.step.__self__, exchange.step.__name__  # pyright: ignore[reportFunctionMemberAccess]


def _expected(exchange: Exchange, everybody: Any) -> float:
    """How many clients take part, or were to be expected where they were sampled."""
    return len(exchange.clients) if exchange.rate >= 1 else exchange.rate * len(everybody)


def _sent(exchange: Exchange, like: Params) -> Params:
    """The model that the members of every slot were sent (slots, …): there is one start, and perhaps one model only."""
    sent: Models = exchange.message
    if isinstance(sent.label, Tensor) and not torch.equal(sent.label.cpu(), torch.arange(exchange.slots)):
        raise ValueError(f"privacy: {step_name(exchange.step)} does not send one model per slot")
    models = {**sent.theta, **sent.common}
    return {n: models[n].reshape(-1, *x.shape[1:]).expand(x.shape) for n, x in like.items()}
