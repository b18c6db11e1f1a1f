"""What the compilers make of every tensor-core kernel that select can choose, and of kernels/simt: without a GPU, for
every GPU.

A kernel passes its gate when nothing is spilled, nothing lies in local memory, nothing is serialised (C7510 to
C7519), registers and shared memory suffice for the blocks that its Config counts on, and the instructions for whose
sake it was written are there. The terminal summary has what was found.

PTX is made once, for the oldest GPU, and assembled for each: compiling takes seconds, assembling tenths of them. What
was found is kept (tests/helpers/gate_results.py): a gate compiles only when something has changed that could change it.
Those that will compile are marked slow.
"""

import dataclasses
import functools
import inspect
import itertools
import math
import re
import subprocess
import time
import types
from unittest import mock

import pytest
from helpers import compiler, gate_results
from helpers.machines import A100, ADA, AMPERE, B200, HOPPER, RTX_5090, TURING, empty, packed_problem, problem
from helpers.selected import configs_of, configs_with
from helpers.simt_kernels import BACKWARD, FORWARD, backward_problem as gradients, local_bytes

from numba_flash.arrays import read
from numba_flash.config.backward import MmaBackwardConfig, PreprocessConfig
from numba_flash.config.bias_rows import BiasRowsConfig
from numba_flash.config.simt_backward import DbiasSumConfig, HeadSumsConfig
from numba_flash.config.wgmma_join import WgmmaJoinConfig
from numba_flash.functions.function import Function
from numba_flash.gpu import assembler, compiled
from numba_flash.problem.options import HEAD_GRADIENTS, Packed, uses
from numba_flash.problem.pages import Pages
from numba_flash.select import backward_kernels, backward_tiles, decode, forward as select, tiles
from numba_flash.select.backward import kernels_of
from numba_flash.select.rungs import RUNGS

pytestmark = compiler.needed

SINCE_AMPERE = (A100, AMPERE, ADA, HOPPER, B200, RTX_5090)
SCORES = ("mma_dbias", "mma_daux")
OF_MMA = ("mma_dkdv", "mma_dq", "mma_one_key_tile", *SCORES)
MACHINES = dict.fromkeys(("mma", "backward_preprocess", *OF_MMA), SINCE_AMPERE)
PAIRED = ("wgmma_dkdv_paired", "wgmma_dq_paired")
OF_PARTS = ("wgmma_float32", "wgmma_dkdv_float32", "wgmma_dq_float32", *PAIRED)  # products of 16 bits in float32
ON_HOPPER = ("wgmma", "wgmma_join", *OF_PARTS)
ON_HOPPER += ("wgmma_dkdv", "wgmma_dq", "wgmma_fused", "wgmma_round", "wgmma_add_parts")
MACHINES |= dict.fromkeys(ON_HOPPER, (HOPPER,))
IN_PTX = {
    "mma": ("mma.sync.aligned.m16n8k16", "ldmatrix.sync", "cp.async.cg.shared"),
    "wgmma": ("wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg.inc", "setmaxnreg.dec"),
}
IN_SASS = {"mma": ("HMMA.16816", "LDSM", "LDGSTS"), "wgmma": ("HGMMA", "UTMALDG", "USETMAXREG")}
for kernel in OF_PARTS:
    IN_PTX[kernel] = (".f32.bf16.bf16", "cvt.rn.bf16x2.f32", "setmaxnreg.inc", "setmaxnreg.dec")
    IN_SASS[kernel] = ("HGMMA", "USETMAXREG")
for kernel in PAIRED:
    IN_PTX[kernel] += (".version 8.1", ".reqnctapercluster 2, 1, 1", "st.async.shared::cluster", "mapa.shared::cluster")
for kernel in OF_MMA:
    IN_PTX[kernel], IN_SASS[kernel] = IN_PTX["mma"], IN_SASS["mma"]
MACHINES["decode"] = SINCE_AMPERE
IN_PTX["decode"], IN_SASS["decode"] = (*IN_PTX["mma"], ".global.add.u32"), IN_SASS["mma"]
IN_PTX["mma_daux"] += ("red.global.add.u64",)
IN_PTX["backward_preprocess"], IN_SASS["backward_preprocess"] = ("ld.global.v4.b32",), ("LDG.E.128",)
for kernel in ("wgmma_dkdv", "wgmma_dq", "wgmma_fused"):
    IN_PTX[kernel], IN_SASS[kernel] = IN_PTX["wgmma"], IN_SASS["wgmma"]
IN_PTX["wgmma_fused"] += ("stmatrix.sync",)
OF_TURNS = ("cp.reduce.async.bulk.global", "red.release.gpu", "ld.acquire.gpu")
for kernel in ("wgmma_join", "wgmma_round", "wgmma_add_parts"):
    IN_PTX[kernel], IN_SASS[kernel] = ("ld.global.v4.b32",), ("LDG.E.128",)
WIDE = {  # mma in other dtypes, and the instructions of its products
    "float32": ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", "HMMA.1688.F32.TF32"),
    "float64": ("mma.sync.aligned.m8n8k4.row.col.f64", "DMMA"),
    "float64, sm_90": ("mma.sync.aligned.m16n8k16.row.col.f64", "DMMA"),
}
OF_CARRIER = (
    "setmaxnreg.inc",
    "setmaxnreg.dec",
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f64",
    *OF_TURNS[1:],
)
OF_BOTH_BLOCKS = IN_PTX["wgmma_dkdv_paired"][-4:]
WITHOUT_PRODUCTS = (*HeadSumsConfig.names, "mma_dq_finish", "bias_rows", "outside")
for kernel in WITHOUT_PRODUCTS:
    MACHINES[kernel], IN_PTX[kernel], IN_SASS[kernel] = SINCE_AMPERE, (), ()
SIMT = [config for config in (*FORWARD, *BACKWARD) if not local_bytes(config)]  # rows in registers
OF_SIMT = tuple({config.kernel for config in SIMT} - set(WITHOUT_PRODUCTS))
for kernel in OF_SIMT:
    MACHINES[kernel], IN_PTX[kernel], IN_SASS[kernel] = (TURING, *SINCE_AMPERE), (), ()
REGISTERS = 65536  # of a multiprocessor

