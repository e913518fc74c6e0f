"""A client in a session of the secure sum. It trusts nobody: what it is told is checked before it gives anything away.

`coterie.secure.protocol` describes the exchanges. Against a server that lies:

- **Whose keys they are.** Keys are signed by the identity of their owner. A client that knows the identities of all
  parties (`trusted`) is told of nobody else; one that does not can still not be given one key for two parties.
- **Whose sheets have arrived.** Every client signs the list that it was told, and goes on only if enough others have
  signed the same one. So there are never two lists, and nobody's two kinds of masks are both opened.
- **What clients were sent.** A model that trains to nothing, sent to all but one, would leave that one's update as the
  sum. So the masks of a pair follow from what each of the two was sent, too: they cancel if it was the same.
- **How many are in each slot.** Clients agree on a secret that the server does not know. From it follow, for each slot
  j, a factor aⱼ and, for each client i, a pad bᵢⱼ. Beside its count cᵢⱼ a client adds the tag aⱼ·cᵢⱼ + bᵢⱼ. The server
  gets the sums of both. To say another count it would have to know aⱼ.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from cryptography.exceptions import InvalidTag

from coterie.secure.masks import SECRET, SIGNATURE, Entropy, Identity, Pair, is_signed, mask, seal, unseal
from coterie.secure.messages import Count, Payload, Refused, Sheet, Terms, TooFewLeft
from coterie.secure.shamir import SHARE, split

KEYS = 3 * SECRET + SIGNATURE  # bytes of a client's public keys: for shares, for masks, its identity; and a signature
MOST_PARTIES = 2**32  # a share of party -1 would be the secret itself
MOST_MEMBERS = 2**20  # below which a false count passes with a probability of 2⁻⁴⁴ at most


class Client:
    """One client in one session. No secret is used in another session: a mask that hides two sheets hides neither.

    Args:
        me: Number of the client, which is not secret.
        terms: Parameters of the session.
        random: Source of random bytes for the secrets.
        identity: By which others know this client; one of this session alone if None.
        trusted: Public keys of the identities of all that may take part; None trusts whomever the server names.
    """

    def __init__(
        self,
        me: int,
        terms: Terms,
        random: Entropy = os.urandom,
        identity: Identity | None = None,
        trusted: Collection[bytes] | None = None,
    ) -> None:
        self.me, self._terms, self._random = me, terms, random
        self._channel, self._masking = Pair(random(SECRET)), Pair(random(SECRET))
        self._seeds = [random(SECRET) for _ in range(1 + terms.slots)]  # for the head, and for each row of the body
        self._contribution = random(SECRET)  # to the secret that all clients have in common
        self._identity = identity or Identity(random(SECRET))
        self._trusted = trusted
        self._keys: dict[int, bytes] = {}  # public keys of all clients
        self._held: dict[int, list[bytes]] = {}  # shares of the secrets of all clients
        self._common = b""  # the secret that all clients have in common
        self._arrived: list[int] | None = None
        self._settled = False  # whether enough others were told of the same list

    def to_plain(self) -> dict[str, Any]:
        """Return everything that the client must store between two exchanges, for JSON. It is secret.

        Its identity, and whom it trusts, are not part of it.

        Example:
            >>> who = Identity(bytes(32))
            >>> one = Client(0, Terms(invited=2, needed=2, min_members=2, slots=3), identity=who)
            >>> Client.from_plain(one.to_plain(), who).keys() == one.keys()
            True
        """
        drawn = [self._channel.secret, self._masking.secret, *self._seeds, self._contribution]
        return {
            "me": self.me,
            "terms": list(self._terms),
            "drawn": [secret.hex() for secret in drawn],
            "keys": [[i, key.hex()] for i, key in self._keys.items()],
            "held": [[i, [share.hex() for share in shares]] for i, shares in self._held.items()],
            "common": self._common.hex(),
            "arrived": self._arrived,
            "settled": self._settled,
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any], identity: Identity, trusted: Collection[bytes] | None = None) -> Client:
        """Restore a client; from now on its random bytes come from the operating system.

        Args:
            plain: What `to_plain` returned.
            identity: The client's.
            trusted: As for a new client.
        """
        drawn = iter(bytes.fromhex(secret) for secret in plain["drawn"])
        client = cls(plain["me"], Terms(*plain["terms"]), lambda length: next(drawn), identity, trusted)
        client._random = os.urandom
        client._keys = {i: bytes.fromhex(key) for i, key in plain["keys"]}
        client._held = {i: [bytes.fromhex(share) for share in shares] for i, shares in plain["held"]}
        client._common = bytes.fromhex(plain["common"])
        client._arrived, client._settled = plain["arrived"], plain["settled"]
        return client

    # --- the exchanges ---------------------------------------------------------------------------------------------

    def keys(self) -> Payload:
        """Answer exchange 0 with the public keys for encrypting shares, for masks and of the identity, signed by it.

        Those for shares and for masks are two key pairs, because the secret key of the second one may be opened.
        """
        public = self._channel.public + self._masking.public + self._identity.public
        return {self.me: public + self._identity.sign(self._introduction(self.me, public))}

    def shares(self, keys: Mapping[int, bytes]) -> Payload:
        """Answer exchange 1 with shares of this client's secrets, encrypted for each other client.

        Args:
            keys: The public keys of all clients, from the server.
        """
        self._check_keys(keys)
        self._keys = dict(keys)
        secrets = [self._masking.secret, *self._seeds]
        pieces = [split(secret, list(keys), self._terms.needed, self._random) for secret in secrets]
        self._held[self.me] = [piece[self.me] for piece in pieces]
        texts = {i: b"".join(piece[i] for piece in pieces) + self._contribution for i in keys if i != self.me}
        return {i: seal(self._agreed(i), self.me, i, text) for i, text in texts.items()}

    def sheet(self, sealed: Mapping[int, bytes], sheet: Sheet, sent: bytes = b"") -> Payload:
        """Answer exchange 2 with this client's numbers and their tags under all masks.

        Args:
            sealed: The encrypted shares that other clients sent to this one, by sender.
            sheet: This client's numbers.
            sent: What it was sent to work with, or a digest of it, if all clients must have been sent the same.
        """
        contributions = {self.me: self._contribution}
        for i in sealed:
            self._check(i in self._keys and i != self.me, f"was given shares of {self._name(i)}, who is not invited")
            text = self._unseal(i, sealed[i])
            self._held[i], contributions[i] = _cut(text[:-SECRET]), text[-SECRET:]
        self._require(self._held)
        self._common = _common_secret(contributions)
        tagged = Sheet(np.concatenate([sheet.head, self._tags(sheet.head[: self._terms.slots])]), sheet.body)
        total = tagged.flat() + own_masks(self._seeds, tagged)
        for i in sealed:
            add_common_mask(total, self.me, i, self._masking, masking_key(self._keys[i]), sent)
        return {self.me: total.astype("<u8").tobytes()}

    def sign(self, arrived: Sequence[int]) -> Payload:
        """Answer exchange 3 with a signature of the list of clients whose sheets have arrived.

        Args:
            arrived: The list, from the server.
        """
        self._check(self._arrived is None, "has been asked twice whose sheets have arrived")
        self._check(len(set(arrived)) == len(arrived), "was told that one sheet has arrived twice")
        strangers = [i for i in arrived if i not in self._held]
        self._check(
            not strangers, f"was told of sheets of {', '.join(map(self._name, strangers))}, who has sent no shares"
        )
        self._check(self.me in arrived, "was told that its own sheet has not arrived")
        self._require(arrived)
        self._arrived = sorted(arrived)
        return {self.me: self._identity.sign(self._statement())}

    def counts(self, signed: Mapping[int, bytes]) -> Payload:
        """Answer exchange 4 with a share of each client's seed for the head, or of its secret key, but never both.

        Args:
            signed: Signatures of the list of clients whose sheets have arrived, by client, from the server.
        """
        arrived, statement = self._arrived or [], self._statement()
        agreeing = [i for i in arrived if i in signed and is_signed(identity_key(self._keys[i]), statement, signed[i])]
        self._check(
            len(agreeing) >= self._terms.needed,
            f"was told of a list of sheets that {len(agreeing)} {self._terms.who} have signed, "
            f"{self._terms.needed} are needed: others were told of another one",
        )
        self._settled = True
        return {i: held[1 if i in arrived else 0] for i, held in self._held.items()}

    def sums(self, counts: Sequence[Count]) -> Payload:
        """Answer exchange 5 with shares of the seeds of those slots that enough clients have chosen.

        Args:
            counts: Number of clients that chose each slot and its tag, from the server.
        """
        arrived = self._arrived or []
        self._check(self._settled, "was told of counts before all have agreed on whose sheets have arrived")
        self._check(len(counts) == self._terms.slots, f"was told of {len(counts)} counts")
        members = np.array([count.members for count in counts], np.uint64)
        self._check(bool((members < MOST_MEMBERS).all()), f"was told of a count of {members.max()}")
        true = self._factors() * members + sum((self._pads(i) for i in arrived), np.zeros_like(members))
        told = np.array([count.tag for count in counts], np.uint64)
        self._check(bool((true == told).all()), "was told of a count that is not the true one")
        wanted = large_enough(members.tolist(), self._terms)
        return {i: b"".join(self._held[i][2 + j] for j in wanted) for i in arrived}

    # --- what is checked -------------------------------------------------------------------------------------------

    def _refuse(self, why: str) -> NoReturn:
        raise Refused(f"secure sum: {self._name(self.me)} refuses: it {why}")

    def _check(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self._refuse(otherwise)

    def _require(self, clients: Iterable[int]) -> None:
        """Stop if too few clients take part; a client checks this itself and need not trust the server."""
        if (found := len(list(clients))) < self._terms.needed:
            who, needed = self._terms.who, self._terms.needed
            raise TooFewLeft(f"secure sum: {self._name(self.me)} knows of {found} {who}, {needed} are needed")

    def _check_keys(self, keys: Mapping[int, bytes]) -> None:
        self._require(keys)
        invited, who = self._terms.invited, self._terms.who
        self._check(len(keys) <= invited, f"was given keys of {len(keys)} {who}, {invited} are invited")
        self._check(keys.get(self.me) == self.keys()[self.me], "was given keys of its own that are others")
        seen = set[bytes]()
        for i, key in keys.items():
            self._check(0 <= i < MOST_PARTIES, f"was given keys of {self._name(i)}, which is no number of a party")
            self._check(len(key) == KEYS, f"was given keys of {self._name(i)} of {len(key)} bytes")
            public, own = key[: 3 * SECRET], {key[at : at + SECRET] for at in range(0, 3 * SECRET, SECRET)}
            self._check(len(own) == 3 and not own & seen, f"was given a key of {self._name(i)} twice")
            seen |= own
            name, identity = self._introduction(i, public), identity_key(key)
            self._check(
                is_signed(identity, name, key[3 * SECRET :]), f"was given keys that {self._name(i)} has not signed"
            )
            trusted = self._trusted is None or i == self.me or identity in self._trusted
            self._check(trusted, f"was given keys of {self._name(i)}, whose identity {identity.hex()} it does not know")
            if i != self.me:
                self._agree_with(i, public)

    def _agree_with(self, i: int, public: bytes) -> None:
        """Refuse keys of low order, with which everybody agrees on the same secret."""
        for pair, key in ((self._channel, public[:SECRET]), (self._masking, public[SECRET : 2 * SECRET])):
            try:
                pair.agree(key, b"trial")
            except ValueError:
                self._refuse(f"was given a key of {self._name(i)} that is of no use")

    def _introduction(self, i: int, public: bytes) -> bytes:
        """What the identity of client i signs: its keys are good for nothing but a session with these terms."""
        return b"coterie secure sum: keys" + repr((i, tuple(self._terms))).encode() + public

    def _statement(self) -> bytes:
        """What all clients sign: whose sheets have arrived, in the session of these keys."""
        keys = b"".join(i.to_bytes(8, "big") + key for i, key in sorted(self._keys.items()))
        return b"coterie secure sum: list" + hashlib.sha256(keys).digest() + repr(self._arrived).encode()

    # --- what all clients have in common ---------------------------------------------------------------------------

    def _tags(self, count: np.ndarray) -> np.ndarray:
        return self._factors() * count + self._pads(self.me)

    def _factors(self) -> np.ndarray:
        """The a of every slot, of 64 bits."""
        return mask(hashlib.sha256(self._common + b"factors").digest(), self._terms.slots)

    def _pads(self, client: int) -> np.ndarray:
        """The b of a client for every slot."""
        return mask(hashlib.sha256(self._common + b"pads" + client.to_bytes(8, "big")).digest(), self._terms.slots)

    def _agreed(self, other: int) -> bytes:
        return self._channel.agree(self._keys[other][:SECRET], b"shares")

    def _unseal(self, sender: int, text: bytes) -> bytes:
        try:
            return unseal(self._agreed(sender), sender, self.me, text)
        except InvalidTag:
            self._refuse(f"cannot open the shares of {self._name(sender)}")

    def _name(self, i: int) -> str:
        return f"{self._terms.who[:-1]} {i}"


def masking_key(keys: bytes) -> bytes:
    """Return the public key for masks, of all that a client has sent.

    Args:
        keys: The client's answer to exchange 0.
    """
    return keys[SECRET : 2 * SECRET]


def identity_key(keys: bytes) -> bytes:
    """Return the public key of the identity, of all that a client has sent.

    Args:
        keys: The client's answer to exchange 0.
    """
    return keys[2 * SECRET : 3 * SECRET]


def add_common_mask(total: np.ndarray, me: int, other: int, pair: Pair, public: bytes, sent: bytes) -> None:
    """Add the mask that two clients share; the client with the higher number subtracts it instead.

    Args:
        total: What it is added to.
        me: The client whose mask it is.
        other: The client with which it is shared.
        pair: The key pair of the first.
        public: The public key of the second.
        sent: What the first was sent to work with.
    """
    common = mask(pair.agree(public, b"masks" + sent), len(total))
    (np.add if me < other else np.subtract)(total, common, out=total)


def own_masks(seeds: Sequence[bytes], sheet: Sheet) -> np.ndarray:
    """Return the masks that belong to one client.

    Args:
        seeds: For the head, and for each row of the body.
        sheet: The sheet that they are for.
    """
    rows = [mask(seed, sheet.body.shape[1]) for seed in seeds[1:]]
    return np.concatenate([mask(seeds[0], len(sheet.head)), *rows])


def large_enough(members: Sequence[int], terms: Terms) -> list[int]:
    """Return the slots that are opened.

    Args:
        members: Number of clients that chose each slot.
        terms: Parameters of the session.
    """
    return [j for j, n in enumerate(members) if n >= terms.min_members]


def _common_secret(contributions: Mapping[int, bytes]) -> bytes:
    """All clients know it, and nobody else as long as none of them tells."""
    return hashlib.sha256(b"".join(part for _, part in sorted(contributions.items()))).digest()


def _cut(shares: bytes) -> list[bytes]:
    return [shares[at : at + SHARE] for at in range(0, len(shares), SHARE)]
