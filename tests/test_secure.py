"""The secure sum: its parts, what it opens, and what the server gets to see."""

import dataclasses
import os
from collections import Counter

import numpy as np
import pytest
import torch
from cryptography.exceptions import InvalidTag

import coterie as ct
from coterie.core.cohort import Cohort
from coterie.core.federation import Federation
from coterie.core.key import Key
from coterie.core.pytree import flat
from coterie.core.step import ClientStep, Reply
from coterie.core.sums import slot_mean
from coterie.engines import ENGINES
from coterie.engines import simulated as simulate
from coterie.runs import fit as run_module
from coterie.runs.config import build
from coterie.runs.folder import read_config
from coterie.secure import shamir
from coterie.secure.engine import Secure
from coterie.secure.masks import Pair, mask, seal, simulated, unseal
from coterie.secure.protocol import Client, Session, Sheet, Terms, TooFewLeft

SLOTS, WIDTH = 3, 200
TERMS = Terms(invited=12, needed=8, min_members=3, slots=SLOTS)


# --- the parts ----------------------------------------------------------------------------------------------------


def test_any_shares_that_suffice_give_the_secret_and_fewer_do_not():
    secret = os.urandom(32)
    shares = shamir.split(secret, range(7), 4, os.urandom)
    for holders in ([0, 1, 2, 3], [6, 2, 0, 5]):
        assert shamir.join({i: shares[i] for i in holders}) == secret
    with pytest.raises(ValueError, match="do not fit together"):
        shamir.join({i: shares[i] for i in range(3)})


def test_too_few_shares_fit_every_secret():
    """Whatever the secret is said to be, there is a missing share that makes it so."""
    shares = shamir.split(bytes(32), range(5), 3, os.urandom)
    known = {i: int.from_bytes(shares[i], "big") for i in (0, 1)}
    for other in (1, 2**200):
        factors = shamir._at_zero((0, 1, 2))
        rest = other - sum(f * v for f, v in zip(factors, known.values(), strict=False))
        third = rest * pow(factors[2], -1, shamir.PRIME) % shamir.PRIME
        found = shamir.join({0: shares[0], 1: shares[1], 2: third.to_bytes(shamir.SHARE, "big")})
        assert int.from_bytes(found, "big") == other


def test_masks_of_a_pair_cancel():
    a, b = Pair(os.urandom(32)), Pair(os.urandom(32))
    up, down = mask(a.agree(b.public, b"masks"), 50), np.negative(mask(b.agree(a.public, b"masks"), 50))
    assert not (up + down).any() and up.any()


def test_a_sealed_message_cannot_be_changed_or_readdressed():
    key = os.urandom(32)
    sealed = seal(key, 1, 2, b"a share")
    assert unseal(key, 1, 2, sealed) == b"a share" and b"a share" not in sealed
    for sender, receiver, text in ((1, 3, sealed), (2, 2, sealed), (1, 2, bytes([sealed[0] ^ 1]) + sealed[1:])):
        with pytest.raises(InvalidTag):
            unseal(key, sender, receiver, text)


# --- the protocol -------------------------------------------------------------------------------------------------


def sheet_of(i, slot):
    """A count for the slot, and numbers of client i's that are the same whatever it chose."""
    numbers = np.random.default_rng(i).integers(0, 2**40, WIDTH, dtype=np.uint64)
    chosen = np.eye(SLOTS, dtype=np.uint64)[slot]
    return Sheet(chosen, chosen[:, None] * numbers)


def session_of(slots, answering=lambda exchange, asked: asked, terms=TERMS):
    clients = {i: Client(i, terms, simulated(Key.of(i))) for i in range(len(slots))}
    session = Session(clients, terms, answering)
    opened = session.add({i: sheet_of(i, slots[i]) for i in session.agree()})
    return opened, session.server


def plain(slots, clients):
    sheets = [sheet_of(i, slots[i]) for i in clients]
    return sum(s.body.astype(np.int64) for s in sheets), sum(s.head.astype(np.int64) for s in sheets)


FOURS = [0, 1, 2] * 4


def gone_in(exchange, who):
    return lambda now, asked: [i for i in asked if now != exchange or i not in who]


