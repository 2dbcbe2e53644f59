"""What is made from the model of the configuration: keyword arguments for type checkers, a table.

Here: their text. Not here: the fields (``dist_ckpt.config.models``). ``make pages`` writes them anew.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from dist_ckpt.config import DistCkptConfig
from dist_ckpt.config.arguments import keyword_parameters

__all__ = ["files", "written"]

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- fields -->\n", "<!-- /fields -->\n"

_FIELDS_HEAD = '''\
"""The fields of the configuration as keyword arguments, for type checkers and editors.

``make pages`` writes this file from ``models``, which has defaults, bounds and checks; do not edit
it. A function takes the fields by ``**fields: Unpack[ConfigFields]``. None is as good as not given.
"""

from __future__ import annotations

from typing import Literal, TypedDict

__all__ = ["ConfigFields"]


class ConfigFields(TypedDict, total=False):
    """The fields of ``DistCkptConfig``, none of them required."""
'''


def files() -> dict[Path, str]:
    """Return the text that each file must have."""
    readme = ROOT / "README.md"
    return {
        ROOT / "core" / "dist_ckpt" / "config" / "fields.py": _typed_dict(),
        readme: _with_table(readme.read_text(encoding="utf-8")),
    }


def _typed_dict() -> str:
    fields = (
        f"\n    {parameter.name}: {_source(parameter.annotation)}\n{_docstring(parameter.name)}\n"
        for parameter in keyword_parameters()
    )
    return _FIELDS_HEAD + "".join(fields)


def _source(annotation: Any) -> str:
    """Return how one writes a type."""
    arguments = get_args(annotation)
    if get_origin(annotation) in (Union, UnionType):
        return " | ".join(_source(argument) for argument in arguments)
    if get_origin(annotation) is Literal:
        return f"Literal[{', '.join(json.dumps(argument) for argument in arguments)}]"
    return "None" if annotation is NoneType else str(annotation.__name__)


def _with_table(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    rows = "".join(
        f"| `{name}` | {_default(field.default)} | {_text(name).replace('``', '`')} |\n"
        for name, field in DistCkptConfig.model_fields.items()
    )
    return f"{before}{BEGIN}| Field | Default | Meaning |\n|---|---|---|\n{rows}{END}{after}"


def _default(value: object) -> str:
    """Return a default as YAML has it."""
    if value is None:
        return "none"
    text = value if isinstance(value, str) else json.dumps(value)
    return f"`{text.removesuffix('.0')}`"


def _text(name: str) -> str:
    description = DistCkptConfig.model_fields[name].description
    assert description, f"{name} has no docstring"
    return " ".join(description.split())


def _docstring(name: str) -> str:
    indent = " " * 4
    return textwrap.fill(
        f'"""{_text(name)}"""', 100, initial_indent=indent, subsequent_indent=indent,
        break_on_hyphens=False,
    )  # fmt: skip


def written() -> list[Path]:
    """Write the files that are out of date, and return them."""
    texts = {path: text for path, text in files().items() if not _is_current(path, text)}
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return list(texts)


def _is_current(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    for changed in written():
        print(changed.relative_to(ROOT))
