"""Accept-length estimates without a server: the draft's own greedy chain, rolled out on recorded text.

Owns: two numbers. The *anchor mean* averages over every position where all K proposals can be judged. The *serving
walk* jumps through each answer by accepted + 1 as a server does, and is the one that compares with serving (the anchor
mean is higher: it also counts positions inside accepted runs). Both are for a chain (topk = 1) of K steps, greedy.

A proposal is a hit iff it equals the recorded token, so a token outside the draft vocabulary is a break. On records
that are the target's own greedy answers this is what a server would accept; on other text it is an underestimate.

Legend: B records, T anchors, K steps, R draft vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from backend.eagle3.attention import ChainCache
from backend.eagle3.batches import Batch, collate, plan_batches
from backend.eagle3.draft import LlamaEagle3Draft
from backend.eagle3.records import RecordSource, Span, all_tokens
from backend.eagle3.target import FrozenTarget

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class RecordAccept:
    """One record's share: `depth_hits[k]` anchors (of `anchors`) had their first k + 1 proposals all right;
    the walk made `walk_tokens` tokens in `walk_verifies` verify steps over `turns` turns."""

    id: str
    source: str
    anchors: int
    depth_hits: tuple[int, ...]
    turns: int
    walk_tokens: int
    walk_verifies: int


@dataclass(frozen=True)
class Walk:
    """The serving walk over a set of records, with a bootstrap interval over records."""

    tokens: int
    verifies: int
    turns: int
    low: float
    high: float

    @property
    def accept_length(self) -> float:
        """Tokens a verify step yields, the bonus token included; 1.0 = nothing accepted."""
        return self.tokens / self.verifies if self.verifies else 1.0

    @property
    def as_sglang_counts(self) -> float:
        """SGLang's `spec_accept_length`: its completion tokens include the one that the prefill made in each turn."""
        return (self.tokens + self.turns) / self.verifies if self.verifies else 1.0


@dataclass(frozen=True)
class AcceptEstimate:
    """Both estimates over a set of records. `by_depth[k]`: share of anchors whose first k + 1 proposals all hit."""

    steps: int
    records: int
    anchors: int
    anchor_mean: float
    by_depth: tuple[float, ...]
    by_source: dict[str, float]
    walk: Walk
    walk_by_source: dict[str, float]


