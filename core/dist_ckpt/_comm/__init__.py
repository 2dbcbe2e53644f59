"""The one door to other ranks: exception-robust exchanges that name who failed or is missing.

Here: communicators and the choice of one. Not here: what is exchanged (``validation``,
``_planning``, ``_engine.commit``). Called on all ranks alike, from the thread that saves or loads.
"""

from __future__ import annotations

from dist_ckpt._comm.single import SingleCommunicator
from dist_ckpt._comm.torch_dist import default_communicator, group_communicator

__all__ = ["SingleCommunicator", "default_communicator", "group_communicator"]
