"""Writes the parts of the documentation that the code already says.

Each function returns Markdown. :func:`write` puts them, and the drawing of the machine, into a
directory from which pages include them; Sphinx calls it before every build (``conf.py``), so none
of this is in the repository and none of it can grow old.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import ModuleType

import placement
from placement import TABLE, Event, EventKind, Outcome, PlacementError, errors, states, testing
from placement.cli import diagram
from placement.states import TORN, Legal

PACKAGE = Path(placement.__file__).parent


def write(directory: Path, table: diagram.Machine = TABLE) -> None:
    """Write everything into ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    written = {
        "machine.md": machine_table(table),
        "states.md": members(states.Placement, states.Component, states.Integrity),
        "operations.md": operations(),
        "errors.md": error_catalogue(),
        "trace.md": trace_fields(),
        "api.md": public_api(placement),
        "testing.md": public_api(testing),
    }
    for name, text in written.items():
        (directory / name).write_text(text, encoding="utf-8")
    with (directory / "machine.svg").open("w", encoding="utf-8") as drawing:
        diagram.show(diagram.Format.SVG, drawing, table)


# The machine.


def machine_table(table: diagram.Machine) -> str:
    """Each pair of placement and trigger: where it leads, or why it is refused and what to do."""
    rows = [
        [f"`{source.value}`", f"`{trigger.value}`", f"`{row.dest.value}`", _sentence(row.meaning)]
        if isinstance(row, Legal)
        else [f"`{source.value}`", f"`{trigger.value}`", "**refused**", _reason(row)]
        for (source, trigger), row in table.items()
    ]
    rows.append(["any, torn", "any", "**refused**", _reason(TORN)])
    return _table(["placement", "trigger", "leads to", "what happens, or why not"], rows)


def _reason(row: states.Illegal) -> str:
    return f"{_sentence(row.why)} *Instead:* {_sentence(row.instead)}"


def members(*enums: type) -> str:
    """The members of each enumeration, with what the source says of them."""
    return "\n".join(map(_members, enums))


def _members(enum: type) -> str:
    heading = f"**{enum.__name__}.** {_flowing(inspect.getdoc(enum))}"
    documented = list(_documented(enum))
    if not any(said for _, said in documented):
        return f"{heading} {_listed(member.value for member, _ in documented)}.\n"
    rows = [[f"`{member.value}`", said] for member, said in documented]
    return f"{heading}\n\n{_table(['value', 'meaning'], rows)}"


def operations() -> str:
    """What each operation needs, holds, leaves unchanged and does not begin in."""
    titles = ["operation", "needs on the device", "nobody may move", "leaves unchanged", "not in"]
    rows = [
        [
            f"`{operation.value}`",
            *(
                _listed(member.value for member in kind if member in said[operation])
                for said, kind in (
                    (states.COMPUTES_WITH, states.Component),
                    (states.HOLDS, states.Component),
                    (states.UNCHANGED_BY, states.Component),
                    (states.EXCLUDED_BY, states.Operation),
                )
            ),
        ]
        for operation in states.Operation
    ]
    return _table(titles, rows)


def _documented(enum: type) -> Iterator[tuple[object, str]]:
    """Members, and the strings that stand below them in the source."""
    (body,) = ast.parse(inspect.getsource(enum)).body
    said = dict(_strings_below(body))
    for member in enum:
        yield member, said.get(member.name, "")


