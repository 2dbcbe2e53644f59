"""The files of torch.distributed.checkpoint (DCP), written without its writer.

Here: ``records`` (one tensor as a ``torch.save`` record), ``write``, ``read``, ``metadata`` (the
``.metadata`` file). Not here: our own index (``_sharding.index``), the commit (``_staging_pool``).

Data files are named ``__{rank}_{n}.distcp`` and hold one record for each chunk, as
``torch.distributed.checkpoint.FileSystemReader`` (torch 2.13) expects them.
"""
