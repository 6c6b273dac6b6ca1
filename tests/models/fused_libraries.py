"""Functions with the documented signatures of flash-attn, xFormers and varlen_attn, computed in plain PyTorch."""

import types

import torch
from torch import Tensor, nn
from ways import D, E, H

WIDTH = 3


def dense(q, k, v, scale, allowed, cap=0.0, slopes=None, p=0.0):
    """[n, h, d] of one sequence → [n, h, e] and the weights [h, n, m]; the last query is at the last key."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if cap:
        scores = cap * torch.tanh(scores / cap)
    n, m = scores.shape[1:]
    distance = torch.arange(m) - (torch.arange(n)[:, None] + m - n)
    if slopes is not None:
        scores = scores - slopes[:, None, None] * distance.abs()
    weights = scores.masked_fill(~allowed(distance), -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("hnm,mhe->nhe", torch.nn.functional.dropout(weights, p), v), weights


def in_window(causal, window):
    left, right = (10**6 if size is None or size < 0 else size for size in window)
    return lambda distance: (distance >= -left) & (distance <= (0 if causal else right))


def _of(tensors, scale, causal, window, softcap, slopes, p):
    allowed = in_window(causal, window)
    return [dense(*one, scale, allowed, softcap, slopes, p) for one in tensors]


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    rows = _of(zip(q, k, v, strict=True), softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p)
    out = torch.stack([one[0] for one in rows])
    return (out, None, None) if return_attn_probs else out


def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0):
    return flash_attn_func(*qkv.unbind(2), dropout_p, softmax_scale, causal, window_size, softcap)


def flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
    return flash_attn_func(q, *kv.unbind(2), dropout_p, softmax_scale, causal, window_size)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    parts = zip(*(x.tensor_split(cu.tolist()[1:-1]) for x, cu in (
        (q, cu_seqlens_q), (k, cu_seqlens_k), (v, cu_seqlens_k))), strict=True)  # fmt: skip
    rows = _of(parts, softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p)
    return torch.cat([one[0] for one in rows])


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
):  # fmt: skip
    outs = []
    for i, length in enumerate(cache_seqlens.tolist()):
        if k is not None:
            k_cache[i, length : length + k.shape[1]], v_cache[i, length : length + k.shape[1]] = k[i], v[i]
            length += k.shape[1]
        one = (q[i], k_cache[i, :length], v_cache[i, :length])
        outs += [row[0] for row in _of([one], softmax_scale, causal, window_size, softcap, None, 0.0)]
    return torch.stack(outs)


def flash_attn() -> dict[str, types.ModuleType]:
    """The package, whose functions lie in a module and are exported by another."""
    package, interface = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.flash_attn_interface")
    for one in (
        flash_attn_func, flash_attn_qkvpacked_func, flash_attn_kvpacked_func, flash_attn_varlen_func,
        flash_attn_with_kvcache,
    ):  # fmt: skip
        for module in (package, interface):
            setattr(module, one.__name__, one)
    return {"flash_attn": package, "flash_attn.flash_attn_interface": interface}


class LowerTriangularMask:
    """Aligned to the first key, unlike the others."""

    def materialize(self, shape, dtype=torch.float32, device="cpu"):
        return torch.full(shape, -torch.inf, dtype=dtype, device=device).triu(1)


class LowerTriangularFromBottomRightMask:
    def materialize(self, shape, dtype=torch.float32, device="cpu"):
        return torch.full(shape, -torch.inf, dtype=dtype, device=device).triu(1 + shape[-1] - shape[-2])


class LocalAttentionFromBottomRightMask:
    def __init__(self, window_left, window_right):
        self.window_left, self.window_right = window_left, window_right

    def materialize(self, shape, dtype=torch.float32, device="cpu"):
        n, m = shape[-2:]
        distance = torch.arange(m) - (torch.arange(n)[:, None] + m - n)
        hidden = (distance < -self.window_left) | (distance > self.window_right)
        return torch.zeros(shape, dtype=dtype).masked_fill(hidden, -torch.inf)


class BlockDiagonalMask:
    def __init__(self, starts_q, starts_k):
        self.q_seqinfo, self.k_seqinfo = (types.SimpleNamespace(seqstart_py=starts) for starts in (starts_q, starts_k))

    def materialize(self, shape, dtype=torch.float32, device="cpu"):
        mask = torch.full(shape, -torch.inf, dtype=dtype)
        starts_q, starts_k = self.q_seqinfo.seqstart_py, self.k_seqinfo.seqstart_py
        for i in range(len(starts_q) - 1):
            mask[starts_q[i] : starts_q[i + 1], starts_k[i] : starts_k[i + 1]] = 0
        return mask


class BlockDiagonalCausalMask(BlockDiagonalMask):
    def materialize(self, shape, dtype=torch.float32, device="cpu"):
        return super().materialize(shape, dtype) + torch.full(shape, -torch.inf, dtype=dtype).triu(1)


def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
    lone = query.ndim == 3
    q, k, v = (x.unsqueeze(2) if lone else x for x in (query, key, value))
    groups = q.shape[2:4] if q.ndim == 5 else None
    q, k, v = (x.flatten(2, 3) if groups else x for x in (q, k, v))
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if attn_bias is not None:
        bias = attn_bias if isinstance(attn_bias, Tensor) else attn_bias.materialize(scores.shape[-2:], scores.dtype)
        scores = scores + (bias[:, None] if lone and bias.ndim == 3 else bias)
    weights = torch.nn.functional.dropout(scores.softmax(-1), p)
    out = torch.einsum("bhnm,bmhe->bnhe", weights, v)
    return out.squeeze(2) if lone else out.unflatten(2, groups) if groups else out


def xformers() -> dict[str, types.ModuleType]:
    """xformers.ops and what it exports from."""
    package, ops, fmha = (types.ModuleType(name) for name in ("xformers", "xformers.ops", "xformers.ops.fmha"))
    ops.memory_efficient_attention = fmha.memory_efficient_attention = memory_efficient_attention
    package.ops, ops.fmha = ops, fmha
    return {"xformers": package, "xformers.ops": ops, "xformers.ops.fmha": fmha}


def varlen_on_a_cpu(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, scale=None, window_size=None,
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    """The kernel that PyTorch has for GPUs only."""
    outs = []
    for i in range(len(cu_seq_q) - 1):
        start, stop = int(cu_seq_k[i]), int(cu_seq_k[i + 1])
        stop = stop if seqused_k is None else start + int(seqused_k[i])
        one = query[int(cu_seq_q[i]) : int(cu_seq_q[i + 1])], key[start:stop], value[start:stop]
        outs.append(dense(*one, scale, in_window(False, window_size or (-1, -1)))[0])
    out = torch.cat(outs)
    return out, out.new_zeros(query.shape[1], len(query), dtype=torch.float), torch.zeros(2, dtype=torch.uint64)


class Model(nn.Module):
    """q, k, v [b, n, h, d] of a function; two KV heads for four query heads if `grouped`."""

    def __init__(self, function, grouped=False, context=None):
        super().__init__()
        self.heads, self.kv, self.function, self.context = (4, 2, function, context) if grouped else (
            H, H, function, context)  # fmt: skip
        self.q, self.k, self.v = (nn.Linear(E, heads * D) for heads in (self.heads, self.kv, self.kv))

    def forward(self, x):
        y = x if self.context is None else x[:, : self.context]
        q, k, v = self.q(x), self.k(y), self.v(y)
        return self.function(*(z.unflatten(-1, (-1, D)) for z in (q, k, v)))
