import json

import torch
from typer.testing import CliRunner

from coterie.bench.scale import slope
from coterie.bench.speed import gram_flops, measure, product_rate
from coterie.cli.main import app


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


def test_scale_is_told_as_a_list_and_drawn(tmp_path):
    done = CliRunner().invoke(app, ["bench", "scale", "--quick", "--json", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert [r["clients"] for r in rows] == [100, 1000, 10_000]
    assert all(set(r) == {"clients", "seconds", "peak_mib", "file_mib", "write_seconds", "ari"} for r in rows)
    assert all(r["ari"] > 0.99 and 0 < r["seconds"] < 60 and (r["peak_mib"] or 0) < 2048 for r in rows)
    assert slope(rows) < 1.5
    assert json.loads((tmp_path / "scale.json").read_text()) == rows
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")
