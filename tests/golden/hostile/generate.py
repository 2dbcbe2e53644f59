"""Makes the hostile checkpoints beside this file, each in a folder of its own; always the same.

Here: what whoever can write a checkpoint could put into it. Checksums are right, since such a
writer can compute them. Not here: what must become of each (``verdicts.json``, ``test_hostile.py``).
``python -m tests.golden.hostile.generate`` writes ``honest/`` and ``cases/`` anew: a case is the
honest checkpoint of its kind with the files in its folder in place of its own. What git cannot keep
or what is long (links, pipes, large documents) is in ``LIVE`` and made by the test.
"""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import shutil
import socket
import struct
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp

from dist_ckpt import SaveOptions, ShardedObject, ShardedTensor, save
from dist_ckpt._formats.manifest import _entry
from dist_ckpt.storage.checksums import ALGORITHM, BLOCK_NBYTES, digest, sum_of_file
from tests._forge import Index, Row, Tensor, forged, parsed

CANARY = "hostile_canary"
"""What code from a checkpoint would leave in the working directory."""

HERE = Path(__file__).parent
KINDS = ("torch_dist", "zarr1", "zarr2", "foreign_zarr", "dcp", "mcore")

Change = Callable[[Path], None]
STATIC: dict[str, tuple[str, Change]] = {}
LIVE: dict[str, tuple[str, Change]] = {}


def state() -> dict[str, Any]:
    """Return what the honest checkpoint holds."""
    tensor = torch.arange(8, dtype=torch.float32).reshape(4, 2)
    return {
        "w": ShardedTensor.from_rank_offsets("w", tensor),
        "v": ShardedTensor.from_rank_offsets("v", torch.ones(3)),
        "o": ShardedObject("o", {"a": (1, 2)}, (1,), (0,)),
        "common": {"step": 7, "t": torch.arange(2)},
    }


# -- honest checkpoints


def base(kind: str, path: Path) -> None:
    """Save the honest checkpoint of a kind."""
    if kind == "dcp":
        tensors = {"w": torch.arange(8, dtype=torch.float32).reshape(4, 2), "v": torch.ones(3)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process
            dcp.save({**tensors, "o": {"a": 1}}, checkpoint_id=path, no_dist=True)
        metadata = pickle.loads((path / ".metadata").read_bytes())
        metadata.storage_meta = None  # the path, and the name of this very save
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        return
    if kind == "mcore":
        base("dcp", path)
        torch.save({"common": {"step": 7}}, path / "common.pt")
        marker = {"sharded_backend": "torch_dist", "sharded_backend_version": 1,
                  "common_backend": "torch", "common_backend_version": 1}  # fmt: skip
        (path / "metadata.json").write_text(json.dumps(marker))
        return
    if kind == "foreign_zarr":
        base("zarr1", path)
        for name in ("manifest.json", "index.json", "common.json"):
            (path / name).unlink()
        return
    backend = "torch_dist" if kind == "torch_dist" else "zarr"
    strategy = ("zarr", 1) if kind == "zarr1" else None
    save(state(), path, strategy, options=SaveOptions(backend=backend))
    seal(path)


def seal(path: Path, **changes: Any) -> None:
    """Write a manifest that is right about all files, but for ``changes``."""
    names = sorted(
        one.relative_to(path).as_posix()
        for one in path.rglob("*")
        if one.is_file() and not one.is_symlink() and one.name != "manifest.json"
    )
    document = {
        "format": "dist_ckpt",
        "version": 2,
        "checkpoint_id": "0" * 32,
        "name": "hostile",
        "world_size": 1,
        "checksum": {"algorithm": ALGORITHM, "block_nbytes": BLOCK_NBYTES},
        "files": {name: _entry(sum_of_file(path / name)) for name in names},
    }
    (path / "manifest.json").write_bytes(with_seal(json.dumps(document | changes, indent=1)))


def with_seal(text: str) -> bytes:
    """Return a JSON object with its checksum, whatever stands in it."""
    rest = b'",' + text.encode("utf-8", "surrogatepass").lstrip().removeprefix(b"{")
    head = b'{"xxh3_64":"'
    return head + f"{digest(head + b'0' * 16 + rest):016x}".encode() + rest


def document_of(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_bytes())
    document.pop("xxh3_64", None)
    return document


def index(change: Callable[[dict[str, Any]], None]) -> Change:
    """Return what changes ``index.json`` and seals the checkpoint again."""

    def apply(path: Path) -> None:
        document = document_of(path / "index.json")
        change(document)
        (path / "index.json").write_bytes(with_seal(json.dumps(document)))
        seal(path)

    return apply


def index_text(change: Callable[[str], str]) -> Change:
    def apply(path: Path) -> None:
        text = json.dumps(document_of(path / "index.json"))
        changed = change(text)
        assert changed != text
        (path / "index.json").write_bytes(with_seal(changed))
        seal(path)

    return apply


def packed(change: Callable[[Index], object]) -> Change:
    """Return what changes ``index.bin`` and seals the checkpoint again."""

    def apply(path: Path) -> None:
        document = parsed((path / "index.bin").read_bytes())
        change(document)
        (path / "index.bin").write_bytes(forged(document))
        seal(path)

    return apply


def manifest(change: Callable[[dict[str, Any]], None]) -> Change:
    def apply(path: Path) -> None:
        document = document_of(path / "manifest.json")
        change(document)
        (path / "manifest.json").write_bytes(with_seal(json.dumps(document)))

    return apply


def manifest_text(change: Callable[[str], str]) -> Change:
    def apply(path: Path) -> None:
        text = json.dumps(document_of(path / "manifest.json"))
        changed = change(text)
        assert changed != text
        (path / "manifest.json").write_bytes(with_seal(changed))

    return apply


def raw(name: str, data: bytes | str) -> Change:
    """Return what replaces a file as it is, with the right checksums."""

    def apply(path: Path) -> None:
        (path / name).write_bytes(data if isinstance(data, bytes) else data.encode())
        if (path / "manifest.json").exists():
            seal(path)

    return apply


def common(document: object, tensors: object = 0, version: object = 1) -> Change:
    return raw(
        "common.json", json.dumps({"version": version, "tensors": tensors, "document": document})
    )


def array(name: str, change: Callable[[dict[str, Any]], None]) -> Change:
    """Return what changes the metadata of an array."""

    def apply(path: Path) -> None:
        file = path / name
        document = json.loads(file.read_bytes())
        change(document)
        file.write_text(json.dumps(document))
        if (path / "manifest.json").exists():
            seal(path)

    return apply


# -- pickles


class Code:
    """Leaves the canary when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {CANARY}",)


CODE = pickle.dumps(Code(), protocol=2)


def record(pickled: bytes, *, members: dict[str, bytes] | None = None, method: int = 0) -> bytes:
    """Return a ``torch.save`` record with this pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        parts = {"data.pkl": pickled, "byteorder": b"little", "version": b"3\n"} | (members or {})
        for name, data in parts.items():
            info = zipfile.ZipInfo(f"archive/{name}", (1980, 1, 1, 0, 0, 0))
            info.compress_type = method
            archive.writestr(info, data)
    return buffer.getvalue()


TENSOR = (
    b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
    b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x08tQ%s%s%s\x89ccollections\nOrderedDict\n)RtR."
)


