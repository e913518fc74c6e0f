"""Experiment trackers, each with its real package writing to disk, and callbacks in configurations."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
import wandb
from mlflow import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

import coterie as ct
from coterie.callbacks import trackers
from coterie.runs.config import build_callbacks

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")  # MLflow's database

CONFIG = """
[algorithm]
name = "ifca"
k = 2

[task]
model = { name = "mlp", sizes = [64, 8, 10] }

[data]
name = "rotated_digits"
clients = 8

[run]
rounds = 4
"""


class Interrupt:
    """A callback by which a run is interrupted after a round."""

    def __init__(self, after):
        self.after = after

    def __call__(self, row, run):
        if row["round"] == self.after:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def digits():
    return ct.data.rotated_digits(clients=8)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_SILENT", "true")


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """MLflow takes over a second to make one."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


class Read:
    """What each tracker has on disk: settings, [(round, value)] by name, and the result by name."""

    @staticmethod
    def mlflow(database, experiment):
        client = MlflowClient(database)
        (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
        rows = {n: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, n)] for n in run.data.metrics}
        assert run.info.status == "FINISHED"
        return run.data.params, rows, {n: v for n, v in run.data.metrics.items() if n.startswith("final/")}

    @staticmethod
    def tensorboard(folder):
        events = EventAccumulator(str(folder))
        events.Reload()
        rows = {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}
        (text,) = events.Tensors("settings/text_summary")
        lines = re.findall(r"^\| (.*?) \| (.*) \|$", text.tensor_proto.string_val[0].decode(), re.MULTILINE)
        return dict(lines), rows, {n: each[-1][1] for n, each in rows.items() if n.startswith("final/")}

    @staticmethod
    def wandb(folder):
        settings, rows, final, ids = {}, {}, {}, set()
        for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
            for record in records(file):
                ids |= {record.run.run_id} - {""}
                settings |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
                for item in record.history.item:
                    name = item.key or ".".join(item.nested_key)
                    rows.setdefault(name, []).append((record.history.step.num, json.loads(item.value_json)))
                final |= {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.summary.update}
        assert len(ids) == 1
        return settings, rows, final


def records(file):
    """The records of a .wandb file: LevelDB's log format, in blocks of 32 KiB."""
    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # all of a record, or its end
            yield Record.FromString(whole)
            whole = b""


def tracker_of(kind, tmp_path, database):
    """A tracker, and what reads what it has written."""
    if kind == "mlflow":
        return ct.callbacks.MLflow(database, tmp_path.name), lambda: Read.mlflow(database, tmp_path.name)
    if kind == "tensorboard":
        return ct.callbacks.TensorBoard(), lambda: Read.tensorboard(tmp_path / "run" / "tensorboard")
    return ct.callbacks.WandB(), lambda: Read.wandb(tmp_path / "run")


KINDS = pytest.mark.parametrize("kind", ["mlflow", "tensorboard", "wandb"])


@KINDS
@pytest.mark.parametrize("resumed", [False, True])
def test_settings_rounds_and_result_are_logged_once(kind, resumed, digits, task, tmp_path, database):
    tracker, read = tracker_of(kind, tmp_path, database)
    out = tmp_path / "run"
    if resumed:
        with pytest.raises(KeyboardInterrupt):
            ct.fit(ct.IFCA(k=2), task, digits, rounds=4, seed=3, out=out, callbacks=[tracker, Interrupt(after=2)])
        again = tracker_of(kind, tmp_path, database)[0]
        for _ in range(2):  # the second finds nothing left to do
            run = ct.fit(ct.IFCA(k=2), task, digits, rounds=4, seed=3, out=out, callbacks=[again], resume=True)
    else:
        run = ct.fit(ct.IFCA(k=2), task, digits, rounds=4, seed=3, out=out, callbacks=[tracker])

    settings, rows, final = read()
    told = {n: str(settings[n]) for n in ("algorithm.name", "algorithm.k", "run.rounds", "run.seed", "data.name")}
    assert list(told.values()) == ["ifca", "2", "4", "3", "rotated_digits"] and "task.kind" in settings
    for name in ("loss", "accuracy", "groups", "changed", "bytes_up", "bytes_down", "seconds"):
        steps, values = zip(*rows[name], strict=True)
        assert steps == (1, 2, 3, 4), name
        assert values == pytest.approx([row[name] for row in run.history]), name
    for j in range(2):
        scored = {row["round"]: v for row in run.history if (v := row["per_cluster"][j]) is not None}
        assert dict(rows.get(f"accuracy/cluster-{j}", [])) == pytest.approx(scored)
    assert final["final/accuracy"] == pytest.approx(run.accuracy) and final["final/ari"] == pytest.approx(run.ari)
    assert final["final/clusters"] == 2 and final["final/bytes_up"] == sum(row["bytes_up"] for row in run.history)
    if kind != "wandb":
        assert all(len(rows[name]) == 1 for name in final)


