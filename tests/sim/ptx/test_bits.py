"""Bits of a word, and integers of 64 bits."""

import numpy as np
from helpers.instructions import launch
from numba import cuda

from numba_flash.ptx.sim import bits


def test_the_highest_bit_of_a_word():
    def kernel(words, out):
        out[cuda.threadIdx.x] = bits.highest(words[cuda.threadIdx.x])

    words, out = np.array([0, 1, 2, 3, 0x8000, 0xFFFF, 0x80000000, 0xFFFFFFFF], np.uint32), np.zeros(8, np.int32)
    launch(kernel, 8, words, out)
    np.testing.assert_array_equal(out, [-1, 0, 1, 1, 15, 15, 31, 31])


def test_how_many_bits_of_a_word_are_1():
    def kernel(words, out):
        out[cuda.threadIdx.x] = bits.count(words[cuda.threadIdx.x])

    words, out = np.array([0, 1, 6, 0x80000001, 0xFFFFFFFF], np.uint32), np.zeros(5, np.int32)
    launch(kernel, 5, words, out)
    np.testing.assert_array_equal(out, [0, 1, 2, 2, 32])


def test_a_wide_product_has_all_64_bits():
    def kernel(words, out):
        i = cuda.threadIdx.x
        out[i] = bits.multiply_wide(words[i], words[7 - i])

    words, out = np.array([0, 1, 2, 3, 0x8000, 0xFFFF, 0x80000000, 0xFFFFFFFF], np.uint32), np.zeros(8, np.uint64)
    launch(kernel, 8, words, out)
    np.testing.assert_array_equal(out, words.astype(np.uint64) * words[::-1])


def test_a_carry_is_pushed_in_at_the_low_end():
    def kernel(words, out):
        i = cuda.threadIdx.x
        out[i] = bits.push_carry(words[i], words[4 + i], words[8 + i])

    words = np.array([5, 5, 0x80000000, 1, 0, 0xFFFFFFFF, 0xFFFF0000, 0x7FFFFFFF, 0, 1, 0xFFFF, 0x80000000], np.uint32)
    out = np.zeros(4, np.uint32)
    launch(kernel, 4, words, out)
    np.testing.assert_array_equal(out, [10, 11, 0, 2])
