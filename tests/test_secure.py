"""The secure sum: its parts, what it opens, and what the server gets to see."""

import dataclasses
import os

import numpy as np
import pytest
import torch
from cryptography.exceptions import InvalidTag
from scipy.optimize import linprog

import coterie as ct
from coterie.core.cohort import Cohort
from coterie.core.federation import Federation
from coterie.core.key import Key
from coterie.core.pytree import flat, tree_map
from coterie.core.step import ClientStep, Reply
from coterie.core.sums import slot_mean
from coterie.core.train import Models
from coterie.engines import ENGINES
from coterie.engines import simulated as simulate
from coterie.runs import fit as run_module
from coterie.runs.config import build
from coterie.runs.folder import read_config
from coterie.secure import shamir
from coterie.secure.client import Client
from coterie.secure.engine import Secure
from coterie.secure.masks import Identity, Pair, mask, seal, simulated, unseal
from coterie.secure.messages import EXCHANGES, Count, Refused, Sheet, Terms, TooFewLeft
from coterie.secure.protocol import Session

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


def masked(slots, terms=TERMS, **settings):
    """Clients that have sent their sheets, and the server that has them."""
    session = Session({i: Client(i, terms, **settings) for i in range(len(slots))}, terms)
    server = session.server
    sheets = {i: session.clients[i].sheet(server.shares(i), sheet_of(i, slots[i])) for i in session.agree()}
    server.receive("sheets", sheets)
    return session.clients, server


FOURS = [0, 1, 2] * 4


def gone_in(exchange, who):
    return lambda now, asked: [i for i in asked if now != exchange or i not in who]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_sums_and_counts_are_exact_with_a_third_gone(exchange):
    who = {0, 4, 5, 9}
    opened, _ = session_of(FOURS, gone_in(exchange, who), TERMS._replace(min_members=2))
    late = exchange in ("lists", "counts", "sums")  # their sheets have arrived
    body, count = plain(FOURS, [i for i in range(12) if late or i not in who])
    assert opened.members.tolist() == count.tolist() == ([4, 4, 4] if late else [2, 3, 3])
    assert (opened.sheet.body == body).all()


@pytest.mark.parametrize("exchange", EXCHANGES)
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
        clients[0].sign([0, 1, 2])


def test_a_client_never_gives_shares_of_both_secrets():
    clients, _ = masked([0, 1, 2] * 4)
    arrived = list(range(2, 12))
    signed = {i: clients[i].sign(arrived)[i] for i in arrived}
    given, held = clients[2].counts(signed), clients[2]._held
    assert all(given[i] == held[i][1 if i in arrived else 0] for i in range(12))
    with pytest.raises(Refused, match="client 2 refuses: it has been asked twice whose sheets have arrived"):
        clients[2].sign(range(12))


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
    for exchange in ("keys", "shares", "lists", "counts", "sums"):
        assert one.of(exchange) == two.of(exchange)
    for transcript in (one, two):
        for i, payload in transcript.of("sheets").items():
            masked = np.frombuffer(payload[i], np.uint64)  # the head, its tags, and the rows
            for row in masked[2 * SLOTS :].reshape(SLOTS, WIDTH):  # the slot that it chose, and those that it did not
                assert looks_random(row)
            assert not set(masked[: 2 * SLOTS].tolist()) & {0, 1}


def test_one_sheet_stays_masked_with_all_that_was_opened():
    """The masks that two clients have in common are never opened while both are there."""
    _, server = session_of(FOURS)
    heads, rows = server.transcript.of("counts"), server.transcript.of("sums")
    for i, payload in server.transcript.of("sheets").items():
        masked = np.frombuffer(payload[i], np.uint64).copy()
        masked[: 2 * SLOTS] -= mask(server._joined(heads, i), 2 * SLOTS)
        body = masked[2 * SLOTS :].reshape(SLOTS, WIDTH)
        for j in range(SLOTS):
            body[j] -= mask(server._joined(rows, i, j), WIDTH)
        assert looks_random(body) and not set(masked[:SLOTS].tolist()) & {0, 1}


# --- a server that lies -------------------------------------------------------------------------------------------


def opens_nothing(clients, server, victim):
    """Whether what the server has got so far leaves the victim's rows masked: it has no share of their seeds."""
    seeds = {share for client in clients.values() for share in client._held.get(victim, [])[2:]}
    return not any(share in everything(server.transcript) for share in seeds)


def signed_by(clients, arrived):
    return {i: clients[i].sign(arrived)[i] for i in arrived}


def test_a_list_with_duplicates_is_refused():
    """One client is said to have sent all sheets: its own masks would be opened, and the sum would be its update."""
    clients, server = masked(FOURS)
    for client in clients.values():
        with pytest.raises(Refused, match="refuses: it was told that one sheet has arrived twice"):
            client.sign([3] * 9)
    assert opens_nothing(clients, server, 3)


