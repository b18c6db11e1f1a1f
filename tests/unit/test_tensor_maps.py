"""Tensor maps without a GPU: what is legal, and when the address alone is put in anew."""

import dataclasses
import types

import pytest

from numba_flash.abi.tensor_maps import SIZE, TensorMap, fits
from numba_flash.gpu import tensor_maps as encoding
from numba_flash.gpu.tensor_maps import encode

PLAIN = TensorMap("float16", (64, 1000, 8, 2), (128, 128_000, 1_024_000), (64, 128, 1, 1))


def test_what_is_legal():
    assert fits(PLAIN) is None
    # heads outside of the sequence or inside, extents of one whatever their stride, rows that overlap, no swizzle
    for other in (
        dict(strides_bytes=(1024, 128, 1_024_000)),
        dict(shape=(64, 1000, 1, 1), strides_bytes=(128, 0, -3)),
        dict(strides_bytes=(16, 128, 128)),
        dict(dtype="bfloat16", swizzle_bytes=0, box=(256, 256, 1, 1)),
    ):
        assert fits(dataclasses.replace(PLAIN, **other)) is None


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (dict(dtype="float32"), "not float32"),
        (dict(shape=(64,), strides_bytes=(), box=(64,)), "2 to 5 dimensions"),
        (dict(strides_bytes=(128, 128_000)), "2 to 5 dimensions"),
        (dict(shape=(64, 0, 8, 2)), "1 to 2.*32, not 0"),
        (dict(shape=(64, 2**32 + 1, 8, 2)), "not 4294967297"),
        (dict(strides_bytes=(130, 128_000, 1_024_000)), "multiple of 16 bytes.* not 130"),
        (dict(strides_bytes=(128, 0, 1_024_000)), "above 0.* not 0"),
        (dict(strides_bytes=(-128, 128_000, 1_024_000)), "above 0.* not -128"),
        (dict(strides_bytes=(128, 2**40, 1_024_000)), "below 2.*40, not 1099511627776"),
        (dict(box=(64, 257, 1, 1)), "1 to 256 elements.* not 257"),
        (dict(box=(128, 128, 1, 1)), "box row of 256 bytes.*swizzle, 128"),
        (dict(box=(12, 128, 1, 1), swizzle_bytes=32), "box row of 24 bytes.*multiple of 16"),
        (dict(swizzle_bytes=100), "swizzle, 100"),
        (dict(l2_bytes=512), "not 512"),
    ],
    ids=str,
)
def test_what_is_not_legal_is_said(other, reason):
    import re

    assert re.search(reason, fits(dataclasses.replace(PLAIN, **other)))


@pytest.fixture
def driver(monkeypatch):
    """An encoder that keeps the address where `address_at` says; it counts its calls."""
    driver = pytest.importorskip("cuda.bindings.driver", reason="needs numba-flash[cu13]")
    fake = types.SimpleNamespace(address_at=0, calls=[])

    def encode_tiled(dtype, rank, address, extents, strides, box, steps, interleave, swizzle, l2, fill):
        fake.calls.append((address, dtype.name, rank, *[[int(x) for x in y] for y in (extents, strides, box, steps)]))
        words = [7] * 16
        words[fake.address_at] = address
        return driver.CUresult.CUDA_SUCCESS, types.SimpleNamespace(opaque=words)

    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", encode_tiled)
    encoding._encoded.cache_clear()
    yield fake
    encoding._encoded.cache_clear()


def words(encoded):
    assert len(encoded) == SIZE
    return [int.from_bytes(encoded[8 * n : 8 * n + 8], "little") for n in range(16)]


def test_a_map_is_encoded_once_and_readdressed(driver):
    tensor_map = dataclasses.replace(PLAIN, shape=(64, 1000, 1, 2))
    for address in (0x7F0000000010, 0x7F0000000020):
        assert words(encode(tensor_map, address)) == [address, *[7] * 15]
    assert len(driver.calls) == 2  # the two probes
    dtype, rank, extents, strides, box, steps = driver.calls[0][1:]
    assert (dtype, rank, extents) == ("CU_TENSOR_MAP_DATA_TYPE_FLOAT16", 4, [64, 1000, 1, 2])
    assert strides == [128, 16, 1_024_000] and box == [64, 128, 1, 1] and steps == [1, 1, 1, 1]


def test_an_address_in_another_place_is_noticed(driver):
    driver.address_at = 3
    tensor_map = dataclasses.replace(PLAIN)
    for address in (0x7F0000000010, 0x7F0000000020):
        assert words(encode(tensor_map, address)) == [7, 7, 7, address, *[7] * 12]


def test_what_cannot_be_encoded_raises(driver, monkeypatch):
    with pytest.raises(ValueError, match="multiple of 16 bytes, not at address 0x8"):
        encode(PLAIN, 8)
    with pytest.raises(ValueError, match="not float32"):
        encode(dataclasses.replace(PLAIN, dtype="float32"), 16)
