"""A timeline as one self-contained HTML page, by Bokeh: zoom, and hover for every reason.

The page holds Bokeh's own scripts and asks the network for nothing.
"""

from pathlib import Path
from typing import Any

from bokeh.embed import file_html
from bokeh.models import (
    ColumnDataSource,
    CustomJS,
    HoverTool,
    NumeralTickFormatter,
    Range1d,
)
from bokeh.models.annotations import Legend, LegendItem
from bokeh.plotting import figure
from bokeh.resources import INLINE

from rrfp_async.ids import TaskKind
from rrfp_async.inspection.boxes import COLOURS, MEANING, IdleBox, Picture, TaskBox

_ROW_PX = 24
_AROUND_PX = 130
_HEIGHT = 0.8
_ROOM_PX = 16  # a box at least so wide gets its number
_TOOLS = "xpan,xwheel_zoom,box_zoom,reset,save"
_HOVER = """
<div style="max-width: 420px"><b>@name</b> on rank @rank<br>@when<br>@reason</div>
"""
_SHOW_NUMBERS = """
const range = figure.x_range;
const usual_px = figure.inner_width * usual_s / (range.end - range.start);
numbers.visible = usual_px >= room_px;
"""


def write_page(shown: Picture, path: Path) -> None:
    """Write the picture as a page into `path`.

    Raises:
        OSError: If it cannot be written.
    """
    path.write_text(page(shown), encoding="utf-8")


def page(shown: Picture) -> str:
    """The page."""
    drawn = _figure(shown)
    kinds = [kind for kind in TaskKind if any(box.kind is kind for box in shown.tasks)]
    tasks = {kind: _tasks(drawn, shown, kind) for kind in kinds}
    idle = _idles(drawn, shown)
    numbers = _numbers(drawn, shown)
    items = [LegendItem(label=MEANING[kind], renderers=[tasks[kind]]) for kind in kinds]
    items.append(LegendItem(label="idle", renderers=[idle]))
    legend = Legend(items=items, orientation="horizontal", click_policy="hide", border_line_width=0)
    drawn.add_layout(legend, "above")
    hover = HoverTool(
        renderers=[*tasks.values(), idle], tooltips=_HOVER, point_policy="follow_mouse"
    )
    drawn.add_tools(hover)
    _numbers_when_zoomed(drawn, numbers, shown)
    return file_html(drawn, INLINE, shown.title)


def _figure(shown: Picture) -> Any:
    boxes: list[TaskBox | IdleBox] = [*shown.tasks, *shown.idles]
    extent_s = min(box.start_s for box in boxes), max(box.end_s for box in boxes)
    drawn = figure(
        title=shown.title,
        x_range=Range1d(start=extent_s[0], end=extent_s[1], bounds=extent_s),
        y_range=Range1d(start=len(shown.ranks) - 0.5, end=-0.5),
        height=_AROUND_PX + _ROW_PX * len(shown.ranks),
        sizing_mode="stretch_width",
        tools=_TOOLS,
        active_drag="box_zoom",
        active_scroll="xwheel_zoom",
        x_axis_label="seconds since the first step began",
        output_backend="canvas",
    )
    drawn.xaxis.formatter = NumeralTickFormatter(format="0.000000")
    drawn.yaxis.ticker = list(range(len(shown.ranks)))
    drawn.yaxis.major_label_overrides = {at: f"rank {rank}" for at, rank in enumerate(shown.ranks)}
    drawn.grid.visible = False
    drawn.toolbar.logo = None
    return drawn


def _columns(shown: Picture, boxes: list[TaskBox] | list[IdleBox]) -> dict[str, list[Any]]:
    rows = {rank: at for at, rank in enumerate(shown.ranks)}
    return {
        "row": [rows[box.rank] for box in boxes],
        "left": [box.start_s for box in boxes],
        "right": [box.end_s for box in boxes],
        "rank": [box.rank for box in boxes],
        "when": [box.when for box in boxes],
        "reason": [box.reason for box in boxes],
    }


def _tasks(drawn: Any, shown: Picture, kind: TaskKind) -> Any:
    boxes = [box for box in shown.tasks if box.kind is kind]
    columns = {**_columns(shown, boxes), "name": [box.name for box in boxes]}
    return drawn.hbar(
        y="row",
        left="left",
        right="right",
        height=_HEIGHT,
        source=ColumnDataSource(columns),
        fill_color=COLOURS[kind],
        line_color="#444444",
        line_width=0.4,
    )


def _idles(drawn: Any, shown: Picture) -> Any:
    boxes = list(shown.idles)
    columns = {**_columns(shown, boxes), "name": ["idle"] * len(boxes)}
    return drawn.hbar(
        y="row",
        left="left",
        right="right",
        height=_HEIGHT,
        source=ColumnDataSource(columns),
        fill_color="white",
        line_color=None,
        hatch_pattern="right_diagonal_line",
        hatch_color="#bbbbbb",
        hatch_scale=8,
        hatch_weight=0.7,
    )


def _numbers(drawn: Any, shown: Picture) -> Any:
    rows = {rank: at for at, rank in enumerate(shown.ranks)}
    columns = {
        "x": [(box.start_s + box.end_s) / 2 for box in shown.tasks],
        "y": [rows[box.rank] for box in shown.tasks],
        "text": [box.label for box in shown.tasks],
    }
    return drawn.text(
        x="x",
        y="y",
        text="text",
        source=ColumnDataSource(columns),
        text_align="center",
        text_baseline="middle",
        text_font_size="11px",
        visible=False,
    )


def _numbers_when_zoomed(drawn: Any, numbers: Any, shown: Picture) -> None:
    """Numbers appear once the usual box has room for one: before, they would cover it all."""
    lengths = sorted(box.end_s - box.start_s for box in shown.tasks)
    told = {
        "figure": drawn,
        "numbers": numbers,
        "usual_s": lengths[len(lengths) // 2],
        "room_px": _ROOM_PX,
    }
    show = CustomJS(args=told, code=_SHOW_NUMBERS)
    drawn.js_on_change("inner_width", show)
    drawn.x_range.js_on_change("start", show)
    drawn.x_range.js_on_change("end", show)