def test_lists_with_strangers_or_without_oneself_are_refused():
    clients, _ = masked(FOURS)
    with pytest.raises(Refused, match="was told of sheets of client 77, who has sent no shares"):
        clients[0].sign([*range(12), 77])
    with pytest.raises(Refused, match="was told that its own sheet has not arrived"):
        clients[0].sign(range(1, 12))


def counted(slots):
    """A session up to the counts, which the server knows: clients, server, and the counts with their tags."""
    clients, server = masked(slots)
    signed = signed_by(clients, list(range(len(slots))))
    server.receive("lists", {i: {i: text} for i, text in signed.items()})
    server.receive("counts", {i: client.counts(signed) for i, client in clients.items()})
    return clients, server, server.counts(SLOTS)[1]


def test_a_false_count_opens_no_slot():
    """A slot with a single member is said to have three, with every tag that a server can think of."""
    clients, server, true = counted([0] * 8 + [1] + [2] * 3)
    assert [count.members for count in true] == [8, 1, 3]
    tags = [true[1].tag, 3 * true[1].tag, true[1].tag + 2, true[0].tag, true[2].tag, 0, int.from_bytes(os.urandom(8))]
    for tag in tags:
        for client in clients.values():
            with pytest.raises(Refused, match="was told of a count that is not the true one"):
                client.sums([true[0], Count(3, tag % 2**64), true[2]])
    for wrong, said in (
        ([true[1], true[0], true[2]], "not the true one"),  # of other slots
        (true[:2], "was told of 2 counts"),
        ([true[0], Count(2**63 + 1, true[1].tag), true[2]], f"was told of a count of {2**63 + 1}"),
    ):
        with pytest.raises(Refused, match=said):
            clients[0].sums(wrong)
    assert opens_nothing(clients, server, 8)
    given = {i: client.sums(true) for i, client in clients.items()}
    assert {len(part) for payload in given.values() for part in payload.values()} == {2 * shamir.SHARE}


@pytest.mark.parametrize("colluding", range(4))
def test_two_views_of_who_has_arrived_are_found_out_with_a_third_colluding(colluding):
    """Half of the honest clients are told that the victim's sheet is there, the others that it is not."""
    terms = TERMS._replace(needed=9)  # more than two thirds of twelve
    clients, server = masked(FOURS, terms)
    victim, bad = 11, list(range(colluding))
    honest = list(range(colluding, 11))
    there, gone = [*honest[::2], victim], honest[1::2]
    views = {True: list(range(12)), False: list(range(11))}
    signed = {
        True: signed_by_some(clients, views[True], there, bad),
        False: signed_by_some(clients, views[False], gone, bad),
    }
    for view, told in ((True, there), (False, gone)):
        for i in told:
            with pytest.raises(Refused, match="others were told of another one"):
                clients[i].counts(signed[view])
    assert opens_nothing(clients, server, victim)


def signed_by_some(clients, view, honest, bad):
    """Signatures of those that were told this list, and of those that sign whatever the server wants."""
    out = {i: clients[i].sign(view)[i] for i in honest}
    for i in bad:
        clients[i]._arrived = sorted(view)
        out[i] = clients[i]._identity.sign(clients[i]._statement())
    return out


def test_a_signature_is_good_for_one_list_and_one_session():
    clients, _ = masked(FOURS)
    others, _ = masked(FOURS)
    everybody = list(range(12))
    clients[0].sign(everybody)
    with pytest.raises(Refused, match="a list of sheets that 0 clients have signed, 8 are needed"):
        clients[0].counts(signed_by(others, everybody))


def keys_of(clients):
    return {i: client.keys()[i] for i, client in clients.items()}


def invented(n, terms=TERMS):
    return {i: Client(i, terms) for i in range(n)}


def test_more_parties_than_were_invited_are_refused():
    terms = Terms(invited=3, needed=3, min_members=2, slots=2)
    keys = keys_of(invented(50, terms))
    one = Client(0, terms)
    with pytest.raises(Refused, match="was given keys of 50 clients, 3 are invited"):
        one.shares({**keys, **one.keys()})


def test_repeated_keys_are_refused():
    clients = invented(12)
    keys = keys_of(clients)
    with pytest.raises(Refused, match="was given a key of client 2 twice"):
        clients[0].shares({i: key if i == 0 else keys[1] for i, key in keys.items()})
    liar = Client(5, TERMS)
    liar._masking = liar._channel  # one key pair for both purposes
    with pytest.raises(Refused, match="was given a key of client 5 twice"):
        clients[0].shares({**keys, **liar.keys()})


