"""Where wgmma finds its operands in panels of shared memory (ptx/fragments.py), in units of 16 bytes; and how one waits
for its products."""

from ...ptx import wgmma

describe_rows = wgmma.descriptor(16, 1024, 128)  # of an operand that is summed over along its rows; 16 is not used


def describe_columns(rows):
    """-> describe(address), of an operand of `rows` rows that is summed over along its columns."""
    return wgmma.descriptor(rows * 128, 1024, 128)


wait_all, wait_but_one, wait_but_two = (wgmma.wait_group(n) for n in range(3))  # for groups of products


def kind(config):
    return "f16" if config.dtype == "float16" else "bf16"


def column_steps(tile_rows, columns):
    """Steps of a product along the columns of a tile: 16 columns are 32 bytes of a panel's row, 64 are a panel."""
    return tuple(((x % 4) * 32 + (x // 4) * tile_rows * 128) >> 4 for x in range(columns // 16))


def row_steps(rows):
    """Steps of a product along the rows."""
    return tuple((y * 16 * 128) >> 4 for y in range(rows // 16))


def rows_by_rows(config, a_rows, b_rows, columns):
    """-> multiply(acc, a, b, add), a device function: acc (64, b_rows) <- A B^T of two tiles in shared memory, by their
    descriptors of rows. add: 1 adds it to acc, 0 overwrites acc."""
    a, b = column_steps(a_rows, columns), column_steps(b_rows, columns)
    return wgmma.product_shared(b_rows, kind(config), a, b, 0)


def fragment_by_tile(config, rows, columns):
    """-> multiply(acc, a, b, add), a device function: acc (64, columns) <- A B. A (64, rows) is in registers, B (rows,
    columns) in shared memory; b is its descriptor of columns."""
    return wgmma.product_registers(columns, kind(config), row_steps(rows), 1)
