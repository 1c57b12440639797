"""SGLang's two Triton attention entry points in PyTorch: 92 % of an interpreted EAGLE-3 step was spent in them.

Per sequence: gather keys and values by the index table, then scaled_dot_product_attention (grouped heads, MLA shapes,
prefix + extend, causal or a tree's own mask). Options outside that fall through to the interpreted kernel.

Legend: N query rows, M key rows, H query heads, G key/value heads, D head width.
"""

import torch
import torch.nn.functional as functional
from eagle3_cpu_imports import after_import


def _attend(q_NHD, k_MGD, v_MGD, out_NHD, scale, mask_NM=None, causal=False):
    k_MGD, v_MGD = k_MGD.to(q_NHD.dtype), v_MGD.to(q_NHD.dtype)
    q_HND, k_GMD, v_GMD = (x.transpose(0, 1).unsqueeze(0) for x in (q_NHD, k_MGD, v_MGD))
    grouped = q_NHD.shape[1] != k_MGD.shape[1]
    found = functional.scaled_dot_product_attention(
        q_HND, k_GMD, v_GMD, attn_mask=mask_NM, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    out_NHD.copy_(found[0].transpose(0, 1))


def _extend(original):
    """For extend_attention_fwd, sglang/srt/layers/attention/triton_ops/extend_attention.py:571 (prefill, verify)."""

    def extend_attention_fwd(
        q,
        k,
        v,
        o,
        k_buffer,
        v_buffer,
        qo_indptr,
        kv_indptr,
        kv_indices,
        custom_mask,
        is_causal,
        mask_indptr,
        max_len_extend,
        k_scale,
        v_scale,
        sm_scale=None,
        logit_cap=0.0,
        skip_prefix_custom_mask=True,
        sliding_window_size=-1,
        sinks=None,
        window_kv_offsets=None,
        xai_temperature_len=-1,
    ):
        plain = k_scale == 1 and v_scale == 1 and logit_cap <= 0 and sliding_window_size <= 0
        if not plain or sinks is not None or xai_temperature_len > 0:
            return original(
                q, k, v, o, k_buffer, v_buffer, qo_indptr, kv_indptr, kv_indices, custom_mask, is_causal, mask_indptr,
                max_len_extend, k_scale, v_scale, sm_scale, logit_cap, skip_prefix_custom_mask, sliding_window_size,
                sinks, window_kv_offsets, xai_temperature_len,
            )  # fmt: skip
        scale = sm_scale or q.shape[-1] ** -0.5
        starts, prefixes = qo_indptr.tolist(), kv_indptr.tolist()
        masks = mask_indptr.tolist() if custom_mask is not None else None
        for b in range(len(starts) - 1):
            rows, prefix = slice(starts[b], starts[b + 1]), prefixes[b + 1] - prefixes[b]
            count = rows.stop - rows.start
            if count == 0:
                continue
            keys, values = k[rows], v[rows]
            if prefix:
                cached = kv_indices[prefixes[b] : prefixes[b + 1]]
                keys = torch.cat([k_buffer[cached].to(k.dtype), keys])
                values = torch.cat([v_buffer[cached].to(v.dtype), values])
            mask = _mask(custom_mask, masks, b, count, prefix, is_causal, skip_prefix_custom_mask)
            _attend(q[rows], keys, values, o[rows], scale, mask, causal=mask is None and bool(is_causal) and count > 1)
        return None

    return extend_attention_fwd


def _mask(custom_mask, masks, b, count, prefix, causal, skip_prefix):
    """The mask of one sequence [count, prefix + count], None where plain causal or full attention will do."""
    if masks is None:
        if not (causal and prefix and count > 1):
            return None
        return torch.ones(count, prefix + count, dtype=torch.bool).tril(prefix)
    mask = custom_mask[masks[b] : masks[b] + count * (prefix + count)].view(count, prefix + count).bool()
    if skip_prefix and prefix:
        mask = torch.cat([mask.new_ones(count, prefix), mask[:, prefix:]], dim=1)
    return mask


def _decode(original):
    """For decode_attention_fwd, sglang/srt/layers/attention/triton_ops/decode_attention.py:745 (draft steps)."""

    def decode_attention_fwd(
        q,
        k_buffer,
        v_buffer,
        o,
        kv_indptr,
        kv_indices,
        attn_logits,
        attn_lse,
        num_kv_splits,
        max_kv_splits,
        sm_scale,
        k_scale,
        v_scale,
        logit_cap=0.0,
        sinks=None,
        xai_temperature_len=-1,
        **options,
    ):
        if k_scale != 1 or v_scale != 1 or logit_cap > 0 or sinks is not None or xai_temperature_len > 0:
            return original(
                q, k_buffer, v_buffer, o, kv_indptr, kv_indices, attn_logits, attn_lse, num_kv_splits, max_kv_splits,
                sm_scale, k_scale, v_scale, logit_cap, sinks, xai_temperature_len, **options,
            )  # fmt: skip
        ends = kv_indptr.tolist()
        for b in range(q.shape[0]):
            cached = kv_indices[ends[b] : ends[b + 1]]
            _attend(q[b : b + 1], k_buffer[cached], v_buffer[cached], o[b : b + 1], sm_scale)
        return None

    return decode_attention_fwd


def install():
    """Replace both before TritonAttnBackend imports them."""

    @after_import("sglang.srt.layers.attention.triton_ops.extend_attention")
    def _patch_extend(module):
        module.extend_attention_fwd = _extend(module.extend_attention_fwd)

    @after_import("sglang.srt.layers.attention.triton_ops.decode_attention")
    def _patch_decode(module):
        module.decode_attention_fwd = _decode(module.decode_attention_fwd)
