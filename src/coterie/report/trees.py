"""A tree of models as a chart whose nodes can be chosen, by mouse or by keyboard, to see who is at them."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import numpy as np
from markupsafe import Markup

from coterie.report.svg import WIDTH, chart, colour, element
from coterie.runs.plots import places

HEIGHT, TOP, BOTTOM = 320, 16, 56
NAMED = 60  # clients of a node at most that are listed by name


def drawn(outline: list[dict[str, Any]], rounds: int, names: list[str]) -> Markup:
    """The tree, and a line below it for each node, of which the chosen one is shown.

    Args:
        outline: The nodes, as result.json has them.
        rounds: How many there were.
        names: What the clients are called.
    """
    nodes = {row["node"]: row for row in outline}
    at = places(nodes)
    widest, last, everybody = max(at.values()) or 1.0, max(rounds, 1), len(nodes[0]["clients"])

    def spot(v: int, t: float) -> tuple[float, float]:
        return 50 + at[v] / widest * (WIDTH - 100), TOP + t / last * (HEIGHT - TOP - BOTTOM)

    lines, knots = [], []
    for v, row in nodes.items():
        end = nodes[row["children"][0]]["round"] if row["children"] else last
        (x, y0), (_, y1) = spot(v, row["round"]), spot(v, end)
        fill = "var(--none)" if row["cluster"] is None else colour(row["cluster"])
        wide = 2 + 14 * len(row["clients"]) / everybody
        lines.append(element("line", x1=x, x2=x, y1=y0, y2=y1, style=f"stroke:{fill};stroke-width:{wide:.1f}"))
        if row["children"]:
            ends = [spot(c, end)[0] for c in row["children"]]
            lines.append(element("line", x1=min(ends), x2=max(ends), y1=y1, y2=y1, class_="grid"))
        else:
            lines.append(
                element("text", f"{len(row['clients']):,}", x=x, y=y1 + 30, text_anchor="middle", class_="tick")
            )
        knots.append(_knot(v, row, x, y1, fill))
    details = [_detail(row, names) for row in nodes.values()]
    return chart("tree of models", *lines, *knots, height=HEIGHT, role="group") + element(
        "div", *details, class_="details"
    )


def _knot(v: int, row: dict[str, Any], x: float, y: float, fill: str) -> Markup:
    """What is chosen: the end of a node's line."""
    name = f"cluster {row['cluster']}" if row["cluster"] is not None else f"node {v}"
    inner = element("circle", element("title", f"{name}: {len(row['clients'])} clients"), cx=x, cy=y, r=8.0,
                    style=f"fill:{fill}", class_="knot")  # fmt: skip
    return element("a", inner, href=f"#node-{v}", data_node=v, aria_label=name)


def _detail(row: dict[str, Any], names: list[str]) -> Markup:
    """What is known of a node."""
    what = f"Cluster {row['cluster']}" if row["cluster"] is not None else f"Node {row['node']}"
    since = "from the start" if row["round"] == 0 else f"since round {row['round']}"
    gap = "" if row["cross"] is None else f"; split where the largest similarity across, α_cross, is {row['cross']:.3f}"
    listed = ", ".join(names[i] for i in row["clients"][:NAMED])
    more = f" and {len(row['clients']) - NAMED:,} more" if len(row["clients"]) > NAMED else ""
    text = f"{what}, {since}: {len(row['clients']):,} clients{gap}. {listed}{more}"
    return element("p", text, id=f"node-{row['node']}", data_node=row["node"])


def similarity(outline: list[dict[str, Any]], labels: np.ndarray) -> Markup | None:
    """How alike the clients' updates were when the whole population was split, in the order of the clusters found.

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
    image = pixels(np.array(alpha)[np.ix_(order, order)])
    side, left = 250.0, (WIDTH - 250) / 2
    parts = [element("image", href=image, x=left, y=10, width=side, height=side, style="image-rendering:pixelated")]
    edges = np.flatnonzero(np.diff(labels[clients][order])) + 1
    for edge in edges.tolist():
        at = edge / len(clients) * side
        parts.append(
            element("line", x1=left, x2=left + side, y1=10 + at, y2=10 + at, style="stroke:#222;stroke-width:1")
        )
        parts.append(
            element("line", x1=left + at, x2=left + at, y1=10.0, y2=10 + side, style="stroke:#222;stroke-width:1")
        )
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
