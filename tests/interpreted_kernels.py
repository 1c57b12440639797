"""SGLang's own Triton kernels in Triton's interpreter against the CPU mode's replacements, on random inputs.

Run as a process of its own with the CPU mode on PYTHONPATH, TRITON_INTERPRET=1 and EAGLE3_CPU_SLOW=1 (the replacements
stay out of the interpreter's way); prints one JSON object, operation → largest difference. See unit/test_cpu_ops.py.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from eagle3_cpu_attention import _decode, _extend
from eagle3_cpu_kernels import KERNELS
from sglang.srt.layers.attention.triton_ops import decode_attention, extend_attention, kv_indices
from sglang.srt.mem_cache.triton_ops import cache_move, common, mla_buffer
from sglang.srt.model_executor.triton_ops import position
from sglang.srt.speculative.triton_ops import cache_locs, eagle
from torch import Tensor

POOL = 2000
SLOTS = 600
worst: dict[str, float] = defaultdict(float)


def note(name: str, one: Tensor, other: Tensor) -> None:
    worst[name] = max(worst[name], float((one.float() - other.float()).abs().max()))


def compare(
    kernel: Any, grid: tuple[int, ...], make: Callable[[], list[Any]], outputs: Sequence[int], **options: Any
) -> None:
    """Launch the kernel and call its replacement on equal inputs; `outputs` are the arguments that they write."""
    name = kernel.fn.__name__
    seed = random.randrange(1 << 30)
    written = []
    for replaced in (False, True):
        random.seed(seed)
        torch.manual_seed(seed)
        arguments = make()
        if replaced:
            named = SimpleNamespace(**dict(zip(kernel.arg_names, arguments, strict=False)), **options)
            assert KERNELS[name](grid, named) is not NotImplemented
        else:
            kernel[grid](*arguments, **options)
        written.append([arguments[i] for i in outputs])
    for one, other in zip(*written, strict=True):
        note(name, one, other)


def numbers(count: int, low: int, high: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([random.randint(low, high) for _ in range(count)], dtype=dtype)


def table() -> Tensor:
    """Request → token slots: every entry tells its place."""
    return torch.arange(8 * POOL, dtype=torch.int32).view(8, POOL).clone()


def requests(count: int) -> Tensor:
    return torch.tensor(random.sample(range(8), count))


def ends(lengths: Tensor | Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *torch.as_tensor(lengths).cumsum(0).tolist()], dtype=dtype)


def bookkeeping(batch: int) -> None:
    """The kernels that fill index tables, for one batch size."""
    keep: list[Tensor] = []  # tensors whose addresses the kernels are given

    def indices() -> list[Any]:
        lengths = numbers(batch, 1, 900)
        starts = numbers(batch, 0, 50) if batch == 2 else None
        filled = torch.full((int(lengths.sum()),), -7, dtype=torch.int64)
        return [table(), requests(batch), lengths, ends(lengths), starts, filled, POOL]

    compare(kv_indices.create_flashinfer_kv_indices_triton, (batch,), indices, [5])

    for has_prefix in (True, False):

        def positions(has_prefix: bool = has_prefix) -> list[Any]:
            lengths = numbers(batch, 1, 700, torch.int32)
            out = torch.zeros(int(lengths.sum()), dtype=torch.int64)
            return [out, torch.zeros(batch, dtype=torch.int32), numbers(batch, 0, 90, torch.int32), lengths, has_prefix]

        compare(position.compute_position_kernel, (batch,), positions, [0, 1])

    def pool() -> list[Any]:
        prefixes, counts = numbers(batch, 0, 600), numbers(batch, 1, 600)
        cached = [torch.arange(int(n)) + 100_000 for n in prefixes]
        keep.extend(cached)
        pointers = torch.tensor([tensor.data_ptr() for tensor in cached], dtype=torch.uint64)
        fresh = torch.arange(int(counts.sum())) + 200_000
        return [table(), requests(batch), pointers, prefixes, prefixes + counts, counts, fresh, POOL]

    compare(common.write_req_to_token_pool_triton, (batch,), pool, [0])

    def ranges(out: Callable[[int], Tensor]) -> list[Any]:
        starts = numbers(batch, 0, 600)
        stops = starts + numbers(batch, 1, 90)
        return [requests(batch), table(), starts, stops, out(int((stops - starts).sum())), POOL, 4]

    compare(cache_locs.assign_req_to_token_pool, (batch,), lambda: ranges(lambda n: torch.arange(n) + 300_000), [1])
    compare(
        cache_locs.assign_extend_cache_locs, (batch,), lambda: ranges(lambda n: torch.zeros(n, dtype=torch.int64)), [4]
    )

    def mla() -> list[Any]:
        rows = (torch.randn(batch, 1, 64), torch.randn(batch, 1, 32))
        return [torch.zeros(50, 1, 96), *rows, torch.randperm(50)[:batch], 96, 64, 32, 64, 32]

    compare(mla_buffer.set_mla_kv_buffer_kernel, (batch, 1), mla, [0], BLOCK=128)


def drafting(batch: int) -> None:
    """The kernels around drafting and acceptance, for one batch size."""
    for topk, steps in ((1, 3), (4, 3), (2, 5)):

        def slots(topk: int = topk, steps: int = steps) -> list[Any]:
            out = torch.zeros(batch * topk * steps, dtype=torch.int64)
            return [requests(batch), table(), numbers(batch, 1, 600), out, POOL, topk, steps]

        compare(cache_locs.assign_draft_cache_locs_contiguous, (batch,), slots, [3])

        def tree(topk: int = topk, steps: int = steps) -> list[Any]:
            lengths = numbers(batch, 1, 600)
            width = 8 * topk + 1
            filled = torch.full((steps, 20_000), -3, dtype=torch.int64)
            pointers = torch.zeros(steps, width, dtype=torch.int32)
            head = [requests(batch), table(), lengths, filled, pointers, lengths.repeat_interleave(topk)]
            return [*head, POOL, 20_000, width, 4, 8, 16, 1]

        compare(cache_locs.generate_draft_decode_kv_indices, (steps, batch, topk), tree, [3, 4])

    def bonus() -> list[Any]:
        tokens = torch.arange(batch * 4, dtype=torch.int32).view(batch, 4) + 50
        return [tokens, numbers(batch, 1, 4, torch.int32), torch.zeros(batch, dtype=torch.int32), 4]

    compare(eagle.fill_bonus_tokens, (batch,), bonus, [2])

    def accepted() -> list[Any]:
        index = torch.full((batch, 4), -1, dtype=torch.int32)
        for b in range(batch):
            count = random.randint(1, 4)
            index[b, :count] = torch.tensor(sorted(random.sample(range(8), count))) + 8 * b
        return [index, torch.arange(batch * 8) + 900, torch.zeros(batch * 4, dtype=torch.int64), 16]

    compare(eagle.fill_accept_out_cache_loc, (batch * 4,), accepted, [2])


def cache_copies() -> None:
    """Rows moved inside three layers' caches, which the kernel is given by address."""
    buffers: list[list[Tensor]] = []
    source, target = torch.randperm(100)[:7], torch.randperm(100)[:7]
    for replaced in (False, True):
        torch.manual_seed(5)
        layers = [torch.randn(100, 3, 64) for _ in range(3)]
        buffers.append(layers)
        pointers = torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64)
        arguments = [pointers, torch.tensor([layers[0][0].numel() * 4] * 3), target, source, 7, 8]
        kernel = cache_move.copy_all_layer_kv_cache_tiled
        if replaced:
            KERNELS[kernel.fn.__name__]((3, 3), SimpleNamespace(**dict(zip(kernel.arg_names, arguments, strict=False))))
        else:
            kernel[(3, 3)](*arguments, BYTES_PER_TILE=256)
    note("copy_all_layer_kv_cache_tiled", torch.stack(buffers[0]), torch.stack(buffers[1]))


