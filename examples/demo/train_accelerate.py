"""Train under Accelerate: ``train_accelerate.py LOSS_LOG STEPS CHECKPOINT``."""

from __future__ import annotations

import sys
import warnings

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from language_model import LanguageModel, LossLog, Text, loss_of, make_optimizer

from accelerate_dist_ckpt import DistCkptIO

warnings.filterwarnings("ignore")


def main(log_path: str, steps: str, checkpoint: str) -> None:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True)
    )
    accelerator.register_checkpoint_io(DistCkptIO())  # the one line
    model = LanguageModel()
    model, optimizer, scheduler = accelerator.prepare(model, *make_optimizer(model))
    accelerator.load_state(checkpoint)
    text, losses = Text(), LossLog(log_path)
    for step in range(scheduler.scheduler.last_epoch, int(steps)):
        batch = text.batch(step, accelerator.process_index, accelerator.num_processes)
        loss = loss_of(model, batch)
        losses.add(step, loss, accelerator.num_processes)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
