"""How many registers each warp may use. setmaxnreg moves them between the warpgroups of a block."""

from .errors import InstructionError

REGISTERS = 65536  # of a multiprocessor


class Registers:
    def __init__(self):
        self.limits, self.asked, self.waiting = {}, {}, []

    def set(self, thread, registers, what):
        warp, lane = divmod(thread, 32)
        self.limits[warp] = registers
        if lane == 0:
            self.asked.setdefault(warp, []).append(f"{what} {registers}")

    def fit(self, warp, registers, warps):
        """Whether the block has registers left for this warp to have so many; all begin with an equal share."""
        share = REGISTERS // (32 * warps) // 8 * 8
        others = sum(self.limits.get(other, share) for other in range(warps) if other != warp)
        return 32 * (others + registers) <= REGISTERS

    def check(self, warps):
        """setmaxnreg is for whole warpgroups."""
        for warp, asked in self.asked.items():
            first = warp // 4 * 4
            for other in range(first, min(first + 4, warps)):
                if self.asked.get(other) != asked:
                    raise InstructionError(
                        f"warp {warp} executed setmaxnreg {', '.join(asked)} and warp {other} of the same warpgroup "
                        f"{', '.join(self.asked.get(other, ['nothing']))}; all of a warpgroup must execute the same"
                    )
