"""Typed JSON: what is kept, what is refused, and how damage is told."""

from __future__ import annotations

import collections
import datetime as dt
import enum
import io
import json
import pickle
import random
import zoneinfo
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from dist_ckpt._codec import MAX_DEPTH, Encoded, decode, encode, iter_pickled
from dist_ckpt.errors import (
    CheckpointingException,
    CorruptedCheckpointError,
    InvalidShardingError,
    UnsafeContentError,
)
from dist_ckpt.types import ForeignValue


class Colour(str, enum.Enum):
    """A class the table does not list."""

    RED = "red"


class Point(NamedTuple):
    """A tuple with a type of its own."""

    x: int


class Explodes:
    """Cannot be pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        raise KeyError("boom")


class Subclassed(torch.Tensor):
    """A tensor class of somebody else."""


def round_trip(value: Any, **options: Any) -> Any:
    encoded = encode(value)
    return decode(json.loads(json.dumps(encoded.document)), encoded.tensors, **options)


def test_plain_values_stay_readable() -> None:
    """What JSON can say is said in JSON, in the order of the dict."""
    value = {"z": [1, 2.5, None, True, "é"], "a": {"b": {}}}

    assert encode(value) == Encoded(value, ())
    assert list(encode(value).document) == ["z", "a"]


def test_dollar_keys_are_escaped() -> None:
    """No user's key is taken for a tag."""
    value = {"$tensor": 0, "$$x": {"$pickle": "y"}, "$": 1, "price$": 2}

    assert encode(value).document == {
        "$$tensor": 0, "$$$x": {"$$pickle": "y"}, "$$": 1, "price$": 2
    }  # fmt: skip
    assert round_trip(value) == value


def test_int_keys_keep_type_and_order() -> None:
    """Keys of JSON are strings; ours need not be."""
    value = {2: "b", "1": "a", 1: "c", (0, None): "d"}

    back = round_trip(value)

    assert list(back.items()) == list(value.items())


def test_generator_states() -> None:
    """The states of both usual generators go without pickle and set back."""
    state = {"python": random.getstate(), "numpy": np.random.RandomState(3).get_state()}

    back = round_trip(state)

    assert back["python"] == state["python"]
    random.setstate(back["python"])
    np.random.RandomState().set_state(back["numpy"])


@pytest.mark.parametrize("nbytes", [0, 3, 5000], ids=["empty", "inline", "beside"])
def test_buffers(nbytes: int) -> None:
    """Modules leave their extra state in an ``io.BytesIO``: bytes and position are kept."""
    value = io.BytesIO(bytes(i % 251 for i in range(nbytes)))
    value.seek(2)

    encoded = encode(value)
    back = decode(json.loads(json.dumps(encoded.document)), encoded.tensors)

    assert type(back) is io.BytesIO
    assert (back.getvalue(), back.tell()) == (value.getvalue(), 2)
    assert list(iter_pickled(encoded.document)) == []
    assert len(encoded.tensors) == (nbytes > 4096)


def test_a_shared_tensor_is_stored_once() -> None:
    """Tensors are told apart by identity; temporary ones never lend their number to another."""
    shared = torch.arange(4)
    arrays = [np.full(1000, float(i)) for i in range(20)]

    encoded = encode([shared, {"again": shared}, *arrays])
    back = decode(encoded.document, encoded.tensors)

    assert len(encoded.tensors) == 21
    assert back[0] is back[1]["again"]
    assert [array[0] for array in back[2:]] == list(range(20))


def test_a_parameter_stays_one() -> None:
    """Trainable or frozen; what is stored is detached."""
    value = [
        torch.nn.Parameter(torch.ones(2)),
        torch.nn.Parameter(torch.ones(1), requires_grad=False),
    ]

    encoded = encode(value)
    back = decode(encoded.document, encoded.tensors)

    assert [type(p) for p in back] == [torch.nn.Parameter] * 2
    assert [p.requires_grad for p in back] == [True, False]
    assert not any(t.requires_grad for t in encoded.tensors)


def test_tensors_are_stored_as_they_look() -> None:
    """Lazy conjugation is resolved; a tensor with a graph is detached; memory is shared."""
    source = torch.ones(2, requires_grad=True)

    encoded = encode([torch.tensor([1j]).conj(), source * 2, source])

    assert encoded.tensors[0].is_conj() is False
    assert encoded.tensors[0].item() == -1j
    assert encoded.tensors[1].requires_grad is False
    assert encoded.tensors[2].data_ptr() == source.data_ptr()


