"""Names of dtypes as configurations and KV layouts spell them, and the torch dtypes they mean."""

import torch

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return the torch dtype that `dtype` names; raises ValueError for one that no KV cache can have."""
    if isinstance(dtype, torch.dtype):
        dtype_name(dtype)
        return dtype
    if dtype not in TORCH_DTYPES:
        msg = f"dtype {dtype!r} is not one of {sorted(TORCH_DTYPES)}"
        raise ValueError(msg)
    return TORCH_DTYPES[dtype]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of `dtype`; raises ValueError for one that no KV cache can have."""
    for name, known in TORCH_DTYPES.items():
        if known == dtype:
            return name
    msg = f"dtype {dtype} is not one of {sorted(TORCH_DTYPES)}"
    raise ValueError(msg)
