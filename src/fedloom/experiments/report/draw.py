"""Draws figures with matplotlib, as PNG, SVG or PDF.

`figures` describes them as plain dicts. `page/charts.js` draws the same figures in a browser, with
the same colours.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedloom.errors import ConfigError, unknown

SUFFIXES = (".png", ".svg", ".pdf")
# The hues of Okabe and Ito, a little darker. Beyond eight series, dashes and hollow markers differ.
HUES = ("#0072b2", "#d55e00", "#009e73", "#b5588e", "#d98f00", "#45a7dd", "#4a4a4a", "#8a7f00")
# Parts of a whole, such as phases: muted colours that no series of a method has.
PARTS = ("#3d5269", "#b39c7d", "#8199b0", "#6b5847", "#93849b", "#5f6b52", "#a9a9a4", "#54707a")
DASHES: tuple[Any, ...] = ("-", (0, (5, 3)), (0, (1, 2)), (0, (7, 3, 1, 3)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
HATCHES = ("", "////", "....", "xxxx")
ABSENT, SOFT, ADDED = "0.85", "0.4", "#c0392b"
MANY = 2000  # more marks than this become pixels in an SVG or PDF; shapes would take megabytes


def draw(figure: dict[str, Any], path: Path) -> Path:
    """Draws a figure of any kind except a table. Returns the path. Needs the extra `plot`.

    Args:
        figure: The description of the figure.
        path: The file to write. Its suffix chooses the format: .png, .svg or .pdf.
    """
    if figure["kind"] not in _KINDS:
        raise unknown("kind of figure", figure["kind"], _KINDS)
    return save(path, lambda canvas: _KINDS[figure["kind"]](canvas, figure))


def draw_maps(maps: list[dict[str, Any]], title: str, path: Path) -> Path:
    """Draws heat maps in one row under one title. Returns the path."""

    def fill(canvas: Any) -> None:
        sizes = [_map_size(figure) for figure in maps]
        canvas.set_size_inches(
            sum(width for width, _ in sizes), max(height for _, height in sizes) + 0.3
        )
        for axes, figure in zip(canvas.subplots(1, len(maps), squeeze=False)[0], maps, strict=True):
            _heat_map(axes, figure)
            axes.set_title(figure["title"], fontsize=10)
        canvas.suptitle(title, fontsize=11)

    return save(path, fill)


def save(path: Path, fill: Callable[[Any], None]) -> Path:
    """Creates a matplotlib Figure, calls `fill` to draw on it, and writes it. Returns the path."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"path {str(path)!r}: must end in {', '.join(SUFFIXES)}")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'fedloom[plot]'") from None
    # A Figure that pyplot does not create needs no display and leaves no global state behind. Names
    # inside an SVG are fixed and dates are left out, so that the same runs give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "fedloom"}):
        canvas = Figure(layout="constrained")
        fill(canvas)
        undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(
            path.suffix.lower(), {}
        )
        canvas.savefig(path, dpi=150, metadata=undated)
    return path


# ---- helpers for all kinds ----
def _look(index: int) -> dict[str, Any]:
    """Returns the colour, dash and marker of a series, the same as in charts.js."""
    cycle, hue = divmod(index, len(HUES))
    return {
        "color": HUES[hue],
        "linestyle": DASHES[cycle % len(DASHES)],
        "marker": MARKERS[(index + cycle) % len(MARKERS)],
        "markerfacecolor": "white" if cycle % 2 else HUES[hue],
        "markeredgecolor": HUES[hue],
    }


def _numbers(values: Iterable[float | None]) -> npt.NDArray[np.float64]:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _title(canvas: Any, figure: dict[str, Any]) -> None:
    canvas.suptitle(figure["title"], fontsize=11)


def _bare(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.grid(color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)


def _axis(axis: Any, about: dict[str, Any], values: npt.NDArray[np.float64]) -> None:
    """Sets an axis' label, scale and units. A logarithmic axis keeps a separate place for 0."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    which = axis.axis_name
    axis.set_label_text(about["label"], fontsize=9)
    positive = values[values > 0]
    if about["log"] and positive.size:
        getattr(axis.axes, f"set_{which}scale")(
            "symlog" if (values == 0).any() else "log", **_linear_part(values, positive)
        )
    if about["unit"] == "seconds" and not about["log"] and positive.size:
        _time_axis(axis, positive.max())
    elif about["unit"] in _UNITS:
        axis.set_major_formatter(FuncFormatter(lambda value, _: _UNITS[about["unit"]](value)))
    if about["unit"] == "count" and not about["log"]:
        axis.set_major_locator(MaxNLocator(integer=True))


def _time_axis(axis: Any, longest: float) -> None:
    """Sets ticks at round numbers of one unit: minutes from 2 minutes, hours from 2 hours on."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

    factor, unit = next(
        (each for each in _SECONDS if longest >= each[0] * (2 if each[0] > 1 else 1)), _SECONDS[-1]
    )
    places = MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(0, longest / factor)
    axis.set_major_locator(FixedLocator([place * factor for place in places]))
    axis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value / factor:.4g} {unit}" if value else "0")
    )


