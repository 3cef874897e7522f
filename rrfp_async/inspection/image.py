"""A timeline as a PNG or SVG file, drawn by matplotlib without a display."""

import statistics
from collections import defaultdict
from pathlib import Path as FilePath

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D

from rrfp_async.ids import TaskKind
from rrfp_async.inspection.boxes import COLOURS, MEANING, IdleBox, Picture, TaskBox

_HEIGHT = 0.8
_DPI = 120
_WIDTHS_IN = (12.0, 48.0)
_CHARACTER = 0.62  # of a digit's width to its height
_FONTS_PT = (3.5, 8.0)


def draw_image(shown: Picture, path: FilePath) -> None:
    """Draw the picture into `path`, whose ending (.png or .svg) says how.

    Raises:
        OSError: If it cannot be written.
    """
    figure = Figure(figsize=_size_in(shown), dpi=_DPI, layout="constrained")
    axes = figure.add_subplot()
    _boxes(axes, shown)
    _axes(axes, shown)
    if path.suffix == ".svg":
        FigureCanvasSVG(figure)
    else:
        FigureCanvasAgg(figure)
    _legend(figure, shown)
    figure.draw_without_rendering()
    _numbers(axes, shown)
    figure.savefig(path)


def _size_in(shown: Picture) -> tuple[float, float]:
    """Wide enough for the numbers of most tasks, within reason."""
    begin_s, end_s = _extent_s(shown)
    usual_s = _usual_s(shown)
    least_in = 2.3 * _FONTS_PT[0] * _CHARACTER / 72  # two digits
    width = least_in * (end_s - begin_s) / usual_s if usual_s > 0 else 0.0
    return min(max(width, _WIDTHS_IN[0]), _WIDTHS_IN[1]), 1.4 + 0.28 * len(shown.ranks)


def _usual_s(shown: Picture) -> float:
    return statistics.median(box.end_s - box.start_s for box in shown.tasks)


def _extent_s(shown: Picture) -> tuple[float, float]:
    boxes: list[TaskBox | IdleBox] = [*shown.tasks, *shown.idles]
    return min(box.start_s for box in boxes), max(box.end_s for box in boxes)


def _corners(shown: Picture, box: TaskBox | IdleBox) -> list[tuple[float, float]]:
    middle = shown.ranks.index(box.rank)
    low, high = middle - _HEIGHT / 2, middle + _HEIGHT / 2
    return [(box.start_s, low), (box.end_s, low), (box.end_s, high), (box.start_s, high)]


def _boxes(axes: Axes, shown: Picture) -> None:
    """One collection a kind: thousands of boxes are drawn in a few calls."""
    hatched = [_corners(shown, box) for box in shown.idles]
    axes.add_collection(
        PolyCollection(hatched, facecolor="white", edgecolor="#bbbbbb", hatch="////", linewidth=0.0)
    )
    for kind in _kinds(shown):
        filled = [_corners(shown, box) for box in shown.tasks if box.kind is kind]
        axes.add_collection(
            PolyCollection(filled, facecolor=COLOURS[kind], edgecolor="#444444", linewidth=0.25)
        )


def _kinds(shown: Picture) -> list[TaskKind]:
    present = {box.kind for box in shown.tasks}
    return [kind for kind in TaskKind if kind in present]


def _axes(axes: Axes, shown: Picture) -> None:
    axes.set_xlim(*_extent_s(shown))
    axes.set_ylim(len(shown.ranks) - 0.5, -0.5)
    axes.set_yticks(range(len(shown.ranks)), [f"rank {rank}" for rank in shown.ranks], fontsize=7)
    axes.set_xlabel("seconds since the first step began")
    axes.set_title(shown.title, loc="left")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _legend(figure: Figure, shown: Picture) -> None:
    drawn = [Patch(facecolor=COLOURS[kind], label=MEANING[kind]) for kind in _kinds(shown)]
    drawn.append(Patch(facecolor="white", edgecolor="#bbbbbb", hatch="////", label="idle"))
    figure.legend(handles=drawn, loc="outside upper right", ncols=len(drawn), frameon=False)


def _numbers(axes: Axes, shown: Picture) -> None:
    """The microbatch in each box that has room for it; a call for each number and size."""
    figure = axes.get_figure(root=True)
    assert figure is not None  # the caller has made it
    begin_s, end_s = _extent_s(shown)
    room = axes.get_window_extent()
    points_per_s = room.width / _DPI * 72 / (end_s - begin_s) if end_s > begin_s else 0.0
    most_pt = min(0.7 * _HEIGHT * room.height / _DPI * 72 / len(shown.ranks), _FONTS_PT[1])
    places: dict[tuple[str, float], list[tuple[float, float]]] = defaultdict(list)
    for task in shown.tasks:
        room_pt = (task.end_s - task.start_s) * points_per_s
        font_pt = min(room_pt / _room_pt(task.label, 1.0), most_pt) // 0.5 * 0.5
        if font_pt >= _FONTS_PT[0]:
            middle = (task.start_s + task.end_s) / 2, shown.ranks.index(task.rank)
            places[task.label, font_pt].append(middle)
    for (label, font_pt), offsets in places.items():
        axes.add_collection(
            PathCollection(
                [_centred(label, font_pt)],
                offsets=offsets,
                offset_transform=axes.transData,
                transform=Affine2D().scale(1 / 72) + figure.dpi_scale_trans,
                facecolor="black",
                linewidth=0.0,
            )
        )


def _room_pt(label: str, font_pt: float) -> float:
    return font_pt * _CHARACTER * (len(label) + 0.3)


def _centred(label: str, font_pt: float) -> Path:
    path = TextPath((0.0, 0.0), label, size=font_pt)
    box = path.get_extents()
    middle = (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2
    return path.transformed(Affine2D().translate(-middle[0], -middle[1]))
