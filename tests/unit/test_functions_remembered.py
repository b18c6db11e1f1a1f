"""What is kept of callers' functions has limits, in memory and on disk, and one that compiles each time is told of."""

import os
import warnings
import weakref

import numpy as np
import pytest

import numba_flash
from numba_flash.cpu import cache
from numba_flash.functions import remembered
from numba_flash.functions.function import Function
from numba_flash.machine import cache_folder

X = np.ones((1, 1, 2, 4), np.float32)


def made(factor, steps=1):
    return lambda s, b, h, i, j: s * factor * steps


def call(function):
    return numba_flash.attention(X, X, X, score_mod=function, kernel="cpu")


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    call(None)  # the kernel itself comes from where it is
    monkeypatch.setenv("NUMBA_FLASH_CACHE_DIR", str(tmp_path))
    remembered.forget()
    return tmp_path / "cpu"


@pytest.mark.filterwarnings("always")
def test_a_function_that_is_compiled_for_every_number_is_told_of_once(empty_cache):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for factor in (0.1, 0.1, 0.2):
            call(made(factor))
    with pytest.warns(RuntimeWarning, match=r"score_mod: <lambda> \(.*line \d+\) was compiled 3 times.*aux=") as said:
        call(made(0.3))
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for factor in (0.4, 0.5):
            call(made(factor))
        for steps in (2, 3, 4):  # whole numbers are what a function is made of
            call(made(0.5, steps))


@pytest.mark.filterwarnings("always")
def test_what_the_disk_cache_has_is_no_compiling(empty_cache):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for factor in (0.1, 0.2):
            call(made(factor))
        remembered.forget()
        for factor in (0.1, 0.2, 0.1):
            call(made(factor))


def test_functions_are_forgotten_with_all_that_was_made_of_them(monkeypatch):
    monkeypatch.setattr(remembered, "MOST", 3)
    first = Function.of("score_mod", made(0.25))
    call(made(0.25))
    watched = weakref.ref(_code_of(first))
    assert watched() is not None
    for number in range(8):
        Function.of("score_mod", made(number))
    assert watched() is None and Function.of("score_mod", made(0.25)) == first
    assert np.isfinite(call(made(0.25))).all()


def _code_of(function):
    """The compiled code of a score_mod."""
    from numba_flash.cpu import functions

    return functions.make("score_mod", function, "float32", (), False, True)


def test_a_block_mask_knows_its_function_after_it_was_forgotten(monkeypatch):
    monkeypatch.setattr(remembered, "MOST", 2)

    def mask(b, h, i, j):
        return i >= j

    blocks = numba_flash.block_mask(mask, 1, 1, 2, 2)
    for number in range(4):
        Function.of("score_mod", made(number))
    o = numba_flash.attention(X, X, X, block_mask=blocks, mask_mod=mask, kernel="cpu")
    assert np.isfinite(o).all()


def test_a_folder_keeps_the_entries_that_were_used_last(tmp_path):
    for number in range(10):
        path = tmp_path / f"{number}.nbc"
        path.write_bytes(bytes(100))
        os.utime(path, (1000 + number, 1000 + number))
    (tmp_path / "0.nbc.of_another_process").write_bytes(bytes(500))
    cache_folder.keep_within(tmp_path, ".nbc", 1000)
    assert len(list(tmp_path.glob("*.nbc"))) == 10
    os.utime(tmp_path / "0.nbc")
    cache_folder.keep_within(tmp_path, ".nbc", 600)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "0.nbc", "0.nbc.of_another_process", "6.nbc", "7.nbc", "8.nbc", "9.nbc",
    ]  # fmt: skip


def test_the_cpu_cache_has_a_limit(empty_cache, monkeypatch):
    monkeypatch.setattr(cache, "keep_within", lambda folder, suffix: cache_folder.keep_within(folder, suffix, 1))
    call(made(0.7))
    assert not list(empty_cache.glob("score_mod-*.nbc"))
    monkeypatch.undo()


def test_an_entry_that_is_read_counts_as_used(empty_cache):
    call(made(0.6))
    (path,) = empty_cache.glob("score_mod-*.nbc")
    os.utime(path, (1000, 1000))
    remembered.forget()
    call(made(0.6))
    assert path.stat().st_mtime > 1e9
