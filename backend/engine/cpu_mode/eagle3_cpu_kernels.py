"""SGLang's small bookkeeping kernels in PyTorch, replaced at the one place through which every interpreted launch goes.

KERNELS maps a Triton kernel's name to a function of (grid, launch arguments by name); one that answers NotImplemented,
and every kernel without an entry, runs in the interpreter: slow, same result. EAGLE3_CPU_LOG_TRITON=1 prints those.
Each stands for the kernel of its own name in sglang/srt of 0.5.14, in the file named above it, and is compared with it
by tests/unit/test_cpu_ops.py.
"""

import ctypes
import os
import types

import torch
from eagle3_cpu_imports import after_import

KERNELS = {}


def kernel(function):
    """Register a replacement under the kernel's own name."""
    KERNELS[function.__name__] = function
    return function


# layers/attention/triton_ops/kv_indices.py:9
@kernel
def create_flashinfer_kv_indices_triton(grid, a):
    pools, lengths, ends = (x.tolist() for x in (a.req_pool_indices_ptr, a.page_kernel_lens_ptr, a.kv_indptr))
    starts = a.kv_start_idx.tolist() if a.kv_start_idx is not None else [0] * grid[0]
    for b in range(grid[0]):
        found = a.req_to_token_ptr[pools[b], starts[b] : starts[b] + lengths[b]]
        a.kv_indices_ptr[ends[b] : ends[b] + lengths[b]] = found


# model_executor/triton_ops/position.py:33
@kernel
def compute_position_kernel(grid, a):
    row = 0
    for b, count in enumerate(a.extend_seq_lens.tolist()[: grid[0]]):
        prefix = int(a.extend_prefix_lens[b]) if a.has_prefix else 0
        a.positions[row : row + count] = torch.arange(prefix, prefix + count)
        a.extend_start_loc[b] = row
        row += count


# mem_cache/triton_ops/common.py:9
@kernel
def write_req_to_token_pool_triton(grid, a):
    tables = (a.req_pool_indices, a.pre_lens, a.seq_lens, a.extend_lens, a.prefix_tensors)
    pools, prefixes, lengths, counts, pointers = (x.tolist() for x in tables)
    row = 0
    for b in range(grid[0]):
        slots, prefix = a.req_to_token_ptr[pools[b]], prefixes[b]
        if prefix:
            slots[:prefix] = _memory(pointers[b], 8 * prefix, torch.int64)
        slots[prefix : lengths[b]] = a.out_cache_loc[row : row + lengths[b] - prefix]
        row += counts[b]


# mem_cache/triton_ops/cache_move.py:53
@kernel
def copy_all_layer_kv_cache_tiled(grid, a):
    source, target = a.src_loc_ptr[: a.num_locs], a.tgt_loc_ptr[: a.num_locs]
    if torch.equal(source, target):
        return
    rows = int(max(source.max(), target.max())) + 1
    for pointer, stride in zip(a.data_ptrs.tolist(), a.strides.tolist(), strict=True):
        table = _memory(pointer, rows * stride, torch.uint8).view(rows, stride)
        table[target] = table[source]


# speculative/triton_ops/cache_locs.py:16
@kernel
def assign_req_to_token_pool(grid, a):
    for pool, start, end, row in _ranges(grid, a):
        a.req_to_token[pool, start:end] = a.out_cache_loc[row : row + end - start]


# speculative/triton_ops/cache_locs.py:303
@kernel
def assign_extend_cache_locs(grid, a):
    for pool, start, end, row in _ranges(grid, a):
        a.out_cache_loc[row : row + end - start] = a.req_to_token[pool, start:end]


# speculative/triton_ops/cache_locs.py:70
@kernel
def assign_draft_cache_locs_contiguous(grid, a):
    count = a.topk * a.speculative_num_steps
    pools, lengths = a.req_pool_indices.tolist(), a.seq_lens.tolist()
    for b, (pool, length) in enumerate(zip(pools[: grid[0]], lengths[: grid[0]], strict=True)):
        a.out_cache_loc[b * count : b * count + count] = a.req_to_token[pool, length : length + count]


# speculative/triton_ops/cache_locs.py:97
@kernel
def generate_draft_decode_kv_indices(grid, a):
    steps, batch, topk = grid
    if a.page_size != 1 and topk != 1:
        return NotImplemented
    pools, lengths, positions = (x.tolist() for x in (a.req_pool_indices, a.paged_kernel_lens, a.positions))
    for i in range(steps):
        count, out, at = i + 1, a.kv_indices[i], 0
        for b in range(batch):
            slots, length = a.req_to_token[pools[b]], lengths[b]
            for t in range(topk):
                first = length + t * steps
                out[at : at + length] = slots[:length]
                out[at + length : at + length + count] = slots[first : first + count]
                at += length + count
                entry = b * topk + t or batch * topk  # the kernel writes its last program's sum at the end
                a.kv_indptr[i, entry] = sum(positions[:entry]) + entry * count
    return None


# speculative/triton_ops/eagle.py:6
@kernel
def fill_bonus_tokens(grid, a):
    last = a.accept_lens[: grid[0]].long() - 1
    rows = torch.arange(grid[0]) * a.accept_stride
    a.bonus_tokens_ptr[: grid[0]] = a.accept_tokens.reshape(-1)[rows + last].to(a.bonus_tokens_ptr.dtype)


# speculative/triton_ops/eagle.py:25
@kernel
def fill_accept_out_cache_loc(grid, a):
    accepted = a.accept_index.reshape(-1)[: grid[0]]
    accepted = accepted[accepted > -1].long()
    a.accept_out_cache_loc[: len(accepted)] = a.out_cache_loc[accepted]


# mem_cache/triton_ops/mla_buffer.py:11
@kernel
def set_mla_kv_buffer_kernel(grid, a):
    parts = ((a.cache_k_nope_ptr, a.nope_dim), (a.cache_k_rope_ptr, a.rope_dim))
    rows = torch.cat([part.reshape(-1, width) for part, width in parts], dim=1)
    table = a.kv_buffer_ptr.view(a.kv_buffer_ptr.shape[0], -1)
    table[a.loc_ptr.reshape(-1)] = rows.to(a.kv_buffer_ptr.dtype)


def _memory(pointer, nbytes, dtype):
    """A tensor over raw memory: kernels are handed addresses, not tensors, for tables of tensors."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(pointer), dtype=dtype)


def _ranges(grid, a):
    """(request slot, start, end, row) of each request, `row` counting the entries before it."""
    pools, starts, ends = (x.tolist() for x in (a.req_pool_indices, a.start_offset, a.end_offset))
    row = 0
    for b in range(grid[0]):
        yield pools[b], starts[b], ends[b], row
        row += ends[b] - starts[b]


def install():
    """Every launch under TRITON_INTERPRET=1 is `InterpretedFunction.run`."""

    @after_import("triton.runtime.interpreter")
    def _patch(module):
        interpreted = module.InterpretedFunction.run
        log = os.environ.get("EAGLE3_CPU_LOG_TRITON")

        def run(self, *args, grid, warmup, **options):
            replacement = KERNELS.get(self.fn.__name__)
            if replacement and not warmup and self.fn.__module__.startswith("sglang."):
                arguments = types.SimpleNamespace(**dict(zip(self.arg_names, args, strict=False)), **options)
                with torch.no_grad():
                    if replacement(grid, arguments) is not NotImplemented:
                        return None
            if log:
                print("interpreted Triton kernel:", self.fn.__module__, self.fn.__name__, flush=True)
            return interpreted(self, *args, grid=grid, warmup=warmup, **options)

        module.InterpretedFunction.run = run
