"""What verl imports at the end of ``import verl``, because of the entry point ``verl.plugins``.

verl tells of a plug-in that failed at level DEBUG only, so this one speaks for itself: it says once
that it attached, and says as an error why it did not.

verl is still being imported at that moment, and a plug-in that comes later may be the one that
names the accelerator. verl's engines fix that choice when they are imported, so they are not
imported from here: this module waits until somebody else does.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import verl

from placement.adapters.verl.platform import register_platform
from placement.errors import PlacementError

_LOG = logging.getLogger("placement")

KNOWN_VERSIONS = ("0.9.1",)
"""Releases of verl whose engines were tested with these."""

ENGINES = "verl.workers.engine.fsdp.transformer_impl"
"""The module in which verl registers its FSDP engines."""


class UnknownClient(PlacementError):
    """A release of a client that its adapter was not tested with."""


class _AfterImport(MetaPathFinder):
    """Runs a function right after a module was imported for the first time."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _LoaderThen(spec.loader, self._then)
        return spec


class _LoaderThen(Loader):
    def __init__(self, loader: Loader, then: Callable[[], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._then()


def _register_engines() -> None:
    from placement.adapters.verl.engine import register_engines

    register_engines()


def _attach() -> None:
    if verl.__version__ not in KNOWN_VERSIONS:
        refusal = UnknownClient(
            asked="attaching to verl",
            state=f"verl is {verl.__version__}",
            why=f"the adapter was tested with {', '.join(KNOWN_VERSIONS)}, and relies on what an "
            "engine there does and leaves to its checkpoint manager",
            instead="install that release; until then verl runs its own engines, whose placement "
            "nobody guards (VERL_USE_EXTERNAL_PLUGINS=none silences this)",
        )
        _LOG.error("%s", refusal)
        raise refusal
    register_platform()
    if ENGINES in sys.modules:
        _register_engines()
    else:
        sys.meta_path.insert(0, _AfterImport(ENGINES, _register_engines))


_attach()
