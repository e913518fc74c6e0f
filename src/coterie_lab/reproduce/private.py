"""What differential privacy costs: the same method at several ε, and without it."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from coterie.privacy import Privacy
from coterie.runs.config import build_algorithm, build_task
from coterie.runs.fit import fit
from coterie_lab.reproduce.notebook import Notebook
from coterie_lab.reproduce.rounds import seeded
from coterie_lab.reproduce.workers import side_by_side

FOUND = 0.99  # the ARI from which on all groups count as found


def run(spec: dict[str, Any], device: str, notebook: Notebook) -> dict[str, Any]:
    """Train with every seed and every ε, 0 for none.

    Args:
        spec: The content of the TOML file.
        device: "auto", "cpu" or "cuda".
        notebook: Stores the runs that are done.
    """
    cells = {f"{e:g}, {seed}": (spec, e, seed, device) for e in spec["epsilons"] for seed in spec["seeds"]}
    done = dict(zip(cells, side_by_side(trained, cells, device, notebook), strict=True))
    each = {e: [done[f"{e:g}, {seed}"] for seed in spec["seeds"]] for e in spec["epsilons"]}
    plain = statistics.mean(one["accuracy"][-1] for one in each[0]) if 0 in each else None
    rows = [_row(epsilon, runs, plain) for epsilon, runs in each.items()]
    return {"seeds": spec["seeds"], "rows": rows, "runs": {f"{e:g}": runs for e, runs in each.items()}}


def trained(spec: dict[str, Any], epsilon: float, seed: int, device: str) -> dict[str, Any]:
    """Train once.

    Args:
        spec: The content of the TOML file.
        epsilon: ε, 0 for no privacy.
        seed: The seed of the data and of the run.
        device: "auto", "cpu" or "cuda".
    """
    privacy = Privacy(epsilon=epsilon, **spec["privacy"]) if epsilon else None
    found = fit(
        build_algorithm(spec["algorithm" if epsilon else "plain"]),
        build_task(spec["task"]),
        seeded(spec["data"], seed),
        rounds=spec["rounds"],
        seed=seed,
        evaluations=spec["evaluations"],
        device=device,
        privacy=privacy,
    )
    scored = [row for row in found.history if row["accuracy"] is not None]
    return {
        "rounds": [row["round"] for row in scored],
        "accuracy": [100 * row["accuracy"] for row in scored],
        "epsilon": found.history[-1].get("epsilon"),
        "ari": found.ari,
        "members": found.history[-1]["members"],
    }


def _row(epsilon: float, runs: list[dict[str, Any]], plain: float | None) -> dict[str, Any]:
    last = [one["accuracy"][-1] for one in runs]
    mean = statistics.mean(last)
    return {
        "epsilon": f"{epsilon:g}" if epsilon else "none",
        "spent": max(one["epsilon"] for one in runs) if epsilon else None,
        "accuracy": mean,
        "deviation": statistics.stdev(last) if len(last) > 1 else None,
        "lost": None if plain is None or not epsilon else plain - mean,
        "groups found": sum(one["ari"] >= FOUND for one in runs),
        "runs": len(runs),
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw accuracy by round, a line for every seed and a colour for every ε.

    Args:
        result: The content of the JSON file.
        path: The picture.
    """
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for number, (epsilon, runs) in enumerate(result["runs"].items()):
        for i, one in enumerate(runs):
            label = None if i else ("no privacy" if epsilon == "0" else f"ε = {epsilon}")
            axes.plot(one["rounds"], one["accuracy"], color=f"C{number}", label=label)
    axes.set(xlabel="round", ylabel="accuracy (%)")
    axes.set_title(result["title"], fontsize=9)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)
