"""Experiments of the papers, and benchmarks. They use the library, which never imports them except from its CLI."""
