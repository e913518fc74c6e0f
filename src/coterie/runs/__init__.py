"""Runs: fit, the loop, the run folder, evaluation and what is shown."""
