"""Typed JSON: python values to a document of JSON types and back, with their types kept.

Here: ``encode``, ``decode`` and the table of types that need no pickle. Not here: where the
document and its tensors are stored (``_formats``), nor tensors of the sharded part (``mapping``).
Called on the rank that writes or reads the values; no step is collective.

The document: ``None``, booleans, strings, finite floats and 64-bit integers stand for themselves,
lists are arrays, dicts with string keys are objects (in their order: do not sort keys when writing
the JSON). Everything else is an object with one key, ``{"$tag": payload}``, where the payload is
a document again; a key that starts with ``$`` is escaped by another ``$``. Tensors are kept beside
the document and stand in it by number.

Types are matched exactly. Members of enums and named tuples stand there by the names of their
classes, which a load looks for among what the program has imported, and never imports or calls;
where they are not there, a ``ForeignValue`` stands for the value. Users register types of their own
(``dist_ckpt.types.register_value_type``). Any other class, a user's subclass of dict or str too,
becomes ``{"$pickle": ...}``, which ``decode`` refuses unless it is told to trust the source. What
is not kept: containers shared by two places come back twice (a shared tensor comes back once), and
a tensor's autograd state, except ``requires_grad`` of a parameter.
"""

from __future__ import annotations

from dist_ckpt._codec.decoder import decode, iter_pickled
from dist_ckpt._codec.encoder import Encoded, encode
from dist_ckpt._codec.names import MAX_DEPTH

__all__ = ["MAX_DEPTH", "Encoded", "decode", "encode", "iter_pickled"]
