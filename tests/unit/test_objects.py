"""Documents of values: bounds, what is told of pickles, and users' types through a whole save."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from dist_ckpt import (
    ConfigError,
    CorruptedCheckpointError,
    ShardedObject,
    UnsafeContentError,
    load,
    load_common_state_dict,
    save,
)
from dist_ckpt._formats.objects import COMMON_KEY, PickleReport, decode_document, encode_alone
from dist_ckpt.types import ValueTypes, register_value_type


class Schedule:
    """A class of the user."""

    def __init__(self, steps: list[int], weight: torch.Tensor) -> None:
        self.steps, self.weight = steps, weight


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> ValueTypes:
    """Types of this test alone."""
    fresh = ValueTypes()
    for module in ("dist_ckpt.types", "dist_ckpt._codec.encoder", "dist_ckpt._codec.decoder"):
        monkeypatch.setattr(f"{module}.value_types", fresh)
    return fresh


def fetched(keys: Sequence[str]) -> list[torch.Tensor]:
    return [torch.zeros(1) for _ in keys]


def document(**changes: object) -> bytes:
    return json.dumps({"version": 1, "tensors": 0, "document": {}, **changes}).encode()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (document(tensors=1 << 23), "tensors 8388608"),
        (document(tensors=True), "tensors True"),
        (document(version=True), "version True"),
        (document(version=1.0), "version 1.0"),
        (document(document=[1]), "expected a dict"),
        (b'{"version":1,"tensors":0}', "document"),
        (b'{"version":1,"tensors":0,"document":{"a":1,"a":2}}', "'a' stands there twice"),
        (b'{"version":1,"tensors":0,"document":NaN}', "NaN is no number"),
        (b'{"version":1,"tensors":0,"document":1e999}', "too large a number"),
        (b"\xff\xfe", "not a document"),
    ],
)
def test_documents_are_bounded(data: bytes, says: str) -> None:
    """A number alone takes no memory, and nothing is left to the parser's taste."""
    with pytest.raises(CorruptedCheckpointError, match=says):
        decode_document(data, key=COMMON_KEY, where="f", allow_pickle=False, fetch=fetched)


def test_every_tensor_that_is_told_of_is_fetched() -> None:
    """As many as there can be references."""
    data, tensors = encode_alone({"a": [torch.zeros(1)] * 2, "b": torch.ones(1)}, "k")

    value = decode_document(data, key="k", where="f", allow_pickle=False, fetch=lambda _: tensors)

    assert len(tensors) == 2
    assert torch.equal(value["b"], torch.ones(1))


def test_pickles_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """At the save that first makes one, with its place and class; not at every save."""
    report = PickleReport()
    first = {"a": {"$pickle": {"type": "m.C", "data": ""}}}
    second = {"b": [{"$pickle": {"type": "m.D", "data": ""}}], **first}
    with caplog.at_level(logging.WARNING):
        for found in (first, first, second, second):
            report.tell("key", found)

    assert [record.getMessage().count("(m.") for record in caplog.records] == [1, 1]
    assert "a (m.C), all below 'key'" in caplog.records[0].getMessage()
    assert "b[0] (m.D)" in caplog.records[1].getMessage()
    assert "register_value_type" in caplog.text


def test_registered_values_through_a_checkpoint(
    tmp_path: Path, own: ValueTypes, caplog: pytest.LogCaptureFixture
) -> None:
    """In the common part and in sharded objects, with tensors, and nothing is pickled."""
    register_value_type(
        Schedule,
        tag="tests.Schedule",
        dump=lambda s: {"steps": s.steps, "weight": s.weight},
        load=lambda d: Schedule(d["steps"], d["weight"]),
    )
    value = Schedule([1, 2], torch.arange(3))
    save({"s": value, "o": ShardedObject("o", [value], (1,), (0,))}, tmp_path / "c")

    found = load({"o": ShardedObject("o", None, (1,), (0,))}, tmp_path / "c")

    for one in (found["s"], found["o"][0]):
        assert type(one) is Schedule
        assert (one.steps, one.weight.tolist()) == ([1, 2], [0, 1, 2])
    assert "pickled" not in caplog.text
    with pytest.raises(ConfigError, match="registered as"):
        register_value_type(Schedule, tag="again", dump=repr, load=lambda _: value)
    assert own.of_tag("tests.Schedule") is not None


def test_a_type_that_only_the_saver_knew(tmp_path: Path, own: ValueTypes) -> None:
    """The error says which tag, where, and what to do; pickle does not come into it."""
    register_value_type(Schedule, tag="tests.Schedule", dump=lambda s: s.steps, load=lambda _: None)  # type: ignore[arg-type,return-value]
    save({"deep": {"s": [Schedule([1], torch.zeros(1))]}}, tmp_path / "c")
    own.__init__()  # type: ignore[misc]  # as another process begins

    with pytest.raises(
        ConfigError, match=r"deep\.s\[0\]: .*'tests\.Schedule'.*register_value_type"
    ):
        load_common_state_dict(tmp_path / "c")


def test_what_is_pickled_is_refused_by_key_and_class(tmp_path: Path) -> None:
    """In both parts, with what would allow it."""
    value = Schedule([1], torch.zeros(1))
    save({"s": {"x": value}, "o": ShardedObject("o", value, (1,), (0,))}, tmp_path / "c")

    with pytest.raises(
        UnsafeContentError, match=r"common\.json.*s\.x \(.*Schedule\).*allow_pickle=True"
    ):
        load_common_state_dict(tmp_path / "c")
    with pytest.raises(UnsafeContentError, match=r"Schedule.*allow_pickle=True"):
        load({"o": ShardedObject("o", None, (1,), (0,))}, tmp_path / "c")
