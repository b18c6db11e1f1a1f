"""stop_at: a real pdb inside a simulated kernel, its answers read back."""

import ast
import bdb
import inspect
import io
import pdb
import re
import sys

import numpy as np
import pytest
from helpers.tile_rows import in_simulator, row as tile_row

import numba_flash
from numba_flash import mods
from numba_flash.debug import stop_at
from numba_flash.debug.kernels import modules
from numba_flash.gpu.compiled import source
from numba_flash.machine import toolchain
from numba_flash.problem import backward as problem_backward
from numba_flash.ptx.sim import now
from numba_flash.select import backward_kernels as select_backward, backward_tiles, forward_kernels as select_forward
from numba_flash.select.rungs import RUNGS

pytestmark = pytest.mark.skipif(not toolchain.simulated(), reason="set NUMBA_ENABLE_CUDASIM=1")

rng = np.random.default_rng(0)
# Two query tiles and two key tiles of 16 in the simulator.
q, k, v = (rng.standard_normal((1, 1, 24, 4), dtype=np.float32) for _ in range(3))
half = [rng.standard_normal((1, 1, 24, 8)).astype(np.float16) for _ in range(3)]
x = rng.standard_normal((2, 6), dtype=np.float32)
ALPHA = "alpha = math.exp"
WGMMA = "aligned(cuda.shared.array(0, uint8)"
FIRST_LINES = {
    "v1": "thread = cuda.threadIdx.x",
    "v2": "thread = cuda.threadIdx.x",
    "mma": "queries_left = int32(min(sequence",
    **dict.fromkeys(("v2_dkdv", "v2_dbias", "dalibi_slopes"), "thread = cuda.threadIdx.x"),
    **dict.fromkeys(("dsinks", "dsinks_of_blocks", "paged"), "thread = cuda.threadIdx.x"),
    "append": "block = int64(cuda.blockIdx.x)",
    "decode": "thread, block = special.thread_index()",
    **dict.fromkeys(("delta", "backward_preprocess"), "thread, block = special.thread_index()"),
    **dict.fromkeys(("mma_dkdv", "mma_one_key_tile", "mma_dq"), "smem = async_tiles.aligned("),
    "mma_fused": "k_smem = shared.address(",
    **dict.fromkeys(("wgmma", "wgmma_float32", "wgmma_dkdv", "wgmma_dq", "wgmma_fused"), WGMMA),
    **dict.fromkeys(("wgmma_dkdv_float32", "wgmma_dq_float32", "wgmma_dkdv_paired", "wgmma_dq_paired"), WGMMA),
    **dict.fromkeys(("wgmma_join", "wgmma_round", "wgmma_add_parts"), WGMMA),
    **dict.fromkeys(("v2_dq", "v2_daux"), "sequence, h, first_row = ds.query_tile("),
    "mma_dbias": "own, split = tiles_of.own_range(",
    "mma_daux": "thread, block = special.thread_index()",
    **dict.fromkeys(("daux_start", "daux_round", "dbias_sum"), "at = int64(cuda.blockIdx.x)"),
    "bias_rows": "piece = int64(cuda.blockIdx.x)",
    "outside": "block, blocks = int32(cuda.blockIdx.x)",
    "mma_dq_finish": "lane, warp = lane_and_warp()",
    **dict.fromkeys(("mask_bits", "mask_bits_of_keys"), "thread = special.thread_index()"),
    **dict.fromkeys(("mask_mod_bits", "mask_mod_bits_of_keys"), "thread = special.thread_index()"),
    **dict.fromkeys(("tile_states", "tile_states_of_keys"), "thread = special.thread_index()"),
    **dict.fromkeys(("tile_order", "tile_order_of_keys"), "thread = special.thread_index()"),
    "safe": "row = cuda.grid(1)",
    "online": "row = cuda.grid(1)",
    "blocked": "row = cuda.blockIdx.x",
}