@pytest.mark.parametrize(
    "value",
    [
        Colour.RED,
        Point(1),
        {"a": Point(2)},
        np.array([None, 3]),
        np.str_("x"),
        dt.datetime(2024, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")),
        dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=1), "home")),
        collections.defaultdict(Path, {1: Path()}),
        pickle.PickleError,
        torch.eye(2).to_sparse(),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_other_classes_are_pickled_and_refused(value: Any) -> None:
    """Nothing is guessed: what is not in the table needs the trust of the reader."""
    encoded = encode(value)

    with pytest.raises(UnsafeContentError, match="allow_pickle=True"):
        decode(encoded.document, encoded.tensors)

    back = decode(encoded.document, encoded.tensors, allow_pickle=True)
    assert type(back) is type(value)
    assert repr(back) == repr(value)


def test_all_pickled_values_are_named_at_once() -> None:
    """Path and class of each, in lists, tuples, keys and values of odd dicts."""
    value = {
        "a": [0, Colour.RED],
        "b c": (Point(1),),
        "d": {3: Point(2), Point(3): 4},
        "e": collections.defaultdict(list, {"f": [Point(5)]}),
        "$g": collections.OrderedDict(h=Colour.RED),
        "i": collections.defaultdict(None, {(1, 2): Point(6)}),
    }
    document = encode(value).document

    found = dict(iter_pickled(document))

    assert list(found) == [
        "a[1]", "['b c'][0]", "d[3]", "d[1]", "e.f[0]", "['$g'].h", "i[0]"
    ]  # fmt: skip
    assert found["a[1]"].endswith("Colour")
    with pytest.raises(UnsafeContentError) as caught:
        decode(document, (), where="common.json")
    assert str(caught.value).startswith("common.json: 7 value(s) are pickled")
    assert all(path in str(caught.value) for path in found)


def test_the_payload_is_not_unpickled_when_refused(tmp_path: Path) -> None:
    """The refusal comes before the code would run; a tag inside a tag does not slip through."""

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    tag = {"$pickle": {"type": "x", "data": encode(Evil()).document["$pickle"]["data"]}}
    for document in (tag, {"$tuple": [tag]}, {"$dict": [[tag, tag]]}, {"$counter": [tag]}):
        with pytest.raises(UnsafeContentError):
            decode(document, ())

    assert not (tmp_path / "ran").exists()


def test_a_class_that_is_gone() -> None:
    """With trust but without the module: the path, and what to do."""
    document = {"a": {"$pickle": {"type": "gone.Class", "data": "Y2dvbmUKQ2xhc3MKLg=="}}}

    with pytest.raises(CheckpointingException, match=r"f: a: cannot unpickle a gone\.Class.*hint:"):
        decode(document, (), allow_pickle=True, where="f")


def test_everything_that_cannot_be_stored_is_named() -> None:
    """One error with all places."""
    loop: list[Any] = []
    loop.append({"again": loop})
    value = {
        "loop": loop,
        "generator": (i for i in range(3)),
        "explodes": [Explodes()],
        "meta": torch.empty(2, device="meta"),
        "subclass": torch.ones(1).as_subclass(Subclassed),
    }

    with pytest.raises(InvalidShardingError) as caught:
        encode(value, path="common")

    message = str(caught.value)
    assert message.startswith("cannot store 5 value(s): common.loop[0].again: contains itself;")
    assert "common.generator: builtins.generator cannot be pickled" in message
    assert "common.explodes[0]: " in message
    assert "boom" in message
    assert "common.meta: is a tensor on the meta device" in message
    assert "common.subclass: is a Subclassed: describe it as a ShardedTensor" in message


def test_the_same_container_twice_is_no_cycle() -> None:
    """Only a container inside of itself is refused."""
    inner = [1]

    assert round_trip({"a": inner, "b": inner, "c": (inner, inner)}) == {
        "a": [1], "b": [1], "c": ([1], [1])
    }  # fmt: skip