def extends(batch: int, shape: tuple[int, int, int, int], verify: bool, skip_prefix: bool, causal: bool = True) -> None:
    """Prefill or tree verification of ragged sequences. Shape: query heads, key heads, key width, value width."""
    heads, groups, width, value_width = shape
    keys, values = torch.randn(SLOTS, groups, width), torch.randn(SLOTS, groups, value_width)
    prefixes = [random.randint(int(verify), 150) for _ in range(batch)]
    counts = [6 if verify else random.randint(1, 70) for _ in range(batch)]
    cached = torch.randperm(SLOTS)[: sum(prefixes)]
    total = sum(counts)
    q, k, v = (torch.randn(total, h, w) for h, w in ((heads, width), (groups, width), (groups, value_width)))
    masks = []
    for prefix, count in zip(prefixes, counts, strict=True):
        tree = torch.eye(count).bool()
        for i in range(1, count):
            tree[i] |= tree[random.randrange(i)]
        before = torch.ones(count, prefix).bool() if skip_prefix else torch.rand(count, prefix) < 0.7
        masks.append(torch.cat([before, tree], 1).flatten())
    mask = torch.cat(masks) if verify else None
    mask_ends = ends([m.numel() for m in masks], torch.int64) if verify else None
    out = [torch.zeros(total, heads, value_width) for _ in range(2)]
    original = extend_attention.extend_attention_fwd
    for function, result in zip((original, _extend(original)), out, strict=True):
        function(
            q, k, v, result, keys, values, ends(counts, torch.int64), ends(prefixes), cached, mask, causal, mask_ends,
            max(counts), 1.0, 1.0, width**-0.5, skip_prefix_custom_mask=skip_prefix,
        )  # fmt: skip
    note("extend_attention_fwd", *out)


def decodes(batch: int, shape: tuple[int, int, int, int]) -> None:
    """One query row per sequence over its cached keys."""
    heads, groups, width, value_width = shape
    keys = torch.randn(SLOTS, groups, width)
    values = keys[..., :value_width] if width != value_width else torch.randn(SLOTS, groups, value_width)
    lengths = [random.randint(1, 140) for _ in range(batch)]
    cached = torch.randperm(SLOTS)[: sum(lengths)]
    q = torch.randn(batch, heads, width)
    out = [torch.zeros(batch, heads, value_width) for _ in range(2)]
    original = decode_attention.decode_attention_fwd
    for function, result in zip((original, _decode(original)), out, strict=True):
        scratch = (torch.empty(batch, heads, 8, value_width), torch.empty(batch, heads, 8))
        splits = torch.full((batch,), 8, dtype=torch.int32)
        function(
            q, keys, values, result, ends(lengths), cached, *scratch, splits, 8, width**-0.5, 1.0, 1.0,
            has_mla=width == 288,
        )  # fmt: skip
    note("decode_attention_fwd", *out)


def main() -> None:
    """Compare everything; print the differences."""
    random.seed(0)
    torch.manual_seed(0)
    for batch in (1, 2, 4):
        bookkeeping(batch)
        drafting(batch)
    cache_copies()
    shapes = ((9, 3, 64, 64), (4, 4, 32, 32), (4, 1, 96, 64), (4, 1, 288, 256))
    for shape in shapes:
        for verify in (False, True):
            for skip_prefix in (False, True):
                extends(2, shape, verify, skip_prefix)
        decodes(3, shape)
    extends(2, shapes[1], verify=False, skip_prefix=True, causal=False)
    print(json.dumps(worst))


if __name__ == "__main__":
    main()
