"""What is expected of the zoo: a row for each workload, a case for each API and layout.

Here: declarations, as data; ``table.py`` writes docs/zoo.md from them, ``test_zoo.py`` compares them
with what happens. Not here: the workloads (``_workloads.py``), so that importing this is cheap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

Api = Literal["core", "lightning", "accelerate"]
Layout = Literal["single", "ddp", "fsdp2"]

APIS: tuple[Api, ...] = ("core", "lightning", "accelerate")
LAYOUTS: tuple[Layout, ...] = ("single", "ddp", "fsdp2")

# How much of a row each run of the tests does; all of it is `make soak`.
_QUICK = frozenset(
    {
        ("core", "single"), ("core", "ddp"), ("core", "fsdp2"), ("lightning", "single"),
        ("accelerate", "single"),
    }
)  # fmt: skip
_WHOLE = frozenset((api, layout) for api in APIS for layout in LAYOUTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a case comes to.

    Attributes:
        kind: ``equal``: to stock, bit for bit. ``restored``: stock fails or loses something, and ours
            is equal to a run that was never interrupted. ``refused``: ours says why not.
            ``library``: the library does not train under this layout.
        text: A part of the error: ours if refused, else the library's or stock's.
        why: For the table, where the text does not say it.
        pending: Why it is not so yet; the test fails when it is.
    """

    kind: Literal["equal", "restored", "refused", "library"]
    text: str = ""
    why: str = ""
    pending: str = ""


EQUAL = Expected(kind="equal")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A workload, and what is expected of it under each API and layout.

    Attributes:
        name: Its name; the first word is the library's.
        what: What of its state is out of the ordinary.
        expected: By (api, layout), ``*`` for any; the most specific counts. Others are equal.
        apis: The APIs where it makes sense.
        layouts: The layouts where it makes sense.
        daily: The cases that are not left to ``make soak``.
    """

    name: str
    what: str
    expected: Mapping[tuple[str, str], Expected] = field(default_factory=dict)
    apis: tuple[Api, ...] = APIS
    layouts: tuple[Layout, ...] = LAYOUTS
    daily: frozenset[tuple[str, str]] = _QUICK

    def of(self, api: str, layout: str) -> Expected:
        """Return what is expected of a case."""
        for key in ((api, layout), ("*", layout), (api, "*"), ("*", "*")):
            if key in self.expected:
                return self.expected[key]
        return EQUAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One workload, API and layout."""

    row: Row
    api: str
    layout: str

    @property
    def key(self) -> tuple[str, str, str]:
        """The case, for ranks."""
        return self.row.name, self.api, self.layout

    @property
    def id(self) -> str:
        """The case, for people."""
        return f"{self.row.name}-{self.api}-{self.layout}".replace(" ", "_")

    @property
    def expected(self) -> Expected:
        """What it comes to."""
        return self.row.of(self.api, self.layout)

    @property
    def is_daily(self) -> bool:
        """Whether it is in every run of the tests."""
        return (self.api, self.layout) in self.row.daily


def _library(text: str, why: str = "") -> Expected:
    return Expected(kind="library", text=text, why=why)


def _restored(text: str, why: str = "") -> Expected:
    return Expected(kind="restored", text=text, why=why)


_MIXED = "got mixed torch.Tensor and DTensor"
_MAP_LOCATION = "Callable map_location not supported"

_ORDER = "stock draws another order for the samples that are left"

_TORCHAO_OPTIMIZER = {
    ("lightning", "single"): _restored(_MAP_LOCATION),
    ("lightning", "ddp"): _restored(_MAP_LOCATION),
}

