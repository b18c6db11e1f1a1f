"""The backward's own products and the gradient of a panel's scores, as LLVM vectors (see build.py)."""

# mypy: ignore-errors

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .build import I32, I64, PANEL_VECTORS, exp2_vectors, loop, vector_function

TOGETHER = 2  # keys taken at once: two chains of operations a vector hide each other's latency


def key_rows(rows, vectors, guarded=False):
    """`rows` keys' gradients in `vectors` vectors of columns: an intrinsic
    (to, to_stride, weights, panel_bytes, queries, x, zero).

    guarded: a term whose weight is 0 is left out, so that 0 times NaN adds nothing.
    """

    def build(b, shape, to, to_stride, weights, panel_bytes, queries, x):
        """to (rows, columns) += sum over panels of weights (rows, lanes) @ x (lanes, columns), of `queries` in all.

        The weights of a panel of query rows are contiguous, panels lie panel_bytes apart; x has a row of `lanes`
        numbers for each query row. The sum starts from zero and meets `to` once: shorter chains of additions.
        """
        at = [I64(v * shape.width) for v in range(vectors)]
        nothing = ir.Constant(shape.scalar, 0.0)

        def panel(n, sums):
            w = shape.pointer(b, b.add(weights, b.mul(n, panel_bytes)))
            own_x = shape.pointer(b, b.add(x, b.mul(n, I64(shape.lanes * shape.lanes * shape.bytes))))
            left = b.sub(queries, b.mul(n, lanes))
            count = b.select(b.icmp_signed("<", left, lanes), left, lanes)

            def query(i, sums):
                columns = [shape.load(b, own_x, b.add(b.mul(i, I64(shape.lanes)), c)) for c in at]
                results = []
                for row in range(rows):
                    weight = b.load(b.gep(w, [b.add(i, I64(row * shape.lanes))]))
                    splat, counts = shape.splat(b, weight), b.fcmp_unordered("!=", weight, nothing)
                    for v, column in enumerate(columns):
                        old = sums[row * vectors + v]
                        new = shape.fma(b, splat, column, old)
                        results.append(b.select(counts, new, old) if guarded else new)
                return results

            return loop(b, I64(0), count, I64(1), sums, query)

        lanes = I64(shape.lanes)
        panels = b.sdiv(b.add(queries, I64(shape.lanes - 1)), lanes)
        sums = loop(b, I64(0), panels, I64(1), [shape.const(0.0)] * (rows * vectors), panel)
        for row in range(rows):
            target = shape.pointer(b, b.add(to, b.mul(to_stride, I64(row))))
            for v, c in enumerate(at):
                shape.store(b, b.fadd(shape.load(b, target, c), sums[row * vectors + v]), target, c)

    build.__name__ = f"key_rows_{rows}_{vectors}{'_guarded' if guarded else ''}"
    return vector_function("iiiiii")(build)


def score_gradients(what):
    """The step from scores to their gradients: an intrinsic (s, dp, slopes, keys, scale_log2, shift, delta, zero).

    what: "weights" leaves dp alone, "plain" turns it into dS, "capped" into dS times slopes.
    """

    def build(b, shape, s, dp, slopes, keys, scale_log2, shift, delta):
        """s (keys, lanes) becomes p = exp2(scale_log2 * s + shift), at most 1; dp becomes p * (dp - delta) * slopes.

        shift and delta are (lanes,), shift being -lse in powers of 2, or -inf for a row without weight, whatever its
        scores hold; a score of -inf has none, whatever shift holds. Where p is 0 the gradient is 0, whatever dp and
        the slope hold.
        """
        s, dp, slopes, shift, delta = (shape.pointer(b, x) for x in (s, dp, slopes, shift, delta))
        zero, scale = shape.const(0.0), shape.splat(b, scale_log2)
        at = [I64(v * shape.width) for v in range(PANEL_VECTORS)]
        shifts, deltas = ([shape.load(b, x, place) for place in at] for x in (shift, delta))
        infinity = shape.const(float("-inf"))
        weightless = [b.fcmp_ordered("==", x, infinity) for x in shifts]
        end, step = b.mul(keys, I64(shape.lanes)), shape.lanes

        def keys_at_once(together):
            def body(i, _):
                places = [
                    b.add(i, I64(n * step + v * shape.width)) for n in range(together) for v in range(PANEL_VECTORS)
                ]
                raw = [shape.load(b, s, place) for place in places]
                xs = [shape.fma(b, x, scale, shifts[n % PANEL_VECTORS]) for n, x in enumerate(raw)]
                xs = [b.select(b.fcmp_ordered("<", zero, x), zero, x) for x in xs]  # above 0 is the rounding of lse
                # a hidden key has no weight even where the row's lse is NaN
                hidden = [
                    b.or_(weightless[n % PANEL_VECTORS], b.fcmp_ordered("==", x, infinity)) for n, x in enumerate(raw)
                ]
                xs = [b.select(without, infinity, x) for without, x in zip(hidden, xs, strict=True)]
                for n, (place, p) in enumerate(zip(places, exp2_vectors(b, shape, xs), strict=True)):
                    shape.store(b, p, s, place)
                    if what == "weights":
                        continue
                    ds = b.fmul(p, b.fsub(shape.load(b, dp, place), deltas[n % PANEL_VECTORS]))
                    if what == "capped":
                        ds = b.fmul(ds, shape.load(b, slopes, place))
                    shape.store(b, b.select(b.fcmp_ordered("==", p, zero), zero, ds), dp, place)
                return []

            return body

        several = b.mul(b.and_(keys, I64(-TOGETHER)), I64(step))
        loop(b, I64(0), several, I64(TOGETHER * step), [], keys_at_once(TOGETHER))
        loop(b, several, end, I64(step), [], keys_at_once(1))

    build.__name__ = f"score_gradients_{what}"
    return vector_function("iiiixii")(build)


# Order between threads.


@intrinsic
def load_acquire(typingctx, address):
    """The int64 at an address; what its writer wrote before it is seen afterwards."""

    def generate(context, b, sig, args):
        return b.load_atomic(b.inttoptr(args[0], I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def store_release(typingctx, address, value):
    """Write an int64 after everything that this thread wrote before."""

    def generate(context, b, sig, args):
        b.store_atomic(args[1], b.inttoptr(args[0], I64.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def call_for_nothing(typingctx, function):
    """Call the C function int(void) at an address."""

    def generate(context, b, sig, args):
        b.call(b.inttoptr(args[0], ir.FunctionType(I32, []).as_pointer()), [])
        return context.get_dummy_value()

    return types.void(types.int64), generate
