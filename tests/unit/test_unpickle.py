"""Pickled values of other writers: plain ones load, all else is refused by name."""

from __future__ import annotations

import argparse
import collections
import enum
import io
import os
import pathlib
import pickle
import random
import sys
import types
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from dist_ckpt import CheckpointingException, ConfigError, CorruptedCheckpointError
from dist_ckpt._formats.torch_dist.unpickle import tensor_of_record, unpickled
from dist_ckpt.errors import UnsafeContentError
from dist_ckpt.types import ForeignValue


class Colour(enum.Enum):
    RED = 1


class Code:
    """Would run a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def load(data: bytes, *, allow_pickle: bool = False) -> Any:
    return unpickled(data, what="the key", where="the/file", allow_pickle=allow_pickle)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    match a:
        case np.ndarray() | np.generic():
            equal = a.dtype == b.dtype and np.array_equal(a, b)
        case torch.Tensor():
            equal = torch.equal(a, b)
        case io.BytesIO():
            equal = a.getvalue() == b.getvalue()
        case list() | tuple():
            equal = len(a) == len(b) and all(map(same, a, b))
        case dict():
            equal = same(list(a.items()), list(b.items()))
        case argparse.Namespace() | types.SimpleNamespace():
            equal = same(vars(a), vars(b))
        case _:
            equal = a == b
    return bool(equal)


PLAIN = {
    "dict": {"a": [1, (2.5, None)], 3: {"x"}, "b": b"bytes"},
    "ordered": collections.OrderedDict(z=1, a=2),
    "torch": {"dtype": torch.bfloat16, "size": torch.Size([2, 3]), "t": torch.arange(3)},
    "namespace": argparse.Namespace(lr=0.1, betas=[0.9, 0.95], dtype=torch.float16, at=None),
    "nested-namespace": {"args": argparse.Namespace(of=types.SimpleNamespace(x=np.arange(3)))},
    "path": pathlib.PosixPath("/a/b"),
    "bytesio": io.BytesIO(b"transformer engine"),
    "numbers": [np.float32(1.5), np.int64(-3), np.bool_(True), np.complex128(1 + 2j)],
    "arrays": [
        np.arange(6).reshape(2, 3), np.asfortranarray(np.ones((2, 3))), np.empty((0, 3)),
        np.array(5), np.array(["ä", "text"]), np.array([b"ab", b"c"]),
    ],
    "dtype": (np.dtype("float32"), {"t": np.dtype("<U5")}),
    "rng": [
        {
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.RandomState(1).get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "rng_tracker_states": {},
        }
    ],
}  # fmt: skip


@pytest.mark.parametrize("value", PLAIN.values(), ids=PLAIN.keys())
def test_plain_values(value: object) -> None:
    """What a training script of Megatron keeps beside tensors loads without pickle."""
    assert same(load(saved(value)), value)
    assert same(load(saved(value), allow_pickle=True), value)


def test_the_other_byte_order() -> None:
    """The dtype says which; numpy itself would make the array native."""
    value = np.arange(3, dtype=">i4")

    assert same(load(saved(value)), value)


def test_nothing_stays_admitted() -> None:
    """The process admits afterwards what it admitted before."""
    before = set(torch.serialization.get_safe_globals())

    load(saved(PLAIN["namespace"]))

    assert set(torch.serialization.get_safe_globals()) == before


def test_what_the_program_admits_counts() -> None:
    """Types that the user has admitted for torch.load load as these types."""
    value = {"colour": Colour.RED, "n": argparse.Namespace(a=1)}

    with torch.serialization.safe_globals([Colour]):
        loaded = load(saved(value))

    assert loaded == value


def test_containers_that_hold_each_other() -> None:
    """Shared and circular references are kept."""
    shared = [np.arange(2)]
    value: dict[str, Any] = {"a": shared, "b": shared}
    value["self"] = value

    loaded = load(saved(value))

    assert loaded["a"] is loaded["b"]
    assert loaded["self"] is loaded
    assert type(loaded["a"][0]) is np.ndarray


@pytest.mark.parametrize(
    ("value", "name"),
    [
        pytest.param(Code(), "posix.system", id="code"),
        pytest.param({"a": [Colour.RED]}, "Colour", id="enum"),
        pytest.param(argparse.Namespace(x=Colour.RED), "Colour", id="in-a-namespace"),
        pytest.param(np.array([{}], dtype=object), "numpy dtype 'O8'", id="array-of-objects"),
        pytest.param(np.zeros(2, [("a", "O")]), "numpy dtype", id="structured-array"),
        pytest.param(np.zeros(2, "M8[s]"), "numpy dtype", id="times"),
        pytest.param(np.dtype("O"), "numpy dtype 'O8'", id="dtype-of-objects"),
    ],
)
def test_what_is_refused(value: object, name: str) -> None:
    """The error names the key, the file, the type, and what would allow it; nothing has run."""
    with pytest.raises(UnsafeContentError) as raised:
        load(saved(value))

    for part in ("'the key'", "the/file", name, "allow_pickle=True"):
        assert part in str(raised.value)


def test_all_types_are_named_at_once() -> None:
    """One try tells everything that is in the way."""
    value = [Colour.RED, Code()]

    with pytest.raises(UnsafeContentError, match=r"posix\.system.*Colour"):
        load(saved(value))


@pytest.fixture
def gone() -> Iterator[type]:
    """A class of a module that will not be there when it is loaded."""
    module = types.ModuleType("megatron_like_enums")
    exec("import enum\nclass Kind(enum.Enum):\n    FLASH = 1\n", module.__dict__)  # noqa: S102 - a module made here
    module.Kind.__module__ = module.__name__  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    yield module.Kind
    sys.modules.pop(module.__name__, None)


def test_a_missing_module_is_named(gone: type[enum.Enum]) -> None:
    """Allowing pickle does not install the library that wrote the checkpoint."""
    data = saved({"backend": gone(1)})
    del sys.modules["megatron_like_enums"]

    with pytest.raises(UnsafeContentError, match="megatron_like_enums.Kind"):
        load(data)
    with pytest.raises(ConfigError, match="'the key' in the/file.*'megatron_like_enums'.*install"):
        load(data, allow_pickle=True)


def test_a_class_that_its_module_has_no_more(gone: type[enum.Enum]) -> None:
    """A newer release of the library may lack a class of the older one."""
    data = saved({"backend": gone(1)})
    del sys.modules["megatron_like_enums"].Kind  # type: ignore[attr-defined]

    with pytest.raises(ConfigError, match="'Kind'"):
        load(data, allow_pickle=True)


def rewritten(old: bytes, new: bytes) -> bytes:
    """Return a saved array whose pickle was altered: same length, other content."""
    data = saved(np.arange(4, dtype=np.int64))
    assert data.count(old) == 1
    assert len(old) == len(new)
    return data.replace(old, new)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"no record", id="garbage"),
        pytest.param(saved({"a": 1})[:-30], id="cut"),
        pytest.param(rewritten(b"K\x04\x85", b"K\x40\x85"), id="array-larger-than-its-bytes"),
        pytest.param(rewritten(b"X\x02\x00\x00\x00i8", b"X\x02\x00\x00\x00O8"), id="pointers"),
    ],
)
def test_damage_and_deceit(data: bytes) -> None:
    """Errors of our tree; no array is made over memory that it does not own."""
    for allow_pickle in (False, True):
        if allow_pickle and b"O8" in data:
            continue
        with pytest.raises((CorruptedCheckpointError, UnsafeContentError)) as raised:
            load(data, allow_pickle=allow_pickle)
        assert isinstance(raised.value, CheckpointingException)


def test_the_stand_ins_are_no_way_out() -> None:
    """A pickle that calls numpy's functions by hand with objects is refused."""

    class Trick:
        def __reduce__(self) -> tuple[Any, ...]:
            return np.frombuffer, (b"12345678", np.int64)

    with pytest.raises(UnsafeContentError, match="numpy"):
        load(saved(Trick()))
    assert pickle.loads(pickle.dumps(Trick())) == np.frombuffer(b"12345678", np.int64)