def tensor_pickle(offset: bytes, shape: bytes, strides: bytes) -> bytes:
    return TENSOR % (offset, shape, strides)


def long_int(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def deep(count: int) -> bytes:
    """Return a dict with a key of ``count`` tuples in each other: its hash overflows the stack."""
    return b"\x80\x02})" + b"\x85" * count + b"K\x01s."


def wide(count: int) -> bytes:
    """Return a dict with a key of 2^count tuples, told in two bytes each."""
    return b"\x80\x02}K\x01\x85" + b"2\x86" * count + b"K\x01s."


DCP = "torch.distributed.checkpoint.metadata"
PICKLES = {
    "code": CODE,
    "code_protocol_5": pickle.dumps(Code(), protocol=5),
    "getattr": b"\x80\x02cbuiltins\ngetattr\nctorch\nhub\nX\x04\x00\x00\x00load\x86R.",
    "eval": b"\x80\x02cbuiltins\neval\nX\x03\x00\x00\x001+1\x85R.",
    "copyreg": b"\x80\x02ccopyreg\nadd_extension\n.",
    "instance": b"(S'touch %s'\nios\nsystem\n." % CANARY.encode(),
    "deep_tuple": deep(100_000),
    "wide_tuple": wide(120),
    "memo": b"\x80\x02Nr\x00\x00\x00\x70.",
    "claims_8_gib": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 33) + b"abc.",
    "claims_text": b"\x80\x02X\xff\xff\xff\x7fabc.",
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"N.",
    "digits": b"I" + b"9" * 60_000 + b"\n.",
    "empty": b"",
    "no_end": b"\x80\x02N",
    "underflow": b"\x80\x02R.",
    "not_a_dict": b"\x80\x02K\x01.",
    "buffer": b"\x80\x05\x97.",
    "extension": b"\x80\x02\x82\x01.",
    "persistent": b"\x80\x02X\x01\x00\x00\x00aQ.",
    "bytearray_of_32_gib": b"\x80\x02cbuiltins\nbytearray\n" + long_int(1 << 35) + b"\x85R.",
    "list_of_itself": b"\x80\x02]q\x00h\x00a.",
}
for _name, _pickled in PICKLES.items():
    STATIC[f"metadata_pickle_{_name}"] = ("dcp", raw(".metadata", _pickled))
    STATIC[f"common_pt_{_name}"] = ("mcore", raw("common.pt", record(_pickled)))


def in_record(data: bytes) -> Change:
    """Return what puts a record in the place of the tensor ``w`` of a DCP checkpoint."""

    def apply(path: Path) -> None:
        metadata = pickle.loads((path / ".metadata").read_bytes())
        for place, info in metadata.storage_data.items():
            if place.fqn == "w":
                file = path / info.relative_path
                info.offset = file.stat().st_size
                info.length = len(data)
                with file.open("ab") as appended:
                    appended.write(data)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))

    return apply


