"""The house rules that a program can check. ``docs/architecture.md`` gives the reasons."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import placement
import placement.testing

ROOT = Path(placement.__file__).parent
ENGINE = ROOT.parent / "engine"
PRIVATE_HOMES = {ROOT / "torch_private.py"}


def modules(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*.py")) if "__pycache__" not in path.parts)


def imports(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno


def test_placement_knows_no_engine() -> None:
    found = [
        f"{path.name}:{line} imports {name}"
        for path in modules(ROOT)
        for name, line in imports(path)
        if name.split(".")[0] == "engine"
    ]
    assert not found


def test_nothing_in_placement_imports_an_adapter() -> None:
    found = [
        f"{path.name}:{line} imports {name}"
        for path in modules(ROOT)
        if "adapters" not in path.parts
        for name, line in imports(path)
        if name.startswith("placement.adapters")
    ]
    assert not found


def test_the_core_needs_neither_the_simulated_accelerator_nor_the_test_kit() -> None:
    outer = ("sim", "testing", "cli", "adapters")
    found = [
        f"{path.name}:{line} imports {name}"
        for path in modules(ROOT)
        if path.relative_to(ROOT).parts[0] not in (*outer, "__main__.py")
        for name, line in imports(path)
        if name.startswith(tuple(f"placement.{folder}" for folder in outer))
    ]
    assert not found


PAGE = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_room_stands_on_the_page() -> None:
    rooms = [path.name for path in ROOT.glob("*.py") if not path.name.startswith("__")]
    rooms += [f"{path.name}/" for path in ROOT.iterdir() if (path / "__init__.py").exists()]
    assert [room for room in sorted(rooms) if f"`{room}`" not in PAGE] == []


def test_imports_run_one_way_as_the_page_says() -> None:
    lines = re.findall(r"^  \d\. (.*)$", PAGE, flags=re.MULTILINE)
    level = {
        name.rstrip("/"): number
        for number, line in enumerate(lines)
        for name in re.findall(r"`([a-z_]+/?)`", line)
    }
    core = [p for room in (".", "owners", "weights") for p in (ROOT / room).glob("*.py")]
    found = []
    for path in core:
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if room.startswith("__"):
            continue
        for name, line in imports(path):
            other = name.split(".")[1] if name.startswith("placement.") else room
            if other != room and level[other] >= level[room]:
                found.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not found


def test_no_public_name_is_hidden_by_a_module_of_that_name() -> None:
    # Importing placement/explain.py would put the module in the place of placement.explain.
    for package in (placement, placement.testing):
        folder = Path(package.__file__).parent
        modules_there = {path.stem for path in [*folder.glob("*.py"), *folder.glob("*/")]}
        assert not modules_there & set(package.__all__)


def test_private_torch_names_stand_in_one_file() -> None:
    # A name that begins with one underscore and is read from something other than self or cls.
    # placement/sim is a torch backend and lists its own; what it uses stands in its files' heads.
    found = []
    for path in modules(ROOT):
        if path in PRIVATE_HOMES or path.relative_to(ROOT).parts[0] == "sim":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        own = {
            target
            for node in ast.walk(tree)
            for target in (
                [node.attr]
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
                else [node.name]
                if isinstance(node, (ast.FunctionDef, ast.ClassDef))
                else [node.target.id]
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
                else []
            )
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr):
                by_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                if not by_self and node.attr not in own and node.attr not in ALLOWED:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} .{node.attr}")
        for name, line in imports(path):
            if name.startswith("torch.") and re.search(r"\._[a-z]", name):
                found.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not found


ALLOWED = {"_getframe", "_asdict", "_fields", "_field_defaults", "_make"}
"""Underscored names of the standard library."""


def test_the_engine_has_no_device_logic() -> None:
    source = (ENGINE / "fsdp_engine.py").read_text(encoding="utf-8")
    words = r"\.cpu\(|\.cuda\(|torch\.device\(|torch\.accelerator|is_cuda|\.device\.type|\"cpu\""
    assert not re.findall(words, source)
