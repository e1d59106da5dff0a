"""Adapters of peft: merged into the weights that they adapt, or alone.

A merge is made on each gathered copy, with peft's own arithmetic (``get_delta_weight`` of its LoRA
layers): the module's weights are read, never written, so there is nothing to take back whatever the
consumer does. Where a merge could not give what the module computes with, it is refused.

peft (https://huggingface.co/docs/peft) is an optional package, and this file is not what imports it
first: a module that has one of its layers comes from a process that did.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from placement.errors import ContradictoryOptions, UnsupportedAdapter
from placement.names import canonical_names
from placement.owners.base import Resting
from placement.torch_private import FlatPiece
from placement.weights.gather import Weight


def merged(module: nn.Module, found: Mapping[str, Resting]) -> list[Weight]:
    """The weights of ``module``, those that LoRA adapts with their active adapters added.

    They have the names of the model that peft wrapped. Without adapters in it they are ``found``.

    Args:
        module: the module.
        found: its weights as they rest, by name without wrappers.

    Raises:
        UnsupportedAdapter: it has adapters of another kind, or LoRA that can't be merged exactly.
    """
    weights = [Weight(name, resting) for name, resting in found.items()]
    if "peft" not in sys.modules:
        return weights
    adapted = _AdaptedModule(module, found)
    adapted.refuse_what_cannot_be_merged()
    return [out for weight in weights if (out := adapted.merged(weight)) is not None]


def alone(module: nn.Module, found: Mapping[str, Resting]) -> list[Weight]:
    """The active adapter of ``module``, named as peft's own ``save_pretrained`` names it.

    Embeddings that were resized after peft wrapped the model are not part of it.

    Args:
        module: a peft model, or one wrapped by something.
        found: its weights as they rest, by name without wrappers.

    Raises:
        ContradictoryOptions: there is no adapter in it.
        UnsupportedAdapter: several are active, or peft would compute what it saves.
    """
    path, model = peft_model(module)
    prefix = f"{path}." if path else ""
    relative = {n.removeprefix(prefix): r for n, r in found.items() if n.startswith(prefix)}
    adapter = active_adapter(model)
    try:
        kept = sys.modules["peft"].get_peft_model_state_dict(
            model, state_dict=relative, adapter_name=adapter, save_embedding_layers=False
        )
    except KeyError as missing:  # a wrapper inside what modules_to_save= names
        kept = {str(missing): None}
    known = {id(resting) for resting in relative.values()}
    if made := [name for name, resting in kept.items() if id(resting) not in known]:
        raise UnsupportedAdapter(
            asked='adapters="only"',
            state=f"{len(made)} tensors of the adapter {adapter!r} are no weights of the module",
            why="peft computes them, or looks for them behind a wrapper, and from shards it can't",
            tensors=made,
            instead='export adapters="merged", or save the whole module',
        )
    return [Weight(name, resting) for name, resting in kept.items()]


def peft_model(module: nn.Module) -> tuple[str, Any]:
    """The name without wrappers and the ``PeftModel`` at or in ``module``.

    Raises:
        ContradictoryOptions: there is none.
    """
    if (peft := sys.modules.get("peft")) is not None:
        clean = canonical_names(module)
        for name, submodule in module.named_modules():
            if isinstance(submodule, peft.PeftModel):
                return clean(name), submodule
    raise ContradictoryOptions(
        asked='adapters="only"',
        state=f"there is no peft model in this {type(module).__name__}",
        why="adapters alone are asked for, and it has none",
        instead="leave adapters= out, or wrap the model with peft.get_peft_model",
    )


def active_adapter(model: Any) -> str:
    """The name of the one adapter of a ``PeftModel`` that is active.

    Raises:
        UnsupportedAdapter: several are.
    """
    active: list[str] = list(model.active_adapters)
    if len(active) != 1:
        raise UnsupportedAdapter(
            asked='adapters="only"',
            state=f"active adapters: {', '.join(active) or 'none'}",
            why="files and names of an adapter are those of a single one",
            instead="activate one with set_adapter(), and export them one after the other",
        )
    return active[0]


@dataclass(frozen=True)
class _LoraDelta:
    """What one adapter adds to the weight of one layer.

    Attributes:
        layer: peft's layer.
        adapter: the adapter's name.
        parts: its two factors as they rest, by the name under which the layer keeps them.
        nbytes: bytes of the product, twice: peft scales it out of place.
    """

    layer: Any
    adapter: str
    parts: Mapping[str, Resting]
    nbytes: int

    def add_to(self, whole: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> None:
        # peft's own method, on something that has the layer's settings and the gathered factors.
        as_kept = {
            slot: factor if slot in _EMBEDDING_SLOTS else SimpleNamespace(weight=factor)
            for slot, factor in parts.items()
        }
        stand_in = _StandIn(self.layer, {s: {self.adapter: f} for s, f in as_kept.items()})
        with torch.no_grad():
            whole += type(self.layer).get_delta_weight(stand_in, self.adapter)


class _StandIn:
    """A layer with other values for some of its attributes."""

    def __init__(self, layer: Any, instead: Mapping[str, Any]) -> None:
        self.__dict__.update(instead)
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


_LINEAR_SLOTS = ("lora_A", "lora_B")
_EMBEDDING_SLOTS = ("lora_embedding_A", "lora_embedding_B")


class _AdaptedModule:
    """A module with peft's layers in it, and what becomes of its weights in a merge."""

    def __init__(self, module: nn.Module, found: Mapping[str, Resting]) -> None:
        from peft import PeftModel
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper

        clean = canonical_names(module)
        self._found = found
        self._registered = Counter(id(resting) for resting in found.values())
        self._models: dict[str, Any] = {}
        self._layers: dict[str, Any] = {}
        self._replaced: dict[str, Any] = {}
        for name, submodule in module.named_modules():
            for kind, of_kind in (
                (PeftModel, self._models),
                (BaseTunerLayer, self._layers),
                (AuxiliaryTrainingWrapper, self._replaced),
            ):
                if isinstance(submodule, kind):
                    of_kind[clean(name)] = submodule

    def refuse_what_cannot_be_merged(self) -> None:
        """
        Raises:
            UnsupportedAdapter: with a line for each layer that stands in the way.
        """
        if reasons := list(self._reasons()):
            raise UnsupportedAdapter(
                asked='adapters="merged"',
                state=f"{len(reasons)} of peft's layers can't be merged into gathered weights",
                why="the merged weights would not be what the module computes with",
                tensors=reasons,
                instead='export adapters="only", or merge_and_unload() a copy that is not sharded',
            )

    def merged(self, weight: Weight) -> Weight | None:
        """``weight`` as it is exported; None for an adapter's own."""
        if (path := _enclosing(weight.name, self._layers)) is not None:
            layer = self._layers[path]
            kind, _, rest = weight.name.removeprefix(f"{path}.").partition(".")
            if kind in layer.adapter_layer_names:
                return None
            deltas = tuple(self._deltas(path, layer)) if rest == "weight" else ()
            return Weight(self._unwrapped(f"{path}.{rest}"), weight.resting, deltas)
        if (path := _enclosing(weight.name, self._replaced)) is not None:
            wrapper = self._replaced[path]
            trained = f"{path}.modules_to_save.{wrapper.active_adapter}."
            used = trained if wrapper.active_adapters else f"{path}.original_module."
            if not weight.name.startswith(used):
                return None
            name = f"{path}.{weight.name.removeprefix(used)}"
            return Weight(self._unwrapped(name), weight.resting)
        return Weight(self._unwrapped(weight.name), weight.resting)

    def _deltas(self, path: str, layer: Any) -> Iterator[_LoraDelta]:
        for adapter in _to_merge(layer):
            if adapter in layer.lora_A:
                parts = {s: self._found[f"{path}.{s}.{adapter}.weight"] for s in _LINEAR_SLOTS}
            else:
                parts = {s: self._found[f"{path}.{s}.{adapter}"] for s in _EMBEDDING_SLOTS}
            itemsize = max(_dtype(part).itemsize for part in parts.values())
            elements = self._found[f"{path}.base_layer.weight"].shape.numel()
            yield _LoraDelta(layer, adapter, parts, 2 * elements * itemsize)

    def _unwrapped(self, name: str) -> str:
        """``name`` in the model that peft wrapped."""
        for path in self._models:
            prefix = f"{path}.base_model.model.".lstrip(".")
            if name.startswith(prefix):
                return (f"{path}." if path else "") + name.removeprefix(prefix)
        return name

    def _reasons(self) -> Iterator[str]:
        from peft.tuners.tuners_utils import BaseTuner
        from peft.utils.other import ModulesToSaveWrapper

        for path, model in self._models.items():
            if not isinstance(model.base_model, BaseTuner):
                yield f"{path or '(root)'}: {model.peft_type} has no weights to merge"
        for path, wrapper in self._replaced.items():
            if not isinstance(wrapper, ModulesToSaveWrapper):
                yield f"{path}: {type(wrapper).__name__} is not known here"
            elif wrapper.disable_adapters:
                yield f"{path}: its adapters are disabled"
        for path, layer in self._layers.items():
            if (reason := self._reason(path, layer)) is not None:
                yield f"{path}: {reason}"

    def _reason(self, path: str, layer: Any) -> str | None:
        """Why ``layer`` can't be merged, or None."""
        from peft.tuners import lora

        # Its own merge, not its class: FSDP2 puts a class of its own before the layer's.
        if getattr(type(layer), "merge", None) not in (lora.Linear.merge, lora.Embedding.merge):
            return f"{type(layer).__name__} is neither LoRA on a linear layer nor on an embedding"
        if layer.disable_adapters:
            return "its adapters are disabled"
        if (_enclosing(path, self._layers) or _enclosing(path, self._replaced)) is not None:
            return "it lies inside another one"
        for adapter in _to_merge(layer):
            if adapter in layer.lora_variant:
                return (
                    f"{adapter} is a {type(layer.lora_variant[adapter]).__name__}, not plain LoRA"
                )
            if layer.lora_bias.get(adapter):
                return f"{adapter} has a bias of its own"
        base = self._found.get(f"{path}.base_layer.weight")
        if base is None or not _dtype(base).is_floating_point:
            return "its base layer has no weight of floating-point numbers"
        if self._registered[id(base)] > 1:
            return "its weight is tied to another one, which is not adapted"
        return None


def _to_merge(layer: Any) -> list[str]:
    """The active adapters that are in ``layer`` and not in its weight already."""
    return [
        adapter
        for adapter in layer.active_adapters
        if adapter not in layer.merged_adapters
        and (adapter in layer.lora_A or adapter in layer.lora_embedding_A)
    ]


def _enclosing(name: str, modules: Mapping[str, Any]) -> str | None:
    """The outermost of ``modules`` that ``name`` lies in, by name, or None."""
    dots = (index for index, letter in enumerate(name) if letter == ".")
    return next((name[:dot] for dot in dots if name[:dot] in modules), None)


def _dtype(resting: Resting) -> torch.dtype:
    return resting.local.dtype if isinstance(resting, FlatPiece) else resting.dtype
