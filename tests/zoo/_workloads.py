"""Small models and optimizers that real libraries build.

Here: one ``Workload`` for each row of ``_cases.py``, of the same name. Not here: what is expected of
it. Importing this costs seconds: only ranks do, see ``_worlds.py``.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import bitsandbytes as bnb
import pytorch_optimizer
import schedulefree
import torch
import torch.ao.quantization as aoq
import torchao.optim
import torchmetrics
from diffusers.training_utils import EMAModel
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import GPT2Config, GPT2LMHeadModel


def _inputs() -> torch.Tensor:
    return torch.randn(4, 16)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def _loss(model: nn.Module, inputs: Any) -> torch.Tensor:
    return model(inputs).square().mean()


def _nothing(model: nn.Module) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model, an optimizer, and how one trains them.

    Attributes:
        build: Makes the model; seeded by the caller.
        optimizer: Makes its optimizer, after the model was sharded.
        inputs: Makes a batch; seeded by the caller.
        loss: Of a (wrapped) model and a batch.
        after_step: Called with the bare model after each step.
        companion: Makes an object with a state of its own, such as a moving average.
        follow: Called with companion and bare model after each step.
    """

    build: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], Any] = _adamw
    inputs: Callable[[], Any] = _inputs
    loss: Callable[[nn.Module, Any], torch.Tensor] = _loss
    after_step: Callable[[nn.Module], None] = _nothing
    companion: Callable[[nn.Module], Any] | None = None
    follow: Callable[[Any, nn.Module], None] | None = None


def mlp(width: int = 12) -> nn.Module:
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4))


class Frozen(nn.Module):
    """An encoder that does not train, under a head that does."""

    def __init__(self, encoder: nn.Module, width: int) -> None:
        super().__init__()
        self.encoder = encoder.requires_grad_(False)
        self.head = nn.Linear(width, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            hidden = self.encoder(inputs)
        return self.head(hidden.relu())


# -- torchmetrics ----------------------------------------------------------------------------------


class Measured(nn.Module):
    """Metrics with persistent states, one that is a list, and one that is not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.zebra = nn.Linear(16, 4)
        self.mean = torchmetrics.MeanMetric()
        self.all = torchmetrics.CatMetric()
        self.scores = torchmetrics.MetricCollection(
            {
                "accuracy": torchmetrics.classification.MulticlassAccuracy(num_classes=4),
                "f1": torchmetrics.classification.MulticlassF1Score(num_classes=4),
            },
            prefix="train/",
        )
        for metric in (self.mean, self.all, self.scores):
            metric.persistent(True)
        self.forgets = torchmetrics.SumMetric()
        self.apple = nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = self.apple(self.zebra(inputs))
        if self.training:
            seen = found.detach()
            self.mean.update(seen.mean())
            self.all.update(seen.sum(1))
            self.scores.update(seen, torch.arange(len(seen)) % 4)
            self.forgets.update(seen.sum())
        return found


# -- torch.ao --------------------------------------------------------------------------------------


def quantisation_aware() -> nn.Module:
    model = mlp().train()
    model.qconfig = aoq.get_default_qat_qconfig("fbgemm")
    return aoq.prepare_qat(model)


def dynamically_quantised() -> nn.Module:
    return Frozen(aoq.quantize_dynamic(nn.Sequential(nn.Linear(16, 8)), {nn.Linear}), 8)


# -- torchao ---------------------------------------------------------------------------------------


def int8_weights() -> nn.Module:
    encoder = nn.Sequential(nn.Linear(16, 32))
    quantize_(encoder, Int8WeightOnlyConfig())
    return Frozen(encoder, 32)


# -- bitsandbytes ----------------------------------------------------------------------------------


def linear_8bit() -> nn.Module:
    layer = bnb.nn.Linear8bitLt(16, 32, has_fp16_weights=False)
    return Frozen(layer.to("cpu"), 32)


def linear_4bit() -> nn.Module:
    layer = bnb.nn.Linear4bit(16, 64, quant_type="nf4", compute_dtype=torch.float32)
    return Frozen(layer.to("cpu"), 64)


# -- transformers and peft -------------------------------------------------------------------------


def tied_gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=31, n_positions=16, bos_token_id=0,
        eos_token_id=0, loss_type="ForCausalLM", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.generation_config.max_new_tokens = 7
    return model


def lora() -> nn.Module:
    return get_peft_model(tied_gpt2(), LoraConfig(r=2, target_modules=["c_attn"]))


def lora_with_a_head() -> nn.Module:
    config = LoraConfig(r=2, target_modules=["c_attn"], modules_to_save=["ln_f"], use_dora=True)
    return get_peft_model(tied_gpt2(), config)


def _tokens() -> torch.Tensor:
    return torch.randint(0, 31, (2, 8))


def _language(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return model(input_ids=inputs, labels=inputs).loss


# -- torch -----------------------------------------------------------------------------------------


class Averaged(nn.Module):
    """A network and the moving average of it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.average = AveragedModel(
            copy.deepcopy(self.net), multi_avg_fn=get_ema_multi_avg_fn(0.9)
        )
        self.average.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs)


