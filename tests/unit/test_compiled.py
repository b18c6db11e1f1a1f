"""Compiling: every kernel for every GPU, without a GPU; and the disk cache."""

import dataclasses
import functools
import inspect
import warnings

import pytest
from helpers import compiler
from helpers.simt_kernels import FORWARD, PLAIN, local_bytes, of_rung

from numba_flash import mods, testing
from numba_flash.abi.arguments import types as parameter_types
from numba_flash.abi.parameters import StatesTile
from numba_flash.arrays import AUX_DTYPES
from numba_flash.config.simt_forward import V1Config, V2Config
from numba_flash.config.softmax import SOFTMAX
from numba_flash.config.tile_states import TileOrderConfig, TileStatesConfig
from numba_flash.functions.function import Function
from numba_flash.gpu import assembler, compiled
from numba_flash.problem.options import uses

pytestmark = compiler.needed

CONFIGS = [  # and the gates have the other ones
    *filter(local_bytes, FORWARD),
    *[kind(dtype, 128) for kind in SOFTMAX.values() for dtype in testing.DTYPES],
]
# The oldest that CUDA 13 knows, and one of each generation after it.
CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]


def name(config):
    return f"{config.kernel}-{config.dtype}-{getattr(config, 'head_dim', config.threads)}"


@functools.cache
def ptx(config):
    return compiled.to_ptx(config, (9, 0))


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=name)
def test_nothing_is_spilled_on_hopper(config):
    text = ptx(config)
    assert f".entry {compiled.entry_name(config)}(" in text and ".target sm_90" in text
    assert (".local" in text) == (local_bytes(config) > 0)
    made = assembler.assemble(text, "sm_90a")
    assert made.spill_bytes == 0 and made.stack_bytes <= local_bytes(config) and made.warnings == ()


# PTX for the oldest is what every later one takes, and making it is what takes seconds.
@pytest.mark.slow
@pytest.mark.parametrize("config", [SOFTMAX["blocked"]("float16", 128)], ids=name)
def test_every_gpu_from_turing_on(config):
    text = compiled.to_ptx(config, CAPABILITIES[0])
    for arch in map(compiled.architecture, CAPABILITIES):
        made = assembler.assemble(text, arch)
        assert made.spill_bytes == made.stack_bytes == 0 and made.warnings == (), arch
        assert made.cubin[:4] == b"\x7fELF", arch


def test_the_inner_loops_read_shared_memory_sixteen_bytes_at_a_time():
    assert "ld.shared.v4" in ptx(PLAIN)


def test_the_architecture_is_the_specific_one_from_hopper_on():
    assert [compiled.architecture(cc) for cc in CAPABILITIES] == [
        "sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a",
    ]  # fmt: skip


def reads(score, b, h, q_pos, k_pos, x, y, z):
    return score + (1.0 if x[k_pos] or y[k_pos] or z[k_pos] else 0.0)


def reads_a_number(score, b, h, q_pos, k_pos, x):
    return score * x[()]


@pytest.mark.parametrize(
    ("function", "aux"),
    [
        *[(reads, tuple((dtype, 1) for dtype in (AUX_DTYPES * 2)[i : i + 3])) for i in range(0, len(AUX_DTYPES), 3)],
        (reads_a_number, (("float32", 0),)),
    ],
)
def test_functions_may_read_arrays_of_every_dtype(function, aux):
    read = uses(score_mod=Function.of("score_mod", function), aux=aux)
    assert ".entry" in compiled.to_ptx(of_rung(V1Config, PLAIN, uses=read), (9, 0))


@pytest.mark.parametrize("of_keys", [False, True])
def test_what_runs_before_a_mask_mod(of_keys):
    tile, used = StatesTile(128, 64, 1, of_keys), uses(mask_mod=Function.of("mask_mod", mods.causal))
    states = TileStatesConfig(tile, "float32", used)
    for config in (states, TileOrderConfig.behind(states)):
        made = assembler.assemble(compiled.to_ptx(config, (8, 0)), "sm_80")
        assert made.spill_bytes == made.stack_bytes == 0 and made.warnings == ()


