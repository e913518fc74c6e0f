import json

import pytest
import torch
from typer.testing import CliRunner

import coterie as ct
from coterie.cli import bench_tables
from coterie.cli.main import app
from coterie.core.cohort import Cohort
from coterie.core.key import Key
from coterie.core.pytree import flat
from coterie.core.uplink import Uplink
from coterie.engines import find_engine
from coterie.models import MLP, Linear
from coterie_lab.bench import attacks, peers, scale, speed
from coterie_lab.bench.hostile import ATTACKS, Hostile, flipped, hostile_clients
from coterie_lab.bench.loop import loop_round
from coterie_lab.bench.peers import PEERS, Job, PeerFailed, time_peer
from coterie_lab.bench.speed import measure, product_rate
from coterie_lab.bench.workloads import Workload, gram_flops, grouped, linear


def test_every_way_gives_the_same_answer_and_absent_peers_are_named(monkeypatch, caplog):
    monkeypatch.setattr(peers, "find_spec", lambda module: None)
    monkeypatch.setattr(speed, "LARGE", {"cpu": 500})
    monkeypatch.setattr(speed, "WARM", 0)
    monkeypatch.setattr(speed, "ROUNDS", 1)
    rows = measure("cpu", quick=True)
    keys = {"workload", "way", "seconds", "loop_ratio", "floor_ratio", "peak_mib", "max_rel_diff", "other_labels"}
    assert all(set(r) == keys for r in rows)
    works = {r["workload"] for r in rows}
    ways = {"loop", "sequential", "vmap", "vectorised", "floor"}
    found = {w: {r["way"] for r in rows if r["workload"] == w} for w in works}
    frozen = [w for w in works if "frozen" in w]
    assert len(works) == 11 and len(frozen) == 1
    assert found == {w: {*ways, "vectorised, no features"} if w in frozen else ways for w in works}
    assert all(r["max_rel_diff"] < 1e-3 for r in rows if r["way"] != "floor")
    assert {r["other_labels"] for r in rows if r["way"] in ("sequential", "vmap", "vectorised")} == {0}
    assert caplog.messages == ["not installed: fedjax, pfl, flower (pip install 'coterie[bench]')"]


def test_some_workloads_are_timed_again_and_the_others_stay_in_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda module: None)
    monkeypatch.setattr(speed, "LARGE", {"cpu": 500})
    file = tmp_path / "speed-cpu.json"
    linear_rows = [{"workload": "FedAvg, 50 × 20, linear, d=20, τ=10", "way": "loop"}]
    file.write_text(json.dumps([*linear_rows, {"workload": "another", "way": "loop"}]))
    command = ["bench", "speed", "--quick", "--device", "cpu", "--out", str(tmp_path), "--only"]
    assert CliRunner().invoke(app, [*command, "linear"]).exit_code == 0
    rows = json.loads(file.read_text())
    assert rows[-1] == {"workload": "another", "way": "loop"}
    assert [r["way"] for r in rows[:-1]] == ["loop", "sequential", "vmap", "vectorised", "floor"]
    assert {r["workload"] for r in rows[:-1]} == {"FedAvg, 50 × 20, linear, d=20, τ=10"}
    with pytest.raises(ValueError, match="no workload on cpu has 'liner' in its name; they are: IFCA, 16 × 50"):
        measure("cpu", quick=True, only="liner")


def work(k):
    """A classifier for two groups of clients, or a regression that all share."""
    if k > 1:
        return Workload("classes", MLP(12, 8, 3), grouped(6, 5, 12, 3, groups=2), k, 10, 0.1, 1.0)
    return Workload("line", Linear(4, 1), linear(6, 5, 4), 1, 10, 0.02, 1.0)


@pytest.mark.parametrize(("name", "k"), [("fedjax", 2), ("fedjax", 1), ("pfl", 1), ("flower", 1)])
def test_a_peer_does_the_same_round(name, k):
    for module in PEERS[name].modules:
        pytest.importorskip(module)
    small = work(k)
    timing = speed._peers(small, [name])[name]
    clients = [small.federation.train.client(i) for i in range(len(small.federation))]
    start = speed._start(small, torch.device("cpu"))
    expected = loop_round(small.module, start, clients, small.lr, small.tau)
    assert not torch.allclose(flat(start), flat(expected), atol=1e-2)
    torch.testing.assert_close({n: timing.models[n] for n in expected}, expected, rtol=1e-5, atol=1e-6)
    assert timing.seconds > 0 and (timing.peak_mib is None or timing.peak_mib > 10)


def test_a_peer_that_fails_is_left_out_with_its_reason(monkeypatch, caplog):
    odd = Job(work(1).federation.train, {"weight": torch.zeros(1, 1, 4)}, {}, 0.1, 1)  # no bias; or no fedjax
    with pytest.raises(PeerFailed, match="Error: ") as failure:
        time_peer("fedjax", odd)

    def fail(name, job):
        raise failure.value

    monkeypatch.setattr(speed, "time_peer", fail)
    assert speed._peers(work(1), ["pfl"]) == {}
    assert caplog.messages == [f"line: pfl failed: {failure.value}"]


def test_only_a_peer_that_knows_clusters_is_asked_for_them(monkeypatch):
    monkeypatch.setattr(speed, "time_peer", lambda name, job: f"{name} {job.k}")
    assert speed._peers(work(2), ["fedjax", "pfl", "flower"]) == {"fedjax": "fedjax 2"}


