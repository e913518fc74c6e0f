"""A real federation: the parts that speak Flower. Beside them only `executors.flower` and `.flower_secure` do."""