def test_a_party_whose_share_would_be_the_secret_is_refused():
    clients = invented(11)
    with pytest.raises(Refused, match="was given keys of client -1, which is no number of a party"):
        clients[0].shares({**keys_of(clients), **Client(-1, TERMS).keys()})


def test_counts_come_after_the_list():
    clients, _, true = counted([0] * 8 + [1] + [2] * 3)
    clients[0]._settled = False  # as if the server had left the exchange out
    with pytest.raises(Refused, match="was told of counts before all have agreed on whose sheets have arrived"):
        clients[0].sums(true)


def test_who_was_sent_another_model_stands_out_of_no_sum():
    """A server that sends all but one a model which trains to nothing would open the update of that one."""
    session = Session({i: Client(i, TERMS) for i in range(12)}, TERMS)
    server, clients, nothing = (
        session.server,
        session.clients,
        sheet_of(0, 0)._replace(body=np.zeros((SLOTS, WIDTH), np.uint64)),
    )
    sheets = {i: (sheet_of(3, 0), b"a model") if i == 3 else (nothing, b"a dead one") for i in session.agree()}
    server.receive("sheets", {i: clients[i].sheet(server.shares(i), *sheets[i]) for i in sheets})
    signed = signed_by(clients, list(range(12)))
    server.receive("lists", {i: {i: text} for i, text in signed.items()})
    server.receive("counts", {i: client.counts(signed) for i, client in clients.items()})
    with pytest.raises(ValueError, match="the counts make no sense"):
        server.counts(SLOTS)


@pytest.mark.parametrize("low", [bytes(32), bytes([1]) + bytes(31)])
@pytest.mark.parametrize("which", ["_channel", "_masking"])
def test_keys_of_low_order_are_refused(low, which):
    """With such a key every client agrees on the same secret, which the server knows."""
    clients, liar = invented(12), Client(5, TERMS)
    getattr(liar, which).public = low
    with pytest.raises(Refused, match="was given a key of client 5 that is of no use"):
        clients[0].shares({**keys_of(clients), **liar.keys()})


def test_keys_that_their_owner_has_not_signed_are_refused():
    clients, other = invented(12), Client(5, TERMS)
    keys = keys_of(clients)
    swapped = other.keys()[5][:32] + keys[5][32:]
    for forged in (swapped, Client(5, TERMS._replace(needed=9)).keys()[5], Client(4, TERMS).keys()[4]):
        with pytest.raises(Refused, match="was given keys that client 5 has not signed"):
            clients[0].shares({**keys, 5: forged})


def test_a_client_that_knows_all_identities_is_told_of_nobody_else():
    """A server that puts keys of its own in place of everybody's could read all shares."""
    who = {i: Identity(os.urandom(32)) for i in range(12)}
    known = {identity.public for identity in who.values()}
    clients = {i: Client(i, TERMS, identity=who[i], trusted=known) for i in range(12)}
    assert len(clients[0].shares(keys_of(clients))) == 11
    with pytest.raises(Refused, match=r"was given keys of client 1, whose identity [0-9a-f]{64} it does not know"):
        clients[0].shares({**keys_of(invented(12)), **clients[0].keys()})


def test_shares_that_cannot_be_opened_end_it_for_the_client_alone():
    session = Session({i: Client(i, TERMS) for i in range(12)}, TERMS)
    session.agree()
    sealed = session.server.shares(0)
    with pytest.raises(Refused, match="client 0 refuses: it cannot open the shares of client 4"):
        session.clients[0].sheet({**sealed, 4: os.urandom(len(sealed[4]))}, sheet_of(0, 0))


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
    secure = secured(inner, gone_in("sheets", {0, 4, 5, 9}), min_members=2, threshold=0.6).at(0)
    rows = torch.arange(12) % 2
    scale = {"scale": torch.tensor([1.0, 2.0])}
    there = [1, 2, 3, 6, 7, 8, 10, 11]
    expected = inner.only(there).combine(Toy().step, scale, slots=3, rows=rows[there])
    sums = secure.combine(Toy().step, scale, slots=3, rows=rows)
    assert_close(expected.update, sums.update)
    assert torch.equal(expected.weight, sums.weight) and sums.members.tolist() == [2, 3, 3]
    assert "4 of 12 clients were gone" in inner.ledger.messages[-1]
    with pytest.raises(TooFewLeft, match="7 of 12 clients answered exchange 2"):
        secured(inner, gone_in("sheets", set(range(5))), threshold=0.6).combine(Toy().step, SCALE, slots=3)


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
        for secure in (None, ct.SecureSum(hide_sample=False, **settings))
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


# --- who takes part -----------------------------------------------------------------------------------------------


