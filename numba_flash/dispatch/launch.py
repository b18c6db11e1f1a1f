"""Makes a launch from a Choice: grid, block, shared bytes, stream, pointers."""

import functools
import math
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import arrays
from ..abi.arguments import Values, names_of, positions, tuple_class, values_of
from ..abi.parameters import Workspace
from ..abi.tensor_maps import TensorMap
from ..arrays import Array
from ..arrays.dtypes import ITEM_SIZE
from ..config.forward import LaunchFacts, with_problems
from ..gpu import tile_counters
from ..gpu.compiled import compiled, entry_name, source
from ..gpu.launcher import Launcher, packed
from ..gpu.stream_numbers import number_of
from ..machine import toolchain
from ..machine.target import Target
from ..problem.forward import Problem
from ..problem.options import GradientOperands, Operands
from ..select.around import epilogue, prologue
from ..select.forward import Choice

if TYPE_CHECKING:
    from ..problem.backward import BackwardProblem
    from .block_mask import BlockMask

    AnyProblem = Problem | BackwardProblem

Given = Sequence[Array | None]
Addresses = tuple[int, ...]


class Launch:
    """A chosen kernel that is ready to run repeatedly on arrays of the same layouts. This base class does nothing.

    Creating one compiles and loads nothing; the first `run` does, or `load` in advance. There may be thousands, one for
    each shape, so it is a single small object.
    """

    __slots__ = ()
    by_addresses = False  # whether `start` exists

    def load(self) -> object:
        """Compiles and loads what `run` needs."""

    def run(self, operands: Given, stream: int) -> None:
        """Enqueues it on `stream`, or computes at once in host memory. The operands are in the kernel's order."""

    def start(self, addresses: Addresses, like: Array | None = None, stream: int = 0) -> None:
        """`run` for a launch that needs only the addresses of its operands, 0 for None. like: the first operand;
        device memory for a workspace is allocated beside it."""
        raise NotImplementedError

    def shortest(self) -> Callable[..., None]:
        """The shortest equivalent of `start` for later calls."""
        return self.start

    def run_with_blocks(self, operands: Given, stream: int, blocks: "BlockMask") -> None:
        """Like `run`, with the tile states that a BlockMask keeps, if the kernel needs them."""
        self.run(operands, stream)


def make_launch(choice: Choice, problem: Problem, target: Target) -> Launch:
    """The chosen kernel for this problem; its operands are in the order of options.Operands."""
    if choice.kernel == "reference":
        return _OnReference(problem)
    if choice.kernel == "cpu":
        return OnCpu(problem, _cpu)
    if not math.prod(problem.lse_shape):  # no rows to write; rows of no sequence count, too
        return Launch()
    ready = sequence_of(configs_of(choice, problem, target), problem, target)
    return WarnsIfSlow(problem, ready, choice.kernel) if target.simulated else ready


def configs_of(choice: Choice, problem: Problem, target: Target) -> list[LaunchFacts]:
    """The Configs of the kernel and of those before and behind it; none for the host's rungs."""
    config = choice.config
    return [] if config is None else [*prologue(config, problem, target), config, *epilogue(config)]


def sequence_of(configs: Sequence[LaunchFacts], problem: "AnyProblem", target: Target) -> "Launch":
    """The kernels that have something to do, and the workspace between them."""
    operands, names = names_of(problem)
    shapes, every = workspace(configs, problem), operands + names
    if len(configs) == 1 and not shapes:
        return on_gpu(configs[0], problem, target, taken=positions(configs[0], every))
    steps: list[Step] = []
    for config, own in with_problems(configs, problem):
        if config.grid(own):
            behind = any(step.makes is None for step in steps)  # the others may be left out (run_with_blocks)
            launch, values = on_gpu(config, own, target, behind), values_of(config, own)
            steps.append(Step.of(config, launch, values, every, names))
        if config.replaces:
            old, new = config.replaces
            every = tuple(old if name == new else "" if name == old else name for name in every)
    used = {number for step in steps for number in step.taken}
    made = [shapes.get(name) if number in used else None for number, name in enumerate(names, len(operands))]
    return KernelSequence(steps, made)


def workspace(configs: Sequence[LaunchFacts], problem: "AnyProblem") -> Workspace:
    """Shape and dtype of the arrays that these kernels need besides operands and results."""
    used = {name for config in configs for name in config.parameters.arrays}
    made = {name: what for config in configs for name, what in config.workspace(problem).items()}
    return {name: what for name, what in made.items() if name in used}