def test_a_round_that_a_resumed_run_does_again_is_not_logged_again(digits, task, tmp_path):
    """After a kill the newest checkpoint may be older than what is logged."""
    out, tracker = tmp_path / "run", ct.callbacks.TensorBoard()
    ct.fit(ct.IFCA(k=2), task, digits, rounds=4, out=out, callbacks=[tracker])
    for file in sorted((out / "checkpoints").iterdir())[1:]:
        file.unlink()
    (first,) = (out / "checkpoints").iterdir()
    assert first.stem < "round-000004"
    ct.fit(ct.IFCA(k=2), task, digits, rounds=5, out=out, callbacks=[tracker], resume=True)
    rows = Read.tensorboard(out / "tensorboard")[1]
    assert [step for step, _ in rows["loss"]] == [1, 2, 3, 4, 5]
    assert [step for step, _ in rows["final/accuracy"]] == [4, 5]


def test_a_tracker_that_comes_later_logs_the_rounds_before(digits, task, tmp_path):
    out = tmp_path / "run"
    ct.fit(ct.FedAvg(), task, digits, rounds=2, out=out)
    ct.fit(ct.FedAvg(), task, digits, rounds=3, out=out, callbacks=[ct.callbacks.TensorBoard()], resume=True)
    assert [step for step, _ in Read.tensorboard(out / "tensorboard")[1]["loss"]] == [1, 2, 3]


def test_one_tracker_follows_several_runs_without_a_folder(digits, task, tmp_path, database):
    tracker, client = ct.callbacks.MLflow(database, "several"), MlflowClient(database)
    for _ in range(2):
        ct.fit(ct.FedAvg(), task, digits, rounds=2, callbacks=[tracker])
    found = client.search_runs([client.get_experiment_by_name("several").experiment_id])
    assert [run.info.run_name for run in found] == ["FedAvg", "FedAvg"]
    assert all(len(client.get_metric_history(run.info.run_id, "loss")) == 2 for run in found)


def test_a_run_that_fails_is_marked_so(digits, task, database):
    with pytest.raises(KeyboardInterrupt):
        ct.fit(ct.FedAvg(), task, digits, rounds=2, callbacks=[ct.callbacks.MLflow(database, "bad"), Interrupt(1)])
    client = MlflowClient(database)
    (run,) = client.search_runs([client.get_experiment_by_name("bad").experiment_id])
    assert run.info.status == "FAILED" and "final/accuracy" not in run.data.metrics


def test_a_run_of_the_users_own_goes_on(digits, task, tmp_path):
    with wandb.init(mode="offline", dir=tmp_path) as own:
        ct.fit(ct.FedAvg(), task, digits, rounds=1, callbacks=[ct.callbacks.WandB(folder=tmp_path / "ours")])
        assert wandb.run is own
        own.log({"mine": 1.0})
    assert list(Read.wandb(tmp_path / "ours")[1]["loss"]) and "mine" not in Read.wandb(tmp_path / "ours")[1]


def test_a_password_in_an_address_is_not_written_down():
    tracker = ct.callbacks.MLflow("sqlite:///secret.db")
    assert "secret" not in tracker._name() and tracker._name() != ct.callbacks.MLflow()._name()


@KINDS
def test_a_missing_package_is_told_in_one_line(kind, monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None if name == kind else find_spec(name))
    line = rf"needs the package {kind}: pip install 'coterie\[{kind}\]'$"
    with pytest.raises(ValueError, match=line):
        build_callbacks([{"name": kind}])


def test_no_package_is_imported_before_a_run():
    code = """if True:
        import sys, coterie as ct
        ct.callbacks.MLflow(), ct.callbacks.TensorBoard(), ct.callbacks.WandB()
        sys.exit(str({"mlflow", "tensorboard", "wandb"} & set(sys.modules) or ""))
    """
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr.strip() == ""


