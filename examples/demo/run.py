"""The demo: train, be killed in the middle of a save, resume on other layouts; compare losses.

1. Lightning, FSDP2 on 2 processes, without interruption: the reference.
2. The same, but SIGKILLed in the middle of a save.
3. Resumed from the last committed checkpoint on the same layout: losses equal to the bit.
4. Resumed from it under Lightning with DDP on 1 process, then under Accelerate on 3 processes:
   losses equal within 1e-5, relative.

Prints a table and writes ``out/demo/losses.png``.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUT = Path("out/demo").resolve()
STEPS, KILL_FROM, HALF = 48, 24, 32
TIMEOUT_SECS = 120
TOLERANCE = 1e-5


def start(script: str, ranks: int, *args: str) -> list[subprocess.Popen[bytes]]:
    """Start the ranks of one training run, as torchrun would."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "demo",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return [
        subprocess.Popen(
            [sys.executable, str(HERE / script), *args],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]


def finish(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for a run; a rank that fails ends the demo."""
    deadline = time.monotonic() + TIMEOUT_SECS
    try:
        codes = [rank.wait(max(1.0, deadline - time.monotonic())) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")


def kill_in_a_save(ranks: Sequence[subprocess.Popen[bytes]], work_dir: Path) -> str:
    """SIGKILL all ranks while the checkpoint of step 24 or a later one is being written."""
    deadline = time.monotonic() + TIMEOUT_SECS
    while time.monotonic() < deadline:
        if any(rank.poll() is not None for rank in ranks):
            raise SystemExit("the run ended before it could be killed in a save")
        committed = steps_in(work_dir)  # first: an attempt seen after it is of a later step
        attempts = list(work_dir.glob(".dist-ckpt-*.attempt"))
        if attempts and committed and committed[-1] >= KILL_FROM - 8:
            for rank in ranks:
                rank.send_signal(signal.SIGKILL)
            for rank in ranks:
                rank.wait()
            if attempts[0].exists():
                return f"killed while {attempts[0].name} was written"
            raise SystemExit("the save ended before the kill; run the demo again")
        time.sleep(0.0005)
    raise SystemExit("no save was seen")


def steps_in(work_dir: Path) -> list[int]:
    return sorted(int(path.stem.split("=")[1]) for path in work_dir.glob("step=*.ckpt"))


def losses(path: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows}


def report(runs: dict[str, dict[int, float]], reference: dict[int, float]) -> bool:
    """Print the table; return whether every resumed loss is as it must be."""
    print(f"\n{'step':>4}  {'uninterrupted':>18}  {'resumed':>18}  {'difference':>10}  layout")
    good = True
    for layout, run in runs.items():
        exact = "same layout" in layout
        for step, loss in sorted(run.items()):
            difference = abs(loss - reference[step]) / reference[step]
            fine = loss == reference[step] if exact else difference <= TOLERANCE
            good &= fine
            if step % 4 == 0 or not fine:
                told = "0" if loss == reference[step] else f"{difference:.1e}"
                mark = "" if fine else "   <-- WRONG"
                values = f"{reference[step]:>18.15f}  {loss:>18.15f}"
                print(f"{step:>4}  {values}  {told:>10}  {layout}{mark}")
    return good


def plot(runs: dict[str, dict[int, float]], reference: dict[int, float], killed_at: int) -> Path:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.2), dpi=110)
    axes.plot(reference.keys(), reference.values(), color="0.8", lw=9, label="never interrupted")
    for (layout, run), width in zip(runs.items(), (5, 1.5, 1.5), strict=True):
        axes.plot(run.keys(), run.values(), lw=width, marker=".", label=f"resumed: {layout}")
    axes.axvline(killed_at, color="tab:red", ls="--", lw=1, label="SIGKILL in the middle of a save")
    axes.set(xlabel="step", ylabel="loss", title="Train, be killed, resume on another layout")
    axes.legend(fontsize=8)
    figure.tight_layout()
    path = OUT / "losses.png"
    figure.savefig(path)
    return path


def main() -> None:
    started = time.monotonic()
    shutil.rmtree(OUT, ignore_errors=True)
    whole, killed, same, other = (OUT / n for n in ("whole", "killed", "same", "other"))
    for folder in (whole, killed, same, other):
        folder.mkdir(parents=True)
    lightning, steps = "train_lightning.py", str(STEPS)

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:5.1f} s] {text}", flush=True)

    say("Lightning, FSDP2 on 2 processes, never interrupted")
    finish(start(lightning, 2, "fsdp2", str(whole), str(OUT / "whole.jsonl"), steps))
    say("the same, to be killed")
    ranks = start(lightning, 2, "fsdp2", str(killed), str(OUT / "killed.jsonl"), steps)
    try:
        say(kill_in_a_save(ranks, killed))
    finally:
        for rank in ranks:
            rank.kill()
    last = steps_in(killed)[-1]
    checkpoint = str(killed / f"step={last}.ckpt")
    say(f"committed checkpoints: steps {steps_in(killed)}; resuming from step {last}")
    say("same layout: Lightning, FSDP2 on 2 processes")
    finish(start(lightning, 2, "fsdp2", str(same), str(OUT / "same.jsonl"), steps, checkpoint))
    say("another layout: Lightning, DDP on 1 process")
    finish(start(lightning, 1, "ddp", str(other), str(OUT / "ddp.jsonl"), str(HALF), checkpoint))
    checkpoint = str(other / f"step={HALF}.ckpt")
    say("and on with another framework: Accelerate, DDP on 3 processes")
    finish(start("train_accelerate.py", 3, str(OUT / "accelerate.jsonl"), steps, checkpoint))

    runs = {
        "Lightning FSDP2 x 2, same layout": losses(OUT / "same.jsonl"),
        "Lightning DDP x 1": losses(OUT / "ddp.jsonl"),
        "Accelerate DDP x 3": losses(OUT / "accelerate.jsonl"),
    }
    reference = losses(OUT / "whole.jsonl")
    good = report(runs, reference)
    say(f"plot: {plot(runs, reference, max(losses(OUT / 'killed.jsonl')))}")
    verdict = "equal to the bit on the same layout, within 1e-5 across layouts"
    print(f"\nresumed losses: {verdict}: {'yes' if good else 'NO'}")
    if not good:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
