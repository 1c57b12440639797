"""EAGLE-3's two tree operations in plain Python, and the switches that let SGLang 0.5.14 reach them on a CPU.

On a CPU some speculative functions of 0.5.14 silently return None (`assign_extend_cache_locs_func`,
`verify_tree_greedy_func`): their CUDA branches are taken instead, with these operations and interpreted kernels under
them. The proof is a test: speculative output equals plain greedy output token for token.
"""

from eagle3_cpu_imports import after_import


def build_tree(
    parent_list,
    selected_index,
    verified_seq_len,
    tree_mask,
    positions,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    topk,
    depth,
    draft_token_num,
    mode=0,
):
    """Attention mask, positions and first-child/next-sibling links of each request's draft tree, written in place.

    Stands for `build_tree_kernel_efficient` (sgl_kernel). Node 0 is the verified token; node i > 0 is
    `selected_index[i - 1]`, whose parent is `parent_list[selected // topk]` (0 = the root).
    """
    selected, parents, lengths = selected_index.tolist(), parent_list.tolist(), verified_seq_len.tolist()
    mask, position = tree_mask.view(-1), positions.view(-1)
    nodes, base = draft_token_num, 0
    for b, length in enumerate(lengths):
        parent = [0, *(_parent(node, selected[b], parents[b], topk) for node in range(nodes - 1))]
        for node in range(nodes):
            row = base + (length + nodes) * node + length if int(mode) == 0 else nodes * (nodes * b + node)
            mask[row : row + nodes] = False
            mask[row] = True
            level, ancestor = 0, node
            while ancestor:
                level += 1
                mask[row + ancestor] = True
                ancestor = parent[ancestor]
            position[b * nodes + node] = length + level
        _link_children(b, nodes, parent, retrive_index, retrive_next_token, retrive_next_sibling)
        base += (length + nodes) * nodes


def _parent(node, selected, parents, topk):
    above = selected[node] // topk
    return 0 if above == 0 else 1 + selected.index(parents[above])


def _link_children(b, nodes, parent, index, first_child, next_sibling):
    for node in range(nodes - 1, 0, -1):
        index[b, node] = b * nodes + node
        elder = int(first_child[b, parent[node]])
        first_child[b, parent[node]] = node
        if elder != -1:
            next_sibling[b, node] = elder
    index[b, 0] = b * nodes


def verify_greedy(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    """Walk each tree along the target's own greedy tokens, written in place. Stands for `verify_tree_greedy`."""
    greedy, predicted = target_predict.reshape(-1).tolist(), predicts.view(-1)
    for b in range(candidates.shape[0]):
        tokens, index, first_child, next_sibling = (
            table[b].tolist() for table in (candidates, retrive_index, retrive_next_token, retrive_next_sibling)
        )
        last, accepted, node = index[0], 0, 0
        accept_index[b, 0] = last
        for _ in range(1, accept_index.shape[1]):
            node = first_child[node]
            while node != -1 and tokens[node] != greedy[last]:
                node = next_sibling[node]
            if node == -1:
                break
            predicted[last] = greedy[last]
            accepted += 1
            last = index[node]
            accept_index[b, accepted] = last
        accept_token_num[b] = accepted
        predicted[last] = greedy[last]


def install():
    """Put the operations where SGLang imports them from, and take its CUDA branches.

    Places (0.5.14, sglang/srt): speculative/eagle_utils.py:25 (import of the tree builder) and :232 (greedy verify),
    speculative/triton_ops/cache_locs.py:346, `torch.cuda.synchronize` in models/llama.py:788 and :807 and
    models/deepseek_v2.py:2789.
    """
    import sgl_kernel

    sgl_kernel.build_tree_kernel_efficient = build_tree
    sgl_kernel.verify_tree_greedy = verify_greedy

    @after_import("torch.cuda")
    def _nothing_to_wait_for(module):
        module.synchronize = lambda *args, **kwargs: None

    @after_import("sglang.srt.speculative.eagle_utils")
    def _tree_on_cuda_branch(module):
        module.sgl_build_tree_kernel_efficient = build_tree
        module._is_cuda = True

    @after_import("sglang.srt.speculative.triton_ops.cache_locs")
    def _cache_locs_on_cuda_branch(module):
        module._is_cuda = True
