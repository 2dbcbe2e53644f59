"""The state of a training job, in one key space: what the adapters and most users save and load.

Here: models, optimizers, common values and per-rank values -> one sharded state dict, and back into
live objects. Not here: how sharding is found (``derive``), how bytes move (``serialization``). All
of it is collective unless said otherwise.

Keys: ``models.{i}.{name}``, ``optimizers.{j}.state.{state}.{i}.{name}``, ``per_rank``; names are
those of the unwrapped module. They are the same under every layout and framework.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dist_ckpt._comm import default_communicator
from dist_ckpt._comm.outcome import agree, attempt, reduce
from dist_ckpt._formats.documents import check_unchanged
from dist_ckpt._formats.native import new_format
from dist_ckpt._loading.dcp_names import (
    Roots,
    adopt,
    find_roots,
    group_flat,
    is_flat,
    values_beside,
)
from dist_ckpt._loading.execute import (
    LoadRequest,
    read_common,
    read_object,
    read_whole,
    run_load,
    stored_keys,
)
from dist_ckpt._loading.names import Prefixes, find_prefixes, rename
from dist_ckpt._loading.open import check_indexed, open_checkpoint, open_together
from dist_ckpt._saving.describe_live import LiveObjects
from dist_ckpt._saving.in_flight import check_not_in_flight
from dist_ckpt._saving.memory import SaveMemory
from dist_ckpt._saving.request import SaveCall, SaveRequest
from dist_ckpt._saving.save import run_save
from dist_ckpt._sharding.match import describe_unexpected
from dist_ckpt.derive import (
    load_optimizer_state,
    model_layout,
    optimizer_template,
)
from dist_ckpt.derive.document import ModelDocument, read_documents, read_early_sections
from dist_ckpt.derive.model import bare_module, without_wrappers
from dist_ckpt.derive.protocol import own_entries
from dist_ckpt.derive.protocol_load import STORED, merge_reports, plan_load
from dist_ckpt.derive.slots import optimizer_slots, unwrap_optimizer
from dist_ckpt.errors import CheckpointNotFoundError, CorruptedCheckpointError, MismatchError
from dist_ckpt.mapping import ShardedObject, ShardedTensor
from dist_ckpt.options import LoadOptions, SaveOptions, checked_path, path_to_tell
from dist_ckpt.storage.commit import forget_aside, remove_tree
from dist_ckpt.storage.paths import is_link
from dist_ckpt.validation import StrictPolicy

if TYPE_CHECKING:
    from torch import nn

    from dist_ckpt._formats.documents import CheckpointContents
    from dist_ckpt.background import BackgroundSaver
    from dist_ckpt.derive import ModelLayout
    from dist_ckpt.derive.protocol_load import LoadReport
    from dist_ckpt.events import EventSink
    from dist_ckpt.types import Communicator, PathLike, ShardedStateDict, StateDict

__all__ = [
    "STORED",
    "CheckpointView",
    "SaveMemory",
    "TrainingState",
    "is_checkpoint",
    "load_model_and_optimizer",
    "remove_checkpoint",
    "save_model_and_optimizer",
    "save_training_state",
]

logger = logging.getLogger(__name__)

_PER_RANK = "per_rank"
_MODEL_STATE = "model_state"
"""Models' documents: rank 0's in the common part, other ranks' as objects with their rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """What one rank gives to a save.

    Attributes:
        models: Live modules, wrapped or not, in the same order on all ranks.
        optimizers: Live optimizers, likewise.
        common: Values that are the same on all ranks; rank 0's are stored.
        per_rank: This rank's own values (random state, samplers); stored for each rank.
        framework: Who saves: ``lightning``, ``accelerate``, ...
        replicas: Whether plain parameters are equal on all ranks, see ``derive.model_layout``.
        model_values: For model i, a state dict to store in place of the module's own; None or
            absent to store the module's.
    """

    models: Sequence[nn.Module] = ()
    optimizers: Sequence[Any] = ()
    common: StateDict = field(default_factory=dict)
    per_rank: Any = None
    framework: str = ""
    replicas: Literal["equal", "differ"] | None = None
    model_values: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)


def save_training_state(
    checkpoint_dir: PathLike,
    state: TrainingState | Callable[[], TrainingState],
    *,
    options: SaveOptions | None = None,
    communicator: Communicator | None = None,
    saver: BackgroundSaver | None = None,
    on_settled: Callable[[BaseException | None], None] | None = None,
    memory: SaveMemory | None = None,
    sinks: Iterable[EventSink] = (),
) -> None:
    """Save a job's state as one checkpoint directory. Collective.

    Args:
        checkpoint_dir: The directory to make.
        state: What this rank gives; or what returns it, so that a failure to do so on one rank is
            raised on all.
        options: Further choices.
        communicator: The ranks, if not those of the default process group.
        saver: Writes the checkpoint while training goes on: this returns when the state may change.
        on_settled: Called when a background save has ended, on another thread, with None or with
            what failed.
        memory: What the save before has left for this one, and this one leaves for the next: the
            plan is made anew only if something about it has changed. A saver has its own.
        sinks: Take the events of this save, of this rank. A saver has its own.

    Raises:
        CheckpointingException: On every rank, whatever failed on any; nothing is committed then.
        AsyncSaveError: A background save before this one failed; this one does not begin.
    """
    options = options or SaveOptions()
    comm = communicator or default_communicator(timeout_secs=options.timeout_secs)
    descriptions = (saver or memory or SaveMemory()).descriptions

    def build() -> SaveRequest:
        checked_path(checkpoint_dir)  # an invalid path is raised on every rank
        given = state if isinstance(state, TrainingState) else state()
        live, rests, documents = descriptions.describe(
            LiveObjects(
                models=given.models,
                optimizers=given.optimizers,
                replicas=given.replicas,
                model_values=given.model_values,
            )
        )
        tree, fmt = _tree(given, rests, documents, comm), new_format(*options.format)
        return SaveRequest(state_dict=tree, format=fmt, live=live)

    call = SaveCall(
        build=build,
        target=path_to_tell(checkpoint_dir),
        comm=comm,
        options=options,
        check_coverage=options.verify_sharding,
    )
    if saver is None:
        run_save(call, memory, sinks)
    else:
        saver.submit(call, on_settled=on_settled)


def _tree(
    state: TrainingState,
    rests: Sequence[StateDict],
    documents: Sequence[StateDict],
    comm: Communicator,
) -> ShardedStateDict:
    """Return what is stored beside the tensors of live models and optimizers."""
    stored = {str(i): document for i, document in enumerate(documents) if document}
    tree: ShardedStateDict = {
        "dist_ckpt": {"framework": state.framework, "world_size": comm.size},
        _MODEL_STATE: stored,
        "optimizers": {str(j): rest for j, rest in enumerate(rests)},
        "common": state.common,
    }
    if comm.rank != 0 and stored:  # rank 0's documents are in the common part
        key = f"{_MODEL_STATE}.{comm.rank}"
        tree[_MODEL_STATE] = {str(comm.rank): ShardedObject(key, stored, (1,), (0,))}
    if state.per_rank is not None:
        tree[_PER_RANK] = {
            str(comm.rank): ShardedObject(_PER_RANK, state.per_rank, (comm.size,), (comm.rank,))
        }
    return tree


class CheckpointView:
    """A committed checkpoint, opened by all ranks, to load live objects from.

    Get one from ``CheckpointView.open``. Every method is collective unless it says otherwise.
    """

    def __init__(
        self,
        contents: CheckpointContents,
        common: StateDict,
        comm: Communicator,
        options: LoadOptions,
    ) -> None:
        """Hold what was opened; use ``open``."""
        sections = ("common", "dist_ckpt", "extra_state", _MODEL_STATE, "optimizers", "tied")
        if not all(isinstance(common.get(name, {}), dict) for name in sections):
            raise CorruptedCheckpointError(f"{contents.directory}: {sections} must be dicts.")
        self._contents, self._tree, self._comm, self._options = contents, common, comm, options
        self._stored = stored_keys(contents)
        self._foreign: tuple[CheckpointContents, StateDict] | None = None
        self._roots: Roots | None = None
        self._documents: dict[int, ModelDocument] = {}

    @classmethod
    def open(
        cls,
        checkpoint_dir: PathLike,
        *,
        options: LoadOptions | None = None,
        communicator: Communicator | None = None,
    ) -> CheckpointView:
        """Open a checkpoint and read its common part. Collective.

        The model and the optimizers of a checkpoint of ``dcp.save`` get our keys; which dicts are
        recognised: docs/guides/core.md, With DCP.

        Raises:
            CheckpointNotFoundError: Nothing committed there.
            UnsafeContentError: A value needs ``LoadOptions(allow_pickle=True)``.
        """
        options = options or LoadOptions()
        comm = communicator or default_communicator(timeout_secs=options.timeout_secs)
        contents = open_together(
            path_to_tell(checkpoint_dir), comm, options, check=lambda: checked_path(checkpoint_dir)
        )
        check_indexed(contents)
        read = attempt(read_common, contents, options)
        common = agree(comm, f"reading {checkpoint_dir}", read)
        if contents.common is not None:
            return cls(contents, common, comm, options)
        view = cls(contents, {}, comm, options)
        view._foreign = contents, common
        view._adopt(frozenset())
        return view

    @property
    def common(self) -> StateDict:
        """The values that were saved as ``TrainingState.common``. Not collective."""
        common: StateDict = self._tree.get("common", {})
        return common

    @property
    def framework(self) -> str:
        """Who saved the checkpoint; empty if unknown. Not collective."""
        return str(self._tree.get("dist_ckpt", {}).get("framework", ""))

    @property
    def world_size(self) -> int:
        """Number of ranks that saved it; 0 if unknown. Not collective."""
        return self._contents.world_size

    @property
    def num_optimizers(self) -> int:
        """Number of optimizers in it. Not collective."""
        return max(_count(self._stored, "optimizers."), len(self._tree.get("optimizers", {})))

    def model_names(self, i: int) -> list[str]:
        """Return the names of all entries of model ``i``, in the stored order. Not collective."""
        document = self._document(i)
        prefix = f"models.{i}."
        if document.is_whole:
            return list(document.names)
        names = dict.fromkeys(document.names)
        names |= dict.fromkeys(
            sorted(key.removeprefix(prefix) for key in self._stored if key.startswith(prefix))
        )
        return [*names, *(name for name in (*document.tied, *document.values) if name not in names)]

    def load_model(
        self,
        i: int,
        model: nn.Module,
        *,
        strict: bool = True,
        values: Mapping[str, Any] | None = None,
    ) -> None:
        """Load a model as ``load_state_dict`` does; each rank reads only what it holds.

        Parameters and buffers of modules that do not customise PyTorch's protocol are filled in
        place. A module with load hooks or a ``_load_from_state_dict`` of its own gets its entries
        (and those below it) in new tensors and loads them itself, with the stored metadata.

        Args:
            i: Which model of the checkpoint.
            model: The live module, in the layout it trains in.
            strict: Whether names that only one side has are an error; else they are skipped.
            values: A state dict to load instead of the stored one. The value ``STORED`` means the
                entry of the checkpoint, anything else is the entry itself; tensors are whole.

        Raises:
            MismatchError: Names, shapes or dtypes do not agree, or a module could not load its
                entries.
        """
        layout = functools.cache(lambda: model_layout(model))
        self._align(i, model, layout)
        document = self._document(i)
        plan = functools.cache(
            lambda: plan_load(model, layout(), self._given(i, values), document.metadata)
        )

        def build() -> LoadRequest:
            wanted = self._wanted(i)
            if self._options.cast == "error":
                with _prefixed(str(self._contents.directory)):
                    plan().check_dtypes(wanted)
            return LoadRequest(state_dict={"models": {str(i): plan().request(wanted)}})

        result = run_load(
            build,
            self._contents,
            self._comm,
            self._options,
            StrictPolicy(reaction="raise", check_missing=False),
            check_coverage=False,
            common={},
        )

        def fill() -> LoadReport:
            with _prefixed(str(self._contents.directory)):
                return plan().fill(
                    result.state_dict["models"].get(str(i), {}),
                    # In a checkpoint of parts, a rank sees names that only other ranks load.
                    strict=strict and not document.is_of_parts,
                )

        report = reduce(self._comm, f"filling model {i}", attempt(fill), merge_reports)
        if strict and (report.missing or report.unexpected):
            raise self._mismatch(i, report.describe(bare_module(model)), report.missing)

    def _mismatch(self, i: int, text: str, missing: Sequence[str]) -> MismatchError:
        near = describe_unexpected(missing, self.model_names(i))
        hint = "; ".join([*near[:8], "strict=False skips what only one side has."])
        return MismatchError(f"{self._contents.directory}: {text}", hint=hint)

    def _given(self, i: int, values: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Return the state dict to load, by canonical names."""
        if values is not None:
            return {without_wrappers(name): value for name, value in values.items()}
        document, stored = self._document(i), self._wanted(i)
        names = (name for name in self.model_names(i) if stored(name) or name in document.values)
        return dict.fromkeys(names, STORED) | dict(document.values)

    def _wanted(self, i: int) -> Callable[[str], ShardedTensor | None]:
        """Return a function from an entry's name to how it is stored, if it is a tensor."""
        prefix, tied = f"models.{i}.", self._document(i).tied

        def stored(name: str) -> ShardedTensor | None:
            item = self._stored.get(f"{prefix}{tied.get(name, name)}")
            return item if isinstance(item, ShardedTensor) else None

        return stored

    def _adopt(self, own: frozenset[str]) -> None:
        """Give our keys to what torch's DCP wrote, for a model with these names. Collective.

        Raises:
            MismatchError: It is not certain which entries are the model, or the optimizer.
        """
        if self._foreign is None:
            return
        contents, common = self._foreign

        def adopted() -> None:
            with _prefixed(str(contents.directory)):
                roots = find_roots(contents.index.tensors.keys(), contents.objects.keys(), own)
            if roots != self._roots:
                keys = values_beside(contents, roots)
                values = read_whole(contents, keys, self._options)
                beside = dict(zip(keys, values, strict=True))
                self._contents, self._tree = adopt(contents, common, roots, beside)
                self._stored, self._roots = stored_keys(self._contents), roots
                self._documents = {}

        phase = f"finding the model in {contents.directory}"
        agree(self._comm, phase, attempt(adopted))

    def _align(self, i: int, model: nn.Module, layout: Callable[[], ModelLayout]) -> None:
        """Rename model ``i`` of the checkpoint to the job's names, if only a prefix differs."""
        if self._foreign is not None and i == 0:
            names = self._comm.map_reduce(
                "comparing names",
                lambda: frozenset(layout().tensors),
                lambda found: frozenset[str]().union(*found),
            )
            self._adopt(names)
        stored = set(self.model_names(i))
        prefixes = self._comm.map_reduce(
            "comparing names",
            lambda: _names_to_find(model, set(layout().tensors), stored),
            lambda found: find_prefixes(set[str]().union(*found), stored),
        )
        if prefixes is not None:
            self._rename(i, prefixes)

    def _rename(self, i: int, prefixes: Prefixes) -> None:
        logger.log(
            logging.WARNING if self._comm.rank == 0 else logging.DEBUG,
            "%s: model %d is stored with names %r..., in this job they are %r...; renamed.",
            self._contents.directory, i, prefixes.stored, prefixes.own,
        )  # fmt: skip
        document = self._document(i)
        self._contents, self._tree = rename(self._contents, self._tree, i, prefixes)
        self._documents[i] = document.renamed(prefixes)
        self._stored = stored_keys(self._contents)

    def full_model(self, i: int, *, like: nn.Module | None = None) -> OrderedDict[str, Any]:
        """Return the whole state dict of model ``i`` on the CPU. Not collective.

        Names are in the stored order, tied ones too; ``_metadata`` is that of the save.

        Args:
            i: Which model of the checkpoint.
            like: A module that has all of its parameters here: if only a prefix differs, names are
                this module's.
        """
        if like is not None:
            own = {without_wrappers(name) for name, _ in like.named_parameters()}
            stored = set(self.model_names(i))
            prefixes = find_prefixes(_names_to_find(like, own, stored), stored)
            if prefixes is not None:
                self._rename(i, prefixes)
        prefix, document = f"models.{i}.", self._document(i)
        keys = [key for key in self._stored if key.startswith(prefix)]
        tensors = read_whole(self._contents, keys, self._options)
        check_unchanged(self._contents)
        full = {key.removeprefix(prefix): t for key, t in zip(keys, tensors, strict=True)}
        full |= {other: full[first] for other, first in document.tied.items() if first in full}
        if document.is_whole:
            full = {name: full[name] for name in document.names if name in full}
        return document.as_state_dict(full | dict(document.values))

    def load_optimizer(self, j: int, optimizer: Any, models: Sequence[nn.Module]) -> None:
        """Fill an optimizer, through its own ``load_state_dict``.

        Args:
            j: Which optimizer of the checkpoint.
            optimizer: The live optimizer, or a framework's wrapper around one.
            models: The models whose parameters it may hold, in the order they were saved in.

        Raises:
            MismatchError: Parameter groups or state do not agree.
        """
        lazy = [functools.cache(functools.partial(model_layout, model)) for model in models]
        layouts = functools.cache(lambda: [layout() for layout in lazy])
        for i, layout in enumerate(lazy):
            self._align(i, models[i], layout)
        if self._foreign is not None and j >= self.num_optimizers:
            root = "" if self._roots is None else self._roots.model
            raise MismatchError(  # every rank knows what is stored, so every rank raises
                f"{self._contents.directory}: there is no optimizer {j} beside the model, whose "
                f"names begin with {root!r}.",
                hint="load the model alone; what is found where: docs/guides/core.md, With DCP.",
            )
        saved = self._tree.get("optimizers", {}).get(str(j), {})
        where = f"{self._contents.directory}, optimizer {j}"
        if is_flat(saved):

            def grouped() -> StateDict:
                with _prefixed(where):
                    return group_flat(saved, _members(optimizer, layouts()))

            phase = f"matching the groups of optimizer {j}"
            saved = agree(self._comm, phase, attempt(grouped))
        prefix = f"optimizers.{j}."

        def build() -> LoadRequest:
            with _prefixed(where):
                template = optimizer_template(
                    optimizer, layouts(), prefix=prefix, metadata=self._stored, saved=saved
                )
            return LoadRequest(state_dict={"optimizer": template})

        result = run_load(
            build,
            self._contents,
            self._comm,
            self._options,
            StrictPolicy(reaction="raise", check_missing=False),
            check_coverage=False,
            common={"optimizer": saved},
        )

        def restore() -> None:
            with _prefixed(where):
                load_optimizer_state(optimizer, layouts(), result.state_dict["optimizer"])

        agree(self._comm, f"restoring optimizer {j}", attempt(restore))

    def per_rank(self) -> Any:
        """Return this rank's own values; None if there are none for it. Not collective."""
        objects = (one for one in self._stored.values() if isinstance(one, ShardedObject))
        size, rank = sum(one.key == _PER_RANK for one in objects), self._comm.rank
        if rank >= size:
            return None
        one = ShardedObject(_PER_RANK, None, (size,), (rank,))
        return self._read_object(one)

    def _document(self, i: int) -> ModelDocument:
        """Return the document of model ``i``."""
        if i not in self._documents:
            documents = [self._tree.get(_MODEL_STATE, {})]
            documents += [self._read_object(item) for item in self._others_documents()]
            of_model = [document[str(i)] for document in documents if str(i) in document]
            self._documents[i] = (
                read_documents(of_model, where=str(self._contents.directory))
                if of_model
                else read_early_sections(
                    self._tree.get("tied", {}).get(str(i), {}),
                    self._tree.get("extra_state", {}).get(str(i), {}),
                )
            )
        return self._documents[i]

    def _others_documents(self) -> list[ShardedObject]:
        """Return the objects with the documents of ranks other than 0, by rank."""
        start = f"{_MODEL_STATE}."
        numbers = {
            item.key.removeprefix(start)
            for item in self._stored.values()
            if item.key.startswith(start)
        }
        ranks = {int(number) for number in numbers if number.isdigit()}
        return [ShardedObject(f"{start}{rank}", None, (1,), (0,)) for rank in sorted(ranks)]

    def _read_object(self, one: ShardedObject) -> Any:
        value = read_object(one, self._contents, self._options)
        check_unchanged(self._contents)
        return value


