"""Training-time test: the draft runs its chain of K steps for every anchor at once, and this is the loss of it.

Owns: the loss exactly as `docs/training.md` states it (which pairs (p, k) count, what they are compared with, how the
steps are weighted). Inputs are the record's own tokens, not the draft's proposals. Does not know optimisers, files or
how batches are chosen.

Legend: B records, T anchors, S = T + K + 1 padded tokens, K steps, H hidden size, R draft vocabulary, N selected rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from backend.eagle3.attention import ChainCache
from backend.eagle3.batches import Batch
from backend.eagle3.draft import LlamaEagle3Draft
from backend.eagle3.target import FrozenTarget
from backend.eagle3.teacher import Teacher

STEP_DECAY = 0.8


@dataclass(frozen=True)
class TttSums:
    """Sums and counts per step, so that several batches or ranks can be added before the mean is taken.

    `loss_K` carries the gradient. `count_K` pairs have a loss; `off_vocab_K` more are supervised, but the target's
    choice there is not in the draft vocabulary; `hit_K` pairs had the target's choice as the draft's first.
    """

    loss_K: torch.Tensor
    count_K: torch.Tensor
    off_vocab_K: torch.Tensor
    hit_K: torch.Tensor

    def mean(self, count_K: torch.Tensor | None = None) -> torch.Tensor:
        """Σ_k w_k · (sum_k / count_k), a scalar. `count_K` is the global batch's where this is only a share of it.

        A step without any pair contributes nothing, and the other weights stay as they are.
        """
        total_K = self.count_K if count_K is None else count_K
        weight_K = step_weights(len(self.loss_K)).to(self.loss_K)
        return (weight_K * self.loss_K / total_K.clamp(min=1)).sum()


def step_weights(steps: int) -> torch.Tensor:
    """0.8^k, normalised to sum 1 so that the learning rate does not depend on the number of steps."""
    weight_K = STEP_DECAY ** torch.arange(steps, dtype=torch.float64)
    return weight_K / weight_K.sum()


def ttt_sums(
    draft: LlamaEagle3Draft,
    target: FrozenTarget,
    teacher: Teacher,
    batch: Batch,
    argmax_BS: torch.Tensor,
    steps: int,
) -> TttSums:
    """Soft cross-entropy of every supervised pair (p, k), summed per step.

    Anchor p at step k reads the embedding of x_{p+1+k} and predicts x_{p+2+k}; its label is the target's distribution
    over the draft vocabulary after x_{p+1+k}, from y_{p+1+k}. Pairs whose full-vocabulary argmax (`argmax_BS`) cannot
    be proposed carry no loss.
    """
    anchors = batch.aux_BTC.shape[1]
    proposable_BS = (argmax_BS >= 0) & draft.t2d[argmax_BS.clamp(min=0)]
    row_of_BS, label_NR = _labels(teacher, batch, proposable_BS)
    draft_id_V = draft.t2d.cumsum(0) - 1
    cache = ChainCache()
    g_BTH = draft.fuse(batch.aux_BTC)
    losses, counts, off_vocab, hits = [], [], [], []
    for step in range(steps):
        shift = slice(1 + step, 1 + step + anchors)
        embed_BTH = F.embedding(batch.input_ids_BS[:, shift], target.embed_VH)
        g_BTH = draft.step(embed_BTH, g_BTH, cache)
        supervised_BT = batch.supervised(step)
        selected_BT = supervised_BT & proposable_BS[:, shift]
        logits_NR = draft.logits(g_BTH[selected_BT])
        wide = torch.promote_types(logits_NR.dtype, torch.float32)
        wanted_NR = label_NR[row_of_BS[:, shift][selected_BT]]
        losses.append(-(wanted_NR * logits_NR.log_softmax(-1, dtype=wide)).sum())
        counts.append(selected_BT.sum())
        off_vocab.append(supervised_BT.sum() - counts[-1])
        hits.append((logits_NR.argmax(-1) == draft_id_V[argmax_BS[:, shift][selected_BT]]).sum())
    return TttSums(torch.stack(losses), torch.stack(counts), torch.stack(off_vocab), torch.stack(hits))


def _labels(teacher: Teacher, batch: Batch, proposable_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(row_of_BS: where position q's label stands, label_NR): each position's distribution once, not once a step."""
    anchors = batch.aux_BTC.shape[1]
    # y_q is a label iff the next token is of the same turn as x_q
    labelled_BS = (batch.left_BS >= 2) & proposable_BS
    row_of_BS = labelled_BS.flatten().cumsum(0).view_as(batch.left_BS) - 1
    label_NR = teacher.probabilities(batch.last_BTH[labelled_BS[:, :anchors]])
    return row_of_BS, label_NR
