"""Addresses of a cluster: a block's number, from 1 on, above a shared address. 0 stands for the thread's own block."""

ADDRESS_BITS = 24


def there(thread, place):
    """(block, shared address in it)."""
    above, address = divmod(int(place), 1 << ADDRESS_BITS)
    return (thread.turns.blocks[above - 1] if above else thread.block), address
