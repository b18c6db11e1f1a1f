"""A bias in 16 bits for scores whose rows are keys: it comes to shared memory with a tile of queries.

From global memory a lane would load one number at a time, of rows far apart (kernels/score/reads.py). ldmatrix gives it
two neighbouring queries of its keys, as kernels/wgmma/bias_boxes.py does of tiles that TMA loads. A tile of queries and
keys lies in panels (ptx/fragments.py). Past the last query or key it is 0.
"""

from numba import int32, uint32

from ...ptx import ldmatrix, local
from ..steps import async_tiles
from ..steps.basics import inlined, lane_and_warp, named, panel_offset


def make(config):
    """-> device functions: load, as of async_tiles.loader, and read."""
    blocks, at_once = config.tile_m // 8, min(config.tile_m, 32)  # queries of an instruction
    load = async_tiles.loader(config.tile_m, config.tile_n, config.threads)

    @inlined
    def read(loaded, r, tile):
        """loaded (2 * strips, tile_m / 8) <- the bias of the lane's row r; two columns in a register."""
        lane, warp = lane_and_warp()
        chunk, four = warp * (config.warp_rows // 8) + r, local.array(4, uint32)
        place = int32(tile + panel_offset(lane & (at_once - 1), chunk, config.tile_m))
        for n in range(0, blocks, 4):
            ldmatrix.x4_trans(four, 0, place + n * 1024)
            for x in range(min(blocks - n, 4)):
                loaded[r * blocks + n + x] = four[x]

    return named(load, read)
