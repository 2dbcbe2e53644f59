"""Do the ranks of a save have the same common part.

Here: digests of its values, and what is logged where they differ. Not here: when that is looked at
(``_saving``). Rank 0's part is stored, whatever is found.
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
    """Return what is compared: what ``preprocess`` makes of a copy; tensors are not copied.

    Raises:
        ConfigError: It returns no dict.
    """
    if preprocess is None:
        return common
    tensors = {id(one): one for _, one in nested_items_with_path(common) if _is_tensor(one)}
    found = preprocess(copy.deepcopy(common, dict(tensors)))
    if not isinstance(found, dict):
        raise ConfigError(
            "preprocess_common_before_consistancy_check returned a "
            f"{type(found).__name__}, expected the state dict to compare."
        )
    return found


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def digest_of(common: StateDict) -> bytes:
    """Return 16 bytes that are equal for equal parts; equal values may have two digests.

    Never raises: what cannot be compared is no reason to fail a save.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        _feed(digest, common, set())
    except Exception:  # of any class of the user's
        logger.debug("the common part cannot be compared", exc_info=True)
        return bytes(16)
    return digest.digest()


def _feed(digest: Any, value: Any, inside: set[int]) -> None:
    """Add a value, so that neither order of sets and dicts nor addresses count.

    ``inside`` has the ids of the values that this one stands in: one of them ends here.
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
        for one in value:
            _feed(digest, one, inside)
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
        for one in parts:
            _feed_tensor(digest, one)
        return
    digest.update(f"{tuple(tensor.shape)}".encode())
    if tensor.numel() and not tensor.is_meta:
        plain = tensor.cpu().resolve_conj().resolve_neg().contiguous()
        digest.update(plain.reshape(-1).view(torch.uint8).numpy())


def compare_common(comm: Communicator, common: StateDict) -> None:
    """Find out where ranks differ from rank 0, whose values they get, and log it. Collective.

    Rank 0 logs one warning with all ranks and places; a rank that differs logs its own.
    """
    packed = comm.broadcast("comparing common parts", lambda: _packed(common))
    found = _found(packed, common) if comm.rank else ""

    def of_all(lines: Sequence[str]) -> str:
        return shortened([f"rank {rank}: {one}" for rank, one in enumerate(lines) if one])

    told = comm.map_reduce("telling where common parts differ", lambda: found, of_all)
    if told and (comm.rank == 0 or found):
        logger.warning(
            "the common parts of the state dict differ, rank 0's is stored. %s",
            told if comm.rank == 0 else f"rank {comm.rank}: {found}",
        )


def _packed(common: StateDict) -> bytes | None:
    """Return the part for the other processes of this job; None if it has what is not picklable."""
    try:
        return pickle.dumps(common)
    except Exception:  # noqa: BLE001 - of any class of the user's
        return None


def _found(packed: bytes | None, common: StateDict) -> str:
    """Return where this rank's part differs from a packed one; nothing if it does not."""
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
    told = []
    if only_theirs:
        told.append(f"only on rank 0: {shortened(list(map(_path, only_theirs)))}")
    if only_own:
        told.append(f"not on rank 0: {shortened(list(map(_path, only_own)))}")
    if mismatch:
        told.append(f"other values: {shortened([_path(path) for path, *_ in mismatch])}")
    return ", ".join(told)


def _path(path: tuple[Any, ...]) -> str:
    return repr(".".join(map(str, path)))
