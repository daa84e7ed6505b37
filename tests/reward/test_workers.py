import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from qerl.errors import RewardError
from qerl.reward.workers import WorkerPool

USER = Path(__file__).with_name("user_rewards.py")


def test_replies_come_in_the_order_of_the_calls():
    pool = WorkerPool("operator:add", size=2)
    # operator.add takes no keywords, so every call is refused by Python itself: errors are replies, in order.
    assert all("TypeError" in reply.error for reply in pool.call([{"a": 1, "b": 2}] * 3, timeout=5.0))
    pool.close()


def test_calls_are_spread_over_workers(tmp_path):
    source = tmp_path / "slow.py"
    source.write_text("import os, time\n\ndef f(i):\n    time.sleep(0.01)\n    return i, os.getpid()\n")
    pool = WorkerPool(f"{source}:f", size=2)
    values = [reply.value for reply in pool.call([{"i": i} for i in range(120)], timeout=5.0)]
    pool.close()
    assert [i for i, _ in values] == list(range(120))
    assert len({pid for _, pid in values}) == 2


def test_a_process_that_was_started_ahead_takes_the_first_call(tmp_path):
    go_on = tmp_path / "go_on"
    (tmp_path / "pid.py").write_text(
        f"import os, time\n\nwhile not os.path.exists({str(go_on)!r}):\n    time.sleep(0.01)\n\ndef f():\n    return os.getpid()\n"
    )
    pool = WorkerPool(f"{tmp_path}/pid.py:f")
    pool.warm_up()
    pool.warm_up()
    (ahead,) = pool._live
    assert not ahead.connection.poll(0), "not waited for"
    go_on.touch()
    assert pool.call([{}], timeout=5.0)[0].value == ahead.process.pid
    pool.close()
    (tmp_path / "broken.py").write_text("raise RuntimeError('not today')\n")
    broken = WorkerPool(f"{tmp_path}/broken.py:f")
    broken.warm_up()
    with pytest.raises(RewardError, match="not today"):
        broken.call([{}], timeout=5.0)
    assert not broken._live


def test_a_worker_is_used_again_until_it_must_be_killed(tmp_path):
    source = tmp_path / "pid.py"
    source.write_text("import os, time\n\ndef f(seconds):\n    time.sleep(seconds)\n    return os.getpid()\n")
    pool = WorkerPool(f"{source}:f")
    first, second = (pool.call([{"seconds": 0}], timeout=5.0)[0].value for _ in range(2))
    (late,) = pool.call([{"seconds": 60}], timeout=0.2)
    third = pool.call([{"seconds": 0}], timeout=5.0)[0].value
    pool.close()
    assert first == second != third
    assert (late.status, late.error) == ("error", "timed out after 0.2 s")
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def test_a_result_that_cannot_be_sent_is_an_error_reply(tmp_path):
    source = tmp_path / "odd.py"
    source.write_text("def f():\n    return lambda: 0\n")
    pool = WorkerPool(f"{source}:f")
    (reply,) = pool.call([{}], timeout=5.0)
    pool.close()
    assert reply.status == "error"


def test_a_module_that_fails_to_import_is_refused(tmp_path):
    source = tmp_path / "broken.py"
    source.write_text("raise RuntimeError('not today')\n")
    with pytest.raises(RewardError, match="not today"):
        WorkerPool(f"{source}:f").start()


def test_a_module_may_import_its_neighbors(tmp_path):
    (tmp_path / "neighbor.py").write_text("VALUE = 7\n")
    (tmp_path / "mine.py").write_text("from neighbor import VALUE\n\ndef f():\n    return VALUE\n")
    pool = WorkerPool(f"{tmp_path}/mine.py:f")
    assert pool.call([{}], timeout=5.0)[0].value == 7
    pool.close()


def test_memory_limit_turns_an_absurd_allocation_into_an_error(tmp_path):
    source = tmp_path / "big.py"
    source.write_text("def f():\n    return len(bytearray(2**33))\n")
    pool = WorkerPool(f"{source}:f", memory_bytes=2**31)
    (reply,) = pool.call([{}], timeout=5.0)
    pool.close()
    if sys.platform == "linux":
        assert "MemoryError" in reply.error


def test_workers_end_with_their_parent_even_in_the_middle_of_a_call(tmp_path):
    source = tmp_path / "sleeper.py"
    pid_file = tmp_path / "pid"
    source.write_text(
        f"import os, time\n\ndef f():\n    open({str(pid_file)!r}, 'w').write(str(os.getpid()))\n    time.sleep(60)\n"
    )
    script = textwrap.dedent(
        f"""
        import os, threading, time
        from pathlib import Path
        from qerl.reward.workers import WorkerPool
        pool = WorkerPool({f"{source}:f"!r})
        threading.Thread(target=pool.call, args=([{{}}], 60.0), daemon=True).start()
        while not Path({str(pid_file)!r}).exists() or not Path({str(pid_file)!r}).read_text():
            time.sleep(0.01)
        os._exit(0)
        """
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)
    pid = int(pid_file.read_text())
    deadline = time.monotonic() + 10
    while _running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _running(pid)


def _running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