# Rows that do not pass yet, and why. Strict: one that passes has to leave this list.
FAILING: dict[str, str] = {
    "v2-float64-64-64": "spills 40 bytes on sm_120a with 13.5, none on the others",
    # With tiles of 16 keys these four spill 16, 0, 8 and 8 bytes, and each product reads Q for half as many keys.
    "wgmma_float32-256-64x32-reading": "spills 32 bytes; none without bias, mask and functions",
    "wgmma_float32-256-64x32-both": "spills 68 bytes; none without bias, mask and functions",
    "wgmma_float32-256-64x32-everything": "spills 296 bytes; none without bias, mask and functions",
    "wgmma_float32-256-64x32-everything-odd": "spills 272 bytes; none without bias, mask and functions",
    "mma_dkdv-128-32x64-reads": "spills 44 bytes on sm_80 with 13.5, none on later ones",
    "mma_dkdv-256-32x64-reads-dk": "spills 32 bytes on sm_80 with 13.5, none on later ones",
    "mma_dkdv-256-16x32-reads-dk": "spills 16 bytes on sm_120a with 13.5, none on the others",
    "mma_dq-64-128x32-reads": "spills 60 bytes on sm_80 with 13.5, none on later ones",
    "mma_dq-256-64x32-reads": "spills 92 bytes on sm_80 with 13.5, none on later ones",
    "mma_dkdv-256-128x64x4-dkdv": "spills 12 bytes on sm_90a with 13.0, 16 with 13.5; none on sm_100a",
    "mma_float64-64-64x16-rich": "spills 40 bytes on sm_90a with 13.5, where three blocks share a multiprocessor",
    "mma_float32-512-32x16": "spills 44 bytes on sm_90a, 12 on the others with 13.5",
    "mma_float32-512-16x16": "spills 44 bytes on sm_90a, 12 to 60 on the others with 13.5",
}
# Those that pass with some versions of NVVM and nvJitLink only, or were compiled with 13.5 alone.
DEPENDS = {
    "wgmma_dq-256-128x32-aux": "spills 12 bytes with 13.5, beside a gradient of aux",
    "decode-float32-128-16": "spills 244 bytes on sm_80 with 13.5, none on sm_90a",
    "decode-128-64-functions": "spills 4 bytes on sm_100a with 13.5, none on sm_90a",
    "mma-float64-128-32x32-20-tokens": "spills 8 bytes on sm_90a with 13.5",
    "mma-float16-50-copies": "spills 8 bytes on sm_120a with 13.5, none on the others",
    "mma_float32-128-64x32-rich": "spills 4 bytes on sm_120a with 13.5, none on the others",
    "mma_float32-64-64x64-both": "spills 8 bytes on sm_80, 16 on sm_120a with 13.0; none on sm_90a",
    "mma_float32-128-64x32-both": "spills 8 bytes on sm_80 to sm_89, 40 on sm_120a with 13.0; none on sm_90a",
    "mma_float32-256-64x32-reading": "spills 380 bytes on sm_80, 4 on sm_100a with 13.0; none on sm_90a",
    "mma_float32-256-64x32-both": "spills 536 bytes on sm_80 with 13.0; none on later ones",
    "mma_dkdv_float32-256-16x16": "spills 44 bytes with 13.0, none with 13.5",
    "mma_float32-256-128x32": "spills 284 bytes on sm_100a with 13.5, none on sm_90a",
    "mma_dkdv-128-64x64x2-dkdv": "spills 4 bytes with 13.0, none with 13.5",
    "wgmma-256-bfloat16-direct": "spills 16 bytes with 13.5; none where TMA fetches the bias",
    "mma_dkdv-256-32x64x1-reading-dk": "spills 8 bytes on sm_90a with 13.0, none with 13.5",
    "mma_dkdv-256-32x64-reads-dv": "spills 60 bytes on sm_120a with 13.5, none on the others",
    "mma_dkdv-256-16x32-reads-dv": "spills 16 bytes on sm_120a with 13.5, none on the others",
    "mma_dq-256-32x16-reads": "spills 76 bytes on sm_120a with 13.5, none on the others",
    "mma-256-mask-everything": "spills 172 bytes on sm_80, 164 on sm_86 and sm_89 with 13.0; none on sm_90a and later",
    "mma-256-bfloat16-everything": "spills 524 bytes on sm_80, 500 on sm_86 and sm_89 with 13.0; none on later ones",
    "mma-256-float32-everything": "spills 524 bytes on sm_80, 500 on sm_86 and sm_89 with 13.0; none on later ones",
    "mma-512-mask-everything": "spills 392 bytes on sm_80 with 13.0; none on sm_90a and later",
    "mma-512-bfloat16-everything": "spills 388 bytes on sm_80 with 13.0; none on sm_90a and later",
    "mma-512-float32-everything": "spills 388 bytes on sm_80 with 13.0; none on sm_90a and later",
    "mma-256-dropout-everything": "spills up to 184 bytes on sm_80 to sm_89 with 13.0; none on later ones",
    "mma-512-dropout-everything": "spills about 160 bytes on sm_80 with 13.0; none on sm_90a and later",
    "mma_dq_float64-256-16x16-sm80-rich": "spills 56 bytes on sm_80 with 13.5",
    "mma_dq_float64-256-16x16-sm80-reading": "spills 136 bytes on sm_80 with 13.5",
    "mma_dkdv-128-64x64x1-dkdv": "spills 20 bytes on sm_90a with 13.5",
    "mma_dbias-64-64x64-summed-split": "spills 80 to 124 bytes on sm_80, sm_90a and sm_100a with 13.5",
    "mma_float32-256-64x64": "spills 8 bytes on sm_90a and sm_100a with 13.5",
    "mma_float64-192-64x32": "sm_90a: 24 bytes of local memory with 13.5",
    "wgmma_dq-256-packed-functions": "spills 8 bytes with 13.5",
    "v2_dbias-float16-59-33-softcap-bias-mask-alibi_slopes-seqlens_k-q_offset-26": "spills 12 bytes up to sm_89",
    "v2_dbias-float16-59-33-softcap-bias-mask-alibi_slopes-seqlens_k-q_offset-28": "spills 32 to 36 bytes on most",
    # A slope and the next turn's barrier are read back once a key tile, beside its products. The cost is not measured.
    "wgmma-64-192x128-parts": "spills 12 bytes, those of the scheduler, whose thread has 32 registers",
    "wgmma-64-192x112-sloped": "spills 24 bytes since the outputs have a file of their own",
    "wgmma-64-192x112-sloped-alibi": "spills 28 bytes since the outputs have a file of their own",
    # The kernel below was measured on an H200 alone, where it spills little or nothing. Nobody has measured what
    # the spills cost on older GPUs, nor other numbers of blocks there.
    "mma_one_key_tile-32-64x64": "spills 104 bytes on sm_80 with 13.5",
    "mma_one_key_tile-32-64x64-rich": "spills 284 bytes on sm_80 with 13.5",
    "mma_one_key_tile-32-64x64-reading": "spills 4 to 452 bytes on sm_80 and sm_90a with 13.5",
    "mma_one_key_tile-32-64x64-both": "spills 100 bytes on sm_80 with 13.5",
    "mma_one_key_tile-32-32x32": "spills 104 bytes on sm_80 with 13.5",
    "mma_one_key_tile-32-32x32-rich": "spills 268 bytes on sm_80 with 13.5",
    "mma_one_key_tile-32-32x32-reading": "spills 436 bytes on sm_80 with 13.5",
    "mma_one_key_tile-32-32x32-both": "spills 100 bytes on sm_80 with 13.5",
    "mma_one_key_tile-64-64x64-rich": "spills 144 bytes on sm_80 with 13.5",
    "mma_one_key_tile-64-64x64-reading": "spills 288 bytes on sm_80 with 13.5",
    "mma_one_key_tile-64-32x32": "spills 504 bytes on sm_80 with 13.5",
    "mma_one_key_tile-64-32x32-rich": "spills 708 bytes on sm_80 with 13.5",
    "mma_one_key_tile-64-32x32-reading": "spills 8 to 892 bytes on sm_80, sm_90a and sm_100a with 13.5",
    "mma_one_key_tile-64-32x32-both": "spills 492 bytes on sm_80 with 13.5",
    "mma_one_key_tile-128-32x64": "spills 8 to 816 bytes on sm_80, sm_90a and sm_100a with 13.5",
    "mma_one_key_tile-128-32x64-rich": "spills 8 to 956 bytes on all but sm_100a with 13.5",
    "mma_one_key_tile-128-32x64-reading": "spills 48 to 1064 bytes on every GPU with 13.5",
    "mma_one_key_tile-128-32x64-both": "spills 8 to 768 bytes on sm_80, sm_86, sm_89 and sm_120a with 13.5",
    "mma_one_key_tile-128-32x32-rich": "spills 8 to 956 bytes on all but sm_100a with 13.5",
    "mma_one_key_tile-128-32x32-reading": "spills 16 to 1064 bytes on every GPU with 13.5",
    "mma_one_key_tile-128-32x32-both": "spills 8 to 768 bytes on sm_80, sm_86, sm_89 and sm_120a with 13.5",
    "mma_one_key_tile-128-16x16-rich": "spills 576 to 920 bytes on sm_80, sm_86 and sm_89 with 13.5",
    "mma_one_key_tile-128-16x16-reading": "spills 672 to 1056 bytes on sm_80, sm_86 and sm_89 with 13.5",
    "mma_one_key_tile-128-16x16-both": "spills 576 to 768 bytes on sm_80, sm_86 and sm_89 with 13.5",
    # Their tiles are those of an H200. On sm_80 the loop takes more registers, for a reason that nobody has found yet.
    "decode-64-32": "spills 1816 bytes on sm_80 and sm_86 with 13.5",
    "decode-64-64": "spills 360 bytes on sm_80",
    "decode-128-16": "spills 1116 bytes on sm_80 with 13.5, where lanes join 32 nodes; so do the next ones",
    "decode-128-16-rich": "spills 1156 bytes on sm_80 with 13.5",
    "decode-128-16-functions": "spills 1164 bytes on sm_80 with 13.5",
    "decode-128-16-bias": "spills 1156 bytes on sm_80 with 13.5",
    "decode-128-16-dropout": "spills 1160 bytes on sm_80 with 13.5",
    "decode-128-64-rich": "spills 24 bytes on sm_90a and sm_100a",
    "decode-128-64-dropout": "spills 8 bytes on sm_90a, 68 on sm_100a",
    "decode-256-32": "spills 4 bytes on sm_100a",
    "decode-256-32-dropout": "spills 4 bytes on sm_100a",
    "decode-256-32-rich": "spills 12 bytes on sm_100a",
    "decode-256-32-functions": "spills 8 bytes on sm_100a",
    "decode-128-32": "spills 52 bytes on sm_90a and sm_100a with 13.5",
    "decode-128-64": "spills 52 to 56 bytes on sm_90a and sm_100a with 13.5",
    "decode-128-64-prefix": "spills 44 bytes on sm_90a, 56 on sm_100a",
    "decode-256-32-prefix": "spills 56 bytes on sm_90a, 44 on sm_100a",
    "decode-64-16": "spills 1024 bytes on sm_80 with 13.5",
    "decode-float32-128-32": "spills 56 bytes on sm_90a",
    "decode-float32-64-16": "spills 940 bytes on sm_80 with 13.5",
    "decode-float64-64-16": "spills 52 bytes on sm_90a with 13.5, beside 64 numbers of 32 nodes",
    "decode-float32-256-16": "spills 184 bytes on sm_90a",
    "mma_dkdv_float64-128-32x16-sm80-reading": "spills 88 bytes on sm_80 with 13.5",
    "mma_dkdv_float64-128-32x16-sm80-rich": "spills 88 bytes on sm_80 with 13.5",
    "mma_dkdv_float64-256-16x16-dk-sm80-reading": "spills 108 bytes on sm_80 with 13.5",
    "mma_dkdv_float64-256-16x16-dk-sm80-rich": "spills 116 bytes on sm_80 with 13.5",
    "mma_dkdv_float64-256-16x16-dv-sm80-reading": "spills 116 bytes on sm_80 with 13.5",
    "mma_dkdv_float64-256-16x16-dv-sm80-rich": "spills 120 bytes on sm_80 with 13.5",
    "mma_dkdv_float64-256-32x16-dv-sm80-reading": "spills 116 bytes on sm_80 with 13.5",
    "mma_dkdv_float64-256-32x16-dv-sm80-rich": "spills 120 bytes on sm_80 with 13.5",
    "mma_dkdv_float64-64-64x16-sm80-reading": "spills 80 bytes on sm_80 with 13.5",
    "mma_dkdv_float64-64-64x16-sm80-rich": "spills 80 bytes on sm_80 with 13.5",
    "mma_one_key_tile-128-32x32": "spills 4 bytes on sm_90a with 13.5",
    "mma_one_key_tile-32-16x16": "spills 96 bytes on sm_80 with 13.5",
    "mma_one_key_tile-32-16x16-both": "spills 104 bytes on sm_80 with 13.5",
    "mma_one_key_tile-32-16x16-reading": "spills 436 bytes on sm_80 with 13.5",
    "mma_one_key_tile-32-16x16-rich": "spills 244 bytes on sm_80 with 13.5",
    "mma_one_key_tile-64-16x16": "spills 480 bytes on sm_80 with 13.5",
    "mma_one_key_tile-64-16x16-both": "spills 372 bytes on sm_80 with 13.5",
    "mma_one_key_tile-64-16x16-reading": "spills 884 bytes on sm_80 with 13.5",
    "mma_one_key_tile-64-16x16-rich": "spills 636 bytes on sm_80 with 13.5",
    "mma_one_key_tile-64-64x64-both": "spills 32 bytes on sm_80 with 13.5",
}
DEPENDS |= {
    f"mma_only_tile-{head_dim}-{n}x{n}{words}": "spills up to 376 bytes on sm_80 with 13.5; an A100 has rows of its own"
    for head_dim, n, words in itertools.product((64, 128), (64, 32, 16), ("", "-rich", "-reading", "-both"))
}


