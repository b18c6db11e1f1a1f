"""Products of a consumer of the float32 backward on wgmma: float32 operands are in three parts (parts.py), and no sum
in one accumulator is longer than 64.

A consumer multiplies the block's own tile with a streamed tile, one that the block loops over:

    scores  own . streamed^T, one product for each panel of 64 columns
    sums    += scores . streamed, likewise; the scores are in registers, in parts

Both products read the same streamed tile: scores as rows, sums as columns.
"""

import functools

from ...ptx import wgmma
from ..steps.basics import inlined, named
from . import parts
from .operands import describe_rows, wait_all, wait_but_one


@functools.cache
def make(config, columns):
    """-> device functions of a warpgroup, and counts: of panels; of a lane's registers for scores (float32, and uint32
    in parts), for sums, and for those of each panel. own and streamed are shared addresses of tiles; other and
    second are for the second panel. A function that issues commits one group. columns: of the tiles, a multiple of 16,
    at most 128."""
    rows, own_rows, panels = config.other_rows, config.own_rows, -(-columns // 64)
    own_panel, panel = own_rows * 128, rows * 128  # bytes of a panel of a part
    own_part = own_panel * panels
    # Streamed tiles. In a pair of blocks they arrive panel by panel, and the parts of a panel lie together.
    part, step = (panel, config.PARTS * panel) if config.paired else (panel * panels, panel)
    score_count, frag_count = rows // 2, config.PARTS * rows // 4
    widths = tuple(min(64, columns - 64 * number) for number in range(panels))
    counts = tuple(width // 2 for width in widths)

    def of_scores(number):
        own, streamed = (number * own_panel, own_part), (number * step, part)
        return parts.product_of_rows(rows, range(widths[number] // 16), own, streamed)

    def of_sums(number):
        return parts.product_of_registers(widths[number], rows, (number * step, part))

    multiply_0, multiply_1 = of_scores(0), of_scores(panels - 1)
    multiply_columns_0, multiply_columns_1 = of_sums(0), of_sums(panels - 1)
    first_count, second_count = counts[0], counts[-1]
    describe_columns = wgmma.descriptor(panel, 1024, 128)
    pin_scores, pin_frag = wgmma.pin(score_count), wgmma.pin(frag_count)
    pin_first, pin_second = wgmma.pin(first_count), wgmma.pin(second_count)
    two_panels = panels > 1

    @inlined
    def issue_first_scores(acc, own, streamed):
        multiply_0(acc, describe_rows(own), describe_rows(streamed))

    @inlined
    def issue_second_scores(other, own, streamed):
        if two_panels:
            multiply_1(other, describe_rows(own), describe_rows(streamed))

    @inlined
    def finish_scores(acc, other):
        """Waits; acc <- the scores."""
        wait_all()
        pin_scores(acc)
        if two_panels:
            pin_scores(other)
            for x in range(score_count):
                acc[x] += other[x]

    @inlined
    def issue_sums(first, second, frag, streamed):
        streamed_desc = describe_columns(streamed)
        multiply_columns_0(first, frag, streamed_desc)
        wgmma.commit_group()
        if two_panels:
            multiply_columns_1(second, frag, streamed_desc)
            wgmma.commit_group()

    @inlined
    def finish_first_sums(acc, first):
        """Waits for the first panel; acc += first, while the second is computed."""
        if two_panels:
            wait_but_one()
        else:
            wait_all()
        pin_first(first)
        for x in range(first_count):
            acc[x] += first[x]

    @inlined
    def finish_second_sums(acc, second, frag):
        """Waits for the second panel, if any; acc += second."""
        if two_panels:
            wait_all()
            pin_second(second)
            for x in range(second_count):
                acc[first_count + x] += second[x]
        pin_frag(frag)  # pins the operands in their registers until here

    counts = dict(score_count=score_count, frag_count=frag_count, sum_count=columns // 2, panels=panels)
    counts |= dict(even_count=first_count, odd_count=second_count if two_panels else 1)
    functions = issue_first_scores, issue_second_scores, finish_scores, issue_sums
    return named(*functions, finish_first_sums, finish_second_sums, **counts)
