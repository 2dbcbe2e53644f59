"""The DCP writer for saves in the background, under the name that Megatron-Core's users know.

Here: ``FileSystemWriterAsync``. Not here: the class itself (``_formats.torch_dist.writer_async``);
importing this module loads torch.distributed.checkpoint.
"""

from __future__ import annotations

from dist_ckpt._formats.torch_dist.writer_async import FileSystemWriterAsync

__all__ = ["FileSystemWriterAsync"]
