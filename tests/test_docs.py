"""The documentation says what the code says, and its code is run."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

import placement
import placement.testing
from docs import from_code
from docs.snippets import pages
from placement import TABLE, Illegal, Legal, Placement, PlacementError, Trigger, errors
from placement.cli import diagram

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
PAGES = [page for page in PAGES if "generated" not in page.parts]

OPENED = {
    **TABLE,
    (Placement.CPU_FSDP2_MANAGED, Trigger.OFFLOAD): Legal(Placement.CPU_MANUAL, "taken over"),
}
CLOSED = {**TABLE, (Placement.GPU, Trigger.OFFLOAD): Illegal("the host is full", "make room")}


def written(directory: Path, table: diagram.Machine) -> dict[str, str]:
    from_code.write(directory, table)
    return {path.name: path.read_text(encoding="utf-8") for path in directory.iterdir()}


def test_a_changed_row_changes_the_table_and_the_diagrams_of_the_pages(tmp_path: Path) -> None:
    tables = {"found": TABLE, "opened": OPENED, "closed": CLOSED}
    drawn = {name: written(tmp_path / name, table) for name, table in tables.items()}
    page = (ROOT / "docs" / "reference" / "states.md").read_text(encoding="utf-8")
    for name in ("machine.md", "machine.svg"):
        assert f"../generated/{name}" in page
        assert len({files[name] for files in drawn.values()}) == 3, name
    assert "the host is full. *Instead:* make room." in drawn["closed"]["machine.md"]


def test_nothing_but_the_machine_depends_on_the_table_that_is_drawn(tmp_path: Path) -> None:
    found, opened = written(tmp_path / "found", TABLE), written(tmp_path / "opened", OPENED)
    changed = {name for name in found if found[name] != opened[name]}
    assert changed == {"machine.md", "machine.svg"}


def test_the_readme_draws_the_machine_of_the_table() -> None:
    assert f"```mermaid\n{diagram.mermaid()}```" in README


def test_every_error_that_is_raised_has_its_remedies_in_the_catalogue() -> None:
    remedies: dict[str, list[str | None]] = {}
    for refusal in from_code.refusals():
        remedies.setdefault(refusal.error, []).append(refusal.instead)
    unreadable = [error for error, said in remedies.items() if not all(said)]
    assert not unreadable, "a remedy can't be read from the source"
    catalogue = from_code.error_catalogue()
    for name, error in vars(errors).items():
        if isinstance(error, type) and issubclass(error, PlacementError):
            assert f"## {name}\n" in catalogue
            assert remedies.get(name) or error.__subclasses__(), f"nothing raises {name}"


@pytest.mark.parametrize("package", [placement, placement.testing])
def test_every_public_name_has_a_place_in_the_reference(package: ModuleType) -> None:
    reference = from_code.error_catalogue() + from_code.public_api(package)
    names = [name for name in package.__all__ if f":: {package.__name__}.{name}\n" in reference]
    assert names == package.__all__


def test_every_environment_variable_of_ours_is_on_its_page() -> None:
    page = (ROOT / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "placement").rglob("*.py")]
    named = {name for source in sources for name in re.findall(r"TORCH_PLACEMENT_[A-Z]+", source)}
    assert named == set(re.findall(r"TORCH_PLACEMENT_[A-Z]+", page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"\bmake ([a-z0-9][a-z0-9-]*)\b(?=[` ]*(?:[`#A-Z(]|$))", text, re.M):
        assert target in targets, f"make {target}"
    for link in re.findall(r"\]\((?!https?://|#)([^)#]+)", text):
        assert (page.parent / link).exists(), link


def runs(page: Path, text: str) -> None:
    page.write_text(text, encoding="utf-8")
    document = pages("*.md").parse(page)
    document.namespace["page"] = page.parent
    for example in document.examples():
        example.evaluate()


@pytest.mark.parametrize(
    "text",
    [
        "```python\nassert False\n```",
        "```python\nprint(1)\n```\n```output\n2\n```",
        "```output\n1\n```",
        "```console\n$ false\n```",
        "```console\n$ echo 1\n2\n```",
        "<!--- invisible-code-block: python\nassert False\n-->",
    ],
)
def test_a_page_that_shows_what_does_not_happen_fails(tmp_path: Path, text: str) -> None:
    with pytest.raises(AssertionError):
        runs(tmp_path / "page.md", text)


def test_blocks_of_a_page_build_on_each_other(tmp_path: Path) -> None:
    page = """
```python
# shown.py
print(6 * 7)
```

```console
$ python shown.py
4...
```

```python
value = 42
```

```python
print(value)
```

```output
42
```
"""
    runs(tmp_path / "page.md", page)
