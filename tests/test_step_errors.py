"""An error in a client step names the step, the round, the client and the user's own line."""

import inspect
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import coterie as ct
from coterie.core.key import Key
from coterie.core.step import ClientStep, Reply, client_step
from coterie.engines import ENGINES, simulated
from coterie.engines.errors import StepError
from coterie.engines.refusal import is_refusal

every_engine = pytest.mark.parametrize("executor", list(ENGINES))


class Wary(nn.Linear):
    """Looks at its rows, so that clients are never batched, and refuses large ones."""

    def forward(self, input):
        if bool((input > 50).any()):
            raise RuntimeError("this is too large for me")
        return super().forward(input)


class Asserting(nn.Linear):
    """The same, as many write it, and of what it gives: only training makes that too large."""

    def forward(self, input):
        out = super().forward(input)
        assert bool((out.detach().abs() < 1e3).all()), "this is too large for me"
        return out


class Crooked(nn.Module):
    """Has a genuine bug: its second layer does not take what its first one gives."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 4), nn.Linear(5, 1)

    def forward(self, x):
        hidden = torch.tanh(self.a(torch.sin(x)))
        return self.b(hidden)


class Full(nn.Linear):
    """Finds no memory."""

    def forward(self, input):
        raise torch.OutOfMemoryError("no memory left")


@dataclass(frozen=True)
class Picky:
    """Has no random numbers for clients of three rows."""

    @client_step
    def step(self, task):
        return ClientStep(lambda message, local: Reply(local.data.mask @ local.data.x[:, 0] + local.draws), self.draw)

    def draw(self, n, key, when):
        return torch.tensor([1.0, 2.0, 0.0, 4.0][n - 1 if n != 3 else 9])


def clients(scales, ids=None):
    g = torch.Generator().manual_seed(0)
    rows = [(scale * torch.randn(6, 2, generator=g), torch.randn(6, generator=g)) for scale in scales]
    return ct.Federation.from_clients(rows, ids=ids)


def own_line(function, text):
    """`file:line` of the line of a function that has this text."""
    lines, first = inspect.getsourcelines(function)
    return f"{inspect.getsourcefile(function)}:{first + next(i for i, x in enumerate(lines) if text in x)}, in forward"


@every_engine
def test_one_clients_rows_that_a_model_refuses(executor):
    task, algorithm = ct.Task.regressor(Wary(2, 1)), ct.IFCA(2, init="random")
    cohort = simulated(clients([1, 1, 1, 100, 1]), task, Key.of(0), executor=executor).at(0)
    state = algorithm.start(task, cohort, Key.of(0))
    with pytest.raises(StepError) as told:
        algorithm.round(state, cohort)
    message, line = str(told.value), own_line(Wary.forward, "raise")
    assert message.startswith("IFCA.step failed in round 1 at client 3: RuntimeError: this is too large for me\n  at ")
    assert line in message and type(told.value.__cause__) is RuntimeError


@every_engine
def test_what_one_clients_training_leads_to(executor):
    algorithm, task = ct.FedAvg(tau=3, batch=6), ct.Task.regressor(Asserting(2, 1))
    with pytest.raises(ValueError, match=r"^FedAvg\.step failed in round 1 at client 3: AssertionError: this") as told:
        ct.fit(algorithm, task, clients([1, 1, 1, 10, 1]), rounds=2, executor=executor)
    assert own_line(Asserting.forward, "assert") in str(told.value)


@pytest.mark.parametrize("executor", ["sequential", "vmap"])
def test_the_round_and_the_clients_own_name(executor):
    task = ct.Task.regressor(Wary(2, 1))
    cohort = simulated(clients([1, 1, 1000], ids=("oslo", "bonn", "rome")), task, Key.of(0), executor=executor)
    algorithm = ct.FedAvg(batch=2, tau=3)
    state = algorithm.start(task, cohort.at(0), Key.of(0))
    state, _ = algorithm.round(state, cohort.only([0, 1]).at(0))
    with pytest.raises(StepError, match=r"FedAvg\.step failed in round 5 at .*rome"):
        algorithm.round(state, cohort.at(4))


@every_engine
def test_a_wrong_shape_is_not_called_something_that_vmap_cannot_do(executor):
    task = ct.Task.regressor(Crooked())
    cohort = simulated(clients([1, 1, 1]), task, Key.of(0), executor=executor).at(0)
    algorithm = ct.IFCA(2, init="random")
    state = algorithm.start(task, cohort, Key.of(0))
    with pytest.raises(
        StepError, match=r"IFCA\.step failed in round 1 at client 0: RuntimeError: .*cannot be multipl"
    ) as told:
        algorithm.round(state, cohort)
    assert own_line(Crooked.forward, "self.b(hidden)") in str(told.value)
    assert not any("vmap cannot batch" in m for m in cohort.ledger.messages) and not cohort.ledger.chunks


@every_engine
def test_an_error_while_random_numbers_are_drawn(executor):
    rows = [(torch.ones(n, 1), torch.zeros(n)) for n in (4, 4, 3, 1)]
    cohort = simulated(ct.Federation.from_clients(rows), ct.Task.distance(), Key.of(0), executor=executor)
    with pytest.raises(StepError, match=r"Picky\.step failed in the start at client 2: IndexError: list index"):
        cohort.combine(Picky().step, ())
    reply = cohort.only([0, 1, 3]).at(0).gather(Picky().step, ())
    assert reply.update.tolist() == [8, 8, 2]


@pytest.mark.parametrize("executor", ["sequential", "vmap"])
def test_a_lack_of_memory_stays_what_it_is(executor):
    task = ct.Task.regressor(Full(2, 1))
    cohort = simulated(clients([1, 1]), task, Key.of(0), executor=executor).at(0)
    with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
        ct.FedAvg().round(ct.FedAvg().start(task, cohort, Key.of(0)), cohort)


def test_what_vmap_says_itself_is_told_from_errors_of_the_model():
    def refusal(function):
        with pytest.raises(RuntimeError) as told:
            torch.func.vmap(function)(torch.ones(3, 2))
        return told.value

    assert is_refusal(refusal(lambda x: x.sum().item()))
    assert is_refusal(refusal(lambda x: x if x.sum() > 0 else -x))
    assert is_refusal(refusal(lambda x: torch.rand(2) * x))
    assert is_refusal(refusal(lambda x: nn.LSTM(2, 2)(x[None])[0]))
    assert not is_refusal(refusal(lambda x: x @ torch.ones(5, 5)))
    assert not is_refusal(ValueError("vmap"))
