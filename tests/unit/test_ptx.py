"""Every function of ptx: it becomes the instruction that it is named after, and it has a stand-in in ptx/sim."""

import ast
import functools
import re
from pathlib import Path

import pytest
from helpers import compiler

import numba_flash
from numba_flash.gpu import compiled
from numba_flash.machine import toolchain

PACKAGE = Path(numba_flash.__file__).parent
NO_TWIN = ("__init__", "asm", "fragments")
FAMILIES = sorted(path.stem for path in (PACKAGE / "ptx").glob("*.py") if path.stem not in NO_TWIN)


def functions(package, family):
    """{public name: its parameter names, and those of the function that it makes}, read and not imported."""
    body = ast.parse((PACKAGE / package / f"{family}.py").read_text()).body
    defined = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    found = {name: (parameters(node), made(node)) for name, node in defined.items() if not name.startswith("_")}
    for node in body:  # x1, x2 = _make(...), _make(...)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Tuple, ast.Name)):
            names = getattr(node.targets[0], "elts", [node.targets[0]])
            for name, value in zip(names, getattr(node.value, "elts", [node.value] * len(names)), strict=False):
                maker = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and defined.get(value.func.id)
                if maker and not name.id.startswith("_"):
                    found[name.id] = (made(maker), None)
    return found


def parameters(function):
    """Without the typing context, the first of an intrinsic's."""
    names = [argument.arg for argument in function.args.args]
    intrinsic = any(isinstance(d, ast.Name) and d.id == "intrinsic" for d in function.decorator_list)
    return names[1:] if intrinsic else names


def made(function):
    """The parameters of the function that this one defines and returns, or None."""
    inner = {node.name: node for node in function.body if isinstance(node, ast.FunctionDef)}
    last = function.body[-1]
    if isinstance(last, ast.Return) and isinstance(last.value, ast.Name) and last.value.id in inner:
        return parameters(inner[last.value.id])
    return None


@pytest.mark.parametrize("family", FAMILIES)
def test_every_function_has_a_stand_in_with_the_same_parameters(family):
    ours, stand_ins = functions("ptx", family), functions("ptx/sim", family)
    assert ours
    for name, signature in ours.items():
        assert stand_ins.get(name) == signature, f"ptx.sim.{family}.{name}"


