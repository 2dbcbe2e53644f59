"""Moving bytes and making them count: transfer in threads, commit by rename.

Here: transfers, staging memory and copies into it, the commit protocol. Not here: what to move
(``_planning``) and in which layout (``_formats``). Runs on every rank; the commit itself on rank 0.
"""
