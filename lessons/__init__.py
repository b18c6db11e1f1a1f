"""Attention in small steps, from 60 lines to the ideas of the production kernel: docs/lessons.md.

Each file is one kernel without options. Each changes one thing of the file before it.
"""

NAMES = (
    "flash",
    "mma_1_fragments",
    "mma_2_ldmatrix",
    "mma_3_cp_async",
    "mma_4_registers",
    "hopper_1_tma",
    "hopper_2_stages",
    "hopper_3_turns",
)
