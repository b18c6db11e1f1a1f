"""The dtypes of elements: how many bytes each has, and in what kernels compute with it."""

ITEM_SIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "bool": 1, "int32": 4}
ITEM_SIZE |= {"int8": 1, "int16": 2, "int64": 8, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8}
COMPUTE_DTYPE = {"float16": "float32", "bfloat16": "float32", "float32": "float32", "float64": "float64"}
OF_TORCH = {"float16": "half", "float32": "float", "float64": "double", "int32": "int", "int64": "long"}  # its methods


def conversion(name: str, family: str, dtype: str) -> str:
    """What an error says of an array that is to have another dtype."""
    method = f"{OF_TORCH.get(dtype, dtype)}()" if family == "torch" else f"astype({dtype!r})"
    return f"convert it first, as with {name}.{method}"
