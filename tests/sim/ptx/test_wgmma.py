"""wgmma: products of a warpgroup."""

import functools

import numpy as np
import pytest
from helpers.instructions import KINDS, launch, misuse, random, rng, wide
from numba import cuda

from numba_flash.ptx.sim import approx, cvt, fence, ld_st, local, minmax, mma, shared, shfl, wgmma


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


def test_a_warpgroups_threads_must_give_the_same_descriptors():
    def kernel():
        acc = local.array(4, np.dtype(np.float32))
        smem = cuda.shared.array(0, np.dtype(np.uint8))
        a = wgmma.descriptor(128, 128, 0)(shared.address(smem))
        wgmma.product_shared(8, "f16", (0,), (0,), 0)(acc, a, a + np.uint64(cuda.threadIdx.x // 100), 0)

    misuse(kernel, 128, match="b's descriptor is .* it must be the same", thread=100, shared_bytes=4096)