_ONE, _TWO = b"K\x04K\x02\x86", b"K\x02K\x01\x86"
RECORDS = {
    "code": record(CODE),
    "compressed": record(tensor_pickle(b"K\x00", _ONE, _TWO), members={"data/0": bytes(32)},
                         method=zipfile.ZIP_DEFLATED),
    "bomb": record(tensor_pickle(b"K\x00", _ONE, _TWO), members={"data/0": bytes(1 << 24)},
                   method=zipfile.ZIP_DEFLATED),
    "storage_too_short": record(tensor_pickle(b"K\x00", _ONE, _TWO), members={"data/0": bytes(31)}),
    "offset_behind_the_end": record(tensor_pickle(b"K\x01", _ONE, _TWO),
                                    members={"data/0": bytes(32)}),
    "negative_offset": record(tensor_pickle(long_int(-1), _ONE, _TWO),
                              members={"data/0": bytes(32)}),
    "negative_stride": record(tensor_pickle(b"K\x00", _ONE, long_int(-2) + b"K\x01\x86"),
                              members={"data/0": bytes(32)}),
    "gigantic_shape": record(tensor_pickle(b"K\x00", long_int(1 << 62) + b"K\x02\x86",
                                           b"K\x00K\x00\x86"), members={"data/0": bytes(32)}),
    "no_storage": record(tensor_pickle(b"K\x00", _ONE, _TWO)),
    "deep_tuple": record(deep(100_000)),
    "not_a_zip": b"PK" + bytes(500),
    "empty": b"",
}  # fmt: skip
for _name, _data in RECORDS.items():
    STATIC[f"record_{_name}"] = ("dcp", in_record(_data))


def metadata_of(change: Callable[[Any], None]) -> Change:
    def apply(path: Path) -> None:
        metadata = pickle.loads((path / ".metadata").read_bytes())
        change(metadata)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))

    return apply


