import base64
import io
import json
import re
import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace

import matplotlib.image
import matplotlib.pyplot
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import coterie as ct
from coterie.cli.main import app
from coterie.report import body, page, write
from coterie.report.clients import contingency
from coterie.report.figures import of_run
from coterie.report.page import _plain_runs, facts
from coterie.report.rounds import _when_settled
from coterie.report.svg import legend
from coterie.report.trees import pixels
from coterie.runs.folder import read_history
from coterie.runs.timeline import settled, timeline
from coterie.runs.view import View

matplotlib.use("Agg")
HOSTILE = "<script>alert(1)</script>\x1b[2J" + "x" * 10_000


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Run folders: IFCA that moves clients about, one model for all, one each, and a tree."""
    at, task = tmp_path_factory.mktemp("runs"), ct.Task.classifier(ct.models.MLP(64, 16, 10))
    federation = ct.data.rotated_digits(clients=24, seed=0)
    methods = {
        "ifca": (ct.IFCA(4, init="random"), 6),
        "fedavg": (ct.FedAvg(), 6),
        "alone": (ct.LocalOnly(), 6),
        "cfl": (ct.CFL(), 25),
    }
    for name, (method, rounds) in methods.items():
        ct.fit(method, task, federation, rounds=rounds, seed=3, out=at / name)
    panel = ct.data.varying_regression(30, 20, 3, groups=2, seed=0)
    ct.fit(ct.MixedEffects(2), ct.Task.regressor(ct.models.Linear(3, 1)), panel, rounds=8, out=at / "effects")
    return at


def drawings(html):
    """Every SVG of a page, parsed."""
    return [ET.fromstring(text) for text in re.findall(r"<svg .*?</svg>", html, re.S)]


def names(view, *beside):
    return [figure.name for figure in of_run(view, beside)]


def test_the_history_says_where_every_client_is(runs):
    for name in ("ifca", "cfl", "fedavg"):
        view = View.of(runs / name)
        labels = timeline(view.history)
        assert (labels[-1] == np.array(view.result["labels"])).all()
        moved = (np.diff(labels[1:], axis=0) != 0).sum(1)
        assert moved.tolist() == [row["changed"] for row in view.history[1:]]


def test_a_resumed_run_tells_moves_as_one_that_was_not_stopped(runs, tmp_path):
    federation, task = ct.data.rotated_digits(clients=24, seed=0), ct.Task.classifier(ct.models.MLP(64, 16, 10))
    for rounds in (3, 6):
        ct.fit(
            ct.IFCA(4, init="random"), task, federation, rounds=rounds, seed=3, out=tmp_path / "r", resume=rounds > 3
        )
    assert [row["moved"] for row in read_history(tmp_path / "r")] == [
        row["moved"] for row in read_history(runs / "ifca")
    ]


def test_when_clients_settled():
    labels = np.array([[-1, -1, -1], [0, 1, 0], [0, 0, 0], [0, 1, 0]])
    assert settled(labels).tolist() == [1, 3, 1]


def test_a_run_has_the_figures_that_its_folder_has_values_for(runs):
    views = {name: View.of(runs / name) for name in ("ifca", "fedavg", "alone", "cfl", "effects")}
    found = names(views["ifca"], views["fedavg"], views["alone"])
    for name in ("score", "loss", "membership", "churn", "sizes", "groups", "certainty", "cost", "clients"):
        assert name in found
    assert found.count("gain-for-all") == found.count("gain-alone") == 1
    assert {"tree", "similarity"} <= set(names(views["cfl"])) and "tree" not in found
    assert {"coefficients", "effects"} <= set(names(views["effects"]))


def test_the_flow_has_every_client_in_every_column(runs):
    drawing = next(f.drawing for f in of_run(View.of(runs / "ifca")) if f.name == "membership")
    bars = [bar.attrib for bar in ET.fromstring(drawing).iter() if "data-round" in bar.attrib]
    rounds = {bar["data-round"] for bar in bars}
    assert rounds == {"1", "2", "3", "4", "5", "6"}
    for t in rounds:
        assert sum(int(bar["data-clients"]) for bar in bars if bar["data-round"] == t) == 24
    last = {int(b["data-cluster"]): int(b["data-clients"]) for b in bars if b["data-round"] == "6"}
    assert last == View.of(runs / "ifca").sizes


def test_the_picture_of_similarities_has_their_colours():
    data = base64.b64decode(pixels(np.array([[1.0, -1.0, 0.0]])).partition(",")[2])
    shown = matplotlib.image.imread(io.BytesIO(data), format="png")
    assert (shown[0, :, :3] * 255).round().astype(int).tolist() == [[209, 73, 91], [27, 108, 168], [255, 255, 255]]


def test_the_tree_says_why_a_node_was_split(runs):
    view = View.of(runs / "cfl")
    root = view.tree[0]
    gap = ((1 - root["cross"]) / 2) ** 0.5
    drawing = next(f.drawing for f in of_run(view) if f.name == "tree")
    chosen = re.search(r'<p id="node-0" data-node="0" class="chosen">(.*?)</p>', drawing)[1]
    assert f"α_cross, was {root['cross']:.3f}" in chosen and f"{gap:.3f}" in chosen
    mean, longest = root["norms"]
    assert 0 < mean < longest and f"length {mean:.3g}, the longest of a client {longest:.3g}" in chosen
    assert view.tree[1]["norms"] is None or view.tree[1]["children"]


def test_losses_are_told_of_each_cluster(runs):
    row = View.of(runs / "ifca").history[-1]
    weighted = sum(n * (loss or 0) for n, loss in zip(row["members"], row["loss_per_cluster"], strict=True))
    assert weighted / 24 == pytest.approx(row["loss"], rel=1e-5)


def test_a_chart_that_is_saved_has_its_legend(runs):
    drawing = next(f.drawing for f in of_run(View.of(runs / "ifca")) if f.name == "score")
    words = [text.text for text in ET.fromstring(drawing).iter() if text.get("class") == "key"]
    assert words == ["mean over clients", *(f"cluster {j}" for j in range(4))]


def test_the_legend_of_many_names_is_cut():
    keys, high = legend([("red", "x" * 100)] * 15, 280)
    words = [ET.fromstring(key).text for key in keys if "<text" in key]
    assert len(words) == 13 and words[-1] == "and 3 more" and len(words[0]) < 60 and high > 13 * 20


def test_points_are_called_points(tmp_path):
    task, data = ct.Task.density(ct.models.AffineFlow(32)), ct.data.subspace_clusters(k=2, p=0.5, seed=0)
    ct.fit(ct.UIFCA(k=2, restarts=1), task, data, rounds=2, out=tmp_path / "run")
    view = View.of(tmp_path / "run")
    figures = {figure.name: figure.drawing for figure in of_run(view)}
    assert ">points<" in figures["sizes"] and sum(view.sizes.values()) == len(data.train.x)
    assert contingency(view).counts.sum(0).tolist() == list(view.sizes.values())
    assert "points" in body([view]) and "points that moved" in figures.get("churn", "points that moved")


def test_coefficients_of_mixed_regression_have_the_errors_of_least_squares(tmp_path):
    data = ct.data.mixed_regression(k=2, d=3, pairs=30, rest=30, anchors=4, seed=0)
    task = ct.Task.regressor(ct.models.Linear(3, 1))
    run = ct.fit(ct.MixedRegression(k=2), task, data, rounds=30, out=tmp_path / "run")
    rows = View.of(tmp_path / "run").result["coefficients"]
    for j in range(2):
        own = [data.train.client(int(i)) for i in np.flatnonzero(run.labels == j)]
        x, y = (torch.cat(part).double() for part in zip(*own, strict=True))
        phi = torch.cat([x, torch.ones(len(x), 1)], 1)
        off = y.flatten() - phi @ torch.linalg.lstsq(phi, y.reshape(-1, 1)).solution[:, 0]
        errors = (off @ off / (len(x) - 4) * torch.linalg.inv(phi.T @ phi).diagonal()).sqrt()
        assert [row["error"] for row in rows if row["cluster"] == j] == pytest.approx(errors.tolist(), rel=1e-3)
    assert "coefficients" in names(View.of(tmp_path / "run"))


def test_where_a_run_comes_from(runs):
    view = View.of(runs / "ifca")
    told = dict(facts(view))
    assert view.begun["coterie"] and told["begun"] == view.begun["time"]
    assert told.get("commit", "") == (view.begun["commit"] or "")[:12]


def test_nodes_that_were_lost_late_or_refused_are_told(runs, tmp_path):
    folder = shutil.copytree(runs / "fedavg", tmp_path / "run")
    result = json.loads((folder / "final" / "result.json").read_text()) | {"left_out": {"site2": 3}}
    (folder / "final" / "result.json").write_text(json.dumps(result))
    late = "flower: site 'site2' is left out, for the 1. time: it did not answer within 30 s"
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": "log", "message": late}) + "\n")
    figure = next(f for f in of_run(View.of(folder)) if f.name == "nodes")
    assert "site2" in figure.drawing and "did not answer within 30 s" in figure.drawing
    assert "did not answer" in body([View.of(folder)])


def test_runs_that_differ_in_a_setting_are_told_apart(runs, tmp_path):
    task, federation = ct.Task.classifier(ct.models.MLP(64, 16, 10)), ct.data.rotated_digits(clients=24, seed=0)
    for k in (2, 3):
        ct.fit(ct.IFCA(k, init="random"), task, federation, rounds=2, out=tmp_path / f"k{k}")
    html = body([View.of(tmp_path / f"k{k}") for k in (2, 3)])
    assert '<td class="settings">k=2</td>' in html and "2 runs on rotated_digits. Best on average" in html


def test_a_run_is_held_against_that_with_its_seed(runs, tmp_path):
    views = [View.of(runs / "ifca"), View.of(runs / "fedavg")]
    other = replace(views[1], config=views[1].config | {"run": {"rounds": 6, "seed": 8}}, path=tmp_path)
    assert _plain_runs(views[0], [views[0], other, views[1]]) == [views[1]]
    assert _plain_runs(views[0], [views[0], other]) == [other]


def test_clients_that_move_in_the_last_round_are_not_called_settled():
    assert _when_settled(np.array([[-1, -1], [0, 1], [1, 1]])).startswith("1 client moves in the last round, 2;")
    assert _when_settled(np.array([[-1, -1], [0, 1], [1, 1], [1, 1]])).startswith("Nobody moves after round 2;")


def test_what_a_notebook_shows(runs):
    run = ct.load(runs / "cfl")
    assert "mean over 24 clients" in repr(run.scores) and "<table>" in run.scores._repr_html_()
    tree = run.algorithm.tree(run.state)
    assert repr(tree).startswith("all 24 clients") and tree._repr_html_().startswith("<pre>")
    assert "gamma_max" in run.algorithm._repr_html_()


def test_who_is_hurt_is_counted_as_scores_count_it(runs):
    ifca, alone = View.of(runs / "ifca"), View.of(runs / "alone")
    figure = next(f for f in of_run(ifca, [alone]) if f.name == "gain-alone")
    worse = sum(a < b for a, b in zip(ifca.result["per_client"], alone.result["per_client"], strict=True))
    assert figure.says.startswith(f"{worse} of 24 clients")


def test_a_report_is_one_file_that_asks_for_nothing(runs, tmp_path):
    write([runs / "ifca", runs / "fedavg", runs / "alone"], tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    assert not re.search(r"""(src|href)=["'](?!#|data:)""", html)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest", html)
    assert len(drawings(html)) >= 10
    assert len(html) < 300_000
    assert "one model for all" in html


