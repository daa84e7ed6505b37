"""Calls with a time limit, in worker processes: a call that raises, hangs or crashes costs only its own result.

A thread cannot be stopped, and a signal works in the main thread only, so code that may hang (symbolic comparison, user
functions) runs in processes that can be killed. They are started when first needed, without importing the caller's main
module, and end with the caller.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from qerl.errors import RewardError
from qerl.reward.worker import Reply, Start

START_SECONDS = 300.0
"""Longest time that importing a function may take (a reward model may be loaded there)."""

CALLS_PER_WORKER = 100
"""A further process is started for every so many calls: to import what it needs takes it as long as they do."""


@dataclass(slots=True)
class _Running:
    """A live process, and the call it is busy with."""

    process: subprocess.Popen[bytes]
    connection: Connection
    call: int = -1
    deadline: float = 0.0
    loaded: bool = False
    """Whether it has said that it has the function."""


class WorkerPool:
    """Up to ``size`` processes that call one function.

    Args:
        function: ``module:function`` or ``path/file.py:function``.
        rewards: the function follows the reward protocol (``worker.call_reward``).
        size: most processes at once.
        memory_bytes: address-space limit of each process (Linux only).
    """

    def __init__(self, function: str, *, rewards: bool = False, size: int = 1, memory_bytes: int | None = None):
        self.first_message = Start(function=function, rewards=rewards, memory_bytes=memory_bytes)
        self.size = size
        self._loaded = False
        self._idle: list[_Running] = []
        # Holds every live worker; the finalizer must not refer to the pool itself.
        self._live: list[_Running] = []
        self._finalizer = weakref.finalize(self, _stop_all, self._live)

    def start(self) -> None:
        """Start one process and load the function.

        Raises:
            RewardError: when the function cannot be loaded.
        """
        self.warm_up()
        if self._idle and not self._loaded:
            self._idle.append(self._ready(self._idle.pop()))

    def warm_up(self) -> None:
        """Start one process, if there is none, without waiting until it has loaded the function."""
        if not self._live:
            self._idle.append(self._launch())

    def call(self, calls: Sequence[dict[str, Any]], timeout: float) -> list[Reply]:
        """Make all calls, each with ``timeout`` seconds; replies come in the order of ``calls``.

        A call that runs out of time, or whose process dies, gives an ``error`` reply.

        Raises:
            RewardError: when the function cannot be loaded at first.
        """
        replies: dict[int, Reply] = {}
        waiting = deque(range(len(calls)))
        busy: list[_Running] = []
        size = min(self.size, 1 + len(calls) // CALLS_PER_WORKER)
        while waiting or busy:
            while waiting and len(busy) < size:
                index = waiting.popleft()
                try:
                    busy.append(self._begin(index, calls[index], timeout))
                except RewardError as error:
                    # A function that loaded once is a fault of the moment, which must not end the run.
                    if not self._loaded:
                        raise
                    replies[index] = Reply(status="error", error=str(error))
            if not busy:
                continue
            ready = wait([w.connection for w in busy], max(0.0, min(w.deadline for w in busy) - time.monotonic()))
            for worker in list(busy):
                reply = self._collect(worker, worker.connection in ready, timeout)
                if reply is not None:
                    replies[worker.call] = reply
                    busy.remove(worker)
        return [replies[index] for index in range(len(calls))]

    def close(self) -> None:
        """End all processes. The pool can be used again afterwards."""
        _stop_all(self._live)
        self._idle.clear()

    def _begin(self, index: int, arguments: dict[str, Any], timeout: float) -> _Running:
        worker = self._ready(self._idle.pop() if self._idle else self._launch())
        worker.call = index
        try:
            worker.connection.send(arguments)
        except OSError:
            # The process died while idle; reading from it will say so.
            timeout = 0.0
        worker.deadline = time.monotonic() + timeout
        return worker

    def _collect(self, worker: _Running, ready: bool, timeout: float) -> Reply | None:
        """The reply of a busy worker, or None while it is still at work within its time."""
        if ready:
            try:
                reply: Reply = worker.connection.recv()
            except (EOFError, OSError):
                code = self._discard(worker)
                return Reply(status="error", error=f"the scoring process ended with exit code {code}")
            self._idle.append(worker)
            return reply
        if time.monotonic() >= worker.deadline:
            self._discard(worker)
            return Reply(status="error", error=f"timed out after {timeout:g} s")
        return None

    def _launch(self) -> _Running:
        """A new process that begins to load the function."""
        ours, theirs = Pipe()
        # A session of its own: Ctrl-C reaches the caller alone, and the whole group can be killed at a time-out.
        process = subprocess.Popen(
            [sys.executable, "-c", f"from qerl.reward.worker import main; main({theirs.fileno()})"],
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        worker = _Running(process, ours)
        self._live.append(worker)
        # A process that has ended by now is told by reading from it.
        with contextlib.suppress(OSError):
            ours.send(self.first_message)
        return worker

    def _ready(self, worker: _Running) -> _Running:
        """The process, as soon as it has loaded the function.

        Raises:
            RewardError: it cannot; the process is gone then.
        """
        if worker.loaded:
            return worker
        error = "it did not load in time"
        try:
            if worker.connection.poll(START_SECONDS):
                reply: Reply = worker.connection.recv()
                if reply.status == "ok":
                    self._loaded = worker.loaded = True
                    return worker
                error = reply.error
        except (EOFError, OSError):
            error = f"its process ended with exit code {worker.process.wait()}"
        self._discard(worker)
        raise RewardError(
            f"reward function {self.first_message.function!r} cannot be loaded: {error}",
            expected="`accuracy`, `format`, `module:function` or `path/file.py:function`",
            remedy="Check the name, and that importing its module works by itself",
        )

    def _discard(self, worker: _Running) -> int:
        self._live.remove(worker)
        return _stop(worker)


def _stop(worker: _Running) -> int:
    """Kill the process with its children, and return its exit code (its own, if it had ended already)."""
    worker.connection.close()
    code = worker.process.poll()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.process.pid, signal.SIGKILL)
    return worker.process.wait() if code is None else code


def _stop_all(live: list[_Running]) -> None:
    while live:
        _stop(live.pop())
