"""Dropout on a GPU."""

from contracts import dropout, suite

TestDropout = suite(dropout)