def test_names_of_strangers_stay_text(runs, tmp_path):
    folder = tmp_path / "run"
    (folder / "final").mkdir(parents=True)
    for name in ("config.toml", "events.jsonl"):
        (folder / name).write_text((runs / "cfl" / name).read_text())
    result = json.loads((runs / "cfl" / "final" / "result.json").read_text())
    result |= {"ids": [f"{HOSTILE}{i}" for i in range(24)], "warnings": [HOSTILE], "left_out": {HOSTILE: 2}}
    (folder / "final" / "result.json").write_text(json.dumps(result))
    (folder / "config.toml").write_text(
        (folder / "config.toml").read_text().replace('"rotated_digits"', json.dumps(HOSTILE[:-9_000]))
    )
    html = page(HOSTILE, body([View.of(folder)]))
    assert "<script>alert" not in html and "\x1b" not in html
    assert len(html.split("<title>")[1].split("</title>")[0]) < 200
    assert drawings(html)


def test_a_run_that_has_not_ended_has_a_report(runs, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text((runs / "ifca" / "config.toml").read_text())
    write([tmp_path / "run"], tmp_path / "none.html")  # not even a round
    assert "has not come to its end" in (tmp_path / "none.html").read_text()
    lines = (runs / "ifca" / "events.jsonl").read_text().splitlines(keepends=True)
    rounds = [line for line in lines if '"event": "round"' in line]
    (tmp_path / "run" / "events.jsonl").write_text("".join(rounds[:3]) + rounds[3][:40])
    found = names(View.of(tmp_path / "run"))
    assert {"score", "membership", "cost"} <= set(found) and "certainty" not in found


def test_the_command(runs, tmp_path):
    found = CliRunner().invoke(app, ["report", str(runs), "-o", str(tmp_path / "all.html")])
    assert found.exit_code == 0 and "all.html" in found.output
    with pytest.raises(ValueError, match=r"must end in \.html"):
        write([runs / "ifca"], tmp_path / "report.pdf")
    with pytest.raises(ValueError, match="not a run folder"):
        write([tmp_path / "nothing"], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_many_clients_are_not_named_in_the_history():
    from coterie.runs.timeline import TRACKED, moved

    labels = torch.zeros(TRACKED + 1, dtype=torch.long)
    assert moved(labels - 1, labels) is None
    assert timeline([{"moved": None}]) is None


@pytest.mark.parametrize(
    "name", ["score", "loss", "membership", "churn", "sizes", "groups", "certainty", "cost", "clients"]
)
def test_every_figure_from_python(runs, name):
    assert getattr(ct.plot, name)(runs / "ifca").get_xlabel()
    matplotlib.pyplot.close("all")


def test_figures_of_some_methods_from_python(runs):
    assert ct.plot.tree(runs / "cfl").get_ylabel() == "round"
    assert len(ct.plot.similarity(runs / "cfl").get_images()[0].get_array()) == 24
    assert len(ct.plot.runs([runs / "ifca", runs / "alone"]).get_legend().get_texts()) == 2
    with pytest.raises(ValueError, match="of one metric, got"):
        ct.plot.runs([runs])
    with pytest.raises(ValueError, match="has no similarities"):
        ct.plot.similarity(runs / "ifca")
    assert ct.plot.cost(runs / "ifca", against="seconds").get_xlabel() == "seconds"
    assert len(ct.plot.coefficients(runs / "effects").get_yticklabels()) == 4
    axes = ct.plot.gains(runs / "ifca", than=runs / "fedavg")
    assert len(axes.collections[0].get_offsets()) == 24
    with pytest.raises(ValueError, match="makes no tree"):
        ct.plot.tree(runs / "ifca")
    run = ct.fit(ct.FedAvg(), ct.Task.classifier(ct.models.MLP(64, 8, 10)), ct.data.digits(4), rounds=2)
    assert ct.plot.score(run).get_ylabel() == "accuracy"  # a run without a folder
    with pytest.raises(ValueError, match="has no coefficients"):
        ct.plot.coefficients(run)
    matplotlib.pyplot.close("all")
