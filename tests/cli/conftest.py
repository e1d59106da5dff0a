"""Fixtures for the tests of the ``placement`` command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from recorded_job import Job, Recorder
from typer.testing import CliRunner, Result

from placement.cli import app


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(tmp_path / "traces", monkeypatch)


@pytest.fixture
def placement() -> Callable[..., Result]:
    """Runs the command in this process."""

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return run


@pytest.fixture
def rank(job: Job) -> Recorder:
    return job.rank(0)
