"""Typed JSON: what is kept, what is refused, and how damage is told."""

from __future__ import annotations

import array
import collections
import datetime as dt
import enum
import io
import ipaddress
import json
import pickle
import random
import re
import sys
import types
import zoneinfo
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import omegaconf
import pytest
import torch

from dist_ckpt._codec import MAX_DEPTH, Encoded, decode, encode, iter_pickled
from dist_ckpt.errors import (
    CheckpointingException,
    ConfigError,
    CorruptedCheckpointError,
    InvalidShardingError,
    UnsafeContentError,
)
from dist_ckpt.types import ForeignValue, ValueType, ValueTypes


class Colour(str, enum.Enum):
    """Members are text, and more than that."""

    RED = "red"


class Size(enum.IntEnum):
    """Members are numbers."""

    SMALL = 1
    LITTLE = 1


class Access(enum.Flag):
    """Members can be joined."""

    READ = 1
    WRITE = 2


class Bits(enum.IntFlag):
    """Bits without a name are kept by the class."""

    ONE = 1


class Pair(NamedTuple):
    """A tuple with names."""

    x: int
    y: Any = None


Plain = collections.namedtuple("Plain", ["a"])  # noqa: PYI024 - the other way to make one


class Loaded(Plain):
    """A subclass of a named tuple may do anything."""


class Config(dict[str, Any]):
    """A dict of the user."""


class Label(str):  # noqa: SLOT000 - as users write them
    """A text of the user."""


class Point:
    """A class the table does not list."""

    def __init__(self, x: int) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and self.x == other.x

    def __hash__(self) -> int:
        return hash(self.x)

    def __repr__(self) -> str:
        return f"Point({self.x})"


class HomeZone(dt.tzinfo):
    """A zone with rules of its own."""

    def __repr__(self) -> str:
        return "home"

    def utcoffset(self, _: dt.datetime | None) -> dt.timedelta:
        return dt.timedelta(hours=1)


@dataclass
class Settings:
    """Makes a config with types."""

    lr: int = 0


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
        Point(1),
        {"a": Point(2)},
        Config(a=1),
        Label("x"),
        Loaded(1),
        Bits(5),
        np.array([None, 3]),
        np.zeros(2, [("a", "i4")]),
        dt.datetime(2024, 1, 1, tzinfo=HomeZone()),
        collections.defaultdict(Path, {1: Path()}),
        pickle.PickleError,
        omegaconf.OmegaConf.structured(Settings(lr=1)),
    ],
    ids=str,
)
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
        "a": [0, Point(0)],
        "b c": (Point(1),),
        "d": {3: Point(2), Point(3): 4},
        "e": collections.defaultdict(list, {"f": [Point(5)]}),
        "$g": collections.OrderedDict(h=Point(9)),
        "i": collections.defaultdict(None, {(1, 2): Point(6)}),
    }
    document = encode(value).document

    found = dict(iter_pickled(document))

    assert list(found) == [
        "a[1]", "['b c'][0]", "d[3]", "d[1]", "e.f[0]", "['$g'].h", "i[0]"
    ]  # fmt: skip
    assert found["a[1]"].endswith("Point")
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
    assert "common.subclass: is a Subclassed, a tensor class without" in message


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
    Damage(id="enum-names", document={"$enum": ["enum", "Enum", "RED", 1]}, says="names of members"),
    Damage(id="enum-class", document={"$enum": [1, "Enum", ["RED"], 1]}, says="class is text"),
    Damage(id="items", document={"$named_tuple": ["m", "N", ["a"], []]}, says="as many items"),
    Damage(id="kind-of-dict", document={"$known_dict": ["os", "environ", {}]}, says="no known kind"),
    Damage(id="type", document={"$type": "subprocess.Popen"}, says="malformed '$type'"),
    Damage(id="config", document={"$config": ["a: 1", []]}, says="no config"),
    Damage(id="config-flags", document={"$config": [{"a": 1}, [[["a"], {"struct": True}]]]},
           says="no flags"),
    Damage(id="interpolation", document={"$config": [{"a": "${"}, []]}, says="no config"),
    Damage(id="pattern", document={"$pattern": ["(", 0]}, says="no pattern"),
    Damage(id="pattern-debug", document={"$pattern": ["a", 128]}, says="no pattern"),
    Damage(id="sparse", document={"$sparse": [{"$tensor": 0}, {"$tensor": 0}, [2], True]},
           says="malformed '$sparse'"),
    Damage(id="mt-position", document={"$numpy_generator": {"bit_generator": "MT19937",
           "state": {"key": [0] * 624, "pos": 700}}}, says="pos 700 of MT19937"),
    Damage(id="philox-position", document={"$numpy_generator": {"bit_generator": "Philox",
           "state": {}, "buffer_pos": -1}}, says="buffer_pos -1 of Philox"),
    Damage(id="bits", document={"$numpy_generator": {"bit_generator": "os", "state": {}}},
           says="malformed '$numpy_generator'"),
    Damage(id="generator", document={"$generator": {"$tensor": 0}}, says="malformed '$generator'"),
    Damage(id="own", document={"$own": [1, 2]}, says="is text"),
    Damage(id="parameter", document={"$parameter": [None, True]}, says="expected a tensor"),
    Damage(id="no-character", document={"$ndarray": ["<U1", [1], {"$bytes": "////fw=="}]},
           says="no such character"),
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


