"""Which tiles a mask_mod leaves, and that kernels walk those alone."""

import dataclasses

import numpy as np
import pytest
from contracts import backward, forward
from contracts.forward import same_bits
from numba import cuda

import numba_flash
from numba_flash import mods, reference, testing
from numba_flash.abi.arguments import tuple_class
from numba_flash.abi.parameters import STATES_IN_WORD, StatesTile
from numba_flash.api import forward as api
from numba_flash.arrays import read
from numba_flash.config.tile_states import TileOrderConfig
from numba_flash.config.wgmma_backward import WgmmaDkdvConfig, WgmmaDqConfig
from numba_flash.dispatch import forward as dispatch
from numba_flash.functions import numbers
from numba_flash.functions.function import Function
from numba_flash.gpu.compiled import source
from numba_flash.kernels.score import longest_first, tile_walk
from numba_flash.kernels.score.mask_bits import ENDS, PIECE
from numba_flash.machine.target import Target
from numba_flash.problem.options import uses
from numba_flash.ptx.sim.launch import run
from numba_flash.select import rungs

EMPTY, PARTIAL, FULL = range(3)
KERNELS = ("v1", "v2", "mma", "wgmma")


def by_head(b, h, q_pos, k_pos):
    return k_pos <= q_pos - 10 * h


def by_entry(b, h, q_pos, k_pos):
    return k_pos % 64 < 32 * (b + 1)


def nothing(b, h, q_pos, k_pos):
    return k_pos < 0


def far_apart(b, h, q_pos, k_pos):
    return k_pos < 5 or abs(k_pos - 3 * q_pos) < 9


def some_queries(b, h, q_pos, k_pos):
    return q_pos % 3 == 1 and k_pos > 40


def of_valid_keys(b, h, q_pos, k_pos, ids):
    return ids[b, k_pos] > 0


def int32(*numbers):
    return np.array(numbers, np.int32)


