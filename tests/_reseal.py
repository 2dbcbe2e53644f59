"""Checkpoints changed by somebody who knows how checksums are made: what then remains to refuse.

Here: documents changed and sealed again. Not here: damage, which leaves the checksums as they are.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dist_ckpt.storage.checksums import sum_of_file
from dist_ckpt.storage.sealed import sealed
from tests._forge import Index, forged, parsed

Change = Callable[[dict[str, Any]], object]


def read_sealed(path: Path) -> dict[str, Any]:
    """Return a sealed document without its seal, unchecked."""
    document: dict[str, Any] = json.loads(path.read_bytes())
    document.pop("xxh3_64", None)
    return document


def edit_manifest(directory: Path, change: Change) -> None:
    """Change the manifest and seal it again."""
    path = directory / "manifest.json"
    document = read_sealed(path)
    change(document)
    path.write_bytes(sealed(document))


def reseal(directory: Path) -> None:
    """Let the manifest say of each of its files that is there what the file is now."""

    def update(document: dict[str, Any]) -> None:
        for name in document["files"]:
            if (directory / name).is_file():
                found = sum_of_file(directory / name)
                blocks = base64.b64encode(found.blocks).decode()
                document["files"][name] = {"nbytes": found.nbytes, "blocks": blocks}

    edit_manifest(directory, update)


def edit_index(directory: Path, change: Callable[[Index], object]) -> None:
    """Change ``index.bin``, seal it again, and tell the manifest."""
    path = directory / "index.bin"
    index = parsed(path.read_bytes())
    change(index)
    path.write_bytes(forged(index))
    reseal(directory)