GENERATORS = (
    np.random.MT19937,
    np.random.PCG64,
    np.random.PCG64DXSM,
    np.random.Philox,
    np.random.SFC64,
)


@pytest.mark.parametrize(
    "value",
    [
        Colour.RED, Size.SMALL, Access.READ, Access.READ | Access.WRITE, Access(0),
        Bits.ONE, [{"a": (Colour.RED,)}],
        Pair(1, (Plain("b"), None)), {Pair(1): Pair(2)},
        bool, int, str, type(None), np.float32, np.bool_, torch.Tensor, omegaconf.DictConfig,
        zoneinfo.ZoneInfo("Europe/Berlin"), dt.UTC,
        dt.datetime(2024, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")),
        dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=1), "home")),
        ipaddress.ip_address("10.0.0.1"), ipaddress.ip_address("fe80::1%eth0"),
        ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_interface("::1/64"),
        re.compile("a+", re.IGNORECASE), re.compile(b"x"),
        torch.channels_last, torch.strided, torch.eye(3).to_sparse(),
        array.array("d", [1.5, 2.0]), np.array([["ab", "c"]]), np.array([b"ab"]), np.str_("x"),
        np.dtype("f4"), np.dtype(">i2"), ..., types.MappingProxyType({"a": 1}),
        collections.defaultdict(str, {1: "a"}), collections.defaultdict(collections.Counter),
    ],
    ids=lambda value: repr(value)[:50],
)  # fmt: skip
def test_what_users_put_into_checkpoints(value: Any) -> None:
    """Comes back equal, of its type, without pickle."""
    encoded = encode(value)

    assert not list(iter_pickled(encoded.document))
    back = round_trip(value)
    assert type(back) is type(value)
    assert repr(back) == repr(value)


def test_members_are_the_very_members() -> None:
    """Identity is what enums are compared by; an alias is its first name."""
    assert round_trip([Colour.RED, Size.LITTLE]) == [Colour.RED, Size.SMALL]
    assert round_trip(Colour.RED) is Colour.RED
    assert encode(Size.LITTLE).document["$enum"][2:] == [["SMALL"], 1]


@pytest.mark.parametrize("bits", GENERATORS, ids=lambda cls: cls.__name__)
def test_generators_of_numpy_go_on(bits: type[np.random.BitGenerator]) -> None:
    """The next numbers are those that the saved one would have made."""
    value = np.random.Generator(bits(3))
    value.random(7)
    back = round_trip(value)

    assert back.random(5).tolist() == value.random(5).tolist()


