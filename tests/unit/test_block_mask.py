"""block_mask(): its arguments, which arguments of a function matter, and for whom states are kept."""

import copy
import functools
import pickle
import types

import numpy as np
import pytest
from helpers.machines import HOPPER, empty, problem

import numba_flash
from numba_flash import mods
from numba_flash.abi import tile_states
from numba_flash.abi.parameters import StatesTile
from numba_flash.dispatch import launch
from numba_flash.functions.arguments import reads_argument
from numba_flash.functions.function import Function
from numba_flash.select import around, forward as select

SEGMENTS = np.zeros((2, 8), np.int64)


def made(**given):
    arguments = dict(mask_mod=mods.causal, batch=2, heads=2, seqlen_q=8, seqlen_k=8) | given
    return numba_flash.block_mask(**arguments)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (dict(batch=2.0), TypeError, "batch must be a whole number, not 2.0"),
        (dict(heads=True), TypeError, "heads must be a whole number, not True"),
        (dict(seqlen_k=-1), ValueError, "seqlen_k must be from 0 to 2147418112, not -1"),
        (dict(mask_mod=3), TypeError, "mask_mod must be a plain Python function"),
        (dict(mask_mod=mods.document), TypeError, "mask_mod is called with"),
        (dict(aux=[SEGMENTS]), TypeError, "aux must be a tuple of arrays, not list"),
        (dict(causal=1), TypeError, "causal must be True or False, not 1"),
        (dict(window=3), ValueError, "window must be a pair"),
        (dict(q_offset=1.5), TypeError, "q_offset must be a whole number"),
    ],
)
def test_what_is_wrong_is_said(given, error, words):
    with pytest.raises(error, match=words):
        made(**given)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (dict(block_mask=mods.causal), TypeError, "block_mask must be what numba_flash.block_mask returns, or None"),
        (dict(window=(3, 3)), ValueError, r"window must be that of block_mask, None, not \(3, 3\)"),
        (dict(causal=True), ValueError, "causal must be that of block_mask, False, not True"),
        (dict(q_offset=2), ValueError, "q_offset must be that of block_mask, None, not 2"),
        (dict(seqlens_k=np.array([1, 2], np.int32)), ValueError, "seqlens_k must be that of block_mask"),
        (dict(mask_mod=mods.dilated(2)), ValueError, "mask_mod must be that of block_mask, causal"),
        (dict(aux=(SEGMENTS,)), ValueError, "aux must be the arrays of block_mask"),
        (dict(block_mask=made(seqlen_k=9)), ValueError, r"\(2, 2, 8, 9\), and q and k have \(2, 2, 8, 8\)"),
    ],
)
@pytest.mark.parametrize("backward", [False, True])
def test_what_does_not_go_with_it_is_said(given, error, words, backward):
    q = np.zeros((2, 2, 8, 4), np.float32)
    given = dict(block_mask=made()) | given
    with pytest.raises(error, match=words):
        if backward:
            numba_flash.attention_backward(q, q, q, q, q, q[..., 0].copy(), **given)
        else:
            numba_flash.attention(q, q, q, **given)


def test_the_same_beside_it_is_taken():
    blocks = made(causal=True, mask_mod=mods.document, aux=(SEGMENTS,))
    q = np.random.default_rng(0).standard_normal((2, 2, 8, 4), dtype=np.float32)
    expected = numba_flash.attention(q, q, q, mask_mod=mods.document, aux=(SEGMENTS,), causal=True)
    for beside in ({}, dict(causal=True, mask_mod=mods.document, aux=(SEGMENTS,))):
        assert np.array_equal(numba_flash.attention(q, q, q, block_mask=blocks, **beside), expected)
    assert "document" in repr(blocks)
    with pytest.raises(AttributeError, match="does not change"):
        blocks.causal = False


def one_more(b, h, i, j, table):
    def inner():
        return h

    return inner() > 0


