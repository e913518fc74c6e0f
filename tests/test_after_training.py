"""What a run offers once it is trained, what its folder holds, and how callbacks control it."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import coterie as ct

TASK = ct.Task.classifier(ct.models.MLP(64, 16, 10))


@pytest.fixture(scope="module")
def digits():
    return ct.data.rotated_digits(clients=12, seed=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs") / "run"


@pytest.fixture(scope="module")
def run(digits, folder):
    return ct.fit(ct.IFCA(k=4), TASK, digits, rounds=6, out=folder)


def own_net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10))


def test_a_known_client_is_predicted_by_its_clusters_model(run, digits):
    x, y = digits.test.client(3)
    found = run.predict(x, client=3)
    assert found.dtype == np.int64 and found.shape == (len(x),)
    assert float((found == y.numpy()).mean()) == pytest.approx(float(run.scores.per_client[3]))
    assert found.tolist() == run.module(int(run.labels[3]))(x).argmax(1).tolist()
    assert found.tolist() == run.predict(x.numpy(), client=np.int64(3)).tolist()


def test_a_new_client_is_placed_by_its_rows(run, digits):
    x, y = digits.train.client(5)
    assert run.predict(x, client=(x, y)).tolist() == run.predict(x, client=5).tolist()


def test_without_a_client_the_models_are_mixed_by_their_shares(run, digits):
    x, _ = digits.test.client(0)
    found = run.predict(x, probabilities=True)
    shares = np.bincount(run.labels, minlength=4) / len(run.labels)
    each = [run.module(j)(x).softmax(-1).detach().numpy() for j in range(4)]
    assert np.allclose(found, sum(s * e for s, e in zip(shares, each, strict=True)), atol=1e-5)
    assert run.predict(x).tolist() == found.argmax(1).tolist()


def test_a_regressor_predicts_values():
    federation = ct.data.linear_mixture(clients=8, rows=20, features=3)
    run = ct.fit(ct.IFCA(k=2, lr=0.05), ct.Task.regressor(ct.models.Linear(3, 1)), federation, rounds=3)
    x, _ = federation.train.client(0)
    assert np.allclose(run.predict(x, client=0), run.module(client=0)(x).detach().numpy())
    with pytest.raises(ValueError, match="only a classifier has probabilities"):
        run.predict(x, probabilities=True)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda r, x: r.predict(x, client=12), "there is no client 12; they are 0 to 11"),
        (lambda r, x: r.predict(x, client="oslo"), "there is no client 'oslo'"),
        (lambda r, x: r.predict(x, client=3.5), "client must be a name, a position, or a pair"),
        (lambda r, x: r.predict(x[..., :5], client=0), "predict: MLP does not take rows of shape (1, 8, 5)"),
        (lambda r, x: r.module(), "give a cluster, such as run.module(0)"),
        (lambda r, x: r.module(4), "cluster must be a whole number from 0 to 3, got 4"),
        (lambda r, x: r.module(0, client=1), "give a cluster"),
    ],
)
def test_what_is_asked_for_wrongly_is_told_in_one_line(run, digits, ask, message):
    with pytest.raises(ValueError) as error:
        ask(run, digits.test.client(0)[0])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_frame_has_a_row_per_client(run, digits):
    frame = run.to_frame()
    assert list(frame) == ["client", "cluster", "score", "margin", "rows"] and len(frame) == 12
    assert frame["cluster"].tolist() == run.labels.tolist()
    assert frame["rows"].tolist() == digits.train.sizes.tolist()
    i, j = 7, int(run.labels[7])
    x, y = digits.train.client(i)
    losses = [float(nn.functional.cross_entropy(run.module(c)(x), y).detach()) for c in range(4)]
    best = min(loss for c, loss in enumerate(losses) if c != j)
    assert frame["margin"][i] == pytest.approx(best - losses[j], abs=1e-4)


@pytest.mark.parametrize("method", [ct.FedAvg(), ct.LocalOnly()])
def test_where_there_is_no_other_cluster_there_is_no_margin(digits, method):
    assert ct.fit(method, TASK, digits, rounds=1).to_frame()["margin"].isna().all()


def test_a_run_is_loaded_without_its_data(run, folder, digits):
    again = ct.load(folder)
    assert again.to_frame().equals(run.to_frame())
    assert (again.score, again.ari, again.history) == (run.score, run.ari, run.history)
    assert repr(again) == repr(run)
    x, y = digits.test.client(2)
    assert again.predict(x, client=2).tolist() == run.predict(x, client=2).tolist()
    assert again.assign(x, y) == run.assign(x, y)
    for own, other in zip(again.models, run.models, strict=True):
        assert all(torch.equal(own[n], other[n]) for n in own)
    with pytest.raises(ValueError, match="was loaded without its clients' rows"):
        again.evaluate()


def test_a_module_of_the_users_is_given_with_its_task(digits, tmp_path):
    net, out = own_net(), tmp_path / "run"
    task = ct.Task.classifier(net, batch_norm="local")
    run = ct.fit(ct.IFCA(k=2, lr_schedule=lambda t: 0.9**t), task, digits, rounds=2, out=out)
    x, _ = digits.test.client(0)
    bare = ct.load(out)
    net.load_state_dict(bare.models[1])
    with pytest.raises(ValueError, match=r"load it with its task, ct.load\(folder, task="):
        bare.predict(x, client=0)
    again = ct.load(out, task=task)
    assert again.predict(x, client=0).tolist() == run.predict(x, client=0).tolist()
    assert torch.equal(again.module(client=1)[2].running_mean, run.module(client=1)[2].running_mean)
    with pytest.raises(ValueError, match="was made with another model"):
        ct.load(out, task=TASK)


def test_each_cluster_has_a_file_that_load_state_dict_takes(digits, tmp_path):
    net, out = own_net(), tmp_path / "run"
    net[1].weight.requires_grad_(False)
    run = ct.fit(ct.IFCA(k=3), ct.Task.classifier(net), digits, rounds=2, out=out)
    files = sorted((out / "final").glob("*.safetensors"))
    assert [f.name for f in files] == ["cluster-0.safetensors", "cluster-1.safetensors", "cluster-2.safetensors"]
    x, _ = digits.test.client(0)
    for j, file in enumerate(files):
        net.load_state_dict(load_file(file))
        assert torch.equal(net.eval()(x), run.module(j)(x))


@pytest.mark.parametrize("method", [ct.CFL(), ct.LocalOnly(), ct.UIFCA(k=2), ct.KFED(k=2)])
def test_every_kind_of_run_is_loaded(method, digits, tmp_path):
    points = method.needs.points
    data = ct.data.gaussian_clusters(k=2, clients=4, points=80, d=2) if points else digits
    task = ct.Task.density(ct.models.AffineFlow(2)) if isinstance(method, ct.UIFCA) else None if points else TASK
    run = ct.fit(method, task, data, rounds=2, out=tmp_path / "run")
    again = ct.load(tmp_path / "run")
    assert again.score == pytest.approx(run.score) and again.ari == run.ari
    assert again.labels.tolist() == run.labels.tolist() and repr(again) == repr(run)


# --- the run folder knows what it was made from ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda fed: (TASK, fed.map(lambda i, x, y: (x + 5, y))), "was made with other data: clients' rows differ"),
        (lambda fed: (TASK, fed.map(lambda i, x, y: (x, y.roll(1)))), "was made with other data"),
        (lambda fed: (TASK, replace(fed, ids=tuple("abcdefghijkl"))), "was made with other clients"),
        (lambda fed: (ct.Task.classifier(own_net()), fed), "was made with another model"),
    ],
)
def test_a_run_is_resumed_only_with_the_same_data_and_model(digits, tmp_path, other, message):
    plain = ct.Federation(digits.train, digits.test, digits.groups)
    net = ct.Task.classifier(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    ct.fit(ct.FedAvg(), net, plain, rounds=2, out=tmp_path / "run")
    task, federation = other(plain)
    task = net if task is TASK else task
    with pytest.raises(ValueError, match=message):
        ct.fit(ct.FedAvg(), task, federation, rounds=3, out=tmp_path / "run", resume=True)
    assert len(ct.fit(ct.FedAvg(), net, plain, rounds=3, out=tmp_path / "run", resume=True).history) == 3


def test_overwriting_replaces_a_run_and_a_failure_leaves_it(digits, tmp_path):
    out = tmp_path / "run"
    ct.fit(ct.FedAvg(), TASK, digits, rounds=1, out=out)
    with pytest.raises(ValueError, match="already holds a run"):
        ct.fit(ct.FedAvg(), TASK, digits, rounds=2, out=out)
    with pytest.raises(ValueError, match="k must be at most"):
        ct.fit(ct.IFCA(k=99), TASK, digits, rounds=2, out=out, overwrite=True)
    assert len(ct.load(out).history) == 1
    ct.fit(ct.FedAvg(), TASK, digits, rounds=2, out=out, overwrite=True)
    assert len(ct.load(out).history) == 2
    with pytest.raises(ValueError, match="give one of them"):
        ct.fit(ct.FedAvg(), TASK, digits, rounds=2, out=out, overwrite=True, resume=True)


# --- callbacks ------------------------------------------------------------------------------------------------------


def test_a_callback_sees_the_run_so_far_and_may_end_it(digits, tmp_path):
    seen = []

    def stop(row, run):
        seen.append((row["round"], len(run.history), run.labels.tolist(), run.score))
        return row["round"] == 3

    run = ct.fit(ct.IFCA(k=2), TASK, digits, rounds=9, callbacks=[stop], out=tmp_path / "run")
    assert [s[:2] for s in seen] == [(1, 1), (2, 2), (3, 3)]
    assert seen[-1][2:] == (run.labels.tolist(), run.score) and len(run.history) == 3
    assert len(ct.load(tmp_path / "run").history) == 3
    whole = ct.fit(ct.IFCA(k=2), TASK, digits, rounds=5)
    on = ct.fit(ct.IFCA(k=2), TASK, digits, rounds=5, out=tmp_path / "run", resume=True)
    assert all(torch.equal(on.models[0][n], whole.models[0][n]) for n in whole.models[0])


@pytest.mark.parametrize("bad", [lambda row: None, "print", [3], ct.callbacks.EarlyStopping])
def test_what_is_no_callback_is_refused(digits, bad):
    with pytest.raises(ValueError, match="callbacks must be a list of functions of a row of the history and the run"):
        ct.fit(ct.FedAvg(), TASK, digits, rounds=1, callbacks=bad if isinstance(bad, list | str) else [bad])


def test_early_stopping_goes_by_the_history(digits, tmp_path):
    stop = ct.callbacks.EarlyStopping("loss", patience=2, delta=math.inf)
    run = ct.fit(ct.FedAvg(), TASK, digits, rounds=9, callbacks=[stop], out=tmp_path / "run")
    assert len(run.history) == 3  # the first is the best, two more are not better
    never = ct.callbacks.EarlyStopping("accuracy", patience=9)
    assert len(ct.fit(ct.FedAvg(), TASK, digits, rounds=4, callbacks=[never]).history) == 4
    with pytest.raises(ValueError, match="the history has no column 'acuracy'"):
        ct.fit(ct.FedAvg(), TASK, digits, rounds=4, callbacks=[ct.callbacks.EarlyStopping("acuracy")])


def test_more_is_better_of_accuracy_and_less_of_the_loss():
    class Run:
        history = [{"accuracy": a, "loss": b} for a, b in ((0.5, 1.0), (0.7, 0.8), (0.6, 0.9), (0.6, 0.9))]

    row = Run.history[-1]
    for watch in ("accuracy", "loss"):
        assert ct.callbacks.EarlyStopping(watch, patience=2)(row, Run())
        assert not ct.callbacks.EarlyStopping(watch, patience=3)(row, Run())
    assert ct.callbacks.EarlyStopping("accuracy", patience=3, mode="min")(row, Run())


@pytest.mark.parametrize("each", ["run", "cluster"])
def test_the_best_models_are_kept(digits, tmp_path, each):
    kept, rounds = tmp_path / "best", []

    def watch(row, run):
        rounds.append((row, run.models))

    best = ct.callbacks.Checkpoint(kept, each=each)
    ct.fit(ct.IFCA(k=3, lr=0.5), TASK, digits, rounds=8, callbacks=[watch, best])
    told = json.loads((kept / "best.json").read_text())
    for j in range(3):
        score = [row["per_cluster"][j] if each == "cluster" else row["accuracy"] for row, _ in rounds]
        top = next(t for t, s in enumerate(score) if s == max(v for v in score if v is not None))
        assert told[j] == {"round": top + 1, "accuracy": score[top]}
        found = load_file(kept / f"cluster-{j}.safetensors")
        assert all(torch.equal(found[n], rounds[top][1][j][n]) for n in found)


@pytest.mark.parametrize("each", ["run", "cluster"])
def test_the_best_models_are_kept_when_clusters_are_split(tmp_path, each):
    """By hand: two rounds with one cluster, then two with two, the first of which is the best."""
    models = [{"w": torch.tensor([float(t)])} for t in range(4)]

    class Run:
        task = TASK

        def __init__(self, t):
            self.models, self.history = [models[t]] * (1 if t < 2 else 2), []

    rows = [(0.5, [0.5]), (0.7, [0.7]), (0.8, [0.9, 0.7]), (0.6, [0.4, 0.8])]
    keep = ct.callbacks.Checkpoint(tmp_path / "best", each=each)
    for t, (score, per_cluster) in enumerate(rows):
        keep({"round": t + 1, "accuracy": score, "per_cluster": per_cluster}, Run(t))
    told = json.loads((tmp_path / "best" / "best.json").read_text())
    assert [own["round"] for own in told] == ([3, 3] if each == "run" else [3, 4])
    found = [float(load_file(tmp_path / "best" / f"cluster-{j}.safetensors")["w"]) for j in range(2)]
    assert found == ([2.0, 2.0] if each == "run" else [2.0, 3.0])


def test_a_callback_may_answer_with_numpys_or_torchs_true(digits):
    for answer in (np.True_, torch.tensor(True)):
        run = ct.fit(ct.FedAvg(), TASK, digits, rounds=3, callbacks=[lambda row, run, answer=answer: answer])
        assert len(run.history) == 1


def test_a_module_is_no_task_to_load_with(tmp_path):
    with pytest.raises(ValueError, match=r"load: task must be a Task, such as Task.classifier\(module\)"):
        ct.load(tmp_path, task=nn.Linear(2, 2))
