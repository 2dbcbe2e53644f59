"""What a user registers with an Accelerator: the choices, and nothing that changes.

Here: ``DistCkptIO``. Not here: where a choice may come from (``dist_ckpt.config``), or what it does
(``saving``, ``loading``). Made on every rank, with the same choices.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeAlias

from dist_ckpt.config import DistCkptConfig, load_config
from dist_ckpt.errors import ConfigError
from dist_ckpt.options import LoadOptions, SaveOptions
from dist_ckpt.types import PathLike

__all__ = ["DistCkptIO", "OnUnsupported"]

OnUnsupported: TypeAlias = Literal["native", "raise"]


class DistCkptIO:
    """How an Accelerator's checkpoints are written and read.

    Register it with ``accelerator.register_checkpoint_io``. All arguments but the last two are the
    fields of ``dist_ckpt.config.DistCkptConfig``; what is not given comes from the environment
    (``DIST_CKPT_<FIELD>``), from the YAML file that ``DIST_CKPT_CONFIG`` names, or is the default.
    It holds choices only: one may be registered with several Accelerators, pickled and copied.

    Args:
        enabled: Whether checkpoints are ours at all; False leaves Accelerate as it is.
        backend: The format on disk: files of torch's DCP, or zarr arrays.
        thread_count: Threads that write or read files, on each rank.
        timeout_secs: How long ranks wait for each other before the missing ones are named.
        allow_pickle: Whether pickled values are loaded. They can run any code: trust the source.
        verify_sharding: Whether a save checks first that the shards cover every tensor once.
        async_save: Whether training goes on while a checkpoint is written.
        overlap: Whether parameters and optimizer state are copied under the next forward and
            backward, too; the optimizer's step waits for the rest.
        worker: Who writes in the background: a process of its own for each rank, or a thread.
        max_in_flight: How many saves may be under way; the next waits.
        staging_budget_mib: Most memory for a copy, in MiB, on each rank and for each save in
            flight; None for what there is.
        drain_timeout_secs: How long to wait at the end for what is in flight.
        events_file: Where to append what happens to saves of both kinds, as JSON lines.
        log_metrics: Whether the trackers get stall, writing time and speed of each save.
        page_cache: Whether the pages of a checkpoint stay in the page cache when it is on disk, so
            that a restart on the same host reads memory; ``auto`` keeps the newest one if it is
            small against the memory that is available.
        cast: What a load does where stored and requested dtype differ: convert, with one warning
            that names keys and dtypes (``allow``), or raise (``error``).
        verify: What a load compares with the checksums: what it reads, everything before anything
            is filled, or nothing.
        verify_newest: How closely a checkpoint is looked at before it counts as the newest one:
            its documents and the sizes of all files, or every byte.
        preemption: Whether SIGTERM leads to one more save and a clean stop.
        grace_secs: How long after SIGTERM the process may go on.
        sweep_after_secs: How old leftovers of this job's dead saves must be to be removed.
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

    def __init__(  # noqa: PLR0913 - one for each field
        self,
        *,
        enabled: bool | None = None,
        backend: Literal["torch_dist", "zarr"] | None = None,
        thread_count: int | None = None,
        timeout_secs: float | None = None,
        allow_pickle: bool | None = None,
        verify_sharding: bool | None = None,
        async_save: bool | None = None,
        overlap: bool | None = None,
        worker: Literal["process", "thread"] | None = None,
        max_in_flight: int | None = None,
        staging_budget_mib: int | None = None,
        drain_timeout_secs: float | None = None,
        events_file: str | None = None,
        log_metrics: bool | None = None,
        page_cache: Literal["auto", "keep", "drop"] | None = None,
        cast: Literal["allow", "error"] | None = None,
        verify: Literal["read", "full", "off"] | None = None,
        verify_newest: Literal["files", "full"] | None = None,
        preemption: bool | None = None,
        grace_secs: float | None = None,
        sweep_after_secs: float | None = None,
        on_unsupported: OnUnsupported = "native",
        lone_rank_timeout_secs: float = 30.0,
    ) -> None:
        """Merge arguments, environment and YAML into one configuration."""
        fields = {
            "enabled": enabled,
            "backend": backend,
            "thread_count": thread_count,
            "timeout_secs": timeout_secs,
            "allow_pickle": allow_pickle,
            "verify_sharding": verify_sharding,
            "async_save": async_save,
            "overlap": overlap,
            "worker": worker,
            "max_in_flight": max_in_flight,
            "staging_budget_mib": staging_budget_mib,
            "drain_timeout_secs": drain_timeout_secs,
            "events_file": events_file,
            "log_metrics": log_metrics,
            "page_cache": page_cache,
            "cast": cast,
            "verify": verify,
            "verify_newest": verify_newest,
            "preemption": preemption,
            "grace_secs": grace_secs,
            "sweep_after_secs": sweep_after_secs,
        }
        self._choose(load_config(None, **fields), on_unsupported, lone_rank_timeout_secs)

    @classmethod
    def from_yaml(
        cls,
        path: PathLike,
        *,
        on_unsupported: OnUnsupported = "native",
        lone_rank_timeout_secs: float = 30.0,
        **fields: Any,
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
