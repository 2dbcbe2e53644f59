"""How a checkpoint is laid out in files: one package a format.

Here: torch_dist. Not here: where the bytes live (``storage``), when they count (``_staging_pool``).
"""
