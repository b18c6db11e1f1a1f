"""Products of the float32 backward on wgmma: float32 operands are in three parts (parts.py), and no sum in one
accumulator is longer than 64.

A consumer multiplies the block's own tile with a streamed tile, one that the block loops over. Tiles a have head_dim
columns (Q and K), tiles b head_dim_v (dO and V):

    scores  own . streamed^T, one product for each panel of 64 columns
    sums    += scores . streamed, likewise; the scores are in registers, in parts

Both products read the same streamed tile: scores as rows, sums as columns. Tiles come from two rings. What multiplies
waits until a tile may be read, and releases it afterwards. With config.paired two blocks share the columns, and tiles
come panel by panel (paired_tiles.py).
"""

from numba import cuda, int32

from ...ptx import cluster, fence, wgmma
from ..steps.basics import inlined, named
from . import operands, paired_tiles, parts, pipeline
from .block import elected
from .operands import describe_rows, wait_all, wait_but_one


def places(config):
    """-> those of tiles a and b: the ring, and device functions of (base, n): `at`, where the tile of step n is, and
    `acquire`, by which the producer waits until it may write there."""

    def of_ring(ring, streamed, tile_bytes):
        @inlined
        def at(base, n):
            return int32(base + streamed + ring.stage(n) * tile_bytes)

        return named(at, ring=ring, acquire=ring.producer_acquire)

    plan, (ring_a, ring_b) = config.shared_layout(), pipeline.streamed(config)
    a = of_ring(ring_a, plan.stream_a, config.stream_a_bytes)
    return a, of_ring(ring_b, plan.stream_b, config.stream_b_bytes)


