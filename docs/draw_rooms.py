"""Draws the rooms of the core and the imports between them: ``rooms.md``, ``images/rooms.svg``.

A room is a module or package directly below ``core/dist_ckpt``. Its floor is the layer that
``[tool.importlinter]`` in ``pyproject.toml`` gives it; its imports are read from the source, those
under ``TYPE_CHECKING`` left out, as import-linter does. Run with ``--check`` to only compare: then
sizes may differ by a few percent, so that not every edit needs a new drawing.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "core" / "dist_ckpt"
DRAWING, PAGE = ROOT / "docs" / "images" / "rooms.svg", ROOT / "docs" / "rooms.md"
BEGIN, END = "<!-- written by draw_rooms.py -->\n", "<!-- end -->\n"

TOLERANCE = 0.2  # of a size, before the drawing counts as out of date
SIZE = re.compile(r"\b(\d+(?:,\d{3})*)(?= (?:lines|files|rooms))")

WIDTH, BOX, BOX_HEIGHT, FLOOR_HEIGHT, TOP, LEFT = 1340, 118, 44, 96, 40, 150
STYLE = """
text { font: 11px sans-serif; fill: #222 }
.name { font-weight: bold } .small { font-size: 9px; fill: #555 } .floor { fill: #888 }
.public { fill: #e8f1fb; stroke: #4a7ebb } .private { fill: #fdf3e1; stroke: #c08a2d }
.arrow { fill: none; stroke: #555; stroke-opacity: .45 } .line { stroke: #ddd }
.arrow:hover { stroke: #c00; stroke-opacity: 1 }
"""


@dataclass(frozen=True, slots=True)
class Room:
    """A module or package: its name, its place in the drawing, its size, and who imports it."""

    name: str
    floor: int
    x: float
    num_files: int
    num_lines: int
    imported_by: int

    @property
    def y(self) -> float:
        """The upper edge of its box."""
        return TOP + self.floor * FLOOR_HEIGHT


def floors() -> list[list[str]]:
    """Return the rooms of each floor, the highest first, as the contract names them."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = config["tool"]["importlinter"]["contracts"]
    (layers,) = (one["layers"] for one in contracts if one.get("containers") == ["dist_ckpt"])
    return [re.findall(r"[\w.]+", layer) for layer in layers]


def files_of(room: str) -> list[Path]:
    """Return the source files of a room."""
    package = CORE / room
    return sorted(package.rglob("*.py")) if package.is_dir() else [CORE / f"{room}.py"]


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names that a module imports, at its top level or inside of functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for other in node.orelse:
                yield from imported_names(other)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from imported_names(node)


def imports_between(rooms: Sequence[str]) -> set[tuple[str, str]]:
    """Return the pairs of rooms of which the first imports the second."""
    found = set()
    for room in rooms:
        for file in files_of(room):
            for name in imported_names(ast.parse(file.read_text())):
                package, _, rest = name.partition(".")
                other = rest.partition(".")[0]
                if package == "dist_ckpt" and other in rooms and other != room:
                    found.add((room, other))
    return found


def essential(imports: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the imports that do not follow from others: without A to C if A to B to C is there.

    All 230 arrows would hide each other; the table in ``rooms.md`` has them all.
    """
    below: dict[str, set[str]] = {}

    def reachable(room: str) -> set[str]:
        if room not in below:
            direct = {b for a, b in imports if a == room}
            below[room] = direct.union(*(reachable(other) for other in direct))
        return below[room]

    return {
        (a, b)
        for a, b in imports
        if not any(b in reachable(other) for one, other in imports if one == a and other != b)
    }


def placed(names: list[list[str]], imports: set[tuple[str, str]]) -> dict[str, Room]:
    """Return the rooms with their places: each floor ordered so that arrows are short."""
    drawn = essential(imports)
    importers = Counter(imported for _, imported in imports)
    center: dict[str, float] = {}
    rooms: dict[str, Room] = {}
    for floor, row in enumerate(names):

        def wanted(room: str) -> tuple[float, str]:
            above = [center[a] for a, b in drawn if b == room and a in center]
            return (sum(above) / len(above) if above else WIDTH / 2, room)

        step = (WIDTH - LEFT) / len(row)
        for place, room in enumerate(sorted(row, key=wanted)):
            center[room] = LEFT + step * (place + 0.5)
            files = files_of(room)
            lines = sum(len(file.read_text().splitlines()) for file in files)
            x = center[room] - BOX / 2
            rooms[room] = Room(room, floor, x, len(files), lines, importers[room])
    return rooms


def arrow(start: Room, end: Room) -> str:
    """Return the arrow for the imports of ``end`` by ``start``."""
    x1, x2 = start.x + BOX / 2, end.x + BOX / 2
    title = f"<title>{start.name} imports {end.name}</title>"
    if start.floor == end.floor:  # an arc below the floor
        y = start.y + BOX_HEIGHT
        path = f"M{x1:.0f},{y} C{x1:.0f},{y + 34} {x2:.0f},{y + 34} {x2:.0f},{y + 3}"
    else:
        y1, y2 = start.y + BOX_HEIGHT, end.y
        bend = (y2 - y1) / 2
        path = (
            f"M{x1:.0f},{y1} C{x1:.0f},{y1 + bend:.0f} {x2:.0f},{y2 - bend:.0f} {x2:.0f},{y2 - 3}"
        )
    return f'<path class="arrow" marker-end="url(#head)" d="{path}">{title}</path>'


def box(room: Room) -> str:
    """Return the box of a room."""
    kind = "private" if room.name.startswith("_") else "public"
    files = f"{room.num_files} files, " if room.num_files > 1 else ""
    size = f"{files}{room.num_lines:,} lines"
    mark = f"imported by {room.imported_by}" if room.imported_by else ""
    middle = room.x + BOX / 2
    # Long names of the public modules are made to fit.
    fit = f' textLength="{BOX - 8}" lengthAdjust="spacingAndGlyphs"' if len(room.name) > 17 else ""  # noqa: PLR2004 - letters in a box
    return (
        f'<rect class="{kind}" x="{room.x:.0f}" y="{room.y}" width="{BOX}" '
        f'height="{BOX_HEIGHT}" rx="4"/>'
        f'<text class="name" x="{middle:.0f}" y="{room.y + 14}" text-anchor="middle"{fit}>'
        f"{escape(room.name)}</text>"
        f'<text class="small" x="{middle:.0f}" y="{room.y + 27}" text-anchor="middle">{size}</text>'
        f'<text class="small" x="{middle:.0f}" y="{room.y + 39}" text-anchor="middle">{mark}</text>'
    )


def drawing() -> str:
    """Return the drawing as SVG."""
    names = floors()
    imports = imports_between([room for floor in names for room in floor])
    rooms = placed(names, imports)
    arrows = [arrow(rooms[a], rooms[b]) for a, b in sorted(essential(imports))]
    lines = []
    for floor, row in enumerate(names):
        y = TOP + floor * FLOOR_HEIGHT + BOX_HEIGHT / 2
        total = sum(rooms[room].num_lines for room in row)
        lines.append(f'<line class="line" x1="0" x2="{WIDTH}" y1="{y}" y2="{y}"/>')
        lines.append(
            f'<text class="floor" x="6" y="{y - 6}">'
            f"floor {len(names) - floor}: {total:,} lines</text>"
        )
    height = TOP + len(names) * FLOOR_HEIGHT
    files, total = (
        sum(r.num_files for r in rooms.values()),
        sum(r.num_lines for r in rooms.values()),
    )
    head = (
        '<marker id="head" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="7" markerHeight="7" '
        'markerUnits="userSpaceOnUse" orient="auto"><path d="M0,0 6,3 0,6z" fill="#555"/></marker>'
    )
    title = (
        f"dist_ckpt: {len(rooms)} rooms, {files} files, {total:,} lines. An arrow is an import; "
        "one that follows from others is left out. Blue: public, yellow: private."
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">',
            f"<style>{STYLE}</style><defs>{head}</defs>",
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
            f'<text x="6" y="18">{title}</text>',
            *lines,
            *arrows,
            *(box(room) for room in rooms.values()),
            "</svg>\n",
        ]
    )


def table() -> str:
    """Return the rooms and all their imports as a Markdown table."""
    names = floors()
    imports = imports_between([room for floor in names for room in floor])
    rows = ["| Floor | Room | What it holds | Imports |", "|---|---|---|---|"]
    for floor, row in zip(range(len(names), 0, -1), names, strict=True):
        for room in sorted(row):
            first = next(file for file in files_of(room) if file.stem in ("__init__", room))
            summary = (ast.get_docstring(ast.parse(first.read_text())) or "").partition("\n")[0]
            others = ", ".join(f"`{b}`" for a, b in sorted(imports) if a == room)
            rows.append(f"| {floor} | `{room}` | {summary} | {others} |")
    return "\n".join(rows) + "\n"


def page(text: str) -> str:
    """Return the page with the present table."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


def is_current(old: str, new: str) -> bool:
    """Whether an old drawing will do: equal to the new one but for small changes of size."""
    sizes = [[int(number.replace(",", "")) for number in SIZE.findall(text)] for text in (old, new)]
    return SIZE.sub("0", old) == SIZE.sub("0", new) and all(
        abs(a - b) <= max(TOLERANCE * b, 20) for a, b in zip(*sizes, strict=True)
    )


def main() -> int:
    """Write drawing and page, or say whether they are out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if they are out of date")
    svg, old = drawing(), PAGE.read_text()
    text = page(old)
    if not parser.parse_args().check:
        DRAWING.write_text(svg)
        PAGE.write_text(text)
        return 0
    if DRAWING.exists() and is_current(DRAWING.read_text(), svg) and old == text:
        return 0
    print("docs/rooms.md or its drawing is out of date: run `make drawing`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
