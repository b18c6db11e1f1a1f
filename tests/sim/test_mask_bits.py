"""What a mask shows, as the tensor-core kernels are told it (numba_flash/kernels/score/mask_bits.py)."""

import numpy as np
import pytest
from contracts import backward, forward

import numba_flash
from numba_flash import arrays, testing
from numba_flash.abi import mask_bits
from numba_flash.api import forward as api
from numba_flash.config.mask_bits import MaskBitsConfig
from numba_flash.dispatch import launch
from numba_flash.kernels.score.mask_bits import ENDS, PIECE, SEEN_BY_ALL, SEEN_BY_SOME
from numba_flash.machine.target import Target

ROWS, COLUMNS = 37, 300
row, column = np.arange(ROWS)[:, None], np.arange(COLUMNS)
MASKS = {
    "right padding": np.broadcast_to(column < 170, (1, 1, ROWS, COLUMNS)),
    "left padding": np.broadcast_to(column >= 131, (1, 1, ROWS, COLUMNS)),
    "a hole": np.broadcast_to((column != 140) & (column >= 3), (1, 1, ROWS, COLUMNS)),
    "nothing": np.zeros((1, 1, ROWS, COLUMNS), bool),
    "everything": np.ones((1, 1, ROWS, COLUMNS), bool),
    "band": ((row + 90 <= column) & (column <= row + 150))[None, None],
    "two runs": ((column < 20 + row) | (column > 200 - row))[None, None],
    "documents": (row // 10 == column // 80)[None, None],
    "random": np.random.default_rng(0).random((1, 1, ROWS, COLUMNS)) < 0.9,
}


def pieces_of(mask, threads, of_keys):
    """-> (pieces, words of one)."""
    q, k = (np.zeros((*mask.shape[:2], n, 8), np.float16) for n in mask.shape[2:])
    problem = api.prepare_call(q, k, k, dict(mask=mask, kernel="wgmma"))[1].problem
    config = MaskBitsConfig(threads=threads, of_keys=of_keys)
    pieces, (*_, row_words) = mask_bits.layout(problem, of_keys)
    made = np.full(mask_bits.words(problem, of_keys), 0xABABABAB, np.uint32)
    given = dict(mask=mask, mask_bits=made, mask_bits_of_keys=made)
    ready = launch.on_gpu(config, problem, Target.of(None))
    ready.run([arrays.read(name, given[name]) for name in config.parameters.arrays], 0)
    return made.reshape(pieces, PIECE * row_words + ENDS)


def ranges_of(mask, threads, of_keys):
    """-> {which: (pieces, 2)}."""
    words = pieces_of(mask, threads, of_keys)
    return {which: words[:, which : which + 2].astype(np.int64) for which in (SEEN_BY_SOME, SEEN_BY_ALL)}


def bits_of(words, columns):
    """-> (rows of all pieces, columns): what the bits of the pieces say."""
    x = np.arange(columns)
    word, bit = x // 128 * 4 + x % 8 // 2, x % 128 // 8 * 2 + x % 2
    rows = words[:, ENDS:].reshape(len(words) * PIECE, -1)
    return (rows[:, word] >> bit.astype(np.uint32) & 1).astype(bool)


def laid_out(mask, how):
    """The same mask in other memory, of a head."""
    rows, columns = mask.shape
    if how == "column by column":
        return np.asfortranarray(mask)
    if how == "column by column, padded":
        return laid_out(mask.T, "padded").T
    if how == "backwards":
        return np.ascontiguousarray(mask[::-1, ::-1])[::-1, ::-1]
    step, offset, more = {"contiguous": (1, 0, 0), "padded": (1, 0, -columns % 16), "from the second byte": (1, 1, 15),
                          "every second byte": (2, 0, 4)}[how]  # fmt: skip
    memory = np.ones((rows, step * (columns + more + offset)), bool)  # what is around it counts as seen
    found = memory[:, offset : offset + step * columns : step]
    found[...] = mask
    return found


LAYOUTS = ["contiguous", "padded", "from the second byte", "every second byte", "column by column",
           "column by column, padded", "backwards"]  # fmt: skip


@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize("columns", [300, 134])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_of_a_mask(layout, columns, of_keys):
    """Read by words, by 16 rows at a time, or byte by byte; the last rows and columns are fewer than the others."""
    mask = np.random.default_rng(3).random((ROWS, columns)) < 0.7
    words = pieces_of(laid_out(mask, layout)[None, None], 64, of_keys)
    seen = mask.T if of_keys else mask
    found = bits_of(words, seen.shape[1])
    assert (found[: len(seen)] == seen).all()
    assert not found[len(seen) :].any()


# Blocks have more warps than a piece has columns for. Of rows that are alike one is read, at an odd address.
@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize("shape", [(3, 2, 21, 35), (3, 1, 1, 150), (1, 2, 21, 1)], ids=str)
def test_pieces_of_all_heads_share_blocks(shape, of_keys):
    memory = np.random.default_rng(5).random((*shape[:3], 2 * shape[3] + 1)) < 0.6
    mask = np.broadcast_to(
        memory[..., 1::2], (*shape[:2], *np.broadcast_shapes(shape[2:], (21, 35 if shape[3] == 1 else 1)))
    )
    words, alone = (pieces_of(mask, threads, of_keys) for threads in (160, 32))
    assert (words == alone).all(), "whatever a block has"
    seen = mask.swapaxes(2, 3) if of_keys else mask
    own = len(words) // (shape[0] * shape[1])
    for number, rows in enumerate(seen.reshape(-1, *seen.shape[2:])):
        found = bits_of(words[number * own : (number + 1) * own], rows.shape[1])
        count = min(len(found), len(rows))  # those that are alike are one piece
        assert (found[:count] == rows[:count]).all()


def test_any_nonzero_byte_unmasks_its_key():
    mask = np.random.default_rng(4).choice(np.array([0, 1, 128, 255], np.uint8), (ROWS, 304))
    for of_keys, seen in ((False, mask), (True, mask.T)):
        words = pieces_of(mask.view(bool)[None, None], 32, of_keys)
        assert (bits_of(words, seen.shape[1])[: len(seen)] == (seen != 0)).all()


@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize("threads", [32, 96])
@pytest.mark.parametrize("name", MASKS)
def test_ranges_of_a_mask(name, threads, of_keys):
    found, seen = ranges_of(MASKS[name], threads, of_keys), MASKS[name][0, 0]
    if of_keys:
        seen = seen.T
    columns = seen.shape[1]
    for piece in range(len(found[SEEN_BY_SOME])):
        # The pieces of a mask that all rows share are one.
        rows = seen[piece * PIECE : (piece + 1) * PIECE] if len(found[SEEN_BY_SOME]) > 1 else seen
        shown = np.flatnonzero(rows.any(0))
        some = (shown[0], shown[-1] + 1) if len(shown) else (columns, 0)
        assert tuple(found[SEEN_BY_SOME][piece]) == some
        whole = rows.all(0)
        first = int(whole.argmax()) if whole.any() else columns
        cut = np.flatnonzero(~whole[first:])
        end = first + int(cut[0]) if len(cut) else columns
        assert tuple(found[SEEN_BY_ALL][piece]) == (first, end)
        assert rows[:, first:end].all()


# In tiles of 32 keys: some of which a mask hides whole, some in part, and some not at all, from either end.
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", ["right padding", "left padding", "a hole", "band", "two runs", "documents"])
def test_tiles_without_a_masked_score(name, dtype):
    rung = forward.Rung("wgmma", testing.rows_padded, tensor=True, tile=32, slow=True)
    case = rung.problem(ROWS, COLUMNS, batch=1, heads=1, heads_kv=1, head_dim=16, dtype=dtype)
    rung.check(case, mask=MASKS[name])


# The same for gradients, whose blocks own queries and walk over keys, or the other way around.
@pytest.mark.parametrize("turned", [False, True], ids=["many keys", "many queries"])
@pytest.mark.parametrize("name", ["left padding", "a hole", "band", "documents"])
def test_gradients_of_tiles_without_a_masked_score(name, turned):
    rung = backward.Rung("wgmma", testing.rows_padded, tensor=True, tile=32, slow=True)
    mask = MASKS[name][..., 100:270]
    case = rung.problem(ROWS, 170, batch=1, heads=1, heads_kv=1, head_dim=8)
    if turned:
        mask, case = mask.swapaxes(2, 3), rung.problem(170, ROWS, batch=1, heads=1, heads_kv=1, head_dim=8)
    rung.check(case, mask=mask)


@pytest.mark.parametrize("kernel", ["mma", "wgmma"])
@pytest.mark.parametrize("shape", [(0, 20), (5, 0)], ids=["no queries", "no keys"])
def test_an_empty_mask_is_not_read(kernel, shape):
    """NumPy gives an array without elements any strides: those of a mask that all rows share, too."""
    queries, keys = shape
    q, k = np.ones((1, 6, queries, 16), np.float16), np.ones((1, 2, keys, 16), np.float16)
    for mask in (np.broadcast_to(np.ones((1, 6, queries, 1), bool), (1, 6, *shape)), np.ones((1, 1, 1, keys), bool)):
        o, lse = numba_flash.attention(q, k, k, mask=mask, kernel=kernel, return_lse=True)
        made = numba_flash.attention_backward(o, q, k, k, o, lse, mask=mask, kernel=kernel)
        assert [x.shape for x in made[:3]] == [q.shape, k.shape, k.shape] and not any(x.any() for x in made[:3])


# Positions hide some scores, in some of the tiles that a mask cuts; and where they hide none, ALiBi asks for them.
BESIDE = {
    "lengths": dict(seqlens_k=np.array([130], np.int32)),
    "causal, and slopes": dict(causal=True, alibi_slopes=np.array([0.2], np.float32)),
    "a window": dict(window=(70, 20)),
}


def random(rows, columns):
    return np.random.default_rng(1).random((1, 1, rows, columns)) < 0.8


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("beside", BESIDE)
def test_a_mask_beside_positions(beside, dtype):
    rung = forward.Rung("wgmma", testing.rows_padded, tensor=True, tile=32, slow=True)
    case = rung.problem(ROWS, 200, batch=1, heads=1, heads_kv=1, head_dim=16, dtype=dtype, q_offset=110)
    rung.check(case, mask=random(ROWS, 200), **BESIDE[beside])


@pytest.mark.parametrize("shape", [(ROWS, 200, 110), (200, ROWS, 0)], ids=["many keys", "many queries"])
@pytest.mark.parametrize("beside", ["causal, and slopes", "a window"])
def test_gradients_with_a_mask_beside_positions(beside, shape):
    rung = backward.Rung("wgmma", testing.rows_padded, tensor=True, tile=32, slow=True)
    rows, columns, q_offset = shape
    case = rung.problem(rows, columns, batch=1, heads=1, heads_kv=1, head_dim=8, q_offset=q_offset)
    rung.check(case, mask=random(rows, columns), **BESIDE[beside])
