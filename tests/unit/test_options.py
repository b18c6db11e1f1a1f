"""Options: the public signatures pack what they are given as Options.of does by name."""

import inspect

import numpy as np
import pytest

import numba_flash
from numba_flash.api import backward, forward
from numba_flash.config.simt_backward import HeadSumsConfig
from numba_flash.dispatch import backward as dispatch_backward, forward as dispatch_forward
from numba_flash.dispatch.call import Call
from numba_flash.kernels import score
from numba_flash.problem.options import (
    GRADIENT_OF,
    HEAD_GRADIENTS,
    OPTION_NAMES,
    RANKS,
    AttentionGradients,
    GradientOperands,
    Options,
)

X = np.zeros((1, 1, 2, 4), np.float32)
ROW = np.zeros((1, 1, 2), np.float32)


class Packed(Exception):
    """What came."""


@pytest.mark.parametrize("function", [numba_flash.attention, numba_flash.attention_backward])
@pytest.mark.parametrize("given", [(), *((name,) for name in OPTION_NAMES), OPTION_NAMES], ids=",".join)
def test_every_option_arrives_in_its_place(function, given, monkeypatch):
    def caught(*arguments):
        raise Packed(*arguments)

    monkeypatch.setattr(forward, "find", lambda *arguments: None)  # which looks at options
    monkeypatch.setattr(dispatch_forward, "run", caught)
    monkeypatch.setattr(dispatch_backward, "run", caught)
    named = {name: ("the", name) for name in given}
    operands = (X, X, X) if function is numba_flash.attention else (X, X, X, X, X, ROW)
    with pytest.raises(Packed) as packed:
        function(*operands, **named)
    (call,) = packed.value.args
    call = call if isinstance(call, Call) else Call.of(call)
    numbers = {"dropout_p": 0.0} if {"scale", "softcap"} & {*given} else {}  # its default comes with the other numbers
    assert call.options == Options.of(**numbers | named)
    assert call.operands == ((X, X, X, None) if len(operands) == 3 else (X, X, X, X, ROW, X, None))
    assert (call.stream, call.kernel, call.key) == (None, "auto", None)


@pytest.mark.parametrize("function", [forward.attention, backward.attention_backward])
def test_the_signatures_have_every_option(function):
    assert set(OPTION_NAMES) <= set(inspect.signature(function).parameters)


def test_an_unknown_option_is_named():
    with pytest.raises(TypeError, match="unexpected keyword argument 'softcapp'"):
        Options.of(softcapp=3.0)


def test_gradients_are_those_of_the_table():
    assert AttentionGradients._fields == (*GRADIENT_OF, "daux")


# Folding a batch, and a kernel's strides, ask for it by name.
def test_every_array_has_a_rank():
    assert set(RANKS) == set(GradientOperands._fields)


# The table says which gradients are sums over the rows of a head, and a file of the score what a row gives to each.
def test_every_gradient_of_a_head_has_its_sum():
    assert set(score.OF_HEADS) == {option.name for option in HEAD_GRADIENTS.values()}
    for gradient, option in HEAD_GRADIENTS.items():
        config = HeadSumsConfig("float32", gradient, "float32", batch_summed=True)
        assert gradient in config.parameters.arrays and gradient in config.names
        assert hasattr(score.OF_HEADS[option.name], "row_gradient")
