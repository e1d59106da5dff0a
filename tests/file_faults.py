"""File operations of checkpoints that fail as they are told to."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from placement.checkpoint import files

CHANGING = ("mkdir", "open", "write", "fsync", "close", "rename", "replace", "unlink", "rmdir")
"""What a save does with files."""

READING = ("stat", "readv")
"""What a load does beside opening and closing them."""


@dataclass
class FilePlan:
    """The file operations that were made under a plan, and the number of the one to fail.

    Attributes:
        number: counts from 1; None lets none fail.
        error: as ``errno`` has it.
        lasting: whether all later operations that change something fail, too.
        seen: each operation that was made, in words.
    """

    number: int | None
    error: int = errno.ENOSPC
    lasting: bool = False
    seen: list[str] = field(default_factory=list)

    @property
    def fired(self) -> bool:
        return self.number is not None and len(self.seen) >= self.number

    def reach(self, operation: str, of: object) -> None:
        self.seen.append(f"{operation} {of}")
        again = self.lasting and self.fired and operation in CHANGING
        if len(self.seen) == self.number or again:
            raise OSError(self.error, f"planned: {os.strerror(self.error)}", str(of))


class _Os:
    """The module ``os``, with a plan."""

    def __init__(self, plan: FilePlan) -> None:
        self._plan = plan
        self._opened: dict[int, object] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(os, name)
        return self._planned(name, found) if name in CHANGING + READING else found

    def _planned(self, operation: str, found: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            of = self._opened.get(args[0], args[0])
            if operation == "close":
                found(*args)  # a file is closed even if that fails
                self._plan.reach(operation, of)
                return None
            self._plan.reach(operation, of)
            result = found(*args, **options)
            if operation == "open":
                self._opened[result] = args[0]
            return result

        return call


@contextmanager
def failing_files(
    number: int | None = None, error: int = errno.ENOSPC, *, lasting: bool = False
) -> Iterator[FilePlan]:
    """Let the ``number``-th file operation of checkpoints fail, in threads, too."""
    plan = FilePlan(number, error, lasting)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "os", _Os(plan))
        yield plan