@pytest.mark.parametrize("exchange", ["keys", "shares", "sheets", "counts", "sums"])
def test_sums_and_counts_are_exact_with_a_third_gone(exchange):
    who = {0, 4, 5, 9}
    opened, _ = session_of(FOURS, gone_in(exchange, who), TERMS._replace(min_members=2))
    late = exchange in ("counts", "sums")  # their sheets have arrived
    body, count = plain(FOURS, [i for i in range(12) if late or i not in who])
    assert opened.members.tolist() == count.tolist() == ([4, 4, 4] if late else [2, 3, 3])
    assert (opened.sheet.body == body).all()


@pytest.mark.parametrize("exchange", ["keys", "shares", "sheets", "counts", "sums"])
def test_with_fewer_than_are_needed_nothing_is_opened(exchange):
    opened = "only the head, with counts and mean losses," if exchange == "sums" else "nothing"
    said = rf"7 of 12 clients answered exchange \d \({exchange}\), but 8 are needed; {opened} was opened"
    with pytest.raises(TooFewLeft, match=said):
        session_of(FOURS, gone_in(exchange, {0, 1, 2, 3, 4}))


def test_with_nobody_left_nothing_is_computed():
    with pytest.raises(TooFewLeft, match="0 of 12 clients answered exchange 2"):
        secured(cohort_of(), gone_in("sheets", set(range(12)))).combine(Toy().telling, SCALE, slots=3)


def test_a_client_goes_no_further_with_too_few_others_whatever_the_server_says():
    clients = {i: Client(i, TERMS) for i in range(12)}
    keys = {i: client.keys()[i] for i, client in clients.items()}
    with pytest.raises(TooFewLeft, match="client 0 knows of 7 clients, 8 are needed"):
        clients[0].shares({i: keys[i] for i in range(7)})
    sent = {i: client.shares(keys) for i, client in clients.items()}
    addressed = {i: sent[i][0] for i in range(1, 12)}
    clients[0].sheet(addressed, sheet_of(0, 0))
    with pytest.raises(TooFewLeft):
        clients[0].counts([0, 1, 2])


def test_a_client_never_gives_shares_of_both_secrets():
    client = Client(0, TERMS)
    client._held = {i: [b"key", b"seed"] for i in range(12)}
    assert Counter(client.counts(range(2, 12)).values()) == {b"seed": 10, b"key": 2}
    with pytest.raises(ValueError, match="asked twice"):
        client.counts(range(12))


def test_a_small_cluster_is_not_opened():
    slots = [0] * 5 + [1] * 2 + [2] * 5
    opened, server = session_of(slots)
    body, _ = plain(slots, range(12))
    assert opened.members.tolist() == [5, 2, 5]
    assert (opened.sheet.body[[0, 2]] == body[[0, 2]]).all() and not opened.sheet.body[1].any()
    sheet, _ = server.counts(SLOTS)  # all that the server has
    assert looks_random(sheet.body[1])
    for payload in server.transcript.of("sums").values():  # shares of two seeds of every client, not of the third
        assert {len(part) for part in payload.values()} == {2 * shamir.SHARE}


# --- what the server sees -----------------------------------------------------------------------------------------


def looks_random(numbers):
    """Whether the bytes of numbers are as evenly spread as those of random ones: χ² of 256 bins, within six σ."""
    counts = np.bincount(np.frombuffer(numbers.tobytes(), np.uint8), minlength=256)
    expected = counts.sum() / 256
    return abs(((counts - expected) ** 2 / expected).sum() - 255) < 6 * 510**0.5


def everything(transcript):
    return b"".join(part for message in transcript.messages for part in message.payload.values())


def test_the_transcript_holds_no_plain_number():
    _, server = session_of(FOURS, gone_in("sheets", {3}))
    seen = everything(server.transcript)
    for i in range(12):
        assert not any(int(n).to_bytes(8, order) in seen for n in sheet_of(i, 0).body[0] for order in ("little", "big"))


