"""The drawing of rooms and imports shows the present source."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "docs" / "draw_rooms.py"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_rooms", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_drawing_and_page_are_up_to_date() -> None:
    """``make drawing`` writes them again."""
    done = subprocess.run(
        [sys.executable, SCRIPT, "--check"], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr


def test_another_import_needs_a_new_drawing_but_a_few_lines_do_not() -> None:
    """Arrows and rooms are compared exactly, sizes within a fifth."""
    rooms = script()
    drawing = rooms.drawing()
    arrows = [line for line in drawing.splitlines() if "<title>" in line]

    assert any("_saving imports _formats" in arrow for arrow in arrows)
    assert not rooms.is_current(drawing.replace(arrows[0] + "\n", ""), drawing)
    assert rooms.is_current(drawing.replace("16 files, 2,", "15 files, 2,"), drawing)
    assert not rooms.is_current(drawing.replace(" files, 2,", " files, 4,"), drawing)


def test_an_import_that_follows_from_others_has_no_arrow() -> None:
    """A to B and B to C say that A needs C."""
    imports = {("a", "b"), ("b", "c"), ("a", "c"), ("a", "d")}

    assert script().essential(imports) == {("a", "b"), ("b", "c"), ("a", "d")}
