"""Files are touched in ``storage`` only: every other room asks it.

By name, as a reader would: calls of ``os`` that take a path or sync a file, ``shutil`` and the like,
``open``, and the methods of ``Path`` that look at the disk. What needs a descriptor is not looked
for, as nobody has one without opening a file.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

CORE = Path(__file__).parents[2] / "core" / "dist_ckpt"
OPEN_ROOMS = ("storage", "testing")
"""The door itself, and the kit that damages, traces and counts files on purpose."""

EXCEPTIONS = {
    "_formats/zarr/arrays.py": "TensorStore reads what is no plain array through a store of its own",
    "_process/available.py": "/proc and the limits of control groups: how much memory is left",
    "_staging_pool/host_memory.py": "shared memory that has no name, or a file that has none",
    "_worker/worker.py": "/proc: the umask of this process",
    "config/load.py": "the user's YAML",
    "events.py": "the user's file of events",
}
"""Modules that touch what is no checkpoint's file, and why. This list only becomes shorter."""

MODULES = {"shutil", "glob", "tempfile", "fileinput", "tensorstore"}
OS = {
    "access", "chmod", "chown", "copy_file_range", "fdatasync", "fsync", "fwalk", "lchown", "link", "listdir", "lstat",
    "makedirs", "mkdir", "mkfifo", "mknod", "open", "readlink", "remove", "removedirs", "rename", "renames", "replace",
    "rmdir", "scandir", "sendfile", "stat", "statvfs", "symlink", "sync", "truncate", "unlink", "utime", "walk",
}  # fmt: skip
OS_PATH = {
    "exists", "getatime", "getctime", "getmtime", "getsize", "isdir", "isfile", "islink", "ismount", "lexists", "realpath",
    "samefile",
}  # fmt: skip
METHODS = {
    "chmod", "exists", "glob", "group", "hardlink_to", "is_block_device", "is_char_device", "is_dir", "is_fifo", "is_file",
    "is_mount", "is_socket", "is_symlink", "iterdir", "lchmod", "link_to", "lstat", "mkdir", "owner", "read_bytes",
    "read_text", "readlink", "rename", "resolve", "rglob", "rmdir", "samefile", "stat", "symlink_to", "touch", "unlink",
    "walk", "write_bytes", "write_text",
}  # fmt: skip


def touches(source: str) -> Iterator[tuple[int, str]]:
    """Yield what may touch a file, with its line."""
    tree = ast.parse(source)
    names = dict(aliases(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for module in imported(node):
                if module.partition(".")[0] in MODULES or is_banned(module):
                    yield node.lineno, f"import {module}"
        elif isinstance(node, ast.Attribute):
            dotted = dotted_name(node, names)
            if dotted is not None and is_banned(dotted):
                yield node.lineno, dotted
        elif isinstance(node, ast.Call) and is_touching_call(node, names):
            yield node.lineno, ast.unparse(node.func)


def aliases(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                whole = name.name.partition(".")[0]
                yield (name.asname, name.name) if name.asname else (whole, whole)
        elif isinstance(node, ast.ImportFrom):
            for name in node.names:
                yield name.asname or name.name, f"{node.module}.{name.name}"


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [name.name for name in node.names]
    return [f"{node.module}.{name.name}" for name in node.names]


def dotted_name(node: ast.expr, names: dict[str, str]) -> str | None:
    """Return a name as it is imported; None for an attribute of a value."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        base = dotted_name(node.value, names)
        return None if base is None else f"{base}.{node.attr}"
    return None


def is_banned(dotted: str) -> bool:
    room, _, name = dotted.rpartition(".")
    banned = {"os": OS, "os.path": OS_PATH, "pathlib.Path": METHODS | {"open"}, "io": {"open"}}
    return name in banned.get(room, ())


def is_touching_call(node: ast.Call, names: dict[str, str]) -> bool:
    if isinstance(node.func, ast.Name):
        return node.func.id == "open" and "open" not in names
    if not isinstance(node.func, ast.Attribute) or dotted_name(node.func, names) is not None:
        return False  # a function of a module, or of a class that was imported
    if node.func.attr == "open":
        return opens_a_file(node)
    # `str.replace` takes two, `Path.replace` one.
    is_replace = node.func.attr == "replace" and len(node.args) == 1
    return is_replace or node.func.attr in METHODS


def opens_a_file(node: ast.Call) -> bool:
    """Whether a method called ``open`` is ``Path``'s: it takes nothing, or a mode."""
    values = [*node.args[:1], *(one.value for one in node.keywords if one.arg == "mode")]
    modes = [one.value for one in values if isinstance(one, ast.Constant)]
    return (not node.args and not node.keywords) or any(isinstance(one, str) for one in modes)


def touching_modules() -> dict[str, list[tuple[int, str]]]:
    found = {}
    for path in sorted(CORE.rglob("*.py")):
        name = path.relative_to(CORE).as_posix()
        if name.partition("/")[0] not in OPEN_ROOMS and (
            seen := list(touches(path.read_text("utf-8")))
        ):
            found[name] = seen
    return found


def test_files_are_touched_behind_the_door_only() -> None:
    """Another kind of store is one more file in ``storage``, as long as this holds."""
    found = touching_modules()

    assert {name: seen for name, seen in found.items() if name not in EXCEPTIONS} == {}
    assert EXCEPTIONS.keys() - found.keys() == set(), "no exception any more: take it off the list"


@pytest.mark.parametrize(
    "source",
    [
        "import shutil",
        "from shutil import rmtree",
        "import tensorstore as ts",
        "import os\nos.mkdir('x')",
        "import os as system\nsystem.fsync(1)",
        "from os import path\npath.lexists('x')",
        "from os import scandir",
        "import os\nwrite = os.path.realpath",
        "open('x')",
        "import io\nio.open('x')",
        "path.open('rb')",
        "path.open(mode='wb')",
        "path.open()",
        "(a / b).replace(c)",
        "path.parent.mkdir(parents=True)",
        "Path(x).is_symlink()",
        "from pathlib import Path\nlook = Path.exists",
        "sorted(directory.rglob('*'))",
    ],
)
def test_what_is_seen(source: str) -> None:
    """Each way to a file that was there once, and some that were not."""
    assert list(touches(source))


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.path.abspath('x'), os.fspath(y), os.environ, os.getpid()",
        "'a'.replace('b', 'c')",
        "from dataclasses import replace\nreplace(x, y=1)",
        "from dist_ckpt.storage.paths import exists\nexists(path)",
        "View.open(path, options=options)",
        "arrays.open(path, document, key=key)",
        "from x import View\nView.open()",
    ],
)
def test_what_is_let_through(source: str) -> None:
    """Paths as text, and methods of others that bear the same names."""
    assert not list(touches(textwrap.dedent(source)))
