"""What benchmarks have measured: a file of JSON each, and from these RESULTS.md and a picture each.

    python benchmarks/results.py      # writes benchmarks/RESULTS.md and docs/figures/benchmarks/*.svg again

A benchmark called with `--save` writes `benchmarks/results/<its name>.json` by `save`:

    title, command, machine, note    texts
    commit                           which was measured; ends in "+" where Python files were changed since
    tables                           by name, a list of rows; a row is a dict of numbers and texts by column
    plot                             of `ratios`, `lines` or `bars`
"""

import argparse
import io
import json
import os
import pathlib
import platform
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER, PICTURES, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "figures" / "benchmarks", "RESULTS.md"
INK = "#010203"  # stands for the color of the text around the picture, light or dark
INKS = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "legend.labelcolor")
SETTINGS = dict.fromkeys(INKS, INK) | {"svg.fonttype": "none", "svg.hashsalt": "0", "font.family": "sans-serif"}
SETTINGS |= {"axes.spines.top": False, "axes.spines.right": False, "legend.framealpha": 0.0}
STYLE = "<style>svg { color: #1f2330 } @media (prefers-color-scheme: dark) { svg { color: #e6e8f0 } }</style>"


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/*.json, and the page and picture")


def ratios(label: str, values: dict, log: bool = False) -> dict:
    """A plot of ratios to a line at 1: by name a number, or the least and the greatest of some runs."""
    return {"kind": "ratios", "label": label, "values": values, "log": log}


def lines(x: str, y: str, panels: dict) -> dict:
    """A plot with logarithmic axes: by title of a panel, and by name of a line, its points `[x, y]`."""
    return {"kind": "lines", "x": x, "y": y, "panels": panels}


def bars(panels: list[dict], pale: list[str]) -> dict:
    """A plot of panels `{"title", "label", "values"}`: the values by name are numbers, or the least and the greatest.

    The first name and those in `pale` have colors of their own.
    """
    return {"kind": "bars", "panels": panels, "pale": pale}


def benchmark() -> pathlib.Path:
    """The running one: a script or a folder."""
    script = pathlib.Path(sys.argv[0])
    return script.parent if script.name == "__main__.py" else script


def with_earlier(rows: list[dict], table: str = "") -> list[dict]:
    """The rows of a table, and those of other cases that the running benchmark saved of this commit on this machine.

    So a long one can be run in parts. A case is what a row says other than by a float."""

    def case(row: dict) -> tuple:
        return tuple((column, value) for column, value in row.items() if not isinstance(value, float))

    path = FOLDER / f"{benchmark().stem}.json"
    saved = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    is_same = saved.get("machine") == machine() and saved.get("commit") == commit()
    earlier = saved["tables"].get(table, []) if is_same else []
    return list(({case(row): row for row in earlier} | {case(row): row for row in rows}).values())


def machine() -> str:
    """What the running benchmark is measured on."""
    import jax

    device = jax.devices()[0]
    where = (
        f"{os.cpu_count()} CPU cores" if device.platform == "cpu" else f"{jax.device_count()} x {device.device_kind}"
    )
    return f"{where}, jax {jax.__version__}, Python {platform.python_version()}"


def commit() -> str:
    """The commit of this checkout."""
    git = ["git", "-C", str(ROOT)]
    name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True).stdout
    is_changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "*.py"]).returncode
    return name.strip() + "+" * is_changed


def save(title: str, tables: dict, plot: dict, note: str = "") -> None:
    """Writes the figures of the running benchmark, then the page and the pictures."""
    write(FOLDER / f"{benchmark().stem}.json", json.dumps(figures_of(title, tables, plot, note), indent=1) + "\n")
    refresh()


def figures_of(title: str, tables: dict, plot: dict, note: str = "") -> dict:
    """What a file of JSON holds, for the benchmark and the machine that it runs on."""
    figures = {"title": title, "command": f"python benchmarks/{benchmark().name}"}
    return figures | {"machine": machine(), "commit": commit(), "note": note, "tables": tables, "plot": plot}


def refresh() -> None:
    files = sorted(FOLDER.glob("*.json"))
    for path in files:
        write(PICTURES / f"{path.stem}.svg", picture(json.loads(path.read_text(encoding="utf-8"))["plot"]))
    write(ROOT / "benchmarks" / PAGE, page(files))


def page(files: list[pathlib.Path]) -> str:
    parts = [
        "# Results of the benchmarks\n\nWritten by `python benchmarks/results.py` from `benchmarks/results/*.json`."
    ]
    for path in sorted(files, key=lambda path: (path.stem != "peers", path)):  # other libraries first
        figures = json.loads(path.read_text(encoding="utf-8"))
        measured = f"`{figures['command']}`, {figures['machine']}, commit {figures['commit']}. {figures['note']}"
        parts.append(f"## {figures['title']}\n\n{measured.strip()}")
        parts.append(f"![{figures['title']}](../docs/figures/benchmarks/{path.stem}.svg)")
        for name, rows in figures["tables"].items():
            parts.append(f"{name}:\n\n{table(rows)}" if name else table(rows))
    return "\n\n".join(parts) + "\n"


def table(rows: list[dict]) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [columns, ["---"] * len(columns), *([shown(row.get(column, "")) for column in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) >= 10 else f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def picture(plot: dict) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SETTINGS):
        figure = {"ratios": draw_ratios, "lines": draw_lines, "bars": draw_bars}[plot["kind"]](Figure, plot)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return adapted(text.getvalue())


def adapted(drawn: str) -> str:
    """An SVG of matplotlib that follows the light or dark mode of the page around it."""
    drawn = drawn[drawn.index("<svg") :].replace(INK, "currentColor")
    end = drawn.index(">") + 1
    return "\n".join(line.rstrip() for line in (drawn[:end] + "\n" + STYLE + drawn[end:]).splitlines()) + "\n"


def draw_ratios(figure_class: type, plot: dict) -> object:
    values = {name: each if isinstance(each, list) else [each, each] for name, each in plot["values"].items()}
    figure = figure_class(figsize=(5.4, 0.9 + 0.36 * len(values)), layout="constrained")
    axis = figure.subplots()
    axis.axvline(1, color=INK, linewidth=1, linestyle=":")
    for i, (least, most) in enumerate(values.values()):
        axis.plot([least, most], [i, i], color="C0", linewidth=7, solid_capstyle="round", alpha=0.9)
        axis.annotate(
            shown(float(least)) + (f" to {shown(float(most))}" if most != least else ""),
            (most, i),
            xytext=(9, -4),
            textcoords="offset points",
            fontsize=9,
        )
    axis.set_yticks(range(len(values)), values)
    axis.set(ylim=(len(values) - 0.5, -0.5), xlabel=plot["label"])
    if plot["log"]:
        axis.set_xscale("log")
    else:
        axis.set_xlim(0, 1.25 * max(most for _, most in values.values()))
    axis.tick_params(axis="y", length=0)
    return figure


def draw_lines(figure_class: type, plot: dict) -> object:
    panels = plot["panels"]
    figure = figure_class(figsize=(3.4 * len(panels) if len(panels) > 1 else 5, 3.4), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (title, series) in zip(axes, panels.items(), strict=True):
        for name, points in series.items():
            axis.plot(*zip(*points, strict=True), marker=".", label=name)
        axis.set(xscale="log", yscale="log", xlabel=plot["x"], title=title)
        axis.grid(alpha=0.3)
        xs = sorted({x for points in series.values() for x, _ in points})
        if len(xs) < 6 and xs[-1] < 1000:
            axis.set_xticks(xs, map(str, xs))
        axis.minorticks_off()
    axes[0].set_ylabel(plot["y"])
    low, high = axes[0].get_ylim()
    ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20) if low < tick < high]
    if ticks and high < 100:
        axes[0].set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=3,
        fontsize=8,
        frameon=False,
    )
    return figure


def draw_bars(figure_class: type, plot: dict) -> object:
    panels = plot["panels"]
    rows = [len(panel["values"]) for panel in panels]
    # Narrow, so that a phone shows its words in nearly their size.
    figure = figure_class(figsize=(4.8, 0.21 * sum(rows) + 0.62 * len(rows)), layout="constrained")
    axes = figure.subplots(len(panels), height_ratios=rows, squeeze=False).flat
    for axis, (i, panel) in zip(axes, enumerate(panels), strict=True):
        spans = {name: each if isinstance(each, list) else [each, each] for name, each in panel["values"].items()}
        for j, (name, (least, most)) in enumerate(spans.items()):
            middle = (least + most) / 2
            axis.barh(j, middle, 0.7, color="C7" if name in plot["pale"] else "C0" if j else "C1")
            text = shown(float(least)) + (f" to {shown(float(most))}" if most != least else "")
            axis.annotate(text, (middle, j), (3, 0), textcoords="offset points", va="center", fontsize=9)
        axis.set_yticks(range(len(spans)), spans)
        axis.set_ylim(rows[i] - 0.5, -0.5)
        axis.set_title(f"{panel['title']}: {panel['label']}", loc="right", fontsize=10)
        axis.set_xlim(0, 1.35 * max(most for _, most in spans.values()))
        axis.set_xticks([])
        axis.tick_params(axis="y", length=0)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    return figure


def write(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    refresh()
