"""Drops weights of a panel on the CPU (compiled), by factors of 0 or 1 / (1 - p) and the rule of
kernels/score/kept_weights.py."""

# mypy: ignore-errors

import numpy as np

from . import plan as slot
from .elements import INT, compiled
from .panel import take_places
from .vectors.build import load, store

ROUNDS = 7
LOW, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
LOWER, UPPER = np.uint64(0xFFFF), np.uint64(16)  # a word: 16 bits of a key, and those of the key 8 further
MULTIPLIER, OTHER_MULTIPLIER = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
WEYL, OTHER_WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)


@compiled
def random_words(seed, keys, q_pos, h, b):
    """Philox 4x32: four words of 32 bits, each in 64 bits, from one counter."""
    x, y, z, w = np.uint64(keys) & LOW, np.uint64(q_pos) & LOW, np.uint64(h) & LOW, np.uint64(b) & LOW
    key, other = seed & LOW, seed >> HALF
    for _ in range(ROUNDS):
        first, second = x * MULTIPLIER, z * OTHER_MULTIPLIER
        x, y = (second >> HALF) ^ y ^ key, second & LOW
        z, w = (first >> HALF) ^ w ^ other, first & LOW
        key, other = (key + WEYL) & LOW, (other + OTHER_WEYL) & LOW
    return x, y, z, w


@compiled
def count_one(x, key, keys, r, width, number, end, kept, zero):
    """Scales or drops the element of x (keys, width) at a key and row r, if the key is in [0, keys)."""
    if 0 <= key and key < keys:
        store(x, key * width + r, load(x, key * width + r, zero) * kept if number < end else zero)


@compiled
def count_two(x, key, keys, r, width, word, end, kept, zero):
    """Does `count_one` for the two keys of a word."""
    count_one(x, key, keys, r, width, word & LOWER, end, kept, zero)
    count_one(x, key + 8, keys, r, width, word >> UPPER, end, kept, zero)


@compiled
def count(x, places, keys, key0, panel, plan, pointers, zero):
    """x (keys, width) <- 0 where a weight is dropped, whatever x was, else x times the plan's KEPT_COUNT.

    For keys from key0 and a panel's rows; places: work space for two int64 numbers of each.
    """
    width = panel.width
    take_places(places, panel)
    seed = np.uint64(load(pointers, load(plan, slot.SEED_POINTER, INT), INT))
    end, kept = np.uint64(2**16 - load(plan, slot.DROPPED, INT)), type(zero)(load(plan, slot.KEPT_COUNT, 0.0))
    for r in range(panel.rows):
        q_pos, head = load(places, r, INT), load(places, width + r, INT)
        for block in range(key0 >> 4, (key0 + keys + 15) >> 4):  # blocks of 16 keys; 8 keys share a counter
            for half in range(2):
                words = random_words(seed, block << 1 | half, q_pos, head, panel.b)
                key = (block << 4) + 4 * half - key0
                count_two(x, key, keys, r, width, words[0], end, kept, zero)
                count_two(x, key + 1, keys, r, width, words[1], end, kept, zero)
                count_two(x, key + 2, keys, r, width, words[2], end, kept, zero)
                count_two(x, key + 3, keys, r, width, words[3], end, kept, zero)
