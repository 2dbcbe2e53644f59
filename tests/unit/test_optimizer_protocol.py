"""Optimizers are stored by ``state_dict()`` and loaded by ``load_state_dict()``, as stock does.

Each case trains, saves and goes on, once by torch.save and once by us.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dist_ckpt import load_model_and_optimizer, save_model_and_optimizer
from dist_ckpt.derive import check_optimizer, model_layout, sharded_optimizer_state
from dist_ckpt.derive.slots import unwrap_optimizer
from dist_ckpt.derive.steady import steady_keys
from dist_ckpt.errors import InvalidShardingError, MismatchError

Make = Callable[[nn.Module], Any]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def train(model: nn.Module, optimizer: Any, seed: int, steps: int = 3) -> None:
    generator = torch.manual_seed(seed)  # some draw masks
    for _ in range(steps):
        batch = torch.randn(8, 64, generator=generator)

        def loss(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            value: torch.Tensor = model(batch).square().mean()
            value.backward()
            return value

        if getattr(optimizer, "wants_closure", False):
            optimizer.step(loss)
        else:
            loss()
            optimizer.step()


def library(module: str, name: str, **options: Any) -> Make:
    def make(model: nn.Module) -> Any:
        found = importlib.import_module(pytest.importorskip(module).__name__)
        for part in name.split("."):
            found = getattr(found, part)
        return found(model.parameters(), **options)

    return make


def around(module: str, name: str, **options: Any) -> Make:
    def make(model: nn.Module) -> Any:
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        return getattr(pytest.importorskip(module), name)(inner, **options)

    return make


def sam(model: nn.Module) -> Any:
    found = pytest.importorskip("pytorch_optimizer")
    optimizer = found.SAM(model.parameters(), torch.optim.AdamW, lr=0.01)
    optimizer.wants_closure = True
    return optimizer


def lbfgs(model: nn.Module) -> Any:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    optimizer.wants_closure = True  # type: ignore[attr-defined]
    return optimizer


def schedule_free(model: nn.Module) -> Any:
    optimizer = pytest.importorskip("schedulefree").AdamWScheduleFree(model.parameters(), lr=0.01)
    optimizer.train()
    return optimizer


def tensor_settings(model: nn.Module) -> Any:
    return torch.optim.AdamW(
        [
            {"params": [model[0].weight], "lr": torch.tensor(0.01)},  # type: ignore[index]
            {"params": [model[2].weight], "lr": torch.tensor(0.02)},  # type: ignore[index]
        ],
        foreach=False,
    )


MAKERS: dict[str, Make] = {
    "torchao 8 bit": library("torchao", "optim.AdamW8bit"),
    "torchao 4 bit": library("torchao", "optim.AdamW4bit"),
    "torchao fp8": library("torchao", "optim.AdamWFp8"),
    "bitsandbytes": library("bitsandbytes", "optim.Adam8bit"),
    "Lookahead": around("pytorch_optimizer", "Lookahead", k=2),
    "Magma": around("pytorch_optimizer", "Magma"),
    "TRAC": around("pytorch_optimizer", "TRAC"),
    "PCGrad": around("pytorch_optimizer", "OrthoGrad"),
    "SAM": sam,
    "Ranger21": library("pytorch_optimizer", "Ranger21", num_iterations=10),
    "states without tensors": library("pytorch_optimizer", "Fromage"),
    "None as a state": library("pytorch_optimizer", "StableAdamW"),
    "schedulefree": schedule_free,
    "transformers": library("transformers", "Adafactor"),
    "LBFGS": lbfgs,
    "Muon": lambda model: torch.optim.Muon([model[0].weight, model[2].weight]),  # type: ignore[index]
    "Adafactor": library("torch", "optim.Adafactor"),
    "tensors as settings": tensor_settings,
}


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """Torchao compiles its step, which takes a minute."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("name", MAKERS)
def test_a_resume_is_the_one_of_torch_save(name: str, tmp_path: Path) -> None:
    """State dicts after the load are equal, order included, and so is further training."""
    make = MAKERS[name]
    model = net()
    optimizer = make(model)
    train(model, optimizer, 1)
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "stock.pt")
    save_model_and_optimizer(tmp_path / "ours", model, optimizer)

    stock, ours = net(), net()
    stock_optimizer, our_optimizer = make(stock), make(ours)
    weights, state = torch.load(tmp_path / "stock.pt", weights_only=False)
    stock.load_state_dict(weights)
    stock_optimizer.load_state_dict(state)
    load_model_and_optimizer(tmp_path / "ours", ours, our_optimizer)

    assert differences(stock_optimizer.state_dict(), our_optimizer.state_dict()) == []
    train(stock, stock_optimizer, 2)
    train(ours, our_optimizer, 2)
    assert differences(stock.state_dict(), ours.state_dict()) == []
    assert differences(stock_optimizer.state_dict(), our_optimizer.state_dict()) == []


