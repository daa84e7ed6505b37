"""A worker process that calls one function; ``main`` is what it runs (started by ``qerl.reward.workers``).

It talks to its parent through an inherited pipe. The first message names the function; every further message holds keyword arguments, and each is
answered by a ``Reply``. What the function prints goes to standard error. The process ends when its parent does, even in
the middle of a call.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import os
import queue
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from numbers import Real
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The first message: what to call.

    Attributes:
        function: ``module:function`` or ``path/file.py:function``.
        rewards: the function follows the reward protocol (``call_reward``).
        memory_bytes: address-space limit (Linux only); None for no limit.
    """

    function: str
    rewards: bool = False
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What became of one call.

    ``ok`` with the returned value, ``error`` with the exception, time-out or crash in words, or ``protocol`` with what
    is wrong with the returned value.
    """

    status: Literal["ok", "error", "protocol"]
    value: Any = None
    error: str = ""


def load_function(spec: str) -> Callable[..., Any]:
    """The function that ``module:function`` or ``path/file.py:function`` names.

    Raises:
        LookupError: when the file, module or attribute does not exist or cannot be called.
    """
    place, _, name = spec.rpartition(":")
    if place.endswith(".py"):
        path = Path(place).expanduser().resolve()
        if not path.is_file():
            raise LookupError(f"there is no file {path}")
        sys.path.insert(0, str(path.parent))
        module_spec = importlib.util.spec_from_file_location(path.stem, path)
        assert module_spec is not None
        assert module_spec.loader is not None
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[path.stem] = module
        module_spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise LookupError(f"{place} has no function {name!r} (it has {', '.join(known) or 'none'})")
    return function


LARGEST_REWARD = 1e30
"""Size from which a reward is a fault: its square, and sums of squares, must fit a float."""


class ProtocolError(ValueError):
    """A reward function returned something other than one number or None for each answer."""


def call_reward(function: Callable[..., Any], arguments: dict[str, Any]) -> list[float | str | None]:
    """Call a reward function and check what it returns: one value for each of ``arguments["completions"]``.

    A function without ``**kwargs`` is given only the arguments it names. A value is a float, None (unscorable), or a
    note in words where the element cannot be used.

    Raises:
        ProtocolError: when what is returned is not a sequence of the right length.
    """
    parameters = inspect.signature(function).parameters
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        arguments_taken = {key: value for key, value in arguments.items() if key in parameters}
    else:
        arguments_taken = arguments
    returned = function(**arguments_taken)
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    count = len(arguments["completions"])
    if not isinstance(values, list | tuple):
        raise ProtocolError(f"returned {type(returned).__name__}; expected a list of {count} numbers (or None)")
    if len(values) != count:
        raise ProtocolError(f"returned {len(values)} values for {count} answers")
    return [_as_value(value) for value in values]


def _as_value(value: Any) -> float | str | None:
    if hasattr(value, "item"):
        value = value.item()
    if value is None:
        return None
    if not isinstance(value, Real):
        return f"returned {value!r:.80} of type {type(value).__name__}; expected a number or None"
    number = float(value)
    if not math.isfinite(number):
        return f"returned {number}"
    return (
        number
        if abs(number) <= LARGEST_REWARD
        else f"returned {number:g}; a reward is at most {LARGEST_REWARD:g} in size"
    )


def describe(error: BaseException) -> str:
    """One line: the class and message of an exception."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def main(descriptor: int) -> None:
    """Serve calls until the parent closes the pipe."""
    connection = Connection(descriptor)
    # Standard output belongs to the parent's own display; keep prints of the called function out of it.
    os.dup2(2, 1)
    start: Start = connection.recv()
    if start.memory_bytes is not None and sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (start.memory_bytes, start.memory_bytes))
    # Whatever user code raises is data here (it becomes an error message, or the note of a sample).
    try:
        function = load_function(start.function)
    except Exception as error:  # noqa: BLE001
        connection.send(Reply(status="error", error=describe(error)))
        return
    connection.send(Reply(status="ok"))
    calls: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_receive, args=(connection, calls), daemon=True).start()
    while True:
        arguments = calls.get()
        try:
            value = call_reward(function, arguments) if start.rewards else function(**arguments)
            reply = Reply(status="ok", value=value)
        except ProtocolError as error:
            reply = Reply(status="protocol", error=str(error))
        except Exception as error:  # noqa: BLE001
            reply = Reply(status="error", error=describe(error))
        connection.send(reply)


def _receive(connection: Connection, calls: queue.Queue[dict[str, Any]]) -> None:
    """Queue what arrives; when the parent is gone, end the process, whatever the main thread is doing."""
    while True:
        try:
            calls.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)
