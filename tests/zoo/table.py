"""docs/zoo.md, written from the declared cases: ``python -m tests.zoo.table``.

Here: the page. Not here: what happens in the cases (``test_zoo.py`` proves it).
"""

from __future__ import annotations

from pathlib import Path

from tests.zoo._cases import APIS, LAYOUTS, ROWS, Expected, Row

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "zoo.md"

_LIBRARIES = {
    "torch": "torch",
    "torch.ao": "torch",
    "torchmetrics": "torchmetrics",
    "torchao": "torchao",
    "bitsandbytes": "bitsandbytes",
    "transformers": "transformers",
    "peft": "peft",
    "schedulefree": "schedulefree",
    "pytorch_optimizer": "pytorch_optimizer",
    "diffusers": "diffusers",
    "torchdata": "torchdata",
    "Lightning": "lightning",
}

_HEAD = """\
# Tested with other libraries

Each row is a model or an optimizer that a real library builds. It is trained, saved, loaded into a
fresh copy and trained on, once with stock checkpoints and once with ours: the core beside `torch.save`
of `state_dict()`, Lightning beside its own checkpoints, Accelerate beside its own `save_state`; in one
process, under DDP on two ranks and under FSDP2 on two ranks. Compared bit for bit, after the load and
two steps later: all entries of `state_dict()`, their order, the modules' versions, and the state of the
optimizer.

| In the table | |
|---|---|
| equal | ours is equal to stock |
| better | stock fails or loses something; ours is equal to a run that was never interrupted |
| refused | ours raises an error that says why, before anything is lost |
| not yet | a known gap |
| - | the library itself does not train under this layout |

Each cell lists one process, DDP and FSDP2; a single word holds for all three. Numbers refer to the
notes below the table, which quote the errors. `python -m tests.zoo.table` writes this page from the
cases that `make test` and `make soak` run (tests/zoo).

"""

_WORDS = {"equal": "equal", "restored": "better", "refused": "refused", "library": "-"}


class _Notes:
    """Numbered notes, each once."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def number(self, text: str) -> int:
        if text not in self.texts:
            self.texts.append(text)
        return self.texts.index(text) + 1


def _word(expected: Expected, notes: _Notes) -> str:
    if expected.pending:
        return f"not yet [{notes.number(expected.pending)}]"
    told = ": ".join(
        part for part in (expected.why, expected.text and f"`{expected.text}`") if part
    )
    word = _WORDS[expected.kind]
    return f"{word} [{notes.number(told)}]" if told else word


def _cell(row: Row, api: str, notes: _Notes) -> str:
    if api not in row.apis:
        return ""
    words = [_word(row.of(api, layout), notes) for layout in LAYOUTS if layout in row.layouts]
    return words[0] if len(set(words)) == 1 else ", ".join(words)


def _versions() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def page() -> str:
    """Return the page."""
    notes, versions = _Notes(), _versions()
    lines = ["| | What is special | Core | Lightning | Accelerate |", "|---|---|---|---|---|"]
    for row in ROWS:
        cells = [_cell(row, api, notes) for api in APIS]
        lines.append(f"| {row.name} | {row.what} | {' | '.join(cells)} |")
    libraries = sorted(
        {_LIBRARIES[row.name.split()[0]] for row in ROWS} | {"accelerate", "lightning"}
    )
    lines += ["", *(f"{number}. {text}" for number, text in enumerate(notes.texts, start=1)), ""]
    lines.append("With " + ", ".join(f"{name} {versions[name]}" for name in libraries) + ".")
    return _HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