def workspace_bytes(configs: Sequence[LaunchFacts], problem: "AnyProblem") -> int:
    return sum(math.prod(shape) * ITEM_SIZE[dtype] for shape, dtype in workspace(configs, problem).values())


def blocks_of(config: LaunchFacts, problem: "AnyProblem", target: Target) -> int:
    """Number of blocks; for a persistent kernel at most one for each multiprocessor."""
    blocks = config.grid(problem)
    return min(blocks, blocks_at_a_time(target)) if config.persistent else blocks


def blocks_at_a_time(target: Target) -> int:
    return max(target.multiprocessors, 1)


Maps = Sequence[tuple[int, TensorMap]]
Places = tuple[int, ...]


def on_gpu(
    config: LaunchFacts, problem: "AnyProblem", target: Target, behind: bool = False, taken: Places = ()
) -> Launch:
    """One kernel on the GPU, or in the simulator. It gets the arrays that its parameters name, in that order.

    behind: another kernel of the same sequence always runs before it. If its Config says that it waits for that kernel,
    it may start before that one has ended. taken: the indices of its arrays among the operands of `run`; a missing
    array has an index behind them. () = the operands are its arrays.
    """
    blocks, maps = blocks_of(config, problem, target), config.operand_maps(problem)
    counters = config.counters(problem) if config.counted else 0
    return kernel_launch(config, target, blocks, values_of(config, problem), maps, behind, taken, counters)


def kernel_launch(
    config: LaunchFacts,
    target: Target,
    blocks: int,
    values: Values,
    maps: Maps = (),
    behind: bool = False,
    taken: Places = (),
    counters: int = 0,
) -> Launch:
    """maps: (index of the array, its tensor map) in the kernel's order. counters: words of its counters."""
    kind = _Simulated if target.simulated else _OnGpu
    return kind(config, target, blocks, values, maps, behind and config.waits, taken, counters)


class _ByAddresses(Launch):
    __slots__ = ()
    by_addresses = True

    def run(self, operands: Given, stream: int) -> None:
        self.start(addresses_of(operands), operands[0], stream)


def addresses_of(operands: Given) -> Addresses:
    return tuple([0 if array is None else array.pointer for array in operands])


def _at(places: Places, every: Any, missing: Any) -> Any:
    """The operands at `places`, with `missing` for those that are not there; all operands if `places` is empty."""
    return tuple([every[place] if place < len(every) else missing for place in places]) if places else every


class _OnGpu(_ByAddresses):
    __slots__ = (
        "_behind",
        "_blocks",
        "_config",
        "_constants",
        "_counters",
        "_launcher",
        "_maps",
        "_pointers",
        "_prepared",
        "_taken",
        "_target",
    )

    def __init__(
        self, config: LaunchFacts, target: Target, blocks: int, values: Values, maps: Maps, behind: bool,
        taken: Places, counters: int,
    ) -> None:  # fmt: skip
        self._config, self._target, self._blocks, self._maps, self._behind = config, target, blocks, maps, behind
        self._taken, self._pointers, self._constants = taken, len(config.parameters.arrays), packed(values.flat)
        self._counters = counters
        self._launcher: Launcher | None = None
        # addresses -> the launch's parameters: loops repeat the same addresses, so parameters are made once
        self._prepared: dict[tuple[int, ...], Any] = {}

    def load(self) -> Launcher:
        if self._counters:
            tile_counters.prepare(self._target.device, self._counters)
        # one Launcher for all problems of this kernel
        parameters = self._pointers, len(self._maps), len(self._constants)
        self._launcher = _loaded(self._config, self._target, *parameters, self._behind)
        return self._launcher

    def start(self, addresses: Addresses, like: Array | None = None, stream: int = 0) -> None:
        launcher = self._launcher or self.load()
        counters: Addresses = ()
        if self._counters:
            counters = (tile_counters.counter(self._target.device, stream, self._counters),)
        key = addresses + counters
        parameters = self._prepared.get(key)
        if parameters is None:
            if len(self._prepared) >= PREPARED:
                self._prepared.clear()
            own = _at(self._taken, addresses, 0)
            parameters = self._prepared[key] = launcher.parameters(own + counters, self._maps, self._constants)
        launcher.launch(parameters, stream, self._blocks)