def _names_to_find(model: nn.Module, own: set[str], stored: set[str]) -> set[str]:
    """Return the names to look for among the stored ones, under another prefix."""
    if own.isdisjoint(stored):
        entries = own_entries(model)
        if entries is not None and not stored.isdisjoint(entries.values):
            return set()  # the model renames its entries itself
    return own


@contextlib.contextmanager
def _prefixed(where: str) -> Iterator[None]:
    """Put the place before the text of a ``MismatchError`` that is raised inside."""
    try:
        yield
    except MismatchError as error:
        raise MismatchError(f"{where}: {error}") from error


def _members(optimizer: Any, layouts: Sequence[ModelLayout]) -> list[list[str]]:
    """Return the names of the parameters in each group of an optimizer."""
    inner = unwrap_optimizer(optimizer)
    members: list[list[str]] = [[] for _ in inner.param_groups]
    for slot in optimizer_slots(inner, layouts):
        members[slot.group].append(slot.name)
    return members


def _count(stored: Mapping[str, object], prefix: str) -> int:
    numbers = {key.split(".", 2)[1] for key in stored if key.startswith(prefix)}
    return len({n for n in numbers if n.isdigit()})


def is_checkpoint(path: PathLike) -> bool:
    """Return whether a checkpoint that can be loaded is committed at ``path``. Not collective.

    Raises:
        CorruptedCheckpointError: It is one, but damaged: that is no "no".
    """
    try:
        open_checkpoint(Path(path))
    except CheckpointNotFoundError:
        return False
    return True