# What each is in PTX, and a statement that uses it. at: a shared address, g: a global one, f and u: local arrays
# of float32 and uint32, x: a float32, i: an int32. A function that another makes is called as made[...]().
USES = {
    "approx.ceil": ("cvt.rpi.f32.f32", "f[0] = approx.ceil(x)"),
    "approx.ceil_f64": ("cvt.rpi.f64.f64", "f[0] = float32(approx.ceil_f64(float64(x)))"),
    "approx.ex2": ("ex2.approx.ftz.f32", "f[0] = approx.ex2(x)"),
    "approx.lg2": ("lg2.approx.ftz.f32", "f[0] = approx.lg2(x)"),
    "approx.rcp": ("rcp.approx.ftz.f32", "f[0] = approx.rcp(x)"),
    "bar.sync": ("bar.sync", "bar.sync(1, 64)"),
    "bar.arrive": ("bar.arrive", "bar.arrive(1, 64)"),
    "bar.warp_sync": ("bar.warp.sync", "bar.warp_sync()"),
    "bits.count": ("popc.b32", "u[0] = uint32(bits.count(uint32(i)))"),
    "bits.multiply_wide": ("mul.wide.u32", "u[0] = uint32(bits.multiply_wide(u[1], u[2]) >> 32)"),
    "bits.push_carry": ("addc.u32", "u[0] = bits.push_carry(u[1], u[2], u[3])"),
    "bits.highest": ("bfind.u32", "u[0] = uint32(bits.highest(uint32(i)))"),
    "cluster.rank": ("%cluster_ctarank", "u[0] = cluster.rank()"),
    "cluster.place_in": ("mapa.shared::cluster.u32", "u[0] = cluster.place_in(at, i)"),
    "cluster.store_b32": ("st.shared::cluster.b32", "cluster.store_b32(at, uint32(i))"),
    "cluster.store_v4": (
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32",
        "cluster.store_v4(at, u, 0, at)",
    ),
    "cluster.sync": ("barrier.cluster.wait.acquire", "cluster.sync()"),
    "cp_async.copy16": ("cp.async.cg.shared.global", "cp_async.copy16(at, g, i)"),
    "cp_async.small_copy": ("cp.async.ca.shared.global", "made(at, g, i)", (8,)),
    "cp_async.commit_group": ("cp.async.commit_group", "cp_async.commit_group()"),
    "cp_async.wait_group": ("cp.async.wait_group 2", "made()", (2,)),
    "cvt.pack_f16x2": ("cvt.rn.f16x2.f32", "u[0] = cvt.pack_f16x2(x, x)"),
    "cvt.pack_bf16x2": ("cvt.rn.bf16x2.f32", "u[0] = cvt.pack_bf16x2(x, x)"),
    "cvt.low_f16": ("cvt.f32.f16", "f[0] = cvt.low_f16(u[0])"),
    "cvt.high_f16": ("cvt.f32.f16", "f[0] = cvt.high_f16(u[0])"),
    "cvt.whole_f32": ("cvt.rni.s64.f32", "u[0] = uint32(cvt.whole_f32(x))"),
    "cvt.whole_f64": ("cvt.rni.s64.f64", "u[0] = uint32(cvt.whole_f64(float64(x)))"),
    "elect.one_lane": ("elect.sync", "u[0] = elect.one_lane()"),
    "fence.proxy_async": ("fence.proxy.async.shared::cta", "fence.proxy_async()"),
    "fence.proxy_async_global": ("fence.proxy.async.global", "fence.proxy_async_global()"),
    "fence.mbarrier_init": ("fence.mbarrier_init.release.cluster", "fence.mbarrier_init()"),
    "griddepcontrol.wait": ("griddepcontrol.wait", "griddepcontrol.wait()"),
    "griddepcontrol.launch_dependents": ("griddepcontrol.launch_dependents", "griddepcontrol.launch_dependents()"),
    "ld_st.load_b32": ("ld.shared.b32", "u[0] = ld_st.load_b32(at)"),
    "ld_st.store_b32": ("st.shared.b32", "ld_st.store_b32(at, uint32(i))"),
    "ld_st.load_v4": ("ld.shared.v4.b32", "ld_st.load_v4(u, 0, at)"),
    "ld_st.store_v2_f64": ("st.shared.v2.f64", "ld_st.store_v2_f64(at, d, 0)"),
    "ld_st.load_f64": ("ld.shared.f64", "d[0] = ld_st.load_f64(at)"),
    "ld_st.load_v2_f64": ("ld.shared.v2.f64", "ld_st.load_v2_f64(d, 0, at)"),
    "ld_st.store_v2": ("st.shared.v2.b32", "ld_st.store_v2(at, u, 0)"),
    "ld_st.store_v4": ("st.shared.v4.b32", "ld_st.store_v4(at, u, 0)"),
    "mbarrier.init": ("mbarrier.init.shared::cta.b64", "mbarrier.init(at, 1)"),
    "mbarrier.arrive": ("mbarrier.arrive.shared::cta.b64", "mbarrier.arrive(at)"),
    "mbarrier.arrive_if": ("@p mbarrier.arrive.shared::cta.b64", "mbarrier.arrive_if(at, i)"),
    "mbarrier.arrive_there_if": ("@p mbarrier.arrive.shared::cluster.b64", "mbarrier.arrive_there_if(at, i)"),
    "mbarrier.arrive_expect_tx": ("mbarrier.arrive.expect_tx", "mbarrier.arrive_expect_tx(at, i)"),
    "mbarrier.arrive_expect_tx_if": ("@p mbarrier.arrive.expect_tx", "mbarrier.arrive_expect_tx_if(at, i, i)"),
    "mbarrier.wait": ("mbarrier.try_wait.parity", "mbarrier.wait(at, i)"),
    "memory.address": ("st.global.b32", "memory.store_b32(memory.address(out, i), uint32(1))"),
    "memory.load_v4": ("ld.global.v4.b32", "memory.load_v4(u, 0, g)"),
    "memory.load_b16_if": ("ld.global.b16", "u[0] = memory.load_b16_if(g, uint32(i))"),
    "memory.load_b32_if": ("ld.global.b32", "u[0] = memory.load_b32_if(g, uint32(i))"),
    "memory.load_v2_if": ("ld.global.v2.b32", "memory.load_v2_if(u, 0, g, uint32(i))"),
    "memory.load_v4_if": ("ld.global.v4.b32", "memory.load_v4_if(u, 0, g, uint32(i))"),
    "memory.load_f64_if": ("ld.global.f64", "d[0] = memory.load_f64_if(g, uint32(i))"),
    "memory.store_b16": ("st.global.b16", "memory.store_b16(g, uint32(i))"),
    "memory.store_b32": ("st.global.b32", "memory.store_b32(g, uint32(i))"),
    "memory.store_v2": ("st.global.v2.b32", "memory.store_v2(g, u, 0)"),
    "memory.store_v4": ("st.global.v4.b32", "memory.store_v4(g, u, 0)"),
    "memory.store_v2_f64": ("st.global.v2.f64", "memory.store_v2_f64(g, d, 0)"),
    "memory.add": ("atom.global.add.u32", "u[0] = memory.add(g, uint32(1))"),
    "memory.add_acq_rel": ("atom.acq_rel.gpu.global.add.u32", "u[0] = memory.add_acq_rel(g, uint32(1))"),
    "memory.load_acquire": ("ld.acquire.gpu.global.b32", "u[0] = memory.load_acquire(g)"),
    "memory.add_release": ("red.release.gpu.global.add.u32", "memory.add_release(g, uint32(1))"),
    "memory.add_i64": ("red.global.add.u64", "memory.add_i64(g, int64(i))"),
    "memory.maximum": ("red.global.max.u32", "memory.maximum(g, uint32(i))"),
    "memory.exchange": ("atom.global.exch.b32", "u[0] = memory.exchange(g, uint32(1))"),
    "minmax.maximum": ("max.f32", "f[0] = minmax.maximum(x, x)"),
    "minmax.maximum_f64": ("max.f64", "d[0] = minmax.maximum_f64(d[0], d[1])"),
    "minmax.minimum_nan": ("min.NaN.f32", "f[0] = minmax.minimum_nan(x, x)"),
    "mma.m16n8k8_tf32": ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", "mma.m16n8k8_tf32(f, 0, u, 0, u, 2)"),
    "mma.m16n8k16_f64": ("mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64", "mma.m16n8k16_f64(d, 0, d, 4, d, 12)"),
    "mma.m8n8k4_f64": ("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64", "mma.m8n8k4_f64(d, 0, d, 2, d, 3)"),
    "setmaxnreg.increase": ("setmaxnreg.inc.sync.aligned.u32 240", "made()", (240,)),
    "setmaxnreg.decrease": ("setmaxnreg.dec.sync.aligned.u32 24", "made()", (24,)),
    "shared.pointer": ("ld.shared", "u[0] = shared.pointer(smem, i)[0]"),
    "shared.address": ("cvta.to.shared|mov.u32|mov.b32", "u[0] = shared.address(smem)"),
    "shfl.bfly_f32": ("shfl.sync.bfly.b32", "f[0] = shfl.bfly_f32(x, 1)"),
    "shfl.bfly_f64": ("shfl.sync.bfly.b32", "d[0] = shfl.bfly_f64(d[1], 1)"),
    "shfl.bfly_b32": ("shfl.sync.bfly.b32", "u[0] = shfl.bfly_b32(uint32(i), 1)"),
    "shfl.sum_s32": ("redux.sync.add.s32", "u[0] = uint32(shfl.sum_s32(i))"),
    "shfl.sum_f32": ("shfl.sync.bfly.b32", "f[0] = shfl.sum_f32(x)"),
    "shfl.sum_f64": ("shfl.sync.bfly.b32", "d[0] = shfl.sum_f64(d[1])"),
    "shfl.idx_b32": ("shfl.sync.idx.b32", "u[0] = shfl.idx_b32(uint32(i), 0)"),
    "shfl.idx_f32": ("shfl.sync.idx.b32", "f[0] = shfl.idx_f32(x, 0)"),
    "shfl.idx_f64": ("shfl.sync.idx.b32", "d[0] = shfl.idx_f64(d[1], 0)"),
    "special.thread_index": ("%tid.x", "u[0] = special.thread_index()"),
    "special.block_index": ("%ctaid.x", "u[0] = special.block_index()"),
    "special.opaque": ("mov.b32", "u[0] = special.opaque(i)"),
    "special.block_count": ("%nctaid.x", "u[0] = special.block_count()"),
    "tma.commit_group": ("cp.async.bulk.commit_group", "tma.commit_group()"),
    "tma.wait_group_read": ("cp.async.bulk.wait_group.read 1", "made()", (1,)),
    "tma.load_bytes": (
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes",
        "tma.load_bytes(at, g, at, 16)",
    ),
    "tma.store_bytes": ("cp.async.bulk.global.shared::cta.bulk_group", "tma.store_bytes(g, at, 16)"),
    "tma.add_bytes": (
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32",
        "tma.add_bytes(g, at, 16)",
    ),
    "tma.add_bytes_f64": (
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f64",
        "tma.add_bytes_f64(g, at, 16)",
    ),
    "tma.wait_group": ("cp.async.bulk.wait_group 1", "made()", (1,)),
    "tma.prefetch": ("prefetch.tensormap", "tma.prefetch(g)"),
    "tma.parameter": ("cvta.param.u64", "u[0] = uint32(made())", ("ENTRY",)),
    "vote.ballot": ("vote.sync.ballot.b32", "u[0] = vote.ballot(uint32(i))"),
    "vote.any_lane": ("vote.sync.any.pred", "u[0] = vote.any_lane(uint32(i))"),
    "wgmma.commit_group": ("wgmma.commit_group.sync.aligned", "wgmma.commit_group()"),
    "wgmma.wait_group": ("wgmma.wait_group.sync.aligned 1", "made()", (1,)),
    "wgmma.pin": ("inline asm", "made(f)", (4,)),  # no instruction
    "wgmma.product_shared": (
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16",
        "made(f, uint64(1), uint64(2), 1)",
        (8, "bf16", (0, 2), (0, 2), 0),
    ),
    "wgmma.product_registers": (
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16",
        "made(f, u, uint64(2), 1)",
        (8, "f16", (0,), 1),
    ),
    "wgmma.new_product_shared": (
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16",
        "made(f, uint64(1), uint64(2))",
        (8, "bf16", (0, 2), (0, 2), 0),
    ),
    "wgmma.new_product_registers": (
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16",
        "made(f, u, uint64(2))",
        (8, "f16", (4, 0, 0), (0, 2, 4), 1),
    ),
    "local.array": ("st.local", "w = local.array(9, float32); w[0], w[i] = x, x; f[0] = w[i + 1]"),
    "wgmma.descriptor": ("and.b64|and.b32", "u[0] = uint32(made(at))", (16, 1024, 128)),
}
for count in (1, 2, 4):
    for suffix in ("", "_trans"):
        text = f"matrix.sync.aligned.m8n8.x{count}{suffix.replace('_', '.')}.shared.b16"
        USES[f"ldmatrix.x{count}{suffix}"] = ("ld" + text, f"ldmatrix.x{count}{suffix}(u, 0, at)")
        USES[f"stmatrix.x{count}{suffix}"] = ("st" + text, f"stmatrix.x{count}{suffix}(at, u, 0)")
