"""Checkpoints that are whole or not there, and whose reading runs no code.

``checkpoints.py`` is the front door, ``form.py`` the format.
"""

from placement.checkpoint.checkpoints import Checkpoints, Loaded

__all__ = ["Checkpoints", "Loaded"]
