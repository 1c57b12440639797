"""The CPU mode's operations: trees and attention against slow definitions, kernels against SGLang's own, interpreted.

An operation that is slightly wrong still answers, with other tokens or a lower accept length; so each is compared with
something that shares no code with it.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

import backend.engine

CPU_MODE = Path(backend.engine.__file__).parent / "cpu_mode"
sys.path.append(str(CPU_MODE))

from eagle3_cpu_attention import _decode, _extend  # noqa: E402
from eagle3_cpu_kernels import KERNELS as REPLACED  # noqa: E402
from eagle3_cpu_speculative import build_tree, verify_greedy  # noqa: E402

SLOW_ATTENTION = 2e-5
KERNELS = (
    "create_flashinfer_kv_indices_triton",
    "compute_position_kernel",
    "write_req_to_token_pool_triton",
    "copy_all_layer_kv_cache_tiled",
    "assign_req_to_token_pool",
    "assign_extend_cache_locs",
    "assign_draft_cache_locs_contiguous",
    "generate_draft_decode_kv_indices",
    "fill_bonus_tokens",
    "fill_accept_out_cache_loc",
    "set_mla_kv_buffer_kernel",
)


@dataclass
class Tree:
    """A random draft tree as SGLang describes it, and the parents that it was made from (node 0 is the root)."""

    selected: list[int]
    parent_list: list[int]
    parents: list[int]

    def ancestors(self, node: int) -> set[int]:
        found = {node}
        while node:
            node = self.parents[node]
            found.add(node)
        return found

    def children(self, node: int) -> list[int]:
        return [child for child in range(1, len(self.parents)) if self.parents[child] == node]


def random_tree(rng: random.Random, topk: int, depth: int, nodes: int) -> Tree:
    """Grow a beam of `topk` per level; keep `nodes - 1` candidates, each with its ancestors.

    Candidate ids: level 0 has 0..k-1; a later level has k more for each beam entry, in order.
    """
    parent_of: dict[int, int] = dict.fromkeys(range(topk), -1)
    beam, parent_list = list(range(topk)), [-1]
    for level in range(1, depth):
        first = topk + (level - 1) * topk * topk
        parent_list += beam
        for j, above in enumerate(beam):
            parent_of |= {first + j * topk + c: above for c in range(topk)}
        beam = sorted(rng.sample(range(first, first + topk * topk), topk))
    chosen: set[int] = set()
    while len(chosen) < nodes - 1:
        ready = [i for i in parent_of if i not in chosen and (parent_of[i] in chosen or parent_of[i] == -1)]
        chosen.add(rng.choice(ready))
    selected = sorted(chosen)
    parents = [0] + [0 if parent_of[i] == -1 else 1 + selected.index(parent_of[i]) for i in selected]
    return Tree(selected, parent_list, parents)


def built(trees: list[Tree], lengths: list[int], topk: int, depth: int, nodes: int) -> dict[str, Tensor]:
    """Run `build_tree` on a batch with the buffers that SGLang gives it."""
    batch = len(trees)
    out = {
        "mask": torch.ones(sum(nodes * (length + nodes) for length in lengths), dtype=torch.bool),
        "positions": torch.zeros(batch * nodes, dtype=torch.int64),
        "index": torch.full((batch, nodes), -1, dtype=torch.int64),
        "first_child": torch.full((batch, nodes), -1, dtype=torch.int64),
        "next_sibling": torch.full((batch, nodes), -1, dtype=torch.int64),
    }
    build_tree(
        torch.tensor([tree.parent_list for tree in trees]),
        torch.tensor([tree.selected for tree in trees]),
        torch.tensor(lengths),
        *out.values(),
        topk,
        depth,
        nodes,
    )
    return out


TREES = [(1, 3, 4), (2, 3, 6), (4, 3, 8), (3, 5, 16)]


@pytest.mark.parametrize("topk, depth, nodes", TREES)
def test_each_tree_node_sees_its_prefix_and_its_ancestors_only(topk: int, depth: int, nodes: int) -> None:
    rng = random.Random(nodes)
    trees, lengths = [random_tree(rng, topk, depth, nodes) for _ in range(3)], [5, 1, 12]
    out = built(trees, lengths, topk, depth, nodes)
    start = 0
    for b, (tree, length) in enumerate(zip(trees, lengths, strict=True)):
        rows = out["mask"][start : start + nodes * (length + nodes)].view(nodes, length + nodes)
        start += rows.numel()
        for node in range(nodes):
            assert rows[node, :length].all(), "the verified prefix is always seen"
            assert set(rows[node, length:].nonzero().flatten().tolist()) == tree.ancestors(node)
            assert int(out["positions"][b * nodes + node]) == length + len(tree.ancestors(node)) - 1


@pytest.mark.parametrize("topk, depth, nodes", TREES)
def test_each_tree_node_leads_to_its_children_in_order(topk: int, depth: int, nodes: int) -> None:
    rng = random.Random(100 + nodes)
    trees = [random_tree(rng, topk, depth, nodes) for _ in range(3)]
    out = built(trees, [4, 4, 9], topk, depth, nodes)
    for b, tree in enumerate(trees):
        assert out["index"][b].tolist() == list(range(b * nodes, (b + 1) * nodes))
        for node in range(nodes):
            found, child = [], int(out["first_child"][b, node])
            while child != -1:
                found.append(child)
                child = int(out["next_sibling"][b, child])
            assert found == tree.children(node)


@pytest.mark.parametrize("topk, depth, nodes", TREES)
def test_verification_follows_the_targets_greedy_tokens(topk: int, depth: int, nodes: int) -> None:
    rng = random.Random(200 + nodes)
    depths = set()
    for _ in range(20):
        trees = [random_tree(rng, topk, depth, nodes) for _ in range(2)]
        out = built(trees, [3, 7], topk, depth, nodes)
        candidates = torch.tensor([rng.sample(range(nodes * 2), nodes) for _ in trees])
        # The target agrees with one child of most nodes, else with none.
        greedy = torch.full((2, nodes), 999)
        for b, tree in enumerate(trees):
            for node in range(nodes):
                if tree.children(node) and rng.random() < 0.8:
                    greedy[b, node] = candidates[b, rng.choice(tree.children(node))]
        predicts = torch.full((2 * nodes,), -1, dtype=torch.int32)
        accept_index = torch.full((2, depth + 1), -1, dtype=torch.int32)
        accepted = torch.zeros(2, dtype=torch.int32)
        verify_greedy(
            predicts, accept_index, accepted, candidates, out["index"], out["first_child"], out["next_sibling"], greedy
        )
        for b, tree in enumerate(trees):
            path = [0]
            while follow := [c for c in tree.children(path[-1]) if candidates[b, c] == greedy[b, path[-1]]]:
                path.append(follow[0])
            depths.add(len(path))
            assert accepted[b] == len(path) - 1
            assert accept_index[b].tolist() == [b * nodes + n for n in path] + [-1] * (depth + 1 - len(path))
            assert [int(predicts[b * nodes + node]) for node in path] == [int(greedy[b, node]) for node in path]
    assert len(depths) > 1, "both acceptances and rejections were seen"


def attention(q_HD: Tensor, k_MGD: Tensor, v_MGD: Tensor, seen_M: Tensor, scale: float) -> Tensor:
    """One query row, one head at a time, float64."""
    heads, groups = q_HD.shape[0], k_MGD.shape[1]
    out = []
    for head in range(heads):
        group = head * groups // heads
        scores = (k_MGD[:, group].double() @ q_HD[head].double()) * scale
        out.append(scores.masked_fill(~seen_M, -torch.inf).softmax(0) @ v_MGD[:, group].double())
    return torch.stack(out)


@pytest.mark.parametrize("heads, groups, width, value_width", [(9, 3, 16, 16), (4, 4, 8, 8), (4, 1, 24, 16)])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("skip_prefix", [False, True])
def test_extend_attention_is_attention(
    heads: int, groups: int, width: int, value_width: int, tree: bool, skip_prefix: bool
) -> None:
    """Prefill and verification: ragged sequences, a cached prefix at scattered slots, causal or a tree's own mask."""
    generator = torch.Generator().manual_seed(heads)
    prefixes, counts, slots = [0, 7, 20], [6, 1, 9], 64
    keys = torch.randn(slots, groups, width, generator=generator)
    values = torch.randn(slots, groups, value_width, generator=generator)
    cached = torch.randperm(slots, generator=generator)[: sum(prefixes)]
    total = sum(counts)
    q = torch.randn(total, heads, width, generator=generator)
    k = torch.randn(total, groups, width, generator=generator)
    v = torch.randn(total, groups, value_width, generator=generator)
    masks = [torch.rand(n, p + n, generator=generator) < 0.6 for n, p in zip(counts, prefixes, strict=True)]
    for mask, n, p in zip(masks, counts, prefixes, strict=True):
        mask[:, p:] |= torch.eye(n, dtype=torch.bool)
    ends = torch.tensor([0, *(mask.numel() for mask in masks)]).cumsum(0)
    out = torch.zeros(total, heads, value_width)
    starts = torch.tensor([0, *counts]).cumsum(0)
    kv = torch.tensor([0, *prefixes]).cumsum(0)
    _extend(None)(
        q, k, v, out, keys, values, starts, kv, cached, torch.cat([m.flatten() for m in masks]) if tree else None, True,
        ends if tree else None, max(counts), 1.0, 1.0, width**-0.5, skip_prefix_custom_mask=skip_prefix,
    )  # fmt: skip
    for b, (n, p) in enumerate(zip(counts, prefixes, strict=True)):
        rows = slice(int(starts[b]), int(starts[b + 1]))
        at = cached[int(kv[b]) : int(kv[b + 1])]
        all_k, all_v = torch.cat([keys[at], k[rows]]), torch.cat([values[at], v[rows]])
        for i in range(n):
            seen = torch.arange(p + n) <= p + i
            if tree:
                seen = masks[b][i].clone()
                seen[:p] |= skip_prefix
            expected = attention(q[rows][i], all_k, all_v, seen, width**-0.5)
            torch.testing.assert_close(out[rows][i].double(), expected, atol=SLOW_ATTENTION, rtol=0)


