"""Values as JSON: exactly, or refused by name."""

from __future__ import annotations

import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from placement import CannotSave
from placement.checkpoint.tree import Encoder, NotATree, decode


def through_json(value: Any) -> Any:
    """``value``, encoded, written, read and decoded."""
    encoder = Encoder()
    tree = encoder.encode(value, "value")
    encoder.refuse()
    text = msgspec.json.encode(tree)
    json.loads(text, parse_constant=pytest.fail)  # no NaN, which JSON has not
    return decode(msgspec.json.decode(text), encoder.tensors.__getitem__)


def same(one: Any, other: Any) -> bool:
    """Equal, and of the same types all the way down; nan is nan."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        signs = math.copysign(1, one) == math.copysign(1, other)
        return (math.isnan(one) and math.isnan(other)) or (one == other and signs)
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True)
        return len(one) == len(other) and all(same(a, b) for a, b in pairs)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.text(st.characters(categories=["Cs"]))
    | st.binary()
    | st.complex_numbers()
)
keys = st.text() | st.integers() | st.booleans() | st.tuples(st.text(), st.integers())
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.dictionaries(st.sampled_from(["$tuple", "$tensor", "$", "a"]), inner)
        | st.dictionaries(keys, inner).map(OrderedDict)
    ),
)


@given(values)
def test_what_comes_back_is_equal_and_of_the_same_types(value: Any) -> None:
    assert same(value, through_json(value))


@pytest.mark.parametrize(
    "value",
    [
        2**200,
        -(2**64),
        -0.0,
        5e-324,
        float("nan"),
        float("-inf"),
        pytest.param({1, (2, "three")}, id="a set"),
        frozenset({b"\x00\xff"}),
        Counter({3: 2, 1: 1}),
        torch.Size([2, 0]),
        torch.bfloat16,
        {"$tensor": "not one"},
        {1: "int", "1": "str", True.__class__.__name__: None},
        "\ud800",
    ],
    ids=repr,
)
def test_these_come_back_too(value: Any) -> None:
    assert same(value, through_json(value))


def test_tensors_are_lifted_out_wherever_they_are() -> None:
    tensor = torch.arange(3)
    value = {"a/b": [tensor], "a": {"b": (tensor + 1,)}, 1: {"x": tensor + 2}}
    encoder = Encoder()
    tree = encoder.encode(value, "extras")
    assert len(encoder.tensors) == 3  # "a/b" and "a", "b" are two paths
    back = decode(tree, encoder.tensors.__getitem__)
    assert back["a/b"][0] is tensor
    assert torch.equal(back["a"]["b"][0], tensor + 1)
    assert torch.equal(back[1]["x"], tensor + 2)


class Colour(enum.IntEnum):
    RED = 1


Point = namedtuple("Point", "x")
cyclic: list[Any] = []
cyclic.append(cyclic)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "builtins.object"),
        (Colour.RED, "Colour"),
        (Point(1), "Point"),
        (np.float64(1.0), "numpy.float64"),
        (np.zeros(2), "numpy.ndarray"),
        (defaultdict(int), "defaultdict"),
        (len, "builtin_function_or_method"),
        (range(3), "builtins.range"),
        (cyclic, "contains itself"),
        (torch.zeros(2, dtype=torch.complex128), "torch.complex128"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.zeros(2, 2).to_sparse(), "sparse"),
        (torch.zeros(2, dtype=torch.uint8).view(torch.bits8), "torch.bits8"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_can_not_come_back_exactly_is_refused_by_key_and_type(value: Any, kind: str) -> None:
    with pytest.raises(CannotSave) as caught:
        through_json({"fine": 1, "loader": [0, value]})
    assert any("value/loader/1" in line and kind in line for line in map(str, caught.value.tensors))


def test_all_that_is_refused_is_named() -> None:
    with pytest.raises(CannotSave) as caught:
        through_json({"one": object(), "two": object()})
    assert len(caught.value.tensors) == 2


@pytest.mark.parametrize(
    "tree",
    [
        {"$object": []},
        {"$tuple": [], "more": 1},
        {"$tuple": 3},
        {"$dict": [[1]]},
        {"$set": [[1]]},
        {"$bytes": "?"},
        {"$dtype": "load"},
        {"$dtype": "nothing"},
        {"$int": "one"},
        {"$complex": ["1"]},
        {"$tensor": 3},
        {"$size": [1.5]},
        {"a": {"$": 1}},
    ],
    ids=str,
)
def test_json_that_no_encoder_made_is_refused(tree: Any) -> None:
    with pytest.raises(NotATree):
        decode(tree, lambda _: torch.zeros(()))
