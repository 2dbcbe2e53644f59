"""The matrix of the conformance kit: each kind of state, saved on N ranks and loaded on M.

Here: ``StrategyMatrix``, and how tests of the kit run and judge. Not here: the other tests
(``testing.strategies``), the states (``testing._states``). Called by pytest, which is not imported.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from dist_ckpt.errors import CheckpointingException
from dist_ckpt.mapping import ShardedTensor
from dist_ckpt.serialization import load, save
from dist_ckpt.testing._states import CASES, cleared, differences, expected
from dist_ckpt.testing.world import ThreadWorld

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from dist_ckpt.strategies.base import LoadShardedStrategy, SaveShardedStrategy
    from dist_ckpt.types import Communicator, ShardedStateDict
    from dist_ckpt.validation import StrictHandling

__all__ = ["StrategyMatrix", "require"]


def require(condition: object, message: str) -> None:
    """Raise AssertionError: pytest does not rewrite the asserts of this package."""
    if not condition:
        raise AssertionError(message)


class StrategyMatrix:
    """A backend saves each kind of state on N ranks and loads it, bit for bit, on M.

    Subclass it in a test module and say what the backend is; pytest collects the tests.

    Attributes:
        save_strategy: What is given to ``save``: a strategy, or ``(backend, version)``.
        load_strategy: What is given to ``load``; None for what the checkpoint says.
        common_strategy: What is given to ``save`` for the common part.
        cases: Which kinds of state; leave out those that the backend refuses.
        worlds: Ranks that save, and ranks that load.
    """

    save_strategy: SaveShardedStrategy | tuple[str, int]
    load_strategy: LoadShardedStrategy | tuple[str, int] | None = None
    common_strategy: Any = None
    cases: Sequence[str] = tuple(CASES)
    worlds: Sequence[tuple[int, int]] = ((1, 1), (2, 4), (4, 2), (4, 3))
    strict_flags: Sequence[StrictHandling] = ()
    damages: Sequence[str] = ()

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Make a test of each case, of each number of ranks, and so on (called by pytest)."""
        values: dict[str, list[tuple[str, Any]]] = {
            "case": [(name, name) for name in self.cases],
            "world": [(f"{n}to{m}", (n, m)) for n, m in self.worlds],
            "strict": [(flag.value, flag) for flag in self.strict_flags],
            "damage": [(how, how) for how in self.damages],
        }
        for name in (name for name in values if name in metafunc.fixturenames):
            ids, found = zip(*values[name], strict=True)
            metafunc.parametrize(name, found, ids=ids)

    def run(self, fn: Callable[[Communicator], Any], world_size: int) -> list[Any]:
        """Call ``fn(communicator)`` on each rank; return what each has returned or raised.

        Ranks are threads here. A strategy that exchanges through ``torch.distributed`` needs
        processes: override this. ``fn`` can be pickled if the subclass stands in a module.
        """
        results, errors = ThreadWorld(world_size).outcomes(fn)
        return [errors[rank] if rank in errors else results[rank] for rank in range(world_size)]

    def test_any_layout_loads_any_other(
        self, tmp_path: Path, case: str, world: tuple[int, int]
    ) -> None:
        """What N ranks saved is on M ranks what it was, to the bit."""
        target, (savers, loaders) = tmp_path / "c", world
        self._all_ok(functools.partial(self._save_case, target, case), savers)
        self._all_ok(functools.partial(self._load_case, target, case), loaders)

    def _all_ok(self, fn: Callable[[Communicator], Any], world_size: int = 1) -> list[Any]:
        outcomes = self.run(fn, world_size)
        errors = [f"rank {rank}: {one!r}" for rank, one in enumerate(outcomes) if _is_error(one)]
        if errors:
            first = next(one for one in outcomes if _is_error(one))
            raise AssertionError("\n".join(errors)) from first
        return outcomes

    def _all_raise(
        self,
        fn: Callable[[Communicator], Any],
        world_size: int = 1,
        error: type[BaseException] = CheckpointingException,
    ) -> list[BaseException]:
        outcomes = self.run(fn, world_size)
        wrong = [
            f"rank {r}: {one!r}" for r, one in enumerate(outcomes) if not isinstance(one, error)
        ]
        require(not wrong, f"{error.__name__} is expected on every rank, found {wrong}")
        return outcomes

    def _save(self, state: ShardedStateDict, target: Path, comm: Communicator, **more: Any) -> Any:
        return save(
            state, target, self.save_strategy, self.common_strategy, communicator=comm, **more
        )

    def _load(
        self, request: ShardedStateDict, target: Path, comm: Communicator, **more: Any
    ) -> Any:
        return load(request, target, self.load_strategy, communicator=comm, **more)

    def _save_case(self, target: Path, case: str, comm: Communicator) -> None:
        self._save(CASES[case](comm.rank, comm.size), target, comm)

    def _load_case(self, target: Path, case: str, comm: Communicator) -> None:
        request = cleared(CASES[case](comm.rank, comm.size))
        memory = [one.data for one in _tensors(request)]
        loaded = self._load(request, target, comm)
        state = CASES[case](comm.rank, comm.size)
        problems = differences(expected(state), loaded)
        require(not problems, f"rank {comm.rank} of {comm.size}: {problems}")
        for one, data in zip(_tensors(state), memory, strict=True):
            same = data is None or not differences(one.data, data)
            require(same, f"rank {comm.rank}: {one.key!r} was not filled in place")


def _is_error(outcome: Any) -> bool:
    return isinstance(outcome, BaseException)


def _tensors(node: Any) -> list[ShardedTensor]:
    if isinstance(node, dict | list):
        values = node.values() if isinstance(node, dict) else node
        return [one for value in values for one in _tensors(value)]
    return [node] if isinstance(node, ShardedTensor) else []
