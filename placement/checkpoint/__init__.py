"""Checkpoints that are whole or not there, and whose reading runs no code.

``checkpoints.py`` is the front door, ``form.py`` the format.
"""

from placement.checkpoint.checkpoints import Checkpoints, Loaded
from placement.checkpoint.converting import convert

__all__ = ["Checkpoints", "Loaded", "convert"]
