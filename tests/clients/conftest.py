"""What the tests about clients share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Qwen2 of random weights, and its tokenizer."""
    from verl_engines import write_tiny_model

    folder = tmp_path_factory.mktemp("tiny-qwen2")
    write_tiny_model(folder)
    return folder
