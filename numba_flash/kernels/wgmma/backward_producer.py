"""The producer of a wgmma backward block: one thread, which loads tiles by TMA in the order in which consumers need
them.

`full` mbarriers tell the consumers that a tile has arrived. At `empty` ones the consumers release it.
"""

from numba import int32

from ...ptx import mbarrier, tma
from ..steps.inlined import inlined
from . import backward_state

Q_MAP, K_MAP, V_MAP, DO_MAP = 0, 128, 256, 384  # the kernel's tensor maps, bytes from the first


def make(config, own_maps, stream_maps):
    """-> (load_own, load_a, load_b), device functions.

    own_maps, stream_maps: which of the kernel's tensor maps tiles a and b have; None: there is no such tile.
    """
    plan, rings = config.shared_layout(), backward_state.pipelines(config)
    maps_address = tma.parameter(f"numba_flash_{config.kernel}")
    a_panels, b_panels = -(-config.head_dim_padded // 64), -(-config.head_dim_v_padded // 64)
    own_bytes = config.own_rows * 128 * (a_panels + (b_panels if own_maps[1] is not None else 0))

    def box_loader(rows, panels, map_at):
        @inlined
        def load(to, full, row, head, batch):
            """Loads a tile of `rows` rows that begins at `row`; rows that do not exist become zeros."""
            for panel in range(panels):
                tma.load_4d(to + panel * (rows * 128), maps_address() + map_at, full, panel * 64, row, head, batch)

        return load

    load_own_a = box_loader(config.own_rows, a_panels, own_maps[0])
    load_own_b = box_loader(config.own_rows, b_panels, own_maps[1]) if own_maps[1] is not None else None
    load_stream_a = box_loader(config.stream_rows, a_panels, stream_maps[0])
    load_stream_b = box_loader(config.stream_rows, b_panels, stream_maps[1])
    has_own_b = load_own_b is not None

    @inlined
    def load_own(base, row, head, batch):
        """The tile that the block owns."""
        full = rings.own.full(base, 0)
        mbarrier.arrive_expect_tx(full, own_bytes)
        load_own_a(base + plan.own_a, full, row, head, batch)
        if has_own_b:
            load_own_b(base + plan.own_b, full, row, head, batch)

    @inlined
    def load_a(base, n, row, head, batch, extra_bytes):
        """Loads the n-th tile of stream_a. extra_bytes: what the caller loads on the same mbarrier. -> its stage."""
        stage = rings.a.stage(n)
        full = rings.a.producer_expect(base, n, int32(config.stream_a_bytes + extra_bytes))
        load_stream_a(base + plan.stream_a + stage * config.stream_a_bytes, full, row, head, batch)
        return stage

    @inlined
    def load_b(base, n, row, head, batch):
        """Loads the n-th tile of stream_b."""
        full = rings.b.producer_expect(base, n, config.stream_b_bytes)
        load_stream_b(base + plan.stream_b + rings.b.stage(n) * config.stream_b_bytes, full, row, head, batch)

    return load_own, load_a, load_b
