"""The documentation is true: its code runs, its configuration loads, its links lead somewhere.

Each fenced block of README.md and docs/ is one of:

* ``python``: run, all blocks of a file in order as one program in an empty directory, with a new
  interpreter (``FRESH``) or in the fork of one that has imported torch; the soak run starts all anew;
* ``yaml`` with fields of ours: loaded by ``dist_ckpt.config``; ``json``: parsed;
* ``bash`` of ``make TARGET`` lines: the targets are in the Makefile;
* ``text``: a picture or a listing, for people;
* anything else, or not to be run: marked on the line before with ``<!-- not run: REASON -->``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from dist_ckpt.config import DistCkptConfig, load_config
from tests._samples import IS_SOAK
from tests.multiprocess._world import run_file

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
TIMEOUT_SECS = 300.0
FRESH = {"README.md", "accelerate.md"}
"""One page of the core, and one of a framework.

Fresh programs that start processes are in tests/unit/test_checkpointer.py, those that train with
Lightning in tests/lightning (``_ctrl_c_job``, ``_preempted_job``).
"""

_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<info>[^`]*)$")
_MARK = re.compile(r"^\s*<!-- not run: \S.* -->$")
_LINK = re.compile(r"\]\((?!https?://|#|mailto:)(?P<target>[^)#\s]+)")
_MAKE = re.compile(r"^make (?P<target>[\w-]+)(\s+#.*)?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block: its kind, the number of the line its code begins on, and its lines."""

    kind: str
    line: int
    lines: tuple[str, ...]
    marked: bool

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


def blocks_of(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a Markdown text, in order."""
    before, opened, found, indent = "", None, list[str](), 0
    for number, line in enumerate(text.splitlines(), start=1):
        fence = _FENCE.match(line)
        if opened is None and fence:
            kind = (fence["info"].split() or [""])[0]
            opened, found, indent = (fence["ticks"], kind, number + 1, before), [], len(fence[1])
        elif opened is not None and fence and line.strip() == opened[0]:
            marked = bool(_MARK.match(opened[3]))
            yield Block(kind=opened[1], line=opened[2], lines=tuple(found), marked=marked)
            opened = None
        elif opened is not None:
            found.append(line[min(indent, len(line) - len(line.lstrip())) :])
        before = line
    assert opened is None, f"the block that begins on line {opened[2]} has no end"


def make_targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def problem_of(block: Block) -> str | None:
    """Return what is wrong with a block that is neither marked nor python."""
    if block.kind == "text":
        return None
    if block.kind == "json":
        json.loads(block.text)
        return None
    if block.kind == "yaml":
        content = yaml.safe_load(block.text)
        if isinstance(content, dict) and {"dist_ckpt", *DistCkptConfig.model_fields} & set(content):
            load_config(content)
            return None
    if block.kind == "bash":
        lines = [line for line in block.lines if line.strip()]
        targets = [found["target"] for line in lines if (found := _MAKE.match(line))]
        if len(targets) == len(lines):
            unknown = sorted(set(targets) - make_targets())
            return f"make has no {unknown}" if unknown else None
    return f"a {block.kind or 'bare'!r} block is not checked: mark it `<!-- not run: REASON -->`"


def program_of(text: str) -> str:
    """Return the python blocks as one program in which every line keeps its number."""
    lines: list[str] = []
    for block in blocks_of(text):
        if block.kind == "python" and not block.marked:
            lines += [""] * (block.line - 1 - len(lines))
            lines += block.lines
    return "\n".join(lines) + "\n" if lines else ""


def by_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=by_name)
def test_every_block_is_checked_or_says_why_not(path: Path) -> None:
    """No block can be silent: it is run, loaded, or marked with a reason."""
    problems = [
        f"{by_name(path)}:{block.line}: {problem}"
        for block in blocks_of(path.read_text())
        if block.kind != "python" and not block.marked and (problem := problem_of(block))
    ]

    assert not problems, "\n".join(problems)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    "path", [path for path in FILES if program_of(path.read_text())], ids=by_name
)
def test_python_blocks_run(path: Path, tmp_path: Path) -> None:
    """What a reader would paste works; lines in a traceback are those of the document."""
    script = tmp_path / f"blocks_of_{path.stem}.py"  # no name of a package
    script.write_text(program_of(path.read_text()))
    directory = tmp_path / "empty"
    directory.mkdir()

    is_fresh = IS_SOAK or path.name in FRESH
    done = run_file(script, cwd=directory, is_fresh=is_fresh, timeout_secs=TIMEOUT_SECS)

    assert done.returncode == 0, f"{by_name(path)}:\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("path", FILES, ids=by_name)
def test_relative_links_lead_to_files(path: Path) -> None:
    """A page that moved takes its links with it."""
    targets = [found["target"] for found in _LINK.finditer(path.read_text())]

    assert [target for target in targets if not (path.parent / target).exists()] == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param("```rust\nfn\n```\n", "'rust' block is not checked", id="unknown-kind"),
        pytest.param("```\nx\n```\n", "'bare' block is not checked", id="no-kind"),
        pytest.param("```yaml\nother: 1\n```\n", "'yaml' block", id="not-our-yaml"),
        pytest.param("```bash\nrm x\n```\n", "'bash' block", id="unknown-command"),
        pytest.param("```bash\nmake nothing\n```\n", "make has no", id="unknown-target"),
    ],
)
def test_a_silent_block_is_found(text: str, problem: str) -> None:
    """The check itself fails where it must, and a reason on the line before silences it."""
    (block,) = blocks_of(text)
    (marked,) = blocks_of(f"<!-- not run: a reason -->\n{text}")
    (without_reason,) = blocks_of(f"<!-- not run: -->\n{text}")

    assert problem in (problem_of(block) or "")
    assert marked.marked
    assert not without_reason.marked


def test_lines_of_a_program_keep_their_numbers() -> None:
    """Several blocks are one program, each on the lines it has in the document."""
    text = "# t\n\n```python\na = 1\n```\n\n<!-- not run: r -->\n```python\nb\n```\n```python\nc\n```\n"

    lines = program_of(text).splitlines()

    assert (lines[3], lines[11], [line for line in lines if line]) == ("a = 1", "c", ["a = 1", "c"])
