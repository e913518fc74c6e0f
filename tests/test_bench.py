import torch

from coterie.bench.speed import gram_flops, measure, product_rate


def test_every_way_gives_the_same_answer():
    rows = measure("cpu", quick=True)
    keys = {"workload", "way", "seconds", "loop_ratio", "floor_ratio", "peak_mib", "max_rel_diff"}
    assert all(set(r) == keys for r in rows)
    works = {r["workload"] for r in rows}
    ways = {"loop", "sequential", "vmap", "vectorised", "floor"}
    assert len(works) == 3 and all({r["way"] for r in rows if r["workload"] == w} == ways for w in works)
    assert all(r["max_rel_diff"] < 1e-3 for r in rows if r["way"] != "floor")


def test_the_floor_counts_the_operations_of_the_papers_workload():
    assert 0.044e12 < gram_flops(480, 50, 784, 200, 10, 10, 4) < 0.046e12
    assert product_rate(torch.device("cpu")) > 1e9