# (function, whether it reads b, whether it reads h)
READS = [
    (mods.causal, False, False),
    (mods.sliding_window(3), False, False),
    (mods.document, True, False),
    (lambda b, h, i, j: j < 3 * h, False, True),
    (lambda b, h, i, j: mods.causal(b, h, i, j), True, True),  # handed on: it may
    (one_more, False, True),
    (functools.partial(lambda n, b, h, i, j: j < n + b, 3), True, False),
    (functools.partial(lambda b, h, i, j, n: j < n, n=3), True, True),  # in doubt it may
    (lambda *x: x[3] < 3, True, True),
    (lambda b, *x: x[2] < 3, False, True),
]


@pytest.mark.parametrize(("function", "reads_b", "reads_h"), READS)
def test_which_arguments_a_function_reads(function, reads_b, reads_h):
    own = Function.of("mask_mod", function)
    assert (reads_argument(own, 0), reads_argument(own, 1)) == (reads_b, reads_h)


def test_how_many_states_there_are():
    tile = StatesTile(64, 96, 2)

    def counted(function, **options):
        p = problem(heads=8, seqlen=1000, seqlen_k=96 * 30, mask_mod=Function.of("mask_mod", function), **options)
        return tile_states.counts(p, tile), tile_states.strides(p, tile)

    # Two words of a tile's states, and one for the order.
    assert counted(mods.causal) == ((1, 1, 16, 2), (0, 0, 3))
    assert counted(lambda b, h, i, j: i > h) == ((1, 4, 16, 2), (0, 48, 3))
    assert counted(lambda b, h, i, j: i > b)[1] == (48, 0, 3)
    assert counted(mods.causal, seqlens_k=empty(1, dtype="int32"))[1] == (48, 0, 3)
    assert counted(mods.causal, mask=empty(1, 8, 1000, 2880, dtype="bool"))[1] == (0, 48, 3)
    tile = StatesTile(64, 96, 1, of_keys=True)  # a word for 16 tiles of queries, of which there are 16, and one more
    assert counted(lambda b, h, i, j: i > h) == ((1, 8, 30, 2), (0, 90, 3))
    p = problem(heads=8, seqlen=1000, seqlen_k=96 * 30, mask_mod=Function.of("mask_mod", lambda b, h, i, j: i > h))
    found = (tile_states.words(p, tile), tile_states.blocks(p, tile), tile_states.order_blocks(p, tile, 16))
    assert found == (8 * 30 * 3, 8 * 30 * 2, 8 * 2)


class Ran(launch.Launch):
    def __init__(self, log, name):
        self.log, self.name = log, name

    def run(self, operands, stream):
        self.log.append((self.name, operands[-1], stream))


def test_states_are_kept_for_each_stream_and_never_from_a_capture(monkeypatch):
    log, numbers, made_arrays = [], {7: 1, 8: 2, 9: None}, iter("abcdefgh")
    monkeypatch.setattr(launch, "number_of", lambda device, stream: numbers[stream])
    monkeypatch.setattr(launch.arrays, "scratch", lambda *_: next(made_arrays))
    q = types.SimpleNamespace(layout=types.SimpleNamespace(device=0))
    steps = [
        launch.Step(Ran(log, "states"), (1,), 0, "key"), launch.Step(Ran(log, "order"), (1,), 0, "other"),
        launch.Step(Ran(log, "kernel"), (0, 1)),
    ]  # fmt: skip
    sequence, blocks = launch.KernelSequence(steps, [((3,), "uint32")]), made()
    for stream in (7, 7, 8, 9, 9, 8, 7):
        sequence.run_with_blocks([q], stream, blocks)
    assert log == [
        ("states", "a", 7), ("order", "a", 7), ("kernel", "a", 7), ("kernel", "a", 7),
        ("states", "b", 8), ("order", "b", 8), ("kernel", "b", 8),
        ("states", "c", 9), ("order", "c", 9), ("kernel", "c", 9),
        ("states", "d", 9), ("order", "d", 9), ("kernel", "d", 9),
        ("kernel", "b", 8), ("kernel", "a", 7),
    ]  # fmt: skip
    log.clear()
    sequence.run([q], 7)
    assert log == [("states", "e", 7), ("order", "e", 7), ("kernel", "e", 7)]
    # What only one of them makes is not taken for what both do: v2 has the states alone.
    log.clear()
    one = launch.KernelSequence([steps[0], steps[2]], [((3,), "uint32")])
    one.run_with_blocks([q], 7, blocks)
    assert log == [("states", "f", 7), ("kernel", "f", 7)]