def intended(config):
    """Words that must be in the PTX, and in the SASS for sm_90a; and the GPUs."""
    if getattr(config, "copy_bytes", 16) < 16:
        in_ptx, in_sass, machines = intended(dataclasses.replace(config, copy_bytes=16))
        copies, loads = ("cp.async.ca.shared", "LDGSTS") if config.copy_bytes > 2 else ("ld.global.b16", "LDG.E.U16")
        changed = {"cp.async.cg.shared": copies, "LDGSTS": loads}
        return tuple(changed.get(x, x) for x in in_ptx), tuple(changed.get(x, x) for x in in_sass), machines
    kernel, dtype = config.kernel, config.dtype
    if getattr(config, "early", False):  # before wgmma's kernels
        return (*IN_PTX[kernel], "griddepcontrol.launch_dependents"), IN_SASS[kernel], (HOPPER,)
    if dtype not in WIDE or kernel in (*WITHOUT_PRODUCTS, *OF_SIMT, *OF_PARTS):
        turns = OF_TURNS if kernel == "wgmma_fused" and not config.key_tiles else ()
        in_ptx = (*IN_PTX[kernel], *turns, *("griddepcontrol.wait",) * config.waits)
        return in_ptx, IN_SASS[kernel], MACHINES[kernel]
    machines = SINCE_AMPERE
    if dtype == "float64":
        dtype, machines = ("float64, sm_90", (HOPPER,)) if config.large_f64 else (dtype, (A100, B200))
    in_ptx, in_sass = WIDE[dtype]
    carried = kernel == "mma_fused"
    more = OF_CARRIER * carried + OF_BOTH_BLOCKS * (config.cluster > 1)
    return (in_ptx, "cp.async.cg.shared", *more), (in_sass, "LDGSTS", *("USETMAXREG",) * carried), machines


class Fields:
    """A row's conditions and what it sets, each by its name; columns: what it sets."""

    def __init__(self, row):
        self.row, self.columns, self.apart = row, row.tile, row.apart
        vars(self).update(row.when._asdict(), **row.tile)


def rows(tables, kernel, dtype=""):
    return [Fields(row) for row in tiles.rows_of(tables, kernel, dtype, HOPPER)]


def candidates(kernel, problem, target):
    return select.CANDIDATES[kernel](problem, target)


def wide_gates():
    """mma's rows for float32 and float64, plain, with everything that it takes, and with functions."""
    used = dict(softcap=True, alibi_slopes="float32", seqlens_k="int32", q_offset="int32", sinks="float32")
    rich = dict(q_offset_source="array", scores_finished=True, o_vectorized=False)
    for dtype, target in (("float32", HOPPER), ("float64", HOPPER), ("float64", A100)):
        key, table = f"mma_{dtype}", rows(tiles.TABLES, "mma", dtype)
        for row in table:
            with mock.patch.dict(tiles.TABLES, {key: (row.row,)}):
                (config,) = candidates("mma", problem(row.head_dim, dtype=dtype), target)
            if config.shared_bytes > target.shared_bytes:
                continue
            name = f"{key}-{row.head_dim}-{row.tile_m}x{row.tile_n}{'-sm80' if target is A100 else ''}"
            yield name, config
            if row in (table[0], next(x for x in table if x.head_dim == 128 and not x.plain)):
                yield f"{name}-rich", dataclasses.replace(config, **rich, uses=uses(**used))
            reads = [x for x in table if not x.plain and not x.unread]
            if row in [next(x for x in reads if x.head_dim == n) for n in (64, 128, 256)]:
                reading = uses(**used, bias=dtype, mask="bool")
                yield f"{name}-reading", dataclasses.replace(config, **rich, uses=reading)
                yield f"{name}-both", dataclasses.replace(config, scores_finished=True, uses=wide_functions())


def wgmma_float32_gates():
    """Rows of wgmma in float32: plain, with columns that are not loaded four at a time, and with all that the row
    serves. Few queries share a tile of 64 rows with their group's other heads."""
    lengths, array = dict(seqlens_k="int32", q_offset="int32", sinks="float32"), dict(q_offset_source="array")
    changed, read = dict(softcap=True, alibi_slopes="float32"), dict(bias="float32", mask="bool")
    for row in rows(tiles.TABLES, "wgmma_float32"):
        with mock.patch.dict(tiles.TABLES, {"wgmma_float32": (row.row,)}):
            (config,) = candidates("wgmma", problem(row.head_dim, dtype="float32"), HOPPER)
        odd = dict(head_dim=row.head_dim - 1, head_dim_v=row.head_dim - 1, o_vectorized=False)
        served = {"": {}, "-odd": dict(odd, **array, uses=uses(**lengths))}
        finished, few = dict(array, scores_finished=True), dict(tile_m=64, group_size=8)
        if row.plain:
            served["-few"] = dict(few, **array, uses=uses(**lengths))
        else:
            served["-rich"] = dict(finished, uses=uses(**lengths, **changed))
            served["-few"] = few | served["-rich"]
            served["-reading"] = dict(finished, uses=uses(**lengths, **changed, **read), o_vectorized=False)
            served["-both"] = dict(scores_finished=True, uses=wide_functions())
            every = wide_functions(**lengths, **changed, **read, dropout_p=True)
            served["-everything"] = dict(finished, o_vectorized=False, uses=every)
            served["-everything-odd"] = served["-everything"] | odd
        for words, options in served.items():
            name = f"wgmma_float32-{row.head_dim}-{row.tile_m}x{row.tile_n}{words}"
            yield name, dataclasses.replace(config, **options)


def wgmma_backward_float32_gates():
    """Rows of wgmma's backward in float32: plain, with columns that are not loaded four at a time, with all that it
    takes, and dK or dV alone."""
    for table, wanted in dict(wgmma_dkdv_float32=OF_KEYS, wgmma_dq_float32=OF_QUERIES).items():
        for row in rows(backward_tiles.TABLES, table):
            odd = padded_rows(row.head_dim - 1)
            words, most = ("-lengths", LENGTHS) if row.plain else ("-rich", OPTIONS)
            served = {"": {}, "-odd": odd, words: most, f"{words}-odd": most | odd}
            if not (row.unread or row.plain):
                served["-reading"] = OPTIONS | READ | dict(bias_aligned=False)
            if wanted == OF_KEYS:
                served |= {"-dk": dict(wanted=("dk",)), "-dv": dict(wanted=("dv",))}
            for words, given in served.items():
                (config,) = of_gradients({table: row}, dtype="float32", **dict(wanted=wanted) | given)
                yield f"{config.kernel}-{row.head_dim}-{row.tile_m}x{row.tile_n}{words}", config


def wide_functions(**options):
    """A function whose derivative varies, and one that hides; with other options."""
    both = dict(score_mod=Function.of("score_mod", capped), mask_mod=Function.of("mask_mod", of_document))
    return uses(**both, aux=(("float32", 2), ("int32", 2)), **options)


