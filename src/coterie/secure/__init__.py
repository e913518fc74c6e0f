"""Secure aggregation: the server learns sums and counts per cluster, never one client's update or its cluster.

`shamir` implements secret sharing, `masks` the cryptographic primitives, `client` and `server` the two sides of a
session, `protocol` the order of its exchanges, and `engine` the engine that methods use. All but the settings below
need the package `cryptography`.
"""

from __future__ import annotations

from dataclasses import dataclass

from coterie.core.settings import setting


@dataclass(frozen=True)
class SecureSum:
    """Settings of secure aggregation: clients' updates are added so that nobody sees a single one of them.

    Args:
        threshold: More than this fraction of the invited clients must answer every exchange; otherwise no sum is opened
            (revealed to the server). As many clients would have to collude with the server to open another client's
            update, if it keeps to the protocol. Against a server that lies, with 2/3 a third of the clients may
            collude with it, with 1/2 nobody.
        min_members: The sum of a cluster with fewer members is not opened; its model does not change in that round.
        clip: The largest absolute value that a client may send, which is its weight, or its weight times any number of
            its update. Numbers are rounded to multiples of clip · clients / 2⁶²; a larger number than clip is an error.
        hide_sample: Where a method asks for a fraction of the clients, ask all of them (up to 256), and have each
            decide in secret whether it takes part: otherwise the counts of some dozen rounds, and who took part in
            them, tell who is in which cluster. False asks only as many as are to take part, which costs less.

    Example:
        >>> import coterie as ct
        >>> federation = ct.data.rotated_digits(clients=8, seed=0)
        >>> task = ct.Task.classifier(ct.models.MLP(64, 32, 10))
        >>> run = ct.fit(ct.IFCA(k=2, init="random"), task, federation, rounds=2, secure=ct.SecureSum())
        >>> run.algorithm.labels(run.state).unique()        # the server does not know them
        tensor([-1])
        >>> int(run.algorithm.members(run.state).sum())     # but it knows how many there are in each cluster
        8
    """

    threshold: float = setting(2 / 3, low=0.5, high=0.99)
    min_members: int = setting(3, low=2)
    clip: float = setting(2.0**20, low=2.0**-20, high=2.0**30)
    hide_sample: bool = True