THEIRS = "megatron.core.transformer.enums"


@pytest.fixture
def backend() -> Iterator[type[enum.Enum]]:
    """Return an enum of a module of Megatron-Core that is there while the test pickles only."""
    names = ["megatron", "megatron.core", "megatron.core.transformer", THEIRS]
    sys.modules.update({name: types.ModuleType(name) for name in names})
    module = sys.modules[THEIRS]
    exec("import enum\nclass AttnBackend(enum.Enum):\n    flash = 1", module.__dict__)  # noqa: S102 - a module of the test
    yield module.AttnBackend
    for name in names:
        sys.modules.pop(name, None)


def test_enums_of_megatron_stand_for_themselves(
    backend: type[enum.Enum], caplog: pytest.LogCaptureFixture
) -> None:
    """A member of theirs is a name and a value; nothing of theirs is imported, nothing stays open."""
    data = saved({"args": argparse.Namespace(lr=0.125, attention=backend["flash"]), "n": 7})
    del sys.modules[backend.__module__]
    before = torch.serialization.get_safe_globals()

    value = unpickled(data, what="args", where="common.pt", allow_pickle=False)

    found = value["args"].attention
    assert found == ForeignValue("megatron.core.transformer.enums.AttnBackend", 1)
    assert found != ForeignValue("megatron.core.transformer.enums.AttnBackend", 2)
    assert "AttnBackend(1), not imported" in repr(found)
    assert (value["args"].lr, value["n"]) == (0.125, 7)
    assert "AttnBackend" in caplog.text
    assert backend.__module__ not in sys.modules
    assert set(torch.serialization.get_safe_globals()) == set(before)


