"""The page in a real browser: it draws, filters, follows the theme, fits a phone, and complains of nothing."""

import struct

import browser
import pytest
from fake_run import write_fake_run

from qerl.report.html import write_report

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        browser.missing() is not None, reason=f"{browser.missing()}: apt-get install chromium chromium-driver"
    ),
]

VISIBLE = "return Array.from(document.querySelectorAll(arguments[0])).filter((n) => n.offsetParent !== null).length;"
CLICK = "document.querySelector(arguments[0]).click();"
TYPE = (
    "const box = document.querySelector(arguments[0]); box.value = arguments[1]; box.dispatchEvent(new Event('input'));"
)
DRAWN = "document.querySelectorAll('[data-figure] svg.main-svg').length >= document.querySelectorAll('[data-figure]').length"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return write_report(write_fake_run(tmp_path_factory.mktemp("runs") / "example", steps=80).path, target=0.8)


@pytest.fixture(scope="module")
def window():
    with browser.Browser() as opened:
        yield opened


@pytest.fixture
def shown(window, page):
    """The page on a desk in daylight, every figure drawn; nothing may have been complained of at the end."""
    window.look(width=1280, height=900)
    window.open(page)
    window.run("window.dispatchEvent(new Event('beforeprint'));")
    window.wait(DRAWN)
    yield window
    assert window.console() == []


def test_every_figure_is_drawn_and_holds_data(shown):
    assert shown.run("return document.querySelectorAll('[data-figure]').length;") >= 18
    empty = "return Array.from(document.querySelectorAll('[data-figure]')).filter((n) => !n.querySelector('.trace, .bars .point, .fills path')).map((n) => n.dataset.figure);"
    assert shown.run(empty) == []
    assert shown.run("return document.querySelector('[data-card=quality] .answer').textContent;").startswith(
        "80.0% reached"
    )


def test_questions_are_filtered_by_change_outcome_and_words(shown):
    count = "return Number(document.querySelector('#question-filters .shown').textContent.split(' ')[0]);"
    assert shown.run(count) == 40
    assert shown.run(VISIBLE, "#question-list .sample") == 12
    shown.run(CLICK, "#more-questions")
    assert shown.run(VISIBLE, "#question-list .sample") == 24
    shown.run(CLICK, "#question-filters [data-value=gained]")
    gained = shown.run(count)
    assert 0 < gained < 40
    assert (
        shown.run(
            "return new Set(Array.from(document.querySelectorAll('#question-list .sample'), (n) => n.dataset.change)).size;"
        )
        == 1
    )
    shown.run(CLICK, "#question-filters [data-kind=change][data-value='']")
    shown.run(CLICK, "#question-filters [data-value=unparsable]")
    silent = shown.run(count)
    assert 0 < silent < 40
    assert "<b>many</b>" in shown.run(
        "return document.querySelector('#question-list .side:last-child pre').textContent;"
    )
    shown.run(TYPE, "#question-filters input", "no such words")
    assert shown.run(count) == 0
    assert shown.run(VISIBLE, "#more-questions") == 0
    shown.run(CLICK, "#question-filters [data-kind=outcome][data-value='']")
    shown.run(TYPE, "#question-filters input", "ANN HAS 5 APPLES")
    assert shown.run(count) == 1


def test_training_answers_are_filtered(shown):
    every = shown.run(VISIBLE, "#answer-list .sample")
    shown.run(CLICK, "#answer-filters [data-value=wrong]")
    wrong = shown.run(VISIBLE, "#answer-list .sample")
    assert 0 < wrong < every
    assert shown.run(VISIBLE, "#answer-list .sample[data-outcome=correct]") == 0
    shown.run(CLICK, "#answer-filters [data-value=early]")
    assert shown.run(VISIBLE, "#answer-list .sample[data-when=late]") == 0
    shown.run(TYPE, "#answer-filters input", "zebra")
    assert shown.run(VISIBLE, "#answer-list .sample") == 0


def test_the_theme_reaches_page_and_figures(shown):
    colors = "return [getComputedStyle(document.body).backgroundColor, document.querySelector('[data-figure] .xtick text').style.fill];"
    light = shown.run(colors)
    shown.look(width=1280, height=900, dark=True)
    shown.wait(f"(() => {{ {colors} }})()[1] !== '{light[1]}'")
    dark = shown.run(colors)
    assert sum(map(int, light[0][4:-1].split(","))) > 600
    assert sum(map(int, dark[0][4:-1].split(","))) < 120
    assert light[1] != dark[1]


def test_nothing_is_wider_than_a_phone(shown):
    shown.look(width=390, height=844, phone=True)
    shown.wait("document.documentElement.scrollWidth <= 390")
    wide = "return Array.from(document.querySelectorAll('main *')).filter((n) => !n.closest('.scroll, .plot') && n.getBoundingClientRect().right > 391).length;"
    assert shown.run(wide) == 0
    image = shown.screenshot()
    assert struct.unpack(">II", image[16:24]) == (780, 1688)


def test_a_crashed_run_of_one_step_draws_too(window, tmp_path):
    run = write_fake_run(tmp_path / "crashed", steps=80, done=1, finished=False)
    window.look(width=1280, height=900)
    window.open(write_report(run.path))
    window.run("window.dispatchEvent(new Event('beforeprint'));")
    window.wait(DRAWN)
    assert "unfinished" in window.run("return document.querySelector('.title').textContent;")
    assert window.console() == []


def test_the_page_asks_for_nothing_from_a_network(shown):
    loaded = shown.run("return performance.getEntriesByType('resource').map((entry) => entry.name);")
    assert [name for name in loaded if not name.startswith(("data:", "blob:"))] == []
