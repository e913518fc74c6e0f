"""The secure sum: the server learns sums and counts by cluster, never an update nor who is in which cluster.

`shamir` shares secrets, `masks` holds the primitives, `protocol` the two sides of a session, `engine` what methods see
of it. All but the settings below need the package `cryptography`.
"""

from __future__ import annotations

from dataclasses import dataclass

from coterie.core.settings import setting


@dataclass(frozen=True)
class SecureSum:
    """How clients' updates are added up so that nobody sees one of them.

    Args:
        threshold: More than this share of the invited clients must answer every exchange, else no sum is opened. So
            many would also have to join forces with the server to open another client's update.
        min_members: The sum of a cluster with fewer members is not opened; its model stays as it is.
        clip: The largest absolute value that a client may send, its weight times any number of its update, or its
            weight. Numbers are rounded to multiples of clip · clients / 2⁶²; one beyond clip is an error.

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

    threshold: float = setting(0.6, low=0.5, high=0.99)
    min_members: int = setting(3, low=2)
    clip: float = setting(2.0**20, low=2.0**-20, high=2.0**30)
