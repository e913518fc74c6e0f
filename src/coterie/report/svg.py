"""Charts as SVG text: elements, axes with round numbers, lines, bars. Nothing here knows what a run is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from markupsafe import Markup, escape

from coterie.storage.names import printable

WIDTH, HEIGHT = 520, 280  # of a chart, in its own units: text of 13 of them is legible on a phone as on a desk
SMALL = 1e-300  # an axis that is shorter, or longer than its inverse, has no round numbers
POINTS = 400  # of a line at most: more than a chart has room for
KEYS = 12  # names of a legend at most; the others are counted
LONGEST = 58  # letters of one of them
LINE = 21  # from one line of a legend to the next


def element(name: str, *content: object, **attributes: object) -> Markup:
    """An element, with everything in it escaped that is not an element itself.

    Args:
        name: Of the element.
        content: What is inside: text or elements.
        attributes: A trailing underscore is dropped, others become hyphens; None leaves the attribute out.

    Example:
        >>> print(element("text", "a < b", x=3, class_="tick", text_anchor="end"))
        <text x="3" class="tick" text-anchor="end">a &lt; b</text>
    """
    given = {n.rstrip("_").replace("_", "-"): v for n, v in attributes.items() if v is not None}
    opening = "".join(f' {n}="{escape(_plain(v))}"' for n, v in given.items())
    inner = "".join(c if isinstance(c, Markup) else escape(_plain(c)) for c in content)
    return Markup(f"<{name}{opening}>{inner}</{name}>")


def _plain(value: object) -> str:
    """A number without digits that nobody sees, or text without what steers a terminal."""
    return f"{round(value, 2):g}" if isinstance(value, float) else printable(str(value))


def colour(cluster: int) -> str:
    """The colour of a cluster: a variable of the page's style, which has one set for light and one for dark."""
    return f"var(--c{cluster % 12})" if cluster >= 0 else "var(--none)"


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers between two, a few of them.

    Args:
        low: The least of the axis.
        high: The greatest.
        most: How many there are at most.

    Example:
        >>> ticks(0.0, 47.0)
        [0.0, 10.0, 20.0, 30.0, 40.0]
    """
    if not SMALL < high - low < 1 / SMALL:  # nor one that is not finite
        return [low]
    rough = (high - low) / most
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * n for n in (1, 2, 5, 10) if size * n >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(step * i, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def numbered(values: Sequence[float]) -> list[str]:
    """Ticks as an axis has them: with as many digits as tell them apart.

    Example:
        >>> numbered([0.0, 500000.0, 1000000.0]), numbered([0.2375, 0.237502]), numbered([-5.0, 0.0])
        (['0', '0.5M', '1M'], ['0.237500', '0.237502'], ['-5', '0'])
    """
    step = min((b - a for a, b in pairwise(values)), default=0.0)
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if step >= size / 10 and max(map(abs, values)) >= 10 * min(size, 1e5):
            return [f"{v / size:g}{unit}" if v else "0" for v in values]
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 3
    return [f"{v:.{digits}f}" if step > 0 else f"{v:.{digits}g}" for v in values]


@dataclass(frozen=True)
class Frame:
    """The axes of a chart: where a value is drawn.

    Attributes:
        x: The least and the greatest value along it.
        y: The same upwards.
        labels: What the axes are called.
        height: Of the whole chart.
        whole: Whether the numbers along it are whole.
    """

    x: tuple[float, float]
    y: tuple[float, float]
    labels: tuple[str, str]
    height: float = HEIGHT
    whole: bool = True

    @cached_property
    def upright(self) -> list[tuple[float, str]]:
        """The numbers of the upright axis."""
        found = ticks(*self.y)
        return list(zip(found, numbered(found), strict=True))

    @cached_property
    def left(self) -> float:
        """Where it stands: its numbers need room."""
        return 34 + 7.4 * max(len(text) for _, text in self.upright)

    def at(self, x: float, y: float) -> tuple[float, float]:
        """The place of a point."""
        bottom = self.height - 44
        across = (x - self.x[0]) / ((self.x[1] - self.x[0]) or 1)
        up = (y - self.y[0]) / ((self.y[1] - self.y[0]) or 1)
        return self.left + across * (WIDTH - 14 - self.left), bottom - up * (bottom - 12)

    def axes(self) -> Markup:
        """The grid with its numbers and names."""
        parts: list[Markup] = []
        for v, text in self.upright:
            _, y = self.at(self.x[0], v)
            parts.append(element("line", x1=self.left, x2=WIDTH - 14, y1=y, y2=y, class_="grid"))
            parts.append(element("text", text, x=self.left - 7, y=y + 4, text_anchor="end", class_="tick"))
        across = [v for v in ticks(*self.x) if not self.whole or v == int(v)]
        for v, text in zip(across, numbered(across), strict=True):
            x, _ = self.at(v, self.y[0])
            parts.append(element("text", text, x=x, y=self.height - 26, text_anchor="middle", class_="tick"))
        middle = (self.left + WIDTH - 14) / 2
        parts.append(element("text", self.labels[0], x=middle, y=self.height - 6, text_anchor="middle", class_="axis"))
        up = (self.height - 32) / 2
        parts.append(
            element("text", self.labels[1], transform=f"translate(14 {up:g}) rotate(-90)", text_anchor="middle",
                    class_="axis")
        )  # fmt: skip
        return Markup("").join(parts)

    def line(self, xs: Sequence[float], ys: Sequence[float], stroke: str, width: float = 1.6, dash: str = "") -> Markup:
        """A line through points, of which not more are kept than can be seen; what is not finite breaks it.

        Args:
            xs: Of the points.
            ys: Of the points.
            stroke: Its colour.
            width: Its width.
            dash: How it is dashed, as SVG has it.
        """
        step = max(1, -(-len(xs) // POINTS))
        kept = sorted({*range(0, len(xs), step), len(xs) - 1})
        path, pen = [], "M"
        for i in kept:
            if not math.isfinite(ys[i]):
                pen = "M"
                continue
            px, py = self.at(xs[i], ys[i])
            path.append(f"{pen}{px:.1f} {py:.1f}")
            pen = "L"
        style = f"stroke:{stroke};stroke-width:{width}" + (f";stroke-dasharray:{dash}" if dash else "")
        dots = [element("circle", cx=float(x), cy=float(y), r=3, style=f"fill:{stroke}") for x, y in
                (self.at(xs[i], ys[i]) for i in kept if math.isfinite(ys[i]))] if len(kept) < 3 else []  # fmt: skip
        return Markup("").join([element("path", d="".join(path), class_="line", style=style), *dots])

    def level(self, y: float, stroke: str) -> Markup:
        """A line across the chart.

        Args:
            y: Its value.
            stroke: Its colour.
        """
        (x1, at), (x2, _) = self.at(self.x[0], y), self.at(self.x[1], y)
        return element("line", x1=x1, x2=x2, y1=at, y2=at, style=f"stroke:{stroke};stroke-width:1")

    def bar(self, x: float, width: float, low: float, high: float, fill: str, title: str) -> Markup:
        """An upright bar from one value to another.

        Args:
            x: Its middle.
            width: Its width, as a value along the axis.
            low: Where it begins.
            high: Where it ends.
            fill: Its colour.
            title: What is said of it when it is pointed at.
        """
        (a, bottom), (b, top) = self.at(x - width / 2, low), self.at(x + width / 2, high)
        shape = {"x": a, "y": min(top, bottom), "width": max(b - a, 0.4), "height": abs(bottom - top)}
        return element("rect", element("title", title), **shape, style=f"fill:{fill}")


def spread(values: Iterable[float], room: float = 0.06) -> tuple[float, float]:
    """The least and greatest of some values, with some room around them.

    Example:
        >>> spread([1.0, 3.0, float("nan")], room=0.5)
        (0.0, 4.0)
    """
    finite = [v for v in values if v is not None and math.isfinite(v)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    more = (high - low) * room or abs(high) * room or 1.0
    return low - more, high + more


def chart(
    title: str,
    *parts: Markup,
    height: float = HEIGHT,
    role: str = "img",
    names: Sequence[tuple[str, str]] = (),
) -> Markup:
    """A whole chart, which says to a screen reader what it shows.

    Args:
        title: What it shows.
        parts: Its elements.
        height: In its own units, without the legend.
        role: "img", or "group" if something in it can be chosen.
        names: Pairs of a colour and what it stands for: the legend below, which is part of a chart that is saved.
    """
    keys, more = legend(names, height)
    own = {"viewBox": f"0 0 {WIDTH} {height + more:g}", "role": role, "xmlns": "http://www.w3.org/2000/svg"}
    told = f"{title}: {', '.join(name for _, name in names)}" if names else title
    return element("svg", *parts, *keys, **own, aria_label=told)


def legend(names: Sequence[tuple[str, str]], top: float) -> tuple[list[Markup], float]:
    """Names beside their colours, in as many lines as they need; and how high these are.

    Args:
        names: Pairs of a colour and a name.
        top: Where the first line begins.
    """
    shown = [(c, name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…") for c, name in names[:KEYS]]
    if len(names) > KEYS:
        shown.append(("none", f"and {len(names) - KEYS} more"))
    keys, x, line = [], 10.0, 0
    for fill, name in shown:
        wide = 34 + 8.2 * len(name)
        if x > 10 and x + wide > WIDTH:
            x, line = 10.0, line + 1
        y = top + 8 + line * LINE
        keys.append(element("rect", x=x, y=y, width=11, height=11, rx=3, style=f"fill:{fill}"))
        keys.append(element("text", name, x=x + 17, y=y + 10, class_="key"))
        x += wide
    return keys, (line + 1) * LINE + 6 if shown else 0.0