class Session:
    """Makes debuggers that all read on in one list of commands."""

    def __init__(self, *commands):
        self.input = io.StringIO("\n".join(commands) + "\n")
        self.output = io.StringIO()

    def __call__(self):
        return pdb.Pdb(stdin=self.input, stdout=self.output, nosigint=True, readrc=False)

    @property
    def answers(self):
        """What was printed before the first prompt, then after each command."""
        return [answer.strip() for answer in self.output.getvalue().split("(Pdb) ")]

    def values(self):
        """The answers that are Python literals."""
        return [ast.literal_eval(answer) for answer in self.answers if answer.startswith(("(", "["))]


@pytest.fixture(autouse=True)
def nothing_stays():
    """Whatever a test does: hooks, breakpoints and the switch to the simulator are as before."""

    tracing = sys.gettrace()  # coverage's
    yield
    assert sys.gettrace() is tracing and now.follow is now.thread is None
    assert not bdb.Breakpoint.bplist
    np.testing.assert_allclose(numba_flash.softmax(x, kernel="online").sum(axis=-1), 1, rtol=1e-6)


def attend(**options):
    return numba_flash.attention(q, k, v, kernel="v2", **options)


def differentiate(
    kernel, seqlen=24, wide=False, head_dim=4, dtype=np.float32, wanted=("dq", "dk", "dv"), batch=1, **options
):
    """The kernels of a backward; those on tensor cores have fewer gradients."""
    given = [np.tile(x, head_dim // 4).astype(dtype) for x in (q, k, v)] if kernel == "v2" or wide else half
    arrays = {name: np.repeat(x[:, :, :seqlen], batch, axis=0) for name, x in zip("qkv", given, strict=True)}
    o, lse = numba_flash.attention(**arrays, kernel="cpu", return_lse=True)
    if kernel == "v2":
        arrays |= dict(bias=np.zeros((24, 24), np.float32), alibi_slopes=np.ones(1, np.float32))
        wanted += ("dbias", "dalibi_slopes")
    if "aux" in options:
        wanted = ("daux[0]",)
    if "sinks" in options:
        wanted += ("dsinks",)
    numba_flash.attention_backward(o, **arrays, **options, o=o, lse=lse, wanted=wanted, kernel=kernel)


def test_stops_once_per_key_tile_in_the_named_thread_and_block():
    where = "p cuda.threadIdx.x, cuda.blockIdx.x, int(q_index)"
    state = "p float(m), float(l)"
    session = Session(where, state, "c", where, state, "c")
    with stop_at("v2", ALPHA, thread=3, block=1, debugger=session):
        o = attend()
    assert ALPHA in session.answers[0]
    assert session.answers[1] == session.answers[4] == "(3, 1, 19)"
    assert session.answers[2] == "(-inf, 0.0)"
    m, l = ast.literal_eval(session.answers[5])
    scores = q[0, 0, 19] @ k[0, 0].T / 2  # (24,), of query 16 + 3
    assert m == pytest.approx(scores[:16].max(), rel=1e-5)
    assert l == pytest.approx(np.exp(scores[:16] - m).sum(), rel=1e-5)
    np.testing.assert_allclose(o, attend(), rtol=0, atol=0)


def test_the_row_of_scores_can_be_seen():
    session = Session("p s_smem[s_k : s_k + config.tile_n].tolist()", "c", "c")
    with stop_at("v2", ALPHA, (5,), (0, 0, 0), debugger=session):
        attend()
    (row,) = session.values()
    np.testing.assert_allclose(row, q[0, 0, 5] @ k[0, 0, :16].T / 2, rtol=1e-5)


def test_next_over_a_barrier_shows_what_other_threads_wrote():
    lines, first = inspect.getsourcelines(source(numba_flash.explain(q, k, v, kernel="v2").config).fn)
    barriers = [first + n for n, line in enumerate(lines) if line.strip().startswith("cuda.syncthreads()")]
    session = Session("n", "p k_smem[:64].tolist()", "c", "c")
    with stop_at("v2", barriers[1], thread=2, debugger=session):  # K and V are loaded before it
        attend()
    assert "syncthreads" in session.answers[0] and "syncthreads" not in session.answers[1]
    (tile,) = session.values()
    np.testing.assert_array_equal(np.reshape(tile, (16, 4)), k[0, 0, :16])  # one thread writes 4 of these 64


def test_quitting_gives_the_launch_up():
    message = r"kernel 'v2', which did not finish: tid=\[3, 0, 0\] ctaid=\[1, 0, 0\]"
    stop = stop_at("v2", ALPHA, thread=3, block=1, debugger=Session("q"))
    with pytest.raises(bdb.BdbQuit, match=message), stop:
        attend()
    np.testing.assert_allclose(attend(), numba_flash.attention(q, k, v, kernel="reference"), atol=1e-6)


def test_a_launch_given_up_does_not_disturb_the_next():
    for _ in range(10):  # at its first line, so that the other threads are still in device functions
        with pytest.raises(bdb.BdbQuit), stop_at("v2", FIRST_LINES["v2"], thread=8, debugger=Session("q")):
            attend()
        attend()


def test_a_cleared_breakpoint_does_not_stop_again():
    session = Session(f"cl {bdb.Breakpoint.next}", "c")
    with stop_at("v2", ALPHA, debugger=session):
        attend()
        attend()
    assert session.output.getvalue().count(ALPHA) == 1


def test_every_launch_is_stopped_in():
    session = Session(*["c"] * 4)
    with stop_at("v2", ALPHA, debugger=session):
        attend()
        attend()
    assert session.output.getvalue().count(ALPHA) == 4


def test_stepping_past_the_end_does_not_enter_the_simulator():
    session = Session("w", "n", "n", "n", "n", "n")
    with stop_at("v2", "if config.write_lse:", debugger=session):
        attend()
    assert "--Return--" in session.output.getvalue()
    assert "simulator" not in session.output.getvalue()


@pytest.mark.parametrize("kernel", modules())
def test_every_kernel(kernel, monkeypatch):
    session, all_seen = Session("n", "c", "c"), np.ones((24, 24), bool)  # one file may hold two kernels of a call
    monkeypatch.setattr(select_backward, "gains_by_one_kernel", lambda problem, _: problem.forward.seqlen_q in (19, 23))
    if kernel in ("mma_fused", "mma_dq_finish"):
        row = in_simulator(tile_row(256, tile_m=16, tile_n=32, warp_rows=16, column_groups=2))
        monkeypatch.setitem(backward_tiles.TABLES, "mma_fused", (row,))
        monkeypatch.setattr(select_backward, "gains_by_mma_fused", lambda problem: problem.forward.seqlen_q == 22)
    with stop_at(kernel, FIRST_LINES[kernel], debugger=session):
        if kernel in ("v1", "v2"):
            numba_flash.attention(q, k, v, kernel=kernel)
        elif kernel in RUNGS:
            numba_flash.attention(*half, kernel=kernel)
        elif kernel == "wgmma_float32":
            numba_flash.attention(q, k, v, kernel="wgmma")
        elif kernel == "mask_bits":
            numba_flash.attention(*half, mask=all_seen, kernel="mma")
        elif kernel == "mask_bits_of_keys":
            differentiate("mma", mask=all_seen)
        elif kernel.startswith("mask_mod_bits"):
            blocks = numba_flash.block_mask(mods.causal, 1, 1, 24, 24)
            if kernel == "mask_mod_bits":
                numba_flash.attention(*half, block_mask=blocks, kernel="wgmma")
            else:
                differentiate("wgmma", block_mask=blocks)
        elif kernel == "tile_states":
            numba_flash.attention(*half, mask_mod=mods.causal, kernel="mma")
        elif kernel == "tile_states_of_keys":
            differentiate("v2", mask_mod=mods.causal)
        elif kernel == "tile_order":
            numba_flash.attention(*half, mask_mod=mods.causal, kernel="mma")
        elif kernel == "tile_order_of_keys":
            differentiate("mma", mask_mod=mods.causal)
        elif kernel in ("append", "paged"):
            pages, where = [np.zeros((2, 1, 16, 4), np.float32) for _ in "kv"], np.array([[1, 0]], np.int32)
            new = dict(k_new=k[:, :, :1], v_new=v[:, :, :1])
            numba_flash.attention_kvcache(
                q[:, :, :1], *pages, seqlens_k=np.array([3], np.int32), page_table=where, **new
            )
        elif kernel == "decode":
            lengths = np.array([24], np.int32)
            numba_flash.attention_kvcache(*half, seqlens_k=lengths, causal=True, kernel="mma")
        elif kernel == "outside":
            packed, spans = [x[0].swapaxes(0, 1) for x in (q, k, v)], np.array([2, 20], np.int32)  # two rows before it
            numba_flash.attention_varlen(*packed, spans, kernel="v2")
        elif kernel == "mma_one_key_tile":
            differentiate("mma", seqlen=16)
        elif kernel == "dbias_sum":  # of two batch entries, each a block's share
            monkeypatch.setattr(problem_backward, "LEAST_TILES", 1)
            differentiate("v2", batch=2)
        elif kernel in ("mma_fused", "mma_dq_finish"):
            differentiate("mma", seqlen=22, wide=True, dtype=np.float64)  # plans are kept by problem
        elif kernel in ("mma_dkdv", "mma_dq"):
            differentiate("mma", wanted=("dq",) if "_dq" in kernel else ("dk",))
        elif kernel.startswith("wgmma_d"):
            wide, paired = kernel.endswith(("_float32", "_paired")), kernel.endswith("_paired")
            wanted = ("dq",) if "_dq" in kernel else ("dk",)
            differentiate("wgmma", wide=wide, head_dim=136 if paired else 4, wanted=wanted)
        elif "daux" in kernel:
            aux = (np.ones(1, np.float32),)
            differentiate("mma" if "mma" in kernel else "v2", score_mod=lambda s, b, h, i, j, x: s * x[0], aux=aux)
        elif kernel == "mma_dbias":
            differentiate("mma", bias=np.zeros((24, 24), np.float32), wanted=("dbias",))
        elif kernel == "bias_rows":
            differentiate("wgmma", seqlen=20, bias=np.zeros((20, 20), np.float16))
        elif kernel in ("dsinks", "dsinks_of_blocks"):
            differentiate("v2" if kernel == "dsinks" else "mma", sinks=np.zeros(1, np.float32))
        elif kernel == "wgmma_join":
            monkeypatch.setattr(select_forward, "_parts", lambda *_: 2)
            numba_flash.attention(*(x[:, :, :17] for x in half), kernel="wgmma")  # plans are kept by problem
        elif kernel == "wgmma_add_parts":
            monkeypatch.setattr(select_backward, "heads_per_block", lambda *_, **__: 1)
            differentiate("wgmma", seqlen=21)
        elif kernel in ("wgmma_fused", "wgmma_round"):  # plans are kept by problem, and nobody else has these
            of_all = int(kernel == "wgmma_fused")
            monkeypatch.setattr(select_backward, "key_tiles_of_a_block", lambda *_: of_all)
            differentiate("wgmma", seqlen=23 if kernel == "wgmma_fused" else 19)
        elif kernel == "delta" or "_" in kernel:
            differentiate(
                dict(delta="v2", dalibi_slopes="v2", backward_preprocess="mma").get(kernel, kernel.partition("_")[0])
            )
        else:
            numba_flash.softmax(x, kernel=kernel)
    assert FIRST_LINES[kernel] in session.answers[0] and session.answers[1]


OWN = """
@cuda.jit
def doubled(x, out):
    i = cuda.threadIdx.x
    out[i] = 2 * x[i]
"""


def test_stops_in_a_kernel_of_ones_own(capsys, tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    names = dict(cuda=toolchain.cuda())
    exec(compile(OWN, str(file), "exec"), names)
    x, out = np.arange(4.0), np.zeros(4)
    with stop_at(names["doubled"], "out[i] = 2 * x[i]", thread=2, commands=["p i, float(x[i])"]):
        names["doubled"][1, 4](x, out)
    assert "(2, 2.0)" in capsys.readouterr().out and out.tolist() == [0, 2, 4, 6]
    with pytest.raises(TypeError, match="the name of a kernel, or a kernel made by cuda.jit, not <function"):
        stop_at(lambda: None, "1").__enter__()


def test_commands_are_typed_where_nobody_types(capsys):
    with stop_at("v2", ALPHA, thread=6, block=1, commands=["p j", "c", "p j, float(m)"]):
        o = attend()
    shown = capsys.readouterr().out
    assert re.findall(r"^\(Pdb\) (.*)$", shown, re.MULTILINE) == ["p j", "c", "p j, float(m)", ""]
    m = (q[0, 0, 22] @ k[0, 0, :16].T / 2).max()
    j, seen = ast.literal_eval(re.search(r"^\(1, .*$", shown, re.MULTILINE).group())
    assert j == 1 and seen == pytest.approx(m, rel=1e-5)
    np.testing.assert_array_equal(o, attend())


def test_after_the_last_command_it_stops_no_more(capsys):
    with stop_at("v2", ALPHA, commands=[]):
        attend()
        attend()
    assert capsys.readouterr().out.count(ALPHA) == 1


def test_commands_may_quit(capsys):
    with pytest.raises(bdb.BdbQuit), stop_at("v2", ALPHA, commands=["q"]):
        attend()


@pytest.mark.parametrize("commands", ["c", [1]])
def test_commands_are_a_list(commands):
    with pytest.raises(ValueError, match="commands must be a list"), stop_at("v2", ALPHA, commands=commands):
        pass


def test_commands_beside_a_debugger():
    stop = stop_at("v2", ALPHA, commands=["c"], debugger=Session("c"))
    with pytest.raises(ValueError, match="commands= are typed to pdb"), stop:
        pass


def test_an_error_in_the_body_comes_out():
    with pytest.raises(KeyError), stop_at("v2", ALPHA):
        raise KeyError


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (dict(thread=99), r"no thread \(99, 0, 0\) of block \(0, 0, 0\) ran kernel 'v2'"),
        (dict(block=(0, 1)), r"no thread \(0, 0, 0\) of block \(0, 1, 0\) ran kernel 'v2'"),
        (dict(thread=15, block=1), r"no thread \(15, 0, 0\) of block \(1, 0, 0\) came to .*v2\.py:\d+"),  # no query 31
    ],
)
def test_warns_when_it_never_stopped(where, message):
    with pytest.warns(RuntimeWarning, match=message) as caught, stop_at("v2", ALPHA, **where):
        attend()
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("v9", 1), "knows the kernels append, backward_preprocess, bias_rows, blocked, .*wgmma_round, not 'v9'"),
        (("v2", "no such text"), "no line of the kernel in .*v2.py contains 'no such text'"),
        (("v2", "cuda.syncthreads()"), r"2 lines of .*v2.py contain .*:\n  \d+: cuda.syncthreads\(\).*\n  \d+: cuda"),
        (("v2", 1), r"line 1 of .*v2.py is not code of the kernel; the next one is \d+: thread = cuda"),
        (("v2", "tile_m, tile_n = config"), "no line of the kernel"),  # of make, not of the kernel
        (("v2", "def flash_attention_v2"), "no line of the kernel"),
        (("v2", 10**6), r"line 1000000 of .*v2.py is not code of the kernel$"),
        (("v2", ALPHA, -1), "thread must be an int or a tuple of up to three, from 0 on, not -1"),
        (("v2", ALPHA, 0, (1, 2, 3, 4)), "block must be"),
        (("v2", ALPHA, "0"), "thread must be"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message), stop_at(*arguments):
        pass


def test_without_the_simulator(monkeypatch):
    monkeypatch.setattr(toolchain, "simulated", lambda: False)
    with pytest.raises(RuntimeError, match="NUMBA_ENABLE_CUDASIM=1"), stop_at("v2", ALPHA):
        pass
