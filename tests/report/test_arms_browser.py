"""The page of several runs in a real browser: it draws, follows the theme, fits a phone, and complains of nothing."""

from dataclasses import replace

import browser
import pytest
from fake_cells import write_fake_matrix

from qerl.experiments.compare import compare_cells
from qerl.experiments.folders import read_cells
from qerl.report.arms import write_arms_report

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        browser.missing() is not None, reason=f"{browser.missing()}: apt-get install chromium chromium-driver"
    ),
]
DRAWN = "document.querySelectorAll('[data-figure] svg.main-svg').length >= document.querySelectorAll('[data-figure]').length"

ALIKE = """return Array.from(document.querySelectorAll('[data-figure]')).filter((n) => ['.xtick text', '.ytick text'].some((ticks) => {
    const texts = Array.from(n.querySelectorAll(ticks)).map((tick) => tick.textContent);
    return new Set(texts).size < texts.length;
})).map((n) => n.dataset.figure);"""
"""Figures with two ticks that read alike."""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Means of arms a third of a point apart, so that an axis needs decimals."""
    folder = tmp_path_factory.mktemp("matrix")
    (comparison,) = compare_cells(read_cells([write_fake_matrix(folder)]))
    close = tuple(
        replace(arm, after=replace(arm.after, mean=0.45 + index / 300)) for index, arm in enumerate(comparison.arms)
    )
    return write_arms_report([replace(comparison, arms=close)], folder / "report.html")


@pytest.mark.parametrize(
    "look", [{"width": 1280, "height": 900}, {"width": 390, "height": 844, "phone": True, "dark": True}]
)
def test_every_figure_is_drawn_and_the_page_fits(page, look):
    with browser.Browser() as window:
        window.look(**look)
        window.open(page)
        window.run("window.dispatchEvent(new Event('beforeprint'));")
        window.wait(DRAWN)
        empty = "return Array.from(document.querySelectorAll('[data-figure]')).filter((n) => !n.querySelector('.trace, .bars .point')).map((n) => n.dataset.figure);"
        assert window.run(empty) == []
        assert window.run(ALIKE) == []
        assert window.run("return document.documentElement.scrollWidth <= window.innerWidth;")
        background = window.run("return getComputedStyle(document.body).backgroundColor;")
        assert background == ("rgb(15, 18, 24)" if look.get("dark") else "rgb(246, 247, 249)")
        assert window.console() == []