DOCUMENTS = np.repeat(np.array([[4, 1, 2, 9]] * 2), [34, 3, 29, 14], axis=1)
IDS = np.tile(np.arange(70) // 20 % 2, (2, 1))  # as long as the longer entry: nothing behind it may be asked about
# Of every case the sizes, and the options of block_mask.
CASES = {
    "documents": (dict(seqlen_q=80, seqlen_k=80), dict(mask_mod=mods.document, aux=(DOCUMENTS,))),
    "causal documents": (dict(seqlen_q=80, seqlen_k=80), dict(mask_mod=mods.document, aux=(DOCUMENTS,), causal=True)),
    "sliding window": (dict(seqlen_q=50, seqlen_k=111), dict(mask_mod=mods.sliding_window(20, 3))),
    "prefix": (dict(seqlen_q=70, seqlen_k=70), dict(mask_mod=mods.prefix_lm, aux=(int32(3, 40),))),
    "dilated": (dict(seqlen_q=50, seqlen_k=75), dict(mask_mod=mods.dilated(3))),
    "by head": (dict(seqlen_q=34, seqlen_k=50), dict(mask_mod=by_head)),
    "a group in a tile": (dict(seqlen_q=9, seqlen_k=100, heads=4, heads_kv=2), dict(mask_mod=by_head)),
    "by entry": (dict(seqlen_q=20, seqlen_k=100, heads=1), dict(mask_mod=by_entry)),
    "nothing": (dict(seqlen_q=40, seqlen_k=70), dict(mask_mod=nothing)),
    "rows of nothing": (dict(seqlen_q=20, seqlen_k=70, heads=1), dict(mask_mod=some_queries)),
    "many words": (dict(seqlen_q=20, seqlen_k=600, heads=1), dict(mask_mod=far_apart, q_offset=200)),
    "offsets": (dict(seqlen_q=20, seqlen_k=70), dict(mask_mod=mods.sliding_window(7), q_offset=int32(30, -9))),
    "lengths": (
        dict(seqlen_q=20, seqlen_k=100, heads=1), dict(mask_mod=of_valid_keys, aux=(IDS,), seqlens_k=int32(70, 31)),
    ),
    "a window beside": (dict(seqlen_q=40, seqlen_k=100), dict(mask_mod=mods.dilated(2), window=(40, 2))),
}  # fmt: skip


def test_a_neighborhood_in_order_and_a_sparse_pattern(rung):
    if rung.kernel in ("v2", "mma"):
        pytest.skip("tiles have the same states as on v1, or as on wgmma")
    shape = (6, 9)
    order, _ = mods.tile_order(shape, (3, 4))
    starts, columns = np.array([0, 2, 3, 3, 5], np.int32), np.array([0, 2, 1, 0, 3], np.int32)
    near = dict(mask_mod=mods.neighborhood(shape, (3, 5), ordered=True), aux=(order,))
    given = dict(mask_mod=mods.block_sparse(16), aux=(starts, columns))
    case = rung.problem(heads=2, heads_kv=1, seqlen_q=54, seqlen_k=54, batch=1, head_dim=head_dim(rung))
    for options in (near, given):
        expected = numba_flash.attention(case.q, case.k, case.v, **options, kernel="reference")
        found = numba_flash.attention(case.q, case.k, case.v, block_mask=blocks_of(case, options), kernel=rung.kernel)
        np.testing.assert_allclose(found.astype(np.float32), expected.astype(np.float32), atol=2e-2)


OF_ENTRIES = (mods.document, mods.prefix_lm, by_entry, of_valid_keys)  # those that read b


@pytest.fixture(scope="session", params=KERNELS)
def rung(request):
    tensor = rungs.RUNGS[request.param].tensor_cores
    moved = (testing.rows_padded,) if tensor else ()
    return forward.Rung(request.param, *moved, tensor=tensor, tile=32 if tensor else 16, slow=True)


@pytest.fixture(scope="session", params=KERNELS[1:])
def backward_rung(request):
    tensor = rungs.RUNGS[request.param].tensor_cores
    moved = (testing.rows_padded,) if tensor else ()
    return backward.Rung(request.param, *moved, tensor=tensor, tile=32 if tensor else 16, slow=True)


def case_of(rung, name):
    sizes, options = CASES[name]
    batch = rung.batch if name not in ("by entry", "offsets", "lengths", "prefix") else 2
    cut = dict(options)
    for key, value in options.items():
        if isinstance(value, np.ndarray):
            cut[key] = value[:batch]
        if key == "aux":
            cut[key] = tuple(x[:batch] for x in value)
    return rung.problem(**dict(heads=2, heads_kv=1) | sizes, batch=batch, head_dim=head_dim(rung)), cut


def head_dim(rung):
    """Of which states of tiles know nothing: where each product is one of Python's, few."""
    return 16 if rung.tensor else 3


def blocks_of(case, options):
    (batch, heads, seqlen_q, _), seqlen_k = case.q.shape, case.k.shape[2]
    options = dict(options)
    return numba_flash.block_mask(options.pop("mask_mod"), batch, heads, seqlen_q, seqlen_k, **options)


def asked_positions(case, options):
    """-> (which positions functions are asked about, (batch entries, heads, queries, keys); position of query 0)."""
    (batch, heads, seqlen_q, _), seqlen_k = case.q.shape, case.k.shape[2]
    lengths = options.get("seqlens_k", np.full(batch, seqlen_k))
    q_offset = options.get("q_offset")
    q_offset = lengths - seqlen_q if q_offset is None else np.broadcast_to(q_offset, batch)
    left, right = options.get("window", (None, None))
    right = 0 if options.get("causal") else right
    asked = reference.visible_keys(
        batch, seqlen_q, seqlen_k, left=left, right=right, q_offset=q_offset, seqlens_k=lengths, mask=None
    )
    return np.broadcast_to(asked, (batch, heads, seqlen_q, seqlen_k)), q_offset


def expected_states(case, options, tile, shape):
    """By asking about every position: (batch entries, groups of heads, query tiles, key tiles)."""
    function, aux = options["mask_mod"], options.get("aux", ())
    asked, q_offset = asked_positions(case, options)
    seqlen_q, seqlen_k = asked.shape[2:]
    states = np.full(shape, -1)
    for b, g, i, j in np.ndindex(shape):
        found = set()
        for h in range(g * tile.heads, (g + 1) * tile.heads):
            for q in range(i * tile.queries, min((i + 1) * tile.queries, seqlen_q)):
                for k in range(j * tile.keys, min((j + 1) * tile.keys, seqlen_k)):
                    if asked[b, h, q, k]:
                        found.add(bool(function(b, h, q + int(q_offset[b]), k, *aux)))
        states[b, g, i, j] = PARTIAL if len(found) == 2 else FULL if True in found else EMPTY
    return states


def kept(blocks, states):
    """[(config, strides, array)] of what a BlockMask has kept: of states of tiles, or of bits."""
    for (_, _, (config, values), *_), array in blocks._kept.items():
        if states == (config.kept == config.tile_states):
            ((_, names, strides), *_) = values.kinds
            yield config, dict(zip(names, strides, strict=True))[config.kept], np.asarray(array.owner)


def kept_states(blocks, seqlen_k):
    """[(tile, states)] of what a BlockMask has kept: (batch entries, groups of heads, query tiles, key tiles)."""
    for config, strides, words in kept(blocks, states=True):
        tile = config.tile
        by_batch, by_head, by_tile = strides
        groups = blocks.heads // tile.heads if by_head else 1
        own, other = (seqlen_k, blocks.seqlen_q) if tile.of_keys else (blocks.seqlen_q, seqlen_k)
        tiles, count = -(-own // tile.own), -(-other // tile.other)
        words = words.reshape(blocks.batch if by_batch else 1, groups, tiles, by_tile)[..., :-1]
        bits = (words[..., None] >> np.arange(32, dtype=np.uint32)) & 1
        seen, partial = (
            x.reshape(*words.shape[:3], -1) for x in (bits[..., :STATES_IN_WORD], bits[..., STATES_IN_WORD:])
        )
        assert not seen[..., count:].any() and not (partial & ~seen).any()
        states = (seen * FULL - partial)[..., :count].astype(int)
        yield tile, states.swapaxes(2, 3) if tile.of_keys else states


def words_of(blocks):
    """[(words of states, without those of the order; tile)] of what a BlockMask has kept."""
    for config, (*_, by_tile), words in kept(blocks, states=True):
        yield words.reshape(-1, by_tile)[:, :-1], config.tile


# What a mask_mod leaves, word for word; a tile of states may end where a word of bits does not.
@pytest.mark.parametrize("name", CASES)
def test_bits(name):
    case, options = case_of(forward.Rung("wgmma", testing.rows_padded, tensor=True, tile=32, slow=True), name)
    blocks, (asked, q_offset) = blocks_of(case, options), asked_positions(case, options)
    do, o, lse, dlse = backward.incoming(case)
    numba_flash.attention_backward(do, case.q, case.k, case.v, o, lse, dlse=dlse, block_mask=blocks, kernel="wgmma")
    found = {config.kernel: (strides, words) for config, strides, words in kept(blocks, states=False)}
    assert sorted(found) == ["mask_mod_bits", "mask_mod_bits_of_keys"]
    for kernel, (by, words) in found.items():
        for b, h, query, key in np.argwhere(asked):
            row, column = (key, query) if kernel.endswith("of_keys") else (query, key)
            at = b * by[0] + h * by[1] + row // PIECE * by[2] + ENDS + row % PIECE * by[3]
            word = words[at + column // 128 * 4 + column % 8 // 2]
            left = bool(word >> np.uint32(column % 128 // 8 * 2 + column % 2) & 1)
            said = options["mask_mod"](b, h, query + int(q_offset[b]), key, *options.get("aux", ()))
            assert left == said, (kernel, b, h, query, key)


# Tiles have the same states on v1 and v2, and are found in the same way for mma and wgmma. Of v2 and of mma, what
# decides how the kernel walks over them.
OF_V2 = ("documents", "by head", "nothing", "many words", "lengths")
OF_MMA = (*OF_V2, "a group in a tile", "offsets")


@pytest.mark.parametrize("name", CASES)
def test_states_and_results(rung, name):
    if rung.kernel in ("v2", "mma") and name not in (OF_MMA if rung.tensor else OF_V2):
        pytest.skip("tiles have the same states as on v1, or as on wgmma")
    case, options = case_of(rung, name)
    blocks = blocks_of(case, options)
    found = rung(case, block_mask=blocks)
    ((tile, states),) = kept_states(blocks, case.k.shape[2])
    assert tile.heads > 1 or name != "a group in a tile" or not rung.tensor
    np.testing.assert_array_equal(states, expected_states(case, options, tile, states.shape))
    by_batch = options["mask_mod"] in OF_ENTRIES or isinstance(options.get("q_offset"), np.ndarray)
    assert states.shape[0] == (case.q.shape[0] if by_batch else 1)
    assert states.shape[1] == (case.q.shape[1] // tile.heads if options["mask_mod"] is by_head else 1)
    case.options |= options
    testing.check(case, *found, rung.kernel)


def test_a_block_mask_may_be_made_by_itself_or_used_again(rung):
    case, options = case_of(rung, "offsets")
    blocks = blocks_of(case, options)
    found, used_again = rung(case, block_mask=blocks), rung(case, block_mask=blocks)
    by_itself = rung(case, **options)
    assert all(same_bits(x, y) for other in (used_again, by_itself) for x, y in zip(found, other, strict=True))


def with_states(rung, case, options, seen):
    """What comes out where something, or nothing, is said to be seen in all tiles, and mask_mod to decide in none."""
    blocks = blocks_of(case, options)
    rung(case, block_mask=blocks)
    for words, tile in words_of(blocks):
        words[...] = seen * ((1 << -(-case.k.shape[2] // tile.keys)) - 1)
    return rung(case, block_mask=blocks)


def test_what_is_empty_is_left_out(rung):
    case, options = case_of(rung, "dilated")
    o, lse = with_states(rung, case, options, seen=False)
    assert not o.any() and (lse == -np.inf).all()


def test_what_is_full_is_not_asked_about(rung):
    case, options = case_of(rung, "dilated")
    o, lse = with_states(rung, case, options, seen=True)
    plain_o, plain_lse = rung(case)
    assert same_bits(o, plain_o) and same_bits(lse, plain_lse)


def with_gaps(b, h, q_pos, k_pos):
    return q_pos // 128 != 1 and (k_pos // 32) % 2 == 0 and abs(k_pos - q_pos) < 90


# A block of wgmma takes query tile after query tile, of which one sees nothing, one a single tile of keys: its producer
# and its consumers skip the same ones, and the next query tile is asked for once.
@pytest.mark.slow
def test_a_block_takes_several_query_tiles(monkeypatch, nothing_remembered):
    machine = dataclasses.replace(Target.of(None), multiprocessors=1)
    monkeypatch.setattr(dispatch.Target, "of", lambda device: machine)
    own = forward.Rung("wgmma", testing.rows_padded, tensor=True, tile=32, slow=True)
    case = own.problem(300, 300, batch=1, heads=1, head_dim=16, q_offset=0, mask_mod=with_gaps)
    arguments = dict(case.options, kernel="wgmma")
    plan = api.prepare_call(case.q, case.k, case.v, arguments)[1]
    assert plan.choice.config.consumers == 2
    own.check(case)


# With everything else that tiles may need: a tile that is full for mask_mod may be partial for the mask.
@pytest.mark.parametrize("beside", ["mask", "score_mod", "bias", "softcap", "sinks"])
def test_beside_other_options(rung, beside):
    case, options = case_of(rung, "causal documents")
    generator = np.random.default_rng(1)
    given = dict(
        mask=generator.random((80, 80)) < 0.6, score_mod=lambda s, b, h, i, j, ids: s + (i - j) / 50, softcap=2.0,
        bias=generator.standard_normal((80, 80)).astype(np.float32), sinks=np.array([0.5, -1], np.float32),
    )  # fmt: skip
    if beside == "mask":
        given["mask"][:, 15:33] = given["mask"][20:40] = False
        given["mask"][50:, 33:66] = True
    case.options |= options | {beside: given[beside]}
    rung.check(case)


def test_what_lies_in_tiles_that_are_left_out_is_never_read(rung):
    case, options = case_of(rung, "sliding window")
    clean = rung(case, **options)
    case.k[:, :, :32] = case.v[:, :, :32] = np.nan  # the first query stands at 61 and sees 41
    found = rung(case, **options)
    assert all(same_bits(x, y) for x, y in zip(found, clean, strict=True))


# Neither where tiles get their states nor in attention: intervals decide (kernels/score/tile_bounds.py).
@pytest.mark.parametrize("function", [lambda b, h, i, j: j < 1000, lambda b, h, i, j: i - j > 1000])
def test_a_function_is_not_called_where_intervals_decide(monkeypatch, nothing_remembered, function):
    calls, ask = [], numbers.mask_of
    monkeypatch.setattr(numbers, "mask_of", lambda *given: calls.append(0) or ask(*given))
    v1 = forward.Rung("v1", tile=16)
    case = v1.problem(heads=1, heads_kv=1, seqlen_q=20, seqlen_k=40, batch=1, head_dim=16)
    v1(case, mask_mod=function)
    assert not calls
    v1(case, mask_mod=lambda b, h, i, j: i / 3 < j)  # intervals have no rule for a quotient that is real
    assert calls


# Walks from the last tile to the first and from the first to the last, over several words of states.
@pytest.mark.parametrize("density", [0.0, 0.03, 0.5, 1.0])
def test_which_tile_comes_next(density):
    count = 50
    seen = np.random.default_rng(3).random(count) < density
    states = np.zeros(4, np.uint32)
    for tile in np.flatnonzero(seen):
        states[tile // STATES_IN_WORD] |= np.uint32(1) << np.uint32(tile % STATES_IN_WORD)
    states |= np.uint32(0xABCD0000)  # the other half of a word says something else
    used = uses(mask_mod=Function.of("mask_mod", mods.causal))
    walk = tile_walk.make(WgmmaDqConfig("float16", 64, 64, 64, 32, uses=used))
    own_last, own_first = walk.last, walk.first
    arrays_of, strides_of = tuple_class("arrays", ("tile_states",)), tuple_class("strides", ("tile_states",))
    found = np.zeros((2, count, count), np.int64)

    @cuda.jit
    def kernel(found, states):
        arrays, strides = arrays_of(states), strides_of((0, 0, 4))
        for j in range(count):
            for end in range(count):
                found[0, j, end] = own_last(np.int32(0), np.int32(j), np.int32(end), arrays, strides)
                found[1, j, end] = own_first(np.int32(0), np.int32(j), np.int32(end), arrays, strides)

    kernel[1, 1](found, states)
    for j, end in np.ndindex(count, count):
        assert found[0, j, end] == max((t for t in range(end, j + 1) if seen[t]), default=end - 1), (j, end)
        assert found[1, j, end] == min((t for t in range(j, end) if seen[t]), default=end), (j, end)


# More tiles than a block of the kernel has threads, of two heads; many of them as long as others, one all empty.
@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize("tiles", [1, 31, 32, 75])
def test_the_longest_tile_comes_first(tiles, of_keys):
    words, threads, generator = 3, 32, np.random.default_rng(tiles)
    seen = generator.random((2, tiles, 40)) < generator.choice([0, 0.1, 0.9], (2, tiles, 1))
    states = np.zeros((2, tiles, words + 1), np.uint32)
    for head, tile, other in np.argwhere(seen):
        states[head, tile, other // STATES_IN_WORD] |= np.uint32(1) << np.uint32(other % STATES_IN_WORD)
    states[..., :words] |= generator.integers(0, 1 << 16, (2, tiles, words), np.uint32) << 16  # of mask_mod alone
    tile = StatesTile(64, 32, 1, of_keys)
    config, name = TileOrderConfig(tile, of_mask=False, threads=threads), "tile_states" + "_of_keys" * of_keys
    arrays, strides = (tuple_class(kind, (name,)) for kind in ("arrays", "strides"))
    sizes = tuple_class("sizes", ("seqlen_q", "seqlen_k"))(*(tile.own * tiles - 5,) * 2)
    before = states.copy()
    numbers = strides((tiles * (words + 1), 0, words + 1)), sizes
    run(
        lambda: source(config),
        2 * -(-tiles // threads),
        threads,
        0,
        arrays(read("states", states.reshape(-1))),
        numbers,
    )
    lengths = seen.sum(-1)
    for head in range(2):
        sooner = 1 if of_keys else -1
        right = sorted(range(tiles), key=lambda t, head=head: (-lengths[head, t], sooner * t))
        np.testing.assert_array_equal(states[head, :, -1], right)
    np.testing.assert_array_equal(states[..., :-1], before[..., :-1])


# Of some heads at a time all longest tiles, then all second ones; each tile once. L2 holds K and V of four heads.
@pytest.mark.parametrize(("heads", "heads_kv", "of_keys"), [(6, 3, False), (6, 6, False), (6, 3, True)])
def test_every_tile_is_taken_once(monkeypatch, heads, heads_kv, of_keys):
    seqlen, tile_rows, batch, group = 200, 64, 2, heads // heads_kv
    walked = seqlen * group if of_keys else seqlen
    monkeypatch.setattr(longest_first, "L2_BYTES", 4 * walked * 2 * (64 + 64))
    used = uses(mask_mod=Function.of("mask_mod", mods.causal))
    made = WgmmaDkdvConfig if of_keys else WgmmaDqConfig
    tiles = -(-seqlen // tile_rows)
    take = longest_first.make(made("float16", 64, 64, tile_rows, tile_rows, uses=used)).take
    states_name = "tile_states" + "_of_keys" * of_keys
    arrays_of, strides_of = (tuple_class(kind, (states_name,)) for kind in ("arrays", "strides"))
    sizes_of = tuple_class("sizes", ("batch", "heads", "heads_kv", "seqlen_q", "seqlen_k"))
    order = np.array([np.random.default_rng(n).permutation(tiles) for n in range(batch * heads)])
    states = np.stack([np.full_like(order, 99), order], axis=-1).reshape(-1).astype(np.uint32)
    own = heads_kv if of_keys else heads
    found = np.zeros((batch * own * tiles + 1, 3), np.int64)

    @cuda.jit
    def kernel(found, states):
        arrays, strides = arrays_of(states), strides_of((2 * tiles * heads, 2 * tiles, 2))
        sizes = sizes_of(batch, heads, heads_kv, seqlen, seqlen)
        for t in range(found.shape[0]):
            found[t] = take(np.int32(t), arrays, strides, sizes)

    kernel[1, 1](found, states)
    at_once = 4 if of_keys else 4 * group  # of 6 or 12 heads
    right = []
    for first in range(0, batch * own, at_once):
        for rank in range(tiles):
            for head in range(first, min(first + at_once, batch * own)):
                b, h = divmod(head, own)
                right.append((b, h, order[b * heads + (h * group if of_keys else h), rank]))
    np.testing.assert_array_equal(found[:-1], right)
    assert found[-1, 0] == batch, "there is none left"


# Gradients by blocks that own queries and by those that own keys.
OF_BOTH_SIDES = [
    "by head",
    "by entry",
    "rows of nothing",
    "lengths",
    "offsets",
    "a group in a tile",
    "nothing",
    "causal documents",
]


@pytest.mark.parametrize("name", OF_BOTH_SIDES)
def test_gradients(backward_rung, name):
    if backward_rung.kernel == "v2" and name in ("rows of nothing", "offsets", "a group in a tile"):
        pytest.skip("v2 has no tiles of a group, and walks these as it walks the others")
    case, options = case_of(backward_rung, name)
    case.options |= options
    kernel = backward_rung.kernel
    do, o, lse, dlse = backward.incoming(case)
    blocks = blocks_of(case, options)
    operands = (do, case.q, case.k, case.v, o, lse)
    found = numba_flash.attention_backward(*operands, dlse=dlse, block_mask=blocks, kernel=kernel)
    testing.check_gradients(case, found, do, o, lse, dlse, kernel)
    if name == "by entry" and kernel == "v2":
        for which in (dict(block_mask=blocks), options):  # used again, and made by itself
            again = numba_flash.attention_backward(*operands, dlse=dlse, **which, kernel=kernel)
            assert all(same_bits(x, y) for x, y in zip(found[:3], again[:3], strict=True))
    kept = list(kept_states(blocks, case.k.shape[2]))
    assert len(kept) == 2
    for tile, states in kept:
        np.testing.assert_array_equal(states, expected_states(case, options, tile, states.shape))


def test_gradients_leave_out_what_is_empty(backward_rung):
    case, options = case_of(backward_rung, "dilated")
    kernel = backward_rung.kernel
    case.options |= options
    blocks = blocks_of(case, options)
    do, o, lse, _ = backward.incoming(case)
    operands = (do, case.q, case.k, case.v, o, lse)
    assert all(x.any() for x in numba_flash.attention_backward(*operands, block_mask=blocks, kernel=kernel)[:3])
    for words, _ in words_of(blocks):
        words[...] = 0
    assert not any(x.any() for x in numba_flash.attention_backward(*operands, block_mask=blocks, kernel=kernel)[:3])
