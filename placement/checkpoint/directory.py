"""A directory of checkpoints, each of which is there as a whole or not at all.

A checkpoint is written as a *draft*: a hidden directory beside where it will be. Publishing it
renames it, and then replaces the file ``latest``, which holds its name. Both are single steps of
the file system, so a process that is killed at any moment leaves a whole ``latest``. What it
leaves besides, drafts and directories on their way out, has names that nobody else gives, and goes
when the next draft begins.

A step that is saved again, after training went back to an earlier one, is published beside the
first (``step-00000012.1``), which goes afterwards: there is no moment without it.

One process of a job changes the directory, rank 0, and one job at a time may.
"""

from __future__ import annotations

import logging
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from placement.checkpoint import files
from placement.errors import NoCheckpoint

_LOG = logging.getLogger("placement")

LATEST = "latest"
"""The file with the name of the newest checkpoint."""

_NAME = re.compile(r"step-(?P<step>\d{8,})(\.(?P<edition>\d+))?")
_LEFT_OVER = re.compile(rf"\.({_NAME.pattern}|{LATEST})\.(writing|removing)-[0-9a-f]{{8}}")


@dataclass(frozen=True, order=True)
class Edition:
    """A step, and how often it was saved before."""

    step: int
    number: int = 0

    @property
    def name(self) -> str:
        return f"step-{self.step:08d}" + (f".{self.number}" if self.number else "")


def edition_of(path: Path) -> Edition:
    """Of which step a directory of this name is."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return Edition(int(match["step"]), int(match["edition"] or 0))


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is being written.

    Attributes:
        path: where its files go.
        edition: what it is going to be.
    """

    path: Path
    edition: Edition


class CheckpointDirectory:
    """The checkpoints in one directory. It need not exist before the first draft.

    Args:
        path: the directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    # What is there.

    def steps(self) -> list[int]:
        """The steps of which there is a checkpoint, in order."""
        return sorted({edition.step for edition in self._editions()})

    def find(self, step: int | None) -> Path:
        """The checkpoint of a step; the newest one for None.

        The newest is the one that ``latest`` names. Before there is such a file (a first save was
        killed after its directory was published) it is the one of the highest step.

        Raises:
            NoCheckpoint: there is none.
        """
        editions = self._editions()
        wanted = [edition for edition in editions if step is None or edition.step == step]
        if step is None and (name := self._latest()) is not None:
            wanted = [edition for edition in editions if edition.name == name]
        if not wanted:
            steps = ", ".join(map(str, self.steps())) or "none"
            raise NoCheckpoint(
                asked="loading a checkpoint",
                state=f"{self.path} has checkpoints of these steps: {steps}",
                why="there is none" + (f" of step {step}" if step is not None else " to be found"),
                instead="load one of those, or look into another directory",
            )
        return self.path / max(wanted).name

    def _editions(self) -> list[Edition]:
        if not self.path.is_dir():
            return []
        return [edition_of(path) for path in self.path.iterdir() if _NAME.fullmatch(path.name)]

    def _latest(self) -> str | None:
        path = self.path / LATEST
        return files.read(path).decode(errors="replace").strip() if path.exists() else None

    # Changing it.

    def begin(self, step: int) -> Draft:
        """Clear what was left over, and make the directory of a new draft."""
        files.make_directory(self.path)
        for entry in self.path.iterdir():
            if _LEFT_OVER.fullmatch(entry.name):
                self._remove(entry)
        numbers = [edition.number for edition in self._editions() if edition.step == step]
        edition = Edition(step, max(numbers, default=-1) + 1)
        draft = Draft(self._hidden(edition.name, "writing"), edition)
        files.make_directory(draft.path)
        return draft

    def publish(self, draft: Draft) -> Path:
        """Make a draft that is whole, with all its files on the disk, the newest checkpoint.

        If that fails before ``latest`` names it, it is no checkpoint, but a draft again.
        """
        path = self.path / draft.edition.name
        files.sync_directory(draft.path)
        try:
            files.rename(draft.path, path)
            self._make_latest(draft.edition)
        except BaseException:
            if path.exists() and self._latest() != draft.edition.name:
                files.rename(path, draft.path)
            raise
        return path

    def discard(self, draft: Draft) -> None:
        """Remove a draft that came to nothing. If that fails, the next one removes it."""
        if draft.path.exists():
            self._remove(draft.path)

    def prune(self, newest: Edition, keep: int | None) -> None:
        """Remove what ``newest`` replaced, and the lowest steps while there are too many.

        Args:
            newest: the checkpoint that was published last, which stays.
            keep: how many steps stay; None keeps all.
        """
        editions = self._editions()
        last = {edition.step: edition for edition in sorted(editions)}
        others = sorted(set(last) - {newest.step})
        spare = others[: max(0, len(others) + 1 - keep)] if keep is not None else []
        for edition in editions:
            if edition != last[edition.step] or edition.step in spare:
                self._retire(edition)

    def _retire(self, edition: Edition) -> None:
        """Remove a checkpoint: first its name, so that there is never a part of one."""
        gone = self._hidden(edition.name, "removing")
        try:
            files.rename(self.path / edition.name, gone)
        except OSError as error:
            _LOG.warning("%s stays, since it can't be renamed: %s", edition.name, error)
            return
        self._remove(gone)

    def _remove(self, path: Path) -> None:
        """Remove what is no checkpoint. What can't be removed is in nobody's way."""
        try:
            if path.is_dir() and not path.is_symlink():
                files.remove_directory(path)
            else:
                files.remove_file(path)
        except OSError as error:
            _LOG.warning("%s stays until the next save: %s", path, error)

    def _make_latest(self, edition: Edition) -> None:
        name = f"{edition.name}\n".encode()
        files.replace(self.path / LATEST, name, self._hidden(LATEST, "writing"))

    def _hidden(self, name: str, doing: str) -> Path:
        return self.path / f".{name}.{doing}-{secrets.token_hex(4)}"
