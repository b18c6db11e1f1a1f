"""The instructions' twins: each against a plain statement of what it does, and every misuse named, none hanging."""

import functools
import importlib
import inspect
import re

import ml_dtypes
import numpy as np
import pytest

from numba_flash import arrays
from numba_flash.abi.tensor_maps import TensorMap
from numba_flash.arrays.making import aligned_memory
from numba_flash.machine import toolchain
from numba_flash.ptx.sim.errors import InstructionError
from numba_flash.ptx.sim.launch import run

pytestmark = pytest.mark.skipif(not toolchain.simulated(), reason="set NUMBA_ENABLE_CUDASIM=1")

FAMILIES = (
    "approx bar bits cluster cp_async cvt elect fence griddepcontrol ld_st ldmatrix local mbarrier memory minmax mma "
    "setmaxnreg shared shfl special stmatrix tma vote wgmma"
).split()
cuda = None  # `numba.cuda`, put here by the fixture: the simulator swaps module globals that are this module
approx = bar = bits = cluster = cp_async = cvt = elect = fence = griddepcontrol = ld_st = ldmatrix = local = None
mbarrier = memory = minmax = mma = setmaxnreg = shared = shfl = special = stmatrix = tma = vote = wgmma = None

rng = np.random.default_rng(0)
BASE = 1024  # where dynamic shared memory begins
KINDS = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    monkeypatch.setitem(globals(), "cuda", toolchain.cuda())
    for name in FAMILIES:
        monkeypatch.setitem(globals(), name, importlib.import_module(f"numba_flash.ptx.sim.{name}"))


def launch(kernel, threads, *operands, shared_bytes=0, blocks=1, scalars=(), maps=(), in_cluster=1, behind=False):
    """maps: (number of the operand, TensorMap); in_cluster: how many blocks run together; behind: as of run."""
    operands = tuple(None if x is None else arrays.read("array", x) for x in operands)
    made = toolchain.cuda().jit(kernel)
    run(lambda: made, blocks, threads, shared_bytes, operands, scalars, maps, in_cluster, behind)


def lanes(kernel, dtype=np.uint32, threads=32, **options):
    """What kernel(out) left in out[thread]."""
    out = np.zeros(threads, dtype)
    launch(kernel, threads, out, **options)
    return out


def line_of(function, text):
    """The number of the one line of a kernel with this text."""
    source, first = inspect.getsourcelines(function)
    (number,) = [first + i for i, line in enumerate(source) if text in line and "def " not in line]
    return number


def misuse(kernel, threads, *operands, match, at=None, thread=None, **options):
    """The kernel's error says `match`, the line with the text `at`, and the thread."""
    with pytest.raises(InstructionError, match=match) as caught:
        launch(kernel, threads, *operands, **options)
    message = str(caught.value)
    if at is not None:
        assert re.search(rf"test_instructions\.py:{line_of(kernel, at)}: ", message), message
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