def test_who_takes_part_is_a_secret_of_the_clients(task, ragged, starts):
    """Everybody is asked and sends a sheet; those that do not take part add nothing."""
    seen = []
    inner = simulate(ragged, task, Key.of(0), executor="sequential")
    cohort = secured(inner, witness=seen.append, min_members=2).at(0).sample(0.5)
    assert len(cohort) == 12 and cohort.share == 0.5
    theta = {n: torch.stack([model[n] for model in starts])[None] for n in starts[0]}
    sums = cohort.combine(ct.IFCA(k=3, tau=2).step, Models(theta, torch.tensor(0.1)), slots=3)
    assert len(seen[0].of("sheets")) == 12 and 0 < int(sums.members.sum()) < 12
    some = cohort.engine._decided(cohort._exchange(ct.IFCA(k=3).step, (), 3, None))
    plain = inner.at(0).only(some).combine(ct.IFCA(k=3, tau=2).step, Models(theta, torch.tensor(0.1)), slots=3)
    opened = sums.members >= 2
    assert sums.members.tolist() == torch.bincount(plain.note["label"].flatten(), minlength=3).tolist()
    assert_close(tree_map(lambda x: x[opened], plain.update), tree_map(lambda x: x[opened], sums.update))
    assert torch.allclose(sums.note["loss"], plain.note["loss"].mean(0).expand(12, 1), atol=1e-6)


def test_a_round_in_which_nobody_takes_part_changes_nothing(task, ragged, starts):
    run = ct.fit(ct.IFCA(k=3, init=starts, fraction=1e-9), task, ragged, rounds=2, secure=ct.SecureSum())
    for before, after in zip(starts, run.models, strict=True):
        assert_close(before, after)
    assert run.history[-1]["members"] == [0, 0, 0]


def test_of_many_clients_fixed_parts_are_asked():
    federation = Federation.from_clients([(torch.zeros(1, 64), torch.zeros(1, dtype=torch.long))] * 600)
    cohort = secured(simulate(federation, ct.Task.distance(), Key.of(0)))
    asked = {tuple(cohort.at(t).sample(0.1).clients.tolist()) for t in range(20)}
    assert sorted(map(len, asked)) == [200, 200, 200] and len(set().union(*asked)) == 600
    assert cohort.at(0).sample(0.1).share == pytest.approx(0.3)


def test_counts_of_rounds_do_not_tell_who_is_in_which_cluster():
    """A linear program finds all clusters from counts and who was asked, if those are who took part."""
    rng, m, k, rounds = np.random.default_rng(0), 12, 2, 24
    labels = rng.integers(0, k, m)
    federation = federation_of(labels.tolist())

    def found(**settings):
        """The share of clients whose cluster it gets right."""
        seen, inner = [], simulate(federation, ct.Task.distance(), Key.of(0), executor="sequential")
        cohort = secured(inner, min_members=2, **settings)
        for t in range(rounds):
            some = cohort.at(t).sample(0.4)
            seen.append((some.clients.numpy(), some.combine(Toy().step, SCALE, slots=k).members.numpy()))
        return float((likeliest(m, k, seen) == labels).mean())

    assert found(hide_sample=False) == 1
    assert found() <= np.bincount(labels).max() / m + 0.1


def likeliest(m, k, seen):
    """The assignment (m,) whose counts, scaled to those that were seen, are off by the least in all rounds together."""
    total = np.zeros((len(seen) * k, m * k))
    told = np.concatenate([count for _, count in seen]).astype(float)
    for t, (asked, count) in enumerate(seen):
        for j in range(k):
            total[t * k + j, asked * k + j] = max(count.sum(), 1) / len(asked)
    off, one_each = np.eye(len(told)), np.kron(np.eye(m), np.ones(k))
    result = linprog(
        np.concatenate([np.zeros(m * k), np.ones(len(told))]),
        A_ub=np.vstack([np.hstack([total, -off]), np.hstack([-total, -off])]),
        b_ub=np.concatenate([told, -told]),
        A_eq=np.hstack([one_each, np.zeros((m, len(told)))]),
        b_eq=np.ones(m),
    )
    return result.x[: m * k].reshape(m, k).argmax(1)


def test_stop_and_resume(task, ragged, starts, tmp_path):
    algorithm, secure = ct.IFCA(k=3, init=starts, batch=4, tau=2, fraction=0.8), ct.SecureSum(min_members=2)
    whole = ct.fit(algorithm, task, ragged, rounds=4, secure=secure)
    ct.fit(algorithm, task, ragged, rounds=2, secure=secure, out=tmp_path)
    parts = ct.fit(algorithm, task, ragged, rounds=4, secure=secure, out=tmp_path, resume=True)
    assert torch.equal(flat(whole.state.theta, 0), flat(parts.state.theta, 0))
    assert read_config(tmp_path)["run"]["secure"] == dataclasses.asdict(secure)
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
