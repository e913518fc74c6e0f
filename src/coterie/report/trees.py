"""A tree of models as a chart whose nodes can be chosen, by mouse or by keyboard, to see who is at them."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from coterie.report.svg import WIDTH, chart, colour, element, ticks
from coterie.runs.plots import places

HEIGHT, TOP, BOTTOM = 320, 16, 40
NAMED = 60  # clients of a node at most that are listed by name


def drawn(outline: list[dict[str, Any]], rounds: int, names: list[str]) -> Markup:
    """The tree, and a line below it for each node, of which the chosen one is shown: at first that of the root.

    Args:
        outline: The nodes, as result.json has them.
        rounds: How many there were.
        names: What the clients are called.
    """
    nodes = {row["node"]: row for row in outline}
    at = places(nodes)
    widest, last, everybody = max(at.values()) or 1.0, max(rounds, 1), len(nodes[0]["clients"])

    def spot(v: int, t: float) -> tuple[float, float]:
        return 90 + at[v] / widest * (WIDTH - 140), _down(t, last)

    lines, knots = _scale(last), []
    for v, row in nodes.items():
        end = nodes[row["children"][0]]["round"] if row["children"] else last
        (x, y0), (_, y1) = spot(v, row["round"]), spot(v, end)
        fill = "var(--none)" if row["cluster"] is None else colour(row["cluster"])
        wide = 2 + 14 * len(row["clients"]) / everybody
        lines.append(element("line", x1=x, x2=x, y1=y0, y2=y1, style=f"stroke:{fill};stroke-width:{wide:.1f}"))
        if row["children"]:
            ends = [spot(c, end)[0] for c in row["children"]]
            lines.append(element("line", x1=min(ends), x2=max(ends), y1=y1, y2=y1, class_="frame"))
        else:
            lines.append(
                element("text", f"{len(row['clients']):,}", x=x, y=y1 + 26, text_anchor="middle", class_="tick")
            )
        knots.append(_knot(v, row, x, y1, fill))
    details = [_detail(row, names) for row in nodes.values()]
    whole = chart("tree of models", *lines, *knots, height=HEIGHT, role="group")
    return whole + element("div", *details, class_="details", aria_live="polite")


def _down(t: float, last: int) -> float:
    """The height of a round."""
    return TOP + t / last * (HEIGHT - TOP - BOTTOM)


def _scale(last: int) -> list[Markup]:
    """The rounds, from above down."""
    marks = [t for t in ticks(0, last) if t == int(t)]
    words = [element("text", int(t), x=44.0, y=_down(t, last) + 4, text_anchor="end", class_="tick") for t in marks]
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = {"transform": f"translate(14 {middle:g}) rotate(-90)", "text_anchor": "middle", "class_": "axis"}
    return [*words, element("text", "round", **turned)]


def _knot(v: int, row: dict[str, Any], x: float, y: float, fill: str) -> Markup:
    """What is chosen: the end of a node's line."""
    name = f"cluster {row['cluster']}" if row["cluster"] is not None else f"node {v}"
    inner = element("circle", element("title", f"{name}: {len(row['clients'])} clients"), cx=x, cy=y, r=8.0,
                    style=f"fill:{fill}", class_="knot")  # fmt: skip
    return element("a", inner, href=f"#node-{v}", data_node=v, aria_label=name, class_=_chosen(v))


def _detail(row: dict[str, Any], names: list[str]) -> Markup:
    """What is known of a node."""
    what = f"Cluster {row['cluster']}" if row["cluster"] is not None else f"Node {row['node']}"
    since = "from the start" if row["round"] == 0 else f"since round {row['round']}"
    n = len(row["clients"])
    listed = ", ".join(names[i] for i in row["clients"][:NAMED])
    more = f" and {n - NAMED:,} more" if n > NAMED else ""
    text = f"{what}, {since}: {n:,} client{'' if n == 1 else 's'}. {_split(row)}Clients: {listed}{more}."
    return element("p", text, id=f"node-{row['node']}", data_node=row["node"], class_=_chosen(row["node"]))


def _split(row: dict[str, Any]) -> str:
    """Where and why an inner node was split."""
    if row["cross"] is None:
        return ""
    gap = max(0.0, (1 - row["cross"]) / 2) ** 0.5
    across = f"the largest similarity across, α_cross, was {row['cross']:.3f}"
    text = f"Split where {across}, the gap √((1 - α_cross)/2) {gap:.3f}"
    if row.get("norms") is None:
        return f"{text}. "
    mean, longest = row["norms"]
    return f"{text}; the mean update had length {mean:.3g}, the longest of a client {longest:.3g}. "


def _chosen(v: int) -> str | None:
    return "chosen" if v == 0 else None


class Similar(NamedTuple):
    """How alike clients' updates were at the first split.

    Attributes:
        alpha: Cosines of every two of them, in the order of their clusters (n, n).
        edges: Where in that order a cluster ends and the next begins.
    """

    alpha: np.ndarray
    edges: list[int]


def similar(outline: list[dict[str, Any]], labels: np.ndarray) -> Similar | None:
    """How alike the clients' updates were when the whole population was split; None where the folder does not say it.

    Args:
        outline: The nodes, as result.json has them.
        labels: Every client's cluster.
    """
    nodes = {row["node"]: row for row in outline}
    if (alpha := nodes[0].get("similar")) is None:
        return None
    clients = [c for child in nodes[0]["children"] for c in nodes[child]["clients"]]
    if len(clients) != len(alpha):  # somebody has come or moved since
        return None
    order = np.argsort(labels[clients], kind="stable")
    edges = np.flatnonzero(np.diff(labels[clients][order])) + 1
    return Similar(np.array(alpha)[np.ix_(order, order)], edges.tolist())


def similarity(found: Similar) -> Markup:
    """The similarities as a picture, with a line where a cluster ends.

    Args:
        found: The similarities.
    """
    side, left = 250.0, (WIDTH - 250) / 2
    image = pixels(found.alpha)
    parts = [element("image", href=image, x=left, y=10, width=side, height=side, style="image-rendering:pixelated")]
    style = "stroke:#222;stroke-width:1"  # on the picture, which is the same on dark paper
    for edge in found.edges:
        at = edge / len(found.alpha) * side
        parts.append(element("line", x1=left, x2=left + side, y1=10 + at, y2=10 + at, style=style))
        parts.append(element("line", x1=left + at, x2=left + at, y1=10.0, y2=10 + side, style=style))
    text = "clients, by cluster; red: alike, blue: opposed"
    parts.append(element("text", text, x=WIDTH / 2, y=side + 30, text_anchor="middle", class_="axis"))
    return chart("similarity of clients' updates", *parts, height=side + 40)


def pixels(values: np.ndarray) -> str:
    """Numbers from -1, blue, by 0, white, to 1, red, as an image in the page itself.

    Args:
        values: (rows, columns).
    """
    share = np.abs(values.clip(-1, 1))[..., None]
    ends = np.where(values[..., None] < 0, np.array([27, 108, 168]), np.array([209, 73, 91]))
    colours = (255 + (ends - 255) * share).astype(np.uint8)
    lines = b"".join(b"\0" + row.tobytes() for row in colours)
    head = struct.pack(">IIBBBBB", *values.shape[::-1], 8, 2, 0, 0, 0)
    parts = [(b"IHDR", head), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b"")]
    chunks = b"".join(struct.pack(">I", len(b)) + n + b + struct.pack(">I", zlib.crc32(n + b)) for n, b in parts)
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + chunks).decode()