def test_approx_maximum_and_minimum():
    x = np.array([0, -0.0, 1, -3.5, 100, -126.5, -200, np.inf, -np.inf, np.nan, 1e-40, 0.1, 130, 3, 5, 7], np.float32)
    results = np.zeros((7, 16), np.float32)

    def kernel(x, out):
        i = cuda.threadIdx.x
        out[i] = approx.ex2(x[i])
        out[16 + i] = approx.lg2(x[i])
        out[32 + i] = approx.rcp(x[i])
        out[48 + i] = minmax.maximum(x[i], 1.0)
        out[64 + i] = minmax.maximum(1.0, x[i])
        out[80 + i] = minmax.minimum_nan(x[i], 1.0)
        out[96 + i] = minmax.minimum_nan(1.0, x[i])

    launch(kernel, 16, x, results)
    with np.errstate(all="ignore"):
        flat = np.where(np.abs(x) < np.finfo(np.float32).tiny, x * 0, x).astype(np.float64)
        power = np.exp2(flat)
        power = np.where(power < np.finfo(np.float32).tiny, 0, power)
        larger, smaller = np.fmax(flat, 1), np.minimum(wide(x), 1)  # of a number and NaN: the number, and NaN
        expected = [power, np.log2(flat), 1 / flat, larger, larger, smaller, smaller]
        np.testing.assert_allclose(results, np.array(expected).astype(np.float32), rtol=3e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_cvt(kind):
    # ties to even both ways, too large, subnormal in float16, NaN
    numbers = np.array([1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, 70000, -3e-8, np.nan], np.float32)

    def kernel(x, out, back):
        i = cuda.threadIdx.x
        pack = cvt.pack_f16x2 if kind == "f16" else cvt.pack_bf16x2
        out[i] = pack(x[i], x[7 - i])
        back[2 * i], back[2 * i + 1] = cvt.low_f16(out[i]), cvt.high_f16(out[i])

    out, back = np.zeros(8, np.uint32), np.zeros(16, np.float32)
    launch(kernel, 8, numbers, out, back)
    np.testing.assert_array_equal(back, out.view(np.float16).astype(np.float32))
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


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_sum_of_a_warp_has_the_bits_of_five_butterflies(dtype):
    generator, single = np.random.default_rng(3), dtype is np.float32
    x = (generator.standard_normal(64) * 10.0 ** generator.integers(-6, 6, 64)).astype(dtype)
    x[40] = np.inf

    def kernel(x, sums, steps):
        i = cuda.threadIdx.x
        own = x[i]
        sums[i] = shfl.sum_f32(own) if single else shfl.sum_f64(own)
        for distance in (1, 2, 4, 8, 16):
            own += shfl.bfly_f32(own, distance) if single else shfl.bfly_f64(own, distance)
        steps[i] = own

    sums, steps = np.zeros(64, dtype), np.zeros(64, dtype)
    launch(kernel, 64, x, sums, steps)
    np.testing.assert_array_equal(sums, steps)
    assert np.isfinite(sums[:32]).all() and np.isinf(sums[32:]).all() and len(set(sums.tolist())) == 2


def test_lanes_that_are_not_there_give_nothing():
    def kernel(out):
        out[cuda.threadIdx.x] = shfl.bfly_b32(cuda.threadIdx.x * 3, 33 if cuda.threadIdx.x else 0)

    np.testing.assert_array_equal(lanes(kernel), 3 * np.arange(32))


def test_vote_and_elect():
    def kernel(out):
        i = cuda.threadIdx.x
        out[i] = vote.any_lane(i == 40) + 2 * elect.one_lane()

    out = lanes(kernel, threads=64)
    np.testing.assert_array_equal(out, [2] + [0] * 31 + [3] + [1] * 31)


def test_a_ballot_is_that_of_a_warp():
    def kernel(out):
        i = cuda.threadIdx.x
        out[i] = vote.ballot(i % 3 == 0)

    bits = [sum(1 << lane for lane in range(32) if (32 * warp + lane) % 3 == 0) for warp in range(2)]
    np.testing.assert_array_equal(lanes(kernel, threads=64), np.repeat(np.array(bits, np.uint32), 32))


def test_the_highest_bit_of_a_word():
    def kernel(words, out):
        out[cuda.threadIdx.x] = bits.highest(words[cuda.threadIdx.x])

    words, out = np.array([0, 1, 2, 3, 0x8000, 0xFFFF, 0x80000000, 0xFFFFFFFF], np.uint32), np.zeros(8, np.int32)
    launch(kernel, 8, words, out)
    np.testing.assert_array_equal(out, [-1, 0, 1, 1, 15, 15, 31, 31])


def test_how_many_bits_of_a_word_are_1():
    def kernel(words, out):
        out[cuda.threadIdx.x] = bits.count(words[cuda.threadIdx.x])

    words, out = np.array([0, 1, 6, 0x80000001, 0xFFFFFFFF], np.uint32), np.zeros(5, np.int32)
    launch(kernel, 5, words, out)
    np.testing.assert_array_equal(out, [0, 1, 2, 2, 32])


def test_a_wide_product_has_all_64_bits():
    def kernel(words, out):
        i = cuda.threadIdx.x
        out[i] = bits.multiply_wide(words[i], words[7 - i])

    words, out = np.array([0, 1, 2, 3, 0x8000, 0xFFFF, 0x80000000, 0xFFFFFFFF], np.uint32), np.zeros(8, np.uint64)
    launch(kernel, 8, words, out)
    np.testing.assert_array_equal(out, words.astype(np.uint64) * words[::-1])


def test_a_carry_is_pushed_in_at_the_low_end():
    def kernel(words, out):
        i = cuda.threadIdx.x
        out[i] = bits.push_carry(words[i], words[4 + i], words[8 + i])

    words = np.array([5, 5, 0x80000000, 1, 0, 0xFFFFFFFF, 0xFFFF0000, 0x7FFFFFFF, 0, 1, 0xFFFF, 0x80000000], np.uint32)
    out = np.zeros(4, np.uint32)
    launch(kernel, 4, words, out)
    np.testing.assert_array_equal(out, [10, 11, 0, 2])


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
        registers = local.array(6, np.dtype(np.uint32))
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
        acc = local.array(6, np.dtype(np.float32))
        a_frag, b_frag = local.array(4, np.dtype(np.uint32)), local.array(3, np.dtype(np.uint32))
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


@pytest.mark.parametrize(
    ("name", "depth", "dtype"), [("m16n8k8_tf32", 8, np.float32), ("m16n8k16_f64", 16, np.float64)]
)
def test_mma_of_larger_elements(name, depth, dtype):
    a, b, c = (rng.standard_normal(shape).astype(dtype) for shape in ((16, depth), (depth, 8), (16, 8)))
    if dtype == np.float32:  # of which the hardware sees the first 11 bits
        a, b = ((x.view(np.uint32) | 0x1FFF).view(np.float32) for x in (a, b))

    def kernel(a, b, c, out):
        lane = cuda.threadIdx.x
        row, column = lane // 4, lane % 4
        kind = np.dtype(np.uint32 if dtype == np.float32 else np.float64)
        acc, a_frag = local.array(6, np.dtype(dtype)), local.array(9, kind)
        b_frag = local.array(5, kind)
        for i in range(4):
            acc[2 + i] = c[(row + 8 * (i // 2)) * 8 + 2 * column + i % 2]
        for i in range(depth // 2):
            a_frag[1 + i] = a[(row + 8 * (i % 2)) * depth + column + 4 * (i // 2)]
        for i in range(depth // 4):
            b_frag[1 + i] = b[(column + 4 * i) * 8 + row]
        getattr(mma, name)(acc, 2, a_frag, 1, b_frag, 1)
        for i in range(4):
            out[(row + 8 * (i // 2)) * 8 + 2 * column + i % 2] = acc[2 + i]

    out = np.zeros_like(c)
    as_given = (x.view(np.uint32) if dtype == np.float32 else x for x in (a, b))
    launch(kernel, 32, *as_given, c, out)
    if dtype == np.float32:
        a, b = ((x.view(np.uint32) & 0xFFFFE000).view(np.float32).astype(np.float64) for x in (a, b))
        exact = c + a @ b
        eps = 2.0**-23 * np.abs(exact)
        assert (np.abs(out) <= np.abs(exact)).all() and (np.abs(out - exact) < eps).all()  # cut off
        assert (np.abs(out - exact) > eps / 2).any()
    else:
        np.testing.assert_allclose(out, c + a @ b, rtol=1e-14, atol=1e-14)


def test_sums_are_cut_off():
    next_to_1 = float(np.nextafter(np.float32(1), np.float32(2)))
    x = np.array([0, -0.0, 1, -1, 1 + 2**-30, -1 - 2**-30, next_to_1 - 2**-30, 3e-46, 1e39, -np.inf, np.nan])
    expected = np.array([0, -0.0, 1, -1, 1, -1, 1, 0, np.inf, -np.inf, np.nan], np.float32)
    with np.errstate(all="ignore"):
        found = mma.cut_off(x)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found[:8]), np.signbit(expected[:8]))


def test_mma_of_8_rows():
    a, b, c = (rng.standard_normal(shape) for shape in ((8, 4), (4, 8), (8, 8)))

    def kernel(a, b, c, out):
        lane = cuda.threadIdx.x
        row, column = lane // 4, lane % 4
        values = local.array(5, np.dtype(np.float64))
        values[0], values[1] = a[row * 4 + column], b[column * 8 + row]
        for i in range(2):
            values[3 + i] = c[row * 8 + 2 * column + i]
        mma.m8n8k4_f64(values, 3, values, 0, values, 1)
        for i in range(2):
            out[row * 8 + 2 * column + i] = values[3 + i]

    out = np.zeros_like(c)
    launch(kernel, 32, a, b, c, out)
    np.testing.assert_allclose(out, c + a @ b, rtol=1e-14, atol=1e-14)


def test_float64_between_lanes_and_in_memory():
    x = rng.standard_normal(64)

    def kernel(x, out):
        i = cuda.threadIdx.x
        smem = cuda.shared.array(0, np.dtype(np.float64))
        values = local.array(3, np.dtype(np.float64))
        smem[2 * i], smem[2 * i + 1] = x[2 * i], x[2 * i + 1]
        ld_st.load_v2_f64(values, 1, shared.address(smem) + 16 * i)
        values[1] = shfl.bfly_f64(values[1], 1)
        values[2] = minmax.maximum_f64(values[2], 0.5)
        memory.store_v2_f64(memory.address(out, 2 * i), values, 1)

    out = np.zeros(64)
    launch(kernel, 32, x, out, shared_bytes=512)
    np.testing.assert_array_equal(out[0::2], x[0::2][np.arange(32) ^ 1])
    np.testing.assert_array_equal(out[1::2], np.maximum(x[1::2], 0.5))


# Memory by address.


def test_shared_and_global_accesses():
    def kernel(out, half, atoms, two, wide):
        i = cuda.threadIdx.x
        smem = cuda.shared.array(0, np.dtype(np.uint32))
        fixed = cuda.shared.array((4, 4), np.dtype(np.float32))
        values = local.array(5, np.dtype(np.uint32))
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
        memory.load_v4(values, 1, memory.address(two, 4))
        assert values[1:].tolist() == [4, 5, 6, 7]
        memory.load_v2_if(values, 2, memory.address(two, 2), i < 4)
        assert values[1:].tolist() == ([4, 2, 3, 7] if i < 4 else [4, 0, 0, 7])
        # Behind the end nothing is read where the condition does not hold.
        assert memory.load_b32_if(memory.address(two, i + 4), i < 4) == (i + 4 if i < 4 else 0)
        assert memory.load_b16_if(memory.address(two, i), 1) == i
        assert memory.load_f64_if(memory.address(wide, i + 4), i < 4) == (i + 4.5 if i < 4 else 0)
        if i == 7:
            values[0] = memory.exchange(memory.address(atoms, 1), 9)
            assert values[0] == 1

    out, half, atoms = np.zeros((8, 4), np.uint32), np.zeros(8, np.uint16), np.array([1, 1], np.uint32)
    launch(kernel, 8, out, half, atoms, np.arange(8, dtype=np.uint32), np.arange(8) + 0.5, shared_bytes=128)
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


def test_cp_async_of_a_few_bytes():
    source = np.arange(32, dtype=np.uint8)

    def kernel(source, out):
        i = cuda.threadIdx.x
        smem = cuda.shared.array(0, np.dtype(np.uint8))
        at = shared.address(smem)
        cp_async.small_copy(8)(at + 8 * i, memory.address(source, 10**9 if i == 2 else 8 * i), (8, 4, 0, 8)[i])
        cp_async.small_copy(4)(at + 32 + 4 * i, memory.address(source, 4 * i), 4)
        cp_async.commit_group()
        assert smem[8 * i] == smem[32 + 4 * i] == 0xFF
        cp_async.wait_group(0)()
        cuda.syncthreads()
        for x in range(12):
            out[12 * i + x] = smem[12 * i + x]

    out = np.zeros(48, np.uint8)
    launch(kernel, 4, source, out, shared_bytes=48)
    np.testing.assert_array_equal(out, [*range(12), *[0] * 12, *range(24, 32), *range(16)])


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


def load_some_bytes(source, out, count, waits, fenced):
    smem = cuda.shared.array(0, np.dtype(np.uint32))
    at = shared.address(smem)
    mbarrier.init(at + 256, 1)
    if fenced:
        fence.mbarrier_init()
    mbarrier.arrive_expect_tx(at + 256, count)
    tma.load_bytes(at, memory.address(source, 4), at + 256, count)
    if waits:
        mbarrier.wait(at + 256, 0)
    for x in range(4):
        out[x] = ld_st.load_b32(at + 4 * x)


def test_tma_loads_bytes_without_a_map():
    source, out = np.arange(32, dtype=np.uint32), np.zeros(4, np.uint32)
    launch(load_some_bytes, 1, source, out, shared_bytes=512, scalars=(64, 1, 1))
    np.testing.assert_array_equal(out, source[4:8])


@pytest.mark.parametrize(
    ("scalars", "match"),
    [
        ((64, 0, 1), "is read before it arrived"),
        ((24, 1, 1), "a multiple of 16 bytes, not 24"),
        ((0, 1, 1), "a multiple of 16 bytes, not 0"),
        ((128, 1, 1), "lie outside of every operand"),
        ((64, 1, 0), "fence.mbarrier_init is missing"),
    ],
)
def test_bytes_that_cannot_be_loaded(scalars, match):
    source, out = np.arange(32, dtype=np.uint32), np.zeros(4, np.uint32)
    misuse(load_some_bytes, 1, source, out, match=match, shared_bytes=512, scalars=scalars)


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


# Clusters.

TILE_MAP = TensorMap("float16", (16, 8, 1, 1), (32, 256, 256), (16, 4, 1, 1), 0)


def test_blocks_of_a_cluster_meet_and_know_their_number():
    def kernel(out):
        i, smem = cuda.threadIdx.x, cuda.shared.array(0, np.dtype(np.uint32))
        smem[i] = 10 * cuda.blockIdx.x + i  # each block has shared memory of its own
        cluster.sync()
        out[4 * cuda.blockIdx.x + 2 * i] = smem[1 - i]
        out[4 * cuda.blockIdx.x + 2 * i + 1] = cluster.rank()

    out = np.zeros(24, np.uint32)
    launch(kernel, 2, out, shared_bytes=8, blocks=6, in_cluster=3)
    expected = [[10 * block + 1, block % 3, 10 * block, block % 3] for block in range(6)]
    np.testing.assert_array_equal(out, np.ravel(expected))


def give_each_other(out):
    """A thread of each block gives four numbers to the other block, twice; another one there reads them."""
    i, rank = cuda.threadIdx.x, int(cluster.rank())
    at, other = shared.address(cuda.shared.array(0, np.dtype(np.uint32))), 1 - rank
    full, empty, left = at + 64, at + 72, at + 80
    if i == 0:
        mbarrier.init(full, 1)
        mbarrier.init(empty, 1)
    cluster.sync()
    for step in range(2):
        if i == 0:
            four = np.arange(4, dtype=np.uint32) + np.uint32(100 * rank + 10 * step)
            mbarrier.wait(empty, 1 - step)
            cluster.store_v4(cluster.place_in(at, other), four, 0, cluster.place_in(full, other))
        else:
            mbarrier.arrive_expect_tx_if(full, 99, 0)
            mbarrier.arrive_expect_tx_if(full, 16, 1)
            mbarrier.wait(full, step)
            for x in range(4):
                out[9 * rank + 4 * step + x] = ld_st.load_b32(at + 4 * x)
            mbarrier.arrive_there_if(cluster.place_in(empty, other), 1)
    if i == 1:
        cluster.store_b32(cluster.place_in(left, other), 7 + rank)
    cluster.sync()
    if i == 0:
        out[9 * rank + 8] = ld_st.load_b32(left)


def test_blocks_of_a_cluster_give_each_other_numbers():
    out = np.zeros((2, 9), np.uint32)
    launch(give_each_other, 2, out, shared_bytes=96, blocks=2, in_cluster=2)
    np.testing.assert_array_equal(out, [[100, 101, 102, 103, 110, 111, 112, 113, 8], [0, 1, 2, 3, 10, 11, 12, 13, 7]])


@pytest.mark.parametrize(
    ("right", "wrong", "match"),
    [
        ("mbarrier.wait(empty, 1 - step)", "pass", "is written|an arrival more"),
        (
            "place_in(full, other)",
            "place_in(full, rank)",
            "to block [01] of the cluster, their mbarrier is of block [01]",
        ),
        ("16, 1)", "32, 1)", "waits for ever"),
        ("    cluster.sync()\n    if i == 0:", "    if i == 0:", "no barrier in between|has left the kernel"),
    ],
    ids=["wait", "mbarrier", "bytes", "sync"],
)
def test_what_is_forgotten_when_blocks_give_is_named(right, wrong, match):
    text = inspect.getsource(give_each_other)
    assert text.count(right) == 1
    names = dict(globals())
    exec(text.replace(right, wrong), names)
    with pytest.raises(InstructionError, match=match):
        launch(names["give_each_other"], 2, np.zeros((2, 9), np.uint32), shared_bytes=96, blocks=2, in_cluster=2)


def test_threads_of_a_cluster_are_named_by_their_block():
    """They have one clock, and numbers in it that nobody else knows."""

    def kernel(how):
        i, at = cuda.threadIdx.x, shared.address(cuda.shared.array(0, np.dtype(np.uint32)))
        if cluster.rank() == 1:
            if i == 3:
                ld_st.load_b32(at + 4)
                ld_st.store_b32(at, 7)
            if i == 5 and how[0] == 0:
                ld_st.load_b32(at)
            if i == 5 and how[0] == 1:
                ld_st.store_b32(at + 4, 7)
            if i == 5:
                mbarrier.init(at + 8, 1)
                mbarrier.wait(at + 8, 0)

    options = dict(shared_bytes=64, blocks=4, in_cluster=2)
    who = r"^block \(1, 0, 0\), thread 5 \(.*\n"
    for how, match in (
        (0, who + "shared address 0x400, written by thread 3, is read with no barrier in between"),
        (1, who + "shared address 0x404, read by thread 3, is written over with no barrier in between"),
        (2, r"\n  block \(1, 0, 0\), threads 5: in mbarrier.wait"),
    ):
        message = misuse(kernel, 6, np.full(1, how, np.uint32), match=match, **options)
    assert "block (0, 0, 0), threads 0 to 5: have left" in message and "threads 0 to 4: have left" in message


def test_a_block_that_has_left_its_cluster():
    def arrives(out):
        at = shared.address(cuda.shared.array(0, np.dtype(np.uint32)))
        mbarrier.init(at, 1)
        cluster.sync()
        if cluster.rank() == 0:
            memory.add(memory.address(out, 0), 1)  # the other one goes on
            mbarrier.arrive_there_if(cluster.place_in(at, 1), 1)

    with pytest.raises(InstructionError, match="block 1 of the cluster has left the kernel"):
        launch(arrives, 1, np.zeros(1, np.uint32), shared_bytes=8, blocks=2, in_cluster=2)


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
@pytest.mark.parametrize("new", [False, True])
def test_wgmma(new, from_registers, b_trans, swizzle, kind):
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
    twice = a_offsets * 2, b_offsets * 2, tuple(range(0, 4 * steps, 4)) * 2
    if from_registers:
        product = wgmma.product_registers(n, kind, b_offsets, b_trans)
        new_product = wgmma.new_product_registers(n, kind, twice[2], twice[1], b_trans)
    else:
        product = wgmma.product_shared(n, kind, a_offsets, b_offsets, b_trans)
        new_product = wgmma.new_product_shared(n, kind, *twice[:2], b_trans)

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
        acc = local.array(n // 2, np.dtype(np.float32))
        a_frag = local.array(4 * steps, np.dtype(np.uint32))
        row, column = 16 * warp + lane // 4, 2 * (lane % 4)
        for x in range(n // 2):
            acc[x] = c[(row + 8 * (x % 4 // 2)) * n + 8 * (x // 4) + column + x % 2]
        for x in range(4 * steps):
            a_frag[x] = a[((row + 8 * (x % 2)) * k + 16 * (x // 4) + column + 8 * (x % 4 // 2)) // 2]
        operand = a_frag if from_registers else a_descriptor(at)
        if new:
            new_product(acc, operand, b_descriptor(at + b_at))
        else:
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
    np.testing.assert_allclose(out, (0 if new else c) + 2 * (wide(a) @ wide(b)), rtol=1e-5, atol=1e-5)


# A warpgroup that TMA feeds, with whatever is left out or done wrong.

TILE = TensorMap("float16", (64, 64), (128,), (64, 64), 128)
DESCRIBE = (16, 1024, 128)


def pipeline(wrong=""):
    """A kernel of 256 threads: one loads two tiles by TMA, a warpgroup multiplies them and TMA stores the result."""

    def kernel(tensor_maps, a, b, out):
        i = cuda.threadIdx.x
        smem = cuda.shared.array(0, np.dtype(np.uint8))
        a_smem = shared.address(smem)
        b_smem = a_smem + 8192
        full, empty = a_smem + 16384, a_smem + 16392
        maps = tma.parameter("kernel")()
        if i == 0:
            mbarrier.init(full, 1)
            mbarrier.init(empty, 128)
            if wrong != "init fence":
                fence.mbarrier_init()
        if wrong != "init barrier":
            cuda.syncthreads()
        if i >= 128:
            if i == 128:
                for step in range(2):
                    mbarrier.wait(empty, 1 - step)
                    mbarrier.arrive_expect_tx(full, 16384 + 16 * (wrong == "bytes"))
                    tma.load_2d(a_smem, maps, full, 0, 0)
                    tma.load_2d(b_smem, maps + 128, full, 0, 0)
        else:
            acc = local.array(32, np.dtype(np.float32))
            for x in range(32):
                acc[x] = 0
            for step in range(2):
                if wrong != "full":
                    mbarrier.wait(full, step)
                if wrong == "early":
                    mbarrier.arrive(empty)
                    bar.sync(1, 128)
                multiply(acc, describe(a_smem), describe(b_smem), step)
                if wrong == "overwrite":
                    ld_st.store_b32(a_smem + 4 * i, 0)
                if wrong != "commit":
                    wgmma.commit_group()
                if wrong == "touch":
                    acc[3] = 0
                if wrong == "scale":
                    acc[3] *= np.float32(0.5)
                if wrong == "product wait" and step == 1:
                    return
                wait()
                pin(acc)
                if wrong != "early":
                    mbarrier.arrive(empty)
            bar.sync(1, 128)
            for x in range(16):
                row, column = 16 * (i // 32) + i % 32 // 4 + 8 * (x % 2), 8 * (x // 2) + 2 * (i % 4)
                offset = row * 128 + 2 * column
                at = 4 * (x // 2) + 2 * (x % 2)
                ld_st.store_b32(a_smem + (offset ^ (offset >> 7 & 7) << 4), cvt.pack_f16x2(acc[at], acc[at + 1]))
            if wrong != "fence":
                fence.proxy_async()
            if wrong != "fence barrier":
                bar.sync(1, 128)
            if i == 0:
                tma.store_2d(maps + 256, a_smem, 0, 0)
                if wrong == "reuse":
                    ld_st.store_b32(a_smem, 0)
                if wrong != "store wait":
                    tma.commit_group()
                    tma.wait_group_read(0)()

    multiply = wgmma.product_shared(64, "f16", (0, 2, 4, 6), (0, 2, 4, 6), 0)
    describe, wait, pin = wgmma.descriptor(*DESCRIBE), wgmma.wait_group(0), wgmma.pin(32)
    return kernel


def fed(wrong=""):
    a, b, out = random(64, 64), random(64, 64), np.zeros((64, 64), np.float16)
    options = dict(shared_bytes=16384 + 1024, maps=((0, TILE), (1, TILE), (2, TILE)))
    return (pipeline(wrong), 256, a, b, out), options


def test_a_warpgroup_fed_by_tma():
    arguments, options = fed()
    launch(*arguments, **options)
    _, _, a, b, out = arguments
    np.testing.assert_allclose(wide(out), 2 * wide(a) @ wide(b).T, rtol=2e-3, atol=1e-2)


@pytest.mark.parametrize(
    ("wrong", "at", "match"),
    [
        ("init fence", "tma.load_2d(a_smem", "fence.mbarrier_init is missing"),
        ("init barrier", "mbarrier.wait(full", "there is no mbarrier|no barrier in between"),
        ("bytes", None, r"Nobody can go on(.|\n)*0 of 1 arrivals and 16 bytes are missing"),
        # whichever comes first, the read or the copy
        (
            "full",
            None,
            "is read before it arrived|with no barrier in between|while wgmma or a TMA store still reads it",
        ),
        ("early", None, "is read before it arrived|while wgmma or a TMA store still reads it"),
        ("overwrite", "ld_st.store_b32(a_smem + 4", "while wgmma or a TMA store still reads it"),
        ("commit", "pin(acc)", "accumulator is read before its wgmma.wait_group .or without commit_group"),
        (
            "touch",
            "wait()",
            r"accumulators were written while the product at .*test_instructions.py:\d+: multiply.* ran",
        ),
        ("scale", "wait()", "accumulators were written while the product"),
        ("product wait", None, "leaves the kernel without wgmma.wait_group for all products"),
        ("fence", "tma.store_2d", "fence.proxy_async is missing"),
        ("fence barrier", "tma.store_2d", "fence.proxy_async is missing|with no barrier in between"),
        ("reuse", "ld_st.store_b32(a_smem, 0)", "while wgmma or a TMA store still reads it"),
        ("store wait", None, "leaves the kernel without tma.wait_group_read"),
    ],
)
def test_what_is_forgotten_between_tma_and_wgmma_is_named(wrong, at, match):
    (kernel, *arguments), options = fed(wrong)
    misuse(kernel, *arguments, match=match, at=at, **options)


def test_accumulators_are_not_there_before_the_wait():
    consumers = [
        lambda x, frag: cvt.pack_f16x2(x[0], 0.0),
        lambda x, frag: approx.ex2(x[0]),
        lambda x, frag: shfl.bfly_f32(x[0] * np.float32(2), 1),
        lambda x, frag: minmax.maximum(x[0], 1.0),
        lambda x, frag: mma.m16n8k16_f16(x, 0, frag, 0, frag, 0),
        lambda x, frag: wgmma.product_registers(8, "f16", (0,), 0)(frag, x.view(np.uint32), 0, 1),
    ]
    for consume in consumers:

        def kernel(out):
            smem = cuda.shared.array(0, np.dtype(np.uint8))
            acc, frag = local.array(4, np.dtype(np.float32)), local.array(4, np.dtype(np.float32))
            frag[:] = 0
            b = wgmma.descriptor(128, 128, 0)(shared.address(smem))
            wgmma.product_shared(8, "f16", (0,), (0,), 0)(acc, b, b, 0)
            wgmma.commit_group()
            consume(acc, frag)  # noqa: B023

        misuse(kernel, 128, np.zeros(1), match="read before its wgmma.wait_group", shared_bytes=2048)


def test_register_operands_are_not_changed_while_a_product_runs():
    def kernel():
        smem = cuda.shared.array(0, np.dtype(np.uint8))
        acc, frag = local.array(4, np.dtype(np.float32)), local.array(4, np.dtype(np.uint32))
        frag[:] = 0
        acc[:] = 0
        wgmma.product_registers(8, "f16", (0,), 0)(acc, frag, wgmma.descriptor(128, 128, 0)(shared.address(smem)), 1)
        wgmma.commit_group()
        if cuda.threadIdx.x == 77:
            frag[2] = 1
        wgmma.wait_group(0)()

    misuse(kernel, 128, match="register operands .* were changed while it ran", thread=77, shared_bytes=2048)


# Lanes that go separate ways.


def test_lanes_at_different_instructions():
    def kernel():
        if cuda.threadIdx.x == 33:
            vote.any_lane(1)
        else:
            shfl.bfly_b32(1, 1)

    message = misuse(kernel, 64, match="must come to one instruction", thread=33, at="vote.any_lane")
    assert f"thread 32 (warp 1, lane 0) waits in shfl.bfly_b32 at {__file__}:{line_of(kernel, 'shfl')}" in message


def test_lanes_at_one_instruction_in_two_places():
    def kernel():
        if cuda.threadIdx.x < 16:
            vote.any_lane(1)
        else:
            vote.any_lane(0)

    misuse(kernel, 32, match="must come to one instruction", thread=16, at="vote.any_lane(0)")


def test_lanes_with_different_registers():
    def kernel():
        registers = local.array(4, np.dtype(np.uint32))
        smem = cuda.shared.array(0, np.dtype(np.uint8))
        ldmatrix.x1(registers, cuda.threadIdx.x // 31, shared.address(smem))

    misuse(kernel, 32, match=r"ldmatrix.x1\(1,\) is reached while .* waits in ldmatrix.x1\(0,\)", shared_bytes=64)


def test_a_lane_that_has_left():
    def kernel(first):
        if cuda.threadIdx.x == first[0]:
            return
        elect.one_lane()

    for first in (0, 31):  # before the others come, and while they wait
        message = misuse(kernel, 32, np.array([first]), match="lea?[fv]e?[ts]? the kernel")
        assert f"thread {first} (warp 0, lane {first})" in message
        assert f"{__file__}:{line_of(kernel, 'elect')}: elect.one_lane()" in message


@pytest.mark.parametrize("elsewhere", ["cuda.syncthreads", "mbarrier.wait", "bar.sync"])
def test_a_lane_that_waits_elsewhere(elsewhere):
    def kernel():
        i = cuda.threadIdx.x
        smem = cuda.shared.array(0, np.dtype(np.uint8))
        mbarrier.init(shared.address(smem) + 8 * i, 1)
        if i != 5:
            vote.any_lane(1)
        elif elsewhere == "cuda.syncthreads":
            cuda.syncthreads()
        elif elsewhere == "mbarrier.wait":
            mbarrier.wait(shared.address(smem) + 8 * i, 0)
        else:
            bar.sync(3, 32)

    message = misuse(kernel, 32, match="all of a warp must come to one instruction", shared_bytes=256)
    assert f"thread 0 (warp 0, lane 0) waits in vote.any_lane at {__file__}:{line_of(kernel, 'vote')}" in message
    assert f"thread 5 (warp 0, lane 5) waits in {elsewhere}" in message
    assert f"threads 0 to 4, 6 to 31: in vote.any_lane at {__file__}" in message


def test_part_of_a_warp_or_warpgroup():
    def kernel():
        vote.any_lane(1)

    misuse(kernel, 40, match="a warp of 8 threads, not 32")

    def group():
        wgmma.commit_group()

    misuse(group, 96, match="a warpgroup of 96 threads, not 128")


def test_a_warpgroups_threads_must_give_the_same_descriptors():
    def kernel():
        acc = local.array(4, np.dtype(np.float32))
        smem = cuda.shared.array(0, np.dtype(np.uint8))
        a = wgmma.descriptor(128, 128, 0)(shared.address(smem))
        wgmma.product_shared(8, "f16", (0,), (0,), 0)(acc, a, a + np.uint64(cuda.threadIdx.x // 100), 0)

    misuse(kernel, 128, match="b's descriptor is .* it must be the same", thread=100, shared_bytes=4096)


def test_nobody_can_go_on():
    def kernel():
        smem = cuda.shared.array(0, np.dtype(np.uint8))
        if cuda.threadIdx.x == 0:
            mbarrier.init(shared.address(smem), 2)
        cuda.syncthreads()
        mbarrier.arrive(shared.address(smem)) if cuda.threadIdx.x == 0 else None
        mbarrier.wait(shared.address(smem), 0)

    message = misuse(kernel, 3, match="waits for ever", shared_bytes=64)
    assert f"threads 0 to 2: in mbarrier.wait, parity 0, on mbarrier {BASE:#x}" in message
    assert "1 of 2 arrivals and 0 bytes are missing" in message and "mbarrier.wait(shared.address(smem), 0)" in message


def test_a_loop_that_asks_memory_for_ever(monkeypatch):
    monkeypatch.setattr("numba_flash.ptx.sim.scheduler.POLLS", 1000)

    def kernel(flag):
        if cuda.threadIdx.x < 2:
            while memory.add(memory.address(flag, 0), 0) == 0:
                pass

    misuse(kernel, 3, np.zeros(1, np.uint32), match="looks at memory for the 1000th time", at="while memory.add")


# Accesses that are none.


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("ld_st.load_b32(at + 2)", "shared address 0x402 is no multiple of 4"),
        ("ld_st.load_v4(values, 0, at + 8)", "is no multiple of 16"),
        ("ld_st.load_b32(at + 64)", "4 bytes at shared address 0x440, but shared memory is 0x400 to 0x440"),
        ("ld_st.store_b32(16, 1)", "4 bytes at shared address 0x10, but"),
        ("ld_st.store_v4(at + 56, values, 0)", "16 bytes at shared address 0x438"),
        ("ldmatrix.x1(values, 0, at + 8)", "is no multiple of 16"),
        ("ldmatrix.x4(values, 0, at + 16 * i)", "16 bytes at shared address 0x440"),
        ("stmatrix.x1(at + 4, values, 0)", "is no multiple of 16"),
        ("cp_async.copy16(at + 4, g, 16)", "shared address 0x404 is no multiple of 16"),
        ("cp_async.copy16(at, g + 4, 16)", "global address .* is no multiple of 16"),
        ("cp_async.copy16(at, g, 17)", "copies 0 to 16 bytes, not 17"),
        ("cp_async.small_copy(8)(at + 4, g, 8)", "shared address 0x404 is no multiple of 8"),
        ("cp_async.small_copy(4)(at, g, 5)", "small_copy.4. copies 0 to 4 bytes, not 5"),
        ("cp_async.copy16(at, g + 64, 1)", "0x.* lie outside of every operand; they begin 64 bytes after .*operand 0"),
        ("cp_async.copy16(at, g - 16, 16)", "they begin 16 bytes before the beginning of operand 0, uint32"),
        ("memory.store_b32(12, 0)", "lie outside of every operand$"),
        ("memory.store_b32(r, 0)", "lie in operand 1, uint32 .16,., which is read-only"),
        ("memory.store_b16(g + 1, 0)", "is no multiple of 2"),
        ("memory.store_v4(g + 8, values, 0)", "is no multiple of 16"),
        ("memory.add(g + 2, 0)", "is no multiple of 4"),
        ("memory.exchange(g + 64, 0)", "outside of every operand"),
        ("shared.address(values)", "not the block's shared memory"),
        ("mbarrier.arrive(at)", "there is no mbarrier at shared address 0x400"),
        ("mbarrier.init(at + 4, 1)", "is no multiple of 8"),
        ("mbarrier.init(at, 0)", "counts 1 to 1048575 arrivals, not 0"),
        ("bar.sync(16, 32)", "barriers are 0 to 15"),
        ("bar.sync(1, 48)", "threads whole warps"),
        ("bar.arrive(1, 64)", "threads whole warps of the block's"),
        ("setmaxnreg.increase(260)()", "a multiple of 8 from 24 to 256, not 260"),
        ("setmaxnreg.decrease(20)()", "a multiple of 8 from 24 to 256, not 20"),
        ("tma.prefetch(g)", "there is no tensor map at address"),
        ("tma.prefetch(tma.parameter('k')())", "there is no tensor map at address .*: 0 maps lie"),
    ],
)
def test_an_access_that_is_none(text, match):
    def kernel(g_pointer, r_pointer):
        i = cuda.threadIdx.x
        values = local.array(4, np.dtype(np.uint32))
        smem = cuda.shared.array(0, np.dtype(np.uint8))
        at, g, r = shared.address(smem), memory.address(g_pointer, 0), memory.address(r_pointer, 0)
        wrong(at, g, r, i, values)

    wrong = eval(f"lambda at, g, r, i, values: {text}", globals())
    memory_of_both = aligned_memory((4096,), np.dtype(np.uint32))
    operand, constant = memory_of_both[1024:1040], memory_of_both[3072:3088]
    constant.flags.writeable = False
    misuse(kernel, 32, operand, constant, match=match, shared_bytes=64)


# What is done to an mbarrier by two threads.


@pytest.mark.parametrize(
    ("steps", "match"),
    [
        ("init(b, 2); init(b, 2)", "initialised a second time"),
        ("init(b, 1); arrive_expect_tx(b, 16); arrive(b)", "an arrival more than the phase has"),
        ("init(b, 1); wait(b, 2)", "parity 0 or 1, not 2"),
        ("init(b, 1); arrive_expect_tx(b, 1 << 20)", "0 to 1048575 bytes can be expected"),
    ],
)
def test_misused_mbarriers(steps, match):
    def kernel():
        smem = cuda.shared.array(0, np.dtype(np.uint8))
        exec(steps, {**vars(mbarrier), "b": shared.address(smem)})

    misuse(kernel, 1, match=match, thread=0, shared_bytes=64)


def test_an_mbarrier_that_others_cannot_know_of():
    def kernel():
        smem = cuda.shared.array(0, np.dtype(np.uint8))
        if cuda.threadIdx.x == 0:
            mbarrier.init(shared.address(smem), 2)
        mbarrier.arrive(shared.address(smem))

    misuse(kernel, 2, match="was initialised by .*thread 0 .*with no barrier in between", thread=1, shared_bytes=64)


def test_misused_named_barriers():
    def twice():
        bar.arrive(1, 64)
        bar.arrive(1, 64)

    misuse(twice, 64, match="came a second time to barrier 1", thread=0)

    def counts():
        bar.sync(1, 64 if cuda.threadIdx.x < 32 else 32)

    misuse(counts, 64, match="barrier 1 for 32 threads, but .*thread 0 .*came for 64", thread=32)


def test_setmaxnreg_of_a_part():
    def part():
        if cuda.threadIdx.x < 96:
            setmaxnreg.decrease(24)()

    misuse(part, 128, match="warp 3 of the same warpgroup nothing; all of a warpgroup must execute the same")

    def too_much():
        setmaxnreg.increase(240)()

    misuse(too_much, 384, match="the block has no more registers")


# Copies that are read, or written over, too early.


def copies(after, other=1):
    """A kernel in which each thread copies 16 bytes to shared memory, does `after`, and reads those of another."""

    def kernel(source, out):
        i = cuda.threadIdx.x
        smem = cuda.shared.array(0, np.dtype(np.uint8))
        at = shared.address(smem)
        cp_async.copy16(at + 16 * i, memory.address(source, 4 * i), 16)
        after(at + 16 * i)
        out[i] = ld_st.load_b32(at + 16 * (i ^ other))

    return kernel, 32, aligned_memory((32, 4), np.dtype(np.uint32)), np.zeros(32, np.uint32)


def wait_for_copies():
    cp_async.commit_group()
    cp_async.wait_group(0)()


def test_what_cp_async_brings_is_read_by_others_behind_a_barrier():
    def right(at):
        wait_for_copies()
        cuda.syncthreads()

    kernel, threads, source, out = copies(right)
    source[:, 0] = np.arange(32)
    launch(kernel, threads, source, out, shared_bytes=512)
    np.testing.assert_array_equal(out, np.arange(32) ^ 1)


def test_what_cp_async_brings_is_read_too_early():
    match = "is read before it arrived"
    misuse(*copies(lambda at: None, 0), match=match, at="ld_st.load_b32", thread=0, shared_bytes=512)
    misuse(*copies(lambda at: cuda.syncthreads()), match=match, shared_bytes=512)
    misuse(*copies(lambda at: cp_async.wait_group(0)(), 0), match=match, shared_bytes=512)  # never committed

    def one_group_too_new(at):
        cp_async.commit_group()
        cp_async.wait_group(1)()
        cuda.syncthreads()

    misuse(*copies(one_group_too_new), match=match, shared_bytes=512)


def test_a_barrier_is_missing():
    def no_barrier(at):
        wait_for_copies()
        vote.any_lane(1)  # is none, though all have come

    misuse(*copies(no_barrier), match="written by thread 30, is read with no barrier in between", shared_bytes=512)

    def barrier_too_early(at):
        cuda.syncthreads()
        wait_for_copies()
        vote.any_lane(1)

    misuse(*copies(barrier_too_early), match="with no barrier in between", shared_bytes=512)


def test_a_copy_is_written_over():
    match = "is written while a copy to it is under way"
    misuse(*copies(lambda at: ld_st.store_b32(at, 1)), match=match, shared_bytes=512)
    misuse(*copies(lambda at: cp_async.copy16(at, 0, 0)), match=match, shared_bytes=512)


def test_stores_are_read_by_others_behind_a_barrier():
    def kernel(out):
        i = cuda.threadIdx.x
        smem = cuda.shared.array(0, np.dtype(np.uint8))
        ld_st.store_b32(shared.address(smem) + 4 * i, i)
        bar.warp_sync()
        out[i] = ld_st.load_b32(shared.address(smem) + 4 * (i ^ 1))
        if i >= 32:
            ld_st.load_b32(shared.address(smem) + 4 * (i - 32))

    match = "written by thread 31, is read with no barrier in between"
    misuse(kernel, 64, np.zeros(64, np.uint32), match=match, at="(i - 32)", thread=63, shared_bytes=256)


@pytest.mark.parametrize("barrier", ["cuda.syncthreads", "elected", "too early", None])
def test_a_tile_is_written_over_when_everyone_has_read_it(barrier):
    """A warp reads with ldmatrix, another one writes; one lane may tell for its warp, after the read."""

    def kernel():
        i = cuda.threadIdx.x
        smem = cuda.shared.array(0, np.dtype(np.uint8))
        at, values = shared.address(smem), local.array(1, np.dtype(np.uint32))
        if i == 0:
            mbarrier.init(at + 256, 1)
        cuda.syncthreads()
        if i < 32:
            if barrier == "too early" and i == 9:
                mbarrier.arrive(at + 256)
            ldmatrix.x1(values, 0, at + 16 * (i % 8))
            if barrier == "elected" and i == 9:
                mbarrier.arrive(at + 256)
        if barrier == "cuda.syncthreads":
            cuda.syncthreads()
        if i >= 32:
            if barrier in ("elected", "too early"):
                mbarrier.wait(at + 256, 0)
            ld_st.store_b32(at + 4 * (i - 32), i)

    if barrier in ("cuda.syncthreads", "elected"):
        launch(kernel, 64, shared_bytes=512)
    elif barrier == "too early":
        match = "shared address 0x400, read by warp 0, is written over with no barrier in between"
        misuse(kernel, 64, match=match, at="ld_st.store_b32", thread=32, shared_bytes=512)
    else:  # here the other warp was first
        misuse(kernel, 64, match="written by thread 63, is read with no barrier in between", shared_bytes=512)


@pytest.mark.parametrize("same", [True, False])
def test_two_warpgroups_may_set_the_same_rows_to_zero(same):
    """Each for its own product, while the other's runs; other numbers are a race."""

    def kernel():
        i = cuda.threadIdx.x
        smem = cuda.shared.array(0, np.dtype(np.uint8))
        at, acc = shared.address(smem), local.array(4, np.dtype(np.float32))
        ld_st.store_b32(at + 1024 + 4 * (i % 128), 0 if same else i // 128)
        fence.proxy_async()
        bar.sync(1 + i // 128, 128)
        wgmma.product_shared(8, "f16", (0,), (0,), 0)(acc, describe(at + 1024), describe(at + 1024), 0)
        wgmma.commit_group()
        wgmma.wait_group(0)()

    describe = wgmma.descriptor(128, 128, 0)
    if same:
        launch(kernel, 256, shared_bytes=4096)
    else:
        match = "with no barrier in between|while wgmma or a TMA store still reads it"
        misuse(kernel, 256, match=match, shared_bytes=4096)


@pytest.mark.parametrize("fenced", ["all", "own alone", "none"])
def test_a_fence_is_of_all_that_a_thread_wrote_last(fenced):
    """In words of four; thread 1 writes over what thread 0 wrote, which the fence of thread 0 is not for."""

    def kernel():
        i = cuda.threadIdx.x
        smem = cuda.shared.array(0, np.dtype(np.uint8))
        at, acc, four = shared.address(smem), local.array(4, np.dtype(np.float32)), np.full(4, i, np.uint32)
        ld_st.store_v4(at + 16 * i, four, 0)
        bar.sync(1, 128)
        if i == 1:
            ld_st.store_v4(at, four, 0)
        bar.sync(1, 128)
        if fenced == "all" or (fenced == "own alone" and i != 1):
            fence.proxy_async()
        bar.sync(1, 128)
        wgmma.product_shared(8, "f16", (0,), (0,), 0)(acc, describe(at), describe(at), 0)
        wgmma.commit_group()
        wgmma.wait_group(0)()

    describe = wgmma.descriptor(128, 256, 0)
    if fenced == "all":
        launch(kernel, 128, shared_bytes=2048)
    else:
        misuse(kernel, 128, match="0x400, written by thread 1, is read by .*fence.proxy_async", shared_bytes=2048)


def test_a_number_is_written_over_when_everyone_has_read_it():
    def kernel():
        i = cuda.threadIdx.x
        smem = cuda.shared.array(0, np.dtype(np.uint8))
        at = shared.address(smem)
        if i == 3:
            ld_st.load_b32(at)
        elif i == 5:
            ld_st.store_b32(at, 1)

    misuse(kernel, 6, match="read by thread 3, is written over with no barrier", thread=5, shared_bytes=64)


# As elements and by address; what blocks add up or exchange in turns is for all of them.
@pytest.mark.parametrize("how", ["element", "store_b32", "store_v4", "add"])
@pytest.mark.parametrize("apart", [True, False])
def test_blocks_do_not_store_the_same_element(how, apart):
    def kernel(out):
        at = (8 if apart else 4) * cuda.blockIdx.x + 4 * cuda.threadIdx.x
        words = local.array(4, np.dtype(np.uint32))
        if how == "element":
            out[at] = 1
        elif how == "store_v4":
            memory.store_v4(memory.address(out, at), words, 0)
        else:
            getattr(memory, how)(memory.address(out, at), 1)

    out = np.zeros(16, np.uint32)
    if apart or how == "add":
        launch(kernel, 2, out, blocks=2)
    else:
        message = misuse(
            kernel, 2, out, blocks=2, match=r"element 4 of an array of shape \(16,\) was stored by block 0"
        )
        assert message.startswith("block (1, 0, 0), thread 0 (")


@pytest.mark.parametrize(
    ("attempt", "match"),
    [
        (lambda at, maps: tma.load_2d(at + 1024 + 128, maps, at, 0, 0), "is no multiple of 1024"),
        (lambda at, maps: tma.load_3d(at + 1024, maps, at, 0, 0, 0), "3 coordinates for a tensor map of 2 dimensions"),
        (lambda at, maps: tma.load_2d(at + 9 * 1024, maps, at, 0, 0), "8192 bytes at shared address"),
        (lambda at, maps: tma.load_2d(at + 1024, maps + 64, at, 0, 0), "there is no tensor map at address"),
        (lambda at, maps: tma.store_2d(maps, at + 1024, 0, 0), "read-only"),
    ],
)
def test_tma_with_a_wrong_box_or_target(attempt, match):
    def kernel(tensor_maps, tensor):
        smem = cuda.shared.array(0, np.dtype(np.uint8))
        at, maps = shared.address(smem), tma.parameter("kernel")()
        mbarrier.init(at, 1)
        fence.mbarrier_init()
        attempt(at, maps)

    tensor = aligned_memory((64, 64), np.dtype(np.float16))
    tensor.flags.writeable = False
    misuse(kernel, 1, tensor, match=match, thread=0, shared_bytes=16384, maps=((0, TILE),))


def test_a_tensor_map_that_reaches_past_its_operand():
    with pytest.raises(InstructionError, match="reaches 128 bytes past its operand"):
        launch(lambda tensor_maps, tensor: None, 1, random(63, 64), maps=((0, TILE),))


# Kernels that overlap.


def test_who_waits_for_the_kernel_before_sees_what_it_wrote():
    def first(out):
        griddepcontrol.launch_dependents()
        out[cuda.threadIdx.x] = 5

    def second(given, there_before, out):
        x = there_before[cuda.threadIdx.x]
        griddepcontrol.wait()
        out[cuda.threadIdx.x] = x + given[cuda.threadIdx.x]

    made, out = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    launch(first, 32, made)
    launch(second, 32, made, np.arange(32, dtype=np.uint32), out, behind=True)
    assert out.tolist() == list(range(5, 37))
    launch(second, 32, made, np.arange(32, dtype=np.uint32), out)  # and where it runs behind nobody
    assert out.tolist() == list(range(5, 37))


def by_index(array, out):
    if cuda.threadIdx.x != 7:
        griddepcontrol.wait()
    out[cuda.threadIdx.x] = array[cuda.threadIdx.x]  # read


def by_address(array, out):
    if cuda.threadIdx.x != 7:
        griddepcontrol.wait()
    four = local.array(4, np.dtype(np.uint32))
    memory.load_v4(four, 0, memory.address(array, 0))  # read


def by_tma(maps, array, out):
    if cuda.threadIdx.x == 7:
        tma.prefetch(tma.parameter("")())  # of the map, which is a parameter
        mbarrier.init(BASE, 1)
        fence.mbarrier_init()
        tma.load_2d(2 * BASE, tma.parameter("")(), BASE, 0, 0)  # read
    griddepcontrol.wait()


# What the kernel before wrote, or the one before that for which it waited.
@pytest.mark.parametrize("kernels_between", [0, 1])
@pytest.mark.parametrize("second", [by_index, by_address, by_tma])
def test_who_reads_before_it_has_waited(second, kernels_between):
    def first(out):
        out[8 * cuda.threadIdx.x] = 5

    def between():
        griddepcontrol.wait()

    made, out = aligned_memory((64, 64), np.dtype(np.float16)), np.zeros(32, np.uint32)
    of_tma = dict(maps=((0, TILE),), shared_bytes=2**15) if second is by_tma else {}
    launch(first, 32, made)
    for _ in range(kernels_between):
        launch(between, 32, behind=True)
    match = r"shape \(64, 64\) is read before griddepcontrol.wait"
    misuse(second, 32, made, out, match=match, at="# read", thread=7, behind=True, **of_tma)
    if second is by_index:
        launch(second, 32, made, out)  # which is behind nobody: there is nothing to wait for


def test_who_writes_before_it_has_waited():
    def by_index(out):
        out[cuda.threadIdx.x] = 1  # here

    def by_atomics(out):
        memory.add(memory.address(out, 0), 1)  # here

    for kernel in (by_index, by_atomics):
        match = r"shape \(4,\) is written before griddepcontrol.wait"
        misuse(kernel, 4, np.zeros(4, np.uint32), match=match, at="# here", thread=0, behind=True)


def test_a_block_that_never_waits():
    def kernel(out):
        if cuda.blockIdx.x == 0:
            griddepcontrol.wait()

    with pytest.raises(InstructionError, match=r"block 1 has ended without griddepcontrol\.wait"):
        launch(kernel, 4, np.zeros(4, np.uint32), blocks=2, behind=True)
    launch(kernel, 4, np.zeros(4, np.uint32), blocks=2)


# The block's threads.


def test_errors_of_other_kinds_keep_their_type():
    def kernel(out):
        if cuda.threadIdx.x == 3:
            out[10]
        vote.any_lane(1)

    with pytest.raises(IndexError, match=r"tid=\[3, 0, 0\] ctaid=\[0, 0, 0\]: element 10 lies outside"):
        launch(kernel, 32, np.zeros(3))


def test_everything_goes_on_after_an_error():
    def wrong():
        if cuda.threadIdx.x != 40:
            vote.any_lane(1)
        cuda.syncthreads()

    def right(out):
        out[cuda.threadIdx.x] = vote.any_lane(1)

    for _ in range(3):
        misuse(wrong, 64, match="must come to one instruction")
        assert lanes(right).sum() == 32


def test_shared_memory_holds_garbage_in_every_block():
    def kernel(out):
        smem = cuda.shared.array(0, np.dtype(np.float32))
        out[cuda.blockIdx.x] = smem[0]
        smem[0] = 1

    out = np.zeros(2, np.float32)
    launch(kernel, 1, out, blocks=2, shared_bytes=16)
    assert np.isnan(out).all()


def test_outside_of_a_kernel():
    with pytest.raises(RuntimeError, match="in kernels that sim.launch.run launches"):
        vote.any_lane(1)