def test_other_generators_go_on() -> None:
    """Python's, numpy's older one, and torch's."""
    python, numpy, of_torch = random.Random(3), np.random.RandomState(3), torch.Generator()  # noqa: S311 - no secrets
    numpy.normal()
    back = round_trip([python, numpy, of_torch.manual_seed(7)])

    assert back[0].random() == python.random()
    assert back[1].normal() == numpy.normal()
    assert torch.equal(torch.rand(3, generator=back[2]), torch.rand(3, generator=of_torch))


@pytest.mark.lightning
def test_the_dicts_of_lightning() -> None:
    """Its ``AttributeDict`` holds nothing but its items."""
    module = pytest.importorskip("lightning.fabric.utilities.data")
    value = module.AttributeDict(a=1, b=Pair(2))

    back = round_trip(value)

    assert type(back) is module.AttributeDict
    assert (back, back.b) == (value, Pair(2))


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_other_layouts_are_pickled() -> None:
    """Rows and columns compressed: seldom, and made of what their creation would have to prove."""
    encoded = encode({"a": torch.eye(2).to_sparse_csr()})

    assert list(iter_pickled(encoded.document)) == [("a", "torch.Tensor")]


def test_configs_keep_flags_and_interpolations() -> None:
    """Nothing is resolved; what is read-only or closed is so again, in the places where it was."""
    conf = omegaconf.OmegaConf
    value = conf.create({"lr": 0.1, "b": {"lr": "${lr}", "todo": "???"}, "l": [{"x": "${oc.env:NONE}"}],
                         "kind": Colour.RED, 3: None})  # fmt: skip
    conf.set_readonly(value, True)
    conf.set_struct(value.b, True)
    conf.set_readonly(value.l, False)

    back = round_trip({"cfg": value, "l": value.l})["cfg"]

    assert conf.to_container(back, resolve=False) == conf.to_container(value, resolve=False)
    assert (back.b.lr, conf.is_missing(back.b, "todo")) == (0.1, True)
    flags = [(conf.is_readonly(x), bool(conf.is_struct(x))) for x in (back, back.b, back.l)]
    assert flags == [(True, False), (True, True), (False, False)]


