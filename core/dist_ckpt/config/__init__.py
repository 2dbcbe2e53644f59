"""Configuration: one frozen model, and the one way to load it.

Here: the model (``models``) and where its values come from (``load``). Not here: what the values
do; objects are given a config and never read one. Called by the adapters, on every rank alike.
"""

from __future__ import annotations

from dist_ckpt.config.load import load_config
from dist_ckpt.config.models import DistCkptConfig

__all__ = ["DistCkptConfig", "load_config"]
