"""Every example runs by itself, in a few seconds, without arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests._samples import IS_SOAK
from tests.multiprocess._world import run_file

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TIMEOUT_SECS = 240.0

SAYS = {
    "01_core.py": ["at step 1", "the note 'any value'"],
    "02_reshard.py": ["4 ranks: losses", "2 ranks: losses"],
    "03_lightning.py": ["stopped at step 8", "trained on to step 16"],
    "04_accelerate.py": ["saved after 4 steps", "back to what was saved"],
}


def run_example(name: str, directory: Path) -> str:
    """Run an example in an empty directory and return what it printed."""
    is_fresh = IS_SOAK or name == "01_core.py"
    done = run_file(EXAMPLES / name, cwd=directory, is_fresh=is_fresh, timeout_secs=TIMEOUT_SECS)
    assert done.returncode == 0, f"{name}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_example_is_run_here() -> None:
    """A new example needs a line in the table above."""
    assert sorted(SAYS) == sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("name", sorted(SAYS))
def test_example_runs_and_says_what_it_did(name: str, tmp_path: Path) -> None:
    """The example ends well, prints its result and leaves nothing behind."""
    printed = run_example(name, tmp_path)

    for text in SAYS[name]:
        assert text in printed
    assert list(tmp_path.iterdir()) == []
    if name == "02_reshard.py":
        # The step after the checkpoint has the same loss on four ranks and on two.
        four, two = (float(line.rsplit(" ", 1)[1]) for line in printed.splitlines())
        assert two == pytest.approx(four, rel=1e-5)
