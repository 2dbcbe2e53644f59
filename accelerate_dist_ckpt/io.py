"""What a user registers with an Accelerator: the choices, and nothing that changes.

Here: ``DistCkptIO``. Not here: where a choice may come from (``dist_ckpt.config``), or what it does
(``saving``, ``loading``). Made on every rank, with the same choices.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias, Unpack

from dist_ckpt.config import DistCkptConfig, load_config
from dist_ckpt.config.arguments import takes_fields
from dist_ckpt.config.fields import ConfigFields
from dist_ckpt.errors import ConfigError
from dist_ckpt.options import LoadOptions, SaveOptions
from dist_ckpt.types import PathLike

__all__ = ["DistCkptIO", "OnUnsupported"]

OnUnsupported: TypeAlias = Literal["native", "raise"]


@takes_fields
class DistCkptIO:
    """How an Accelerator's checkpoints are written and read.

    Register it with ``accelerator.register_checkpoint_io``. All arguments but the last two are the
    fields of ``dist_ckpt.config.DistCkptConfig``; what is not given comes from the environment
    (``DIST_CKPT_<FIELD>``), from the YAML file that ``DIST_CKPT_CONFIG`` names, or is the default.
    It holds choices only: one may be registered with several Accelerators, pickled and copied.

    Args:
        **fields: Those of ``dist_ckpt.config.DistCkptConfig``.
        on_unsupported: With DeepSpeed, Megatron-LM and XLA, which own their checkpoints:
            ``native`` leaves the call to Accelerate with a warning, ``raise`` refuses it.
        lone_rank_timeout_secs: How long rank 0 waits in ``save_state`` for the others before it
            concludes that it was called on rank 0 only.

    Raises:
        ConfigError: An unknown key or a wrong value, with its place.
    """

    config: DistCkptConfig
    on_unsupported: OnUnsupported
    lone_rank_timeout_secs: float

    def __init__(
        self,
        *,
        on_unsupported: OnUnsupported = "native",
        lone_rank_timeout_secs: float = 30.0,
        **fields: Unpack[ConfigFields],
    ) -> None:
        """Merge arguments, environment and YAML into one configuration."""
        self._choose(load_config(**fields), on_unsupported, lone_rank_timeout_secs)

    @classmethod
    def from_yaml(
        cls,
        path: PathLike,
        *,
        on_unsupported: OnUnsupported = "native",
        lone_rank_timeout_secs: float = 30.0,
        **fields: Unpack[ConfigFields],
    ) -> DistCkptIO:
        """Return one with the configuration of a YAML file; ``fields`` go before it.

        Raises:
            ConfigError: No such file, an unknown key or a wrong value, with its place.
        """
        made = cls.__new__(cls)
        config = load_config(path, **fields)
        made._choose(config, on_unsupported, lone_rank_timeout_secs)  # noqa: SLF001 - of this class
        return made

    def _choose(
        self, config: DistCkptConfig, on_unsupported: str, lone_rank_timeout_secs: float
    ) -> None:
        if on_unsupported not in {"native", "raise"}:
            raise ConfigError(
                "argument 'on_unsupported': expected 'native' or 'raise', "
                f"found {on_unsupported!r}."
            )
        if not lone_rank_timeout_secs > 0:
            raise ConfigError(
                "argument 'lone_rank_timeout_secs': expected more than 0, "
                f"found {lone_rank_timeout_secs!r}."
            )
        self.config = config
        self.on_unsupported = "raise" if on_unsupported == "raise" else "native"
        self.lone_rank_timeout_secs = lone_rank_timeout_secs

    def __repr__(self) -> str:
        """Return the choices as one would write them."""
        return (
            f"DistCkptIO({self.config!r}, on_unsupported={self.on_unsupported!r}, "
            f"lone_rank_timeout_secs={self.lone_rank_timeout_secs!r})"
        )

    def save_options(self, *, staging_dir: Path, include_dir: Path | None) -> SaveOptions:
        """Return the choices of one save; a user's files at the target are kept."""
        return SaveOptions(
            thread_count=self.config.thread_count,
            timeout_secs=self.config.timeout_secs,
            verify_sharding=self.config.verify_sharding,
            backend=self.config.backend,
            page_cache=self.config.page_cache,
            replace="any",
            staging_dir=staging_dir,
            include_dir=include_dir,
        )

    def load_options(self) -> LoadOptions:
        """Return the choices of one load."""
        return LoadOptions(
            thread_count=self.config.thread_count,
            timeout_secs=self.config.timeout_secs,
            cast=self.config.cast,
            verify=self.config.verify,
            allow_pickle=self.config.allow_pickle,
        )
