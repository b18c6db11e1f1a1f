"""Records a block of `wgmma`: the steps and waits of its roles, in the order of a simulated run.

    NUMBA_ENABLE_CUDASIM=1 python

    >>> seen = numba_flash.debug.timeline(q, k, v, causal=True)
    >>> seen                      # a line for each step
    >>> seen.html("block.html")   # the same as a picture to move through

One thread of each role of block 0 is followed: a trace function notes when it enters and leaves the kernel's own
functions. The order is the simulator's, in which a thread runs until it has to wait. It says who waits for whom, and
not how long anything takes on a GPU.
"""

import html
import json
import linecache
import re
import sys
import types
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..api.forward import attention, prepare_call
from .places import Follow, Index3, check_simulated, make_of, watching

TEMPLATE = Path(__file__).with_name("timeline.html")
WARPGROUP = 128  # threads; the first has the scheduler and the producer


@dataclass(frozen=True)
class Span:
    """One step of a role. begin and end count the events so far."""

    role: str  # scheduler, producer, consumer 0, ...
    what: str  # load, wait, S, PV, softmax, write or release
    of: str  # K, V, Q, work tile, products, turn or O
    tile: int | None  # the number of the tile since the block began
    begin: int
    end: int


@dataclass(frozen=True)
class Timeline:
    """The record of `timeline`. repr() is a table, `html` a picture, which Jupyter shows."""

    about: str
    roles: tuple[str, ...]
    places: dict[str, int]  # capacity of the buffers of K, V and Q, in tiles
    spans: tuple[Span, ...]  # sorted by their beginnings

    def html(self, path: Any = None) -> str:
        """One page, with nothing to load from elsewhere, to move through the steps.

        Returns its text, and writes it to `path` where one is given.
        """
        # Within <script> only "<" could end the element.
        data = json.dumps(asdict(self), separators=(",", ":")).replace("<", "\\u003c")
        text = TEMPLATE.read_text(encoding="utf-8").replace("{{data}}", data)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def _repr_html_(self) -> str:
        text = html.escape(self.html(), quote=True)
        return f'<iframe srcdoc="{text}" style="width:100%;height:900px;border:0" title="timeline"></iframe>'

    def __repr__(self) -> str:
        lines = [f"{self.about}; from step to step, one thread of each role"]
        for span in self.spans:
            tile = "" if span.tile is None else f" {span.tile}"
            lines.append(f"{span.begin:>5} to {span.end:<5} {span.role:<11} {span.what} {span.of}{tile}".rstrip())
        return "\n".join(lines)


def timeline(q: Any, k: Any, v: Any, **options: Any) -> Timeline:
    """Run attention(q, k, v, kernel="wgmma", **options) in the simulator and return what the roles of block 0 did.

    >>> numba_flash.debug.timeline(q, k, v, causal=True)

    q, k, v: as for attention, in float16 or bfloat16. Take a small problem: 100 queries and 500 keys take some seconds.
    Raises what attention raises, TypeError for kernel=, NotImplementedError for float32, which has other roles, and
    RuntimeError where the simulator is off.
    """
    check_simulated("timeline")
    if "kernel" in options:
        raise TypeError("timeline takes no kernel=: it is about 'wgmma'")
    _, plan = prepare_call(q, k, v, dict(options, kernel="wgmma"))
    config: Any = plan.choice.config
    if config.kernel != "wgmma":
        raise NotImplementedError(f"timeline follows the roles of 'wgmma' in 16 bits, not those of {config.kernel!r}")
    roles = {0: "producer", 32: "scheduler"}
    roles |= {WARPGROUP * (1 + consumer): f"consumer {consumer}" for consumer in range(config.consumers)}
    seen: list[Span] = []
    now = [0]

    def attach(thread: Index3, block: Index3, frame: types.FrameType) -> Follow | None:
        if block[0] or thread[0] not in roles:
            return None
        follow = _follower(roles[thread[0]], seen, now)
        sys.settrace(follow)  # traces all functions that the kernel calls in this thread
        return follow

    with watching(make_of("wgmma", "timeline").co_filename, attach):
        attention(q, k, v, kernel="wgmma", **options)
    names = ("scheduler", *(role for role in roles.values() if role != "scheduler"))
    places = dict(K=config.stages, V=config.stages, Q=config.q_buffers)
    problem = plan.problem
    sizes = f"tiles of {config.tile_m} queries x {config.tile_n} keys"
    about = f"kernel 'wgmma': {problem.seqlen_q} queries, {problem.seqlen_k} keys, {sizes}"
    return Timeline(about, names, places, tuple(sorted(seen, key=lambda span: span.begin)))