PREPARED = 16  # number of sets of arrays whose parameters a launch keeps, about a kilobyte each


@functools.cache
def _loaded(config: LaunchFacts, target: Target, pointers: int, maps: int, constants: int, behind: bool) -> Launcher:
    kernel = compiled(config, target.device, target.cc or (0, 0))
    name, threads, shared_bytes = entry_name(config), config.threads, config.shared_bytes
    return Launcher(kernel, name, target.device, threads, shared_bytes, pointers, maps, constants, behind)


class _Simulated(Launch):
    __slots__ = ("_arguments", "_behind", "_config", "_counters", "_taken")

    def __init__(
        self, config: LaunchFacts, target: Target, blocks: int, values: Values, maps: Maps, behind: bool,
        taken: Places, counters: int,
    ) -> None:  # fmt: skip
        self._config, self._arguments, self._behind, self._taken = config, (blocks, values, maps), behind, taken
        self._counters = counters

    def run(self, operands: Given, stream: int) -> None:
        from ..ptx.sim.launch import run

        config, (blocks, values, maps), q = self._config, self._arguments, operands[0]
        operands = _at(self._taken, operands, None)
        if self._counters:
            assert q is not None
            counter = arrays.scratch(q, (self._counters,), "uint32")
            arrays.host_view(counter)[...] = 0
            operands = (*operands, counter)
        arrays_of_kernel = tuple_class("arrays", config.parameters.arrays)
        taken, size = arrays_of_kernel(*operands), (blocks, config.threads, config.shared_bytes)
        run(lambda: source(config), *size, taken, values.tuples, tuple(maps), config.cluster, self._behind)


class WarnsIfSlow(Launch):
    """A launch in the simulator. If it may take minutes, it warns at the line that called attention().

    kernel: the rung; times: its time in units of the forward's.
    """

    __slots__ = ("_kernel", "_problem", "_ready", "_times")

    def __init__(self, problem: Problem, ready: Launch, kernel: str, times: float = 1.0) -> None:
        self._problem, self._ready, self._kernel, self._times = problem, ready, kernel, times

    def run(self, operands: Given, stream: int) -> None:
        from ..machine.announce import warn_caller
        from .simulated import simulated_seconds

        seconds = self._times * simulated_seconds(self._problem, self._kernel)
        if seconds > 60:
            warn_caller(
                f"this will take about {seconds / 60:.0f} min in Numba's CUDA simulator, which runs one GPU thread "
                "after the other, in Python; kernel='cpu' is fast"
            )
        self._ready.run(operands, stream)

    def run_with_blocks(self, operands: Given, stream: int, blocks: "BlockMask") -> None:
        self._ready.run_with_blocks(operands, stream, blocks)


class Step(NamedTuple):
    """A kernel of a sequence. makes, key: the workspace array that a BlockMask alone determines, and what else it
    depends on; None for other kernels."""

    launch: Launch
    taken: tuple[int, ...]  # indices of its arrays among the operands, followed by the workspace
    makes: int | None = None
    key: Hashable = None

    @staticmethod
    def of(
        config: LaunchFacts, launch: Launch, values: Values, names: tuple[str, ...], workspace: tuple[str, ...]
    ) -> "Step":
        """names: of all arrays, the workspace last."""
        taken = positions(config, names)
        if not config.kept:
            return Step(launch, taken)
        return Step(launch, taken, workspace.index(config.kept), (config, values))


WORKSPACE_ALIGNMENT = 256  # alignment of an array; CUDA's own allocations have the same


