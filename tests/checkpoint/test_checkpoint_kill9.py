"""A few of the moments of ``make kill9``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import placement


def test_a_save_that_is_killed_leaves_a_whole_checkpoint(device_type: str) -> None:
    if device_type != "sim":
        pytest.skip("kills ranks on the simulated accelerator")
    command = [sys.executable, str(Path(__file__).with_name("kill9.py")), "--moments", "20"]
    here = os.environ | {"PYTHONPATH": str(Path(placement.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=here)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-2:] == ["lost: 0", "whole: 20 of 20"]