def fp32_fp64_backward_gates():
    """Rows of the backward of mma in float32 and float64, plain, with all that it takes, and with functions."""
    for dtype, target, sm80 in (("float32", HOPPER, ""), ("float64", HOPPER, ""), ("float64", B200, "-sm80")):
        for kernel, wanted in dict(mma_dkdv=OF_KEYS, mma_dq=OF_QUERIES).items():
            table = f"{kernel}_{dtype}"
            for row in rows(backward_tiles.TABLES, table):
                own, other = (row.tile_n, row.tile_m) if wanted == OF_KEYS else (row.tile_m, row.tile_n)
                served = {"": {}} | ({} if row.plain else {"-rich": OPTIONS})
                if not row.plain and not row.unread:
                    read = READ | dict(bias=empty(300, 500, dtype=dtype), bias_aligned=False)
                    served |= {"-reading": OPTIONS | read, "-both": FUNCTIONS_OF["both"]}
                for words, given in served.items():
                    for config in of_gradients({table: row}, target, dtype=dtype, wanted=wanted, **given):
                        size = f"{own}x{other}{part(config)}"
                        yield f"{table}-{row.head_dim}-{size}{sm80}{words}", config
    yield from mma_fused_gates()


def mma_fused_gates():
    """Of the one kernel of float64 and of the one behind it, with as many keys as it needs."""
    kernel, dtype = "mma_fused", "float64"
    for row in rows(backward_tiles.TABLES, kernel):
        arrays = dict.fromkeys(("do", "q", "k", "v", "o"), empty(1, 64, 2048, row.head_dim, dtype=dtype))
        arrays |= dict(lse=empty(1, 64, 2048, dtype=dtype))
        for words, given in {"": {}, "-positions": LENGTHS}.items():
            of_all = of_gradients({kernel: row}, HOPPER, dtype=dtype, **arrays, **given)
            for config, name in zip(of_all, (kernel, "mma_dq_finish"), strict=True):
                yield f"{name}-{row.head_dim}-{row.tile_n}x{row.tile_m}{words}", config


# What problems of gradients may have, with 300 queries and 500 keys of two heads.
LENGTHS = dict(seqlens_k=empty(1, dtype="int32"), q_offset=empty(1, dtype="int32"))
LINEAR = LENGTHS | dict(alibi_slopes=empty(2, dtype="float32"))  # the derivative with respect to the product is 1
OPTIONS = LINEAR | dict(softcap=3.0)
READ = dict(bias=empty(300, 500, dtype="float32"), bias_aligned=True, mask=empty(300, 500, dtype="bool"))
READ_MASK = dict(mask=READ["mask"])
BOXED = dict(bias=empty(300, 500, dtype="float16", strides=(504, 1)), bias_aligned=True)  # by TMA
OF_KEYS, OF_QUERIES = ("dk", "dv"), ("dq",)
FEW_BLOCKS, MANY_BLOCKS = HOPPER, dataclasses.replace(HOPPER, multiprocessors=1)  # for so many multiprocessors


def of_gradients(tables, target=MANY_BLOCKS, members=0, **given):
    """The Configs that select makes of a problem of gradients where each of these tables has one row, {table: row}, or
    none; without those that prepare what others read. It is the one kernel where the last table is its own, with one
    sum of dQ. members: query heads of a part of a group."""
    *_, (table, row) = tables.items()
    made = gradients(given.pop("head_dim", row.head_dim), **given)
    found = dict(heads_per_block=lambda *_, **__: members, dq_partials=lambda *_: 1)
    found |= dict(gains_by_one_kernel=lambda *_: True) if table == "wgmma_fused" else {}
    with mock.patch.multiple(backward_kernels, **found):
        own = {name: fields and fields.row for name, fields in tables.items()}
        found = configs_with(own, table.partition("_")[0], made, target)
    before = ("backward_preprocess", "delta", "mask_bits", "mask_mod_bits", "tile_states", "tile_order")
    return [config for config in found if not config.kernel.startswith(before)]


def padded_rows(head_dim):
    """Arrays in float32 whose rows begin at multiples of 16 bytes, and that have one column less."""
    shapes = dict.fromkeys(("do", "q", "o"), (1, 2, 300, head_dim)) | dict.fromkeys("kv", (1, 2, 500, head_dim))
    pitch = head_dim + 1
    strides = {n: (2 * n * pitch, n * pitch, pitch, 1) for n in (300, 500)}
    made = {name: empty(*shape, dtype="float32", strides=strides[shape[2]]) for name, shape in shapes.items()}
    return dict(head_dim=head_dim, **made)


def of_both(config):
    """Of a kernel for dK and dV, which of them."""
    return f"-{'dk' * config.of_dk}{'dv' * config.of_dv}" if hasattr(config, "of_dk") else ""


def part(config):
    """The same, where it is one of them."""
    return of_both(config).replace("-dkdv", "")


def name_of(kernel, row):
    return f"{kernel}-{row.head_dim}-{row.tile_m}x{row.tile_n}" + "-sloped" * row.sloped


def of_row(kernel, row):
    """The Config that select makes of a row of its table, for plain attention with all of the row's head_dim, or where
    that does not fit with 64 columns less of v. With softcap where another row is for plain attention, and with a mask
    or ALiBi where the row is for these.
    """
    options = dict(softcap=5.0) if row.unread and kernel == "wgmma" else {}
    if row.sloped:
        options = dict(alibi_slopes=empty(2, dtype="float32"))
    if row.masked:
        options = dict(mask=empty(1, 1, 4096, 4096, dtype="bool", strides=(2**24, 2**24, 4096, 1)))
    with mock.patch.dict(tiles.TABLES, {kernel: (row.row,)}):
        found = [
            config
            for head_dim_v in (row.head_dim, row.head_dim - 64)
            for config in candidates(kernel, problem(row.head_dim, head_dim_v, **options), HOPPER)
        ]
    return next(config for config in found if config.shared_bytes <= HOPPER.shared_bytes)


def rich(kernel, head_dim, head_dim_v, seqlen):
    """With everything that a tensor-core kernel takes; few queries share a tile with their group's other heads."""

    def apart(heads, n, dim):
        return empty(1, heads, n, dim, dtype="bfloat16", strides=(2**24, 2**22, 512, 1))

    made = problem(
        dtype="bfloat16", q=apart(8, seqlen, head_dim), k=apart(2, 4096, head_dim), v=apart(2, 4096, head_dim_v),
        softcap=5.0, alibi_slopes=empty(8, dtype="float32"), seqlens_k=empty(1, dtype="int32"),
        q_offset=empty(1, dtype="int32"), sinks=empty(8, dtype="bfloat16"), causal=True, return_lse=True,
    )  # fmt: skip
    config = select.select(made, HOPPER, kernel).config
    assert (config.group_size > 1) == (seqlen < 64)
    return config


def reading(kernel, head_dim, bias, mask, everything):
    """With what is read for each score: a bias of this dtype, or None, and a mask; with everything else too, or alone.
    Tiles of wgmma are as large as they may be."""

    def scores(dtype, heads):
        return empty(1, heads, 4096, 4096, dtype=dtype, strides=(2**26, 2**24, 4096, 1))

    given = dict(bias=scores(bias, 2)) if bias else {}
    given |= dict(mask=scores("bool", 1)) if mask else {}
    if everything:
        given |= dict(
            softcap=5.0, alibi_slopes=empty(2, dtype="float32"), seqlens_k=empty(1, dtype="int32"), causal=True,
            q_offset=empty(1, dtype="int32"), sinks=empty(2, dtype="float32"), return_lse=True,
        )  # fmt: skip
    made = problem(head_dim, dtype="bfloat16", bias_aligned=True, **given)
    return next(config for config in candidates(kernel, made, HOPPER) if config.shared_bytes <= HOPPER.shared_bytes)


def dropping(kernel, head_dim, everything):
    """With dropout, alone or with all that is not read for each score."""
    given = dict(dropout_p=0.1)
    if everything:
        given |= dict(
            softcap=5.0, alibi_slopes=empty(2, dtype="float32"), seqlens_k=empty(1, dtype="int32"), causal=True,
            q_offset=empty(1, dtype="int32"), sinks=empty(2, dtype="float32"), return_lse=True,
        )  # fmt: skip
    made = problem(head_dim, dtype="bfloat16", **given)
    return next(config for config in candidates(kernel, made, HOPPER) if config.shared_bytes <= HOPPER.shared_bytes)


def dropping_gates():
    """Of both kernels each head_dim at which their tables change."""
    for kernel, head_dims in (("mma", (64, 128, 256, 512)), ("wgmma", (64, 128, 192, 256))):
        for head_dim in head_dims:
            for everything in (False, True):
                name = f"{kernel}-{head_dim}-dropout{'-everything' * everything}"
                yield name, dropping(kernel, head_dim, everything)


def reading_gates():
    """Of both kernels each head_dim at which their tables change, with bias, mask and everything."""
    for kernel, head_dims in (("mma", (64, 128, 256, 512)), ("wgmma", (64, 128, 192, 256))):
        for head_dim in head_dims:
            # Tiles of mma are the same with everything and without; where everything spills, less must not.
            alone = (False,) if kernel == "wgmma" or head_dim > 128 else ()
            for bias in (None, "bfloat16", "float32"):
                for everything in (*alone, True):
                    name = f"{kernel}-{head_dim}-{bias or 'mask'}{'-everything' * everything}"
                    config = reading(kernel, head_dim, bias, bias is None or everything, everything)
                    yield name, config
                    if config.bias_boxes:  # what becomes of it where TMA cannot fetch the bias
                        yield f"{name}-direct", dataclasses.replace(config, bias_stages=0)


