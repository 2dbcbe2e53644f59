"""Checkpoints as a failing disk, or a crash that tore them, leaves them.

Here: ways to damage one in place, and what is left of those that were set aside. Not here: changes
by somebody who makes the checksums fit (``_reseal``).
"""

from __future__ import annotations

import json
from pathlib import Path


def data_file(checkpoint: Path) -> Path:
    """Return the largest file of tensors."""
    return max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)


def flip(file: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def flipped(checkpoint: Path) -> None:
    flip(data_file(checkpoint))


def truncated(checkpoint: Path) -> None:
    file = data_file(checkpoint)
    file.write_bytes(file.read_bytes()[:-1])


def without_a_file(checkpoint: Path) -> None:
    data_file(checkpoint).unlink()


def manifest_flipped(checkpoint: Path) -> None:
    flip(checkpoint / "manifest.json")


def without_marker(checkpoint: Path) -> None:
    (checkpoint / "metadata.json").unlink()


DAMAGES = {
    one.__name__: one
    for one in (flipped, truncated, without_a_file, manifest_flipped, without_marker)
}


def damage(name: str, checkpoint: Path) -> bool:
    """Damage a checkpoint; return whether it then counts as damaged, not as never finished."""
    DAMAGES[name](checkpoint)
    return name != "without_marker"


def aside(folder: Path) -> list[str]:
    """Return what was set aside in a folder, by the names it had."""
    stories = [json.loads(path.read_text()) for path in folder.glob(".*.damaged/damaged.json")]
    assert all(story["reason"] for story in stories)
    assert len(stories) == len(list(folder.glob(".*.damaged")))
    return sorted(story["name"] for story in stories)
