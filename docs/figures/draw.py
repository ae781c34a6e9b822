"""Draws the figures of the site: python docs/figures/draw.py writes an SVG for each function below.

They are narrow, to be read on a phone, and follow the light or dark mode of the page around them.
"""

import html
import pathlib

HERE = pathlib.Path(__file__).resolve().parent
STYLE = """
  text { font: 15px system-ui, sans-serif; fill: #1f2330; text-anchor: middle }
  .note { font-size: 13px; fill: #565c70 } .start { text-anchor: start } .end { text-anchor: end }
  .code { font-family: ui-monospace, monospace; font-size: 12.5px }
  .box { fill: #eceffb; stroke: #4f5fb8; stroke-width: 1.3 } .strong { fill: #cfd6f6 }
  .frame { fill: none; stroke: #8a91a8; stroke-dasharray: 5 4 } .line { fill: none; stroke: #565c70; stroke-width: 1.5 }
  .dot { fill: #4f5fb8 } .head { fill: #565c70 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6e8f0 } .note { fill: #a9b0c5 }
    .box { fill: #2b3256; stroke: #8d9bea } .strong { fill: #3d488a }
    .frame { stroke: #737b94 } .line { stroke: #a9b0c5 } .dot { fill: #8d9bea } .head { fill: #a9b0c5 }
  }
"""


