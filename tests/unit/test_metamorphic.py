"""Relations between calls, on the oracle and on the CPU rung."""

from metamorphic import *  # noqa: F403
