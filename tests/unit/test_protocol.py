"""A model's own part in ``state_dict`` and ``load_state_dict``, beside ``torch.save``."""

from __future__ import annotations

import io
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from dist_ckpt import load_model_and_optimizer, save_model_and_optimizer
from dist_ckpt.derive.model import without_wrappers
from dist_ckpt.errors import InvalidShardingError, MismatchError
from dist_ckpt.options import LoadOptions
from dist_ckpt.training_state import CheckpointView
from tests._modules import Versioned


class Packing(nn.Module):
    """Stores its weight in another form, and a list beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 2))
        self.history: list[Any] = [torch.rand(2), 3]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}packed"] = destination.pop(f"{prefix}weight").detach().half()
        destination[f"{prefix}history"] = list(self.history)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}packed").float()
        self.history = state_dict.pop(f"{prefix}history")
        super()._load_from_state_dict(state_dict, prefix, *args)


class Renaming(nn.Module):
    """Its hooks exchange the names of what is below it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_state_dict_post_hook(exchange_saved)
        self.register_load_state_dict_pre_hook(exchange_loaded)


def exchange_saved(module: nn.Module, entries: dict[str, Any], prefix: str, _: Any) -> None:
    for short in ("weight", "bias"):
        one, two = f"{prefix}a.{short}", f"{prefix}b.{short}"
        entries[one], entries[two] = entries[two], entries[one]


def exchange_loaded(module: nn.Module, entries: dict[str, Any], prefix: str, *_: Any) -> None:
    exchange_saved(module, entries, prefix, None)


class Filtering(nn.Module):
    """Leaves its frozen part out, and forgives that it is missing."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(2, 2), nn.Linear(2, 2)
        torch.manual_seed(0)
        nn.init.ones_(self.base.weight)
        nn.init.zeros_(self.base.bias)
        self.register_load_state_dict_post_hook(forgive)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        prefix = kwargs.get("prefix", "")
        entries = super().state_dict(*args, **kwargs)
        for name in [name for name in entries if name.startswith(f"{prefix}base.")]:
            del entries[name]
        return entries


def forgive(module: nn.Module, report: Any) -> None:
    report.missing_keys[:] = [name for name in report.missing_keys if "base." not in name]


class Resizing(nn.Module):
    """Its buffer takes the stored size."""

    def __init__(self, size: int = 0) -> None:
        super().__init__()
        self.register_buffer("seen", torch.rand(size))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.seen.resize_(state_dict[f"{prefix}seen"].shape)
        super()._load_from_state_dict(state_dict, prefix, *args)


class Extra(nn.Module):
    """Has state that is no tensor, and a rebuilt cache."""

    def __init__(self, count: int = 0) -> None:
        super().__init__()
        self.weight, self.count = nn.Parameter(torch.rand(2)), count
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_load_state_dict_post_hook(rebuild_cache)

    def get_extra_state(self) -> dict[str, Any]:
        return {"count": self.count, "tensor": torch.tensor([1.5])}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def rebuild_cache(module: Any, _: Any) -> None:
    module.cache.copy_(module.weight.detach() * 2)


class Quantised(nn.Module):
    """Buffers that are not dense."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch plans to remove quantised dtypes
            tensor = torch.quantize_per_tensor(torch.rand(3), 0.25, 1, torch.quint8)
            rows = torch.quantize_per_channel(
                torch.rand(3, 2), torch.rand(3), torch.arange(3), 0, torch.qint8
            )
        self.register_buffer("tensor", tensor)
        self.register_buffer("rows", rows)
        self.register_buffer("sparse", torch.eye(3).to_sparse() * torch.rand(()))


class Overriding(nn.Module):
    """Loads by a method of its own, with something inside that is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.compile(nn.Linear(2, 2), backend="eager")
        self.loads = 0

    def load_state_dict(self, state_dict: Any, **kwargs: Any) -> Any:
        self.loads += 1
        return super().load_state_dict(state_dict, **kwargs)


class Checkpointing(Overriding):
    """Likewise, with activation checkpointing inside, and a version there."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = checkpoint_wrapper(Versioned())


def spectral() -> nn.Module:
    return torch.nn.utils.spectral_norm(nn.Linear(3, 2))


def weight_norm() -> nn.Module:
    return torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))


def tied() -> nn.Module:
    model = nn.ModuleDict({"z": nn.Linear(2, 2), "a": nn.Linear(2, 2)})
    model["a"].weight = model["z"].weight
    return model


def batch_norm() -> nn.Module:
    return nn.BatchNorm1d(3)


def resizing() -> nn.Module:
    return Resizing(4)


def beside_plain() -> nn.Module:
    return nn.ModuleDict({"z": Packing(), "m": nn.Linear(2, 2), "a": Versioned()})


def nested() -> nn.Module:
    return nn.Sequential(Renaming(), Extra(7), Filtering())


MODULES: tuple[Callable[[], nn.Module], ...] = (
    *(Versioned, Packing, Renaming, Filtering, Extra, Quantised, Overriding, Checkpointing),
    *(spectral, weight_norm, tied),
    *(batch_norm, resizing, beside_plain, nested),
)


