"""Arrays that lie on several devices: each device computes its own batch entries and heads.

XLA cannot split a callback. It would gather the arrays, and every device would compute everything. So the operation has
a sharding rule. It may be split along the batch, along the heads (if those of k and v can be split too, or are one),
and along dimensions mapped by jax.vmap. An array that is broadcast there stays whole, and its gradient is summed over
the devices. A device counts its batch entries and heads from 0. So a seed, and functions that read these numbers, are
refused where they are split.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule, custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from ..problem.forward import LAYOUTS
from ..problem.options import BROADCAST, GRADIENT_OF, RANKS, SEEDED
from . import jax_seed
from .static_call import NO_VMAP, StaticCall, numbered

try:
    from jax.experimental.buffer_callback import buffer_callback
except ImportError:
    raise NotImplementedError(
        "attention inside jax.jit, jax.grad and jax.vmap, and on several devices, needs "
        f"jax.experimental.buffer_callback, which JAX {jax.__version__} does not have; a newer JAX has it"
    ) from None

try:
    from jax.sharding import reshard
except ImportError:  # before JAX 0.7
    from jax.experimental.shard import reshard

BATCH, HEADS, WHOLE = "b", "h", ""  # labels of dimensions; those that were mapped over are "m0", "m1", ...
WORDS = {BATCH: "batch entry", HEADS: "head"}
Axes = tuple[str, ...]  # axis names of a mesh


class Rule(NamedTuple):
    """Along which dimensions the arrays of an operation may be split."""

    shapes: tuple[tuple[int, ...], ...]  # shapes of the operands, then of the results
    labels: tuple[tuple[str, ...], ...]  # a label for each dimension: dimensions with the same label are split together
    operands: int
    numbered: dict[str, str]  # label -> an argument whose result depends on the indices along it

    @staticmethod
    def of(callback: Any, given: Any, results: Any) -> "Rule":
        shapes = tuple(x.shape for x in (*given, *results))
        mapped = callback.known.mapped(shapes[0])  # q is first
        labels = [_labels(*named, mapped, callback.known) for named in zip(callback.names, shapes, strict=True)]
        return Rule(shapes, tuple(labels), len(given), _numbered(callback))

    def axes(self, mesh: Any, shardings: Any) -> dict[str, Axes]:
        """label -> the mesh axes over which it is split, from the first array that is split along it."""
        found: dict[str, Axes] = {}
        for labels, sharding in zip(self.labels, shardings, strict=False):
            for label, axis in zip(labels, getattr(sharding, "spec", ()), strict=False):
                axes = axis if isinstance(axis, tuple) else (axis,)
                if axis is None or not label or label in found or any({*axes} & {*others} for others in found.values()):
                    continue
                parts = math.prod(mesh.shape[name] for name in axes)
                if parts > 1 and not any(extent % parts for extent in self._extents(label)):
                    found[label] = axes
        return found

    def check(self, axes: dict[str, Axes]) -> None:
        for label, argument in self.numbered.items():
            if label in axes:
                raise NotImplementedError(
                    f"{argument} follows from the number of the {WORDS[label]}, which a device does not know where "
                    f"arrays are split over {', '.join(axes[label])}: call attention inside jax.shard_map, where each "
                    "device counts its own from 0"
                )

    def _extents(self, label: str) -> list[int]:
        return [
            extent
            for labels, shape in zip(self.labels, self.shapes, strict=True)
            for own, extent in zip(labels, shape, strict=True)
            if own == label
        ]

    def specs(self, axes: dict[str, Axes]) -> list[PartitionSpec]:
        return [PartitionSpec(*(axes.get(label) for label in labels)) for labels in self.labels]

    def of_shardy(self) -> SdyShardingRule:
        """The rule for Shardy. A whole dimension has its own factor; query heads have those of KV heads and group."""
        heads = self._extents(HEADS) or [1]
        grouped = {"group": max(heads) // min(heads)} if max(heads) > min(heads) else {}

        def factor(label: str, extent: int, place: str) -> str | CompoundFactor:
            if grouped and label == HEADS and extent == max(heads):
                return CompoundFactor(HEADS, "group")
            return label or place

        mappings = [
            ArrayMapping(*(factor(*dim, f"w{n}of{axis}") for axis, dim in enumerate(zip(labels, shape, strict=True))))
            for n, (labels, shape) in enumerate(zip(self.labels, self.shapes, strict=True))
        ]
        return SdyShardingRule(tuple(mappings[: self.operands]), tuple(mappings[self.operands :]), **grouped)


def _labels(name: str, shape: tuple[int, ...], mapped: int, call: StaticCall) -> tuple[str, ...]:
    batch = WHOLE if call.packed else BATCH  # the table of sequences means rows of whole arrays
    own = (batch, HEADS, WHOLE, WHOLE)[: RANKS.get(name, 0)] or (WHOLE,) * (len(shape) - mapped)
    if RANKS.get(name) == 4 and GRADIENT_OF.get(name, name) not in BROADCAST:
        own = tuple(own[axis] for axis in LAYOUTS["bshd" if call.packed else call.options.layout])
    own = own[len(own) - (len(shape) - mapped) :]
    labels = (*(f"m{number}" for number in range(mapped)), *own)
    return tuple(WHOLE if extent == 1 else label for label, extent in zip(labels, shape, strict=True))


def _numbered(callback: Any) -> dict[str, str]:
    if jax_seed.NAME in callback.names:
        return dict.fromkeys((BATCH, HEADS), SEEDED)
    found = {label: numbered(callback.known.options.functions, label) for label in (BATCH, HEADS)}
    return {label: option for label, option in found.items() if option is not None}


# A lowering is told the devices of its program only where JAX finds custom_partitioning in it. So an operation has a
# program as a parameter which has it, and which never runs.
_unsplit = custom_partitioning(lambda x: x)
_unsplit.def_partition(None)
DEVICES = jax.make_jaxpr(_unsplit)(jax.ShapeDtypeStruct((), "float32"))

operation = Primitive("numba_flash_attention")
operation.multiple_results = True


@functools.partial(jax.jit, static_argnums=(0, 1))
def call(callback: Any, results: tuple[jax.ShapeDtypeStruct, ...], *given: Any) -> Any:
    """The results that `callback` computes. Compiled, also where nothing is traced, so that the rule holds there."""
    return operation.bind(*given, callback=callback, results=results, devices=DEVICES)


@operation.def_impl
def _(*given: Any, callback: Any, results: Any, devices: Any) -> Any:  # under jax.disable_jit
    return buffer_callback(callback, results)(*given)


@operation.def_abstract_eval
def _(*given: Any, callback: Any, results: Any, devices: Any) -> Any:
    shardings = [getattr(x, "sharding", None) for x in given]
    mesh = next((x.mesh for x in shardings if x is not None and any(x.spec)), None)
    if mesh is None:  # only axes of a mesh that are Explicit are known here
        return [jax.core.ShapedArray(x.shape, x.dtype) for x in results]
    rule = Rule.of(callback, given, results)
    axes = rule.axes(mesh, shardings)
    rule.check(axes)
    specs = rule.specs(axes)[len(given) :]
    return [
        jax.core.ShapedArray(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x, spec in zip(results, specs, strict=True)
    ]


def lying_as(operand: Any, gradient: Any) -> Any:
    """The gradient of an operand, with the sharding in the operand's type if there are Explicit axes."""
    wanted = getattr(jax.typeof(operand), "sharding", None)
    if wanted is None or wanted.spec == jax.typeof(gradient).sharding.spec:
        return gradient
    return reshard(gradient, wanted)


