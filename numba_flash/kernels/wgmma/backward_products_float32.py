"""Products of a consumer of the float32 backward on wgmma: float32 operands are in three parts (parts.py), and no sum
in one accumulator is longer than 64.

A consumer multiplies the block's own tile with a streamed tile, one that the block loops over:

    scores  own . streamed^T, one product for each panel of 64 columns
    sums    += scores . streamed, likewise; the scores are in registers, in parts

Both products read the same streamed tile: scores as rows, sums as columns.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from ...ptx import wgmma
from ..steps.inlined import inlined
from . import parts
from .operands import describe_rows, wait_all, wait_but_one


class Products(NamedTuple):
    """Device functions of a warpgroup. own and streamed are shared addresses of tiles. Each function commits what it
    issues as one group."""

    panels: int
    score_count: int  # float32 of a lane's scores
    sum_count: int  # float32 of its sums
    panel_counts: tuple[int, int]  # float32 of the sums of each panel
    frag_count: int  # uint32 of scores in parts
    issue_scores: Callable[..., Any]  # (acc, other, own, streamed); other: for the second panel
    issue_first_scores: Callable[..., Any]  # (acc, own, streamed): of the first panel
    issue_second_scores: Callable[..., Any]  # (other, own, streamed): of the second, if there is one
    finish_scores: Callable[..., Any]  # (acc, other): waits; acc <- the scores
    issue_sums: Callable[..., Any]  # (first, second, frag, streamed); first, second: for each panel
    finish_sums: Callable[..., Any]  # (acc, first, second, frag): waits; acc += both
    finish_first_sums: Callable[..., Any]  # (acc, first): waits for the first panel; acc += first
    finish_second_sums: Callable[..., Any]  # (acc, second, frag): waits for the second panel, if any; acc += second


@functools.cache
def make(config, columns):
    """columns: of the tiles, a multiple of 16, at most 128."""
    rows, own_rows, panels = config.stream_rows, config.own_rows, -(-columns // 64)
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
    def issue_scores(acc, other, own, streamed):
        issue_first_scores(acc, own, streamed)
        issue_second_scores(other, own, streamed)
        wgmma.commit_group()

    @inlined
    def finish_scores(acc, other):
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
        if two_panels:
            wait_but_one()
        else:
            wait_all()
        pin_first(first)
        for x in range(first_count):
            acc[x] += first[x]

    @inlined
    def finish_second_sums(acc, second, frag):
        if two_panels:
            wait_all()
            pin_second(second)
            for x in range(second_count):
                acc[first_count + x] += second[x]
        pin_frag(frag)  # pins the operands in their registers until here

    @inlined
    def finish_sums(acc, first, second, frag):
        """Adds one panel while the next is computed."""
        finish_first_sums(acc, first)
        finish_second_sums(acc, second, frag)

    scores = issue_scores, issue_first_scores, issue_second_scores, finish_scores
    sums = issue_sums, finish_sums, finish_first_sums, finish_second_sums
    panel_counts = first_count, second_count if two_panels else 1
    return Products(panels, score_count, columns // 2, panel_counts, frag_count, *scores, *sums)