@pytest.mark.parametrize("kind", [V1Config, V2Config])
def test_parameters_match_the_kernels_def_line(kind):
    config = of_rung(kind, PLAIN)
    taken = inspect.signature(compiled.source(config).py_func).parameters
    assert list(taken) == [made.__name__ for made, _ in parameter_types(config)]


# The disk cache.


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A folder of its own for the cache of cubins."""
    monkeypatch.setenv("NUMBA_FLASH_CACHE_DIR", str(tmp_path))
    compiled._store.cache_clear()
    yield tmp_path
    compiled._store.cache_clear()


def entry(folder):
    """The file of the only entry; the store keeps small ones of its own beside it."""
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def test_what_was_written_is_found(cache):
    assert compiled.read_cache(PLAIN, "sm_90a") is None
    compiled.write_cache(PLAIN, "sm_90a", b"machine code" * 100)
    compiled._store.cache_clear()  # as in another process
    assert compiled.read_cache(PLAIN, "sm_90a") == b"machine code" * 100


# What a crash or a full disk leaves: nothing, a part, the wrong bytes, one bit.
@pytest.mark.parametrize("damage", ["empty", "short", "tail", "garbage", "bit"])
def test_a_damaged_entry_is_as_good_as_none(cache, damage):
    compiled.write_cache(PLAIN, "sm_90a", b"machine code" * 100)
    file = entry(cache)
    content = file.read_bytes()
    file.write_bytes(
        {
            "empty": b"",
            "short": content[:20],
            "tail": content[:-1],
            "garbage": bytes(len(content)),
            "bit": bytes([content[0] ^ 1]) + content[1:],
        }[damage]
    )
    compiled._store.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert compiled.read_cache(PLAIN, "sm_90a") is None
        compiled.write_cache(PLAIN, "sm_90a", b"new")
        assert compiled.read_cache(PLAIN, "sm_90a") == b"new"


# Each field by itself, one after the other: a kernel must never be taken for another one.
@pytest.mark.parametrize(
    "other",
    [
        dict(dtype="float16"), dict(head_dim=65), dict(head_dim_v=65), dict(tile_m=64),
        dict(tile_n=8), dict(pad=0), dict(write_lse=True), dict(uses=uses(softcap=True)),
        dict(uses=uses(bias="float32")), dict(uses=uses(bias="float16")), dict(q_offset_source="array"),
    ],
    ids=str,
)  # fmt: skip
def test_the_key_knows_every_field(other):
    assert compiled.key(PLAIN, "sm_90a") != compiled.key(dataclasses.replace(PLAIN, **other), "sm_90a")
    assert set(other) <= {field.name for field in dataclasses.fields(V2Config)}


def test_kernels_alike_but_in_name_are_not_taken_for_each_other():
    assert compiled.key(PLAIN, "sm_90a") != compiled.key(of_rung(V1Config, PLAIN), "sm_90a")


def test_the_key_knows_the_gpu_the_sources_and_the_compilers(monkeypatch):
    key = compiled.key(PLAIN, "sm_90a")
    assert key == compiled.key(dataclasses.replace(PLAIN), "sm_90a") != compiled.key(PLAIN, "sm_80")
    monkeypatch.setattr(compiled, "compilers", lambda: ("another numba",))
    other = compiled.key(PLAIN, "sm_90a")
    assert key != other == compiled.key(PLAIN, "sm_90a", ("another numba",))
    monkeypatch.setattr(compiled, "fingerprint", lambda room: "other sources")
    assert other != compiled.key(PLAIN, "sm_90a")


def test_a_folder_that_cannot_be_used_is_said_and_survived(tmp_path, monkeypatch):
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    monkeypatch.setenv("NUMBA_FLASH_CACHE_DIR", str(in_the_way / "below"))
    compiled._store.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="cannot use its cache folder .*Set NUMBA_FLASH_CACHE_DIR"):
            assert compiled.read_cache(PLAIN, "sm_90a") is None
        compiled.write_cache(PLAIN, "sm_90a", b"code")  # said once is enough: a warning would be an error here
    finally:
        compiled._store.cache_clear()
