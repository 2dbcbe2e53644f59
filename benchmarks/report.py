"""Write what was measured into docs/performance.md: tables between markers, and the plot.

Here: ``python benchmarks/report.py --from DIR``. Not here: how tables look (``harness.tables``),
what they mean (the page itself, between the tables).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.tables import markdown

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
PLOT = ROOT / "docs" / "images" / "performance.png"

_MARKED = re.compile(r"<!-- bench:(?P<name>[\w-]+) -->.*?<!-- /bench:(?P=name) -->", re.DOTALL)


def replaced(page: str, tables: Mapping[str, str]) -> tuple[str, set[str]]:
    """Return a page with new text between its markers, and the names that had markers.

    What has markers and no new text stays as it is.
    """
    found: set[str] = set()

    def new(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in tables:
            return match[0]
        found.add(name)
        return f"<!-- bench:{name} -->\n{tables[name].strip()}\n<!-- /bench:{name} -->"

    return _MARKED.sub(new, page), found


def read_results(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the benchmarks of a directory by name."""
    results = (json.loads(path.read_text()) for path in sorted(directory.glob("*.json")))
    return {result["name"]: result for result in results if "name" in result}


def main(given: Sequence[str] | None = None) -> int:
    """Write the page; return 1 if a table has no place in it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--from", dest="source", type=Path, required=True, help="with JSON files")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--plot", type=Path, default=PLOT)
    asked = parser.parse_args(given)
    results = read_results(asked.source)
    page, found = replaced(
        asked.page.read_text(), {name: markdown(result) for name, result in results.items()}
    )
    asked.page.write_text(page)
    print(f"{asked.page}: {', '.join(sorted(found)) or 'nothing'} renewed")
    if {"save", "load", "many"} & results.keys():
        from harness.plot import draw

        draw(results, asked.plot)
        print(f"{asked.plot}: drawn")
    homeless = sorted(results.keys() - found)
    if homeless:
        print(f"no markers for {', '.join(homeless)}", file=sys.stderr)
    return int(bool(homeless))


if __name__ == "__main__":
    sys.exit(main())