def _average(model: nn.Module) -> None:
    model.average.update_parameters(model.net)


def _old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(16, 4)))


def _parametrised() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(16, 8)),
        parametrizations.spectral_norm(nn.Linear(8, 4)),
    )


def _normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 6), nn.BatchNorm1d(6), nn.MultiheadAttention(6, 2).out_proj)


# -- optimizers ------------------------------------------------------------------------------------


def _schedule_free(model: nn.Module) -> Any:
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.01, warmup_steps=2)
    optimizer.train()
    return optimizer


def _lookahead(model: nn.Module) -> Any:
    return pytorch_optimizer.Lookahead(torch.optim.AdamW(model.parameters(), lr=0.01), k=2)


def _of(cls: Any, **kwargs: Any) -> Callable[[nn.Module], Any]:
    return lambda model: cls(model.parameters(), lr=0.01, **kwargs)


def _wide() -> nn.Module:
    return mlp(512)  # 8,192 elements: 8-bit optimizers leave shards below 4,096 alone


def _ema(model: nn.Module) -> EMAModel:
    return EMAModel(model.parameters(), decay=0.9)


def _follow(ema: EMAModel, model: nn.Module) -> None:
    ema.step(model.parameters())


WORKLOADS = {
    "torchmetrics": Workload(build=Measured),
    "torch.ao QAT": Workload(build=quantisation_aware),
    "torch.ao dynamic": Workload(build=dynamically_quantised),
    "torchao int8 weights": Workload(build=int8_weights),
    "torchao AdamW8bit": Workload(build=_wide, optimizer=_of(torchao.optim.AdamW8bit)),
    "torchao AdamW4bit": Workload(build=_wide, optimizer=_of(torchao.optim.AdamW4bit)),
    "torchao AdamWFp8": Workload(build=_wide, optimizer=_of(torchao.optim.AdamWFp8)),
    "bitsandbytes AdamW8bit": Workload(build=_wide, optimizer=_of(bnb.optim.AdamW8bit)),
    "bitsandbytes Linear8bitLt": Workload(build=linear_8bit),
    "bitsandbytes Linear4bit": Workload(build=linear_4bit),
    "transformers GPT-2": Workload(build=tied_gpt2, inputs=_tokens, loss=_language),
    "peft LoRA": Workload(build=lora, inputs=_tokens, loss=_language),
    "peft DoRA": Workload(build=lora_with_a_head, inputs=_tokens, loss=_language),
    "schedulefree AdamW": Workload(build=mlp, optimizer=_schedule_free),
    "pytorch_optimizer Lookahead": Workload(build=mlp, optimizer=_lookahead),
    "pytorch_optimizer SOAP": Workload(build=mlp, optimizer=_of(pytorch_optimizer.SOAP)),
    "pytorch_optimizer Shampoo": Workload(build=mlp, optimizer=_of(pytorch_optimizer.Shampoo)),
    "diffusers EMAModel": Workload(build=mlp, companion=_ema, follow=_follow),
    "torch AveragedModel": Workload(build=Averaged, after_step=_average),
    "torch spectral_norm": Workload(build=lambda: nn.Sequential(spectral_norm(nn.Linear(16, 4)))),
    "torch weight_norm": Workload(build=_old_weight_norm),
    "torch parametrizations": Workload(build=_parametrised),
    "torch BatchNorm": Workload(build=_normalised),
}
