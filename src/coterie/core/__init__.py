"""The contracts: keys, tasks, federations, client steps, cohorts, methods."""
