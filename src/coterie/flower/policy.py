"""What a node asks of a run before it takes part, and by what key other nodes know it. Its server has no say in it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.flower.memory import Memory
from coterie.secure.masks import SECRET, Identity
from coterie.secure.messages import Terms
from coterie.storage.snapshot import write_private

LONGEST = 2**20  # bytes of a file of identities
AMPLE = 4  # times `min_members`: with as many to be expected, fewer than `min_members` hardly ever take part
TRUE, FALSE = ("true", "1"), ("false", "0")


@dataclass(frozen=True)
class Policy:
    """The conditions on which a node takes part in a run; without any it takes part in all.

    Attributes:
        secure_only: Whether it takes part in secure sums alone.
        min_members: The fewest members of a cluster whose sum it helps to open.
        min_nodes: The fewest nodes of a secure sum.
        peers: A file with the identities of all nodes that may take part, one in each line; None trusts whomever the
            server names. A node that has it trusts its server in nothing else either (`check_terms`, `check_asked`).
        server_picks: Whether a node with `peers` lets the server say which client is sent which model, as the start
            `random_groups` does: whoever alone is sent one that trains stands out of the sum.
    """

    secure_only: bool = False
    min_members: int = 2
    min_nodes: int = 2
    peers: Path | None = None
    server_picks: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Policy:
        """The policy that a node config tells of: `secure-only`, `min-members`, `min-nodes`, `peers`, `server-picks`.

        Example:
            >>> Policy.of({"secure-only": True, "min-members": 5})
            Policy(secure_only=True, min_members=5, min_nodes=2, peers=None, server_picks=False)

        Raises:
            ValueError: A value is not allowed.
        """
        switches, numbers = {}, {}
        for name in ("secure-only", "server-picks"):
            value = str(config.get(name, False)).lower()
            if value not in TRUE + FALSE:
                raise ValueError(f"node config: {name} must be true or false, got {value!r}")
            switches[name.replace("-", "_")] = value in TRUE
        for name in ("min-members", "min-nodes"):
            value = str(config.get(name, 2))
            if not value.isdecimal() or int(value) < 2:
                raise ValueError(f"node config: {name} must be a whole number of at least 2, got {value!r}")
            numbers[name.replace("-", "_")] = int(value)
        peers = config.get("peers")
        return cls(**switches, **numbers, peers=None if peers is None else Path(str(peers)))

    def check_open(self) -> None:
        """Refuse a step that is not part of a secure sum."""
        if self.secure_only:
            raise ValueError("this node takes part in secure sums alone (secure-only), and this run has none")

    def check_terms(self, terms: Terms, clients: int, share: float) -> None:
        """Refuse a secure sum whose terms protect too little.

        Args:
            terms: Of the session.
            clients: How many clients are asked, on all nodes.
            share: How likely each takes part.
        """
        if terms.min_members < self.min_members or terms.needed < self.min_nodes:
            raise ValueError(
                f"secure sum: this node asks for clusters of at least {self.min_members} members (min-members) and for "
                f"at least {self.min_nodes} nodes that answer (min-nodes), got {terms.min_members} and {terms.needed}"
            )
        if self.peers is None:
            return
        if 3 * terms.needed <= 2 * terms.invited:
            raise ValueError(
                f"secure sum: this node knows its peers, and asks for more than two thirds of the nodes, got "
                f"{terms.needed} of {terms.invited}; raise threshold, or leave peers out"
            )
        if share < 1 and share * clients < AMPLE * terms.min_members:  # the mean loss would be of very few
            raise ValueError(
                f"secure sum: this node knows its peers, and asks that at least {AMPLE} times min_members clients are "
                f"to be expected, got {share * clients:.3g} for min_members = {terms.min_members}; raise fraction"
            )

    def check_asked(self, asked: int, there: int, *, picked: bool) -> None:
        """Refuse what would let a server that lies tell one client from the others.

        Args:
            asked: How many of the node's clients are asked.
            there: How many it has.
            picked: Whether the server says which of them is sent which model.
        """
        if self.peers is None:
            return
        if asked < there:
            raise ValueError(
                f"secure sum: this node knows its peers, and has all of its {there} clients asked or none, got "
                f"{asked}: the difference of two sums would be one client's; set hide_sample = true"
            )
        if picked and not self.server_picks:
            raise ValueError(
                "secure sum: this node knows its peers, and lets no server say which client is sent which model; set "
                "server-picks = true in its config, or use another start than random_groups"
            )

    def trusted(self) -> frozenset[bytes] | None:
        """The identities of all nodes that may take part; None where anybody may.

        Raises:
            ValueError: The file is not there, or has another line than an identity.
        """
        if self.peers is None:
            return None
        if not self.peers.is_file() or self.peers.stat().st_size > LONGEST:
            raise ValueError(f"node config: peers must name a file of identities, got {self.peers}")
        lines = (line.partition("#")[0].strip() for line in self.peers.read_text(encoding="utf-8").splitlines())
        found = [line for line in lines if line]
        for line in found:
            if not re.fullmatch(rf"[0-9a-f]{{{2 * SECRET}}}", line):
                raise ValueError(f"{self.peers}: an identity is {2 * SECRET} hexadecimal digits, got {line[:80]!r}")
        return frozenset(map(bytes.fromhex, found))


def identity_of(memory: Memory) -> Identity:
    """The identity of a node, by which other nodes know it; it is made where there is none.

    Args:
        memory: Where the node keeps things.

    Example:
        >>> import tempfile
        >>> memory = Memory(Path(tempfile.mkdtemp()), "shop-1")
        >>> identity_of(memory).public == identity_of(memory).public
        True

    Raises:
        ValueError: There is nowhere to keep it.
    """
    file = memory.identity_file()
    if not file.exists():
        write_private(file, os.urandom(SECRET).hex())
    return Identity(bytes.fromhex(file.read_text(encoding="utf-8")))