def remove_checkpoint(path: PathLike) -> None:
    """Remove a checkpoint (or a file, or a link) so that it vanishes in one step. Not collective.

    Call it on one rank. Nothing happens if nothing is there. A directory's name is gone, durably,
    before the first of its files is.

    Raises:
        ConfigError: A ``BackgroundSaver`` of this process is still writing it.
    """
    if not is_link(Path(path)):  # of a link nothing but the name goes
        check_not_in_flight(Path(path), "removed")
    # First what stands aside: without its target, it would be taken for the checkpoint.
    forget_aside(Path(path))
    remove_tree(Path(path))


def save_model_and_optimizer(
    checkpoint_dir: PathLike,
    model: nn.Module,
    optimizer: Any = None,
    *,
    common: StateDict | None = None,
    options: SaveOptions | None = None,
    saver: BackgroundSaver | None = None,
    sinks: Iterable[EventSink] = (),
) -> None:
    """Save one model and its optimizer, however they are sharded. Collective.

    Args:
        checkpoint_dir: The directory to make.
        model: The live module.
        optimizer: Its optimizer, if it is to be saved.
        common: Further values, equal on all ranks.
        options: Further choices.
        saver: Writes the checkpoint while training goes on, see ``save_training_state``.
        sinks: Take the events of this save, likewise.
    """
    optimizers = [] if optimizer is None else [optimizer]
    state = TrainingState(models=[model], optimizers=optimizers, common=common or {})
    save_training_state(checkpoint_dir, state, options=options, saver=saver, sinks=sinks)


def load_model_and_optimizer(
    checkpoint_dir: PathLike,
    model: nn.Module,
    optimizer: Any = None,
    *,
    strict: bool = True,
    options: LoadOptions | None = None,
) -> StateDict:
    """Load one model and its optimizer, from whatever layout they were saved in. Collective.

    Returns:
        The further values that were saved.
    """
    view = CheckpointView.open(checkpoint_dir, options=options)
    view.load_model(0, model, strict=strict)
    if optimizer is not None:
        view.load_optimizer(0, optimizer, [model])
    return view.common