def decode_gates():
    """Caches of each width and number of rows; with pages, and with all that a score may need."""
    rich = dict(softcap=5.0, alibi_slopes=empty(8, dtype="float32"), causal=True, sinks=empty(8, dtype="float32"))
    functions = dict(score_mod=Function.of("score_mod", shifted), mask_mod=Function.of("mask_mod", striped))
    served = {
        "": {},
        "-rich": rich,
        "-functions": functions,
        "-bias": dict(bias=empty(1, 8, 1, 2**17, dtype="float32")),
        "-dropout": {},
    }
    served["-dropout"] = dict(dropout_p=0.1)
    for head_dim in (64, 128, 256):
        for queries in (1, 8, 16):
            for words, options in served.items():
                if words and (queries == 8 or head_dim == 64) or words == "-bias" and queries > 1:
                    continue
                made = problem(
                    head_dim, dtype="bfloat16", heads=8, heads_kv=2, seqlen=queries, seqlen_k=2**17, return_lse=True,
                    seqlens_k=empty(1, dtype="int32"), **options,
                )  # fmt: skip
                made = dataclasses.replace(made, pages=Pages(16, 2**13, 2**17))
                config = decode.config_of(made, "own" if queries == 1 and not words else "table", HOPPER)
                yield f"decode-{head_dim}-{config.tile_m}{words}", config
                if not words and queries == 1 and head_dim > 64:
                    config = decode.config_of(dataclasses.replace(made, batch=64), "table", HOPPER, shares=True)
                    yield f"decode-{head_dim}-{config.tile_m}-prefix", config
    for dtype, head_dim, queries in (
        ("float32", 64, 1), ("float32", 128, 1), ("float32", 128, 8), ("float32", 256, 1),
        ("float64", 64, 1), ("float64", 128, 1), ("float64", 128, 8),
    ):  # fmt: skip
        made = problem(head_dim, dtype=dtype, heads=8, heads_kv=2, seqlen=queries, seqlen_k=2**14, causal=True)
        made = dataclasses.replace(made, pages=Pages(16, 2**10, 2**14))
        config = select.few_queries(made, HOPPER) or decode.config_of(made, "table", HOPPER)
        yield f"decode-{dtype}-{head_dim}-{config.tile_m}", config


def packed_gates():
    """Of packed sequences a few of wgmma and of mma, with gradients."""
    rich = dict(
        softcap=5.0, alibi_slopes=empty(2, dtype="float32"), seqlens_k=empty(4, dtype="int32"), causal=True,
        q_offset=empty(4, dtype="int32"),
    )  # fmt: skip
    functions = dict(score_mod=Function.of("score_mod", shifted), mask_mod=Function.of("mask_mod", striped))
    alibi = dict(alibi_slopes=rich["alibi_slopes"], causal=True)
    served = {"": dict(causal=True), "-rich": rich, "-alibi": alibi, "-functions": functions}
    for kernel, head_dims in dict(wgmma=(64, 128, 256), mma=(64,)).items():
        for head_dim in head_dims:
            for words, options in served.items():
                if words == "-alibi" and (kernel, head_dim) != ("wgmma", 64):
                    continue
                more = dict(sinks=empty(2, dtype="float32"), return_lse=True) if words == "-rich" else {}
                made = packed_problem(head_dim, **options, **more)
                yield f"{kernel}-{head_dim}-packed{words}", select.select(made, HOPPER, kernel, "cupy").config
                for config in configs_of(kernel, packed_gradients(head_dim, **options)):
                    if config.kernel.startswith(kernel):
                        yield f"{config.kernel}-{head_dim}-packed{words}{part(config)}", config
                if kernel == "wgmma" and words in ("", "-rich"):
                    made = packed_problem(head_dim, "float32", **options, **more)
                    config = select.select(made, HOPPER, kernel, "cupy").config
                    for own in (config, *configs_of(kernel, packed_gradients(head_dim, "float32", **options))):
                        if own.kernel.startswith(kernel):
                            yield f"{own.kernel}-{head_dim}-packed{words}", own
    # Of many sequences without bounds, where tiles have numbers.
    made = select.select(packed_problem(64, sequences=64, causal=True), A100, "mma", "cupy").config
    for config in (made, *configs_of("mma", packed_gradients(64, sequences=64, causal=True), A100)):
        if config.kernel.startswith(("mma", "outside")):
            yield f"{config.kernel}-64-packed-numbered", config


def packed_gradients(head_dim, dtype="float16", sequences=4, **options):
    rows, ends = empty(4096, 2, head_dim, dtype=dtype), empty(sequences + 1, dtype="int32")
    arrays = dict.fromkeys(("do", "q", "k", "v", "o"), rows) | dict(lse=empty(2, 4096, dtype="float32"))
    arrays |= dict(cu_seqlens_q=ends, cu_seqlens_k=ends, layout=Packed())
    return gradients(head_dim, dtype=dtype, **arrays, **options)


def shifted(score, b, h, q_pos, k_pos):
    return score + 0.5 * b - 0.1 * (q_pos - k_pos)


def striped(b, h, q_pos, k_pos):
    return (q_pos + k_pos) % 3 != 0


def backward_gates():
    """Each row of the backward's tables: with all that it takes, or with plain scores where it is for those only."""
    for table in ("mma_dkdv", "mma_dq", "wgmma_dkdv", "wgmma_dq"):
        wanted = OF_KEYS if table.endswith("dkdv") else OF_QUERIES
        of_table = rows(backward_tiles.TABLES, table)
        for row in (row for row in of_table if not row.functions):
            plain, served = {"": dict(dtype="float16")}, {"-rich": dict(dtype="bfloat16", **OPTIONS)}
            if table.startswith("wgmma"):  # the first row of a head_dim that takes it; by_element_gates have others
                alike = [x for x in of_table if x.head_dim == row.head_dim and not (x.plain or x.functions)]
                served = served if row is next((x for x in alike if not x.linear), None) else {}
                if row is next((x for x in alike if x.linear), None):
                    served = plain | {"-linear": dict(dtype="bfloat16", **LINEAR)}
            served = plain if row.plain else served
            # What is read for each score, in the rows of mma for other than plain scores. A mask alone takes less.
            if table.startswith("mma") and not row.plain:
                served["-reading"] = dict(dtype="bfloat16", **OPTIONS, **READ)
            for words, given in served.items():
                given |= dict(wanted=wanted)
                groups = f"x{row.column_groups}" if "column_groups" in row.columns else ""
                name = f"{table}-{row.head_dim}-{row.tile_m}x{row.tile_n}{groups}{words}"
                for config in of_gradients({table: row}, **given):
                    yield name + of_both(config), config
                if table.startswith("wgmma"):  # what becomes of it where there are few blocks
                    for config in of_gradients({table: row}, FEW_BLOCKS, **given):
                        yield f"{name}{of_both(config)}-halved", config
                if table == "wgmma_dkdv":
                    made = of_gradients({table: row}, members=4, **given)
                    for config in made:
                        after = config.kernel == "wgmma_add_parts"
                        yield f"{'wgmma_add_parts-' * after}{name}{of_both(config)}{'' if after else '-parts'}", config
    for row in rows(backward_tiles.TABLES, "wgmma_fused"):
        yield from fused_gates(row)
    yield from around_gates()


