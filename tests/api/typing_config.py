"""What a type checker sees of the configuration. mypy reads this with the packages; nothing runs it.

A line that must be refused has its error in a comment: mypy reports a comment that is not needed.
"""

from __future__ import annotations

from typing import assert_type

import accelerate_dist_ckpt
import lightning_dist_ckpt
from dist_ckpt.config import load_config

plugin = lightning_dist_ckpt.DistCkptIO(thread_count=4, timeout_secs=60, backend="zarr", cast=None)
assert_type(plugin.config.thread_count, int)
assert_type(plugin.config.staging_budget_mib, int | None)
lightning_dist_ckpt.DistCkptIO(tread_count=4)  # type: ignore[call-arg]
lightning_dist_ckpt.DistCkptIO(thread_count="4")  # type: ignore[arg-type]
lightning_dist_ckpt.DistCkptIO(backend="zip")  # type: ignore[arg-type]

registered = accelerate_dist_ckpt.DistCkptIO(async_save=True, on_unsupported="raise")
assert_type(registered.config.async_save, bool)
accelerate_dist_ckpt.DistCkptIO(asink_save=True)  # type: ignore[call-arg]
accelerate_dist_ckpt.DistCkptIO(worker="fork")  # type: ignore[arg-type]
accelerate_dist_ckpt.DistCkptIO(on_unsupported="maybe")  # type: ignore[arg-type]
accelerate_dist_ckpt.DistCkptIO.from_yaml("a.yaml", drain_timeout_secs=5, cast="error")
accelerate_dist_ckpt.DistCkptIO.from_yaml("a.yaml", drain_timeout=5)  # type: ignore[call-arg]

load_config({"thread_count": 3}, overlap=True)
load_config(overlap="yes")  # type: ignore[arg-type]
load_config(overlapp=True)  # type: ignore[call-arg]
