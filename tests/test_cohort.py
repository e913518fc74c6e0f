from dataclasses import dataclass

import pytest
import torch
from torch import nn

import coterie as ct
from coterie.core.federation import Federation
from coterie.core.key import Key
from coterie.core.local import minibatches
from coterie.core.pytree import flat
from coterie.core.step import ClientStep, Reply
from coterie.core.sums import slot_sum
from coterie.core.uplink import Uplink
from coterie.engines import ENGINES, chunks, simulated
from coterie.engines.chunks import Peak, buckets


@dataclass(frozen=True)
class Toy:
    """Sends the sum of its rows, to the slot that its first row names; remembers how often it was asked."""

    def step(self, task):
        def run(shared, local):
            asked = local.memory if isinstance(local.memory, torch.Tensor) else torch.zeros(())
            total = (local.data.x[:, 0] * local.data.mask).sum() * shared["scale"]
            note = {"rows": local.data.mask.sum(), "asked": asked, "draw": local.draws}
            return Reply({"s": total}, local.data.mask.sum(), local.data.y[0], note, memory=asked + 1)

        return ClientStep(run, lambda n, key, when: torch.rand((), generator=key.fold(*when).generator()))


def four_clients(executor, uplink=None):
    sizes, slots = (1, 4, 2, 3), (0, 1, 1, 0)
    clients = [(torch.ones(n, 1), torch.full((n,), j)) for n, j in zip(sizes, slots, strict=True)]
    return simulated(Federation.from_clients(clients), ct.Task.distance(), Key.of(0), executor=executor, uplink=uplink)


@pytest.fixture(params=list(ENGINES))
def cohort(request):
    return four_clients(request.param)


SHARED = {"scale": torch.tensor(2.0)}


def test_combine_adds_weighted_updates_by_slot(cohort):
    sums = cohort.at(0).combine(Toy().step, SHARED, slots=3)
    assert sums.update["s"].tolist() == [2 * (1 + 9), 2 * (16 + 4), 0]  # Σ weight · update, both the number of rows
    assert sums.weight.tolist() == [4, 6, 0]
    assert sums.note["rows"].tolist() == [1, 4, 2, 3]  # in the cohort's order, whatever the buckets


def test_gather_and_rows(cohort):
    shared = {"scale": torch.tensor([1.0, 10.0])}
    reply = cohort.at(0).gather(Toy().step, shared, rows=torch.tensor([0, 1, 0, 1]))
    assert reply.update["s"].tolist() == [1, 40, 2, 30]
    assert cohort.at(0).only([3, 0]).gather(Toy().step, SHARED).update["s"].tolist() == [6, 2]


def test_memory_stays_with_the_client_and_newcomers_have_none(cohort):
    cohort.at(0).only([0, 2]).gather(Toy().step, SHARED)
    assert cohort.at(1).gather(Toy().step, SHARED).note["asked"].tolist() == [1, 0, 1, 0]


def test_draws_follow_client_and_moment_not_the_executor(cohort):
    now, later = (cohort.at(t).gather(Toy().step, SHARED).note["draw"] for t in (0, 1))
    key = Key.of(0).fold(1)
    expected = [float(torch.rand((), generator=key.fold(i, 0).generator())) for i in range(4)]
    assert now.tolist() == pytest.approx(expected)
    assert not torch.equal(now, later)


def test_bytes_are_counted_and_can_be_left_uncounted(cohort):
    cohort.at(0).uncharged().combine(Toy().step, SHARED, slots=2)
    assert (cohort.ledger.bytes_down, cohort.ledger.bytes_up) == (0, 0)
    cohort.at(0).combine(Toy().step, SHARED, slots=2)
    assert cohort.ledger.bytes_down == 4 * 4  # one float to each of four clients
    assert cohort.ledger.bytes_up == 4 * (4 + 4 + 8 + 3 * 4)  # update, weight, slot, three notes


def test_sample_is_a_fixed_share_and_changes_with_the_round(cohort):
    picks = [tuple(cohort.at(t).sample(0.5).clients.tolist()) for t in range(8)]
    assert {len(p) for p in picks} == {2} and len(set(picks)) > 1
    assert picks[0] == tuple(cohort.at(0).sample(0.5).clients.tolist())
    assert len(cohort.sample(0.0)) == 1


@pytest.mark.parametrize("executor", list(ENGINES))
def test_the_uplink_sees_every_reply_before_it_is_added(executor):
    clip = Uplink((lambda reply: reply._replace(update={"s": reply.update["s"].clamp(max=3.0)}),))
    cohort = four_clients(executor, clip)
    assert cohort.at(0).combine(Toy().step, SHARED, slots=2).update["s"].tolist() == [1 * 2 + 3 * 3, 4 * 3 + 2 * 3]
    assert cohort.at(0).gather(Toy().step, SHARED).update["s"].tolist() == [2, 3, 3, 3]