def fused_gates(row):
    """The one kernel and the two behind it, in each form: blocks with some or all key tiles of a head, persistent or
    not; parts of a group; several sums of dQ."""
    seqlens = dict(seqlens_k=LENGTHS["seqlens_k"], q_offset=0)
    kinds = dict(plain={}, seqlens=seqlens, mask=READ_MASK, bias=BOXED, bias_and_mask=BOXED | READ_MASK)
    kinds |= dict(dropout=seqlens | dict(dropout_p=0.1)) if row.tile_m == 64 else {}
    # How many key tiles blocks have that stay.
    stays = dict(plain=range(5), seqlens=range(5), mask=range(1, 5), bias=range(2, 5))
    for name, given in kinds.items():
        table, given = {"wgmma_fused": row}, dict(dtype="float16", **given)
        fused, rounds = of_gradients(table, FEW_BLOCKS, **given)
        in_parts, _, add_parts = of_gradients(table, FEW_BLOCKS, members=2, **given)
        several = (2, fused.MOST_LINES)
        forms = {"": {}, "-single": dict(key_tiles=1)}
        most = fused.MOST_KEY_TILES if row.tile_m == 128 else 0
        for n in stays.get(name, ()):
            if n <= most:
                forms[f"-stays-{n}-key-tiles"] = dict(key_tiles=n, stays=True)
        made = {name + words: dataclasses.replace(fused, **form) for words, form in forms.items()}
        made[f"{name}-parts"] = in_parts
        if 0 in stays.get(name, ()):
            made[f"{name}-stays-parts"] = dataclasses.replace(in_parts, stays=True)
        if name == "plain":
            fewer = dict(head_dim=row.head_dim * 3 // 4, head_dim_v=row.head_dim * 3 // 4)
            forms = {"scale-0": dict(lse_first=False), "three-quarters": fewer}
            forms["three-quarters-stays"] = fewer | dict(stays=True)
            forms |= {f"{lines}-lines": dict(dq_partials=lines) for lines in several}
            forms["lines-stays"] = dict(dq_partials=fused.MOST_LINES, stays=True)
            forms["single-narrow"] = dict(head_dim=row.head_dim - 3, lse_first=False, key_tiles=1)  # not by 16 bytes
            made |= {words: dataclasses.replace(fused, **form) for words, form in forms.items()}
        yield from ((f"wgmma_fused-{row.head_dim}-{words}", config) for words, config in made.items())
        yield f"wgmma_add_parts-{row.head_dim}-{name}", add_parts
        yield f"wgmma_round-{row.head_dim}-{name}", rounds
        for lines in several:
            yield f"wgmma_round-{row.head_dim}-{name}-{lines}-lines", dataclasses.replace(rounds, dq_partials=lines)


def around_gates():
    """What goes before and behind the kernels of gradients."""
    of_turns = PreprocessConfig("float16", 64, has_dlse=True, turns_of=64, early=True)
    yield "backward_preprocess-64-turns", of_turns
    yield "bias_rows", BiasRowsConfig("float16")
    yield "bias_rows-pairs", BiasRowsConfig("bfloat16", pairs=True)
    yield "backward_preprocess-64-sinks", PreprocessConfig("float16", 64, has_dlse=True, of_terms=True)
    for dtype, given in (("float16", "float16"), ("float64", "float64"), ("float64", "float32")):
        yield f"dbias_sum-{dtype}-{given}", DbiasSumConfig(dtype, given)
        for name in HEAD_GRADIENTS:
            yield f"{name}-{dtype}-{given}", HeadSumsConfig(dtype, name, given, True)
    for dtype in ("float16", "bfloat16"):
        yield f"dsinks_of_blocks-{dtype}", HeadSumsConfig(dtype, "dsinks", dtype, True, of_blocks=True)
        yield f"backward_preprocess-64-{dtype}", PreprocessConfig(dtype, 64, has_dlse=True)


def by_distance(score, b, h, q_pos, k_pos, table, segments):
    return score + table[h, min(max(q_pos - k_pos, -63), 63) + 63]


def capped(score, b, h, q_pos, k_pos, table, segments):
    return 20.0 * math.tanh(score / 20.0)


def of_document(b, h, q_pos, k_pos, table, segments):
    return segments[b, q_pos] == segments[b, k_pos]


def weighted(score, b, h, q_pos, k_pos, table, weights):
    return score - weights[h] * table[q_pos, k_pos]


FUNCTIONS = (by_distance, capped, of_document)
# Of a table that reaches so far positions are int64, which takes more registers.
TABLE, SEGMENTS = empty(2, 127, dtype="float32", strides=(2**40, 1)), empty(1, 500, dtype="int32")
AUX = tuple(read("aux", x).layout for x in (TABLE, SEGMENTS))
AUX_OF_A_HEAD = tuple(read("aux", empty(*shape, dtype="float32")).layout for shape in ((500, 500), (2,)))
FUNCTIONS_OF = dict(
    reads=dict(score_mod=Function.of("score_mod", by_distance), aux=AUX),
    hides=dict(mask_mod=Function.of("mask_mod", of_document), aux=AUX),
    both=dict(score_mod=Function.of("score_mod", capped), mask_mod=Function.of("mask_mod", of_document), aux=AUX),
)


def backward_functions_gates():
    """Of mma's backward each row that takes a caller's functions alone: one that reads, with derivative 1; one whose
    derivative varies; one that hides; and two at once."""
    for table, wanted in dict(mma_dkdv=OF_KEYS, mma_dq=OF_QUERIES).items():
        for row in (row for row in rows(backward_tiles.TABLES, table) if not row.plain):
            for words, functions in FUNCTIONS_OF.items():
                for config in of_gradients({table: row}, dtype="bfloat16", wanted=wanted, **functions):
                    yield f"{table}-{row.head_dim}-{row.tile_m}x{row.tile_n}-{words}{part(config)}", config


def score_gradients_gates():
    """Rows of mma_dbias: a tile of its own elements and sums over each side, with a bias of either size and all else;
    those of mma_daux, with a function alone and with all else. split: blocks share a sum."""
    every = dict(dtype="bfloat16", mask=READ["mask"], dropout_p=0.1, **OPTIONS)
    for row in rows(backward_tiles.TABLES, "mma_dbias"):
        summed = empty(1, 1 if row.head_dim > 64 else 500, dtype="bfloat16")
        served = {
            "": dict(dtype="float16", bias=empty(300, 500, dtype="float16"), bias_aligned=True),
            "-rich": every | dict(bias=READ["bias"], bias_aligned=True),
            "-summed": every | dict(bias=summed),
        }
        for words, given in served.items():
            config, *_ = of_gradients({"mma_dbias": row}, wanted=("dbias",), **given)
            name = f"mma_dbias-{row.head_dim}-{row.tile_m}x{row.tile_n}{'-two-stages' * (row.stages - 1)}{words}"
            if not targets_of(config):  # the copies of a bias in 32 bits leave no room for three blocks with two stages
                continue
            yield name, dataclasses.replace(config, split=False)
            if words:
                yield f"{name}-split", dataclasses.replace(config, split=True, pairs=False)
    hides = FUNCTIONS_OF["hides"] | every | dict(bias=READ["bias"])
    for row in rows(backward_tiles.TABLES, "mma_daux"):
        for words, given in {"": dict(dtype="float16"), "-rich": hides}.items():
            given = FUNCTIONS_OF["reads"] | given
            found = of_gradients({"mma_daux": row}, wanted=("daux[0]",), **given)
            (config,) = (x for x in found if x.kernel == "mma_daux")
            yield f"mma_daux-{row.head_dim}-{row.tile_m}x{row.tile_n}{words}", config


def short_gates():
    """Of mma where all queries and keys of a head are in one tile, which shrinks to the lengths."""
    for row in rows(tiles.TABLES, "mma_short"):
        for n in (64, 32, 16):
            read = dict(bias=empty(n, n, dtype="float32"), mask=empty(n, n, dtype="bool"), bias_aligned=True)
            every = read | dict(
                softcap=5.0, alibi_slopes=empty(2, dtype="float32"), seqlens_k=empty(1, dtype="int32"), causal=True,
                q_offset=empty(1, dtype="int32"), sinks=empty(2, dtype="float32"), return_lse=True,
            )  # fmt: skip
            for words, given in {"": {}, "-reading": dict(dtype="bfloat16", **every)}.items():
                with mock.patch.dict(tiles.TABLES, mma_short=(row.row,)):
                    config = next(candidates("mma", problem(row.head_dim, seqlen=n, **given), HOPPER))
                yield f"mma_short-{row.head_dim}-{config.tile_m}x{config.tile_n}{words}", config


def short_wide_gates():
    """The same in float32 and float64, of 20 tokens and of 16, with gradients."""
    for dtype, n in (("float32", 20), ("float32", 16), ("float64", 20)):
        lse = empty(1, 2, n, dtype="float64" if dtype == "float64" else "float32")
        for head_dim in (64, 128, 256):
            arrays = dict.fromkeys(("do", "q", "k", "v", "o"), empty(1, 2, n, head_dim, dtype=dtype))
            forward = select.select(problem(head_dim, seqlen=n, dtype=dtype), HOPPER, "mma").config
            made = kernels_of("mma", gradients(head_dim, dtype=dtype, lse=lse, **arrays), HOPPER)
            for config in (forward, *made):
                if hasattr(config, "copy_bytes"):
                    sizes = f"{head_dim}-{config.tile_m}x{config.tile_n}"
                    yield f"{config.kernel}-{dtype}-{sizes}{part(config)}-{n}-tokens", config


def one_key_tile_gates():
    """All gradients where all keys of a head are in one tile, which shrinks to the lengths: of two heads that share it,
    and of one whose queries have one tile, too."""
    for table, heads_kv in (("mma_one_key_tile", 1), ("mma_only_tile", 2)):
        of_all = rows(backward_tiles.TABLES, table)
        plain = {row.head_dim for row in of_all if row.plain}
        for row, n in itertools.product(of_all, (64, 32, 16)):
            read = dict(bias=empty(n, n, dtype="float32"), mask=empty(n, n, dtype="bool"), bias_aligned=True)
            served = {"-rich": OPTIONS, "-reading": OPTIONS | read, "-both": FUNCTIONS_OF["both"]}
            served = ({} if row.head_dim in plain and not row.plain else {"": {}}) | ({} if row.plain else served)
            for words, given in served.items():
                dtype = "bfloat16" if words else "float16"
                arrays = dict.fromkeys(("do", "q", "o"), empty(1, 2, n, row.head_dim, dtype=dtype))
                arrays |= dict.fromkeys("kv", empty(1, heads_kv, n, row.head_dim, dtype=dtype))
                arrays |= dict(dtype=dtype, lse=empty(1, 2, n, dtype="float32"))
                (config,) = of_gradients({table: row}, **arrays, **given)
                yield f"{table}-{row.head_dim}-{config.tile_m}x{config.tile_n}{words}", config


def by_element_gates():
    """Of wgmma's backward each row for what decides about each score, with what takes the most registers of all that it
    serves; and what becomes of it where there are few blocks."""
    reads, hides, both = FUNCTIONS_OF.values()
    boxed = LENGTHS | dict(bias=empty(300, 500, dtype="bfloat16", strides=(504, 1)), bias_aligned=True)
    mask, dropped = dict(mask=READ["mask"]), dict(dropout_p=0.1)
    of_level = {
        "mask_mod": dict(mask_mod=hides | LENGTHS),
        "mask or dropped weights": dict(boxed=boxed, mask=mask | LENGTHS, dropout=dropped | LENGTHS),
        "one kind": dict(reads=reads, functions=both | OPTIONS, dropout=dropped | OPTIONS, read=READ | LENGTHS,
                         boxed=boxed),
        "several kinds": dict(everything=both | READ | dropped | OPTIONS, read_rich=READ | OPTIONS),
    }  # fmt: skip
    for table, wanted in dict(wgmma_dkdv=OF_KEYS, wgmma_dq=OF_QUERIES).items():
        before = ""  # the levels of a head_dim come one behind the other, and a row serves those since the last one
        for row in (row for row in rows(backward_tiles.TABLES, table) if row.per_score):
            levels = tiles.PER_SCORE[: tiles.PER_SCORE.index(row.per_score) + 1]
            first = levels.index(before) + 1 if before in levels else 0
            before = "" if row.per_score == tiles.PER_SCORE[-1] else row.per_score
            served = {name: options for level in levels[first:] for name, options in of_level[level].items()}
            for words, given in served.items():
                name = f"{table}-{row.head_dim}-{row.tile_m}x{row.tile_n}-by-element-{words}"
                for of_one_kernel in [(name,) for name in wanted] if row.apart else [wanted]:
                    given = given | dict(dtype="bfloat16", wanted=of_one_kernel)
                    try:
                        (config,) = of_gradients({table: row}, **given)
                    except NotImplementedError:  # a bias does not fit beside tiles of this row: the next row takes it
                        assert words == "boxed"
                        continue
                    yield name + part(config), config
                    if words == [*served][-1]:
                        (config,) = of_gradients({table: row}, FEW_BLOCKS, **given)
                        yield f"{name}{part(config)}-halved", config


def aux_gates():
    """Of wgmma's kernel of dQ where it adds up the gradient of a number of a head, with a function that reads another
    array too."""
    for head_dim in (64, 128, 256):
        given = dict(dtype="bfloat16", score_mod=Function.of("score_mod", weighted), aux=AUX_OF_A_HEAD)
        found = configs_of("wgmma", gradients(head_dim, wanted=("dq", "daux[1]"), **given), MANY_BLOCKS)
        (config,) = (config for config in found if config.kernel == "wgmma_dq")
        yield f"wgmma_dq-{head_dim}-{config.tile_m}x{config.tile_n}-aux", config


def mask_mod_gates():
    """Of wgmma where it reads what a mask_mod leaves as bits, each head_dim at which its tables change: the forward and
    the kernels of gradients; with lengths, and all that changes scores."""
    hides = FUNCTIONS_OF["hides"] | LENGTHS
    for head_dim in (64, 128, 192, 256):
        for words, given in {"": hides, "-rich": hides | OPTIONS}.items():
            made = problem(head_dim, dtype="bfloat16", seqlen=300, seqlen_k=500, **given).if_kept(True)
            yield f"wgmma-{head_dim}-bits{words}", select.config_of("wgmma", made, HOPPER)
            made = gradients(head_dim, dtype="bfloat16", **given).if_kept(True)
            for config in configs_of("wgmma", made, MANY_BLOCKS):
                if config.kernel in ("wgmma_dkdv", "wgmma_dq"):
                    yield f"{config.kernel}-{head_dim}-bits{words}{part(config)}", config


def small_copies_gates():
    """Of mma where rows begin at multiples of 8, 4 and 2 bytes: plain, and with gradients."""
    for dtype, head_dim in (("float16", 50), ("float16", 25), ("float32", 50), ("float32", 25), ("float64", 25)):
        yield f"mma-{dtype}-{head_dim}-copies", select.select(problem(head_dim, dtype=dtype), HOPPER, "mma").config
        for config in kernels_of("mma", gradients(head_dim, dtype=dtype), HOPPER):
            if hasattr(config, "copy_bytes"):
                yield f"{config.kernel}-{dtype}-{head_dim}-copies", config


def simt_gates():
    """{name: Config}; those that differ in what a bias is broadcast over have numbers."""
    found = {}
    for config in SIMT:
        head_dims = (config.head_dim, config.head_dim_v) if hasattr(config, "head_dim") else (config.threads,)
        options = [name for name, _ in getattr(config, "uses", ())]
        name = "-".join(map(str, (config.kernel, config.dtype, *head_dims, *options)))
        found[name if name not in found else f"{name}-{len(found)}"] = config
    return found


def gates():
    # Rows that differ in blocks_per_sm alone have one name and are compiled once: for the smaller number.
    configs = dict(backward_gates()) | dict(reading_gates()) | dict(dropping_gates()) | dict(wide_gates())
    configs |= dict(fp32_fp64_backward_gates()) | dict(backward_functions_gates()) | dict(score_gradients_gates())
    configs |= dict(by_element_gates()) | dict(wgmma_float32_gates()) | dict(wgmma_backward_float32_gates())
    configs |= (
        dict(short_gates())
        | dict(short_wide_gates())
        | dict(one_key_tile_gates())
        | dict(small_copies_gates())
        | dict(aux_gates())
        | dict(mask_mod_gates())
        | dict(packed_gates())
        | dict(decode_gates())
        | simt_gates()
    )
    for kernel in (name for name, rung in RUNGS.items() if rung.tensor_cores):
        table = rows(tiles.TABLES, kernel)
        configs |= {name_of(kernel, row): of_row(kernel, row) for row in table}
        configs[f"{kernel}-rich-64"] = rich(kernel, 64, 64, 4096)
        configs[f"{kernel}-rich-80-59-group"] = rich(kernel, 80, 59, 5)
        for row in table:  # what sinks alone add
            name = name_of(kernel, row)
            read = dict(mask="bool") if row.masked else {}
            if not row.sloped:
                configs[f"{name}-sinks"] = dataclasses.replace(configs[name], uses=uses(sinks="float32", **read))
    v = empty(1, 2, 4096, 250, strides=(2**24, 2**22, 256, 1))
    configs["wgmma-256-250"] = next(candidates("wgmma", problem(256, v=v), HOPPER))  # not by 16 bytes
    for row in rows(tiles.TABLES, "wgmma"):  # what becomes of it: tiles of fewer queries
        name, whole = name_of("wgmma", row), of_row("wgmma", row)
        for tile_m in (tile_m for tile_m in tiles.TILE_COST if tile_m < row.tile_m):
            configs[f"{name}-{tile_m}"] = dataclasses.replace(whole, tile_m=tile_m)
        configs[f"{name}-parts"] = dataclasses.replace(whole, parts=16)
        configs[f"wgmma_join-{name}"] = WgmmaJoinConfig.behind(configs[f"{name}-parts"])
        if row.sloped or row.head_dim > 64:  # ALiBi
            given = uses(alibi_slopes="float32", seqlens_k="int32", sinks="float32")
            configs[f"{name}-alibi"] = dataclasses.replace(whole, uses=given, scores_finished=True)
    reasons = FAILING | DEPENDS
    assert set(reasons) <= set(configs), f"rows are named that are gone: {set(reasons) - set(configs)}"
    for name, config in configs.items():
        marks = [pytest.mark.xfail(strict=name in FAILING, reason=reasons[name])] if name in reasons else []
        if gate_results.kept(name, key_of(config)) is None:
            marks.append(pytest.mark.slow)
        yield pytest.param(config, id=name, marks=marks)


def machine_code(config, ptx, arch):
    """Assembled as it will be when it runs: by nvJitLink, or a whole program as the driver does it, by ptxas."""
    if not config.whole_program:
        return assembler.assemble(ptx, arch)
    if assembler.tool("ptxas") is None:
        pytest.skip("needs ptxas: the driver assembles this kernel, and there is no driver")
    return assembler.assemble_whole(ptx, arch)


def complaints(config, made, target, arch):
    """What does not pass on one GPU."""
    budget = REGISTERS // (config.threads * max(config.blocks_per_sm, 1)) // 8 * 8  # handed out in eights
    found = {
        f"{made.spill_bytes} bytes spilled": made.spill_bytes,
        f"{made.stack_bytes} bytes of local memory": made.stack_bytes,
        f"{made.registers} registers, there are {budget}": made.registers > budget,
        f"{made.shared_bytes} bytes of static shared memory": made.shared_bytes > 16,
        f"{config.shared_bytes} bytes of shared memory": config.shared_bytes > target.shared_bytes,
        "; ".join(made.warnings): made.warnings,
    }
    return [f"{arch}: {words}" for words, wrong in found.items() if wrong]


def targets_of(config):
    """The GPUs that the row fits. As select asks: one block of the forward, all of a backward's blocks_per_sm."""
    blocks = max(config.blocks_per_sm, 1) if isinstance(config, MmaBackwardConfig) else 1
    return [target for target in intended(config)[2] if config.shared_bytes * blocks <= target.shared_bytes]


def measured(name, config, folder):
    """(a line of what was found, what is wrong)"""
    started = time.perf_counter()
    targets = targets_of(config)
    in_ptx, in_sass, machines = intended(config)
    assert targets, "this row fits no GPU"
    ptx = compiled.to_ptx(config, machines[0].cc)  # that of the first serves the others
    seconds = time.perf_counter() - started
    wrong = [f"PTX: no {word}" for word in in_ptx if word not in ptx]
    registers, spills, stack = [], [], []
    for target in targets:
        arch = compiled.architecture(target.cc)
        made = machine_code(config, ptx, arch)
        wrong += complaints(config, made, target, arch)
        registers.append(made.registers)
        spills.append(made.spill_bytes)
        stack.append(made.stack_bytes)
        if target is HOPPER and assembler.tool("nvdisasm") is not None:
            (folder / "made.cubin").write_bytes(made.cubin)
            command = [assembler.tool("nvdisasm"), "-c", str(folder / "made.cubin")]
            sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            wrong += [f"SASS: no {word}" for word in in_sass if word not in sass]
    line = (
        f"{name:34} {min(registers):4} to {max(registers):3} {max(spills):8} {max(stack):8} "
        f"{config.shared_bytes:8} {seconds:7.1f}"
    )
    return line, wrong


source_of = functools.cache(inspect.getsource)


def key_of(config):
    judges = [source_of(function) for function in (measured, complaints, machine_code)]
    own = {function.name for _, function in getattr(config, "uses", ()) if isinstance(function, Function)}
    judges += [source_of(function) for function in FUNCTIONS if function.__name__ in own]
    return gate_results.key(config, [targets_of(config), *intended(config)[:2], REGISTERS, judges])


def judged(name, config, folder):
    """(what was found for a gate, whether it was kept)"""
    key = key_of(config)
    result = gate_results.kept(name, key)
    if result is not None:
        return result, True
    line, wrong = measured(name, config, folder)
    return dict(key=key, line=line, wrong=wrong), False


GATES = list(gates()) if compiler.missing() is None else []


@pytest.mark.parametrize("config", GATES)
def test_gate(config, request, record_property, tmp_path):
    name = request.node.callspec.id
    result, was_kept = judged(name, config, tmp_path)
    record_property("gate", (name, result, was_kept))
    wrong = "; ".join(result["wrong"])
    assert not wrong, f"{wrong}{' (as kept in gate_results.json)' * was_kept}"


def test_what_is_kept_is_of_these_sources():
    """Whatever compilers are here. A gate without a result compiles in each run, which takes time and hides nothing; a
    result of other sources would look like one of these."""
    stale, without = gate_results.stale({gate.id: key_of(gate.values[0]) for gate in GATES})
    assert not stale, f"{stale}: {gate_results.TO_WRITE}"
    if without:
        pytest.skip(f"{without}: they compile in each run; {gate_results.TO_WRITE}")


@pytest.fixture
def a_file(tmp_path, monkeypatch):
    """A file of results of its own, with two gates: one that passed and one that did not."""
    monkeypatch.setattr(gate_results, "FILE", tmp_path / "results.json")
    monkeypatch.delenv("NUMBA_FLASH_FRESH_GATES", raising=False)
    good, bad = (gate.values[0] for gate in GATES[:2])
    results = dict(good=dict(key=key_of(good), line="", wrong=[]), bad=dict(key=key_of(bad), line="", wrong=["spills"]))
    gate_results.keep(results, whole=True)
    yield good, bad
    gate_results._read.cache_clear()


def test_what_is_kept_is_not_compiled_again(a_file, monkeypatch, tmp_path):
    good, bad = a_file
    monkeypatch.setattr(compiled, "to_ptx", None)
    assert judged("good", good, tmp_path)[0]["wrong"] == [] and judged("bad", bad, tmp_path)[0]["wrong"] == ["spills"]


# A Config, a source, what is asked for, a compiler, who judges; and where everything is to be compiled.
@pytest.mark.parametrize("what", ["config", "source", "asked", "compiler", "judge", "fresh", "no file"])
def test_a_change_makes_the_gate_compile(a_file, what, monkeypatch, tmp_path):
    good, _ = a_file
    if what == "config":
        good = dataclasses.replace(good, blocks_per_sm=good.blocks_per_sm + 1)
    elif what == "source":
        monkeypatch.setattr(gate_results, "sources_of", lambda kernel: "other sources")
    elif what == "asked":
        monkeypatch.setitem(IN_PTX, good.kernel, ("another instruction",))
    elif what == "compiler":
        monkeypatch.setattr(compiled, "compilers", lambda: ("numba-0.0.dist-info",))
    elif what == "judge":
        monkeypatch.setitem(globals(), "complaints", lambda config, made, target, arch: [])
    elif what == "fresh":
        monkeypatch.setenv("NUMBA_FLASH_FRESH_GATES", "1")
    else:
        monkeypatch.setattr(gate_results, "FILE", tmp_path / "none.json")
    monkeypatch.setattr(compiled, "to_ptx", compiles)
    with pytest.raises(ZeroDivisionError, match="it compiles"):
        judged("good", good, tmp_path)


def test_words_about_the_code_are_no_change_of_it(tmp_path):
    def code(text):
        path = tmp_path / f"{abs(hash(text))}.py"
        path.write_text(text)
        return gate_results.code_of(path)

    bare = 'def f(x):\n    y = "# no comment"\n    return y\n'
    docstring = '    """Does it,\n\n    twice.\n    """\n'
    told = '"""A page."""\n\n# why\ndef f(x):  # what\n' + docstring + '\n    y = "# no comment"\n    return y\n'
    assert code(bare) == code(told)
    changed = ('"# a comment"', "y", "return  y")
    for new, old in zip(changed, ('"# no comment"', "x", "return y"), strict=True):
        assert code(bare) != code(bare.replace(old, new))


def compiles(config, cc):
    raise ZeroDivisionError("it compiles")


def test_who_changes_a_gate_is_told_to_write_the_file(a_file, monkeypatch):
    good, bad = map(key_of, a_file)
    assert gate_results.stale(dict(good=good, bad=bad)) == ("", "")
    assert gate_results.stale(dict(good=good, bad=bad, more=good)) == ("", "no result: more")
    assert gate_results.stale(dict(good=bad, bad=bad)) == ("changed since: good", "")
    assert gate_results.stale(dict(good=good)) == ("no such gate: bad", "")
    monkeypatch.setattr(compiled, "compilers", lambda: ("numba-0.0.dist-info",))  # those are no reason to tell anybody
    assert gate_results.stale(dict(good=good, bad=bad)) == ("", "")


def test_a_part_of_the_gates_leaves_the_results_of_the_others(a_file):
    gate_results.keep(dict(more=dict(key="", line="", wrong=[])), whole=False)
    assert set(gate_results._read(gate_results.FILE)[1]) == {"good", "bad", "more"}
    gate_results.keep(dict(more=dict(key="", line="", wrong=[])), whole=True)
    assert set(gate_results._read(gate_results.FILE)[1]) == {"more"}


@pytest.mark.parametrize(
    ("changed", "some"),
    [
        ({}, False),
        (dict(keyword="wgmma"), True),
        (dict(deselect=["tests/unit/test_gates.py::test_gate[a]"]), True),
        (dict(lf=True), True),
        (dict(args=["tests/unit/test_gates.py::test_gate[a]"]), True),
    ],
    ids=["all", "-k", "--deselect", "--lf", "an id"],
)
def test_gates_that_were_chosen_do_not_stand_for_all(changed, some):
    option = dict(keyword="", deselect=None, lf=False, failedfirst=False) | changed
    args = option.pop("args", ["tests/unit/test_gates.py::test_gate"])
    config = types.SimpleNamespace(option=types.SimpleNamespace(**option), args=args)
    assert gate_results.chosen(config) == some


def test_a_gates_key_knows_every_source_of_the_kernel():
    """Everything that the kernel imports, below kernels and beside it, and nothing of other kernels."""
    reached = gate_results.reached_from("kernels.mma.forward")
    expected = {"kernels.score.softcap", "kernels.steps.async_tiles", "ptx.mma", "ptx.asm", "problem.ranges"}
    assert expected <= reached
    assert not reached & {"kernels.wgmma.forward", "problem.forward", "select.tiles", "ptx.sim", "ptx.sim.mma"}


@pytest.mark.skipif(not GATES, reason="needs a compiler")
def test_bits_of_kept_weights_are_tested_where_they_are():
    """A shift for each bit made a backward with dropout 8 % slower: ptxas turns eight unshifted bits into predicates at
    a time."""
    (config,) = (gate.values[0] for gate in GATES if gate.id == "wgmma_dkdv-64-112x128-by-element-dropout")
    ptx = compiled.to_ptx(config, intended(config)[2][0].cc)
    assert ptx.count("and.b64") > 100
    assert not re.findall(r"shr\.u64[^\n]*\n\s*and\.b64[^\n]*, 1;", ptx)


def test_what_the_gates_look_for_is_found():
    """A kernel that has none of it does not pass."""
    config = dataclasses.replace(of_row("mma", rows(tiles.TABLES, "mma")[0]), blocks_per_sm=4)
    made = assembler.Assembled(
        b"", "ptxas info: Used 255 registers\n16 bytes stack frame, 8 bytes spill stores\n(C7510) serialized"
    )
    small = dataclasses.replace(HOPPER, shared_bytes=1000)
    assert len(complaints(config, made, small, "sm_90a")) == 5