for kind in ("f16", "bf16"):
    text = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    USES[f"mma.m16n8k16_{kind}"] = (text, f"mma.m16n8k16_{kind}(f, 0, u, 0, u, 2)")
for rank in (2, 3, 4, 5):
    text, corner = f"cp.async.bulk.tensor.{rank}d.", ", ".join(["i"] * rank)
    USES[f"tma.load_{rank}d"] = (text + "shared::cluster.global", f"tma.load_{rank}d(at, g, at, {corner})")
    USES[f"tma.store_{rank}d"] = (text + "global.shared::cta", f"tma.store_{rank}d(g, at, {corner})")

KERNEL = """
def kernel(out, x, i):
    smem = cuda.shared.array(0, uint32)
    f, u, d = local.array(4, float32), local.array(4, uint32), local.array(16, float64)
    for n in range(4):
        f[n], u[n] = x, uint32(i)
    for n in range(16):
        d[n] = x
    at, g = shared.address(smem), memory.address(out, 0)
    {}
    for n in range(4):
        out[n] = uint32(f[n]) + u[n] + uint32(d[n])
"""


@functools.cache
def ptx(statement, factory, arguments):
    """PTX for Hopper of a kernel with this statement in it."""
    cuda = toolchain.cuda()
    from numba import types

    from numba_flash import ptx as package

    names = {
        "cuda": cuda,
        **{name: getattr(types, name) for name in ("float32", "float64", "int32", "int64", "uint32", "uint64")},
    }
    names |= {name: getattr(package, name) for name in FAMILIES}
    if arguments:
        family, name = factory.split(".")
        names["made"] = getattr(names[family], name)(*arguments)
    exec(KERNEL.format(statement), names)
    signature = types.void(types.CPointer(types.uint32), types.float32, types.int32)
    with compiled._compiling_for((9, 0)):
        return cuda.compile(names["kernel"], signature, device=False, abi="numba", cc=(9, 0, "a"), output="ptx")[0]


def assemble(text):
    from cuda.core import Linker, LinkerOptions, ObjectCode

    Linker(ObjectCode.from_ptx(text.encode()), options=LinkerOptions(arch="sm_90a")).link("cubin")


@compiler.needed
@pytest.mark.parametrize("function", USES)
def test_it_becomes_its_instruction(function):
    mnemonic, statement, *arguments = USES[function]
    text = ptx(statement, function, *(arguments or [()]))
    assert re.search("|".join(re.escape(part) for part in mnemonic.split("|")), text), text
    if function != "tma.parameter":  # which names its kernel
        assemble(text)


def test_every_function_is_compiled_here():
    assert {f"{family}.{name}" for family in FAMILIES for name in functions("ptx", family)} == set(USES)