def test_enums_of_megatron_open_no_door(backend: type[enum.Enum]) -> None:
    """Beside something that is refused, all is refused, and named."""
    data = saved({"backend": backend["flash"], "code": Code()})

    with pytest.raises(UnsafeContentError, match=r"AttnBackend.*system"):
        unpickled(data, what="args", where="common.pt", allow_pickle=False)


TENSORS = {
    "plain": torch.arange(6.0).reshape(2, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "part": torch.arange(10)[3:7],
    "expanded": torch.ones(1).expand(3, 4),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "conjugated": torch.tensor([1 + 2j]).conj(),
    "negated": torch.tensor([1 + 2j]).conj().imag,
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "fp8": torch.ones(3).to(torch.float8_e4m3fn),
    "uint16": torch.arange(3).to(torch.uint16),
    "bool": torch.tensor([True, False]),
    "parameter": torch.nn.Parameter(torch.ones(2), requires_grad=False),
    "gradient": torch.ones(2, requires_grad=True),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS.keys())
def test_tensors_of_every_form(tensor: torch.Tensor) -> None:
    """As ``torch.load`` gives them, alone or in a container."""
    (found,) = load(saved([tensor]))

    assert type(found) is type(tensor)
    assert (found.dtype, found.shape, found.stride()) == (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
    )
    assert found.requires_grad == tensor.requires_grad
    assert found.tolist() == tensor.tolist()
    assert tensor_of_record(saved(tensor)).tolist() == tensor.tolist()


def test_tensors_share_their_storage() -> None:
    """Views of one storage stay views of one."""
    whole = torch.arange(4.0)

    first, second = load(saved((whole, whole[1:])))

    first[1] = 9
    assert second[0] == 9


@pytest.mark.parametrize(
    ("value", "name"),
    [
        pytest.param(torch.eye(2).to_sparse(), "_rebuild_sparse_tensor", id="sparse"),
        pytest.param(torch.empty(2, device="meta"), "_rebuild_meta_tensor", id="meta"),
    ],
)
def test_special_tensors_are_refused(value: torch.Tensor, name: str) -> None:
    """What is made of more than one storage and a shape needs the reader's trust."""
    with pytest.raises(UnsafeContentError, match=name):
        load(saved(value))
    with pytest.raises(ValueError, match=name):
        tensor_of_record(saved(value))


def test_what_is_no_tensor() -> None:
    """A record of a tensor holds a tensor and nothing else."""
    with pytest.raises(ValueError, match="dict"):
        tensor_of_record(saved({"a": torch.ones(1)}))


def rezipped(
    value: object, *, method: int = zipfile.ZIP_STORED, change: Callable[[str, bytes], bytes]
) -> bytes:
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(saved(value))) as old,
        zipfile.ZipFile(buffer, "w", method) as new,
    ):
        for info in old.infolist():
            new.writestr(info.filename, change(info.filename, old.read(info)))
    return buffer.getvalue()


