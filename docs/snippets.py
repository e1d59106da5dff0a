"""Runs what the pages show.

Four kinds of block are run, in the order in which a page has them:

- ``python``: executed, in one namespace a page.
- ``python`` whose first line is a comment with a file's name: written to that file.
- ``output``: what the ``python`` block before it printed.
- ``console``: each line that begins with ``$`` is a command; what follows it is its output. A
  command whose output is not shown has to succeed.

``...`` in an output stands for anything. Files and commands have a directory of their own, one a
page. Every other block (``sh``, ``text``, ``mermaid``) is only read.
"""

from __future__ import annotations

import contextlib
import difflib
import doctest
import io
import os
import re
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from sybil import Example, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.myst import CodeBlockParser

import placement

_FILE = re.compile(r"# (?P<name>[\w/]+\.py)\n")
_PRINTED = "_printed"
_SECONDS = 300


class Python:
    """Executes a block, or writes it to the file that it names."""

    def __init__(self) -> None:
        self._execute = PythonEvaluator()

    def __call__(self, example: Example) -> None:
        if named := _FILE.match(str(example.parsed)):
            file = _directory(example) / named["name"]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(example.parsed, encoding="utf-8")
            return
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), _inside(_directory(example)):
            self._execute(example)
        example.namespace[_PRINTED] = printed.getvalue()


def output(example: Example) -> None:
    """Compares with what the block before it printed."""
    _compare(example.parsed, example.namespace.pop(_PRINTED, ""))


def console(example: Example) -> None:
    """Runs each command, and compares what it printed."""
    for command, expected in _commands(example.parsed):
        done = subprocess.run(
            command,
            shell=True,
            cwd=_directory(example),
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_SECONDS,
        )
        if expected:
            _compare(expected, done.stdout)
        elif done.returncode != 0:
            raise AssertionError(f"{command!r} ended with {done.returncode}:\n{done.stdout}")


def pages(*patterns: str) -> Sybil:
    """What pytest needs to collect the pages whose paths in the project match ``patterns``."""
    return Sybil(
        parsers=[
            CodeBlockParser("python", Python()),
            CodeBlockParser("output", output),
            CodeBlockParser("console", console),
        ],
        path=str(Path(__file__).parents[1]),
        patterns=patterns,
        fixtures=["page"],
    )


def _directory(example: Example) -> Path:
    directory: Path = example.namespace["page"]
    return directory


@contextlib.contextmanager
def _inside(directory: Path) -> Iterator[None]:
    found = Path.cwd()
    os.chdir(directory)  # contextlib.chdir came with Python 3.11
    try:
        yield
    finally:
        os.chdir(found)


def _environment() -> dict[str, str]:
    """A reader's: commands and packages are those of this run."""
    scripts = sysconfig.get_path("scripts")
    packages = str(Path(placement.__file__).parents[1])
    return os.environ | {
        "PATH": os.pathsep.join([scripts, os.environ["PATH"]]),
        "PYTHONPATH": packages,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_ADDOPTS": "-p no:cacheprovider",
        "COLUMNS": "120",
        "NO_COLOR": "1",
    }


def _commands(block: str) -> Iterator[tuple[str, str]]:
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        yield command, expected


def _compare(expected: str, printed: str) -> None:
    expected, printed = _plain(expected), _plain(printed)
    if not doctest.OutputChecker().check_output(expected, printed, doctest.ELLIPSIS):
        difference = difflib.unified_diff(
            expected.splitlines(), printed.splitlines(), "the page", "printed", lineterm=""
        )
        raise AssertionError("\n".join(difference))


def _plain(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines()) + "\n"
