"""What runs and federations show of themselves: progress, reprs, pictures."""

import io
import sys
import tracemalloc

import numpy as np
import pytest
import torch

import coterie as ct
from coterie import testing
from coterie.core.card import Card
from coterie.runs import plots
from coterie.runs.view import View

TASK = ct.Task.classifier(ct.models.MLP(64, 8, 10))


@pytest.fixture(scope="module")
def digits():
    return ct.data.rotated_digits(clients=16, seed=0)


@pytest.fixture(scope="module")
def run(digits, tmp_path_factory):
    return ct.fit(ct.IFCA(k=2, tau=3), TASK, digits, rounds=4, out=tmp_path_factory.mktemp("runs") / "<first>")


@pytest.fixture(scope="module")
def tree_run(tmp_path_factory):
    task, federation = ct.Task.regressor(ct.models.Linear(4, 1)), testing.regressions()
    split = ct.CFL(schedule=(5, 20), holdout=0.0)
    return ct.fit(split, task, federation, rounds=30, out=tmp_path_factory.mktemp("runs") / "cfl")


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True

    @property
    def screen(self):
        """The lines that stay: of what was written over in place only the last."""
        return [line.rstrip("\r").split("\r")[-1].rstrip() for line in self.getvalue().split("\n")]


def on_terminal(monkeypatch):
    """Standard error is a terminal from now on. No fixture: pytest sets it anew before the test itself."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def test_progress_is_one_line_of_a_terminal(monkeypatch, digits):
    terminal = on_terminal(monkeypatch)
    ct.fit(ct.IFCA(2), TASK, digits, rounds=3)
    assert len(terminal.screen) == 2 and terminal.screen[1] == ""
    line = terminal.screen[0]
    assert line.startswith("IFCA |") and "round 3/3, loss " in line, line
    assert all(word in line for word in (", accuracy 0.", " groups, cpu ["))


def test_piped_output_has_no_progress(capfd, digits):
    ct.fit(ct.IFCA(2), TASK, digits, rounds=3)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError("bad"), ConnectionError("gone")])
def test_progress_ends_its_line_when_a_run_fails(monkeypatch, digits, error):
    terminal = on_terminal(monkeypatch)

    def fail(row, run):
        if row["round"] == 2:
            raise error

    with pytest.raises(type(error) if isinstance(error, Exception) else error):
        ct.fit(ct.IFCA(2), TASK, digits, rounds=4, callbacks=[fail])
    assert "round 2/4" in terminal.screen[0] and terminal.screen[0].endswith("]")
    said = terminal.screen[1:-1]
    assert terminal.screen[-1] == "" and len(said) == (not isinstance(error, ValueError))
    assert all(line.startswith("interrupted after round 2 of 4; nothing was kept") for line in said)


def test_a_run_that_cannot_begin_leaves_no_bar(monkeypatch, digits):
    terminal = on_terminal(monkeypatch)
    with pytest.raises(ValueError, match="at most the number of clients"):
        ct.fit(ct.IFCA(17), TASK, digits, rounds=4)
    assert terminal.screen == [""]


def test_a_run_that_needs_fewer_rounds_says_so(monkeypatch):
    terminal = on_terminal(monkeypatch)
    points = testing.points()
    run = ct.fit(
        ct.UIFCA(3, restarts=1), ct.Task.density(ct.models.AffineFlow(points.train.x.shape[1])), points, rounds=60
    )
    done = len(run.history)
    assert done < 60 and f"round {done}/{done}, " in terminal.screen[0] and "done early" in terminal.screen[0]


def test_a_resumed_run_shows_its_round(monkeypatch, digits, tmp_path):
    terminal = on_terminal(monkeypatch)
    for rounds in (2, 4):
        ct.fit(ct.IFCA(2), TASK, digits, rounds=rounds, out=tmp_path / "run", resume=rounds == 4)
    assert "round 4/4" in terminal.screen[1] and "done early" not in terminal.getvalue()


def test_what_callbacks_write_has_lines_of_its_own(monkeypatch, digits):
    terminal = on_terminal(monkeypatch)
    ct.fit(ct.IFCA(2), TASK, digits, rounds=3, callbacks=[lambda row, run: terminal.write(f"hello {row['round']}\n")])
    assert terminal.screen[:3] == ["hello 1", "hello 2", "hello 3"] and "round 3/3" in terminal.screen[3]


def test_the_repr_of_a_run(run):
    lines = repr(run).splitlines()
    assert lines[0] == "Run of IFCA(tau=3, k=2)" and len(lines) < 12
    assert f"  accuracy   {run.accuracy:.4f}, mean over 16 clients" in lines and f"  ARI        {run.ari:.3f}" in lines
    assert "  rounds     4 on cpu" in lines and f"  folder     {run.path}" in lines
    for j, n in enumerate(np.bincount(run.labels)):
        score = run.scores.per_cluster[j]
        assert f"  cluster {j}  {n} client{'s' * bool(n > 1)}, accuracy {score:.4f}" in lines


def test_html_escapes_names(run):
    assert "<first>" in repr(run) and "&lt;first&gt;" in run._repr_html_() and "<first>" not in run._repr_html_()
    named = ct.Federation.from_clients([(torch.zeros(2, 1), torch.zeros(2))], ids=["<b>Ann</b>"])
    assert "<b>Ann</b>" in repr(named) and "&lt;b&gt;Ann&lt;/b&gt;" in named._repr_html_()
    assert "http" not in run._repr_html_() + named._repr_html_()


def test_many_clusters_are_not_all_listed(digits):
    shown = repr(ct.fit(ct.LocalOnly(), TASK, digits, rounds=1))
    assert shown.count("\n  cluster ") == 8 and "8 more clusters" in shown


def test_the_repr_of_points_and_of_a_secure_sum(digits):
    points = testing.points()
    grouped = ct.fit(ct.KFED(3), None, points, rounds=1)
    members = [int(line.split()[2]) for line in repr(grouped).splitlines() if line.startswith("  cluster")]
    assert sum(members) == len(points.train.x) and " points" in repr(grouped)
    secure = ct.fit(ct.IFCA(2, init="random"), TASK, digits, rounds=1, secure=ct.SecureSum())
    members = [int(line.split()[2]) for line in repr(secure).splitlines() if line.startswith("  cluster")]
    assert sum(members) == 16


def test_models_to_start_from_are_not_printed(digits):
    models = [TASK.init(ct.core.key.Key.of(i)) for i in range(2)]
    assert repr(ct.fit(ct.IFCA(2, init=models), TASK, digits, rounds=1)).startswith("Run of IFCA(k=2, init=…)\n")


def test_the_repr_of_a_federation(digits):
    assert repr(digits).splitlines() == [
        "Federation of 16 clients (rotated_digits)",
        f"  train        {len(digits.train.x):,} rows, 359 to 360 per client, median 359",
        "  test         1,440 rows, 90 per client",
        "  a row        float32, shape (1, 8, 8)",
        "  targets      int64, 10 classes from 0 to 9 (256 rows looked at)",
        "  true groups  4, of 4 clients each",
        "  names        none; clients are numbered from 0",
    ]


@pytest.mark.parametrize(
    ("y", "expected"),
    [
        (torch.tensor([0.5, -2.25, 7.0]), "float32, from -2.25 to 7"),
        (torch.tensor([0, 0, 2]), "int64, 2 classes from 0 to 2"),
        (torch.tensor([[1, 2], [3, 4], [0, 9]]), "int64, shape (2,), from 0 to 9"),
        (None, "not known"),
    ],
)
def test_the_targets_of_a_federation(y, expected):
    federation = ct.Federation.from_clients([(torch.zeros(3, 1), y)] * 7, ids=[f"{'long' * 9} {i}" for i in range(7)])
    lines = dict(line.strip().split("  ", 1) for line in repr(federation).splitlines()[1:])
    assert lines["targets"].strip() == expected and lines["true groups"] == "not known"
    assert lines["names"].strip().endswith("…, …") and len(lines["names"]) < 150


def test_a_federation_in_files_is_not_read_for_its_repr(tmp_path):
    n = 40_000
    federation = ct.Federation.create(tmp_path / "big", ((np.ones((n, 50), "f4"), np.arange(n) % 3) for _ in range(3)))
    tracemalloc.start()
    shown = repr(federation)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "120,000 rows, 40,000 per client" in shown and "3 classes from 0 to 2 (256 rows" in shown
    assert peak < 1_000_000, "numbers of all rows were held"


def test_a_card_is_a_table_in_a_notebook():
    assert Card("a", [("b", "c")]).html().count("<tr>") == 1


def test_plot_draws_the_score_and_every_cluster(run):
    from matplotlib import pyplot
    from matplotlib.figure import Figure

    given = Figure().subplots()
    assert run.plot(ax=given) is given and not pyplot.get_fignums()
    labels = [text.get_text() for text in given.get_legend().get_texts()]
    sizes = np.bincount(run.labels)
    assert labels == [f"cluster 0 ({sizes[0]})", f"cluster 1 ({sizes[1]})", "mean over clients"]
    lines = given.get_lines()
    assert [line.get_color() for line in lines[:2]] == [plots.colour(0), plots.colour(1)]
    assert list(lines[2].get_ydata()) == [row["accuracy"] for row in run.history]
    assert given.get_xlabel() == "round" and given.get_ylabel() == "accuracy" and "IFCA(" in given.get_title()
    own = run.plot()
    assert pyplot.get_fignums() == [own.figure.number]
    pyplot.close(own.figure)


def test_the_picture_of_a_run_has_one_colour_per_cluster(tree_run, monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(plots, "save", lambda fig, path: drawn.append(fig))
    plots.run(tmp_path / "x.png", tree_run.path)
    left, middle, right = drawn[0].axes
    assert drawn[0].get_suptitle().startswith("cfl on ") and "mse" in drawn[0].get_suptitle()
    assert left.get_xlabel() == middle.get_ylabel() == "round" and left.get_ylabel() == "mse" and left.get_legend()
    colours = {plots.colour(j) for j in range(len(tree_run.models))}
    assert len(colours) == len(tree_run.models) > 1
    assert colours <= {line.get_color() for line in left.get_lines()}
    assert colours <= {line.get_color() for line in middle.get_lines()}
    assert colours == {text.get_color() for text in right.texts}
    names = " ".join(text.get_text() for text in right.texts).replace(",", " ").split()
    assert sorted(map(int, names)) == list(range(40))


def test_many_clients_are_a_strip(run, monkeypatch):
    from matplotlib.figure import Figure

    monkeypatch.setattr(plots, "FEW", 4)
    axes = Figure().subplots()
    plots.who(axes, view := View.of(run.path))
    image = np.asarray(axes.images[0].get_array())
    order = np.argsort(view.groups, kind="stable")
    assert (image[..., 3].argmax(0) == run.labels[order]).all() and (image[..., 3].sum(0) == 1).all()


def test_colours_of_clusters_differ():
    assert len({plots.colour(j) for j in range(21)}) == 21 and plots.distinct(21) and not plots.distinct(22)