class KernelSequence(Launch):
    """Kernels that run in order on one stream, with a workspace between them.

    workspace: (shape, dtype) of each of its arrays; None for an array that no kernel takes.
    """

    __slots__ = ("_bytes", "_offsets", "_starts", "_steps", "_workspace", "by_addresses")

    def __init__(self, steps: list[Step], workspace: list[tuple[tuple[int, ...], str] | None]) -> None:
        self._steps, self._workspace = steps, workspace
        self.by_addresses = all(step.launch.by_addresses for step in steps)
        self._starts = [(step.launch, _taking(step.taken)) for step in steps]
        # Offset of each array in a single allocation of the workspace, which takes the time of one array's.
        self._offsets: list[int | None] = []
        self._bytes = 0
        for what in workspace:
            self._offsets.append(None if what is None else self._bytes)
            if what is not None:
                size = math.prod(what[0]) * arrays.ITEM_SIZE[what[1]]
                self._bytes += -(-size // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT

    def load(self) -> None:
        for step in self._steps:
            step.launch.load()

    def start(self, addresses: Addresses, like: Array | None = None, stream: int = 0) -> None:
        assert like is not None
        memory = arrays.scratch(like, (self._bytes,), "uint8", stream) if self._bytes else like
        first = memory.pointer
        every = (*addresses, *[0 if offset is None else first + offset for offset in self._offsets])
        for launch, take in self._starts:
            launch.start(take(every), like, stream)

    def run(self, operands: Given, stream: int) -> None:
        if self.by_addresses:
            self.start(addresses_of(operands), operands[0], stream)
            return
        q = operands[0]  # the simulator takes the arrays themselves
        assert q is not None
        made = [what and arrays.scratch(q, *what, stream) for what in self._workspace]
        every = (*operands, *made)
        for launch, taken, *_ in self._steps:
            launch.run([every[number] for number in taken], stream)

    def run_with_blocks(self, operands: Given, stream: int, blocks: "BlockMask") -> None:
        q = operands[0]
        assert q is not None
        device = q.layout.device
        number = 0 if device is None else number_of(device, stream)
        # Work captured into a CUDA graph has no result until the graph runs, so it cannot be kept.
        keys: dict[int, tuple[Hashable, ...]] = {}
        for _, _, makes, key in self._steps:
            if makes is not None:  # several kernels may compute it, one after the other
                keys[makes] = (*keys.get(makes, (device, number)), key)
        found = {place: None if number is None else blocks.find(key) for place, key in keys.items()}
        made = [found.get(n) or (what and arrays.scratch(q, *what, stream)) for n, what in enumerate(self._workspace)]
        every = (*operands, *made)
        for launch, taken, makes, _ in self._steps:
            if makes is None or found.get(makes) is None:
                launch.run([every[n] for n in taken], stream)
        for place, there in found.items():
            array = made[place]
            if there is None and number is not None and array is not None:
                blocks.keep(keys[place], array)


def _taking(places: tuple[int, ...]) -> Callable[[Addresses], Addresses]:
    """all addresses -> those at these places"""
    if len(places) == 1:  # itemgetter would return no tuple for one place
        return lambda every: (every[places[0]],)
    return operator.itemgetter(*places)


class OnCpu(_ByAddresses):
    """A launch of the cpu rung. code: imports the module of cpu/ that computes the problem, and with it Numba."""

    __slots__ = ("_code", "_problem", "_ready")

    def __init__(self, problem: Any, code: Callable[[], Any]) -> None:
        self._problem, self._code = problem, code
        self._ready: Any = None

    def load(self) -> None:
        self._code().warm_up(self._problem)

    def start(self, addresses: Addresses, like: Array | None = None, stream: int = 0) -> None:
        if self._ready is None:
            self._ready = self._code().ready(self._problem)
        self._ready.run(addresses)

    def shortest(self) -> Callable[..., None]:
        return self.start if self._ready is None else self._ready.run

    def run(self, operands: Given, stream: int) -> None:
        of_scores = getattr(self._problem, "forward", self._problem)
        if not of_scores.aux:
            self._compute(operands)
            return
        from ..functions.outside import OutsideRead, error_of

        try:
            self._compute(operands)
        except OutsideRead as error:
            read, fields = error.read, (Operands if of_scores is self._problem else GradientOperands)._fields
            behind = operands[len(fields) + of_scores.seeded :]
            aux = [arrays.host_view(x) for x in behind[: len(of_scores.aux)] if x is not None]
            raise error_of(read, of_scores.function(read.option), of_scores.compute_dtype, aux) from None

    def _compute(self, operands: Given) -> None:
        if self._problem.forward.packed is None:
            self.start(addresses_of(operands))
            return
        from .packed_on_cpu import run

        run(self._problem, operands, addresses_of(operands), self._code())


@functools.cache
def _cpu() -> Any:
    with toolchain.importing():
        from ..cpu import forward as cpu

    return cpu


class _OnReference(Launch):
    __slots__ = ("_problem",)

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def run(self, operands: Given, stream: int) -> None:
        from .for_reference import run_forward  # imports the oracle

        own = len(Operands._fields)
        run_forward(self._problem, Operands(*operands[:own]), operands[own:])  # type: ignore[arg-type]
