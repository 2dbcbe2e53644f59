"""Alignment, padding and buffer sizes of torch_dist's data files; bytes.

Here: every number that decides where a byte of a data file lies, or through how much memory it
goes. Used as ``sizes.NAME``, so that one assignment changes it for the whole format. Not here: the
checksums' blocks (``storage.checksums``), which the format fixes.

No reader depends on these: a checkpoint says where its payloads are.
"""

from __future__ import annotations

__all__ = [
    "ALIGNMENT",
    "DIRECT_NBYTES",
    "GATHERED_NBYTES",
    "LARGE_ALIGNMENT",
    "LARGE_NBYTES",
    "MAX_RECORD_NBYTES",
    "PAGE_NBYTES",
    "RUN_NBYTES",
]

ALIGNMENT = 64
"""Of a payload in its file, and in its record; a multiple of any element's size."""

LARGE_ALIGNMENT = 4096
"""The same in files for payloads of at least ``LARGE_NBYTES``; a multiple of ``ALIGNMENT``."""

LARGE_NBYTES = 1 << 16

MAX_RECORD_NBYTES = (1 << 32) - (1 << 16)
"""Largest payload: a record's own sizes have 32 bits, and what is around the payload counts too."""

GATHERED_NBYTES = 1 << 20
"""Small records and padding are put together to pieces of this size: a call for each costs more."""

DIRECT_NBYTES = 1 << 17
"""Payloads from this size on are written from the tensor's own memory."""

PAGE_NBYTES = 4096
"""Files begin at multiples of it in staging memory; a multiple of ``ALIGNMENT``."""

RUN_NBYTES = 64 << 20
"""Largest run of staging memory: one is written while the next waits, and progress is told between
them."""
