"""Which weights an export has, and what they are called: decided before the first is gathered."""

from __future__ import annotations

from typing import Literal

from placement.names import canonical_names
from placement.owners import Owner
from placement.owners.base import Resting
from placement.weights import lora
from placement.weights.gather import Weight
from placement.weights.naming import Names, named

Tied = Literal["once", "both"]
"""Whether a weight that is registered under two names comes under the first only, or both."""

Adapters = Literal["merged", "only"]
"""Whether the adapters of a peft model are merged into its weights, or come alone."""


def planned(owner: Owner, *, names: Names | None, tied: Tied, adapters: Adapters) -> list[Weight]:
    """The weights to export, in the order of the state dict.

    Raises:
        ContradictoryOptions: ``names`` does not fit the weights, or there are no adapters.
        UnsupportedAdapter: the module has adapters that can't be exported so.
    """
    found = resting_weights(owner)
    if adapters == "only":
        weights = lora.alone(owner.module, found)
    else:
        weights = lora.merged(owner.module, found)
    if tied == "once":
        first = {id(weight.resting): weight for weight in reversed(weights)}
        weights = [weight for weight in weights if first[id(weight.resting)] is weight]
    called = named([weight.name for weight in weights], names)
    return [Weight(called[w.name], w.resting, w.additions) for w in weights]


def resting_weights(owner: Owner) -> dict[str, Resting]:
    """The weights as they rest, by name without wrappers."""
    clean = canonical_names(owner.module)
    return {clean(name): resting for name, resting in owner.weights()}