def of_kind(config, is_a, columns, own_at, place, exchange):
    """-> device functions of a consumer warpgroup for tiles a or b: `wait` until the first product may be issued;
    `issue` and `finish` scores, S with a and dP with b; `issue_sums` and `finish_sums`. And counts of a lane's
    registers for the sums of a gradient, and of each panel of it.

    base: the block's shared memory; n: the step, from 0 on; acc (rows / 8, 4), or for sums (columns / 8, 4); other: as
    acc, for the second panel; even, odd: for sums of each panel; frag: scores in parts. columns: of the block's tiles,
    a multiple of 16, at most 128; exchange: with the other block of a pair.
    """
    rows, own_rows, panels, ring = config.other_rows, config.own_rows, -(-columns // 64), place.ring
    own_panel, panel = own_rows * 128, rows * 128  # bytes of a panel of a part
    # In a pair the parts of a streamed panel lie together; else, and in an own tile, the panels of a part.
    part, step = (panel, config.PARTS * panel) if config.paired else (panel * panels, panel)
    widths = [min(64, columns - 64 * number) for number in range(panels)]
    counts = [width // 2 for width in widths]
    first_count, second_count, two_panels = counts[0], counts[-1], panels > 1
    of_pair = config.panels if config.paired else 0  # panels with mbarriers of their own
    # The second panel of b has its own barrier, and the next tile a may be loaded beside it.
    by_panels, early = config.paired and two_panels, config.paired and two_panels and not is_a

    def of_scores(number):
        own, streamed = (number * own_panel, own_panel * panels), (number * step, part)
        return parts.product_of_rows(rows, range(widths[number] // 16), own, streamed)

    def of_sums(number):
        return parts.product_of_registers(widths[number], rows, (number * step, part))

    multiply_first, multiply_second = of_scores(0), of_scores(panels - 1)
    add_first, add_second = of_sums(0), of_sums(panels - 1)
    describe_columns = operands.describe_columns(rows)
    pin_scores, pin_frag = wgmma.pin(rows // 2), wgmma.pin(config.PARTS * rows // 4)
    pin_first, pin_second = wgmma.pin(first_count), wgmma.pin(second_count)

    @inlined
    def release(base, n, first):
        """Releases the tile; in a pair its panels from `first` on, and those that only the other kind of tile has."""
        if config.paired:
            for number in range(first, of_pair):
                ring.consumer_release(base + 8 * number, n, elected())
        else:
            ring.consumer_release(base, n, elected())

    @inlined
    def issue(acc, other, base, n):
        multiply_first(acc, describe_rows(int32(base + own_at)), describe_rows(place.at(base, n)))
        if by_panels:
            wgmma.commit_group()
            ring.consumer_wait(base + 8, n)
        if two_panels:
            multiply_second(other, describe_rows(int32(base + own_at)), describe_rows(place.at(base, n)))
        wgmma.commit_group()

    @inlined
    def finish(acc, other, base, n):
        """Waits; acc <- the scores, in a pair the sum of both blocks'."""
        if early:
            wait_but_one()
            ring.consumer_release(base, n, elected())
        wait_all()
        pin_scores(acc)
        if two_panels:
            pin_scores(other)
            for x in range(rows // 2):
                acc[x] += other[x]
        release(base, n, int32(early))
        if config.paired:
            exchange.send(acc, base, n)
            exchange.receive(acc, base, n)
            if not is_a or not config.of_ds:
                exchange.release(base)

    @inlined
    def issue_sums(even, odd, frag, base, n):
        if early:  # for a the first consumer has waited before its weights
            ring.consumer_wait(base + 8, n)
        streamed = describe_columns(place.at(base, n))
        add_first(even, frag, streamed)
        wgmma.commit_group()
        if two_panels:
            add_second(odd, frag, streamed)
            wgmma.commit_group()

    @inlined
    def finish_sums(acc, even, odd, frag, base, n):
        """Waits for each panel; acc += it, the first one while the second is computed."""
        if two_panels:
            wait_but_one()
        else:
            wait_all()
        pin_first(even)
        for x in range(first_count):
            acc[x] += even[x]
        if config.paired:
            ring.consumer_release(base, n, elected())
        if two_panels:
            wait_all()
            pin_second(odd)
            for x in range(second_count):
                acc[first_count + x] += odd[x]
        pin_frag(frag)  # pins the operands in their registers until here
        release(base, n, 1)

    counts = dict(sum_count=columns // 2, even_count=first_count, odd_count=second_count if two_panels else 1)
    return named(issue, finish, issue_sums, finish_sums, wait=ring.consumer_wait, **counts)


def make(config):
    """-> device functions: those of a and b, as of_kind says; the ring of weights, of one place; and those below."""
    plan, at, has_second = config.shared_layout(), config.barriers(), config.of_ds
    place_a, place_b = (paired_tiles.places if config.paired else places)(config)
    weights = pipeline.pipeline(at.weights_full, None if config.paired else at.weights_empty)
    of_s, of_dp = paired_tiles.exchanges(config) if config.paired else (None, None)
    gather_rows, of_pair = (paired_tiles.gather_rows(config), config.panels) if config.paired else (None, 0)

    @inlined
    def init_tiles(base):
        place_a.ring.init(base, 4, 4 + 4 * has_second)
        place_b.ring.init(base, 4, 4 * config.of_p + 4 * has_second)

    @inlined
    def set_up(base):
        """One thread initialises the mbarriers. A warp arrives once, whether it belongs to the producer or to a
        consumer, here or in the other block of a pair."""
        if config.paired:
            for panel in range(of_pair):
                init_tiles(base + 8 * panel)
            of_s.ring.init(base, 4, 4)
            of_dp.ring.init(base, 4, 4)
        else:
            init_tiles(base)
        weights.init(base, 4, 4)
        fence.mbarrier_init()

    @inlined
    def start():
        """Waits for all threads, so that they see what one thread has set up."""
        if config.paired:
            cluster.sync()
        else:
            cuda.syncthreads()

    @inlined
    def leave(base, found):
        """All threads call this last. found: rows of the warp that are not finite. -> those that it computes again"""
        return gather_rows(base, found) if config.paired else found

    @inlined
    def acquire_weights(base, n):
        """The first consumer calls this before it hands over weights. In a pair their place is that of the other
        block's half of S, which the same thread has read."""
        if has_second and not config.paired:
            weights.producer_acquire(base, n)

    @inlined
    def release_weights(base):
        """The second consumer calls this once a warp has read them."""
        if config.paired:
            of_s.release(base)
        else:
            weights.consumer_release(base, 0, elected())

    a = of_kind(config, True, config.head_dim_padded, plan.own_a, place_a, of_s)
    b = of_kind(config, False, config.head_dim_v_padded, plan.own_b, place_b, of_dp)
    functions = set_up, start, leave, acquire_weights, release_weights
    return named(*functions, a=a, b=b, weights=weights, places=(place_a, place_b))
