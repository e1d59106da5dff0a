"""Uses a wheel and an sdist as a stranger would, outside of any checkout: ``make release-check``.

Each is installed into an environment of its own, in an empty directory. Then the command, the demo,
what the README shows, and a suite that has never heard of this project have to work. The simulated
accelerator is built anew from the wheel.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]

STRANGERS_TEST = """
from torch import nn

from placement.testing import assert_round_trip


def where_am_i() -> str:
    import torch.distributed as dist

    return f"{dist.get_rank()} of {dist.get_world_size()}"


def test_ranks_come_with_the_plugin(ranks):
    assert ranks(2).run(where_am_i) == ["0 of 2", "1 of 2"]


def test_a_module_comes_back(placement_device):
    module = nn.Linear(2, 2).to(placement_device)
    with assert_round_trip(module):
        module.to("cpu").to(placement_device)
"""


class Stranger:
    """An empty directory with an environment, into which one distribution is installed."""

    def __init__(self, directory: Path, distribution: Path, cache: Path) -> None:
        self.directory = directory
        self._scripts = directory / "environment" / "bin"
        self._environment = {
            name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
        } | {
            "PATH": os.pathsep.join([str(self._scripts), os.environ["PATH"]]),
            "TORCH_PLACEMENT_CACHE": str(cache),
            "OMP_NUM_THREADS": "1",
        }
        self.does(sys.executable, "-m", "venv", "environment")
        constraints = str(CHECKOUT / "constraints.txt")
        extras = f"{distribution.resolve()}[testing,plot]"
        self.does("pip", "install", "--quiet", "--constraint", constraints, extras, "sybil")

    def does(self, *command: str) -> None:
        """Run a command there. Its output is shown if it fails."""
        started = time.monotonic()
        done = subprocess.run(
            command,
            cwd=self.directory,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        words = " ".join(Path(word).name or word for word in command)
        print(f"  {time.monotonic() - started:6.1f} s  {words}", flush=True)
        if done.returncode != 0:
            raise SystemExit(f"{words} failed:\n{done.stdout}")

    def writes(self, name: str, text: str) -> None:
        """Put a file there."""
        path = self.directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def use(distribution: Path, cache: Path) -> None:
    """Install ``distribution`` and use it."""
    print(distribution.name, flush=True)
    with tempfile.TemporaryDirectory(prefix="stranger-") as scratch:
        stranger = Stranger(Path(scratch), distribution, cache)
        stranger.does("placement", "states")
        stranger.does("python", "-m", "engine", "--traces", "traces")
        stranger.does("placement", "check", "traces")
        stranger.does("placement", "plot", "traces/manual", "-o", "timeline.svg")
        stranger.writes("suite/test_theirs.py", STRANGERS_TEST)
        stranger.does("pytest", "-q", "suite")
        for page in ("README.md", "conftest.py", "docs/snippets.py"):
            stranger.writes(page, (CHECKOUT / page).read_text(encoding="utf-8"))
        stranger.does("pytest", "-q", "README.md")


def main() -> None:
    """Check every distribution in the directory that is named."""
    distributions = sorted(Path(sys.argv[1]).iterdir())  # the wheel comes first
    with tempfile.TemporaryDirectory(prefix="stranger-cache-") as cache:
        for distribution in distributions:
            use(distribution, Path(cache))
    print("ok:", ", ".join(distribution.name for distribution in distributions))


if __name__ == "__main__":
    main()