def test_the_transcript_does_not_depend_on_who_is_in_which_cluster():
    """Two assignments with the same counts: but for the masked sheets, the server gets the same bytes."""
    one, two = (session_of(slots)[1].transcript for slots in (FOURS, sorted(FOURS)))
    for exchange in ("keys", "shares", "counts", "sums"):
        assert one.of(exchange) == two.of(exchange)
    for transcript in (one, two):
        for i, payload in transcript.of("sheets").items():
            masked = np.frombuffer(payload[i], np.uint64)
            for row in masked[SLOTS:].reshape(SLOTS, WIDTH):  # the slot that it chose, and those that it did not
                assert looks_random(row)
            assert not set(masked[:SLOTS].tolist()) & {0, 1}


def test_one_sheet_stays_masked_with_all_that_was_opened():
    """The masks that two clients have in common are never opened while both are there."""
    _, server = session_of(FOURS)
    heads, rows = server.transcript.of("counts"), server.transcript.of("sums")
    for i, payload in server.transcript.of("sheets").items():
        masked = np.frombuffer(payload[i], np.uint64).copy()
        masked[:SLOTS] -= mask(server._joined(heads, i), SLOTS)
        body = masked[SLOTS:].reshape(SLOTS, WIDTH)
        for j in range(SLOTS):
            body[j] -= mask(server._joined(rows, i, j), WIDTH)
        assert looks_random(body) and not set(masked[:SLOTS].tolist()) & {0, 1}


# --- the cohort ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Toy:
    """Sends its rows' sums to the slot that its first row names, in one part or in two."""

    parts: int = 1

    def step(self, task):
        def run(sent, local):
            total, rows = (local.data.x * local.data.mask[:, None]).sum(0) * sent["scale"], local.data.mask.sum()
            label = local.data.y[0]
            note = {"loss": total.mean(), "label": label}
            if self.parts == 1:
                return Reply({"s": total, "t": (total[0],)}, rows, label, note)
            both = torch.stack([total, -total])
            return Reply({"s": both, "t": (both[:, 0],)}, rows.expand(2), torch.stack([label, label + 3]), note)

        return ClientStep(run, secrecy={"loss": "mean", "label": "hidden"})

    def telling(self, task):
        return ClientStep(lambda scale, local: Reply((), scale, local.data.y[0], {"secret": local.data.x.sum()}))


SCALE = {"scale": torch.ones(())}


def federation_of(labels):
    g = torch.Generator().manual_seed(0)
    rows = [(torch.randn(n, 5, generator=g), torch.full((n,), j)) for n, j in enumerate(labels, 2)]
    return Federation.from_clients(rows)


def cohort_of(executor="sequential", labels=(0, 1, 2) * 4):
    return simulate(federation_of(labels), ct.Task.distance(), Key.of(0), executor=executor)


def secured(cohort, answering=lambda exchange, asked: asked, witness=lambda transcript: None, **settings):
    """All clients of a cohort's federation, in sessions of the secure sum."""
    return Cohort(Secure(cohort.engine, ct.SecureSum(**settings), answering, witness), cohort.ledger)


def assert_close(a, b):
    assert torch.allclose(flat(a, 0), flat(b, 0), rtol=1e-5, atol=1e-6), (flat(a, 0) - flat(b, 0)).abs().max()


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("executor", list(ENGINES))
def test_combine_is_that_of_every_executor(executor, parts):
    inner, scale = cohort_of(executor).at(0), {"scale": torch.tensor(3.0)}
    open_, secure = (c.combine(Toy(parts).step, scale, slots=6) for c in (inner, secured(inner).at(0)))
    assert_close(open_.update, secure.update)
    assert torch.equal(open_.weight, secure.weight)
    assert secure.members.tolist() == [4, 4, 4, *([4, 4, 4] if parts == 2 else [0, 0, 0])]
    assert set(secure.note["label"].tolist()) == {-1} and len(secure.note["label"]) == 12
    assert torch.allclose(secure.note["loss"], open_.note["loss"].mean().expand(12), atol=1e-6)