def info_of(**values: Any) -> Change:
    def change(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            for name, value in values.items():
                setattr(info, name, value)

    return metadata_of(change)


PATHS = {
    "up": "../secret",
    "absolute": "/etc/passwd",
    "nul": "a\0b",
    "dot": "./__0_0.distcp",
    "empty": "",
    "empty_part": "a//b",
    "backslash": "..\\secret",
    "surrogate": "\ud800",
    "long": "a" * 5000,
    "number": 7,
}
for _name, _path in PATHS.items():
    STATIC[f"metadata_path_{_name}"] = ("dcp", info_of(relative_path=_path))
    STATIC[f"array_path_{_name}"] = (
        "zarr2", index(lambda d, p=_path: d["tensors"]["w"].update(path=p)),
    )  # fmt: skip
    if isinstance(_path, str):
        STATIC[f"manifest_path_{_name}"] = (
            "torch_dist",
            manifest(lambda d, p=_path: d["files"].update({p: dict(d["files"]["index.bin"])})),
        )
        STATIC[f"alone_index_path_{_name}"] = (
            "torch_dist", manifest_text(lambda t, p=_path: t.replace('"index.bin"', json.dumps(p))),
        )  # fmt: skip

NUMBERS = {
    "past_the_end": 1 << 20,
    "negative": -1,
    "2_63": 1 << 63,
    "2_64": 1 << 64,
    "huge": 10**100,
    "float": 1.0,
    "bool": True,
    "text": "1",
    "null": None,
    "list": [1],
}


def places(metadata: Any, value: object) -> None:
    for info in metadata.storage_data.values():
        info.offset = value


def metadata_shape(metadata: Any, value: Any) -> None:
    entry = metadata.state_dict_metadata["w"]
    entry.size = (value, 2)
    entry.chunks[0].sizes = (value, 2)


def shape(value: object) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        entry = document["tensors"]["w"]
        entry["shape"] = [value, 2]
        for box in entry["boxes"]:
            box[1] = [value, 2]

    return change


for _name, _value in NUMBERS.items():
    STATIC[f"metadata_offset_{_name}"] = ("dcp", metadata_of(lambda m, v=_value: places(m, v)))
    STATIC[f"metadata_shape_{_name}"] = (
        "dcp", metadata_of(lambda m, v=_value: metadata_shape(m, v)),
    )  # fmt: skip
    STATIC[f"zarr_index_shape_{_name}"] = ("zarr2", index(shape(_value)))
    STATIC[f"manifest_nbytes_{_name}"] = (
        "torch_dist",
        manifest(lambda d, v=_value: d["files"]["index.bin"].update(nbytes=v)),
    )
    if _value is not True and _value != 1.0:  # the same number as the version, of another type
        STATIC[f"index_version_{_name}"] = (
            "zarr2", index(lambda d, v=_value: d.update(version=v)),
        )  # fmt: skip
    STATIC[f"common_tensors_{_name}"] = ("torch_dist", common({"step": 7}, _value))
    STATIC[f"zarr2_shape_{_name}"] = (
        "zarr1", array("w/.zarray", lambda d, v=_value: d.update(shape=[v, 2])),
    )  # fmt: skip
    STATIC[f"zarr2_chunks_{_name}"] = (
        "zarr1", array("w/.zarray", lambda d, v=_value: d.update(chunks=[v, 2])),
    )  # fmt: skip
    STATIC[f"foreign_zarr_shape_{_name}"] = (
        "foreign_zarr", array("w/.zarray", lambda d, v=_value: d.update(shape=[v, 2])),
    )  # fmt: skip
    STATIC[f"foreign_zarr_chunks_{_name}"] = (
        "foreign_zarr", array("w/.zarray", lambda d, v=_value: d.update(chunks=[v, 2])),
    )  # fmt: skip


def v3_chunks(document: dict[str, Any], value: object) -> None:
    document["chunk_grid"]["configuration"]["chunk_shape"] = [value, 2]


def inner_chunks(document: dict[str, Any], value: object) -> None:
    document["codecs"][0]["configuration"]["chunk_shape"] = [value, 2]


for _name, _value in NUMBERS.items():
    STATIC[f"zarr3_shards_{_name}"] = (
        "zarr2", array("w/zarr.json", lambda d, v=_value: v3_chunks(d, v)),
    )  # fmt: skip
    STATIC[f"zarr3_inner_{_name}"] = (
        "zarr2", array("w/zarr.json", lambda d, v=_value: inner_chunks(d, v)),
    )  # fmt: skip

STATIC |= {
    "zarr_v3_calls_itself_v2": ("zarr2", array("w/zarr.json", lambda d: d.update(zarr_format=2))),
    "zarr_v2_calls_itself_v3": ("zarr1", array("w/.zarray", lambda d: d.update(zarr_format=3))),
    "zarr_index_of_the_other": ("zarr2", index(lambda d: d.update(format="zarr2"))),
    "zarr_group": ("zarr2", array("w/zarr.json", lambda d: d.update(node_type="group"))),
    "zarr_codec": ("zarr2", array("w/zarr.json", lambda d: d.update(codecs=[{"name": "x"}]))),
    "zarr_dtype": ("zarr1", array("w/.zarray", lambda d: d.update(dtype="|O"))),
    "zarr_filters": ("foreign_zarr", array("w/.zarray", lambda d: d.update(filters=[{"id": "pickle"}]))),
    "zarr_compressor": ("foreign_zarr", array("w/.zarray", lambda d: d.update(compressor={"id": "x"}))),
    "zarr_blosc_bomb": ("foreign_zarr", lambda path: blosc(path, 1 << 30)),
    "zarr_separator": ("foreign_zarr", array("w/.zarray", lambda d: d.update(dimension_separator="../"))),
    "zarr_no_object": ("foreign_zarr", raw("w/.zarray", "[]")),
    "zarr_deep": ("foreign_zarr", raw("w/.zarray", "[" * 100_000)),
    "zarr_twice": ("zarr1", lambda path: twice(path, "w/.zarray", '"order": "C"')),
    "two_keys_one_array": ("zarr2", index(lambda d: d["tensors"]["v"].update(path="w"))),
}  # fmt: skip


def blosc(path: Path, nbytes: int) -> None:
    """Let a chunk of 32 bytes say that it unfolds to a GiB."""
    array(
        "w/.zarray",
        lambda d: d.update(compressor={"id": "blosc", "cname": "zstd", "clevel": 5, "shuffle": 0}),
    )(path)
    chunk = next(one for one in sorted((path / "w").iterdir()) if one.name[0].isdigit())
    data = struct.pack("<4BIII", 2, 1, 0x80, 1, nbytes, nbytes, 116) + bytes(100)
    chunk.write_bytes(data)


def twice(path: Path, name: str, item: str) -> None:
    file = path / name
    text = file.read_text()
    assert item in text
    file.write_text(text.replace(item, f"{item}, {item}", 1))
    seal(path)


def overlap(document: dict[str, Any]) -> None:
    document["tensors"]["w"]["boxes"] = [[[0, 0], [2, 2]], [[1, 0], [2, 2]]]


def packed_overlap(index: Index) -> None:
    tensor = index.tensor("w")
    tensor.shape = [8, 2]
    # Over the head of a record: no two of them share bytes of the file.
    tensor.rows.append(Row(0, [2, 0], [1, 2], tensor.rows[0].file))


def packed_half_of_another(index: Index) -> None:
    index.tensor("v").rows[0].position = index.tensor("w").rows[0].position + 4
    index.tensor("v").rows[0].file = index.tensor("w").rows[0].file


def packed_one_place(index: Index) -> None:
    """Let 500 tensors be the same bytes."""
    one = index.tensor("w")
    index.tensors += [Tensor(b"w%03d" % i, one.shape, one.dtype, 0, one.rows) for i in range(500)]


def packed_diagonal(index: Index) -> None:
    """Let 10,000 boxes lie beside each other along one axis, and after each other along another."""
    tensor = index.tensor("w")
    tensor.shape = [1 << 20, 1 << 20]
    tensor.rows = [Row(0, [i, i], [8, 1], tensor.rows[0].file) for i in range(10_000)]


def packed_shape(index: Index, value: int) -> None:
    tensor = index.tensor("w")
    tensor.shape = [value, 2]
    tensor.rows[0].shape = [value, 2]


def packed_row(name: str, value: int) -> Callable[[Index], object]:
    return lambda index: setattr(index.tensor("w").rows[0], name, value)


PACKED_NUMBERS = {
    "past_the_end": 1 << 20, "negative": -1, "2_31": 1 << 31, "2_32": 1 << 32, "2_62": 1 << 62,
    "2_63": 1 << 63,
}  # fmt: skip
for _name, _value in PACKED_NUMBERS.items():
    STATIC[f"packed_shape_{_name}"] = (
        "torch_dist", packed(lambda d, v=_value: packed_shape(d, v)),
    )  # fmt: skip
    if _value != 1 << 32:  # four bytes of it are nothing, and it is the first file
        STATIC[f"packed_file_{_name}"] = ("torch_dist", packed(packed_row("file", _value)))
    STATIC[f"packed_position_{_name}"] = ("torch_dist", packed(packed_row("position", _value)))
    for _number in ("directory_nbytes", "nbytes", "tensors", "chunks", "files", "dtypes", "axes",
                    "key_nbytes", "name_nbytes"):  # fmt: skip
        STATIC[f"packed_{_number}_{_name}"] = (
            "torch_dist", packed(lambda d, n=_number, v=_value: d.head.update({n: v})),
        )  # fmt: skip
for _name, _path in PATHS.items():
    if isinstance(_path, str):
        STATIC[f"packed_path_{_name}"] = (
            "torch_dist",
            packed(lambda d, p=_path: d.files.__setitem__(0, p.encode("utf-8", "surrogatepass"))),
        )
STATIC |= {
    "packed_overlapping_chunks": ("torch_dist", packed(packed_overlap)),
    "packed_half_of_another": ("torch_dist", packed(packed_half_of_another)),
    "packed_one_place_for_many": ("torch_dist", packed(packed_one_place)),
    "packed_same_chunk_often": ("torch_dist", packed(lambda d: d.tensor("w").rows.extend(d.tensor("w").rows * 2))),
    "packed_box_outside": ("torch_dist", packed(lambda d: d.tensor("w").rows[0].offset.__setitem__(0, 3))),
    "packed_empty_chunk": ("torch_dist", packed(lambda d: d.tensor("w").rows[0].shape.__setitem__(0, 0))),
    "packed_gigantic": ("torch_dist", packed(lambda d: setattr(d.tensor("w"), "shape", [1 << 62, 2]))),
    "packed_dtype_code": ("torch_dist", packed(lambda d: d.dtypes.__setitem__(0, (b"load", 4)))),
    "packed_dtype_empty": ("torch_dist", packed(lambda d: d.dtypes.__setitem__(0, (b"", 4)))),
    "packed_itemsize": ("torch_dist", packed(lambda d: d.dtypes.__setitem__(0, (d.dtypes[0][0], 1)))),
    "packed_dtype_number": ("torch_dist", packed(lambda d: setattr(d.tensor("w"), "dtype", 255))),
    "packed_role": ("torch_dist", packed(lambda d: setattr(d.tensor("w"), "role", 255))),
    "packed_object_of_floats": ("torch_dist", packed(lambda d: setattr(d.tensor("w"), "role", 1))),
    "packed_keys_twice": ("torch_dist", packed(lambda d: setattr(d.tensor("v"), "key", b"w"))),
    "packed_keys_mixed": ("torch_dist", packed(lambda d: d.tensors.reverse())),
    "packed_key_no_text": ("torch_dist", packed(lambda d: setattr(d.tensor("w"), "key", b"\xff"))),
    "packed_key_ends": ("torch_dist", packed(lambda d: setattr(d, "key_ends", [1 << 31] * len(d.tensors)))),
    "packed_counts": ("torch_dist", packed(lambda d: setattr(d.tensor("w"), "count", (1 << 32) - 1))),
    "packed_axes": ("torch_dist", packed(lambda d: setattr(d.tensor("w"), "ndim", 255))),
    "packed_checksum": ("torch_dist", packed(lambda d: setattr(d.tensor("w"), "checksum", 0))),
    "packed_padding": ("torch_dist", packed(lambda d: setattr(d, "padding", bytes(1 << 12)))),
    "packed_more_behind": ("torch_dist", packed(lambda d: setattr(d, "behind", bytes(64)))),
    "packed_version_0": ("torch_dist", packed(lambda d: setattr(d, "version", 0))),
    "packed_version_2": ("torch_dist", packed(lambda d: setattr(d, "version", 2))),
    "packed_file_twice": ("torch_dist", packed(lambda d: d.files.append(d.files[0]))),
    "packed_no_index": ("torch_dist", raw("index.bin", b"")),
    "packed_json": ("torch_dist", raw("index.bin", '{"xxh3_64":"')),
    "packed_zeros": ("torch_dist", raw("index.bin", bytes(4096))),
}  # fmt: skip


def sealed_holes(path: Path) -> None:
    """Let the manifest say of an index of 8 GiB of nothing that it is right."""
    nbytes = 1 << 33
    os.truncate(path / "index.bin", nbytes)
    data = bytes(BLOCK_NBYTES)
    blocks = struct.pack("<Q", digest(data)) * (nbytes // BLOCK_NBYTES)
    document = document_of(path / "manifest.json")
    document["files"]["index.bin"] = {
        "nbytes": nbytes, "blocks": base64.b64encode(blocks).decode(),
    }  # fmt: skip
    (path / "manifest.json").write_bytes(with_seal(json.dumps(document)))


def swap_object(path: Path) -> None:
    """Put a pickle into the document of a sharded object."""
    found = parsed((path / "index.bin").read_bytes())
    one = next(tensor for tensor in found.tensors if tensor.role == 1)
    (row,) = one.rows
    (nbytes,) = row.shape
    name = found.files[row.file].decode()
    text = '{"version": 1, "tensors": 0, "document": {"$pickle": 1}}'.ljust(nbytes)
    data = bytearray((path / name).read_bytes())
    data[row.position : row.position + nbytes] = text[:nbytes].encode()
    (path / name).write_bytes(data)
    seal(path)


STATIC |= {
    "overlapping_chunks": ("zarr2", index(overlap)),
    "box_outside": ("zarr2", index(lambda d: d["tensors"]["w"]["boxes"][0].__setitem__(0, [3, 0]))),
    "other_dtype": ("zarr2", index(lambda d: d["tensors"]["w"].update(dtype="load"))),
    "other_role": ("zarr2", index(lambda d: d["tensors"]["w"].update(role="code"))),
    "gigantic_zarr": ("zarr2", index(lambda d: d["tensors"]["w"].update(shape=[1 << 62, 2]))),
    "many_axes": ("zarr2", index(lambda d: d["tensors"]["w"].update(shape=[1] * 10_000))),
    "tensors_a_list": ("zarr2", index(lambda d: d.update(tensors=[]))),
    "index_twice": ("zarr2", index_text(lambda t: t.replace('"w": {', '"w": {}, "w": {', 1))),
    "index_nan": ("zarr2", index_text(lambda t: t.replace('"version": 1', '"version": NaN', 1))),
    "index_infinity": ("zarr2", index_text(lambda t: t.replace('"version": 1', '"version": 1e400', 1))),
    "index_digits": ("zarr2", index_text(lambda t: t.replace('"version": 1', '"version": ' + "9" * 50_000, 1))),
    "index_deep": ("zarr2", index_text(lambda t: t.replace('"version": 1', '"version": ' + "[" * 100_000, 1))),
    "index_no_utf8": ("zarr2", raw("index.json", b'{"xxh3_64":"\xff')),
    "manifest_twice": ("torch_dist", manifest_text(lambda t: t.replace('"index.bin": {', '"index.bin": {}, "index.bin": {', 1))),
    "manifest_nan": ("torch_dist", manifest_text(lambda t: t.replace('"world_size": 1', '"world_size": NaN', 1))),
    "manifest_bool": ("torch_dist", manifest(lambda d: d.update(world_size=True))),
    "manifest_deep": ("torch_dist", manifest_text(lambda t: t.replace('"version": 2', '"version": ' + "[" * 100_000, 1))),
    "manifest_algorithm": ("torch_dist", manifest(lambda d: d.update(checksum={"algorithm": "none"}))),
    "manifest_blocks": ("torch_dist", manifest(lambda d: d["files"]["index.bin"].update(blocks="AAAA"))),
    "manifest_no_blocks": ("torch_dist", manifest(lambda d: d["files"]["index.bin"].pop("blocks"))),
    "manifest_of_nothing": ("torch_dist", manifest(lambda d: d.update(files={}))),
    "manifest_no_index": ("torch_dist", manifest(lambda d: d["files"].pop("index.bin"))),
    "manifest_names_nfc": ("torch_dist", manifest(lambda d: d["files"].update({"\u00e9": d["files"]["index.bin"], "e\u0301": d["files"]["index.bin"]}))),
    "manifest_names_rtl": ("torch_dist", manifest(lambda d: d["files"].update({"\u202enib.xedni": d["files"]["index.bin"]}))),
    "manifest_names_zero_width": ("torch_dist", manifest(lambda d: d["files"].update({"index\u200b.bin": d["files"]["index.bin"]}))),
    "marker_twice": ("torch_dist", raw("metadata.json", '{"sharded_backend": "a", "sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "json", "common_backend_version": 1}')),
    "marker_bool": ("torch_dist", raw("metadata.json", '{"sharded_backend": "torch_dist", "sharded_backend_version": true, "common_backend": "json", "common_backend_version": 1}')),
    "marker_float": ("torch_dist", raw("metadata.json", '{"sharded_backend": "torch_dist", "sharded_backend_version": 1.0, "common_backend": "json", "common_backend_version": 1}')),
    "marker_bom": ("torch_dist", raw("metadata.json", b'\xef\xbb\xbf{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "json", "common_backend_version": 1}')),
    "marker_utf16": ("torch_dist", raw("metadata.json", '{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "json", "common_backend_version": 1}'.encode("utf-16"))),
    "marker_no_object": ("torch_dist", raw("metadata.json", "[]")),
    "marker_deep": ("torch_dist", raw("metadata.json", "[" * 100_000)),
    "marker_other_backend": ("torch_dist", raw("metadata.json", '{"sharded_backend": "os", "sharded_backend_version": 1, "common_backend": "json", "common_backend_version": 1}')),
    "marker_module": ("torch_dist", raw("metadata.json", '{"sharded_backend": "os:system", "sharded_backend_version": 1, "common_backend": "json", "common_backend_version": 1}')),
    "common_twice": ("torch_dist", raw("common.json", '{"version": 1, "tensors": 0, "document": {"step": 7, "step": 8}}')),
    "common_nan": ("torch_dist", raw("common.json", '{"version": 1, "tensors": 0, "document": {"step": NaN}}')),
    "common_infinity": ("torch_dist", raw("common.json", '{"version": 1, "tensors": 0, "document": {"step": 1e400}}')),
    "common_deep": ("torch_dist", raw("common.json", '{"version": 1, "tensors": 0, "document": ' + '{"a":' * 50_000)),
    "common_deep_lists": ("torch_dist", raw("common.json", '{"version": 1, "tensors": 0, "document": ' + "[" * 500 + "]" * 500 + "}")),
    "common_no_object": ("torch_dist", raw("common.json", "7")),
    "common_no_dict": ("torch_dist", common([1])),
    "common_version_bool": ("torch_dist", common({"step": 7}, 0, True)),
    "common_version_float": ("torch_dist", common({"step": 7}, 0, 1.0)),
    "common_unknown_tag": ("torch_dist", common({"step": {"$code": "import os"}})),
    "common_own_tag": ("torch_dist", common({"step": {"$own": ["os.system", f"touch {CANARY}"]}})),
    "common_pickle": ("torch_dist", common({"step": {"$pickle": {"type": "int", "data": "Y29zCnN5c3RlbQooVnRvdWNoIGhvc3RpbGVfY2FuYXJ5CnRSLg=="}}})),
    "common_pickle_inside": ("torch_dist", common({"step": {"$own": ["x", {"$tuple": [{"$pickle": {"type": "int", "data": ""}}]}]}})),
    "common_pickle_malformed": ("torch_dist", common({"step": {"$pickle": 1}})),
    "common_enum_os": ("torch_dist", common({"step": 7, "e": {"$enum": ["os", "system", ["x"], f"touch {CANARY}"]}})),
    "common_type": ("torch_dist", common({"step": {"$type": "subprocess.Popen"}})),
    "common_gigantic_array": ("torch_dist", common({"step": {"$ndarray": ["<f8", [1 << 40], {"$bytes": ""}]}})),
    "common_gigantic_sparse": ("torch_dist", common({"step": {"$sparse": [1, 2, [1 << 40], True]}})),
    "common_layout": ("torch_dist", common({"dist_ckpt": 3, "models": [], "extra_state": 1, "optimizers": [], "tied": 5, "common": 1})),
    "object_pickle": ("torch_dist", swap_object),
}  # fmt: skip


def metadata_paths(metadata: Any) -> None:
    metadata.planner_data = {"o.a": ("o",) * 5000, "w": ("w", 1 << 40)}


def metadata_lists(metadata: Any) -> None:
    metadata.planner_data["o.a"] = ("o", 1 << 19)


def shared_chunks(metadata: Any) -> None:
    """Let 2,000 keys share one list of 2,000 chunks, each of which refers to the same."""
    entry = metadata.state_dict_metadata["w"]
    entry.size = torch.Size([1 << 40, 2])
    entry.chunks[:] = entry.chunks * 2000
    for i in range(2000):
        metadata.state_dict_metadata[f"k{i}"] = entry


def one_record(metadata: Any) -> None:
    """Let 2,000 tensors be one record."""
    place = next(one for one in metadata.storage_data if one.fqn == "w")
    entry = metadata.state_dict_metadata["w"]
    for i in range(2000):
        metadata.state_dict_metadata[f"k{i}"] = entry
        other = type(place)(f"k{i}", place.offset, 0)
        metadata.storage_data[other] = metadata.storage_data[place]


STATIC |= {
    "metadata_one_record": ("dcp", metadata_of(one_record)),
    "metadata_long_path": ("dcp", metadata_of(metadata_paths)),
    "metadata_long_list": ("dcp", metadata_of(metadata_lists)),
    "metadata_shared_chunks": ("dcp", metadata_of(shared_chunks)),
    "metadata_transform": ("dcp", info_of(transform_descriptors=["zstd"])),
    "metadata_length": ("dcp", info_of(length=1 << 40)),
    "metadata_no_storage": ("dcp", metadata_of(lambda m: m.storage_data.clear())),
    "metadata_key": ("dcp", metadata_of(lambda m: m.state_dict_metadata.update({3: 4}))),
    "metadata_attributes": ("dcp", metadata_of(lambda m: m.__dict__.update(__class__="os"))),
}


# -- what git cannot keep, or what is long


def linked(name: str, target: str) -> Change:
    """Return what puts a link in the place of a file; what it leads to is an honest copy."""

    def apply(path: Path) -> None:
        outside = path.parent / f"{path.name}.outside"
        shutil.copytree(path, outside, symlinks=True)
        file = path / name
        shutil.rmtree(file) if file.is_dir() else file.unlink()
        file.symlink_to(target.format(outside=outside.name, name=name, absolute=outside))

    return apply


def pipe(name: str) -> Change:
    def apply(path: Path) -> None:
        (path / name).unlink()
        os.mkfifo(path / name)

    return apply


def folder(name: str) -> Change:
    def apply(path: Path) -> None:
        (path / name).unlink()
        (path / name).mkdir()

    return apply


def listening(name: str) -> Change:
    def apply(path: Path) -> None:
        (path / name).unlink()
        here = Path.cwd()
        os.chdir(path)  # names of sockets are short
        try:
            with socket.socket(socket.AF_UNIX) as one:
                one.bind(name)
        finally:
            os.chdir(here)

    return apply


for _name in ("metadata.json", "manifest.json", "index.bin", "common.json", "__0_0.distcp"):
    LIVE[f"link_out_{_name}"] = ("torch_dist", linked(_name, "../{outside}/{name}"))
    LIVE[f"link_absolute_{_name}"] = ("torch_dist", linked(_name, "{absolute}/{name}"))
    LIVE[f"link_to_device_{_name}"] = ("torch_dist", linked(_name, "/dev/zero"))
    LIVE[f"link_loop_{_name}"] = ("torch_dist", linked(_name, "{name}"))
    LIVE[f"pipe_{_name}"] = ("torch_dist", pipe(_name))
    LIVE[f"folder_{_name}"] = ("torch_dist", folder(_name))
    LIVE[f"socket_{_name}"] = ("torch_dist", listening(_name))
for _name in (".metadata", "common.pt", "__0_0.distcp"):
    LIVE[f"foreign_link_out_{_name}"] = ("mcore", linked(_name, "../{outside}/{name}"))
    LIVE[f"foreign_pipe_{_name}"] = ("mcore", pipe(_name))
for _kind in ("zarr1", "zarr2", "foreign_zarr"):
    LIVE[f"{_kind}_link_of_array"] = (_kind, linked("w", "../{outside}/{name}"))
    _array = "w/zarr.json" if _kind == "zarr2" else "w/.zarray"
    LIVE[f"{_kind}_link_of_document"] = (_kind, linked(_array, "../../{outside}/{name}"))
    LIVE[f"{_kind}_pipe"] = (_kind, pipe(_array))
    _chunk = "w/c.0.0" if _kind == "zarr2" else "w/0.0"
    LIVE[f"{_kind}_link_of_chunk"] = (_kind, linked(_chunk, "../../{outside}/{name}"))
    LIVE[f"{_kind}_pipe_of_chunk"] = (_kind, pipe(_chunk))


def long_document(path: Path) -> None:
    (path / "w/.zarray").write_text("[" + "0," * 10_000_000)


def many_files(document: dict[str, Any]) -> None:
    one = document["files"]["index.bin"]
    document["files"].update({f"f{i}": one for i in range(5_000)})


LIVE |= {
    "manifest_of_5000_files": ("torch_dist", manifest(many_files)),
    "common_of_300000_keys": (
        "torch_dist", common({"step": 7, **{f"k{i}": i for i in range(300_000)}}),
    ),
    "common_twice_in_300000": (
        "torch_dist",
        raw("common.json", '{"version":1,"tensors":0,"document":{'
            + ",".join(f'"k{i}":0' for i in range(300_000)) + ',"k299999":0}}'),
    ),
    "zarr_of_20_mb": ("foreign_zarr", long_document),
    "common_pt_of_holes": ("mcore", lambda path: os.truncate(path / "common.pt", 1 << 33)),
    "metadata_of_holes": ("dcp", lambda path: os.truncate(path / ".metadata", 1 << 33)),
    "index_of_holes": ("torch_dist", lambda path: os.truncate(path / "index.bin", 1 << 33)),
    "zarr_index_of_holes": ("zarr2", lambda path: os.truncate(path / "index.json", 1 << 33)),
    "packed_sealed_holes": ("torch_dist", sealed_holes),
    "packed_10000_boxes": ("torch_dist", packed(packed_diagonal)),
    "packed_1000000_files": (
        "torch_dist",
        packed(lambda d: (d.files.extend([b""] * 1_000_000), setattr(d, "padding", b""))),
    ),
    "manifest_of_holes": ("torch_dist", lambda path: os.truncate(path / "manifest.json", 1 << 33)),
}  # fmt: skip


def make_live(into: Path) -> None:
    """Make the cases that are not kept."""
    for name, (kind, change) in LIVE.items():
        shutil.copytree(HERE / "honest" / kind, into / name)
        change(into / name)


def assemble(name: str, into: Path) -> None:
    """Make a case that is kept: the honest checkpoint with what is changed."""
    shutil.copytree(HERE / "honest" / STATIC[name][0], into)
    shutil.copytree(HERE / "cases" / name, into, dirs_exist_ok=True)


def write_honest(into: Path) -> None:
    """Write an honest checkpoint of each kind."""
    for kind in KINDS:
        base(kind, into / kind)


def write_cases(honest: Path, into: Path) -> None:
    """Write of each case what is not as in the honest checkpoint."""
    for name, (kind, change) in STATIC.items():
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch, name)
            shutil.copytree(honest / kind, path)
            change(path)
            for file in sorted(one for one in path.rglob("*") if one.is_file()):
                relative = file.relative_to(path)
                data, old = file.read_bytes(), honest / kind / relative
                if not old.exists() or old.read_bytes() != data:
                    (into / name / relative).parent.mkdir(parents=True, exist_ok=True)
                    (into / name / relative).write_bytes(data)


def main() -> None:
    for folder_name in ("honest", "cases"):
        shutil.rmtree(HERE / folder_name, ignore_errors=True)
    write_honest(HERE / "honest")
    write_cases(HERE / "honest", HERE / "cases")
    print(f"{len(STATIC)} cases in {HERE}", file=sys.stderr)


if __name__ == "__main__":
    main()
