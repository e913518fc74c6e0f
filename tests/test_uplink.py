"""What happens to a reply between a client and the server's sum."""

import tomllib

import pytest
import torch

import coterie as ct
from coterie.cli.main import main
from coterie.core.pytree import flat, tree_map
from coterie.core.step import Reply
from coterie.engines import ENGINES
from coterie.runs import folder
from coterie.runs.config import build_uplink

ALGORITHM = ct.IFCA(3, tau=3, init="random")


def run_of(task, federation, **options):
    return ct.fit(ALGORITHM, task, federation, **{"rounds": 1, "device": "cpu", **options})


def test_quantised_replies_change_the_result_a_little(task, ragged):
    plain, coarse, fine = (
        flat(run_of(task, ragged, uplink=uplink).state.theta)
        for uplink in ((), [ct.Quantise(bits=4)], [ct.Quantise(bits=12)])
    )
    assert 1e-3 < (plain - coarse).abs().max() < 0.5
    assert 0 < (plain - fine).abs().max() < 1e-3


@pytest.mark.parametrize("executor", [name for name in ENGINES if name != "sequential"])
def test_executors_agree_on_quantised_replies(executor, task, ragged):
    slow, fast = (run_of(task, ragged, uplink=[ct.Quantise(bits=8)], executor=e) for e in ("sequential", executor))
    assert torch.allclose(flat(slow.state.theta), flat(fast.state.theta), atol=1e-5)


def test_the_log_says_why_nothing_is_fused(task, ragged, tmp_path):
    for name, uplink in (("plain", []), ("quantised", [ct.Quantise()])):
        run_of(task, ragged, uplink=uplink, out=tmp_path / name)
        told = [e["message"] for e in folder.read_events(tmp_path / name) if e["event"] == "log"]
        said = "vectorised: IFCA.step: not fused: the uplink changes every reply"
        assert any(said in m for m in told) == bool(uplink)
        assert any("IFCA.step: fused" in m for m in told) != bool(uplink)


def test_transforms_are_applied_in_order_and_functions_will_do(task, ragged, tmp_path):
    def double(reply):
        return reply._replace(update=tree_map(lambda x: 2 * x, reply.update))

    def one_more(reply):
        return reply._replace(update=tree_map(lambda x: x + 1, reply.update))

    plain = run_of(task, ragged)
    changed = run_of(task, ragged, uplink=[double, one_more], out=tmp_path / "run")
    for j in set(plain.labels.tolist()):
        assert torch.allclose(flat(changed.state.theta)[0][j], 2 * flat(plain.state.theta)[0][j] + 1, atol=1e-4)
    config = folder.read_config(tmp_path / "run")
    assert config["run"]["uplink"] == [{"name": "double"}, {"name": "one_more"}]


@pytest.mark.parametrize("bits", [1, 3, 8])
def test_quantised_values_are_few_evenly_spaced_and_near(bits):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    found = ct.Quantise(bits=bits)(Reply({"w": x, "same": torch.full((5,), 0.1)})).update
    values = found["w"].unique()
    step = (x.max() - x.min()) / (2**bits - 1)
    assert len(values) <= 2**bits and (found["w"] - x).abs().max() <= step / 2 + 1e-6
    places = (values - x.min()) / step
    assert torch.allclose(places, places.round(), atol=1e-3)
    assert found["same"].tolist() == pytest.approx([0.1] * 5)


def test_a_run_with_an_uplink_resumes_to_the_same_bits(task, ragged, tmp_path):
    options = {"uplink": [ct.Quantise(bits=6)]}
    whole = run_of(task, ragged, rounds=4, **options)
    run_of(task, ragged, rounds=2, out=tmp_path / "run", **options)
    parts = run_of(task, ragged, rounds=4, out=tmp_path / "run", resume=True, **options)
    assert torch.equal(flat(whole.state.theta), flat(parts.state.theta))


CONFIG = """
[data]
name = "rotated_digits"
clients = 8
[task]
kind = "classifier"
model = { name = "linear", inputs = 64, outputs = 10 }
[algorithm]
name = "ifca"
k = 2
tau = 2
[run]
rounds = 2
UPLINK
"""


def test_an_uplink_from_a_configuration(tmp_path, monkeypatch):
    losses = []
    for name, line in (("plain", ""), ("coarse", 'uplink = [{ name = "quantise", bits = 4 }]')):
        (tmp_path / f"{name}.toml").write_text(CONFIG.replace("UPLINK", line))
        words = ["coterie", "run", str(tmp_path / f"{name}.toml"), "--out", str(tmp_path / name), "--device", "cpu"]
        monkeypatch.setattr("sys.argv", words)
        with pytest.raises(SystemExit) as done:
            main()
        assert not done.value.code
        losses.append([row["loss"] for row in folder.read_history(tmp_path / name)])
    assert losses[0] != losses[1]
    assert folder.read_config(tmp_path / "coarse")["run"]["uplink"] == [{"name": "quantise", "bits": 4}]


@pytest.mark.parametrize(
    ("uplink", "message"),
    [
        ([ct.Quantise], "such as Quantise.., got <class"),
        (["quantise"], "such as Quantise.., got 'quantise'"),
        ("quantise", "uplink must be a list .* got 'quantise'"),
        (ct.Quantise(), "uplink must be a list .* got Quantise"),
        ([ct.Quantise(bits=0)], "Quantise: bits must be at least 1, got 0"),
        ([ct.Quantise(bits=2.5)], "Quantise: bits must be a whole number, got 2.5"),
    ],
)
def test_what_is_no_uplink(uplink, message, task, ragged):
    with pytest.raises(ValueError, match=message):
        run_of(task, ragged, uplink=uplink)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('uplink = { name = "quantise" }', "uplink must be a list of tables"),
        ('uplink = "quantise"', "uplink must be a list of tables"),
        ('uplink = ["quantise"]', "must be a table with a name"),
        ('uplink = [{ name = "quantize" }]', "'quantize' is not known; did you mean 'quantise'"),
        ('uplink = [{ name = "quantise", bit = 3 }]', "did you mean 'bits'"),
        ('uplink = [{ name = "quantise", bits = 0 }]', "bits must be at least 1"),
        ("uplink = [{ bits = 4 }]", "needs a name"),
    ],
)
def test_configurations_that_are_no_uplink(line, message):
    with pytest.raises(ValueError, match=message):
        build_uplink(tomllib.loads(line)["uplink"])
