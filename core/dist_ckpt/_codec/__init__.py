"""Typed JSON: python values to a document of JSON types and back, with their types kept.

Here: ``encode``, ``decode`` and the table of types that need no pickle. Not here: where the
document and its tensors are stored (``_formats``), nor tensors of the sharded part (``mapping``).
Called on the rank that writes or reads the values; no step is collective.

The document: ``None``, booleans, strings, finite floats and 64-bit integers stand for themselves,
lists are arrays, dicts with string keys are objects (in their order: do not sort keys when writing
the JSON). Everything else is an object with one key, ``{"$tag": payload}``, where the payload is
a document again; a key that starts with ``$`` is escaped by another ``$``. Tensors are kept beside
the document and stand in it by number.

Types are matched exactly: an enum, a named tuple or any other class that the table does not list
becomes ``{"$pickle": ...}``, which ``decode`` refuses unless it is told to trust the source. What
is not kept: containers shared by two places come back twice (a shared tensor comes back once), and
a tensor's autograd state, except ``requires_grad`` of a parameter.
"""

from __future__ import annotations

from dist_ckpt._codec.decoder import decode, iter_pickled
from dist_ckpt._codec.encoder import Encoded, encode
from dist_ckpt._codec.names import MAX_DEPTH

__all__ = ["MAX_DEPTH", "Encoded", "decode", "encode", "iter_pickled"]
