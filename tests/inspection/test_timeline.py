"""`rrfp timeline`: the picture as PNG, SVG and a page, opened in a browser where there is one."""

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from rrfp_async.ids import TaskKind
from rrfp_async.inspection.boxes import picture
from rrfp_async.inspection.reading import read_run
from tests.inspection.conftest import Ended
from tests.inspection.planted import REASON, Planted, tables

pytest.importorskip("bokeh", reason="the extra `pictures` is not installed")
pytest.importorskip("matplotlib", reason="the extra `pictures` is not installed")

Rrfp = Callable[..., Ended]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

# Where a box is on the screen: by what Bokeh drew, not by what was asked for.
_MIDDLE_OF = """([kind, at]) => {
    const [view] = Bokeh.index.roots;
    const drawn = view.model.renderers.find(r => r.data_source.data.name?.[at]?.includes(kind));
    const {left, right, row} = drawn.data_source.data;
    const corner = view.el.getBoundingClientRect();
    const x = view.frame.x_scale.compute((left[at] + right[at]) / 2);
    return [corner.x + x, corner.y + view.frame.y_scale.compute(row[at])];
}"""
_TOLD = """() => {
    const found = [];
    const search = root => {
        for (const element of root.querySelectorAll("*")) {
            if (element.shadowRoot) search(element.shadowRoot);
            if (element.classList.contains("bk-Tooltip")) {
                const texts = (element.shadowRoot ?? element).querySelectorAll("div");
                found.push([...texts].map(text => text.innerText ?? "").join(" "));
            }
        }
    };
    search(document);
    return found.join(" ");
}"""

_NUMBERS_SHOWN = """() => {
    const [view] = Bokeh.index.roots;
    return view.model.renderers.find(r => r.data_source.data.text !== undefined).visible;
}"""
_ZOOM = """([start, end]) => {
    const range = Bokeh.index.roots[0].model.x_range;
    range.setv({start, end});
}"""
_IDLE = "window.Bokeh !== undefined && Bokeh.documents[0]?.is_idle"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four ranks, six microbatches, two steps."""
    return Planted(tables(4, 6)).write(tmp_path / "trace", steps=2)


def test_a_picture_has_a_box_for_every_task_and_idle_span(folder: Path) -> None:
    """Of the last step, unless another is asked for."""
    run = read_run(folder)
    last, first = picture(run), picture(run, 0)
    assert (last.title[:6], first.title[:6]) == ("Step 1", "Step 0")
    assert len(last.tasks) == len(first.tasks) == 4 * 2 * 6
    assert {box.kind for box in last.tasks} == {TaskKind.F, TaskKind.B}
    assert min(box.start_s for box in last.tasks) > max(box.end_s for box in first.tasks)
    steps = [trace.steps[1] for trace in run.ranks.values()]
    assert len(last.idles) == sum(len(step.idles) for step in steps) > 4
    assert all(REASON in box.reason for box in last.tasks)


def test_a_png_is_drawn_in_the_colours_of_the_kinds(
    rrfp: Rrfp, folder: Path, tmp_path: Path
) -> None:
    """Blue and green fill more of it than anything but white."""
    image = pytest.importorskip("matplotlib.image")
    out = tmp_path / "x.png"
    ended = rrfp("timeline", folder, "--out", out)
    assert (ended.status, ended.out, ended.err) == (0, "", "")
    pixels = (image.imread(out)[:, :, :3] * 255).round().astype(int).reshape(-1, 3)
    for colour in ((0x6B, 0xAE, 0xD6), (0x74, 0xC4, 0x76)):
        share = (abs(pixels - colour).max(axis=1) <= 1).mean()
        assert share > 0.03, colour


def test_an_svg_is_drawn(rrfp: Rrfp, folder: Path, tmp_path: Path) -> None:
    """Well-formed, with a shape for every task."""
    ended = rrfp("timeline", folder, "--out", tmp_path / "x.svg", "--step", 0)
    assert (ended.status, ended.err) == (0, "")
    text = (tmp_path / "x.svg").read_text()
    ElementTree.fromstring(text)
    assert text.count("#6baed6") > 4 * 6
    assert text.count("#74c476") > 4 * 6


def test_another_ending_is_refused(rrfp: Rrfp, folder: Path) -> None:
    """With those that there are."""
    ended = rrfp("timeline", folder, "--out", "x.jpg")
    assert (ended.status, ended.out) == (2, "")
    assert "--out x.jpg must end in one of .png, .svg, .html" in ended.err


def test_a_page_names_no_address_to_load_from(rrfp: Rrfp, folder: Path, tmp_path: Path) -> None:
    """No script, style or picture from elsewhere, so it is one file."""
    assert rrfp("timeline", folder, "--out", tmp_path / "x.html").status == 0
    text = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=[^>]*>", text)


@contextmanager
def opened(path: Path) -> Iterator[tuple[Any, list[str], list[str]]]:
    """The page in headless Chromium; its errors and its requests, itself the first."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        errors: list[str] = []
        requests: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda told: errors.append(told.text) if told.type == "error" else None)
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_function(_IDLE)
        yield page, errors, requests
        browser.close()


def hovered(page: Any, kind: str) -> str:
    """What the page says of the first box of a kind when the mouse is on it."""
    x, y = page.evaluate(_MIDDLE_OF, [kind, 0])
    page.mouse.move(x - 2, y)
    page.mouse.move(x, y)
    told = page.locator(".bk-tooltip-content:visible, .bk-Tooltip:visible").first
    told.wait_for(timeout=5000)
    return " ".join(page.evaluate(_TOLD).split())


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
def test_the_page_draws_and_tells_reasons_in_a_browser(
    rrfp: Rrfp, folder: Path, tmp_path: Path
) -> None:
    """In headless Chromium: boxes are there, a hover shows why; no error, no request."""
    rrfp("timeline", folder, "--out", tmp_path / "x.html")
    with opened(tmp_path / "x.html") as (page, errors, requests):
        told = hovered(page, "F")
        assert "0F0 on rank 0" in told
        assert REASON in told
        page.mouse.move(0, 0)
        assert "0B0 lacked its gradient from 1B0 on rank 1 (edge 0->1)" in hovered(page, "idle")
        assert page.evaluate(_NUMBERS_SHOWN)
    assert (errors, requests) == ([], [(tmp_path / "x.html").as_uri()])


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
def test_numbers_wait_for_room_on_a_large_page(rrfp: Rrfp, tmp_path: Path) -> None:
    """64 ranks and microbatches: none at first; zoomed in, each box has its number."""
    planted = Planted(tables(64, 64))
    planted.write(tmp_path / "trace")
    rrfp("timeline", tmp_path / "trace", "--out", tmp_path / "x.html")
    with opened(tmp_path / "x.html") as (page, errors, requests):
        assert not page.evaluate(_NUMBERS_SHOWN)
        page.evaluate(_ZOOM, [0.0, planted.makespan_s / 20])
        page.wait_for_function(_NUMBERS_SHOWN)
    assert (errors, requests) == ([], [(tmp_path / "x.html").as_uri()])