@pytest.mark.parametrize("make", [ct.callbacks.TensorBoard, ct.callbacks.Checkpoint])
def test_a_folder_is_needed_where_there_is_no_run_folder(make, digits, task):
    with pytest.raises(ValueError, match="folder must be given where fit is given no out folder"):
        ct.fit(ct.FedAvg(), task, digits, rounds=1, callbacks=[make()])


def test_an_address_that_mlflow_refuses_is_told_in_one_line(digits, task):
    with pytest.raises(ValueError, match=r"^MLflow: .+$"):
        ct.fit(ct.FedAvg(), task, digits, rounds=1, callbacks=[ct.callbacks.MLflow("nonsense://x")])


# --- configurations -------------------------------------------------------------------------------------------------


def callbacks(*names, **settings):
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
    return "".join(f'\n[[callbacks]]\nname = "{name}"\n{lines}' for name in names)


def test_a_configuration_has_callbacks_which_a_resumed_run_may_change(coterie, tmp_path):
    config, out = tmp_path / "ifca.toml", tmp_path / "run"
    stop = callbacks("early_stopping", watch="loss", patience=1, delta=100.0)
    config.write_text(CONFIG + stop + callbacks("checkpoint", "tensorboard"))
    code, text, errors = coterie("run", config, "--out", out, "--json")
    assert code == 0, errors
    assert json.loads(text)["rounds"] == 2  # a loss that is 100 less there will not be
    assert (out / "best" / "best.json").is_file() and "callbacks" not in (out / "config.toml").read_text()
    config.write_text(CONFIG + callbacks("tensorboard"))
    code, text, errors = coterie("run", config, "--out", out, "--resume", "--json")
    assert code == 0 and json.loads(text)["rounds"] == 4, errors
    assert [step for step, _ in Read.tensorboard(out / "tensorboard")[1]["loss"]] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("added", "message"),
    [
        (callbacks("early_stoping"), "[[callbacks]] 'early_stoping' is not known; did you mean 'early_stopping'?"),
        (callbacks("early_stopping", pacience=3), "[[callbacks]] has no key 'pacience'; did you mean 'patience'?"),
        (callbacks("early_stopping", patience=0), "EarlyStopping: patience must be at least 1, got 0"),
        (callbacks("checkpoint", keep="all"), "Checkpoint: keep must be 'best' or 'last', got 'all'"),
        (callbacks("wandb", offline=1), "WandB: offline must be true or false, got 1"),
        ("\n[[callbacks]]\npatience = 2\n", "[[callbacks]] needs a name"),
        ('\n[callbacks]\nname = "wandb"\n', "callbacks must be a list of tables, each under [[callbacks]]"),
    ],
)
def test_wrong_callbacks_are_told_in_one_line(coterie, tmp_path, added, message):
    (tmp_path / "bad.toml").write_text(CONFIG + added)
    code, _, errors = coterie("run", tmp_path / "bad.toml", "--out", tmp_path / "run")
    assert (code, errors.count("\n")) == (2, 1) and message in errors
    assert not (tmp_path / "run").exists()


def test_the_runs_of_a_sweep_have_callbacks_of_their_own(coterie, tmp_path):
    config, out = tmp_path / "ifca.toml", tmp_path / "sweep"
    sweep = ("sweep", config, "--seeds", "2", "--jobs", "2", "--out", out, "--json")
    config.write_text(CONFIG + callbacks("checkpoint", folder="best"))
    code, _, errors = coterie(*sweep)
    assert (code, errors.count("\n")) == (2, 1) and "all runs of a sweep would write to the folder 'best'" in errors
    config.write_text(CONFIG + callbacks("tensorboard"))
    assert coterie(*sweep)[0] == 0
    for run in ("seed=0", "seed=1"):
        assert len(Read.tensorboard(out / run / "tensorboard")[1]["loss"]) == 4
    config.write_text(CONFIG)  # the same sweep
    assert coterie(*sweep)[0] == 0


def test_the_list_has_callbacks(coterie):
    found = json.loads(coterie("list", "--json")[1])["callbacks"]
    assert {
        "checkpoint",
        "early_stopping",
        "mlflow",
        "tensorboard",
        "wandb",
    } <= found.keys()  # and those of other tests
