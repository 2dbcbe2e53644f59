"""Names under which other ranks may reach the host of this rank.

Here: that list. Not here: the server (``_worker.hub``). Local.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress

__all__ = ["hosts_of_this_rank"]


def hosts_of_this_rank() -> list[str]:
    """Return host names and addresses, the most likely one first.

    ``MASTER_ADDR`` is usually the host of rank 0. A wrong name does no harm: clients and server
    prove to each other that they know the job's token.
    """
    names = [os.environ.get("MASTER_ADDR", ""), socket.gethostname()]
    with suppress(OSError):
        names.append(socket.gethostbyname(socket.gethostname()))
    return list(dict.fromkeys(name for name in [*names, "127.0.0.1"] if name))
