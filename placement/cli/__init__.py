"""The ``placement`` command: reads traces and shows, checks, exports and plots them."""

from placement.cli.commands import app

__all__ = ["app"]
