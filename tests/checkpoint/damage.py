"""Ways to damage or forge a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from placement.checkpoint import files
from placement.checkpoint.form import CONTENTS, MANIFEST, Manifest, encoded

RANK_0 = "rank-00000.safetensors"

Json = dict[str, Any]


def flip(path: Path, byte: int) -> None:
    """Flip one bit of one byte; negative counts from the end."""
    content = bytearray(path.read_bytes())
    content[byte] ^= 0x10
    path.write_bytes(content)


def cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def change_manifest(checkpoint: Path, change: Callable[[Json], object], *, seal: bool) -> None:
    """Change the manifest, as a forger does who can make seals, or one who can't."""
    path = checkpoint / MANIFEST
    manifest = json.loads(path.read_bytes())
    change(manifest)
    path.write_text(json.dumps(manifest))
    if seal:
        path.write_bytes(encoded(msgspec.json.decode(path.read_bytes(), type=Manifest).sealed()))


def vouch_for(checkpoint: Path, name: str) -> None:
    """Put size and checksum of a file as it is now into the manifest."""
    found = msgspec.to_builtins(files.look_at(checkpoint / name))
    change_manifest(checkpoint, lambda m: m["files"].update({name: found}), seal=True)


def change_contents(checkpoint: Path, change: Callable[[Json], object]) -> None:
    """Change the contents, and make the manifest vouch for them."""
    path = checkpoint / CONTENTS
    contents = json.loads(path.read_bytes())
    change(contents)
    path.write_text(json.dumps(contents))
    vouch_for(checkpoint, CONTENTS)


def change_header(checkpoint: Path, change: Callable[[Json], object]) -> None:
    """Change the header of rank 0's tensors, and make the manifest vouch for it."""
    path = checkpoint / RANK_0
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    vouch_for(checkpoint, RANK_0)
