"""Moves that go past the manager: ``model.to(...)``, ``.cuda()``, a child's or a parent's ``.to``.

All of them end in ``nn.Module._apply``, so that is where they are noticed: one wrapper, installed
while a watched module lives and taken away with the last. Hooks on instances would not do: a
child's ``.to`` escapes them, and a deep copy of the module would carry them along.

Whether a call would move tensors is found by asking its conversion to convert an empty tensor. Only
torch's own conversions are asked; one that a user wrote may have side effects, and is let through
as a move that may have happened.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn

from placement.torch_private import module_apply, set_module_apply

Convert = Callable[[torch.Tensor], torch.Tensor]


class Watcher(Protocol):
    """Told of every conversion of a module that it watches."""

    def before_conversion(self, call: str, convert: Convert) -> None:
        """``call`` (``to()``, ``cuda()``, ...) is about to convert the module's tensors, or some of
        them. Raising refuses it."""

    def after_conversion(self, call: str, convert: Convert) -> None:
        """The call that was let through is over, or failed half way."""


class AlreadyWatched(Exception):
    """The module, or a part of it, is watched by somebody else."""


_watchers: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Watcher]] = weakref.WeakKeyDictionary()
_found_apply: Callable[..., Any] | None = None
_depth = threading.local()


def watch(module: nn.Module, watcher: Watcher) -> None:
    """Tell ``watcher`` of conversions of ``module``, of any part of it, and of whatever holds it,
    for as long as ``watcher`` lives or until :func:`unwatch`.

    Raises:
        AlreadyWatched: another watcher watches the module or a part of it.
    """
    for submodule in module.modules():
        other = _watcher_of(submodule)
        if other is not None and other is not watcher:
            raise AlreadyWatched
    reference = weakref.ref(watcher)
    for submodule in module.modules():
        _watchers[submodule] = reference
    weakref.finalize(watcher, _forget_the_dead)
    _install()


def unwatch(watcher: Watcher) -> None:
    """Stop telling ``watcher``."""
    for submodule in [m for m, reference in _watchers.items() if reference() is watcher]:
        del _watchers[submodule]
    _uninstall_if_idle()


def would_move_to(convert: Convert, devices: Iterable[torch.device]) -> torch.device | None:
    """Where ``convert`` would move a tensor that is on one of ``devices``; None if nowhere.

    Raises:
        LookupError: it can't be told, because the conversion is not torch's own.
    """
    if not str(getattr(convert, "__module__", "")).startswith("torch."):
        raise LookupError("not a conversion of torch's own")
    for device in devices:
        target = convert(torch.empty(0, device=device)).device
        if target != device:
            return target
    return None


def _watcher_of(module: nn.Module) -> Watcher | None:
    reference = _watchers.get(module)
    return reference() if reference is not None else None


def _forget_the_dead() -> None:
    for submodule in [m for m, reference in _watchers.items() if reference() is None]:
        del _watchers[submodule]
    _uninstall_if_idle()


def _apply(self: nn.Module, fn: Convert, *args: Any, **kwargs: Any) -> Any:
    # The last watcher may be collected while this runs, or just before, which uninstalls it.
    found_apply = _found_apply if _found_apply is not None else module_apply()
    # A parent's _apply calls its children's: the outermost call is the one that somebody made.
    if getattr(_depth, "inside", False):
        return found_apply(self, fn, *args, **kwargs)
    watchers = {id(w): w for m in self.modules() if (w := _watcher_of(m)) is not None}
    if not watchers:
        return found_apply(self, fn, *args, **kwargs)
    call = f"{_caller()}()"
    for watcher in watchers.values():
        watcher.before_conversion(call, fn)
    _depth.inside = True
    try:
        return found_apply(self, fn, *args, **kwargs)
    finally:
        _depth.inside = False
        for watcher in watchers.values():
            watcher.after_conversion(call, fn)


def _caller() -> str:
    """Name of the method of ``nn.Module`` that led here: ``to``, ``cuda``, ``to_empty``, ..."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "_apply" and frame.f_back is not None:
        frame = frame.f_back  # overrides that call super()._apply
    return frame.f_code.co_name


def _install() -> None:
    global _found_apply
    if _found_apply is None:
        _found_apply = module_apply()
        set_module_apply(_apply)


def _uninstall_if_idle() -> None:
    global _found_apply
    # If somebody wrapped our wrapper meanwhile, taking it away would take theirs: with nobody
    # watched it only passes calls on.
    if _found_apply is not None and not _watchers and module_apply() is _apply:
        set_module_apply(_found_apply)
        _found_apply = None
