"""SIGINT while tensors move: it waits until nothing is half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_held_back() -> Iterator[Callable[[], None]]:
    """Hold back SIGINT, in the main thread; elsewhere Python delivers none.

    Yields:
        A function to call where an interrupt does no harm: it delivers one that has come since, to
        the handler that was found, which usually raises ``KeyboardInterrupt``. One that comes
        after the last such call is delivered when the block ends.
    """
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