def _linear_part(
    values: npt.NDArray[np.float64], positive: npt.NDArray[np.float64]
) -> dict[str, Any]:
    return (
        {"linthresh": 10 ** np.floor(np.log10(positive.min())), "linscale": 0.4}
        if (values == 0).any()
        else {}
    )


def _scaled(value: float, units: tuple[tuple[float, str], ...]) -> str:
    for factor, name in units:
        if abs(value) >= factor:
            return f"{value / factor:.4g} {name}"
    return "0" if value == 0 else f"{value / units[-1][0]:.3g} {units[-1][1]}"


_SECONDS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"))
_UNITS: dict[str, Callable[[float], str]] = {
    "percent": lambda value: f"{100 * value:.4g}%",
    "bytes": lambda value: _scaled(
        value, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))
    ),
    "seconds": lambda value: (
        _scaled(value, ((7200, "h"), (120, "min"), (1, "s"), (1e-3, "ms")))
        if abs(value) < 120
        else _scaled(
            value / (3600 if abs(value) >= 7200 else 60),
            ((1e-9, "h" if abs(value) >= 7200 else "min"),),
        )
    ),
    "count": lambda value: f"{value:,.0f}",
}


def _legend(canvas: Any, axes: Any) -> None:
    """Adds a legend below the axes, in as many columns as fit."""
    handles, names = axes.get_legend_handles_labels()
    if handles:
        longest = max(map(len, names))
        columns = max(1, min(len(names), int(canvas.get_figwidth() * 72 // (longest * 5 + 36))))
        canvas.legend(
            handles, names, loc="outside lower center", ncols=columns, fontsize=8, frameon=False
        )


def _all(series: list[dict[str, Any]], *keys: str) -> npt.NDArray[np.float64]:
    found = [_numbers(one[key]) for one in series for key in keys if one.get(key) is not None]
    return np.concatenate(found) if found else np.empty(0)


# ---- the kinds ----
def _lines(canvas: Any, figure: dict[str, Any]) -> None:
    canvas.set_size_inches(6.4, 4.4)
    axes = canvas.subplots()
    _bare(axes)
    series = figure["series"]
    _axis(axes.xaxis, figure["x"], _all(series, "x"))
    _axis(axes.yaxis, figure["y"], _all(series, "y"))
    for number, one in enumerate(series):
        x, y = _numbers(one["x"]), _numbers(one["y"])
        if one.get("low") is not None and one.get("high") is not None:
            axes.fill_between(
                x,
                _numbers(one["low"]),
                _numbers(one["high"]),
                color=HUES[one["color"] % len(HUES)],
                alpha=0.16,
                linewidth=0,
            )
        every = max(1, -(-len(x) // 8))
        axes.plot(
            x,
            y,
            label=one["name"],
            linewidth=1.6,
            markersize=5,
            markevery=(number * 2 % every, every),
            **_look(one["color"]),
        )
    if figure.get("zero"):
        axes.axhline(0, color=SOFT, linewidth=1, linestyle="--", zorder=0)
    axes.set_ylim(bottom=figure["y"].get("from"))
    _title(canvas, figure)
    _legend(canvas, axes)


def _points(canvas: Any, figure: dict[str, Any]) -> None:
    canvas.set_size_inches(6.4, 6.4 if figure.get("diagonal") else 4.4)
    axes = canvas.subplots()
    _bare(axes)
    series, frontier = (
        figure["series"],
        np.array(figure.get("frontier") or np.empty((0, 2)), dtype=np.float64),
    )
    xs, ys = _all(series, "x"), _all(series, "y")
    _axis(axes.xaxis, figure["x"], xs)
    _axis(axes.yaxis, figure["y"], ys)
    for one in series:
        look, many = _look(one["color"]), len(xs) > 400
        x, y = _numbers(one["x"]), _numbers(one["y"])
        look["linestyle"] = "none"
        axes.plot(
            x,
            y,
            label=one["name"],
            markersize=3 if many else 6,
            alpha=0.55 if many else 0.95,
            rasterized=len(xs) > MANY,
            **look,
        )
        if one.get("low") is not None and one.get("high") is not None:
            spread = np.abs(np.stack([y - _numbers(one["low"]), _numbers(one["high"]) - y]))
            axes.errorbar(
                x, y, yerr=spread, fmt="none", ecolor=look["color"], elinewidth=1, capsize=2.5
            )
    for level in figure.get("levels", []):
        axes.axhline(
            level["y"],
            color=_look(level["color"])["color"],
            linewidth=1.4,
            linestyle=(0, (6, 4)),
            label=level["name"],
        )
    if len(frontier):
        right = axes.get_xlim()[1]
        along = np.append(frontier[:, 0], right), np.append(frontier[:, 1], frontier[-1, 1])
        axes.step(*along, where="post", color="black", linewidth=1, linestyle=":", label="frontier")
        axes.set_xlim(right=right)
    if figure.get("diagonal"):  # both axes have the same range and the same length
        low, high = (
            min(axes.get_xlim()[0], axes.get_ylim()[0]),
            max(axes.get_xlim()[1], axes.get_ylim()[1]),
        )
        axes.set_xlim(low, high)
        axes.set_ylim(low, high)
        axes.set_aspect("equal")
        axes.plot(
            [low, high],
            [low, high],
            color=SOFT,
            linewidth=1,
            linestyle="--",
            label="equal",
            zorder=0,
        )
    _title(canvas, figure)
    _legend(canvas, axes)


def _bars(canvas: Any, figure: dict[str, Any]) -> None:
    rows = figure["rows"]
    canvas.set_size_inches(7.2, 1.7 + 0.32 * len(rows))
    axes = canvas.subplots()
    _bare(axes)
    axes.grid(visible=False, axis="y")
    so_far = np.zeros(len(rows))
    for one in figure["series"]:
        values = np.nan_to_num(_numbers(one["values"]))
        cycle, hue = divmod(one["color"], len(HUES))
        axes.barh(
            rows,
            values,
            left=so_far,
            height=0.62,
            color=(PARTS if figure.get("palette") == "parts" else HUES)[hue],
            hatch=HATCHES[cycle % 4],
            edgecolor="white",
            label=one["name"],
        )
        so_far += values
    text = _UNITS.get(figure["x"]["unit"], "{:.4g}".format)
    rounded = [float(f"{total:.3g}") for total in so_far]
    for row, (total, short) in enumerate(zip(so_far, rounded, strict=True)):
        axes.annotate(
            text(short),
            (total, row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=7.5,
            color=SOFT,
        )
    axes.margins(x=0.12)
    _axis(axes.xaxis, {**figure["x"], "log": False}, so_far)  # stacked lengths need a linear axis
    axes.set_xlim(left=0)
    axes.invert_yaxis()
    _title(canvas, figure)
    _legend(canvas, axes)


def _heat(canvas: Any, figure: dict[str, Any]) -> None:
    canvas.set_size_inches(*_map_size(figure))
    _heat_map(canvas.subplots(), figure)
    _title(canvas, figure)


def _map_size(figure: dict[str, Any]) -> tuple[float, float]:
    rows, columns = len(figure["rows"]), len(figure["columns"])
    return 2.1 + max(columns * (0.42 if columns <= 15 else 0.2), 2.2), 1.6 + min(
        max(min(0.3 * rows, 4 + 0.12 * rows), 1.8), 40
    )


def _heat_map(axes: Any, figure: dict[str, Any]) -> None:
    """Draws one map. Cells without a value are grey. Cells show their numbers if there is room."""
    import matplotlib

    # This palette is safe for colour-blind readers and contains no grey.
    palette = matplotlib.colormaps["YlGnBu"].with_extremes(bad=ABSENT)
    values = np.array([_numbers(row) for row in figure["values"]]).reshape(
        len(figure["rows"]), len(figure["columns"])
    )
    limits = {"vmin": figure["low"], "vmax": figure["high"]}
    image = axes.imshow(
        np.ma.masked_invalid(values), cmap=palette, aspect="auto", interpolation="nearest", **limits
    )
    rows, columns = values.shape
    axes.set_xlabel(figure["column_label"], fontsize=9)
    axes.set_ylabel(figure["row_label"], fontsize=9)
    every = 1 + rows // 100
    turn = (
        {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
        if max(map(len, figure["columns"]), default=0) > 5
        else {}
    )
    axes.set_xticks(range(columns), figure["columns"], fontsize=8 if columns <= 15 else 6, **turn)
    axes.set_yticks(range(0, rows, every), figure["rows"][::every], fontsize=8 if rows <= 20 else 6)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    if rows <= 200:  # white lines between the cells
        axes.set_xticks(np.arange(1, columns) - 0.5, minor=True)
        axes.set_yticks(np.arange(1, rows) - 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=1)
    if rows <= 50 and columns <= 15:
        for (r, c), value in np.ndenumerate(values):
            if np.isfinite(value):
                ink = "white" if image.norm(value) > 0.55 else "black"
                axes.text(
                    c,
                    r,
                    _cell(figure, value),
                    ha="center",
                    va="center",
                    fontsize=7 if rows <= 20 else 5.5,
                    color=ink,
                )
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02, aspect=8 * axes.figure.get_figheight())
    if figure["unit"] in _UNITS:
        bar.ax.yaxis.set_major_formatter(lambda value, _: _UNITS[figure["unit"]](value))
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8)


def _cell(figure: dict[str, Any], value: float) -> str:
    if figure["unit"] == "percent":
        return f"{100 * value:.0f}"
    return f"{value:.2f}" if figure["format"] == "0.00" else f"{value:.0f}"


def _panels(canvas: Any, figure: dict[str, Any]) -> Iterable[tuple[Any, dict[str, Any]]]:
    """Yields square axes and the panel to draw on them, for each panel of a figure."""
    panels = figure["panels"]
    across = min(len(panels), 3)
    down = -(-len(panels) // across)
    canvas.set_size_inches(0.4 + 3.6 * across, 0.9 + 3.7 * down)
    grid = canvas.subplots(down, across, squeeze=False).ravel()
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    for axes, panel in zip(grid, panels, strict=False):
        axes.set_title(panel["title"], fontsize=9)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_box_aspect(1)
        axes.spines[:].set_color("0.8")
        yield axes, panel
    _title(canvas, figure)


def _image(canvas: Any, figure: dict[str, Any]) -> None:
    import matplotlib

    palette = matplotlib.colormaps["YlGnBu"].with_extremes(bad="white")
    for axes, panel in _panels(canvas, figure):
        n = panel["size"]
        cells = np.frombuffer(base64.b64decode(panel["values"]), dtype=np.uint8).reshape(n, n)
        # Empty cells are white. The faintest of the others must differ visibly from white.
        axes.imshow(
            np.ma.masked_equal(cells, 0),
            cmap=palette,
            vmin=-55,
            vmax=255,
            extent=(0, 1, 1, 0),
            interpolation="nearest",
        )
        for at in figure.get("ticks") or ():
            if 0 < at < 1:
                axes.axhline(at, color=SOFT, linewidth=0.4, alpha=0.6)
                axes.axvline(at, color=SOFT, linewidth=0.4, alpha=0.6)
        axes.set_xlabel(figure["column_label"], fontsize=8)
        axes.set_ylabel(figure["row_label"], fontsize=8)


def _cloud(canvas: Any, figure: dict[str, Any]) -> None:
    """Draws graphs and embeddings: points in panels, coloured by class, and edges if there are."""
    from matplotlib.collections import LineCollection

    names: dict[int, Any] = {}
    for axes, panel in _panels(canvas, figure):
        points = np.array(panel["points"], dtype=np.float64).reshape(-1, 2)
        for key, color, width, dash in (("edges", "0.6", 0.6, "-"), ("added", ADDED, 1.0, "--")):
            if ends := panel.get(key):
                lines = LineCollection(
                    list(points[np.array(ends)]),
                    colors=color,
                    linewidths=width,
                    linestyles=dash,
                    alpha=0.8,
                )
                lines.set_rasterized(len(ends) > MANY)
                axes.add_collection(lines)
        classes = np.array(panel.get("classes") or [0] * len(points))
        size = 2 if len(points) > 3000 else 3 if len(points) > 600 else 5
        for k in np.unique(classes).tolist():
            look = _look(max(k, 0)) | {"linestyle": "none"}
            (drawn,) = axes.plot(
                *points[classes == k].T,
                markersize=size,
                alpha=0.85,
                rasterized=len(points) > MANY,
                **look,
            )
            names.setdefault(k, drawn)
        axes.set_xlim(-0.04, 1.04)
        axes.set_ylim(-0.04, 1.04)
    if len(names) > 1:
        given = figure.get("class_names") or {}
        words = [given[k] if 0 <= k < len(given) else f"class {k}" for k in sorted(names)]
        columns = min(len(words), int(canvas.get_figwidth() // 1.1))
        canvas.legend(
            [names[k] for k in sorted(names)],
            words,
            loc="outside lower center",
            ncols=columns,
            fontsize=8,
            frameon=False,
        )


_KINDS: dict[str, Callable[[Any, dict[str, Any]], None]] = {
    "lines": _lines,
    "points": _points,
    "bars": _bars,
    "heat": _heat,
    "image": _image,
    "graph": _cloud,
    "scatter": _cloud,
}