def nest(wrap: Any, levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = wrap(value)
    return value


@pytest.mark.parametrize(
    ("wrap", "levels"),
    [(lambda v: [v], 1), (lambda v: {"a": v}, 1), (lambda v: {1: v}, 1), (lambda v: (v,), 2)],
    ids=["list", "dict", "pairs", "tuple"],
)
def test_depth_is_bounded_alike_in_both_directions(wrap: Any, levels: int) -> None:
    """The deepest value that is written can be read; one more is refused by name."""
    deepest = MAX_DEPTH // levels

    assert round_trip(nest(wrap, deepest)) == nest(wrap, deepest)
    with pytest.raises(InvalidShardingError, match=f"nested deeper than {MAX_DEPTH} levels"):
        encode(nest(wrap, deepest + 1))


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: {"$tuple": v}], ids=["lists", "tags"])
def test_deep_documents_are_refused(wrap: Any) -> None:
    """A document made to overflow the stack is only corrupted."""
    for allow_pickle in (False, True):
        with pytest.raises(CorruptedCheckpointError, match="nested deeper"):
            decode(nest(wrap, 5000), (), allow_pickle=allow_pickle)


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A document and what must be said of it."""

    id: str
    document: Any
    says: str


DAMAGES = (
    Damage(id="unknown-tag", document={"$future": 1}, says="unknown tag '$future'"),
    Damage(id="two-tags", document={"$tuple": [], "$set": []}, says="stands beside other keys"),
    Damage(id="tag-and-key", document={"$tuple": [], "a": 1}, says="stands beside other keys"),
    Damage(id="tensor-too-high", document={"$tensor": 1}, says="no tensor 1 among 1"),
    Damage(id="tensor-negative", document={"$tensor": -1}, says="no tensor -1"),
    Damage(id="tensor-bool", document={"$tensor": True}, says="no tensor True"),
    Damage(id="payload-type", document={"$tuple": "ab"}, says="expected list, found str"),
    Damage(id="base64", document={"$bytes": "?"}, says="malformed '$bytes'"),
    Damage(id="unhashable-key", document={"$dict": [[[1], 2]]}, says="malformed '$dict'"),
    Damage(id="key-twice", document={"$dict": [[1, 2], [1, 3]]}, says="key 1 stands there twice"),
    Damage(id="no-pair", document={"$dict": [[1]]}, says="malformed '$dict'"),
    Damage(id="two-no-pairs", document={"$dict": [None, None]}, says="malformed '$dict'"),
    Damage(id="no-factory", document={"$defaultdict": []}, says="malformed '$defaultdict'"),
    Damage(id="pairs-no-list", document={"$counter": 5}, says="expected a list of pairs"),
    Damage(id="factory", document={"$defaultdict": ["eval", []]}, says="malformed '$defaultdict'"),
    Damage(id="dtype", document={"$dtype": "load"}, says="torch.load is no dtype"),
    Damage(id="device", document={"$device": "fridge"}, says="malformed '$device'"),
    Damage(id="object-array", document={"$ndarray": ["|O", [1], {"$bytes": "AAAAAAAAAAA="}]},
           says="no plain array"),
    Damage(id="array-size", document={"$ndarray": ["<f4", [2], {"$bytes": "AAAAAA=="}]},
           says="malformed '$ndarray'"),
    Damage(id="array-shape", document={"$ndarray": ["<f4", [-1], {"$bytes": "AAAAAA=="}]},
           says="no plain array"),
    Damage(id="array-tensor", document={"$ndarray": ["<f4", [2], {"$tensor": 0}]},
           says="no row of bytes"),
    Damage(id="buffer", document={"$bytes_io": ["a", 0]}, says="no bytes"),
    Damage(id="buffer-tensor", document={"$bytes_io": [{"$tensor": 0}, 0]}, says="no row of bytes"),
    Damage(id="buffer-place", document={"$bytes_io": [{"$bytes": ""}, -1]},
           says="malformed '$bytes_io'"),
    Damage(id="fraction", document={"$fraction": [1, 0]}, says="malformed '$fraction'"),
    Damage(id="decimal", document={"$decimal": "x"}, says="malformed '$decimal'"),
    Damage(id="no-json", document={1, 2}, says="set is no JSON type"),
    Damage(id="no-json-key", document={1: 2}, says="string keys only"),
)  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.id)
def test_damage_is_told_with_its_place(damage: Damage) -> None:
    """Every malformed document is a CorruptedCheckpointError with file and path."""
    document = {"a": [0, damage.document]}

    with pytest.raises(CorruptedCheckpointError) as caught:
        decode(document, (torch.zeros(2),), where="common.json")

    assert str(caught.value).startswith("common.json: a[1]")
    assert damage.says in str(caught.value)


@pytest.mark.parametrize(
    "offset", [dt.timedelta(0), dt.timedelta(microseconds=1), dt.timedelta(hours=-3)]
)
def test_offsets_of_times_are_exact(offset: dt.timedelta) -> None:
    """Also those that python's own ISO parser drops."""
    value = dt.datetime(2000, 1, 1, fold=1, tzinfo=dt.timezone(offset))

    back = round_trip([value, value.timetz()])

    assert [moment.utcoffset() for moment in back] == [offset, offset]
    assert back == [value, value.timetz()]
    assert back[0].fold == 1


def test_sets_are_written_in_one_order() -> None:
    """The document does not depend on the process's hash seed."""
    assert encode({"b", "a", "c"}).document == {"$set": ["a", "b", "c"]}


def test_what_stands_for_a_foreign_value_stays_so() -> None:
    """It is written as the name and the arguments it has: no class of others is needed."""
    value = ForeignValue("megatron.core.enums.ModelType", 1, ("a", b"b"))

    assert round_trip(value) == value
    assert encode(value).document["$foreign"][0] == "megatron.core.enums.ModelType"
