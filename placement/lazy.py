"""Packages whose names are imported when they are first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def importing_on_first_use(
    package: str, namespace: dict[str, Any], homes: Mapping[str, str]
) -> Callable[[str], Any]:
    """A module-level ``__getattr__`` (PEP 562) for ``package``.

    Importing torch takes seconds. The command, and the pytest plugin, which is loaded in every test
    run of the environment, must not pay for it before they need it.

    Args:
        package: its name.
        namespace: its ``globals()``, where a name is kept once it was imported.
        homes: each public name, and the module that defines it.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        namespace[name] = getattr(importlib.import_module(homes[name]), name)
        return namespace[name]

    return get
