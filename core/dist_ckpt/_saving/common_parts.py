"""Comparison of the ranks' common parts at a save.

Here: digests of the values, and the warning where they differ. Not here: when they are compared
(``_saving.execute``). Rank 0's part is stored in any case.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dist_ckpt.dict_utils import diff, nested_items_with_path, strided_parts
from dist_ckpt.errors import ConfigError
from dist_ckpt.validation import shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dist_ckpt.types import Communicator, StateDict

__all__ = ["compare_common", "digest_of", "preprocessed"]

logger = logging.getLogger(__name__)


def preprocessed(
    common: StateDict, preprocess: Callable[[StateDict], StateDict] | None
) -> StateDict:
    """Return the dict to compare: the result of ``preprocess`` for a copy that shares tensors.

    Raises:
        ConfigError: It does not return a dict.
    """
    if preprocess is None:
        return common
    leaves = (leaf for _, leaf in nested_items_with_path(common))
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
    compared = preprocess(copy.deepcopy(common, dict(tensors)))
    if not isinstance(compared, dict):
        raise ConfigError(
            "preprocess_common_before_consistancy_check returned a "
            f"{type(compared).__name__}, expected the state dict to compare."
        )
    return compared


def digest_of(common: StateDict) -> bytes:
    """Return 16 bytes that differ if the parts differ, as far as they can be compared.

    Equal parts may have two digests. Never raises: values that cannot be compared are no reason to
    fail a save.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        _feed(digest, common, set())
    except Exception:  # values of the user's classes may raise anything
        logger.debug("the common part cannot be compared", exc_info=True)
        return bytes(16)
    return digest.digest()


def _feed(digest: Any, value: Any, inside: set[int]) -> None:
    """Add a value; neither the order of sets and dicts nor addresses influence the digest.

    ``inside`` has the ids of the containers around this value: a cycle ends at the first of them.
    """
    digest.update(f"<{type(value).__qualname__}>".encode())
    if id(value) in inside:
        return
    inside.add(id(value))
    if isinstance(value, torch.Tensor):
        _feed_tensor(digest, value.detach())
    elif isinstance(value, dict):
        for key in sorted(value, key=repr):
            _feed(digest, key, inside)
            _feed(digest, value[key], inside)
    elif isinstance(value, list | tuple):
        for item in value:
            _feed(digest, item, inside)
    elif isinstance(value, set | frozenset):
        digest.update(repr(sorted(map(repr, value))).encode())
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        digest.update(f"{value.dtype}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        _feed(digest, vars(value), inside)
    else:
        digest.update(repr(value).encode())
    inside.discard(id(value))
    digest.update(b"</>")


def _feed_tensor(digest: Any, tensor: torch.Tensor) -> None:
    """Add dtype, shape and elements; of a tensor that is not plain those of its parts."""
    digest.update(f"{tensor.dtype}{tensor.layout}".encode())
    parts = strided_parts(tensor)
    if parts is not None:
        for part in parts:
            _feed_tensor(digest, part)
        return
    digest.update(f"{tuple(tensor.shape)}".encode())
    if tensor.numel() and not tensor.is_meta:
        plain = tensor.cpu().resolve_conj().resolve_neg().contiguous()
        digest.update(plain.reshape(-1).view(torch.uint8).numpy())


def compare_common(comm: Communicator, common: StateDict) -> None:
    """Log where the ranks' common parts differ from rank 0's. Collective.

    Rank 0 logs one warning with all ranks and places; a rank that differs logs its own.
    """
    packed = comm.broadcast("comparing common parts", lambda: _packed(common))
    own = _differences_to(packed, common) if comm.rank else ""

    def of_all(lines: Sequence[str]) -> str:
        return shortened([f"rank {rank}: {line}" for rank, line in enumerate(lines) if line])

    every = comm.map_reduce("reporting where common parts differ", lambda: own, of_all)
    if every and (comm.rank == 0 or own):
        logger.warning(
            "the common parts of the state dict differ, rank 0's is stored. %s",
            every if comm.rank == 0 else f"rank {comm.rank}: {own}",
        )


def _packed(common: StateDict) -> bytes | None:
    """Return the pickled part, for the other processes of this job; None if that is impossible."""
    try:
        return pickle.dumps(common)
    except Exception:  # noqa: BLE001 - of any class of the user's
        return None


def _differences_to(packed: bytes | None, common: StateDict) -> str:
    """Return where this rank's part differs from a packed one; empty if they are equal."""
    unknown = "values that cannot be sent to another process may differ"
    if packed is None:
        return unknown
    try:
        theirs = pickle.loads(packed)  # noqa: S301 - of rank 0, not of a checkpoint
    except Exception:  # noqa: BLE001 - of any class of the user's
        return unknown
    return _differences(theirs, common)


def _differences(theirs: StateDict, own: StateDict) -> str:
    only_theirs, only_own, mismatch = diff(theirs, own)
    lines = []
    if only_theirs:
        lines.append(f"only on rank 0: {shortened(list(map(_path, only_theirs)))}")
    if only_own:
        lines.append(f"not on rank 0: {shortened(list(map(_path, only_own)))}")
    if mismatch:
        lines.append(f"other values: {shortened([_path(path) for path, *_ in mismatch])}")
    return ", ".join(lines)


def _path(path: tuple[Any, ...]) -> str:
    return repr(".".join(map(str, path)))