def _batched(given: Any, axes: Any, *, callback: Any, results: Any, devices: Any) -> Any:
    """A mapped dimension comes in front; an array that is not mapped over is 1 long there."""
    if callback.known.packed:
        raise NotImplementedError(NO_VMAP.format("jax"))
    size = next(x.shape[axis] for x, axis in zip(given, axes, strict=True) if axis is not None)
    given = [
        jax.numpy.expand_dims(x, 0) if axis is None else jax.numpy.moveaxis(x, axis, 0)
        for x, axis in zip(given, axes, strict=True)
    ]
    results = tuple(jax.ShapeDtypeStruct((size, *x.shape), x.dtype) for x in results)
    return operation.bind(*given, callback=callback, results=results, devices=devices), (0,) * len(results)


batching.primitive_batchers[operation] = _batched


def _lower(context: Any, *values: Any, callback: Any, results: Any, devices: Any) -> Any:
    """A program keeps the callbacks of its own lowering alone. So JAX lowers the callback here, and the part of each
    device, which is lowered later as a program of its own, names the callback as JAX did here."""
    usual = mlir.lower_fun(buffer_callback(callback, results), multiple_results=True)
    found = usual(context.replace(), *values)
    if getattr(context.module_context.axis_context, "manual_axes", ()):
        return found  # inside jax.shard_map; an axis of the mesh that it leaves out has no rule in JAX
    made = found[0].owner
    target = made.attributes["call_target_name"].value
    named = {x.name: np.uint64(x.attr.value) for x in made.attributes["mhlo.backend_config"]}
    made.erase()

    def computed(results: Any) -> Any:
        return lambda *given: jax.ffi.ffi_call(target, results)(*given, **named)

    rule = Rule.of(callback, context.avals_in, results)
    return mlir.lower_fun(_split(rule, results, computed), multiple_results=True)(context, *values)


mlir.register_lowering(operation, _lower)


def _sum(x: Any, names: Axes) -> Any:
    """The sum of x over devices, in float32 or more, rounded once."""
    wide = jax.numpy.promote_types(x.dtype, jax.numpy.float32)
    return jax.lax.psum(x.astype(wide), names).astype(x.dtype) if names else x


def _split(rule: Rule, results: tuple[jax.ShapeDtypeStruct, ...], computed: Any) -> Any:
    """computed(results) with the rule."""

    def of_results(mesh: Any, operands: Any, results: Any) -> Any:
        axes = rule.axes(mesh, [x.sharding for x in operands])
        return tuple(NamedSharding(mesh, spec) for spec in rule.specs(axes)[rule.operands :])

    def partition(mesh: Any, operands: Any, whole: Any) -> Any:
        # A result's wanted sharding may split an operation that its operands do not split, except with `numbered`.
        deciding = operands if rule.numbered else (*operands, *whole)
        axes = rule.axes(mesh, [x.sharding for x in deciding])
        rule.check(axes)  # not in of_results: an error there ends the process
        shardings = [NamedSharding(mesh, spec) for spec in rule.specs(axes)]
        given, found = shardings[: rule.operands], shardings[rule.operands :]
        parts = tuple(
            jax.ShapeDtypeStruct(sharding.shard_shape(x.shape), x.dtype)
            for x, sharding in zip(results, found, strict=True)
        )
        over = [
            tuple(name for label, names in axes.items() if label not in labels for name in names)
            for labels in rule.labels[rule.operands :]
        ]

        def part(*operands: Any) -> Any:
            return tuple(_sum(x, names) for x, names in zip(computed(parts)(*operands), over, strict=True))

        return mesh, part, tuple(found), tuple(given)

    split = custom_partitioning(computed(results))
    split.def_partition(partition, infer_sharding_from_operands=of_results, sharding_rule=rule.of_shardy())
    return split
