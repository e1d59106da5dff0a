"""While tensors move, nothing comes in between: SIGINT and garbage collection wait."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def undisturbed() -> Iterator[Callable[[], None]]:
    """Hold back SIGINT, in the main thread (elsewhere Python delivers none), and automatic garbage
    collection, if it is on.

    A move of many small tensors makes as many Python objects, which would set off one collection
    after another, each over all that the process has; they would take longer than the move.

    Yields:
        A function to call where an interrupt does no harm: it delivers one that has come since, to
        the handler that was found, which usually raises ``KeyboardInterrupt``. One that comes
        after the last such call is delivered when the block ends.
    """
    with _interrupts_held_back() as deliver, _garbage_left_alone():
        yield deliver


@contextmanager
def _interrupts_held_back() -> Iterator[Callable[[], None]]:
    found = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(found):
        yield lambda: None
        return
    handler = found
    pending: list[tuple[int, FrameType | None]] = []

    def deliver() -> None:
        if pending:
            handler(*pending.pop())

    signal.signal(signal.SIGINT, lambda number, frame: pending.append((number, frame)))
    try:
        yield deliver
    finally:
        signal.signal(signal.SIGINT, found)
        deliver()


@contextmanager
def _garbage_left_alone() -> Iterator[None]:
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