def test_a_reply_may_have_several_parts():
    reply = Reply({"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, torch.ones(2, 2), torch.tensor([[0, 2], [0, 3]]), {})
    assert slot_sum(reply, 4).update["w"].tolist() == [4, 0, 2, 4]


def test_small_clients_are_not_padded_to_the_size_of_large_ones():
    sizes = torch.tensor([1000] + [10] * 50 + [9] * 50)
    found = buckets(sizes, torch.zeros(101, dtype=torch.bool))
    padded = sum(len(b) * int(sizes[b].max()) for b in found)
    assert padded <= 1.25 * int(sizes.sum())


def test_minibatches_are_passes_without_replacement():
    rows = minibatches(10, 4, 6, torch.Generator().manual_seed(0))
    assert rows.shape == (6, 4)
    for one_pass in rows.split(3):
        assert sorted(one_pass[one_pass >= 0].tolist()) == list(range(10))


def test_peak_counts_what_is_alive_at_once():
    with Peak() as probe:
        for _ in range(5):
            big = torch.ones(1000)
            del big
    assert 4000 <= probe.peak < 8000


class Asking(nn.Module):
    """Asks for a value, which vmap forbids."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(x.flatten(1) if float(x.detach().sum()) < 1e9 else -x.flatten(1))


def one_round(algorithm, task, federation, executor):
    cohort = simulated(federation, task, Key.of(0), executor=executor)
    state, _ = algorithm.round(algorithm.start(task, cohort.at(0), Key.of(0)), cohort.at(0))
    return algorithm.models(state), cohort.ledger.messages


def test_a_model_that_vmap_cannot_batch_is_done_one_by_one_and_the_log_says_so(ragged):
    task, algorithm = ct.Task.classifier(Asking()), ct.FedAvg(tau=2, batch=4)
    (slow, _), (fast, messages) = (one_round(algorithm, task, ragged, e) for e in ("sequential", "vmap"))
    assert torch.allclose(flat(slow), flat(fast), atol=1e-6)
    assert any("one by one (vmap cannot batch this model" in m for m in messages)


def test_a_single_client_is_not_batched_and_says_nothing_about_several(task):
    """In a later round many may take part, and go together."""
    cohort = simulated(ct.data.digits(4), task, Key.of(0), executor="vmap")
    algorithm = ct.FedAvg(batch=4)
    state = algorithm.start(task, cohort.at(0), Key.of(0))
    for clients in ([0], [0, 1, 2, 3]):
        some = cohort.only(torch.tensor(clients)).at(0)
        algorithm.round(state, some)
        assert bool(cohort.ledger.chunks) == (len(clients) > 1)
    assert all(size > 1 for size in cohort.ledger.chunks.values())


@pytest.mark.parametrize(("batched", "single"), [(1.0, 2.0), (100.0, 1.0)])
def test_clients_are_done_one_by_one_where_that_is_faster(ragged, task, monkeypatch, batched, single):
    monkeypatch.setattr(chunks, "LONG", 0.0)
    monkeypatch.setattr(chunks.Chunks, "_seconds", lambda self, work, at: single if len(at) == 1 else batched)
    algorithm = ct.FedAvg(batch=4)
    (slow, _), (fast, messages) = (one_round(algorithm, task, ragged, e) for e in ("sequential", "vmap"))
    assert torch.allclose(flat(slow), flat(fast), atol=1e-6)
    assert any("one by one" in m for m in messages) == (single < batched)


@pytest.mark.parametrize("small", [0, chunks.SMALL])
@pytest.mark.parametrize("model", [nn.Linear(64, 10), Asking()])
def test_little_work_is_the_same_whether_it_is_measured_or_not(monkeypatch, model, small):
    monkeypatch.setattr(chunks, "SMALL", small)
    g = torch.Generator().manual_seed(0)
    few = Federation.from_clients([(torch.randn(n, 64, generator=g), torch.arange(n)) for n in (4, 4, 3)])
    task, algorithm = ct.Task.classifier(model), ct.FedAvg(batch=4)
    (slow, _), (fast, messages) = (one_round(algorithm, task, few, e) for e in ("sequential", "vmap"))
    assert torch.allclose(flat(slow), flat(fast), atol=1e-6)
    assert any("on few train rows" in m for m in messages) == (small > 0)
    assert any("one by one (vmap cannot batch this model" in m for m in messages) == isinstance(model, Asking)