def _strings_below(body: ast.Module | ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Names that are assigned to, and the string that stands below each."""
    for assigned, below in zip(body.body, body.body[1:]):
        if isinstance(assigned, ast.Assign | ast.AnnAssign) and isinstance(below, ast.Expr):
            target = assigned.target if isinstance(assigned, ast.AnnAssign) else assigned.targets[0]
            yield ast.unparse(target), _flowing(ast.literal_eval(below.value))


# Errors.


@dataclass(frozen=True)
class Refusal:
    """One place in the source that refuses something.

    Attributes:
        error: name of the class.
        why: the reason, ``…`` for what is known only then; None if all of it is.
        instead: what to do, likewise.
    """

    error: str
    why: str | None
    instead: str | None


def error_catalogue() -> str:
    """Every error, what it says, and each remedy that the code gives with it."""
    found = list(refusals())
    return "\n".join(
        _error(error, [refusal for refusal in found if refusal.error == name])
        for name, error in vars(errors).items()
        if inspect.isclass(error) and issubclass(error, PlacementError)
    )


def _error(error: type[PlacementError], found: list[Refusal]) -> str:
    docstring, _, _ = (inspect.getdoc(error) or "").partition("\nAttributes:")
    rows = sorted({(refusal.why or "…", refusal.instead or "…") for refusal in found})
    said = _table(["why", "instead"], [[_sentence(cell) for cell in row] for row in rows])
    heading = f"## {error.__name__}\n\n{_link_target(error)}\n{_flowing(docstring)}\n"
    return heading + (f"\n{said}" if rows else "")


def _link_target(error: type[PlacementError]) -> str:
    """Shows nothing, and is where references to ``error`` in docstrings lead."""
    return (
        f"```{{eval-rst}}\n.. py:exception:: placement.{error.__name__}\n"
        f"   :canonical: {error.__module__}.{error.__name__}\n   :no-typesetting:\n```\n"
    )


def refusals() -> Iterator[Refusal]:
    """Every refusal in the package, read from its source."""
    known = {name for name, error in vars(errors).items() if inspect.isclass(error)}
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))]
    for tree in trees:
        for function, scope in _functions(tree):
            for call in _calls(function, known):
                given = {keyword.arg: keyword.value for keyword in call.keywords}
                if "instead" in given:
                    for why, instead in _reasons(given, function, scope, trees):
                        yield Refusal(ast.unparse(call.func), why, instead)


def _functions(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, ast.ClassDef | ast.Module]]:
    """Functions of a module, and methods of its classes, with the class or module they are in."""
    for scope in ast.walk(tree):
        if isinstance(scope, ast.ClassDef | ast.Module):
            yield from ((node, scope) for node in scope.body if isinstance(node, ast.FunctionDef))


def _reasons(
    given: dict[str | None, ast.expr],
    function: ast.FunctionDef,
    scope: ast.ClassDef | ast.Module,
    trees: list[ast.Module],
) -> Iterator[tuple[str | None, str | None]]:
    """Why and instead of a refusal: as they stand there; or as the table has them, as each caller
    of the function passes them, or as each maker of the object does."""
    source = ast.unparse(given["instead"])
    if source in ("row.instead", "TORN.instead"):
        rows = [TORN] if source.startswith("TORN") else list(states.TABLE.values())
        yield from ((row.why, row.instead) for row in rows if isinstance(row, states.Illegal))
        return
    parameters = [argument.arg for argument in function.args.args]
    fields = [node.target.id for node in scope.body if _is_field(node)]
    if source in parameters:
        callers = [call for tree in trees for call in _calls(tree, {function.name})]
        passed = [given | dict(zip(parameters, call.args)) for call in callers]
    elif source.removeprefix("self.") in fields:
        makers = [call for tree in trees for call in _calls(tree, {scope.name})]
        instead = fields.index(source.removeprefix("self."))
        passed = [given | {"instead": call.args[instead]} for call in makers]
    else:
        passed = [given]
    for said in passed:
        yield _words(said.get("why")), _words(said["instead"])


def _is_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def _calls(tree: ast.AST, names: set[str]) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in names:
            yield node


def _words(said: ast.expr | None) -> str | None:
    """What is constant in an expression that makes a string."""
    if isinstance(said, ast.Constant):
        return str(said.value)
    if isinstance(said, ast.JoinedStr):
        return "".join(_words(part) or "…" for part in said.values)
    if isinstance(said, ast.BinOp):
        return (_words(said.left) or "…") + (_words(said.right) or "…")
    return None


# The trace.


def trace_fields() -> str:
    """The fields of a line of a trace, in order, with type and meaning."""
    docstring = inspect.getdoc(Event) or ""
    _, _, attributes = docstring.partition("Attributes:\n")
    meanings = dict(
        line.split(": ", 1) for line in _joined(inspect.cleandoc(attributes)).splitlines()
    )
    types = {name: reference.__forward_arg__ for name, reference in Event.__annotations__.items()}
    rows = [[f"`{name}`", f"`{types[name]}`", _sentence(meanings[name])] for name in Event._fields]
    return _table(["field", "type", "meaning"], rows) + "\n" + members(EventKind, Outcome)


def _joined(block: str) -> str:
    """Continuation lines, which are indented, on the line that they continue."""
    return block.replace("\n    ", " ")


# The interface.


def public_api(package: ModuleType) -> str:
    """Every public name of ``package``, under what the module in which it lives is about. Errors
    have a page of their own."""
    homes = [(name, home) for name, home in package._HOMES.items() if home != errors.__name__]
    homes.sort(key=lambda item: (_order(item[1]), item[0]))
    return "\n".join(
        f"## {_title(home)}\n\n" + "\n".join(_autodoc(package, name, home) for name, _ in names)
        for home, names in groupby(homes, key=lambda item: item[1])
    )


_FRONT_DOOR_FIRST = ("manager", "states", "machine", "explanation", "census", "leftovers", "trace")


def _order(home: str) -> int:
    name = home.rpartition(".")[2]
    return _FRONT_DOOR_FIRST.index(name) if name in _FRONT_DOOR_FIRST else len(_FRONT_DOOR_FIRST)


def _title(home: str) -> str:
    docstring = inspect.getdoc(importlib.import_module(home)) or home
    return docstring.partition("\n")[0].rstrip(".").replace("``", "`")


def _autodoc(package: ModuleType, name: str, home: str) -> str:
    target = getattr(package, name)
    qualified = f"{package.__name__}.{name}"
    if inspect.isclass(target):
        text = f".. autoclass:: {qualified}\n   :members:\n   :undoc-members:\n"
    elif callable(target):
        text = f".. autofunction:: {qualified}\n"
    else:
        text = f".. data:: {qualified}\n\n   {_said_below(name, home)}\n"
    return f"```{{eval-rst}}\n{text}```\n"


def _said_below(name: str, home: str) -> str:
    """The string that stands below an assignment to ``name`` in the source."""
    return dict(_strings_below(ast.parse(inspect.getsource(importlib.import_module(home)))))[name]


# Markdown.


def _table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles = list(titles)
    lines = [titles, ["---"] * len(titles), *rows]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def _listed(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words) or "none"


def _sentence(text: str) -> str:
    text = _flowing(text)
    return text + ("" if text.endswith((".", "…")) else ".")


def _flowing(text: str | None) -> str:
    return _plain(" ".join((text or "").split()))


def _plain(text: str) -> str:
    """Without the roles of reStructuredText."""
    return (
        text.replace(":class:`~placement.errors.", "`").replace(":class:`", "`").replace("``", "`")
    )
