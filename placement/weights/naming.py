"""What weights are called by those who receive them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from placement.errors import ContradictoryOptions

Names = Callable[[str], str] | Mapping[str, str]
"""How names are changed: by a function, or one by one. A mapping leaves the others."""


def named(found: Sequence[str], names: Names | None) -> dict[str, str]:
    """What each of ``found`` is called.

    Raises:
        ContradictoryOptions: a mapping names what is not there, or two weights would have one
            name.
    """
    if isinstance(names, Mapping) and (unknown := sorted(names.keys() - set(found))):
        raise ContradictoryOptions(
            asked="names=",
            state=f"it names {', '.join(unknown)}",
            why="no weight has such a name",
            instead="name what an export without names= yields",
        )
    called = {name: _renamed(name, names) for name in found}
    sources: dict[str, list[str]] = {}
    for name in found:
        sources.setdefault(called[name], []).append(name)
    if clashes := {new: old for new, old in sources.items() if len(old) > 1}:
        raise ContradictoryOptions(
            asked="naming the weights",
            state=f"{len(clashes)} names are given to more than one weight",
            why="whoever receives them would keep the last one",
            tensors=[f"{new}: {', '.join(old)}" for new, old in clashes.items()],
            instead="let names= give each weight a name of its own",
        )
    return called


def _renamed(name: str, names: Names | None) -> str:
    if names is None:
        return name
    return names(name) if callable(names) else names.get(name, name)
