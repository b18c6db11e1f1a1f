"""The derivative of each operation of a score function beside that of torch's own rule, in float64."""

import math
import types

import numpy as np
import pytest
from helpers.derivatives import Table

torch = pytest.importorskip("torch", reason="needs torch")

NUMBERS = [0.0, 5e-324, 1e-308, 1e-160, 1e-20, 0.3, 1.0, 1.5, 2.0, 30.0, 800.0, 1e20, 1e160, 1e300, math.inf]
NUMBERS += [-x for x in NUMBERS[1:]]
UNARY = (
    "exp expm1 log log1p log2 log10 sqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc".split()
)
UNARY += ["fabs"]
BINARY = ["math.atan2({}, {})", "math.hypot({}, {})", "math.copysign({}, {})", "math.fmod({}, {})", "math.pow({}, {})"]
BINARY += ["{} / {}", "{} ** {}", "{} * {}", "{} - {}", "{} + {}", "max({}, {})", "min({}, {})"]
OTHERS = (0.0, 1.0, -1.5, 2.5, 1e200)
TEXTS = [
    *(f"math.{name}(s)" for name in UNARY),
    *(text.format("s", f"({other})") for text in BINARY for other in OTHERS),
    *(text.format(f"({other})", "s") for text in BINARY for other in OTHERS),
    *(f"s ** {n}" for n in range(-3, 5)),
    *(f"s % {n}" for n in (2.0, -3.0)),
    "abs(s)", "-s", "math.floor(s)", "math.ceil(s)", "math.trunc(s)", "math.degrees(s)", "math.radians(s)",
    "math.sqrt(max(s, 0.0))", "math.log(min(max(s, 0.0), 2.0))",
]  # fmt: skip
TABLE = Table(TEXTS)


def both(function):
    """A function of two numbers, of which one may be Python's."""
    return lambda a, b: function(*(torch.as_tensor(x, dtype=torch.float64) for x in (a, b)))


OF_TORCH = types.SimpleNamespace(**{name: getattr(torch, name) for name in (*UNARY[:-1], "floor", "ceil", "trunc")})
for _name in ("atan2", "hypot", "copysign", "fmod", "pow"):
    setattr(OF_TORCH, _name, both(getattr(torch, _name)))
OF_TORCH.fabs, OF_TORCH.degrees, OF_TORCH.radians = torch.abs, torch.rad2deg, torch.deg2rad
NAMES = dict(
    math=OF_TORCH,
    max=both(lambda a, b: torch.where(b > a, b, a)),  # which of two equal ones it is, as Python says
    min=both(lambda a, b: torch.where(b < a, b, a)),
)


def by_torch(text):
    s = torch.tensor(NUMBERS, dtype=torch.float64, requires_grad=True)
    y = eval(text, NAMES, dict(s=s))
    found = torch.autograd.grad(y.sum(), s, allow_unused=True)[0] if y.requires_grad else None
    return y.detach().numpy(), np.zeros(len(NUMBERS)) if found is None else found.numpy()


@pytest.mark.parametrize("way", [TABLE.python, TABLE.compiled])
def test_derivatives_of_every_operation(way):
    """Where torch's is NaN and the score is not, ours may be the limit, which tests/unit/test_derivatives.py states."""
    wrong = {}
    for text in TEXTS:
        y, expected = by_torch(text)
        with np.errstate(all="ignore"):
            right = np.isclose(way(text, NUMBERS), expected, rtol=2e-5, atol=1e-300)  # torch squares 1e-160
        missed = np.flatnonzero(~right & ~np.isnan(expected) & ~np.isnan(y)).tolist()
        if missed:
            wrong[text] = {NUMBERS[n]: (float(way(text, [NUMBERS[n]])[0]), float(expected[n])) for n in missed}
    assert not wrong