# The recorded functions of the kernel, by file and name: (activity, object, how to read its number).
Names = dict[str, Any]
Number = Callable[[Names], Any]
WORK: dict[str, tuple[str, str, Number]] = {
    "producer.publish": ("load", "work tile", lambda own: own["i"]),
    "producer.load_q": ("load", "Q", lambda own: own["i"]),
    "forward.issue_scores": ("S", "products", lambda own: own["n"]),
    "forward.issue_outputs": ("PV", "products", lambda own: own["n"]),
    "forward.pingpong_wait": ("wait", "turn", lambda own: None),
}
RINGS = dict(k="K", v="V", q="Q", tiles="work tile", asked="question")
RING = re.compile(r"\brings\.(\w+)\.\w+\(")


def _noted(frame: types.FrameType) -> tuple[str, str, Any] | None:
    """(what, of, tile) of a call of the kernel's functions, or None."""
    code = frame.f_code
    folder, _, file = code.co_filename.replace("\\", "/").rpartition("/")
    if not folder.endswith(("kernels/wgmma", "kernels/score")):
        return None
    name, own = f"{file.removesuffix('.py')}.{code.co_name}", frame.f_locals
    if name == "fragment_softmax.softmax":
        return "softmax", "scores", _caller(frame, ("__call__",)).f_locals["tile"].n
    if name == "forward_outputs.write":
        return "write", "O", _caller(frame, ("__call__",)).f_locals["rows"].seen
    if name in WORK:
        what, of, number = WORK[name]
        return what, of, number(own)
    if name == "producer.load":
        return "load", "K" if own["map_at"] == 128 else "V", own["n"]
    if code.co_name in ("consumer_wait", "consumer_release", "producer_acquire"):
        caller = _caller(frame, ("__call__", "producer_expect"))
        if code.co_name == "consumer_release" and not own["condition"]:
            return None  # only one lane reports it, and Q only at the query tile's end
        ring = RING.search(linecache.getline(caller.f_code.co_filename, caller.f_lineno))
        of = RINGS.get(ring[1], ring[1]) if ring else "K" if caller.f_locals["map_at"] == 128 else "V"
        return "release" if code.co_name == "consumer_release" else "wait", of, own["n"]
    return None


def _caller(frame: types.FrameType, without: tuple[str, ...]) -> types.FrameType:
    """The function of the kernel that called this one. without: names of functions in between."""
    caller = frame.f_back
    while caller is not None and caller.f_code.co_name in without:
        caller = caller.f_back
    assert caller is not None
    return caller


def _follower(role: str, seen: list[Span], now: list[int]) -> Follow:
    def at_call(frame: types.FrameType, event: str, arg: Any) -> Any:
        noted = _noted(frame) if event == "call" else None
        if noted is None:
            return None
        frame.f_trace_lines = False
        begin = now[0]
        now[0] += 1

        def at_return(frame: types.FrameType, event: str, arg: Any) -> Any:
            if event == "return":
                what, of, tile = noted
                seen.append(Span(role, what, of, None if tile is None else int(tile), begin, now[0]))
                now[0] += 1
            return at_return

        return at_return

    return at_call
