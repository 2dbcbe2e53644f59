"""Under which names other ranks may reach this one.

Here: that list. Not here: who listens there. Local.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress

__all__ = ["hosts_of_this_rank"]


def hosts_of_this_rank() -> list[str]:
    """Return host names and addresses, best first.

    ``MASTER_ADDR`` is where the job's ranks meet, as a rule on the host of rank 0. Whoever connects
    asks for a token, so that a name that leads elsewhere does no harm.
    """
    names = [os.environ.get("MASTER_ADDR", ""), socket.gethostname()]
    with suppress(OSError):
        names.append(socket.gethostbyname(socket.gethostname()))
    return list(dict.fromkeys(name for name in [*names, "127.0.0.1"] if name))
