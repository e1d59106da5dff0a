"""A manager under the methods that an engine has, with its class left as it is.

Each method that is named is wrapped on the one instance: what the engine does in it happens in the
context of the manager's that fits. Only what it did about devices is taken from it: while its own
code runs in such a context, its calls of its own ``to`` find everything seen to. Called from
anywhere else, ``to`` is the manager's, with its refusals.

An engine that moves its module past its own ``to`` is met as one that anybody does: refused under
FSDP2's policy, else as :class:`~placement.errors.PlacementDrift` with the place in the code.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, Protocol

import torch

from placement.errors import AlreadyManaged, ContradictoryOptions

Context = Callable[[], AbstractContextManager[Any]]


class Places(Protocol):
    """What an attachment needs of a manager."""

    def to(self, device: torch.device | str, *, model: bool, optimizer: bool, grad: bool) -> None:
        """Move by hand."""

    def training(self) -> AbstractContextManager[Any]:
        """A context."""

    def evaluating(self, *, unchanged: bool = True) -> AbstractContextManager[Any]:
        """A context."""

    def saving(self) -> AbstractContextManager[Any]:
        """A context."""

    def loading(self) -> AbstractContextManager[Any]:
        """A context."""

    def exporting(self) -> AbstractContextManager[Any]:
        """A context."""


class Attachment:
    """A manager and an engine that were put together by ``PlacementManager.attach``.

    Attributes:
        methods: names of the engine's methods that are wrapped.
    """

    def __init__(
        self,
        manager: Places,
        engine: object,
        *,
        to: str | None,
        train: str | None,
        evaluate: str | None,
        save: str | None,
        load: str | None,
        export: Iterable[str],
    ) -> None:
        self._manager = manager
        self._engine: Any = engine
        self._own_code_runs = False
        self._found: dict[str, Any] = {}
        wrappers = [
            (to, self._moves),
            (train, self._mode(manager.training)),
            (evaluate, self._mode(manager.evaluating)),
            (save, self._call(manager.saving)),
            (load, self._call(manager.loading)),
            *((name, self._weights) for name in export),
        ]
        wanted = {name: wrap for name, wrap in wrappers if name is not None}
        self._refuse(engine, wanted)
        for name, wrap in wanted.items():
            self._wrap(name, wrap)
        self.methods = tuple(wanted)

    def detach(self) -> None:
        """Give the engine its methods back, as they were. Its module stays where it is, and stays
        managed."""
        for name in self.methods:
            delattr(self._engine, name)
        for name, method in self._found.items():
            setattr(self._engine, name, method)
        self.methods, self._found = (), {}

    @staticmethod
    def _refuse(engine: object, wanted: Iterable[str]) -> None:
        """Refuse an engine that lacks a method, or has one that is wrapped."""
        missing = [name for name in wanted if not callable(getattr(engine, name, None))]
        if missing:
            raise ContradictoryOptions(
                asked=f"attaching to a {type(engine).__name__}",
                state=f"it has no method {' and no method '.join(missing)}",
                why="what it does there would go past the manager",
                instead="say how its methods are called (train=, save=, ...), or None for those "
                "that it has not",
            )
        if any(hasattr(getattr(engine, name), "attachment") for name in wanted):
            raise AlreadyManaged(
                asked=f"attaching to a {type(engine).__name__}",
                state="a manager is attached to it",
                why="each call would enter the contexts of both",
                instead="detach() the attachment that is there",
            )

    def _wrap(self, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        own = getattr(self._engine, name)
        if name in vars(self._engine):
            self._found[name] = own
        method: Any = wraps(own)(wrap(own))
        method.attachment = self
        setattr(self._engine, name, method)

    @contextmanager
    def _own_code(self) -> Iterator[None]:
        """The engine's own code runs, in a context of the manager's."""
        outer, self._own_code_runs = self._own_code_runs, True
        try:
            yield
        finally:
            self._own_code_runs = outer

    # What the methods become.

    def _moves(self, own: Callable[..., Any]) -> Callable[..., None]:
        def to(
            device: torch.device | str,
            model: bool = True,
            optimizer: bool = True,
            grad: bool = True,
        ) -> None:
            if not self._own_code_runs:
                self._manager.to(device, model=model, optimizer=optimizer, grad=grad)

        return to

    def _mode(self, context: Context) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrapped(own: Callable[..., Any]) -> Callable[..., Any]:
            def mode(*args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
                found = own(*args, **kwargs)
                if not isinstance(found, AbstractContextManager):
                    raise _no_context(self._engine, own, found)
                return entered(found)

            @contextmanager
            def entered(found: AbstractContextManager[Any]) -> Iterator[Any]:
                with context(), _Announced(found, self._own_code) as value:
                    yield value

            return mode

        return wrapped

    def _call(self, context: Context) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrapped(own: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                with context(), self._own_code():
                    return own(*args, **kwargs)

            return call

        return wrapped

    def _weights(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def weights(*args: Any, **kwargs: Any) -> Generator[Any, None, None]:
            # An engine's export may compute with the weights, where its own ``to`` brought them,
            # and merge an adapter into them for as long as it takes.
            with self._manager.exporting(), self._manager.evaluating(unchanged=False):
                with self._own_code():
                    items = own(*args, **kwargs)
                yield from self._announced(items)

        return weights

    def _announced(self, items: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """The same items. What yields them is the engine's own code, who consumes them is not."""
        finished = object()
        try:
            while True:
                with self._own_code():
                    item = next(items, finished)
                if item is finished:
                    return
                yield item
        finally:
            with self._own_code():
                items.close()


def _no_context(engine: object, method: Callable[..., Any], found: object) -> ContradictoryOptions:
    name = getattr(method, "__name__", str(method))
    return ContradictoryOptions(
        asked=f"{type(engine).__name__}.{name}()",
        state=f"it was attached as a mode, ran, and returned {type(found).__name__}, not a context",
        why="what is done inside a mode is guarded; a method that trains or evaluates at once has "
        "nothing that could be put into its context",
        instead="attach with None in its place, and guard its body with manager.training() or "
        "manager.evaluating()",
    )


class _Announced:
    """An engine's context, whose own code is announced when it begins and ends."""

    def __init__(self, own: AbstractContextManager[Any], own_code: Context) -> None:
        self._own = own
        self._own_code = own_code

    def __enter__(self) -> Any:
        with self._own_code():
            return self._own.__enter__()

    def __exit__(self, *failure: Any) -> bool | None:
        with self._own_code():
            return self._own.__exit__(*failure)
