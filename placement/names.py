"""What a tensor is called: one name, whatever its module is wrapped in.

Wrappers that are no part of a model put themselves into the names of everything below them: ``0``
becomes ``0._checkpoint_wrapped_module`` when it recomputes activations, ``_orig_mod.0`` when it is
compiled, ``module.0`` under DDP. A pattern of ``stays=``, an error, a census and an export always
say ``0``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from placement.torch_private import WRAPPED

_AVERAGING = (DistributedDataParallel, DataParallel)
"""Wrappers that call what they wrap ``module``, as a model may call a part of its own."""


def canonical_names(module: nn.Module) -> Callable[[str], str]:
    """A function from a name below ``module``, as ``named_parameters()``, ``named_modules()`` or
    ``state_dict()`` has it, to the name without the wrappers' parts."""
    averaged = {
        _without_unmistakable(f"{path}.module".removeprefix("."))
        for path, submodule in module.named_modules(remove_duplicate=False)
        if isinstance(submodule, _AVERAGING)
    }

    def canonical(name: str) -> str:
        kept, path = [], ""
        for part in _without_unmistakable(name).split("."):
            path = f"{path}.{part}".removeprefix(".")
            if path not in averaged:
                kept.append(part)
        return ".".join(kept)

    return canonical if averaged else _without_unmistakable


def one_or_several(names: str | Iterable[str]) -> tuple[str, ...]:
    """Names or patterns that a caller gave, a single one without a list around it, too: letter by
    letter, a pattern ``embed*`` would match everything."""
    return (names,) if isinstance(names, str) else tuple(names)


def _without_unmistakable(name: str) -> str:
    """``name`` without the parts that no model has but from a wrapper."""
    if "_" not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in WRAPPED)
