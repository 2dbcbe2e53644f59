"""The DCP reader that keeps metadata, under the name that Megatron-Core's users know.

Here: ``CachedMetadataFileSystemReader``. Not here: the class itself
(``_formats.torch_dist.cached_reader``); importing this loads torch.distributed.checkpoint.
"""

from __future__ import annotations

from dist_ckpt._formats.torch_dist.cached_reader import CachedMetadataFileSystemReader

__all__ = ["CachedMetadataFileSystemReader"]