@pytest.mark.parametrize("executor", ["sequential", "vectorised"])
def test_a_third_of_the_clients_may_be_gone_after_the_keys_are_exchanged(executor):
    inner = cohort_of(executor).at(0)
    secure = secured(inner, gone_in("sheets", {0, 4, 5, 9}), min_members=2).at(0)
    rows = torch.arange(12) % 2
    scale = {"scale": torch.tensor([1.0, 2.0])}
    there = [1, 2, 3, 6, 7, 8, 10, 11]
    expected = inner.only(there).combine(Toy().step, scale, slots=3, rows=rows[there])
    sums = secure.combine(Toy().step, scale, slots=3, rows=rows)
    assert_close(expected.update, sums.update)
    assert torch.equal(expected.weight, sums.weight) and sums.members.tolist() == [2, 3, 3]
    assert "4 of 12 clients were gone" in inner.ledger.messages[-1]
    with pytest.raises(TooFewLeft, match="7 of 12 clients answered exchange 2"):
        secured(inner, gone_in("sheets", set(range(5)))).combine(Toy().step, SCALE, slots=3)


def test_the_slot_of_a_small_cluster_keeps_its_model():
    inner = cohort_of(labels=[0] * 5 + [1] * 2 + [2] * 5).at(0)
    sums = secured(inner, min_members=3).at(0).combine(Toy().step, SCALE, slots=3)
    old = {"s": torch.full((3, 5), 7.0), "t": (torch.full((3,), 7.0),)}
    new, expected = slot_mean(sums, old), slot_mean(inner.combine(Toy().step, SCALE, slots=3), old)
    assert sums.members.tolist() == [5, 2, 5] and sums.weight[1] == 0
    assert (new["s"][1] == 7).all() and torch.allclose(new["s"][::2], expected["s"][::2], atol=1e-5)
    assert "fewer than 3 clients chose slot 1" in inner.ledger.messages[-1]


def test_no_mask_is_used_twice():
    seen = []
    secure = secured(cohort_of(), witness=seen.append)
    for cohort in (secure.at(0), secure.at(0), secure.at(1), secure.at(0).fold(1)):
        cohort.combine(Toy().step, SCALE, slots=3)
    keys = [payload[i] for transcript in seen for i, payload in transcript.of("keys").items()]
    assert len(set(keys)) == len(keys) == 4 * 12


def test_bytes_are_those_of_the_protocol():
    seen = []
    secure = secured(cohort_of(), witness=seen.append)
    secure.at(0).combine(Toy().step, SCALE, slots=3)
    ledger = secure.ledger
    assert ledger.bytes_up == len(everything(seen[0])) and ledger.bytes_down == seen[0].bytes_down + 12 * 4
    assert ledger.bytes_up > 12 * 8 * (3 * (6 + 1) + 3 + 1)  # the masked sheets: sums, weights, counts, the mean loss
    secure.at(0).uncharged().gather(Toy().step, SCALE)
    assert ledger.bytes_up == len(everything(seen[0]))


@pytest.mark.parametrize(
    ("scale", "settings", "said"),
    [
        (1e9, {}, r"client \d+ would send reaches .*, above clip = 1.04858e\+06"),
        (float("inf"), {}, "client 0 would send is not finite"),
        (1.0, {"clip": 2.0**30, "min_members": 13}, "at least 13 clients must take part, got 12"),
    ],
)
def test_what_does_not_fit_is_an_error(scale, settings, said):
    with pytest.raises(ValueError, match=said):
        secured(cohort_of(), **settings).combine(Toy().step, {"scale": torch.tensor(scale)}, slots=3)


def test_the_largest_sum_does_not_wrap():
    inner = cohort_of(labels=[0] * 12)
    clip = float(inner.federation.train.sizes.max()) + 1
    secure = secured(inner, clip=clip)
    step = lambda task: ClientStep(lambda s, local: Reply({"s": s}, torch.ones(()), local.data.y[0] * 0, {}))  # noqa: E731
    assert secure.combine(step, torch.tensor(clip)).update["s"].tolist() == [12 * clip]
    assert secure.combine(step, torch.tensor(-clip)).update["s"].tolist() == [-12 * clip]


def test_notes_of_clients_are_not_told():
    with pytest.raises(ValueError, match=r"Toy.telling tells the server every client's 'secret'"):
        secured(cohort_of()).combine(Toy().telling, torch.ones(()), slots=3)


# --- runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def starts(task, ragged):
    """Models from which three clusters of four clients are found."""
    return ct.fit(ct.IFCA(k=3, tau=5), task, ragged, rounds=1).models