ROWS: tuple[Row, ...] = (
    Row(
        name="torchmetrics",
        what="metrics write their states into `state_dict()` by themselves, one of them a list",
        expected={
            ("lightning", "fsdp2"): _restored("Missing key in checkpoint state_dict"),
            ("accelerate", "fsdp2"): _restored("Missing key in checkpoint state_dict"),
        },
        daily=_WHOLE,
    ),
    Row(
        name="torch.ao QAT",
        what="observers whose buffers are resized by a load",
        expected={
            ("lightning", "fsdp2"): _restored("Size mismatch"),
            ("accelerate", "fsdp2"): _restored("Size mismatch"),
        },
        daily=_WHOLE,
    ),
    Row(
        name="torch.ao dynamic",
        what="packed weights: a dtype and a tuple of a quantised tensor in `state_dict()`",
        expected={
            ("lightning", "fsdp2"): _restored("Unexpected value type"),
            ("accelerate", "fsdp2"): _restored("Unexpected value type"),
        },
    ),
    Row(
        name="torchao int8 weights",
        what="parameters that are made of several tensors",
        expected={
            ("lightning", "single"): _restored(_MAP_LOCATION),
            ("*", "ddp"): _library("unimplemented operator"),
            ("*", "fsdp2"): _library("unimplemented operator"),
        },
    ),
    Row(
        name="torchao AdamW8bit",
        what="optimizer states that are made of several tensors",
        expected=_TORCHAO_OPTIMIZER,
        daily=_WHOLE,
    ),
    Row(name="torchao AdamW4bit", what="the same, in 4 bits", expected=_TORCHAO_OPTIMIZER),
    Row(name="torchao AdamWFp8", what="the same, in 8 bit floats", expected=_TORCHAO_OPTIMIZER),
    Row(
        name="bitsandbytes AdamW8bit",
        what="quantised blocks of the states, with their scales",
        expected={("*", "fsdp2"): _library(_MIXED)},
    ),
    Row(
        name="bitsandbytes Linear8bitLt",
        what="scales that exist as entries of `state_dict()` only",
        expected={
            ("*", "fsdp2"): _library("no attribute 'CB'"),
        },
    ),
    Row(
        name="bitsandbytes Linear4bit",
        what="a layer that loads into one that is not quantised yet, and into no other",
        expected={
            ("*", "*"): Expected(kind="refused", text="Unexpected key(s)", why="as stock"),
            ("core", "fsdp2"): EQUAL,
            ("lightning", "fsdp2"): EQUAL,
            ("accelerate", "fsdp2"): Expected(
                kind="refused", text="which module 'encoder' makes while its parameters are sharded"
            ),
        },
    ),
    Row(name="transformers GPT-2", what="tied embeddings, a generation config"),
    Row(name="peft LoRA", what="adapters on a frozen model with tied embeddings", daily=_WHOLE),
    Row(name="peft DoRA", what="the same with a magnitude vector, and a module trained in full"),
    Row(
        name="schedulefree AdamW",
        what="counters in the groups; parameters that are one of two sequences",
        expected={
            ("lightning", "fsdp2"): _restored(
                "", "stock makes a step to find out what states there are, which counts"
            ),
            ("accelerate", "fsdp2"): _library(
                "KeyError", "Accelerate swaps the parameters of an optimizer"
            ),
        },
    ),
    Row(
        name="pytorch_optimizer Lookahead",
        what="an optimizer around another: its `state_dict()` has keys of its own",
        expected={
            ("*", "fsdp2"): _library("does not have a sharding strategy"),
            ("accelerate", "fsdp2"): _library("same number of tensors"),
        },
        daily=_WHOLE,
    ),
    Row(
        name="pytorch_optimizer SOAP",
        what="lists of matrices for each parameter",
        expected={("*", "fsdp2"): _library(_MIXED)},
    ),
    Row(
        name="pytorch_optimizer Shampoo",
        what="a matrix for each axis",
        expected={("*", "fsdp2"): _library(_MIXED)},
    ),
    Row(
        name="diffusers EMAModel",
        what="a moving average that is no module: shadow parameters in a list",
        expected={
            ("*", "fsdp2"): Expected(
                kind="refused", text="save the module that holds it as a model"
            )
        },
    ),
    Row(
        name="torchdata StatefulDataLoader",
        what="the order of the samples, resumed in the middle of an epoch",
        layouts=("single", "ddp"),
        daily=_WHOLE,
        expected={
            ("accelerate", "*"): _restored("", _ORDER),
        },
    ),
    Row(
        name="Lightning strategy with save and load",
        what="a subclass of DDPStrategy as NeMo has one: each rank holds and saves its own part",
        apis=("lightning",),
        layouts=("ddp",),
        daily=_WHOLE,
        expected={
            ("lightning", "ddp"): Expected(
                kind="refused", text="strategy OwnPartStrategy.load_checkpoint"
            )
        },
    ),
    Row(name="torch AveragedModel", what="a moving average as a second module (`swa_utils`)"),
    Row(name="torch spectral_norm", what="state-dict hooks with a version of their own"),
    Row(name="torch weight_norm", what="a weight that is computed before each forward"),
    Row(name="torch parametrizations", what="the same two, as parametrizations with buffers"),
    Row(name="torch BatchNorm", what="a version, and buffers that count"),
)


def cases() -> Iterator[Case]:
    """Yield all cases, by row."""
    for row in ROWS:
        for api in row.apis:
            for layout in row.layouts:
                yield Case(row=row, api=api, layout=layout)
