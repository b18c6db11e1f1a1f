"""The instructions' twins: each against a plain statement of what it does, and every misuse named, none hanging."""

import functools
import importlib
import re

import ml_dtypes
import numpy as np
import pytest

from numba_flash import arrays, toolchain
from numba_flash.sim.errors import Misuse
from numba_flash.sim.launch import run
from numba_flash.tensor_maps import TensorMap

pytestmark = pytest.mark.skipif(not toolchain.simulated(), reason="set NUMBA_ENABLE_CUDASIM=1")

FAMILIES = (
    "approx bar cp_async cvt elect fence ld_st ldmatrix mbarrier memory minmax mma setmaxnreg shared shfl special "
    "stmatrix tma vote wgmma"
).split()
cuda = None  # `numba.cuda`, put here by the fixture: the simulator swaps module globals that are this module
approx = bar = cp_async = cvt = elect = fence = ld_st = ldmatrix = mbarrier = memory = minmax = mma = None
setmaxnreg = shared = shfl = special = stmatrix = tma = vote = wgmma = None

rng = np.random.default_rng(0)
BASE = 1024  # where dynamic shared memory begins
KINDS = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    monkeypatch.setitem(globals(), "cuda", toolchain.cuda())
    for name in FAMILIES:
        monkeypatch.setitem(globals(), name, importlib.import_module(f"numba_flash.sim.{name}"))


def launch(kernel, threads, *operands, shared_bytes=0, blocks=1, scalars=(), maps=()):
    """maps: (number of the operand, TensorMap)."""
    operands = tuple(None if x is None else arrays.read("array", x) for x in operands)
    run(lambda: toolchain.cuda().jit(kernel), blocks, threads, shared_bytes, operands, scalars, maps)


def lanes(kernel, dtype=np.uint32, threads=32, **options):
    """What kernel(out) left in out[thread]."""
    out = np.zeros(threads, dtype)
    launch(kernel, threads, out, **options)
    return out


def line_of(function, text):
    """The number of the one line of a kernel with this text."""
    import inspect

    source, first = inspect.getsourcelines(function)
    (number,) = [first + i for i, line in enumerate(source) if text in line and "def " not in line]
    return number


def misuse(kernel, threads, *operands, match, at=None, thread=None, **options):
    """The kernel's error says `match`, the line with the text `at`, and the thread."""
    with pytest.raises(Misuse, match=match) as caught:
        launch(kernel, threads, *operands, **options)
    message = str(caught.value)
    if at is not None:
        assert re.search(rf"test_twins\.py:{line_of(kernel, at)}: ", message), message
    if thread is not None:
        assert message.startswith(f"block (0, 0, 0), thread {thread} (warp {thread // 32}, lane {thread % 32}) at"), (
            message
        )
    return message


def random(*shape, kind="f16"):
    return rng.standard_normal(shape).astype(KINDS[kind])


def wide(x):
    return x.astype(np.float64)


# A lane's own instructions.


