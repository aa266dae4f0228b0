"""Number formats of a parameter's state."""

from __future__ import annotations

import torch

FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Parameters that the kernels take; others, such as float64, keep their state in their own format."""

_PREVIOUS = {torch.float16: torch.bfloat16}


def state_dtypes(dtype: torch.dtype, moments: torch.dtype) -> dict[str, torch.dtype]:
    """Format of each state tensor of a parameter, masters aside; `moments` is that of m and v in kernels.

    The previous gradient is stored without the loss scale, where fp16 ends at 6e-8: of fp16 gradients it
    is kept in bfloat16, which has the range of fp32 in as many bytes.
    """
    if dtype not in FUSED_DTYPES:
        return dict.fromkeys(("exp_avg", "exp_avg_diff", "exp_avg_sq", "g_prev"), dtype)
    return {
        "exp_avg": moments,
        "exp_avg_diff": moments,
        "exp_avg_sq": torch.float32,
        "g_prev": _PREVIOUS.get(dtype, dtype),
    }
