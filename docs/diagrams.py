"""Draw the diagrams of the documentation: boxes and arrows, written as SVG.

    python docs/diagrams.py

writes docs/images/{cycle,gemms,life,packages}.svg. Each picture brings its own light ground, so
that it is legible on a dark page, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

INK = "#1f2933"
FAINT = "#7b8794"
GROUND = "#ffffff"
PLAIN = "#eef1f5"
BLUE = "#cfe3f7"
ORANGE = "#fbdcc0"
GREEN = "#d5ecd4"
FONT = "font-family='Helvetica, Arial, sans-serif'"
LINE_HEIGHT = 18


class Diagram:
    """A picture that is drawn top-down; coordinates are pixels from the upper left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        """Start with an empty ground.

        Args:
            width: of the picture.
            height: of the picture.
            title: what the picture shows, for readers who cannot see it.
        """
        self._width = width
        self._height = height
        self._title = title
        self._parts: list[str] = []

    def box(
        self, x: int, y: int, width: int, height: int, lines: Iterable[str], fill: str = PLAIN
    ) -> None:
        """Draw a box with centered lines of text; the first line is bold."""
        self._parts.append(
            f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='6' fill='{fill}' "
            f"stroke='{INK}' stroke-width='1'/>"
        )
        texts = list(lines)
        first = y + height / 2 - (len(texts) - 1) * LINE_HEIGHT / 2 + 5
        for number, line in enumerate(texts):
            at = first + number * LINE_HEIGHT
            self.text(x + width // 2, round(at), line, bold=number == 0, anchor="middle")

    def text(
        self,
        x: int,
        y: int,
        line: str,
        bold: bool = False,
        anchor: str = "start",
        color: str = INK,
    ) -> None:
        """Write one line; `anchor` is SVG's text-anchor."""
        weight = " font-weight='bold'" if bold else ""
        self._parts.append(
            f"<text x='{x}' y='{y}' font-size='13' text-anchor='{anchor}' fill='{color}'{weight}>"
            f"{escape(line)}</text>"
        )

    def arrow(self, *points: tuple[int, int]) -> None:
        """Draw a line through the points, with a head at the last one."""
        path = " ".join(f"{x},{y}" for x, y in points)
        self._parts.append(
            f"<polyline points='{path}' fill='none' stroke='{INK}' stroke-width='1.5' "
            "marker-end='url(#head)'/>"
        )

    def svg(self) -> str:
        """Return the picture."""
        head = (
            "<defs><marker id='head' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='8' "
            f"markerHeight='8' orient='auto'><path d='M0,0 L8,4 L0,8 z' fill='{INK}'/></marker>"
            "</defs>"
        )
        size = f"width='{self._width}' height='{self._height}'"
        return "\n".join(
            [
                f"<svg xmlns='http://www.w3.org/2000/svg' {size} "
                f"viewBox='0 0 {self._width} {self._height}' {FONT} role='img'>",
                f"<title>{escape(self._title)}</title>",
                head,
                f"<rect {size} fill='{GROUND}'/>",
                *self._parts,
                "</svg>\n",
            ]
        )


def cycle() -> Diagram:
    """Return the cycle over ranks and iterations."""
    picture = Diagram(900, 330, "The cycle: observe, reduce, solve, apply, over ranks")
    columns = {"observe": 110, "reduce": 300, "train on": 490, "apply": 700}
    for name, x in columns.items():
        picture.text(x + 75, 30, name, bold=True, anchor="middle")
    picture.text(185, 50, "iteration s", anchor="middle", color=FAINT)
    picture.text(375, 50, "end of s", anchor="middle", color=FAINT)
    picture.text(565, 50, "s + 1 ... s + lag - 1", anchor="middle", color=FAINT)
    picture.text(775, 50, "before s + lag", anchor="middle", color=FAINT)
    for number, label in enumerate(("rank 0", "rank 1", "rank N")):
        y = 70 + 70 * number
        picture.text(20, y + 30, label, bold=True)
        picture.box(110, y, 150, 50, ["forward, backward", "sums of errors"], BLUE)
        picture.box(490, y, 150, 50, ["baseline", "steps"])
        picture.box(700, y, 150, 50, ["check digest", "set precisions"], GREEN)
        picture.arrow((260, y + 25), (300, y + 25))
        picture.arrow((450, y + 25), (490, y + 25))
        picture.arrow((640, y + 25), (700, y + 25))
    picture.box(
        300, 70, 150, 190, ["all-reduce", "over TP, PP, DP,", "EP and CP ranks:", "one table"], BLUE
    )
    picture.box(490, 275, 150, 45, ["solver process", "of rank 0"], ORANGE)
    picture.arrow((375, 260), (375, 297), (490, 297))
    picture.arrow((640, 297), (775, 297), (775, 260))
    picture.text(385, 316, "problem", color=FAINT)
    picture.text(655, 316, "plan, broadcast", color=FAINT)
    return picture


def gemms() -> Diagram:
    """Return the three GEMMs of a linear with a format each."""
    picture = Diagram(820, 270, "The three GEMMs of a linear, each with a format")
    rows = (
        ("fprop", "Y = X W^T", ["input X", "weight W"], "output Y", "fp4", ORANGE),
        ("dgrad", "dX = G W", ["grad_output G", "weight W"], "grad_input dX", "fp8", BLUE),
        ("wgrad", "dW = G^T X", ["grad_output G", "input X"], "grad_weight dW", "bf16", PLAIN),
    )
    for number, (name, formula, operands, result, one_format, color) in enumerate(rows):
        y = 40 + 75 * number
        picture.text(20, y + 30, name, bold=True)
        for place, operand in enumerate(operands):
            top = y + 27 * place
            picture.box(90, top, 140, 23, [operand])
            picture.box(280, top, 130, 23, [f"quantize {one_format}"], color)
            picture.arrow((230, top + 12), (280, top + 12))
            picture.arrow((410, top + 12), (460, y + 25))
        picture.box(460, y, 130, 50, ["GEMM", formula], color)
        picture.box(650, y + 10, 140, 30, [result])
        picture.arrow((590, y + 25), (650, y + 25))
    picture.text(20, 22, "The option fp4-fp8-bf16 of one linear:", color=FAINT)
    return picture


def packages() -> Diagram:
    """Return the packages in the order in which data flows."""
    picture = Diagram(900, 330, "The packages: data flows from tensors to a plan and back")
    picture.box(20, 20, 860, 40, ["patches: Megatron-LM's and Megatron-Bridge's loops, CPU"], PLAIN)
    picture.box(20, 90, 860, 40, ["run: the life of a run, iteration by iteration"], GREEN)
    across = (
        ("linears", "precision of", "each GEMM", BLUE),
        ("statistics", "norms, errors,", "health", BLUE),
        ("divergence", "quality loss of", "each option", BLUE),
        ("planning", "constraints,", "CP-SAT, policies", ORANGE),
        ("reporting", "files, W&B,", "TensorBoard", PLAIN),
    )
    for number, (name, first, second, color) in enumerate(across):
        x = 20 + 177 * number
        picture.box(x, 165, 152, 70, [name, first, second], color)
        if number < len(across) - 1:
            picture.arrow((x + 152, 200), (x + 177, 200))
    for x in (96, 273, 450, 627, 804):
        picture.arrow((x, 130), (x, 165))
    picture.arrow((450, 60), (450, 90))
    picture.box(20, 270, 329, 40, ["quantizers, kernels"], BLUE)
    picture.arrow((96, 235), (96, 270))
    picture.arrow((273, 235), (273, 270))
    picture.text(365, 295, "errors, types, formats, options, files: used by all", color=FAINT)
    return picture


def life() -> Diagram:
    """Return how a plan comes into being, and where it ends; boxes name modules of `run`."""
    picture = Diagram(900, 470, "The life of a plan, with the modules of megatron_snip/run")
    sources = (
        ("plan file", "--snip-plan-file", ORANGE),
        ("checkpoint", "state: plan, problem", ORANGE),
        ("policy", "without measurements", ORANGE),
        ("the job's own", "until a refresh", ORANGE),
    )
    for number, (name, detail, color) in enumerate(sources):
        x = 20 + 220 * number
        picture.box(x, 20, 190, 50, [name, detail], color)
        picture.arrow((x + 95, 70), (x + 95, 100))
    picture.box(20, 100, 850, 50, ["plans: the first plan", "fitting: pins, formats, linears"])
    picture.arrow((445, 150), (445, 190))
    picture.box(330, 190, 230, 60, ["state: one plan at a time", "linears run its options"], GREEN)
    picture.box(20, 190, 220, 60, ["guard: runs the iteration", "again under a fallback"], GREEN)
    picture.arrow((330, 210), (240, 210))
    picture.text(285, 202, "run", anchor="middle", color=FAINT)
    picture.arrow((240, 235), (330, 235))
    picture.text(285, 250, "revert", anchor="middle", color=FAINT)
    picture.arrow((445, 250), (445, 300))
    picture.text(455, 280, "schedule: a refresh is due", color=FAINT)
    picture.box(330, 300, 230, 60, ["observation", "statistics, divergences"], BLUE)
    picture.arrow((445, 360), (445, 400))
    picture.text(455, 385, "replanning: the planning problem", color=FAINT)
    picture.box(330, 400, 230, 50, ["solve: rank 0's solver", "training goes on"], BLUE)
    picture.arrow((560, 425), (740, 425), (740, 250))
    picture.text(750, 350, "the plan, lag", color=FAINT)
    picture.text(750, 368, "iterations later", color=FAINT)
    picture.box(640, 190, 230, 60, ["controller: apply it", "same digest on all ranks"], GREEN)
    picture.arrow((640, 220), (560, 220))
    return picture


DIAGRAMS = {"cycle": cycle, "gemms": gemms, "life": life, "packages": packages}

if __name__ == "__main__":
    for name, draw in DIAGRAMS.items():
        path = Path(__file__).with_name("images") / f"{name}.svg"
        path.write_text(draw().svg(), encoding="utf-8")
