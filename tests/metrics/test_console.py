import io
import os
import pty
from pathlib import Path

import pytest
from rich.console import Console

from qerl.metrics import terminal
from qerl.metrics.console import BLOCKS, Progress, TimeLeft, duration, sparkline


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def console(width=100, terminal=False):
    return Console(file=io.StringIO(), width=width, force_terminal=terminal, highlight=False, color_system=None)


def row(step, **changes):
    return {
        "step": step,
        "reward": 0.5,
        "accuracy": 0.25,
        "entropy": 0.4,
        "aqn/sigma": 0.05,
        "tokens_per_second": 1234.0,
        **changes,
    }


def test_time_left_is_the_mean_of_the_last_steps_times_those_to_come():
    clock = Clock()
    left = TimeLeft(100, eval_every=0, eval_after=False, clock=clock)
    assert left.seconds(0) is None
    for step in range(1, 21):
        clock.now += 9.0 if step <= 10 else 2.0
        left.add(step, {})
    assert left.seconds(20) == pytest.approx(80 * 2.0)
    assert left.seconds(100) == 0.0


def test_time_left_counts_evaluations_to_come_and_keeps_past_ones_out_of_the_steps():
    clock = Clock()
    left = TimeLeft(10, eval_every=4, eval_after=True, clock=clock)
    clock.now += 30.0
    left.add(0, {"time/evaluate": 30.0})
    for step in range(1, 5):
        clock.now += 32.0 if step == 4 else 2.0
        left.add(step, {"time/evaluate": 30.0 if step == 4 else 0.0})
    # Six steps, the evaluation after step 8 and the one at the end.
    assert left.seconds(4) == pytest.approx(6 * 2.0 + 2 * 30.0)


def test_time_left_does_not_take_the_evaluation_before_training_for_a_step():
    clock = Clock()
    left = TimeLeft(10, eval_every=0, eval_after=False, clock=clock)
    clock.now += 60.0
    left.add(1, {"time/step": 1.5})
    assert left.seconds(1) == pytest.approx(9 * 1.5)


def test_plain_mode_prints_one_line_a_step_with_what_was_measured():
    out = console()
    progress = Progress(10, "plain", console=out, clock=Clock())
    progress.start({"run": "runs/demo"})
    progress.step(row(1))
    progress.step(row(2, **{"eval/accuracy": 0.9, "eval/accuracy_low": 0.87, "eval/accuracy_high": 0.93}))
    progress.finish({"report": "report.html"})
    lines = out.file.getvalue().splitlines()
    assert lines[0] == "  run  runs/demo"
    assert lines[1].startswith(
        "step  1/10  reward 0.500  accuracy 25.0%  entropy 0.400  sigma 0.05  tokens/s 1,234  left"
    )
    assert "held-out 90.0% [87.0%, 93.0%]" in lines[2]
    assert lines[-1] == "  report  report.html"
    assert len(lines) == 4


def test_a_plain_line_is_not_wrapped_by_a_narrow_pipe():
    out = console(width=20)
    progress = Progress(10, "plain", console=out, clock=Clock())
    progress.step(row(1))
    assert len(out.file.getvalue().splitlines()) == 1


@pytest.mark.parametrize("mode", ["live", "plain", "off"])
def test_a_warning_is_shown_once_in_every_mode(mode):
    out = console(terminal=mode == "live")
    progress = Progress(10, mode, console=out, clock=Clock())
    progress.start({"run": "demo"})
    for step in (1, 2, 3):
        progress.warn("the reward is 0: no [answer] was found")
        progress.step(row(step))
    progress.warn("another")
    progress.finish()
    text = out.file.getvalue()
    assert text.count("warning: the reward is 0: no [answer] was found") == 1
    assert text.count("warning: another") == 1


def test_off_prints_nothing_else():
    out = console()
    progress = Progress(10, "off", console=out)
    progress.start({"run": "demo"})
    progress.note("evaluating")
    progress.step(row(1))
    progress.finish({"report": "report.html"})
    assert out.file.getvalue() == ""


@pytest.mark.parametrize("width", [40, 80, 160])
def test_the_live_block_fits_the_terminal_and_ends_with_the_newest_numbers(width):
    out = console(width=width, terminal=True)
    progress = Progress(50, "live", console=out, clock=Clock())
    progress.start({"run": "demo"})
    progress.step({"step": 0, "eval/accuracy": 0.44, "time/evaluate": 2.0})
    for step in range(1, 31):
        progress.step(row(step, reward=step / 40, accuracy=step / 30))
    rendered = out.render_lines(progress._render(), pad=False)
    lines = ["".join(segment.text for segment in line) for line in rendered]
    progress.finish()
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "step 30/50" in text
    assert "0.750" in text
    assert "44.0%" in text
    assert BLOCKS[-1] in text
    assert any(line.split()[:1] == ["25"] for line in lines)
    assert not any(line.split()[:1] == ["24"] for line in lines)


