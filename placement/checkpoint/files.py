"""Files that are on the disk when they are said to be.

Everything that a checkpoint asks of the operating system stands here, call by call, so that a test
can let each of them fail. An ``OSError`` is not caught here: it names the file, and who called
knows what it was for.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash

from placement.checkpoint.form import File

_PIECE = 16 << 20
"""Bytes that are written or read at once: small enough that a checksum finds them in the cache."""


def write(path: Path, content: Iterable[memoryview]) -> File:
    """Write a new file, and wait until it is on the disk.

    Returns:
        Its size and checksum, of the bytes that were to be written.

    Raises:
        FileExistsError: there is one.
        OSError: it could not be written; what was written is there.
    """
    digest, size = xxhash.xxh3_64(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        for block in content:
            for piece in _pieces(block):
                digest.update(piece)
                _write_all(descriptor, piece, path)
                size += piece.nbytes
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return File(size, digest.hexdigest())


def read(path: Path) -> bytes:
    """All of a file."""
    return b"".join(bytes(piece) for piece in _read_pieces(path))


def look_at(path: Path) -> File:
    """The size and checksum of the file that is there."""
    digest, size = xxhash.xxh3_64(), 0
    for piece in _read_pieces(path):
        digest.update(piece)
        size += piece.nbytes
    return File(size, digest.hexdigest())


def size_of(path: Path) -> int:
    """Bytes of a regular file.

    Raises:
        OSError: there is none, or something else is there (a link, a pipe).
    """
    found = os.stat(path, follow_symlinks=False)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return found.st_size


def make_directory(path: Path) -> None:
    """Make a directory, and those above it that are missing."""
    if path.is_dir():
        return
    make_directory(path.parent)
    os.mkdir(path)
    sync_directory(path.parent)


def replace(path: Path, content: bytes, unfinished: Path) -> None:
    """Put a file with ``content`` in the place of the one that is there, in one step.

    Args:
        path: where it is to be.
        content: what it is to hold.
        unfinished: a path in the same directory that nobody uses, for the file until it is whole.
    """
    try:
        write(unfinished, [memoryview(content)])
        os.replace(unfinished, path)
    except BaseException:
        remove_file(unfinished)
        raise
    sync_directory(path.parent)


def rename(path: Path, to: Path) -> None:
    """Rename within a directory, and wait until that is on the disk."""
    os.rename(path, to)
    sync_directory(to.parent)


def remove_file(path: Path) -> None:
    """Remove a file, if it is there."""
    if path.exists():
        os.unlink(path)


def remove_directory(path: Path) -> None:
    """Remove a directory and the files in it. One that is in it is not ours, and is refused."""
    for entry in sorted(path.iterdir()):
        os.unlink(entry)
    os.rmdir(path)


def sync_directory(path: Path) -> None:
    """Wait until what was made, renamed or removed in a directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _pieces(block: memoryview) -> Iterator[memoryview]:
    whole = block.cast("B")
    for start in range(0, whole.nbytes, _PIECE):
        yield whole[start : start + _PIECE]


def _write_all(descriptor: int, piece: memoryview, path: Path) -> None:
    while piece.nbytes:
        try:
            written = os.write(descriptor, piece)
        except OSError as error:  # of a descriptor it does not know the name
            raise OSError(error.errno, error.strerror, str(path)) from None
        piece = piece[written:]


def _read_pieces(path: Path) -> Iterator[memoryview]:
    """The bytes of a file, piece by piece; a piece is valid until the next one."""
    buffer = memoryview(bytearray(min(_PIECE, size_of(path) + 1)))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        while count := os.readv(descriptor, [buffer]):
            yield buffer[:count]
    finally:
        os.close(descriptor)