def test_approx_and_maximum():
    x = np.array([0, -0.0, 1, -3.5, 100, -126.5, -200, np.inf, -np.inf, np.nan, 1e-40, 0.1, 130, 3, 5, 7], np.float32)
    results = np.zeros((4, 16), np.float32)

    def kernel(x, out):
        i = cuda.threadIdx.x
        out[i] = approx.ex2(x[i])
        out[16 + i] = approx.lg2(x[i])
        out[32 + i] = approx.rcp(x[i])
        out[48 + i] = minmax.maximum(x[i], 1.0)

    launch(kernel, 16, x, results)
    with np.errstate(all="ignore"):
        flat = np.where(np.abs(x) < np.finfo(np.float32).tiny, x * 0, x).astype(np.float64)
        power = np.exp2(flat)
        expected = [np.where(power < np.finfo(np.float32).tiny, 0, power), np.log2(flat), 1 / flat, np.fmax(flat, 1)]
        np.testing.assert_allclose(results, np.array(expected).astype(np.float32), rtol=3e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_cvt(kind):
    # ties to even both ways, too large, subnormal in float16, NaN
    numbers = np.array([1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, 70000, -3e-8, np.nan], np.float32)

    def kernel(x, out):
        i = cuda.threadIdx.x
        pack = cvt.pack_f16x2 if kind == "f16" else cvt.pack_bf16x2
        out[i] = pack(x[i], x[7 - i])

    out = np.zeros(8, np.uint32)
    launch(kernel, 8, numbers, out)
    with np.errstate(all="ignore"):
        rounded = numbers.astype(KINDS[kind]).view(np.uint16).astype(np.uint32)
    np.testing.assert_array_equal(out, rounded | rounded[::-1] << 16)


def test_special_registers():
    def kernel(out):
        out[special.block_index() * 4 + special.thread_index()] = 10 * special.block_index() + special.thread_index()

    out = np.zeros(8, np.int32)
    launch(kernel, 4, out, blocks=2)
    assert out.tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


# A warp's.


def test_shfl():
    def kernel(out, others, floats):
        i = cuda.threadIdx.x
        out[i] = shfl.bfly_b32(i * 3, 5)
        others[i] = shfl.idx_b32(i * 3, 31 - i)
        floats[i] = shfl.bfly_f32(i / 2, 16)

    out, others, floats = np.zeros(64, np.uint32), np.zeros(64, np.uint32), np.zeros(64, np.float32)
    launch(kernel, 64, out, others, floats)
    i = np.arange(64)
    np.testing.assert_array_equal(out, (i ^ 5) * 3)
    np.testing.assert_array_equal(others, (i // 32 * 32 + 31 - i % 32) * 3)
    np.testing.assert_array_equal(floats, (i ^ 16) / 2)


def test_vote_and_elect():
    def kernel(out):
        i = cuda.threadIdx.x
        out[i] = vote.any_lane(i == 40) + 2 * elect.one_lane()

    out = lanes(kernel, threads=64)
    np.testing.assert_array_equal(out, [2] + [0] * 31 + [3] + [1] * 31)


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_and_stmatrix_are_each_others_inverse(count, trans):
    source = rng.integers(0, 2**16, (8 * count, 8)).astype(np.uint16)
    suffix = f"x{count}{'_trans' if trans else ''}"

    def kernel(source, registers_out, back):
        lane = cuda.threadIdx.x
        smem = cuda.shared.array(0, np.dtype(np.uint16))
        if lane == 0:
            for i in range(64 * count):
                smem[i] = source[i]
        cuda.syncthreads()
        registers = cuda.local.array(6, np.dtype(np.uint32))
        address = shared.address(smem) + lane % (8 * count) * 16
        getattr(ldmatrix, suffix)(registers, 1, address)
        for i in range(count):
            registers_out[lane * count + i] = registers[1 + i]
        getattr(stmatrix, suffix)(address + 1024, registers, 1)
        cuda.syncthreads()
        if lane == 0:
            for i in range(64 * count):
                back[i] = smem[512 + i]

    registers, back = np.zeros((32, count), np.uint32), np.zeros_like(source)
    launch(kernel, 32, source, registers, back, shared_bytes=2048)
    np.testing.assert_array_equal(back, source)
    for lane in range(32):
        for i in range(count):
            matrix = source[8 * i : 8 * i + 8]
            matrix = matrix.T if trans else matrix
            low, high = matrix[lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2].astype(int)
            assert registers[lane, i] == low | high << 16


@pytest.mark.parametrize("kind", KINDS)
def test_mma(kind):
    a, b = random(16, 16, kind=kind), random(16, 8, kind=kind)
    c = rng.standard_normal((16, 8)).astype(np.float32)
    a_pairs, b_pairs = a.view(np.uint32), np.ascontiguousarray(b.T).view(np.uint32)  # (16, 8), (8, 8)

    def kernel(a, b, c, out):
        lane = cuda.threadIdx.x
        row, pair = lane // 4, lane % 4
        acc = cuda.local.array(6, np.dtype(np.float32))
        a_frag, b_frag = cuda.local.array(4, np.dtype(np.uint32)), cuda.local.array(3, np.dtype(np.uint32))
        for i in range(4):
            a_frag[i] = a[(row + 8 * (i % 2)) * 8 + pair + 4 * (i // 2)]
            acc[2 + i] = c[(row + 8 * (i // 2)) * 8 + 2 * pair + i % 2]
        for i in range(2):
            b_frag[1 + i] = b[row * 8 + pair + 4 * i]
        product = mma.m16n8k16_f16 if kind == "f16" else mma.m16n8k16_bf16
        product(acc, 2, a_frag, 0, b_frag, 1)
        for i in range(4):
            out[(row + 8 * (i // 2)) * 8 + 2 * pair + i % 2] = acc[2 + i]

    out = np.zeros_like(c)
    launch(kernel, 32, a_pairs, b_pairs, c, out)
    np.testing.assert_allclose(out, c + wide(a) @ wide(b), rtol=1e-6, atol=1e-6)


# Memory by address.


def test_shared_and_global_accesses():
    def kernel(out, half, atoms):
        i = cuda.threadIdx.x
        smem = cuda.shared.array(0, np.dtype(np.uint32))
        fixed = cuda.shared.array((4, 4), np.dtype(np.float32))
        values = cuda.local.array(5, np.dtype(np.uint32))
        at = shared.address(smem) + 16 * i
        for x in range(4):
            values[1 + x] = 4 * i + x
        ld_st.store_v4(at, values, 1)
        assert smem[4 * i + 2] == 4 * i + 2
        ld_st.store_b32(at + 4, 100 + i)
        values[0] = ld_st.load_b32(at + 4)
        ld_st.load_v4(values, 1, at)
        assert values[0] == values[2] == 100 + i
        ld_st.store_b32(shared.address(fixed) + 4 * i, 5)
        memory.store_v4(memory.address(out, 4 * i), values, 1)
        memory.store_b32(memory.address(out, 4 * i + 3), 7)
        memory.store_b16(memory.address(half, i), 0xABCD0000 + i)
        assert memory.address(None, 3) == 0
        memory.add(memory.address(atoms, 0), 2)
        if i == 7:
            values[0] = memory.exchange(memory.address(atoms, 1), 9)
            assert values[0] == 1

    out, half, atoms = np.zeros((8, 4), np.uint32), np.zeros(8, np.uint16), np.array([1, 1], np.uint32)
    launch(kernel, 8, out, half, atoms, shared_bytes=128)
    np.testing.assert_array_equal(out, [[4 * i, 100 + i, 4 * i + 2, 7] for i in range(8)])
    np.testing.assert_array_equal(half, np.arange(8))
    assert atoms.tolist() == [17, 9]


def test_atomics_give_each_thread_its_number_and_can_be_polled():
    def kernel(out, counter):
        i = cuda.threadIdx.x
        if i == 0:
            while memory.add(memory.address(counter, 0), 0) < 31:
                pass
        out[i] = memory.add(memory.address(counter, 0), 1)

    counter, out = np.zeros(1, np.uint32), np.zeros(32, np.uint32)
    launch(kernel, 32, out, counter)
    assert out[0] == 31 and sorted(out) == list(range(32))


def test_addresses_of_views_and_backward_strides():
    whole = np.zeros((4, 8), np.float32)

    def kernel(out):
        memory.store_b32(memory.address(out, -8 * cuda.threadIdx.x), cuda.threadIdx.x + 1)

    launch(kernel, 4, whole[::-1])
    np.testing.assert_array_equal(whole.view(np.uint32)[:, 0], [4, 3, 2, 1])


def test_cp_async():
    source = np.arange(64, dtype=np.uint8)

    def kernel(source, out):
        i = cuda.threadIdx.x
        smem = cuda.shared.array(0, np.dtype(np.uint8))
        at = shared.address(smem) + 16 * i
        # What does not exist is not read, wherever the address points.
        count = (16, 5, 0, 16)[i]
        cp_async.copy16(at, memory.address(source, 10**9 if i == 2 else 16 * i), count)
        cp_async.commit_group()
        cp_async.copy16(at + 64, memory.address(source, 16 * i), 16)
        cp_async.commit_group()
        cp_async.wait_group(1)()
        cuda.syncthreads()
        assert smem[64 + 16 * i] == 0xFF  # the newer group is not there
        for x in range(16):
            out[16 * i + x] = smem[16 * (3 - i) + x]
        cp_async.wait_group(0)()
        assert smem[64 + 16 * i] == 16 * i

    out = np.zeros((4, 16), np.uint8)
    launch(kernel, 4, source, out, shared_bytes=128)
    rows = source.reshape(4, 16).copy()
    rows[1, 5:] = rows[2] = 0
    np.testing.assert_array_equal(out, rows[::-1])


# Barriers.


def test_named_barriers_hand_over_in_both_directions():
    def kernel(out):
        i = cuda.threadIdx.x
        smem = cuda.shared.array(0, np.dtype(np.uint32))
        at = shared.address(smem)
        for step in range(3):
            if i < 32:
                bar.sync(1, 64)  # empty
                ld_st.store_b32(at + 4 * i, 100 * step + i)
                bar.arrive(2, 64)  # full
            else:
                bar.arrive(1, 64)
                bar.sync(2, 64)
                out[step * 32 + i - 32] = ld_st.load_b32(at + 4 * (63 - i))

    out = np.zeros((3, 32), np.uint32)
    launch(kernel, 64, out, shared_bytes=128)
    np.testing.assert_array_equal(out, [[100 * step + 31 - i for i in range(32)] for step in range(3)])


def test_mbarrier_phases_and_their_parity():
    def kernel(out):
        i = cuda.threadIdx.x
        smem = cuda.shared.array(0, np.dtype(np.uint32))
        at = shared.address(smem)
        full, empty = at + 64, at + 72
        if i == 0:
            mbarrier.init(full, 1)
            mbarrier.init(empty, 3)
        cuda.syncthreads()
        for step in range(4):
            if i == 3:
                mbarrier.wait(empty, 1 - step % 2)  # a fresh one lets through
                ld_st.store_b32(at, 10 * step)
                mbarrier.arrive(full)
            else:
                mbarrier.wait(full, step % 2)
                out[3 * step + i] = ld_st.load_b32(at) + i
                mbarrier.arrive(empty)

    out = np.zeros((4, 3), np.uint32)
    launch(kernel, 4, out, shared_bytes=128)
    np.testing.assert_array_equal(out, [[10 * step + i for i in range(3)] for step in range(4)])


def test_setmaxnreg_waits_for_registers():
    order = []

    def kernel():
        i = cuda.threadIdx.x
        if i < 128:
            setmaxnreg.increase(240)()
            order.append("increased")
        elif i < 256:
            setmaxnreg.decrease(24)()
            order.append("decreased")
        else:
            setmaxnreg.increase(240)()

    launch(kernel, 384)
    assert order[0] == "decreased" and len(order) == 256


# TMA.

BOX = (32, 4, 2)  # 64 bytes a row


@pytest.mark.parametrize("swizzle", [0, 64])
@pytest.mark.parametrize("where", [(0, 0, 0), (32, 2, 1), (0, 3, 1), (0, -2, -1), (-8, 1, 0), (64, 0, 0)])
def test_tma_loads_and_stores_boxes(where, swizzle):
    """A box's elements go where the map says, with zeros outside of the tensor, and only inside is stored."""
    tensor, other = random(3, 6, 40), random(3, 6, 40)
    strides = (80, 480)
    tensor_map = TensorMap("float16", (40, 6, 3), strides, BOX, swizzle)
    before, tile = other.copy(), np.zeros(256, np.uint16)

    def kernel(tensor_maps, source, target, tile):
        i = cuda.threadIdx.x
        smem = cuda.shared.array(0, np.dtype(np.uint16))
        at = shared.address(smem)
        full = at + 512
        maps = tma.parameter("kernel")()
        if i == 0:
            tma.prefetch(maps)
            mbarrier.init(full, 1)
            fence.mbarrier_init()
            mbarrier.arrive_expect_tx(full, 512)
            tma.load_3d(at, maps, full, where[0], where[1], where[2])
        cuda.syncthreads()
        mbarrier.wait(full, 0)
        for x in range(128):
            tile[128 * i + x] = smem[128 * i + x]
        if i == 1:
            tma.store_3d(maps + 128, at, where[0], where[1], where[2])
            tma.commit_group()
            tma.wait_group_read(0)()

    launch(kernel, 2, tensor, other, tile, shared_bytes=1024, maps=((0, tensor_map), (1, tensor_map)))
    box = np.zeros((2, 4, 32), np.float16)
    for z, y, x in np.ndindex(box.shape):
        place = where[2] + z, where[1] + y, where[0] + x
        if all(0 <= p < n for p, n in zip(place, tensor.shape, strict=True)):
            box[z, y, x] = before[place] = tensor[place]
    np.testing.assert_array_equal(other, before)
    # 64-byte swizzle: bits 4 and 5 of the address ^= bits 7 and 8
    offset = 2 * np.arange(256)
    places = (offset ^ (offset >> 7 & 3) << 4) >> 1 if swizzle else offset >> 1
    np.testing.assert_array_equal(tile[places], box.view(np.uint16).ravel())


@pytest.mark.parametrize("rank", [2, 4, 5])
def test_tma_of_other_ranks(rank):
    shape = (1, 1, 2, 3, 16)[-rank:]
    tensor, out = random(*shape), np.zeros(shape, np.float16)
    tensor_map = TensorMap("float16", shape[::-1], tensor.strides[:-1][::-1], (16, 3, 2, 1, 1)[:rank], 0)
    count = tensor.nbytes

    def kernel(tensor_maps, source, target):
        smem = cuda.shared.array(0, np.dtype(np.uint16))
        at, maps = shared.address(smem), tma.parameter("kernel")()
        mbarrier.init(at + 512, 1)
        fence.mbarrier_init()
        mbarrier.arrive_expect_tx(at + 512, count)
        getattr(tma, f"load_{rank}d")(at, maps, at + 512, *[0] * rank)
        mbarrier.wait(at + 512, 0)
        getattr(tma, f"store_{rank}d")(maps + 128, at, *[0] * rank)
        tma.commit_group()
        tma.wait_group_read(0)()

    launch(kernel, 1, tensor, out, shared_bytes=1024, maps=((0, tensor_map), (1, tensor_map)))
    np.testing.assert_array_equal(out, tensor)


# wgmma.


def laid(matrix, swizzle):
    """A matrix's bytes in shared memory: tiles of `swizzle` bytes a row behind each other, rows swizzled."""
    per_row = swizzle // 2
    tiles = [matrix[:, x : x + per_row] for x in range(0, matrix.shape[1], per_row)]
    linear = np.concatenate([np.ascontiguousarray(tile).view(np.uint16).ravel() for tile in tiles])
    offset = 2 * np.arange(linear.size)
    placed = np.empty_like(linear)
    placed[(offset ^ (offset >> 7 & (swizzle // 16 - 1)) << 4) >> 1] = linear
    return placed


def core_matrices(matrix):
    """Without swizzle: 8 rows of 16 bytes behind each other, first down the rows, then along."""
    rows, columns = matrix.shape
    return matrix.reshape(rows // 8, 8, columns // 8, 8).transpose(2, 0, 1, 3).copy().view(np.uint16).ravel()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("b_trans", [0, 1])
@pytest.mark.parametrize("from_registers", [False, True])
def test_wgmma(from_registers, b_trans, swizzle, kind):
    n, k = (24, 32) if not b_trans or not swizzle else (swizzle, 32)  # two tiles of columns where n-contiguous
    if swizzle == 128:
        k = 64
    a, b = random(64, k, kind=kind), random(k, n, kind=kind)
    c = rng.standard_normal((64, n)).astype(np.float32)
    lay = functools.partial(laid, swizzle=swizzle) if swizzle else core_matrices
    a_smem, b_smem = lay(a), lay(b if b_trans else np.ascontiguousarray(b.T))
    b_at = -(-a_smem.nbytes // 1024) * 1024
    steps = k // 16
    per_row = swizzle // 32 or 1  # steps in a swizzled row

    def offsets(rows):
        if not swizzle:
            return tuple(2 * rows * 16 * s >> 4 for s in range(steps))
        return tuple((s // per_row * rows * swizzle + s % per_row * 32) >> 4 for s in range(steps))

    a_offsets = offsets(64)
    leading, stride = (64 * 16, 128) if not swizzle else (16, 8 * swizzle)
    a_descriptor = wgmma.descriptor(leading, stride, swizzle)
    if not b_trans:
        b_descriptor = wgmma.descriptor(*((n * 16, 128) if not swizzle else (16, 8 * swizzle)), swizzle)
        b_offsets = offsets(n)
    elif swizzle:
        b_descriptor = wgmma.descriptor(k * swizzle, 8 * swizzle, swizzle)
        b_offsets = tuple(16 * swizzle * s >> 4 for s in range(steps))
    else:  # core matrices of 8 along k by 8 along n: leading goes along k, stride along n
        b_descriptor = wgmma.descriptor(128, k * 16, 0)
        b_offsets = tuple(2 * 128 * s >> 4 for s in range(steps))
    if from_registers:
        product = wgmma.product_registers(n, kind, b_offsets, b_trans)
    else:
        product = wgmma.product_shared(n, kind, a_offsets, b_offsets, b_trans)

    def kernel(a_smem, b_smem, a, c, out):
        i = cuda.threadIdx.x
        warp, lane = i // 32, i % 32
        smem = cuda.shared.array(0, np.dtype(np.uint16))
        at = shared.address(smem)
        for x in range(i, a_size, 128):
            ld_st.store_b32(at + 4 * x, a_smem[x])
        for x in range(i, b_size, 128):
            ld_st.store_b32(at + b_at + 4 * x, b_smem[x])
        fence.proxy_async()
        cuda.syncthreads()
        acc = cuda.local.array(n // 2, np.dtype(np.float32))
        a_frag = cuda.local.array(4 * steps, np.dtype(np.uint32))
        row, column = 16 * warp + lane // 4, 2 * (lane % 4)
        for x in range(n // 2):
            acc[x] = c[(row + 8 * (x % 4 // 2)) * n + 8 * (x // 4) + column + x % 2]
        for x in range(4 * steps):
            a_frag[x] = a[((row + 8 * (x % 2)) * k + 16 * (x // 4) + column + 8 * (x % 4 // 2)) // 2]
        operand = a_frag if from_registers else a_descriptor(at)
        product(acc, operand, b_descriptor(at + b_at), 1)
        product(acc, operand, b_descriptor(at + b_at), 1)  # one behind the other, on the same accumulators
        wgmma.commit_group()
        wgmma.wait_group(0)()
        wgmma.pin(n // 2)(acc)
        for x in range(n // 2):
            out[(row + 8 * (x % 4 // 2)) * n + 8 * (x // 4) + column + x % 2] = acc[x]

    a_words, b_words = a_smem.view(np.uint32), b_smem.view(np.uint32)
    a_size, b_size = a_words.size, b_words.size
    out = np.zeros((64, n), np.float32)
    launch(kernel, 128, a_words, b_words, a.view(np.uint32), c, out, shared_bytes=b_at + b_smem.nbytes)
    np.testing.assert_allclose(out, c + 2 * (wide(a) @ wide(b)), rtol=1e-5, atol=1e-5)
