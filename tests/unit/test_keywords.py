"""Keyword arguments of other libraries end in an error that names ours, and the signatures do not show how."""

import inspect

import numpy as np
import pytest

import numba_flash
from numba_flash.api.forward import refusing
from numba_flash.problem.keywords import INSTEAD

X = np.zeros((1, 1, 4, 8), np.float32)
ENDS = np.array([0, 4], np.int32)
ROWS = X[0, 0][:, None]
CALLS = {
    "attention": (X, X, X),
    "attention_backward": (X, X, X, X, X, X[..., 0]),
    "attention_kvcache": (X, X, X),
    "attention_varlen": (ROWS, ROWS, ROWS, ENDS),
    "attention_varlen_backward": (ROWS, ROWS, ROWS, ROWS, ROWS, ROWS[..., 0].T, ENDS),
}
MUST = dict(attention_kvcache=dict(seqlens_k=ENDS[1:]))
THROUGH = {
    "warmup": (X, X, X),
    "explain": (X, X, X),
    "explain_backward": (X, X, X, X, X, X[..., 0]),
    "attention_lse": (X, X),
}


def said(name, given, **unknown):
    with pytest.raises(TypeError) as error:
        getattr(numba_flash, name)(*given, **MUST.get(name, {}), **unknown)
    return str(error.value)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("unknown", "instead"),
    [
        ("is_causal", "use causal;"),
        ("attn_mask", "use mask for bool"),
        ("softmax_scale", "use scale"),
        ("window_size", "use window=(left, right)"),
        ("key_padding_mask", "use seqlens_k"),
        ("enable_gqa", "use nothing: heads"),
        ("softcapp", "use softcap"),
    ],
)
def test_the_error_says_what_to_use(name, unknown, instead):
    text = said(name, CALLS[name], **{unknown: True})
    assert text.startswith(f"{name}() got an unexpected keyword argument {unknown!r}: {instead}")


@pytest.mark.parametrize("name", THROUGH)
def test_it_says_so_where_options_are_passed_on(name):
    assert "'is_causal': use causal" in said(name, THROUGH[name], is_causal=True)


def test_packed_sequences_have_functions_where_others_have_arrays():
    assert said("attention_varlen", CALLS["attention_varlen"], mask=X).endswith("'mask': use mask_mod with aux")


def test_a_name_that_nobody_has_is_refused_as_python_does():
    assert said("attention", CALLS["attention"], nonsense=1).endswith("got an unexpected keyword argument 'nonsense'")
    of_backward = said("attention_backward", CALLS["attention_backward"], out=X)
    assert of_backward.endswith("got an unexpected keyword argument 'out'")  # and does not take it for layout


@pytest.mark.parametrize("name", CALLS)
def test_the_signature_shows_what_there_is(name):
    function = getattr(numba_flash, name)
    assert function.__code__.co_flags & inspect.CO_VARKEYWORDS  # else Python's own error would come
    assert "unknown" not in inspect.signature(function).parameters
    assert refusing(function) is function  # no call in between


def test_all_that_is_named_instead_exists():
    """Each row begins with an argument of one of these functions, or with something of numba_flash."""
    arguments = {x for name in CALLS for x in inspect.signature(getattr(numba_flash, name)).parameters}
    for name, instead in INSTEAD.items():
        first = instead.replace("=", " ").replace(",", " ").replace(";", " ").split()[0]
        known = first in arguments or first == "nothing:" or hasattr(numba_flash, first.removeprefix("numba_flash."))
        assert known, f"{name}: {instead}"