class Figure:
    """Shapes on a sheet of `width` by `height` points."""

    def __init__(self, title: str, width: int, height: int):
        self.title, self.width, self.height, self.parts = title, width, height, []

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        self.parts.append(f'<text class="{kind}" x="{x}" y="{y}">{html.escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, *lines: str, kind: str = "box") -> None:
        """Lines of text in a rectangle; those that begin with ` are code, those that begin with ~ are notes."""
        shape = f'x="{x}" y="{y}" width="{width}" height="{height}" rx="7"'
        self.parts.append(f'<rect class="{kind}" {shape}/>')
        top = y + height / 2 - 10 * (len(lines) - 1) + 5
        for i, line in enumerate(lines):
            kinds = {"`": "code", "~": "note"}
            self.text(x + width / 2, top + 20 * i, line.lstrip("`~"), kinds.get(line[:1], ""))

    def arrow(self, *points: tuple[float, float]) -> None:
        """A line through points, with a head at the last."""
        (x0, y0), (x, y) = points[-2:]
        length = ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5
        u, v = (x - x0) / length, (y - y0) / length
        self.line(*points[:-1], (x - 6 * u, y - 6 * v))
        corners = [(x, y), (x - 9 * u + 5 * v, y - 9 * v - 5 * u), (x - 9 * u - 5 * v, y - 9 * v + 5 * u)]
        self.parts.append(f'<path class="head" d="M{" L".join(f"{a:g} {b:g}" for a, b in corners)} Z"/>')

    def line(self, *points: tuple[float, float]) -> None:
        self.parts.append(f'<path class="line" d="M{" L".join(f"{x:g} {y:g}" for x, y in points)}"/>')

    def dot(self, x: float, y: float) -> None:
        self.parts.append(f'<circle class="dot" cx="{x}" cy="{y}" r="5"/>')

    def svg(self) -> str:
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<title>{html.escape(self.title)}</title>'
        return "\n".join([head, f"<style>{STYLE}</style>", *self.parts, "</svg>\n"])


def overview() -> Figure:
    figure = Figure("From a model_fn to a training run", 500, 470)
    figure.box(150, 8, 200, 44, "`model_fn")
    figure.arrow((250, 52), (250, 88))
    figure.text(262, 75, "wrapped, if you like", "note start")
    figure.box(130, 88, 240, 44, "`replicate_model_fn(model_fn)")
    for i in range(4):
        x = 62 + 126 * i
        figure.line((250, 132), (x, 172))
        figure.box(x - 52, 172, 104, 52, f"tower {i}", "~a quarter")
        figure.line((x, 224), (250, 262))
    figure.box(90, 262, 320, 44, "one sum, one optimizer step, one spec", kind="box strong")
    figure.arrow((250, 306), (250, 338))
    figure.box(70, 338, 360, 44, "`transform: init, train_step, eval_step ...")
    figure.text(250, 397, "pure functions, compiled once", "note")
    figure.arrow((250, 404), (250, 424))
    figure.box(8, 424, 112, 40, "`input_fn")
    figure.arrow((120, 444), (160, 444))
    figure.box(160, 424, 180, 40, "Estimator", kind="box strong")
    figure.arrow((340, 444), (380, 444))
    figure.box(380, 424, 112, 40, "checkpoints")
    return figure


def one_step() -> Figure:
    figure = Figure("The life of one training step", 520, 620)
    figure.box(20, 10, 210, 50, "features, labels", "~64 rows")
    figure.box(290, 10, 210, 50, "State", "~variables, slots, key, step")
    figure.box(8, 92, 504, 368, kind="frame")
    figure.text(20, 453, "one compiled program", "note start")
    figure.arrow((125, 60), (125, 136))
    figure.text(137, 130, "split by rows", "note start")
    figure.arrow((395, 60), (395, 136))
    figure.text(383, 130, "the same for each", "note end")
    for i in range(4):
        x = 20 + 122 * i
        figure.box(x, 138, 114, 130, f"tower {i}", "~16 rows, a key", "`model_fn", "loss / 4", "one vjp")
        figure.line((x + 57, 268), (x + 57, 282))
    figure.line((77, 282), (443, 282))
    figure.line((169, 282), (169, 296))
    figure.line((413, 282), (413, 296))
    figure.box(20, 296, 298, 58, "one sum", "~gradients, loss, metrics, written variables", kind="box strong")
    figure.box(326, 296, 174, 58, "put in order", "~predictions", kind="box")
    figure.arrow((169, 354), (169, 382))
    figure.box(20, 384, 298, 50, "the optimizer, once", "~clipping and Adam see the sums", kind="box")
    figure.arrow((169, 434), (169, 492))
    figure.arrow((413, 354), (413, 492))
    figure.box(20, 494, 298, 50, "State", "~new variables and slots, step + 1")
    figure.box(326, 494, 174, 50, "EstimatorSpec", "~loss, metrics ...")
    figure.arrow((169, 544), (169, 588))
    figure.text(169, 608, "the next step; now and then a checkpoint", "note")
    figure.arrow((413, 544), (413, 588))
    figure.text(413, 608, "log lines, hooks, summaries", "note")
    return figure


def loop() -> Figure:
    figure = Figure("What train does", 500, 300)
    figure.box(8, 20, 130, 56, "`input_fn", "~batches")
    figure.arrow((138, 48), (184, 48))
    figure.text(161, 14, "a thread", "note")
    figure.box(184, 20, 130, 56, "chunks", "~1 to 100 batches")
    figure.arrow((314, 48), (360, 48))
    figure.box(360, 20, 132, 56, "programs", "~of as many steps", kind="box strong")
    figure.arrow((426, 76), (426, 126))
    figure.box(322, 126, 170, 56, "losses, values", "~checked every 100 steps")
    figure.arrow((322, 154), (258, 154))
    figure.box(78, 126, 180, 56, "hooks", "`next_step, after_run")
    figure.arrow((230, 126), (230, 76))
    figure.text(222, 106, "when they are due", "note end")
    figure.arrow((426, 182), (426, 232))
    figure.box(322, 232, 170, 56, "checkpoints", "~written by a thread")
    figure.arrow((168, 182), (168, 232))
    figure.box(78, 232, 180, 56, "log, summaries", "~TensorBoard, history")
    return figure


def block_sync() -> Figure:
    figure = Figure("Towers that synchronize once per block of 16 steps", 500, 250)
    steps = {110: "1", 160: "2", 215: "...", 262: "16", 372: "17", 422: "18"}
    for x, step in steps.items():
        figure.text(x, 28, step, "note")
    figure.text(40, 28, "step", "note")
    for tower in range(3):
        y = 62 + 44 * tower
        figure.text(40, y + 5, f"tower {tower}")
        figure.line((84, y), (296, y))
        figure.arrow((340, y), (470, y))
        for x in (110, 160, 262, 372, 422):
            figure.dot(x, y)
    figure.box(296, 44, 44, 124, kind="box strong")
    figure.line((318, 168), (318, 190))
    figure.text(250, 208, "the average of the copies; the outer optimizer moves", "note")
    figure.text(250, 228, "the global variables, and all towers continue from there", "note")
    return figure


def distributions() -> Figure:
    figure = Figure("Where four variables live on four towers, by distribution", 500, 452)
    full, towers = [(0, 72)] * 4, range(4)
    rows = {
        "MIRRORED": [full for _ in towers],
        "SHARDED": [[(18 * i, 18)] * 4 for i in towers],
        "SHARED_LOCAL_PARAMETER_SERVER": [[] for _ in towers],
        "SHARED_ROUND_ROBIN": [[(0, 72) if j == i else (0, 0) for j in towers] for i in towers],
    }
    for row, (name, devices) in enumerate(rows.items()):
        y = 20 + 110 * row
        figure.parts.append(f'<text class="code start" x="8" y="{y}">{name}</text>')
        places = [*enumerate(devices)] + ([(4, full)] if not any(devices) else [])
        for i, bars in places:
            x = 8 + 98 * i
            figure.box(x, y + 10, 90, 56, kind="frame")
            figure.text(x + 45, y + 82, "variable_device" if i == 4 else f"tower {i}", "note")
            for j, (left, width) in enumerate(bars):
                if width:
                    shape = f'x="{x + 9 + left}" y="{y + 17 + 11 * j}" width="{width}" height="8" rx="2"'
                    figure.parts.append(f'<rect class="dot" {shape}/>')
    return figure


FIGURES = {
    "overview": overview,
    "one_step": one_step,
    "loop": loop,
    "block_sync": block_sync,
    "distributions": distributions,
}

if __name__ == "__main__":
    for name, drawn in FIGURES.items():
        (HERE / f"{name}.svg").write_text(drawn().svg(), encoding="utf-8")
