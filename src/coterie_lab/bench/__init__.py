"""Speed, measured as ratios in one run: every way to do the same work, side by side, with its answer checked."""