def differences(a: Any, b: Any, path: str = "") -> list[str]:  # noqa: PLR0911 - one a kind
    """Return where two state dicts differ, in classes, order or bits."""
    if type(a) is not type(b):
        return [f"{path}: {type(a)} {type(b)}"]
    if isinstance(a, torch.Tensor):
        if hasattr(a, "dequantize") and type(a) is not torch.Tensor:
            a, b = a.dequantize(), b.dequantize()
        same = a.dtype == b.dtype and torch.equal(a, b)
        return [] if same else [f"{path}: {a.dtype} {b.dtype} or values"]
    if isinstance(a, dict):
        if [k for k in a if type(k) is not nn.Parameter] != [
            k for k in b if type(k) is not nn.Parameter
        ]:
            return [f"{path}: {list(a)} {list(b)}"]
        pairs = zip(a.items(), b.items(), strict=True)
        return [text for (k, x), (_, y) in pairs for text in differences(x, y, f"{path}.{k}")]
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return [f"{path}: {len(a)} {len(b)}"]
        return [t for i, x in enumerate(a) for t in differences(x, b[i], f"{path}[{i}]")]
    return [] if a == b else [f"{path}: {a} {b}"]


# -- hooks -----------------------------------------------------------------------------------------


def test_hooks_run_once_with_what_stock_gives_them(tmp_path: Path) -> None:
    """All four kinds, with equal arguments; what they add is stored and given back."""

    def watched(log: list[tuple[str, Any]]) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters())

        def add(_: Any, state_dict: Any) -> None:
            log.append(("save post", picture(state_dict)))
            state_dict["ours"] = {"table": torch.arange(3.0), "note": (1, None)}
            state_dict["param_groups"][0]["note"] = "kept"

        def take(_: Any, state_dict: Any) -> Any:
            log.append(("load pre", picture(state_dict)))
            return {key: value for key, value in state_dict.items() if key != "ours"}

        optimizer.register_state_dict_pre_hook(lambda _: log.append(("save pre", None)))
        optimizer.register_state_dict_post_hook(add)
        optimizer.register_load_state_dict_pre_hook(take)
        optimizer.register_load_state_dict_post_hook(
            lambda one: log.append(("load post", picture(list(one.state.values()))))
        )
        return model, optimizer

    logs: list[list[tuple[str, Any]]] = [[], []]
    for log, stock in zip(logs, (True, False), strict=True):
        model, optimizer = watched(log)
        train(model, optimizer, 1)
        path = tmp_path / str(stock)
        if stock:
            torch.save(optimizer.state_dict(), path)
            model, optimizer = watched(log)
            optimizer.load_state_dict(torch.load(path, weights_only=False))
        else:
            save_model_and_optimizer(path, model, optimizer)
            model, optimizer = watched(log)
            load_model_and_optimizer(path, model, optimizer)

    assert [name for name, _ in logs[1]] == ["save pre", "save post", "load pre", "load post"]
    for stock_call, our_call in zip(*logs, strict=True):
        assert stock_call == our_call


