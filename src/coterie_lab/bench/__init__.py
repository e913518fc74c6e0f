"""Benchmarks of speed, measured as ratios in one run: every way to do the same work, with its result checked."""
