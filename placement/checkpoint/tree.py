"""Values of Python as JSON, exactly: what comes back is equal, and of the same types.

JSON knows null, booleans, numbers, strings, lists and objects with strings as keys. All else that a
checkpoint may hold is an object with one key that begins with a dollar: ``{"$tuple": [1, 2]}``.
Tensors are lifted out and stay behind as ``{"$tensor": name}``. What has no such form is refused by
name, since anything that could bring back *any* value would have to run code to do it.

Exactly means: types too, so a subclass (a numpy number, an enum, a named tuple) is refused rather
than turned into its base. A list that is held twice comes back as two; a tensor comes back as a
plain tensor, on the CPU, without ``requires_grad``.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from placement.checkpoint.form import DTYPE_NAMES
from placement.errors import CannotSave
from placement.torch_private import inner_tensors

_WITHIN_64_BITS = range(-(2**63), 2**64)


class Encoder:
    """Turns values into trees, and keeps the tensors that were in them.

    Attributes:
        tensors: those that were lifted out, by name: the path to them, joined with slashes.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._refused: list[str] = []
        self._open: set[int] = set()

    def encode(self, value: Any, *path: str) -> Any:
        """``value`` as a tree. What can't be one is remembered for :meth:`refuse`.

        Args:
            value: anything.
            path: where it is, for names and for errors.
        """
        if isinstance(value, torch.Tensor):
            return self._lifted(value, path)
        kind = type(value)
        if kind is str and _is_unicode(value):
            return value
        if value is None or kind is bool or (kind is int and value in _WITHIN_64_BITS):
            return value
        if kind is float and math.isfinite(value):
            return value
        if kind in _LEAVES:
            tag, as_json = _LEAVES[kind]
            return {tag: as_json(value)}
        if kind in _COLLECTIONS or kind in _MAPPINGS:
            return self._container(value, kind, path)
        self._refused.append(f"{_joined(path)}: {kind.__module__}.{kind.__qualname__}")
        return None

    def refuse(self) -> None:
        """Refuse what could not be encoded.

        Raises:
            CannotSave: there was something.
        """
        if self._refused:
            raise CannotSave(
                asked="saving a checkpoint",
                state=f"{len(self._refused)} values have no form in which they come back exactly",
                why="a checkpoint holds tensors and plain data, because reading it must run no "
                "code; these would need pickle",
                tensors=self._refused,
                instead="put plain data in their place, for example value.item() of a numpy "
                "number, or a dictionary of an object's fields",
            )

    def _container(self, value: Any, kind: type, path: tuple[str, ...]) -> Any:
        if id(value) in self._open:
            self._refused.append(f"{_joined(path)}: {kind.__name__} that contains itself")
            return None
        self._open.add(id(value))
        try:
            if kind in _COLLECTIONS:
                items = [self.encode(v, *path, str(i)) for i, v in enumerate(value)]
                return items if kind is list else {_COLLECTIONS[kind]: items}
            if kind is dict and all(type(k) is str and not k.startswith("$") for k in value):
                return {key: self.encode(v, *path, key) for key, v in value.items()}
            pairs = [
                [self.encode(key, *path, f"key {i}"), self.encode(v, *path, str(i))]
                for i, (key, v) in enumerate(value.items())
            ]
            return {_MAPPINGS[kind]: pairs}
        finally:
            self._open.remove(id(value))

    def _lifted(self, tensor: torch.Tensor, path: tuple[str, ...]) -> Any:
        name = _joined(path)
        if why := _why_not(tensor):
            self._refused.append(f"{name}: {why}")
            return None
        self.tensors[name] = tensor
        return {"$tensor": name}


class NotATree(ValueError):
    """JSON that no :class:`Encoder` made."""


def decode(tree: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """The value that ``tree`` was made of.

    Args:
        tree: what :meth:`Encoder.encode` returned.
        tensor: gives the tensor of a name.

    Raises:
        NotATree: it was something else.
    """
    if isinstance(tree, list):
        return [decode(item, tensor) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if not any(key.startswith("$") for key in tree):
        return {key: decode(item, tensor) for key, item in tree.items()}
    try:
        ((tag, content),) = tree.items()
        if tag == "$tensor" and isinstance(content, str):
            return tensor(content)
        if tag in _FROM_LEAF:
            return _FROM_LEAF[tag](content)
        if tag in _FROM_ITEMS:
            return _FROM_ITEMS[tag](decode(item, tensor) for item in content)
        if tag in _FROM_PAIRS:
            return _FROM_PAIRS[tag](
                (decode(key, tensor), decode(item, tensor)) for key, item in content
            )
    except (ValueError, TypeError, AttributeError) as error:
        raise NotATree(str(error)) from error
    raise NotATree(f"{tag} is no form of a value")


def tensors_in(tree: Any) -> Iterator[str]:
    """The names of the tensors in ``tree``."""
    if isinstance(tree, dict):
        if isinstance(name := tree.get("$tensor"), str):
            yield name
            return
        tree = list(tree.values())
    if isinstance(tree, list):
        for item in tree:
            yield from tensors_in(item)


def _joined(path: tuple[str, ...]) -> str:
    """A path as one name. Escaped as in a JSON pointer (RFC 6901), so that no two are the same."""
    return "/".join(part.replace("~", "~0").replace("/", "~1") for part in path)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def _why_not(tensor: torch.Tensor) -> str:
    """Why ``tensor`` can't be saved; empty if it can."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return f"a tensor without one block of bytes ({tensor.layout}, {tensor.device})"
    if inner_tensors(tensor) and not isinstance(tensor, DTensor):
        return f"{type(tensor).__name__}, a tensor that is made of others"
    if tensor.dtype is torch.float4_e2m1fn_x2 and tensor.ndim == 0:
        return "a tensor of two numbers and no dimension, which safetensors has not"
    if tensor.dtype not in DTYPE_NAMES:
        return f"a tensor of {tensor.dtype}, which safetensors has not"
    return ""


_LEAVES: dict[type, tuple[str, Callable[[Any], Any]]] = {
    int: ("$int", str),
    float: ("$float", str),  # the infinities, and nan, of which there is one
    str: ("$utf8", lambda v: base64.b64encode(v.encode("utf-8", "surrogatepass")).decode()),
    bytes: ("$bytes", lambda v: base64.b64encode(v).decode()),
    complex: ("$complex", lambda v: [str(v.real), str(v.imag)]),
    torch.dtype: ("$dtype", lambda v: str(v).removeprefix("torch.")),
    torch.Size: ("$size", list),
}

_FROM_LEAF: dict[str, Callable[[Any], Any]] = {
    "$int": int,
    "$float": float,
    "$utf8": lambda v: base64.b64decode(v, validate=True).decode("utf-8", "surrogatepass"),
    "$bytes": lambda v: base64.b64decode(v, validate=True),
    "$complex": lambda v: _complex(*v),
    "$dtype": lambda v: _dtype(v),
    "$size": torch.Size,
}

_COLLECTIONS: dict[type, str] = {
    list: "",
    tuple: "$tuple",
    set: "$set",
    frozenset: "$frozenset",
}

_FROM_ITEMS: dict[str, Callable[[Iterator[Any]], Any]] = {
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
}

_MAPPINGS: dict[type, str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}

_FROM_PAIRS: dict[str, Callable[[Iterator[tuple[Any, Any]]], Any]] = {
    "$dict": dict,
    "$ordered": OrderedDict,
    "$counter": lambda pairs: Counter(dict(pairs)),
}


def _complex(real: str, imaginary: str) -> complex:
    return complex(float(real), float(imaginary))


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise NotATree(f"{name} is no dtype")
    return found
