"""Random functions of a score and positions, as text: expressions of whole numbers, real ones and truths, and small
statements. The same seed gives the same functions on every machine and Python.

`exact`: without functions of math and divisions, whose last digits may differ: what is rounded down must not depend on
them.
"""

import random

ARRAYS = "ids, large, flags, small, reals"  # int64, uint64, bool, int8 and float32, of 8 elements each


class Writer:
    def __init__(self, seed):
        self.random, self.score = random.Random(seed), "s"
        self.names = {"whole": ["h", "i", "j"], "real": []}

    def one(self, *choices):
        return self.random.choice(choices)

    def up_to(self, most):
        return self.random.randint(0, most)

    def whole(self, depth):
        if depth <= 0:
            array = f"{self.one('ids', 'large', 'small')}[({self.one('i', 'j', 'i + j')}) % 8]"
            return self.one(*self.names["whole"], *self.names["whole"], str(self.up_to(9) - 3), array, "len(ids)")
        a, b, c = (self.whole(depth - 1 - self.up_to(1)) for _ in range(3))
        t = self.truth(depth - 2)
        found = [f"({a} {sign} {b})" for sign in ("+", "-", "*", "//", "%", "&", "|", "^", "<<", ">>")]
        found += [f"(-{a})", f"abs({a})", f"(~{a})", f"min({a}, {b})", f"max({a}, {b}, {c})", f"({a} if {t} else {b})"]
        found += [f"({a} ** {self.up_to(3)})", f"int(0.75 * {a})", f"round(0.25 * {a})", f"({t} + {a})"]
        found += [f"(0 - ({t}))", f"({a} or {b})", f"({a} and {b})"]
        return self.one(*found)

    def real(self, depth, exact=False):
        if depth <= 0:
            constant, array = self.one("0.5", "-1.25", "2.0", "3.0", "0.1"), f"reals[{self.one('i', 'j', 'h')} % 8]"
            return self.one(self.score, self.score, *self.names["real"], constant, array)
        a, b = (self.real(depth - 1 - self.up_to(1), exact) for _ in range(2))
        n, m, t = self.whole(depth - 2), self.whole(depth - 2), self.truth(depth - 2)
        found = [f"({a} {sign} {b})" for sign in ("+", "-", "*")]
        found += [f"(-{a})", f"abs({a})", f"min({a}, {b})", f"max({a}, {b})", f"({a} if {t} else {b})", f"({a} + {n})"]
        found += [f"({a} * {n})", f"({t} * {a})", f"float({n})", f"({a} ** {self.up_to(3)})", f"({n} - {a})"]
        if not exact:
            c, d = self.real(depth - 2, exact=True), self.real(depth - 2, exact=True)
            found += [f"({a} / {b})", f"({n} / {m})", f"({a} ** -{self.up_to(2)})", f"({c} // {d})", f"({c} % {d})"]
            found += [f"math.fmod({c}, {d})", f"({self.one(2, -2, 3)} ** {n})", f"({n} ** h)", f"math.hypot({a}, 1.5)"]
            found += [f"math.{name}({a})" for name in ("tanh", "sin", "atan", "erf")]
            found += [f"math.{name}" for name in (f"exp(min({a}, 3))", f"log1p(abs({a}))", f"sqrt(abs({a}))")]
        return self.one(*found)

    def truth(self, depth):
        a, b, c = (self.whole(max(depth - 1, 0)) for _ in range(3))
        sign, step = self.one("<", "<=", ">", ">=", "==", "!="), self.one(1, 2, -1, -3)
        found = [f"({a} {sign} {b})", f"({a} {sign} {b} < {c})", f"({self.real(min(depth, 1), True)} {sign} {a})"]
        found += ["flags[(i + j) % 8]", f"({a} in ({b}, {c}, 3))", f"({a} in range({b}, {c}, {step}))"]
        if depth > 0:
            t, u = self.truth(depth - 1), self.truth(depth - 1)
            found += [f"({t} and {u})", f"({t} or {u})", f"(not {t})", f"bool({a})", f"({t} & {u})", f"({t} ^ {u})"]
        return self.one(*found)

    def statements(self):
        """Variables, branches and a loop."""
        lines = [f"n = {self.whole(1)}", f"x = {self.real(1)}"]
        self.names["whole"].append("n")
        self.names["real"].append("x")
        lines += [f"if {self.truth(1)}: n = {self.whole(1)}", f"elif {self.truth(1)}: x = {self.real(1)}"]
        lines += [
            f"else: n {self.one('+', '-', '*')}= {self.whole(1)}",
            f"if n < 0: n = {self.one('-n', 'abs(n)', '~n')}",
        ]
        self.names["whole"].append("m")
        lines += [f"for m in range({self.one('3', 'j', 'i - j', 'i, j, -2', 'n % 5')}):"]
        lines += [
            f"    x {self.one('+', '-')}= {self.real(1)}",
            f"    if {self.truth(1)}: {self.one('break', 'continue')}",
        ]
        lines += [f"    n = {self.whole(1)}"]
        self.names["whole"].remove("m")
        return [*lines, f"return {self.real(1)} + x * 0.5 + n"]


def score_mod(seed):
    writer = Writer(seed)
    lines = writer.statements() if seed % 3 == 0 else [f"return {writer.real(3)}"]
    return "\n".join([f"def f(s, b, h, i, j, {ARRAYS}):", *(f"    {line}" for line in lines)])


def mask_mod(seed):
    writer = Writer(seed)
    writer.score = "0.5"
    return f"def f(b, h, i, j, {ARRAYS}):\n    return {writer.truth(3)}"
