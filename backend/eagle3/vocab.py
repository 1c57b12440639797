"""The draft vocabulary: which of the target's tokens a draft can propose, and how the two numberings map.

Owns: counting supervised tokens, forcing special and end-of-turn tokens in, the deterministic filling-up, `d2t`
(offsets: target id = i + d2t[i], as SGLang adds them) and `t2d` (membership over the target's vocabulary).
Does not know hidden states, models or files.

Legend: V target vocabulary, R draft vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from backend.eagle3.records import RecordTokens
from backend.errors import UsageError


@dataclass(frozen=True)
class DraftVocab:
    """Target ids of the draft's rows, ascending and distinct: `ids_R` int64."""

    ids_R: torch.Tensor
    target_size: int

    def __post_init__(self) -> None:
        ascending = bool((self.ids_R[1:] > self.ids_R[:-1]).all())
        if not ascending or int(self.ids_R[0]) < 0 or int(self.ids_R[-1]) >= self.target_size:
            raise ValueError("draft vocabulary ids must ascend inside the target's vocabulary")

    def __len__(self) -> int:
        return len(self.ids_R)

    @property
    def d2t_R(self) -> torch.Tensor:
        """Offset of each draft id to its target id, int64."""
        return self.ids_R - torch.arange(len(self.ids_R), dtype=torch.int64)

    @property
    def t2d_V(self) -> torch.Tensor:
        """True for the target ids that the draft can propose."""
        member_V = torch.zeros(self.target_size, dtype=torch.bool)
        member_V[self.ids_R] = True
        return member_V

    @staticmethod
    def from_offsets(d2t_R: torch.Tensor, target_size: int) -> DraftVocab:
        """Rebuild from `d2t`. Raises ValueError where the offsets do not describe ascending ids."""
        return DraftVocab(d2t_R + torch.arange(len(d2t_R), dtype=torch.int64), target_size)


@dataclass(frozen=True)
class Coverage:
    """How much of the predictable text a draft vocabulary can propose. Tokens are predictions, not positions."""

    tokens: int
    covered: int
    by_source: dict[str, float]

    @property
    def share(self) -> float:
        """Covered tokens / tokens (1.0 where there is nothing to cover)."""
        return self.covered / self.tokens if self.tokens else 1.0


def build_vocab(
    records: Iterable[RecordTokens], size: int, *, target_size: int, special_ids: Iterable[int]
) -> DraftVocab:
    """Most frequent predicted tokens of the training records, specials and end-of-turn tokens first.

    Predicted tokens are those after a turn's first token: the first one always comes from the target. Equal counts
    and the unseen remainder are ordered by id, low first (a BPE's most frequent merges), so the result depends on the
    records' content alone. Raises `UsageError` (reason `draft_vocab_size`).
    """
    if not 0 < size <= target_size:
        raise UsageError(
            f"draft_vocab_size = {size}, but the target has {target_size} tokens",
            fix=f"[train] draft_vocab_size between 1 and {target_size}",
            reason="draft_vocab_size",
        )
    count_V = torch.zeros(target_size, dtype=torch.int64)
    forced = {token for token in special_ids if 0 <= token < target_size}
    for record in records:
        for start, stop in record.spans:
            predicted_T = record.input_ids_T[start + 1 : stop].long()
            count_V.index_add_(0, predicted_T, torch.ones_like(predicted_T))
            forced.add(int(record.input_ids_T[stop - 1]))
    if len(forced) > size:
        raise UsageError(
            f"draft_vocab_size = {size} is less than the {len(forced)} special tokens that must be in it",
            fix=f"[train] draft_vocab_size of {len(forced)} or more",
            reason="draft_vocab_size",
        )
    count_V[sorted(forced)] = torch.iinfo(torch.int64).max
    order_V = torch.argsort(count_V, descending=True, stable=True)
    return DraftVocab(order_V[:size].sort().values, target_size)


def coverage(vocab: DraftVocab, records: Iterable[RecordTokens]) -> Coverage:
    """Share of predicted tokens that the vocabulary holds, over all records and per source."""
    member_V = vocab.t2d_V
    tokens: dict[str, int] = defaultdict(int)
    covered: dict[str, int] = defaultdict(int)
    for record in records:
        for start, stop in record.spans:
            predicted_T = record.input_ids_T[start + 1 : stop].long()
            tokens[record.source] += len(predicted_T)
            covered[record.source] += int(member_V[predicted_T].sum())
    shares = {source: covered[source] / count if count else 1.0 for source, count in sorted(tokens.items())}
    return Coverage(sum(tokens.values()), sum(covered.values()), shares)