def both(algorithm, task, federation, executor, **settings):
    return (
        ct.fit(algorithm, task, federation, rounds=3, executor=executor, secure=secure)
        for secure in (None, ct.SecureSum(**settings))
    )


@pytest.mark.parametrize("executor", ["sequential", "vectorised"])
@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (ct.FedAvg, {"weights": "size"}),
        (ct.FedAvg, {"batch": 4, "fraction": 0.7, "prox": 0.1}),
        (ct.IFCA, {"k": 3}),
        (ct.IFCA, {"k": 3, "batch": 4, "weights": "size", "shared": ("layers.0.weight",)}),
        (ct.IFCA, {"k": 3, "restarts": 2, "average": "gradient", "patience": 1}),
        (ct.FedX, {"k": 3, "lr": 0.05}),
        (ct.FedX, {"k": 3, "lr": 0.05, "soft": True}),
        (ct.LocalOnly, {}),
    ],
)
def test_models_are_those_of_a_plain_run(task, ragged, starts, cls, settings, executor):
    own = {"init": starts} if "k" in settings else {}
    plain_run, secure_run = both(cls(tau=3, **settings, **own), task, ragged, executor)
    for a, b in zip(plain_run.models, secure_run.models, strict=True):
        assert_close(a, b)
    assert (plain_run.labels == secure_run.labels).all()
    for a, b in zip(plain_run.history, secure_run.history, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        if not settings.get("soft"):
            assert a["members"] == b["members"]


@pytest.mark.parametrize("settings", [{}, {"soft": True}, {"refine": "conjugate"}])
def test_least_squares_too(regression, settings):
    (task, federation), algorithm = regression, ct.FedX(k=3, lr=0.05, init="random", **settings)
    some = federation.select(range(0, 40, 3))  # every two of them agree on keys, for each of many sums
    plain_run, secure_run = both(algorithm, task, some, "vectorised", clip=1e4)
    for a, b in zip(plain_run.models, secure_run.models, strict=True):
        assert_close(a, b)


@pytest.mark.parametrize(
    ("algorithm", "task"),
    [
        (ct.UIFCA(k=3, init="random", restarts=2), ct.Task.density(ct.models.AffineFlow(6))),
        (
            ct.ClusterGAN(k=3, lr=1e-3, steps=1, critic=2, batch=8),
            ct.Task.adversarial(ct.models.GAN((6,), k=3, dz=2, hidden=(8,))),
        ),
    ],
)
def test_points_too(points, algorithm, task):
    plain_run, secure_run = both(algorithm, task, points, "vectorised")
    for a, b in zip(plain_run.models, secure_run.models, strict=True):
        assert torch.allclose(flat(a, 0), flat(b, 0), rtol=1e-4, atol=1e-5)
    assert (plain_run.labels == secure_run.labels).all()


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        (ct.CFL(), "CFL.step needs every client's own reply"),
        (ct.CFL(sketch=50), "CFL.step tells the server every client's "),
        (ct.IFCA(k=3), "Tournament.train needs every client's own reply"),
        (ct.IFCA(k=3, init="balanced"), "Balanced.choose needs every client's own reply"),
    ],
)
def test_methods_that_compare_clients_refuse(task, ragged, algorithm, said):
    with pytest.raises(ValueError, match=said):
        ct.fit(algorithm, task, ragged, rounds=1, secure=ct.SecureSum())


def test_methods_for_points_and_regressions_that_gather_refuse(points, regression):
    for algorithm, task, federation, said in (
        (ct.KFED(k=3), None, points, "KFED.cluster needs"),
        (ct.UIFCA(k=3), ct.Task.density(ct.models.AffineFlow(6)), points, "KFED.cluster needs"),
        (ct.MixedRegression(k=3), *regression, "needs every client's own reply"),
    ):
        with pytest.raises(ValueError, match=said):
            ct.fit(algorithm, task, federation, rounds=1, secure=ct.SecureSum())


