"""The format zarr: each tensor an array directory that other tools read by themselves.

Here: zarr v2 as Megatron-Core wrote it (``("zarr", 1)``) and zarr v3 with shards (``("zarr", 2)``);
plain bytes go through the store, all else through TensorStore. Not here: the way of a save or a
load (``_saving.execute``, ``_loading.execute``).
"""