@torch.no_grad()
def roll_out(
    draft: LlamaEagle3Draft, target: FrozenTarget, batch: Batch, steps: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(hits_BT, proposals_KBT): proposals that continue the record unbroken, and the proposed target ids.

    After the first step the draft sees its own proposals and states, as when serving. Only anchors that are supervised
    at step 0 propose (elsewhere the proposals are 0); a hit never reaches past the turn's end.
    """
    anchors = batch.aux_BTC.shape[1]
    proposing_BT = batch.supervised(0)
    target_ids_R = draft.target_ids_R
    cache = ChainCache()
    g_BTH = draft.fuse(batch.aux_BTC)
    token_BT = batch.input_ids_BS[:, 1 : anchors + 1]
    unbroken_BT = proposing_BT
    hits_BT = torch.zeros_like(token_BT)
    proposals = []
    for step in range(steps):
        g_BTH = draft.step(F.embedding(token_BT, target.embed_VH), g_BTH, cache)
        token_BT = torch.zeros_like(token_BT)
        token_BT[proposing_BT] = target_ids_R[draft.logits(g_BTH[proposing_BT]).argmax(-1)]
        right_BT = token_BT == batch.input_ids_BS[:, 2 + step : 2 + step + anchors]
        unbroken_BT = unbroken_BT & right_BT & batch.supervised(step)
        hits_BT = hits_BT + unbroken_BT
        proposals.append(token_BT)
    return hits_BT, torch.stack(proposals)


def serving_walk(hits_T: Sequence[int], span: Span) -> tuple[int, int]:
    """(tokens, verify steps) of one turn: the prefill makes its first token, each verify makes accepted + 1 more.

    The last verify's bonus token is not counted where it would lie past the turn's end.
    """
    start, stop = max(span[0], 1), span[1]
    anchor, tokens, verifies = start - 1, 0, 0
    while anchor + 2 < stop:
        made = min(1 + int(hits_T[anchor]), stop - anchor - 2)
        tokens, verifies, anchor = tokens + made, verifies + 1, anchor + made
    return tokens, verifies


def estimate_accept(
    draft: LlamaEagle3Draft,
    target: FrozenTarget,
    source: RecordSource,
    *,
    steps: int,
    batch_tokens: int,
    device: torch.device,
) -> tuple[AcceptEstimate, list[RecordAccept]]:
    """Both estimates over all records of a source, and each record's share (in the source's order)."""
    lengths = [len(record.input_ids_T) for record in all_tokens(source)]
    shares: dict[int, RecordAccept] = {}
    was_training = draft.training
    draft.eval()
    for indices in plan_batches(lengths, batch_tokens, seed=0, epoch=0):
        records = [source.load(index) for index in indices]
        batch = collate(records, steps, device)
        hits_BT, _ = roll_out(draft, target, batch, steps)
        judged_BT = batch.supervised(steps - 1)
        for row, index in enumerate(indices):
            walks = [serving_walk(hits_BT[row].tolist(), span) for span in records[row].spans]
            judged_hits = hits_BT[row][judged_BT[row]]
            shares[index] = RecordAccept(
                id=records[row].id,
                source=records[row].source,
                anchors=len(judged_hits),
                depth_hits=tuple(int((judged_hits > depth).sum()) for depth in range(steps)),
                turns=sum(verifies > 0 for _, verifies in walks),
                walk_tokens=sum(tokens for tokens, _ in walks),
                walk_verifies=sum(verifies for _, verifies in walks),
            )
    draft.train(was_training)
    ordered = [shares[index] for index in range(len(lengths))]
    return summarise(ordered, steps), ordered


def summarise(shares: Sequence[RecordAccept], steps: int) -> AcceptEstimate:
    """Add records up. An empty set gives 1.0 everywhere: nothing was proposed."""
    by_source: dict[str, list[RecordAccept]] = defaultdict(list)
    for share in shares:
        by_source[share.source].append(share)
    anchors = sum(share.anchors for share in shares)
    depth = [sum(share.depth_hits[k] for share in shares) for k in range(steps)]
    return AcceptEstimate(
        steps=steps,
        records=len(shares),
        anchors=anchors,
        anchor_mean=_anchor_mean(shares),
        by_depth=tuple(hits / anchors if anchors else 0.0 for hits in depth),
        by_source={name: _anchor_mean(group) for name, group in sorted(by_source.items())},
        walk=_walk(shares),
        walk_by_source={name: _walk(group).accept_length for name, group in sorted(by_source.items())},
    )


def _anchor_mean(shares: Sequence[RecordAccept]) -> float:
    anchors = sum(share.anchors for share in shares)
    return 1.0 + sum(sum(share.depth_hits) for share in shares) / anchors if anchors else 1.0


def _walk(shares: Sequence[RecordAccept]) -> Walk:
    tokens_N = torch.tensor([share.walk_tokens for share in shares], dtype=torch.float64)
    verifies_N = torch.tensor([share.walk_verifies for share in shares], dtype=torch.float64)
    low = high = 1.0
    if float(verifies_N.sum()) > 0:
        generator = torch.Generator().manual_seed(0)
        # records, not positions, are resampled: positions of one answer are not independent
        picked = torch.randint(len(shares), (RESAMPLES, len(shares)), generator=generator)
        ratio = tokens_N[picked].sum(1) / verifies_N[picked].sum(1).clamp(min=1)
        tail = (1 - CONFIDENCE) / 2
        low, high = (float(torch.quantile(ratio, q)) for q in (tail, 1 - tail))
    return Walk(
        tokens=int(tokens_N.sum()),
        verifies=int(verifies_N.sum()),
        turns=sum(share.turns for share in shares),
        low=low,
        high=high,
    )
