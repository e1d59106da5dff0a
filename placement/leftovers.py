"""Memory that did not come back after an offload: whose it was, and what holds it.

An offload points the module's tensors at host memory. The device memory is freed when nobody else
looks into it. A state dict, a view, a tensor in a local variable or a graph that waits for its
backward pass keeps it.

A tensor that a module keeps in a plain attribute (a cache of its weights in another precision) is
neither parameter nor buffer, so nobody can tell what it is good for: it is not moved, but named.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

import torch
from torch import nn

from placement.names import canonical_names
from placement.tensors import has_storage, parts, tensors_in
from placement.torch_private import REGISTRIES, storage_address


@dataclass(frozen=True)
class Leftover:
    """One storage on the device after an offload: one that was copied away and is still alive, or
    one that the module keeps in a plain attribute.

    Attributes:
        name: the first of the module's tensors that looked into it, or the attribute.
        nbytes: its size in bytes.
        holders: what holds a tensor that looks into it, as far as Python knows; empty if only C++
            does (an autograd graph, for example).
    """

    name: str
    nbytes: int
    holders: tuple[str, ...]

    def __str__(self) -> str:
        held = "; ".join(self.holders) or "nothing that Python knows of: an autograd graph, perhaps"
        return f"{self.name}, {self.nbytes:,} bytes, held by {held}"


def find_leftovers(
    sources: Mapping[int, tuple[str, int]], device: torch.device
) -> Iterator[Leftover]:
    """Look which storages are alive, through every object that Python's collector knows.

    It takes as long as a garbage collection. Call it right after the offload: the address of a
    storage that was freed may be given to a new one.

    Args:
        sources: address of each storage that was copied away, with its name and bytes.
        device: where they were.
    """
    looking: dict[int, list[torch.Tensor]] = {}
    for candidate in gc.get_objects():
        if not issubclass(type(candidate), torch.Tensor):
            continue
        for part in parts(candidate):
            if part.device == device and has_storage(part):
                address = storage_address(part)
                if address in sources and part.untyped_storage().nbytes() > 0:
                    looking.setdefault(address, []).append(candidate)
    for address, tensors in looking.items():
        name, nbytes = sources[address]
        own = {id(looking), id(tensors)}
        holders = dict.fromkeys(h for tensor in tensors for h in _holders(tensor, own))
        yield Leftover(name, nbytes, tuple(holders))


def find_unregistered(
    module: nn.Module, registered: Iterable[torch.Tensor], device: torch.device
) -> Iterator[Leftover]:
    """Storages on ``device`` that ``module`` and its parts keep in plain attributes, also in lists,
    tuples and dicts there, however deep.

    Args:
        module: the module.
        registered: its parameters, gradients and buffers, consumed if need be. What looks into
            their storages is theirs.
        device: where to look.
    """
    found = {
        storage_address(part): (name, part.untyped_storage().nbytes())
        for name, tensor in _in_attributes(module)
        for part in _with_storage([tensor])
        if part.device == device
    }
    if not found:
        return  # the usual case after an offload, and the registered ones need not be looked at
    theirs = {storage_address(part) for part in _with_storage(registered)}
    canonical = canonical_names(module)
    for address, (name, nbytes) in found.items():
        if address not in theirs and nbytes > 0:
            yield Leftover(canonical(name), nbytes, (_PLAIN_ATTRIBUTE,))


_CONTAINERS = (dict, list, tuple)

_PLAIN_ATTRIBUTE = "a plain attribute, neither parameter nor buffer"


def _in_attributes(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in the plain attributes of ``module`` and its parts."""
    for prefix, submodule in module.named_modules():
        for attribute, value in vars(submodule).items():
            # Most attributes are flags, and empty dicts of hooks.
            may_hold = isinstance(value, torch.Tensor) or (isinstance(value, _CONTAINERS) and value)
            if may_hold and attribute not in REGISTRIES:
                for path, tensor in tensors_in(value):
                    yield f"{prefix}.{attribute}{path}".removeprefix("."), tensor


def _with_storage(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    return (part for tensor in tensors for part in parts(tensor) if has_storage(part))


def _holders(tensor: torch.Tensor, own: set[int]) -> Iterator[str]:
    for holder in gc.get_referrers(tensor):
        if id(holder) in own or isinstance(holder, FrameType):
            continue  # this search, and frames that run it
        yield from _described(holder, tensor)


def _described(holder: Any, tensor: torch.Tensor) -> Iterator[str]:
    if isinstance(holder, dict):
        key = next((key for key, value in holder.items() if value is tensor), None)
        if isinstance(key, str) and key.startswith("_") and key.endswith("_tensor"):
            return  # the attribute of a wrapper, which is found itself
        yield f"{_kind_of(holder)} under {key!r}"
    elif isinstance(holder, (list, tuple, set)):
        yield f"a {type(holder).__name__} of {len(holder)}"
    elif isinstance(holder, GeneratorType):
        yield f"the generator {holder.__qualname__}"
    elif isinstance(holder, FunctionType):
        yield f"the function {holder.__qualname__}"
    elif not isinstance(holder, torch.Tensor):
        yield f"a {type(holder).__name__}"


def _kind_of(mapping: dict[Any, Any]) -> str:
    if type(mapping) is not dict:
        return f"a {type(mapping).__name__}"
    for owner in gc.get_referrers(mapping):
        if getattr(owner, "__dict__", None) is mapping:
            if isinstance(owner, ModuleType):
                return f"the module {owner.__name__}"
            return f"a {type(owner).__name__}"
    return "a dict"
