"""The same algorithms on a real Flower federation."""
