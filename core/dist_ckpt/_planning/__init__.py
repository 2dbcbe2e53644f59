"""Who writes what and what is read from where: pure functions over frozen data.

Here: shard descriptions, the distribution of writes, the checkpoint index, the load plan. Not here:
bytes (``_engine``), ranks (``_comm``), the on-disk layout (``_formats``). Save planning runs on
rank 0 over the descriptions of all ranks; load planning runs on each rank for itself.
"""