def picture(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ("tensor", value.tolist())
    if isinstance(value, dict):
        return [(key, picture(one)) for key, one in value.items()]
    return [picture(one) for one in value] if isinstance(value, list) else value


def test_what_a_load_hook_does_to_the_state_stays(tmp_path: Path) -> None:
    """A post-hook that casts is not undone by keeping the stored dtypes."""

    def halve(one: torch.optim.Optimizer) -> None:
        for state in one.state.values():
            state["exp_avg"] = state["exp_avg"].half()

    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    save_model_and_optimizer(tmp_path / "ck", model, optimizer)
    other = torch.optim.AdamW(model.parameters())
    other.register_load_state_dict_post_hook(halve)
    load_model_and_optimizer(tmp_path / "ck", model, other)
    assert {state["exp_avg"].dtype for state in other.state.values()} == {torch.float16}
    assert len(other._optimizer_load_state_dict_pre_hooks) == 0
    assert len(other._optimizer_load_state_dict_post_hooks) == 1


def test_a_setting_that_is_not_stored_is_not_kept(tmp_path: Path) -> None:
    """As in torch, the stored group takes the place of the optimizer's, so that defaults apply."""

    class Migrating(torch.optim.SGD):
        def __setstate__(self, state: Any) -> None:
            super().__setstate__(state)
            for group in self.param_groups:
                group.setdefault("since_version_2", "as in version 1")

    model = net()
    save_model_and_optimizer(tmp_path / "ck", model, torch.optim.SGD(model.parameters()))
    groups = [{"params": list(model.parameters()), "since_version_2": "new"}]
    optimizer = Migrating(groups)
    load_model_and_optimizer(tmp_path / "ck", model, optimizer)
    assert optimizer.param_groups[0]["since_version_2"] == "as in version 1"


# -- odd state dicts -------------------------------------------------------------------------------


class KeyedByParameters(torch.optim.SGD):
    """Returns its state as it is, with parameters as keys, as some wrappers do."""

    def state_dict(self) -> Any:
        return {"slow": dict(self.state), "base": super().state_dict()}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict["base"])
        self.state = defaultdict(dict, state_dict["slow"])


class NamedStates(torch.optim.SGD):
    """Names its parameters in its own way, and has state of none of them."""

    def state_dict(self) -> Any:
        packed = super().state_dict()
        packed["state"] = {
            (f"p{key}" if isinstance(key, int) else key): one
            for key, one in packed["state"].items()
        }
        for group in packed["param_groups"]:
            group["params"] = [f"p{number}" for number in group["params"]]
        return packed

    def load_state_dict(self, state_dict: Any) -> None:
        assert all(str(n).startswith("p") for g in state_dict["param_groups"] for n in g["params"])
        super().load_state_dict(state_dict)


class WithGlobalState(torch.optim.SGD):
    """Has state under a string, and a state whose name is a number."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.state["global"] = {"average": torch.arange(4.0)}  # type: ignore[index]


@pytest.mark.parametrize("kind", [KeyedByParameters, NamedStates, WithGlobalState])
def test_state_dicts_of_other_forms_resume(kind: Any, tmp_path: Path) -> None:
    """Parameters as keys come back as the live ones; names and global state stay."""
    model = net()
    optimizer = kind(model.parameters(), lr=0.01, momentum=0.9)
    train(model, optimizer, 1)
    save_model_and_optimizer(tmp_path / "ck", model, optimizer)
    again = net()
    resumed = kind(again.parameters(), lr=9.0, momentum=0.1)
    load_model_and_optimizer(tmp_path / "ck", again, resumed)

    stored, loaded = optimizer.state_dict(), resumed.state_dict()
    for one in (stored, loaded):  # what belongs to no parameter comes last
        one["state"] = dict(sorted(one.get("state", {}).items(), key=str))
    assert differences(stored, loaded) == []
    train(model, optimizer, 2)
    train(again, resumed, 2)
    assert differences(model.state_dict(), again.state_dict()) == []


def test_state_names_that_are_no_text_are_stored_whole(tmp_path: Path) -> None:
    """Such a state dict is one object."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    train(model, optimizer, 1)
    optimizer.state[model[0].weight][3] = torch.ones(2)
    save_model_and_optimizer(tmp_path / "ck", model, optimizer)
    other = torch.optim.SGD(model.parameters(), momentum=0.9)
    load_model_and_optimizer(tmp_path / "ck", model, other)
    assert torch.equal(other.state[model[0].weight][3], torch.ones(2))