def test_the_terminal_is_given_back_even_when_closed_twice():
    out = console(terminal=True)
    progress = Progress(10, "live", console=out)
    progress.start({"run": "demo"})
    progress.close()
    progress.close()
    assert out.file.getvalue().count("\x1b[?25h") == 1


def test_auto_is_plain_off_a_terminal_and_live_on_one():
    assert Progress(1, "auto", console=console()).mode == "plain"
    assert Progress(1, "auto", console=console(terminal=True)).mode == "live"


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, BLOCKS),
        ([7, 0], 8, "█▁"),
        ([3, 3, 3], 8, "▁▁▁"),
        ([0, 0, 4, 4, 8, 8, 4, 4], 4, "▁▅█▅"),
        ([], 8, ""),
    ],
)
def test_sparkline(values, width, expected):
    assert sparkline(values, width) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.4, "0s"), (59.4, "59s"), (59.6, "1m 00s"), (187, "3m 07s"), (18_720, "5h 12m")],
)
def test_duration(seconds, expected):
    assert duration(seconds) == expected


def unread_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def full_disk():
    return Path("/dev/full").open("w")


@pytest.mark.parametrize("stream", [unread_pipe, full_disk])
@pytest.mark.parametrize("mode", ["plain", "live"])
def test_a_display_that_nobody_can_read_ends_and_the_run_goes_on(stream, mode):
    with stream() as file:
        progress = Progress(3, mode, console=terminal.console(file, force_terminal=mode == "live"))
        progress.start({"run": "x"})
        for step in (1, 2, 3):
            progress.step(row(step))
        progress.warn("something")
        progress.finish({"status": "finished"})
    # Closing flushes what is left: it must have nowhere to fail.


def test_a_display_that_was_closed_ends_quietly():
    file = io.StringIO()
    progress = Progress(3, "plain", console=terminal.console(file))
    file.close()
    progress.step(row(1))


def test_a_terminal_that_closes_while_a_display_is_live_ends_the_display_alone():
    """Every write to it fails from then on."""
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as file:
        progress = Progress(3, "live", console=terminal.console(file))
        progress.start({"run": "x"})
        assert progress.mode == "live" and os.read(master, 100)
        os.close(master)
        progress.step(row(1))
        progress.warn("something")
        progress.finish({"status": "finished"})


def test_what_a_stream_has_no_letters_for_is_replaced():
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    terminal.console(file).print("27.5 % \u2192 29.8 %")
    assert raw.getvalue() == b"27.5 % ? 29.8 %\n"


def test_what_must_be_said_is_said_in_every_mode(capfd):
    for mode in ("off", "plain"):
        Progress(3, mode, console=console()).say(f"stopping, {mode}")
    assert capfd.readouterr().err == "stopping, off\nstopping, plain\n"


def test_plain_mode_says_how_far_a_long_step_has_come_where_it_has_been_quiet():
    out, clock = console(), Clock()
    progress = Progress(3, "plain", console=out, clock=clock)
    progress.start({"run": "x"})
    progress.begin("step 1")
    tell = progress.answers(1024)
    for _ in range(100):
        clock.now += 1.0
        tell(2, 256, 4352)
    clock.now = 130.0
    progress.step(row(1))
    lines = out.file.getvalue().splitlines()
    assert lines[1:4] == [
        f"step 1, {past}: 2 of 256 answers have ended, 4,352 tokens of at most 262,144"
        for past in ("30s", "1m 00s", "1m 30s")
    ]
    assert lines[4].startswith("step 1/3") and len(lines) == 5


def test_the_live_display_shows_how_far_a_step_has_come_beside_what_was_said():
    out, clock = console(terminal=True), Clock()
    progress = Progress(3, "live", console=out, clock=clock)
    progress.start({})
    progress.begin("step 1")
    clock.now = 75.0
    progress.running("update 1 of 1, micro-batch 3 of 40")
    progress.say("SIGTERM: stopping after this step")
    progress.note("a note")
    progress.say("SIGTERM: stopping after this step")
    progress.close()
    last = out.file.getvalue().rpartition("elapsed")[2]
    assert "step 1, 1m 15s: update 1 of 1, micro-batch 3 of 40" in last and "SIGTERM: stopping" in last
