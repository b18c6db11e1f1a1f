"""Context parallelism over torch process groups: gloo with two, three and four processes beside one process.

The processes start once for the file (helpers/gloo_ranks.py), and once more for those that end or hang.
"""

import multiprocessing
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("needs torch with gloo", allow_module_level=True)

from helpers import gloo_ranks  # noqa: E402


class Ranks:
    """Processes of one gloo group, which run cases together."""

    def __init__(self, size):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
        context.set_forkserver_preload([gloo_ranks.__name__])  # all ranks share what it imports
        self.pipes, theirs = zip(*(context.Pipe() for _ in range(size)), strict=True)
        arguments = [(rank, size, port, pipe) for rank, pipe in enumerate(theirs)]
        self.processes = [context.Process(target=gloo_ranks.serve, args=each, daemon=True) for each in arguments]
        for process in self.processes:
            process.start()
        for pipe in theirs:
            pipe.close()
        self.broken = False

    def start(self, rank, size, name, *arguments):
        self.pipes[rank].send((name, size, arguments))

    def answer(self, rank):
        assert self.pipes[rank].poll(300), f"rank {rank} does not answer"
        return self.pipes[rank].recv()

    def run(self, size, name, *arguments):
        asked = range(size or 3)
        for rank in asked:
            self.start(rank, size, name, *arguments)
        answers = [self.answer(rank) for rank in asked]
        for answer in answers:
            if isinstance(answer, tuple) and isinstance(answer[0], Exception):
                raise answer[0] from RuntimeError(answer[1])
        return answers

    def end(self):
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive() and not self.broken:
                pipe.send(None)
        for process in self.processes:
            process.join(0 if self.broken else 20)
            if process.is_alive():
                process.kill()


@pytest.fixture(scope="module")
def started():
    made = []
    yield made
    for each in made:
        each.end()


@pytest.fixture
def ranks(started):
    """The same ones for all tests, until a test breaks a group."""
    if not started or started[-1].broken:
        started.append(Ranks(4))
    return started[-1]


ROWS = ["o", "lse", "dq"]
ALL = [*ROWS, "dk", "dv"]


# Each process compiles what it is asked for, so that few ranks have the other options.
@pytest.mark.parametrize(
    ("name", "size"),
    [("causal", 2), ("causal", 3), ("causal", 4), ("window", 2), ("sinks", 3), ("alibi", 2), ("functions", 2)],
)
def test_gathered_rows_have_the_bits_of_one_process(ranks, name, size):
    for same in ranks.run(size, "compared", name, "gather", "zigzag", 331):
        assert same[:3] == ROWS


@pytest.mark.parametrize("name", ["causal", "sinks"])
def test_heads_have_all_bits_of_one_process(ranks, name):
    """But the gradient of sinks, of which each rank has its heads' share in the order of its own rows."""
    for same in ranks.run(2, "compared", name, "heads", "contiguous", 331):
        assert same[:5] == ALL


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ring_is_close(ranks, size):
    ranks.run(size, "compared", "sinks", "ring", "zigzag", 331)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_other_dtypes(ranks, dtype):
    for same in ranks.run(2, "compared", "causal", "auto", "zigzag", 300, dtype):
        assert same[:3] == ROWS