def test_configs_without_the_package(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where OmegaConf is not installed its containers are plain ones, and the log says so."""
    document = encode(omegaconf.OmegaConf.create({"a": [1, "${b}"], "b": 2})).document
    monkeypatch.setitem(sys.modules, "omegaconf", None)

    assert decode(document, ()) == {"a": [1, "${b}"], "b": 2}
    assert "omegaconf is not installed" in caplog.text


def test_classes_that_are_not_imported(caplog: pytest.LogCaptureFixture) -> None:
    """A name imports nothing: a value stands there that knows its class, and the log names it."""
    document = {
        "a": {"$enum": ["xml.dom.minidom", "Kind", ["RED"], "red"]},
        "b": {"$named_tuple": ["no.such.module", "N", ["x", "y"], [1, {"$tuple": []}]]},
        "c": {"$enum": [__name__, "Colour", ["BLUE"], "blue"]},
        "d": {"$named_tuple": [__name__, "Pair", ["other"], [1]]},
        "e": {"$enum": [__name__, "Pair", ["RED"], 1]},
        "f": {"$named_tuple": [__name__, "Loaded", ["a"], [1]]},
    }
    before = set(sys.modules)

    value = decode(document, (), where="common.json")

    assert set(sys.modules) == before
    assert value == {
        "a": ForeignValue("xml.dom.minidom.Kind", "red"),
        "b": ForeignValue("no.such.module.N", 1, ()),
        "c": ForeignValue(f"{__name__}.Colour", "blue"),
        "d": ForeignValue(f"{__name__}.Pair", 1),
        "e": ForeignValue(f"{__name__}.Pair", 1),
        "f": ForeignValue(f"{__name__}.Loaded", 1),
    }
    assert "common.json: not imported here" in caplog.text
    assert "no.such.module.N" in caplog.text


def test_a_name_wakes_nothing() -> None:
    """Lazy attributes of modules and classes are not asked for, and no class is called."""
    woken: list[str] = []

    class Meta(enum.EnumMeta):
        def __getattr__(cls, name: str) -> Any:
            woken.append(name)
            raise AttributeError(name)

    class Holder(enum.Enum, metaclass=Meta):
        A = 1

    class Trap(NamedTuple):
        x: int

    module = types.ModuleType("lazy_module_of_a_test")
    module.__dict__["__getattr__"] = woken.append
    module.__dict__["Holder"] = Holder
    trap: Any = Trap
    trap.__new__ = staticmethod(lambda *_: woken.append("called"))
    module.__dict__["Trap"] = Trap
    sys.modules[module.__name__] = module
    woken.clear()
    try:
        for name in ("Missing", "Holder.Inner", "Holder.A", "__getattr__"):
            document = {"$enum": [module.__name__, name, ["A"], 1]}
            assert decode(document, ()) == ForeignValue(f"{module.__name__}.{name}", 1)
        value = decode({"$named_tuple": [module.__name__, "Trap", ["x"], [1]]}, ())
    finally:
        del sys.modules[module.__name__]

    assert (type(value), value.x) == (Trap, 1)
    assert woken == []


def own_types() -> ValueTypes:
    types_ = ValueTypes()
    types_.register(ValueType(Point, "test.Point", lambda p: {"x": p.x, "t": torch.ones(1)},
                              lambda d: Point(d["x"])))  # fmt: skip
    return types_


def test_registered_types_go_without_pickle() -> None:
    """Nested ones too, and with tensors; the checkpoint names the tag, not the class."""
    own = own_types()
    encoded = encode({"a": [Point(Point(3))]}, own=own)  # type: ignore[arg-type]

    assert len(encoded.tensors) == 2
    assert "Point" not in json.dumps(encoded.document).replace("test.Point", "")
    assert decode(encoded.document, encoded.tensors, own=own) == {"a": [Point(Point(3))]}  # type: ignore[arg-type]


def test_a_tag_that_is_not_registered_is_named() -> None:
    """The error says which tag, where, and what to call."""
    encoded = encode({"a": [Point(1)]}, own=own_types())

    with pytest.raises(ConfigError, match=r"f: a\[0\]: .*'test.Point'.*register_value_type"):
        decode(encoded.document, encoded.tensors, where="f")


def test_functions_of_registered_types_may_fail() -> None:
    """Told with the tag and the place, on both ways."""
    own = ValueTypes()
    own.register(ValueType(Point, "p", lambda p: 1 // p.x, lambda d: 1 // d))

    with pytest.raises(InvalidShardingError, match=r"a: the dump function of 'p' failed: Zero"):
        encode({"a": Point(0)}, own=own)
    with pytest.raises(CorruptedCheckpointError, match=r"a: the load function of 'p' failed: Zero"):
        decode({"a": {"$own": ["p", 0]}}, (), own=own)


@pytest.mark.parametrize(
    ("cls", "tag", "says"),
    [
        (Point, "other", "Point is registered as 'test.Point'"),
        (Config, "test.Point", "cannot register Config"),
        (dict, "d", "not a class of your own"),
        (Config, "", "is not a name"),
        (Config, "a b", "is not a name"),
    ],
)
def test_what_cannot_be_registered(cls: type, tag: str, says: str) -> None:
    """A class has one tag and a tag one class; what is built in is as it is."""
    own = own_types()

    with pytest.raises(ConfigError, match=says):
        own.register(ValueType(cls, tag, repr, repr))
    assert own.of_class(Config) is None


def test_a_zone_that_is_not_there() -> None:
    """A name of no zone, or one that leads elsewhere, is told as what it is."""
    with pytest.raises(ConfigError, match="Nowhere/Never.*tzdata"):
        decode({"$zone": "Nowhere/Never"}, ())
    with pytest.raises(CorruptedCheckpointError):
        decode({"$zone": "../../../etc/passwd"}, ())
