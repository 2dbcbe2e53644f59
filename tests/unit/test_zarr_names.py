"""Each key has a directory of its own, which no other key, chunk or document can meet."""

from __future__ import annotations

import pytest

from dist_ckpt._formats.zarr.names import chunk_name, paths_of_keys, pieces_name
from dist_ckpt.storage.base import checked_name

SAFE = ["weight", "decoder.layers.0.mlp.weight", "a/b/c", "models.0/part_1", "common/part_0", "x y"]
UNSAFE = [
    "",
    ".",
    "..",
    "../up",
    "/absolute",
    "a//b",
    "a/",
    "nul\0",
    "line\nfeed",
    "percent%41",
    ".hidden",
    "a/.zarray",
    "index.json",
    "common.json",
    "manifest.json",
    "metadata.json",
    "a/zarr.json",
    "common.pt",
    "w.sync",
    "rng/shard_0_1.pt",
    "ключ",
    "lone \ud800",
    "x" * 201,
    "y/" + "ü" * 300,
    "/".join("z" * 100 for _ in range(50)),
    "trailing ",
]


@pytest.mark.parametrize("key", SAFE)
def test_a_safe_key_is_its_own_path(key: str) -> None:
    """Nested where it has slashes."""
    assert paths_of_keys([key]) == {key: key}


@pytest.mark.parametrize("key", UNSAFE, ids=range(len(UNSAFE)))
def test_an_unsafe_key_becomes_one_short_plain_name(key: str) -> None:
    """Never a document, a hidden file, or a name that a file system refuses."""
    path = paths_of_keys([key])[key]

    assert checked_name(path) == path
    assert "/" not in path
    assert not path.startswith(".")
    assert not path.endswith((".json", ".pt", ".sync"))
    assert len(path.encode("ascii")) <= 200


def test_keys_never_share_a_path() -> None:
    """Escaped names differ from each other and from keys that look like them."""
    keys = [*SAFE, *UNSAFE, *(quoted for key in UNSAFE for quoted in [paths_of_keys([key])[key]])]
    paths = paths_of_keys(keys)

    assert len(set(paths.values())) == len(set(keys))


def test_no_array_lies_within_another() -> None:
    """A key ``w/0.0`` beside a key ``w`` would be a chunk of it."""
    paths = paths_of_keys(["w", "w/0.0", "w/x/y", "v/x"])

    assert paths == {"w": "w", "w/0.0": "w%2F0.0", "w/x/y": "w%2Fx%2Fy", "v/x": "v/x"}


def test_chunk_names_are_those_of_zarr() -> None:
    """Numbers with dots, in v3 behind a ``c``."""
    assert [chunk_name((1, 20), 2), chunk_name((), 2)] == ["1.20", "0"]
    assert [chunk_name((1, 20), 3), chunk_name((), 3)] == ["c.1.20", "c"]


def test_pieces_have_a_name_that_no_key_gets() -> None:
    """It begins with a dot."""
    name = pieces_name(3)

    assert paths_of_keys([name])[name] != name