def test_a_whole_state_dict_needs_the_same_order_of_parameters(tmp_path: Path) -> None:
    """It has parameters by number: another order would give them each other's state."""
    wrapped = pytest.importorskip("pytorch_optimizer").Lookahead
    model = net()
    optimizer = wrapped(torch.optim.AdamW(model.parameters()))
    train(model, optimizer, 1)
    save_model_and_optimizer(tmp_path / "ck", model, optimizer)
    other = wrapped(torch.optim.AdamW(list(model.parameters())[::-1]))
    with pytest.raises(MismatchError, match=r"order differs.*0\.0\.weight"):
        load_model_and_optimizer(tmp_path / "ck", model, other)


def test_a_parameter_that_stands_twice_in_a_group(tmp_path: Path) -> None:
    """It is numbered as torch numbers it."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        first, *rest = model.parameters()
        with pytest.warns(UserWarning, match="duplicate parameters"):
            return torch.optim.SGD([first, first, *rest], momentum=0.9, lr=0.01)

    model, again = net(), net()
    optimizer, resumed = make(model), make(again)
    train(model, optimizer, 1)
    save_model_and_optimizer(tmp_path / "ck", model, optimizer)
    load_model_and_optimizer(tmp_path / "ck", again, resumed)
    assert differences(optimizer.state_dict(), resumed.state_dict()) == []


# -- refusals --------------------------------------------------------------------------------------


def test_state_of_strange_parameters_is_named() -> None:
    """Torch's own state_dict fails with a bare KeyError then."""
    model = net()
    optimizer = torch.optim.SGD([model[0].weight], momentum=0.9)
    optimizer.state[model[2].bias]["momentum_buffer"] = torch.ones(4)
    with pytest.raises(InvalidShardingError, match=r"SGD\.state has state of 1 tensor.*\(4,\)"):
        sharded_optimizer_state(optimizer, [model_layout(model)], prefix="optimizers.0.")


def test_all_offenders_are_named_with_optimizer_parameter_and_state() -> None:
    """Tensors of classes that no load would rebuild."""
    two = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    train(model, optimizer, 1)
    for parameter in (model[0].bias, model[2].bias):
        value = torch.ones_like(parameter)
        optimizer.state[parameter]["momentum_buffer"] = two(value, value.clone())
    optimizer.param_groups[0]["lr"] = [torch.empty(1, device="meta")]
    with pytest.raises(
        InvalidShardingError,
        match=r"(?s)SGD \(optimizer\): 3 state.*'momentum_buffer' of parameter '0.0.bias'.*"
        r"add_safe_globals.*'0.2.bias'.*param_groups\[0\]\['lr'\].*meta",
    ):
        check_optimizer(optimizer, [model_layout(model)])


def test_a_check_runs_no_hooks() -> None:
    """Hooks may do anything, so they run at saves only."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    seen: list[Any] = []
    optimizer.register_state_dict_pre_hook(seen.append)
    check_optimizer(optimizer, [model_layout(model)])
    assert seen == []


# -- wrappers --------------------------------------------------------------------------------------


def test_wrappers_with_a_state_dict_of_their_own_are_kept() -> None:
    """A wrapper that shares the state of what it wraps may still add to the state dict."""
    library_ = pytest.importorskip("pytorch_optimizer")
    model = net()
    inner = torch.optim.AdamW(model.parameters())
    for name in ("Magma", "OrthoGrad", "Lookahead"):
        wrapper = getattr(library_, name)(inner)
        assert unwrap_optimizer(wrapper) is wrapper


def test_parameters_of_optimizers_with_methods_of_their_own_are_not_steady() -> None:
    """``eval()`` of a schedule-free optimizer changes parameters outside of any step."""
    model = net()
    layout = model_layout(model)
    plain, free = torch.optim.SGD(model.parameters()), schedule_free(model)
    for optimizer, expected in ((plain, 4), (free, 0)):
        trees = [sharded_optimizer_state(optimizer, [layout], prefix="optimizers.0.")]
        assert len(steady_keys({0: layout}, [optimizer], trees)) == expected