def legacy() -> bytes:
    buffer = io.BytesIO()
    torch.save(torch.ones(3), buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def shared_members() -> bytes:
    """Return a record in which another member lies over the bytes of the storage."""
    buffer = io.BytesIO(saved(torch.zeros(4096)))
    with zipfile.ZipFile(buffer, "a") as archive:
        (first,) = (one for one in archive.filelist if one.filename.endswith("data/0"))
        archive.writestr("archive/data/9", bytes(16))
        archive.filelist[-1].header_offset = first.header_offset
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        pytest.param(legacy(), "no zip archive", id="before-torch-1.6"),
        pytest.param(rezipped(torch.zeros(1 << 20), method=zipfile.ZIP_DEFLATED,
                              change=lambda _, data: data), "not stored as it is", id="bomb"),
        pytest.param(rezipped([1], change=lambda name, data: b"big" if "order" in name else data),
                     "byte order", id="byte-order"),
        pytest.param(rezipped(torch.ones(4), change=lambda name, data: data[:-1] if "data/0" in name
                              else data), "in 15 bytes", id="short-storage"),
        pytest.param(shared_members(), "share bytes", id="one-place-twice"),
    ],
)  # fmt: skip
def test_archives_are_read_in_bounds(data: bytes, says: str) -> None:
    """Nothing is decompressed, and no byte is read twice."""
    with pytest.raises(CorruptedCheckpointError, match=says):
        load(data)


def test_calls_pay_for_what_they_copy() -> None:
    """A long list or text that is copied again and again is refused, not copied."""
    text = pickle.dumps("a" * 60_000, 2)[2:-1].partition(b"q\x00")[0]
    many = b"\x80\x02]q\x00(" + text + b"q\x01" + (
        b"c_codecs\nencode\nh\x01\x85R" * 3000
    ) + b"e."  # fmt: skip

    with pytest.raises(CorruptedCheckpointError, match="unfolds"):
        load(rezipped([], change=lambda name, data: many if name.endswith("data.pkl") else data))


@pytest.mark.parametrize(
    "call",
    [
        b"cbuiltins\nbytearray\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R",
        b"cbuiltins\nbytes\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R",
        b"ctorch._utils\n_rebuild_parameter\nNN\x86R",
        b"ctorch\nSize\nX\x01\x00\x00\x00a\x85R",
        b"ccollections\ndefaultdict\nctorch\nSize\n\x85R",
        b"c_io\nBytesIO\n)\x81(NNNtb",
        b"cnumpy._core.multiarray\nscalar\nNN\x86R",
    ],
)
def test_names_are_called_as_they_should_be(call: bytes) -> None:
    """With anything else they raise; nothing is taken for what it asks."""
    data = rezipped([], change=lambda n, d: b"\x80\x02" + call + b"." if n.endswith("pkl") else d)

    with pytest.raises((CorruptedCheckpointError, UnsafeContentError)):
        load(data)
