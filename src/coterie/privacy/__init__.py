"""Client-level differential privacy: what a run releases hardly depends on any one client's taking part.

`bounded` is what clients do to their replies, `discrete` the noise that they add in a secure sum, `accounting` what is
charged for every exchange, and `engine` the engine that methods use. All but the settings below need the package
`dp-accounting`.
"""

from __future__ import annotations

from dataclasses import dataclass

from coterie.core.settings import setting


@dataclass(frozen=True)
class Privacy:
    """Settings of client-level (ε, δ)-differential privacy, for methods that add clients' replies up.

    Every client's reply is shortened to a bound, counts for no more than 1, and is added up with Gaussian noise, sums
    and counts alike. By itself, the server adds the noise to sums that it knows. Together with `SecureSum`, each client
    adds its part of discrete Gaussian noise, and the server knows the noised sums only.

    Args:
        epsilon: ε at most: the run ends before an exchange that would exceed it.
        delta: δ. It should be well below one over the number of clients.
        clip: The length to which the change that a client's training makes, or the statistics it sends, are shortened.
        quantile: Have the bound follow this quantile of the clients' lengths, beginning with `clip` (Andrew et al.
            2021); clients then also tell whether they are within it, with noise. None keeps it as it is.
        noise: Standard deviation of the noise over the largest contribution of a client (the noise multiplier z); None
            takes the least with which `exchanges` stay within epsilon.
        exchanges: How many exchanges the noise is made for, those of the start among them; None takes the rounds.

    Example:
        >>> import coterie as ct
        >>> federation = ct.data.rotated_digits(clients=80, seed=0)
        >>> task = ct.Task.classifier(ct.models.MLP(64, 16, 10))
        >>> method = ct.IFCA(k=2, init="random", lr=0.5)
        >>> run = ct.fit(method, task, federation, rounds=4, privacy=ct.Privacy(epsilon=8.0), evaluations=1)
        >>> [round(row["epsilon"], 1) for row in run.history]
        [3.5, 5.3, 6.7, 8.0]
    """

    epsilon: float = setting(8.0, low=1e-3, high=1e3)
    delta: float = setting(1e-5, low=1e-15, high=0.1)
    clip: float = setting(1.0, low=1e-6, high=1e6)
    quantile: float | None = setting(None, low=0.05, high=0.95)
    noise: float | None = setting(None, low=0.01, high=1e6)
    exchanges: int | None = setting(None, low=1)