def test_the_server_of_a_run_knows_counts_and_no_labels(task, ragged, starts):
    run = ct.fit(ct.IFCA(k=3, init=starts), task, ragged, rounds=2, secure=ct.SecureSum())
    assert set(run.algorithm.labels(run.state).tolist()) == {-1}
    assert run.history[-1]["members"] == [4, 4, 4] and run.history[-1]["groups"] == 3
    assert sorted(np.bincount(run.labels)) == [4, 4, 4]  # by the simulator, which scores every client


def test_stop_and_resume(task, ragged, starts, tmp_path):
    algorithm, secure = ct.IFCA(k=3, init=starts, batch=4, tau=2, fraction=0.8), ct.SecureSum(min_members=2)
    whole = ct.fit(algorithm, task, ragged, rounds=4, secure=secure)
    ct.fit(algorithm, task, ragged, rounds=2, secure=secure, out=tmp_path)
    parts = ct.fit(algorithm, task, ragged, rounds=4, secure=secure, out=tmp_path, resume=True)
    assert torch.equal(flat(whole.state.theta, 0), flat(parts.state.theta, 0))
    assert read_config(tmp_path)["run"]["secure"] == {"threshold": 0.6, "min_members": 2, "clip": 2.0**20}
    with pytest.raises(ValueError, match="secure"):
        ct.fit(algorithm, task, ragged, rounds=4, out=tmp_path, resume=True)


def test_a_configuration_may_ask_for_it():
    tables = {
        "algorithm": {"name": "fedavg"},
        "task": {"kind": "classifier", "model": {"name": "mlp", "sizes": [64, 8, 10]}},
        "data": {"name": "rotated_digits", "clients": 8},
        "run": {"rounds": 1, "secure": {"min_members": 4}},
    }
    config = build(tables)
    assert config.run == {"rounds": 1, "secure": ct.SecureSum(min_members=4)}
    ct.fit(config.algorithm, config.task, config.federation, **config.run)
    for secure, said in (
        (True, r"\[run\] secure must be a table"),
        ({"members": 4}, r"\[run.secure\] has no key 'members'; did you mean 'min_members'"),
        ({"threshold": 0.2}, "threshold must be at least 0.5"),
    ):
        with pytest.raises(ValueError, match=said):
            build({**tables, "run": {"rounds": 1, "secure": secure}})


def test_settings_must_be_settings(task, ragged):
    for secure, said in (({"min_members": 3}, "fit: secure must be SecureSum"), (ct.SecureSum(clip=0), "clip must be")):
        with pytest.raises(ValueError, match=said):
            ct.fit(ct.FedAvg(), task, ragged, rounds=1, secure=secure)


def test_too_few_left_keeps_the_last_round(task, ragged, tmp_path, monkeypatch):
    """The run stops as it does when a process of a sharded one is gone, and goes on where it was."""
    whole = ct.fit(ct.FedAvg(), task, ragged, rounds=3, secure=ct.SecureSum())
    with monkeypatch.context() as patch:
        calls = iter(range(100))
        patch.setattr(Session, "_ask", lambda *args, ask=Session._ask: ask(*args) if next(calls) < 8 else fall_silent())
        with pytest.raises(TooFewLeft):
            ct.fit(ct.FedAvg(), task, ragged, rounds=3, secure=ct.SecureSum(), out=tmp_path)
    again = ct.fit(ct.FedAvg(), task, ragged, rounds=3, secure=ct.SecureSum(), out=tmp_path, resume=True)
    assert torch.equal(flat(whole.models[0], 0), flat(again.models[0], 0)) and len(again.history) == 3


def fall_silent():
    raise TooFewLeft("nobody answers")


def test_more_clients_than_a_session_can_hold(task):
    federation = Federation.from_clients([(torch.zeros(1, 64), torch.zeros(1, dtype=torch.long))] * 257)
    with pytest.raises(ValueError, match="at most 256 clients can take part at once, got 257; set fraction lower"):
        ct.fit(ct.FedAvg(), task, federation, rounds=1, secure=ct.SecureSum())


def test_without_the_package_the_message_says_what_to_install(task, ragged, monkeypatch):
    monkeypatch.setattr(run_module, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'coterie\[secure\]'"):
        ct.fit(ct.FedAvg(), task, ragged, rounds=1, secure=ct.SecureSum())
