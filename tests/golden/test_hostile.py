"""Hostile checkpoints: refused by an error of ours, at once, with little memory, and nothing runs.

``DIST_CKPT_WRITE_VERDICTS=1`` writes ``hostile/verdicts.json`` anew: look at the difference.
"""

from __future__ import annotations

import filecmp
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dist_ckpt import errors

HERE = Path(__file__).parent / "hostile"
VERDICTS = HERE / "verdicts.json"
TIMEOUT_SECS = 540
GENERATED_WITH_TORCH = "2.13."
NBYTES = 96 << 20
"""What opening a hostile checkpoint may take; most take nothing that can be measured."""


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hostile_generate", HERE / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATE = _generator()
KIND = {name: kind for name, (kind, _) in {**GENERATE.STATIC, **GENERATE.LIVE}.items()}
LARGE = {"common_of_300000_keys", "common_twice_in_300000"}
"""Long and honest, but for one key: what they hold takes memory."""
SAYS = {"common_enum_os", "common_layout", "common_of_300000_keys", "metadata_long_path",
        "gigantic_zarr", "packed_gigantic"}  # fmt: skip
"""Say something else than the honest checkpoint, in what can be told without harm: their values,
the shape of a tensor that cannot be read, a path at which nothing is put."""
HARMLESS = {"common_enum_os", "common_of_300000_keys", "metadata_attributes", "metadata_long_path"}
"""Nothing of these is refused: they come to no more than a value, or to nothing at all."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Open everything in a process with limits; return what became of it, by name."""
    root = tmp_path_factory.mktemp("hostile")
    paths = {name: root / name for name in KIND}
    for name in GENERATE.STATIC:
        GENERATE.assemble(name, root / name)
    GENERATE.make_live(root)
    paths |= {f"honest_{kind}": HERE / "honest" / kind for kind in GENERATE.KINDS}
    names = sorted(paths)
    working = root / "working directory"
    working.mkdir()
    results = working / "results.jsonl"
    done = subprocess.run(
        [sys.executable, HERE / "probe.py", results, *(paths[name] for name in names)],
        cwd=working,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=TIMEOUT_SECS,
        check=False,
    )
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert done.returncode == 0, f"{lines[-1]}, then: {done.stdout.decode()[-2000:]}"
    found = {line["done"]: line["found"] for line in lines if "done" in line}
    left = sorted(one.name for one in working.iterdir())
    assert left == ["results.jsonl"], "code from a checkpoint has run"
    for kind in GENERATE.KINDS:
        found[f"honest_{kind}"] = found.pop(kind)
    if os.environ.get("DIST_CKPT_WRITE_VERDICTS"):
        verdicts = {name: _verdict(found[name]) for name in sorted(KIND)}
        VERDICTS.write_text(json.dumps(verdicts, indent=1) + "\n")
    return found


def _verdict(found: dict[str, Any]) -> dict[str, str]:
    """Return the error of each way that refused."""
    return {way: told[0] for way, told in found.items() if way != "nbytes" and told[0] != "value"}


def test_the_kept_cases_are_what_the_generator_makes(tmp_path: Path) -> None:
    """Byte by byte: nothing is committed that nobody can make again.

    ``.metadata`` is in most cases pickled by torch's DCP, whose bytes are those of one release.
    """
    is_same_torch = torch.__version__.startswith(GENERATED_WITH_TORCH)
    GENERATE.write_honest(tmp_path / "honest")
    GENERATE.write_cases(HERE / "honest", tmp_path / "cases")

    for folder in ("honest", "cases"):
        made, kept = _files(tmp_path / folder), _files(HERE / folder)
        assert made == kept
        _, different, odd = filecmp.cmpfiles(tmp_path / folder, HERE / folder, made, shallow=False)
        if not is_same_torch:
            different = [name for name in different if Path(name).name != ".metadata"]
        assert (different, odd) == ([], [])


def _files(path: Path) -> list[str]:
    return sorted(one.relative_to(path).as_posix() for one in path.rglob("*") if one.is_file())


def test_honest_checkpoints_open_in_every_way(results: dict[str, dict[str, Any]]) -> None:
    """What is refused below is refused for what was changed, and for nothing else."""
    for kind in GENERATE.KINDS:
        assert _verdict(results[f"honest_{kind}"]) == {}


@pytest.mark.parametrize("name", sorted(KIND))
def test_it_is_refused(name: str, results: dict[str, dict[str, Any]]) -> None:
    """By the error that is written down for it; what is read in other ways is true."""
    found, honest = results[name], results[f"honest_{KIND[name]}"]
    verdict = _verdict(found)

    assert all(hasattr(errors, error) for error in verdict.values()), found
    assert verdict == json.loads(VERDICTS.read_text())[name]
    assert (name in HARMLESS) == (not set(verdict) - {"check"})
    assert "check" not in verdict
    assert found["nbytes"] < (NBYTES if name not in LARGE else 1 << 30)
    if name not in SAYS:
        for way in set(found) - set(verdict) - {"nbytes", "check"}:
            assert found[way] == honest[way], way


def test_refusals_of_code_say_what_would_run(results: dict[str, dict[str, Any]]) -> None:
    """Named, with the file, and with what allows it where anything does."""
    for name in ("common_pt_code", "common_pt_code_protocol_5", "common_pt_instance"):
        assert ".system" in results[name]["common"][1]
        assert "allow_pickle=True" in results[name]["common"][1]
    assert "posix.system" in results["metadata_pickle_code"]["load"][1]
    assert "step (int)" in results["common_pickle"]["common"][1]
    assert "posix.system" in results["record_code"]["load"][1]
