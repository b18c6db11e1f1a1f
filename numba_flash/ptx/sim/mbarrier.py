"""Stand-ins for ptx.mbarrier. Threads that wait sleep; the last arrival or the last byte wakes them."""

from .errors import InstructionError, name
from .now import current
from .places import there

MOST = 2**20 - 1  # arrivals, and bytes at a time


class Mbarrier:
    def __init__(self, address, count, number, maker):
        self.address, self.count, self.number, self.maker = address, count, number, maker
        self.made = maker.block.order.now(maker.number)
        self.fenced = False  # is known to the asynchronous proxy
        self.phase = 0
        self.left, self.bytes = count, 0  # arrivals and bytes that this phase still waits for
        self.clock = self.open_clock = None  # clocks of the arrivals: of this phase, of those that ended
        self.waiting = []

    def arrive(self, thread):
        if not self.left:
            raise InstructionError(f"an arrival more than the phase has: {self}")
        self.clock = thread.block.order.release(thread.number, self.clock)
        self.left -= 1
        self.check(thread.block)

    def transfer(self, count, block, column=None, epoch=0):
        """count more bytes to come, or less when they came; column, epoch: who wrote them (order.py)."""
        self.bytes += count
        if abs(self.bytes) > MOST:
            raise InstructionError(f"{self}: more than {MOST} bytes")
        if column is not None:
            if self.clock is None:
                self.clock = block.order.known[0] * 0
            self.clock[column] = max(self.clock[column], epoch)
        self.check(block)

    def check(self, block):
        """End the phase when all is there."""
        if self.left or self.bytes:
            return
        self.phase ^= 1
        self.left = self.count
        self.open_clock = self.clock.copy()
        waiting, self.waiting = self.waiting, []
        for thread in waiting:
            block.order.acquire(thread.number, self.open_clock)
            block.wake(thread)

    def __str__(self):
        state = f"{self.left} of {self.count} arrivals and {self.bytes} bytes are missing"
        return f"mbarrier {self.address:#x} (in a phase of parity {self.phase}, {state})"


def init(barrier, count):
    thread, address, count = current(), int(barrier), int(count)
    block = thread.block
    block.shared.words(address, 8, 8)
    if not 1 <= count <= MOST:
        raise InstructionError(f"an mbarrier counts 1 to {MOST} arrivals, not {count}")
    if address in block.mbarriers:
        raise InstructionError(f"{block.mbarriers[address]} is initialised a second time")
    block.mbarriers[address] = Mbarrier(address, count, block.order.new_mbarrier(), thread)


def arrive(barrier):
    thread = current()
    find(thread, barrier).arrive(thread)


def arrive_if(barrier, condition):
    if condition:
        arrive(barrier)


def arrive_there_if(place, condition):
    if condition:
        thread = current()
        block, address = there(thread, place)
        find(thread, address, block).arrive(thread)


def arrive_expect_tx(barrier, count):
    thread = current()
    mbarrier = find(thread, barrier)
    mbarrier.bytes += int(count)
    if not 0 <= int(count) <= MOST or mbarrier.bytes > MOST:
        raise InstructionError(f"{mbarrier}: 0 to {MOST} bytes can be expected, not {int(count)}")
    mbarrier.arrive(thread)


def arrive_expect_tx_if(barrier, count, condition):
    if condition:
        arrive_expect_tx(barrier, count)


def wait(barrier, parity):
    thread, parity = current(), int(parity)
    mbarrier = find(thread, barrier)
    if parity not in (0, 1):
        raise InstructionError(f"an mbarrier's phase has parity 0 or 1, not {parity}")
    if mbarrier.phase == parity:
        mbarrier.waiting.append(thread)
        return thread.block.wait(thread, _Waiting(mbarrier, parity))
    thread.block.order.acquire(thread.number, mbarrier.open_clock)
    return None


def find(thread, barrier, block=None):
    """The mbarrier at an address of the thread's block, or of another of its cluster, if the thread may know of it."""
    block = block or thread.block
    if not block.alive:
        raise InstructionError(f"block {block.rank} of the cluster has left the kernel, and its shared memory with it")
    mbarrier = block.mbarriers.get(int(barrier))
    if mbarrier is None:
        raise InstructionError(f"there is no mbarrier at shared address {int(barrier):#x}: none was initialised there")
    if block.order.known[thread.number, mbarrier.maker.number] < mbarrier.made:
        raise InstructionError(f"{mbarrier} was initialised by {name(mbarrier.maker)} with no barrier in between")
    return mbarrier


class _Waiting:
    """Describes a wait in a message, as the mbarrier is when the message is written."""

    def __init__(self, mbarrier, parity):
        self.mbarrier, self.parity = mbarrier, parity

    def __str__(self):
        return f"mbarrier.wait, parity {self.parity}, on {self.mbarrier}"
