"""The garbage collector waits and goes on, as it was."""

from __future__ import annotations

import gc

import pytest

from dist_ckpt._process.gc_pause import collector_paused


def test_it_waits_inside_and_goes_on_behind() -> None:
    """Also if what is done fails, and if it is done inside of itself."""
    assert gc.isenabled()
    with pytest.raises(ValueError, match="boom"), collector_paused():
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise ValueError("boom")
    assert gc.isenabled()


def test_who_has_switched_it_off_finds_it_off() -> None:
    """It was not ours to switch on."""
    gc.disable()
    try:
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