def test_the_floor_counts_the_operations_of_the_papers_workload(monkeypatch):
    monkeypatch.setattr(speed, "LARGE", {"cpu": 500})
    assert 0.044e12 < gram_flops(480, 4) < 0.046e12
    assert gram_flops(480, 1, batch=10) < gram_flops(480, 1) / 1.3
    assert product_rate(torch.device("cpu")) > 1e9


def test_scale_is_told_as_a_list_and_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(scale, "QUICK", (1000, 4000))
    done = CliRunner().invoke(app, ["bench", "scale", "--quick", "--json", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert [r["clients"] for r in rows] == [1000, 4000]
    names = {"clients", "seconds", "effects_seconds", "peak_mib", "file_mib", "write_seconds", "ari"}
    assert all(set(r) == names for r in rows)
    assert all(r["ari"] > 0.99 and r["seconds"] > 0 and (r["peak_mib"] or 0) < 2048 for r in rows)
    assert json.loads((tmp_path / "scale.json").read_text()) == rows
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")


def test_bytes_of_a_secure_session(tmp_path):
    done = CliRunner().invoke(app, ["bench", "secure", "--quick", "--json", "--out", str(tmp_path)])
    rows = json.loads(done.stdout)
    assert json.loads((tmp_path / "secure.json").read_text()) == rows
    for row in rows:  # four rows of numbers and weights, their masks' shares and signatures on top
        assert 1 < row["up_kb"] / (4 * 8 * (row["numbers"] + 1) / 1000) < 1.4
    assert "clients" in CliRunner().invoke(app, ["bench", "secure", "--quick"]).stdout


def test_attacks_are_told_as_a_table_and_drawn(tmp_path, monkeypatch):
    for name, value in (("CLIENTS", 16), ("GROUPS", 1), ("ROUNDS", 4)):
        monkeypatch.setattr(attacks, name, value)
    done = CliRunner().invoke(app, ["bench", "attacks", "--quick", "--json", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert [(r["attack"], r["hostile"], r["rule"]) for r in rows] == [
        ("none", 0.0, "mean"),
        ("none", 0.0, "median"),
        ("sign × 10", 0.2, "mean"),
        ("sign × 10", 0.2, "median"),
    ]
    found = [r["accuracy"] for r in rows]
    assert found[2] < 0.5 < 0.8 < min(found[0], found[1], found[3])
    assert json.loads((tmp_path / "attacks.json").read_text()) == rows
    assert (tmp_path / "attacks.png").read_bytes().startswith(b"\x89PNG")
    with bench_tables.console.capture() as told:
        bench_tables.attacks(rows)
    assert "sign × 10" in told.get() and "20 %" in told.get()


def scene_of(engine, method, hostile, round=0):
    """What clients reply to a round of IFCA, honestly and under each attack."""
    cohort = Cohort(engine).at(round)
    state = method.start(engine.task, cohort, Key.of(1))
    exchange = cohort._exchange(method.step, method._broadcast(state), method.k, None)
    honest = engine.gather(exchange)
    return honest, {name: Hostile(engine, hostile, attack).gather(exchange) for name, attack in ATTACKS.items()}


def test_hostile_clients_do_what_their_attack_says_and_others_do_not():
    federation = ct.data.rotated_digits(clients=16, seed=0)
    engine = find_engine("vectorised")(
        federation, ct.Task.classifier(MLP(64, 8, 10)), Key.of(0), torch.device("cpu"), Uplink()
    )
    hostile = hostile_clients(federation, 0.25, Key.of(0))
    assert int(hostile.sum()) == 4
    method = ct.IFCA(2, init="random")
    honest, attacked = scene_of(engine, method, hostile)
    sent = flat(method.start(engine.task, Cohort(engine).at(0), Key.of(1)).theta, 2)[0]  # (k, d)
    plain = flat(honest.update, 2)[:, 0] - sent[honest.slot[:, 0]]
    for name, reply in attacked.items():
        moved = flat(reply.update, 2)[:, 0] - sent[honest.slot[:, 0]]
        torch.testing.assert_close(moved[~hostile], plain[~hostile], rtol=1e-4, atol=1e-6)
        if name == "sign × 10":
            torch.testing.assert_close(moved[hostile], -10 * plain[hostile], rtol=1e-3, atol=1e-5)
        if name == "noise":
            assert float(moved[hostile].std()) == pytest.approx(1, abs=0.1)
        if name == "a little":
            honest_mean = plain[~hostile & (honest.slot[:, 0] == honest.slot[hostile][0, 0])].mean(0)
            assert 0 < float((moved[hostile][0] - honest_mean).norm()) < float(plain[~hostile].norm(dim=1).max())
        if name in ("none", "flipped labels", "wrong cluster", "hostile start"):
            torch.testing.assert_close(moved, plain)
    assert ((attacked["wrong cluster"].slot != honest.slot).flatten() == hostile).all()
    labels = flipped(federation, hostile).train.y
    rows = hostile.repeat_interleave(federation.train.sizes)
    assert (labels[rows] == 9 - federation.train.y[rows]).all() and (labels[~rows] == federation.train.y[~rows]).all()
