"""Two shims by which TRL's trainers make their steps without a GPU. Imported in the trainers' environment only.

`get_peak_flops_per_device` asks `torch.cuda` for the device's name; here nobody asks. The attention of packed rows,
`tree_fa3`, is a kernel for GPUs; here it is torch's own attention, segment by segment.
"""

from __future__ import annotations

import torch
from trl.experimental.async_grpo import async_grpo_trainer, packing


class VarlenAttention:
    """The one function of the flash-attention package that TRL calls, with the parameters that it passes."""

    @staticmethod
    def flash_attn_varlen_func(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        _max_q: int,
        _max_k: int,
        *,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
    ) -> torch.Tensor:
        """Attend from the tokens of each segment to its own path: its last query sees its last key."""
        assert causal
        assert window_size == (-1, -1)
        repeat = query.shape[1] // key.shape[1]
        out = []
        for i in range(len(cu_seqlens_q) - 1):
            q = query[cu_seqlens_q[i] : cu_seqlens_q[i + 1]].transpose(0, 1)
            k, v = (
                x[cu_seqlens_k[i] : cu_seqlens_k[i + 1]].repeat_interleave(repeat, dim=1).transpose(0, 1)
                for x in (key, value)
            )
            n, m = q.shape[1], k.shape[1]
            visible = torch.ones(n, m, dtype=torch.bool).tril(m - n)
            scores = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=softmax_scale)
            out.append(scores.transpose(0, 1))
        return torch.cat(out)


def install() -> None:
    """Put the shims in place, for the rest of the process."""
    async_grpo_trainer.get_peak_flops_per_device = lambda _accelerator, _dtype: None
    packing._flash_attn = lambda: VarlenAttention
