"""Refuses to compute with what is put away, and says which context would bring it.

A forward pass of an offloaded module fails anyway, somewhere inside the module, with an error about
two devices (https://github.com/NVIDIA-NeMo/RL/pull/2392). So the module and its optimizer are given
a hook each, which asks the record first: two look-ups where all is well. Tensors are looked at only
where the record says that something is put away, and what the tensors show decides: a plain module
whose tensors and inputs are all on the CPU computes there, and that is nobody's fault.

A compiled graph has no such hook in it: it would be compiled anew for every placement. A compiled
module that is put away fails in torch's words, unless the manager has the wrapper that
``torch.compile`` made.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from placement.errors import PutAway
from placement.journal import Journal
from placement.optimizer import optimizers_in
from placement.record import Record
from placement.residence import CPU
from placement.states import Component, Placement
from placement.tensors import same_device, tensors_in
from placement.torch_private import takes_step_hooks

_READ_BY_FORWARD = (Component.PARAMS, Component.BUFFERS)
_READ_BY_STEP = (Component.PARAMS, Component.GRADS, Component.OPTIMIZER)


class UseGuard:
    """Asked before each forward pass of a module and each step of its optimizer.

    Args:
        record: says where they are.
        journal: where refusals are recorded.
    """

    def __init__(self, record: Record, journal: Journal) -> None:
        self._record = record
        self._journal = journal
        self._hooks = list(_hooked(record.module, record.optimizer, self))
        weakref.finalize(self, _remove, self._hooks)

    def remove(self) -> None:
        """Ask no longer."""
        _remove(self._hooks)

    def before_forward(self, inputs: object) -> None:
        """
        Raises:
            PutAway: the module rests on the CPU, and would be computed with on the device.
        """
        placements = self._record.placements()
        away = [c for c in _READ_BY_FORWARD if placements[c] is Placement.CPU_MANUAL]
        if not away:
            return
        asked = "a forward pass"
        with self._journal.refusals(asked):
            sites = self._record.census().of(*away).sites
            where = self._computed_on(inputs)
            if where and all(site.is_on(CPU) for site in sites):
                raise PutAway(
                    asked=asked,
                    state=_in_words({component: placements[component] for component in away}),
                    why=f"they rest on the CPU, and {where}",
                    tensors=[str(site) for site in sites],
                    instead="compute inside manager.evaluating() or manager.training(), which "
                    "bring it and put it back, or call manager.onload() first",
                )

    def before_step(self) -> None:
        """
        Raises:
            PutAway: parameters and optimizer state are in different places.
        """
        placements = self._record.placements()
        read = {component: placements[component] for component in _READ_BY_STEP}
        if len(set(read.values())) == 1:
            return
        asked = "optimizer.step()"
        with self._journal.refusals(asked):
            beside = self._record.census().of(Component.GRADS, Component.OPTIMIZER)
            apart = self._record.residence.strays(beside, placements[Component.PARAMS])
            if apart:
                raise PutAway(
                    asked=asked,
                    state=_in_words(read),
                    why="a step reads parameters, gradients and state, on one device",
                    tensors=[str(site) for site in apart],
                    instead="step inside manager.training(), which brings all of them and puts "
                    "them back",
                )

    def _computed_on(self, inputs: object) -> str | None:
        """Why the module is about to be computed with on the device; None if that can't be told."""
        owner, device = self._record.owner, self._record.device
        if owner.compute_device is not None:
            return f"{owner.name} computes on {device}"
        if any(same_device(tensor.device, device) for _, tensor in tensors_in(inputs)):
            return f"an input is on {device}"
        return None


class _Hook:
    """Asks a guard as long as there is one. It keeps none alive, and a copy of the module, which
    carries a copy of its hooks, asks nobody."""

    def __init__(self, guard: UseGuard | None = None) -> None:
        self._guard = weakref.ref(guard) if guard is not None else None

    @property
    def guard(self) -> UseGuard | None:
        """Who is to be asked; None while torch compiles."""
        if self._guard is None or torch.compiler.is_compiling():
            return None
        return self._guard()

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), ())


class _BeforeForward(_Hook):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if (guard := self.guard) is not None:
            guard.before_forward((args, kwargs))


class _BeforeStep(_Hook):
    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if (guard := self.guard) is not None:
            guard.before_step()


def _hooked(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, guard: UseGuard
) -> Iterator[RemovableHandle]:
    # Before the hooks of the module's owner, which gather parameters.
    yield module.register_forward_pre_hook(_BeforeForward(guard), prepend=True, with_kwargs=True)
    for one in optimizers_in(optimizer) if optimizer is not None else ():
        if takes_step_hooks(one):
            yield one.register_step_pre_hook(_BeforeStep(guard))


def _in_words(placements: Mapping[Component, Placement]) -> str:
    where = (f"the {component.value} in {place.value}" for component, place in placements.items())
    return f"the record has {', '.join(where)}"


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
