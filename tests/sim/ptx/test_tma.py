"""TMA: boxes of a tensor map, and bytes without a map."""

import numpy as np
import pytest
from helpers.instructions import TILE, launch, misuse, random
from numba import cuda

from numba_flash.abi.tensor_maps import TensorMap
from numba_flash.arrays.making import aligned_memory
from numba_flash.ptx.sim import fence, ld_st, mbarrier, memory, shared, tma
from numba_flash.ptx.sim.errors import InstructionError

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