# Streams beside each other or in one queue, and flags that go round with 32 bits.
WAYS = {"two queues": (2, 0), "one queue": (1, 0), "numbers go round": (2, 2**32 - 5)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_peers_move_views_of_any_kind(ranks, size, way):
    """Through slots that are used again and again, since a message is larger than all of them."""
    for sent in ranks.run(size, "moved_by_peers", 512, *WAYS[way]):
        assert max(sent) > 20


@pytest.mark.parametrize(
    ("name", "method", "size", "layout", "seqlen"),
    [
        ("causal", "gather", 2, "zigzag", 331),
        ("causal", "gather", 4, "contiguous", 331),
        ("window", "gather", 2, "zigzag", 331),
        ("functions", "gather", 2, "zigzag", 331),
        ("sinks", "heads", 2, "zigzag", 331),
        ("causal", "heads", 2, "contiguous", 331),
        ("sinks", "ring", 3, "zigzag", 331),
        ("causal", "gather", 4, "contiguous", 3),
    ],
)
def test_peers_change_no_bits(ranks, name, method, size, layout, seqlen):
    given = name, method, layout, seqlen
    assert ranks.run(size, "over_peers", 4096, 2, 0, "compared", *given) == ranks.run(size, "compared", *given)


def test_a_group_says_what_moves_its_tokens(ranks):
    assert (
        ranks.run(2, "transport")
        == [("gloo", ["tokens are moved by gloo: the backend of the group is gloo, not nccl"])] * 2
    )


@pytest.mark.parametrize("size", [2, 3, 4])
def test_generation_has_the_bits_of_one_process(ranks, size):
    assert ranks.run(size, "from_caches") == [[True, True]] * size


def test_equal_calls_give_equal_bits(ranks):
    assert ranks.run(4, "several_times", 3) == [True] * 4


def test_collectives_of_a_group(ranks):
    """1e8 - 1e8 + 1 + 1 is 2 from left to right; 1 is lost where it is added to 1e8 first."""
    for gathered, summed in ranks.run(4, "collectives"):
        assert gathered == [[[float(rank)] * 2] * rank for rank in range(4)]
        assert summed == 2.0


def test_a_device_mesh(ranks):
    """Beside it a dimension for data parallelism."""
    assert set(ranks.run(4, "on_a_mesh")) == {"a DeviceMesh must have one dimension, as mesh['cp'] has, not 2"}


def test_tokens_that_ranks_do_not_divide(ranks):
    assert ranks.run(3, "numbers") == [list(range(7))] * 3


def test_what_ranks_cannot_serve_is_refused_before_anything_is_sent(ranks):
    with pytest.raises(NotImplementedError, match="bias is not taken across ranks: use score_mod with aux"):
        ranks.run(2, "refused", dict(bias=torch.zeros(1)))
    assert ranks.run(2, "several_times", 1) == [True, True], "the ranks are still in step"


@pytest.mark.parametrize("change", ["tokens", "window"])
def test_ranks_that_disagree_all_say_so(ranks, change):
    for rank, said in enumerate(ranks.run(3, "disagree", change)):
        assert f"ranks {[0, 1] if rank == 2 else [2]} have others than rank {rank}" in said
    assert ranks.run(3, "several_times", 1) == [True] * 3, "the ranks are still in step"


def test_a_rank_that_hangs_is_an_error_of_the_others(ranks):
    """Within the group's own timeout."""
    ranks.run(0, "called")
    began = time.monotonic()
    for rank in (0, 2):
        ranks.start(rank, 0, "called")
    check_said(ranks, (0, 2))
    assert time.monotonic() - began < 10 * gloo_ranks.IMPATIENCE.total_seconds()


def test_a_rank_that_has_ended_is_an_error_of_the_others(ranks):
    ranks.broken = True
    ranks.run(3, "called")
    ranks.processes[1].kill()
    for rank in (0, 2):
        ranks.start(rank, 3, "called")
    check_said(ranks, (0, 2))


def check_said(ranks, whose):
    for rank in whose:
        error, trace = ranks.answer(rank)
        assert isinstance(error, RuntimeError), trace
        assert f"rank {rank} of 3 could not exchange tokens with" in str(error)


def test_the_example_trains_as_one_process_does():
    example = Path(__file__).resolve().parents[2] / "examples" / "distributed" / "train.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(example)]
    environment = os.environ | dict(PYTHONPATH=str(example.parents[2]), OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    more = ["--steps", "8", "--length", "150", "--compare"]
    run = subprocess.run([*command, *more], env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    first, last, difference = map(float, re.findall(r"\d[\d.]+e?[-\d]*(?= at|$)", run.stdout, re.MULTILINE))
    assert last < first - 0.3 and difference < 1e-4, run.stdout
