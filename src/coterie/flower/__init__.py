"""A real federation: the parts that speak Flower. Nothing outside of here and `executors.flower` imports flwr."""