@pytest.mark.parametrize("heads, groups, width, value_width", [(9, 3, 16, 16), (4, 4, 8, 8), (4, 1, 24, 16)])
def test_decode_attention_is_attention(heads: int, groups: int, width: int, value_width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    lengths, slots = [1, 13, 30], 64
    keys = torch.randn(slots, groups, width, generator=generator)
    values = keys[..., :value_width]  # as MLA's latent cache has it
    at = torch.randperm(slots, generator=generator)[: sum(lengths)]
    ends = torch.tensor([0, *lengths]).cumsum(0)
    q = torch.randn(len(lengths), heads, width, generator=generator)
    out = torch.zeros(len(lengths), heads, value_width)
    _decode(None)(q, keys, values, out, ends, at, None, None, None, 8, width**-0.5, 1.0, 1.0, has_mla=True)
    for b, length in enumerate(lengths):
        mine = at[int(ends[b]) : int(ends[b + 1])]
        expected = attention(q[b], keys[mine], values[mine], torch.ones(length, dtype=torch.bool), width**-0.5)
        torch.testing.assert_close(out[b].double(), expected, atol=SLOW_ATTENTION, rtol=0)


def test_options_that_are_not_covered_go_to_the_original() -> None:
    """A sliding window or a logit cap must not be ignored silently."""
    fell_through = []
    q = torch.zeros(1, 1, 4)
    one = torch.tensor([0, 1])
    for options in ({"logit_cap": 30.0}, {"sliding_window_size": 8}, {"sinks": q}, {"xai_temperature_len": 5}):
        _extend(lambda *args: fell_through.append(args))(
            q, q, q, q, q, q, one, one, one[:1], None, True, None, 1, 1.0, 1.0, 0.5, **options
        )
    _decode(lambda *args, **more: fell_through.append(args))(
        q, q, q, q, one, one[:1], None, None, None, 8, 0.5, 1.0, 1.0, logit_cap=30.0
    )
    _extend(lambda *args: fell_through.append(args))(
        q, q, q, q, q, q, one, one, one[:1], None, True, None, 1, 0.5, 1.0, 0.5
    )
    assert len(fell_through) == 6


@pytest.fixture(scope="module")
def differences() -> dict[str, float]:
    """Largest difference per operation between SGLang's kernel in Triton's interpreter and its replacement."""
    env = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "TRITON_INTERPRET": "1",
        "EAGLE3_CPU_SLOW": "1",
        "PYTHONPATH": f"{CPU_MODE}{os.pathsep}{Path(__file__).parents[2]}",
    }
    ran = subprocess.run(
        [sys.executable, "-m", "tests.interpreted_kernels"],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_every_replaced_kernel_is_compared(differences: dict[str, float]) -> None:
    assert set(REPLACED) == set(KERNELS)
    assert set(differences) == {*KERNELS, "extend_attention_fwd", "decode_attention_fwd"}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_replaced_kernel_writes_exactly_what_sglangs_own_does(differences: dict[str, float], kernel: str) -> None:
    assert differences[kernel] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["extend_attention_fwd", "decode_attention_fwd"])
def test_attention_agrees_with_sglangs_own_kernels(differences: dict[str, float], entry: str) -> None:
    assert differences[entry] <= SLOW_ATTENTION