def copied_window(b, h, q_pos, k_pos, lengths):
    return k_pos < lengths[b]


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda blocks: pickle.loads(pickle.dumps(blocks))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_copies_are_of_the_same_keys(copied):
    blocks = numba_flash.block_mask(copied_window, 1, 2, 5, 6, aux=(np.array([4]),), window=(3, 0), q_offset=1)
    q, k = (np.random.default_rng(n).standard_normal((1, 2, n, 4)).astype("float32") for n in (5, 6))
    expected = numba_flash.attention(q, k, k, block_mask=blocks)
    other = copied(blocks)
    assert repr(other) == repr(blocks) and other.mask_mod is copied_window
    assert np.array_equal(numba_flash.attention(q, k, k, block_mask=other), expected)


def test_a_deep_copy_has_its_own_arrays_and_the_function_as_it_was_read():
    most = [3]

    def made():
        limit = most[0]
        return lambda b, h, q_pos, k_pos, other: k_pos < limit

    blocks = numba_flash.block_mask(made(), 1, 1, 2, 6, aux=(np.zeros(2),))
    other = copy.deepcopy(blocks)
    assert other.function is blocks.function and other.aux[0] is not blocks.aux[0]


def test_torch_saves_a_block_mask(tmp_path):
    torch = pytest.importorskip("torch", reason="needs torch")
    blocks = numba_flash.block_mask(copied_window, 1, 2, 5, 6, aux=(torch.tensor([4]),))
    torch.save(blocks, tmp_path / "blocks")
    other = torch.load(tmp_path / "blocks", weights_only=False)
    assert torch.equal(other.aux[0], blocks.aux[0]) and other.function is blocks.function


def near(b, h, q_pos, k_pos):
    row, column = min(max(q_pos // 64, 6), 57), min(max(q_pos % 64, 6), 57)
    return abs(row - k_pos // 64) <= 6 and abs(column - k_pos % 64) <= 6


def later(b, h, q_pos, k_pos):
    return q_pos <= k_pos


def of_a_head(b, h, q_pos, k_pos):
    return q_pos <= k_pos + h


# By function, whether a block_mask keeps the bits, and the rest of the problem.
@pytest.mark.parametrize(
    ("function", "kept", "given", "reads"),
    [
        (near, False, {}, True),
        (later, False, {}, False),
        (later, True, {}, True),
        (later, True, dict(mask=empty(4096, dtype="bool")), False),
        (later, True, dict(score_mod=Function.of("score_mod", lambda s, b, h, i, j: s * 2)), False),
        (later, True, dict(seqlen=16384), True),
        (later, True, dict(seqlen=16400), False),
        (of_a_head, True, dict(heads=5, seqlen=8192), False),
        (later, True, dict(dtype="float32"), False),
    ],
)
def test_who_reads_a_mask_mod_as_bits(function, kept, given, reads):
    p = problem(**given, mask_mod=Function.of("mask_mod", function)).if_kept(kept)
    config = select.config_of("wgmma", p, HOPPER)
    before = [made.kernel for made in around.prologue(config, p, HOPPER)]
    assert (before[-1] == "mask_mod_bits") == config.mask_mod_as_bits == reads
    other = problem(**given, mask_mod=Function.of("mask_mod", lambda b, h, i, j: i != 3)).if_kept(kept)
    assert (select.config_of("wgmma", other, HOPPER) == config) == (reads and kept), "one kernel for every mask_mod"