def stock(model: nn.Module, into: nn.Module) -> None:
    """Save and load as ``torch.save`` and ``load_state_dict`` do."""
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    stream.seek(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        into.load_state_dict(torch.load(stream, weights_only=False))


def bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.is_quantized or value.is_sparse:
            return (value.dtype, repr(value))
        return (value.dtype, tuple(value.shape), value.detach().contiguous().view(-1).tolist())
    if isinstance(value, dict):
        return {name: bits(one) for name, one in value.items()}
    return [bits(one) for one in value] if isinstance(value, (list, tuple)) else value


def same(one: nn.Module, other: nn.Module) -> bool:
    first, second = one.state_dict(), other.state_dict()
    hidden = [dict(m.named_buffers()) for m in (one, other)]
    return (
        list(first) == list(second)
        and bits(dict(first)) == bits(dict(second))
        and bits(hidden[0]) == bits(hidden[1])
        and [getattr(m, "count", 0) for m in one.modules()]
        == [getattr(m, "count", 0) for m in other.modules()]
    )


@pytest.mark.parametrize("make", MODULES, ids=lambda make: make.__name__)
def test_as_stock(tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    """What comes back is what ``torch.save`` and ``load_state_dict`` bring back."""
    torch.manual_seed(1)
    model = make()
    torch.manual_seed(2)
    ours, theirs = make(), make()
    if isinstance(model, Resizing):
        ours, theirs = Resizing(0), Resizing(0)

    save_model_and_optimizer(tmp_path / "c", model)
    load_model_and_optimizer(tmp_path / "c", ours)

    stock(model, theirs)
    assert same(ours, theirs)
    if isinstance(ours, Overriding):
        assert ours.loads == 1


@pytest.mark.parametrize("make", MODULES, ids=lambda make: make.__name__)
def test_whole_state_dict(tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    """``full_model`` returns the state dict itself: names, order, values, metadata."""
    torch.manual_seed(1)
    model = make()
    save_model_and_optimizer(tmp_path / "c", model)

    full = CheckpointView.open(tmp_path / "c").full_model(0)

    expected = model.state_dict()
    canonical = [name.replace("_orig_mod.", "") for name in expected]
    assert list(full) == canonical
    assert bits(list(full.values())) == bits(list(expected.values()))
    noted = {without_wrappers(name): noted for name, noted in expected._metadata.items()}
    assert dict(full._metadata) == noted  # type: ignore[attr-defined]


def test_migration_runs_once(tmp_path: Path) -> None:
    """A checkpoint of version 1 is migrated when it is loaded, and never again."""
    old, new = Versioned(), Versioned()
    old._version = 1  # type: ignore[misc]
    save_model_and_optimizer(tmp_path / "old", old)

    load_model_and_optimizer(tmp_path / "old", new)
    assert torch.equal(new.scale, old.scale * 2)

    save_model_and_optimizer(tmp_path / "new", new)
    again = Versioned()
    load_model_and_optimizer(tmp_path / "new", again)
    assert torch.equal(again.scale, new.scale)


def test_names_of_one_side_are_those_of_torch(tmp_path: Path) -> None:
    """Missing and unexpected names are those that ``load_state_dict`` reports."""

    def make(*names: str) -> nn.Module:
        layers = OrderedDict((name, nn.Linear(1, 1)) for name in names)
        return nn.Sequential(OrderedDict(inner=nn.Sequential(layers), extra=Extra()))

    model, other = make("a", "b"), make("b", "c")
    save_model_and_optimizer(tmp_path / "c", model)
    theirs = make("b", "c").load_state_dict(model.state_dict(), strict=False)

    with pytest.raises(MismatchError) as caught:
        load_model_and_optimizer(tmp_path / "c", other)

    for name in (*theirs.missing_keys, *theirs.unexpected_keys):
        assert f'"{name}"' in str(caught.value)
    assert str(caught.value).count('"') == 2 * len([*theirs.missing_keys, *theirs.unexpected_keys])
    load_model_and_optimizer(tmp_path / "c", other, strict=False)
    assert torch.equal(other.inner.b.weight, model.inner.b.weight)


def test_plain_modules_stay_on_the_direct_path(tmp_path: Path) -> None:
    """Beside a module with load code of its own, others are filled where they lie."""
    model = nn.Sequential(nn.Linear(64, 64), Versioned())
    save_model_and_optimizer(tmp_path / "c", model)
    other = nn.Sequential(nn.Linear(64, 64), Versioned())
    before, copies = other[0].weight.data_ptr(), []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten.copy_.default:
                copies.append(tuple(args[0].shape))
            return func(*args, **(kwargs or {}))

    with Watch():
        load_model_and_optimizer(tmp_path / "c", other)

    assert copies == [(3,)]
    assert other[0].weight.data_ptr() == before
    assert torch.equal(other[0].weight, model[0].weight)


class Packed(nn.Module):
    """Its extra state is one tensor, as that of libraries that pickle into bytes."""

    def __init__(self, dtype: torch.dtype = torch.uint8, size: int = 3) -> None:
        super().__init__()
        self.weight, self.state = nn.Parameter(torch.rand(2)), torch.ones(size, dtype=dtype)

    def get_extra_state(self) -> torch.Tensor:
        return self.state

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.state = state


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float8_e4m3fn])
def test_extra_state_may_be_a_tensor(tmp_path: Path, dtype: torch.dtype) -> None:
    """A plain module whose extra state is a tensor gets a tensor, of the stored size and dtype."""
    model, other = (nn.Sequential(nn.Linear(1, 1), Packed(dtype, size)) for size in (3, 0))
    save_model_and_optimizer(tmp_path / "c", model)

    load_model_and_optimizer(tmp_path / "c", other)

    assert other[1].state.dtype == dtype
    assert other[1].state.float().tolist() == [1.0, 1.0, 1.0]


def test_of_tied_entries_that_differ_the_last_counts(tmp_path: Path) -> None:
    """A checkpoint of separate weights, loaded into tied ones, leaves what torch leaves."""
    separate = nn.ModuleDict({"z": nn.Linear(2, 2), "a": nn.Linear(2, 2)})
    save_model_and_optimizer(tmp_path / "c", separate)
    ours, theirs = tied(), tied()

    load_model_and_optimizer(tmp_path / "c", ours)

    stock(separate, theirs)
    assert same(ours, theirs)


class Forgiving(nn.Module):
    """Stores what it trains, and loads by a method that takes nothing but a state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(2, 2), nn.Linear(2, 2)
        nn.init.ones_(self.base.weight)
        nn.init.ones_(self.base.bias)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        entries = super().state_dict(*args, **kwargs)
        return OrderedDict((name, one) for name, one in entries.items() if "head" in name)

    def load_state_dict(self, state_dict: Any) -> Any:  # type: ignore[override]
        return super().load_state_dict(state_dict, strict=False)


class Prefixed(nn.Module):
    """Puts a prefix before its names, takes it away again, and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {f"model.{name}": one for name, one in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state_dict: Any, **kwargs: Any) -> None:  # type: ignore[override]
        super().load_state_dict({k[len("model.") :]: v for k, v in state_dict.items()}, **kwargs)


def check_round_trip(root: Path, make: Callable[[], nn.Module]) -> None:
    """Save a model, load it into another one, and compare that with the first and with stock."""
    model, ours, theirs = make(), make(), make()
    save_model_and_optimizer(root / "c", model)

    load_model_and_optimizer(root / "c", ours)

    stock(model, theirs)
    assert same(ours, theirs)
    assert same(ours, model)


@pytest.mark.parametrize("make", [Forgiving, Prefixed])
def test_a_load_of_the_models_own_decides(tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    """A model that overrides ``load_state_dict`` gets its names, and judges them itself."""
    check_round_trip(tmp_path, make)


@pytest.mark.parametrize("name", ["_orig_mod", "_fsdp_wrapped_module"])
def test_a_child_named_as_wrappers_name_theirs(tmp_path: Path, name: str) -> None:
    """Beside other children, such a child is one of several: nothing is lost."""

    def make() -> nn.Module:
        return nn.ModuleDict({name: Versioned(), "other": Packing(), "plain": nn.Linear(1, 1)})

    check_round_trip(tmp_path, make)


class Numbered(nn.Module):
    """Has an entry under a number."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {**super().state_dict(*args, **kwargs), 3: torch.ones(1)}


def test_names_that_are_no_text_are_refused(tmp_path: Path) -> None:
    """The error names the model's class, and what stands in place of a name."""
    with pytest.raises(InvalidShardingError, match=r"Numbered\.state_dict\(\).* 3\."):
        save_model_and_optimizer(tmp_path / "c", Numbered())


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
def test_torchscript(tmp_path: Path) -> None:
    """A scripted model, and a traced part of one, keep their state like any other."""

    def make() -> nn.Module:
        traced = torch.jit.trace(nn.BatchNorm1d(2), torch.rand(3, 2))
        return nn.Sequential(torch.jit.script(nn.Linear(2, 2)), traced)

    model, other = make(), make()

    save_model_and_optimizer(tmp_path / "c", model)
    load_model_and_optimizer(tmp_path / "c", other)

    assert bits(dict(other.state_dict())) == bits(dict(model.state_dict()))


def test_casts_of_modules_with_load_code_are_refused_too(tmp_path: Path) -> None:
    """``cast="error"`` means all entries, also those that a module copies itself."""
    save_model_and_optimizer(tmp_path / "c", nn.Sequential(nn.BatchNorm1d(2)))
    other = nn.Sequential(nn.BatchNorm1d(2)).to(torch.bfloat16)

    with pytest.raises(MismatchError, match=r"0\.weight.*bfloat16 is expected, .*float32"):
        load_model_and_optimizer(tmp_path / "c", other, options=LoadOptions(cast="error"))

    load_model_and_optimizer(tmp_path / "c", other)
    assert other[0].weight.dtype == torch.bfloat16
