"""What the target says at each labelled position, from its last hidden states and its head.

Owns: the soft labels over the draft vocabulary and the full-vocabulary argmax (cached per record, since it never
changes and the full head is the costliest product of a step). Does not know the draft's weights or its loss.

Legend: N labelled rows, V target vocabulary, R draft vocabulary, H hidden size, T tokens of a record.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from backend.eagle3.records import TrainingRecord
from backend.eagle3.target import FrozenTarget

# Rows per product with the full head: bounds the logits to rows × V floats (0.2 GB at V = 163,840 in float32).
ARGMAX_ROWS = 256


class Teacher:
    """Labels from the frozen target. `last` states are post-norm, so a label is head · last and nothing else."""

    def __init__(self, target: FrozenTarget, target_ids_R: torch.Tensor) -> None:
        self._lm_head_VH = target.lm_head_VH
        self._draft_rows_RH = target.lm_head_VH[target_ids_R]
        self._argmax_of: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def probabilities(self, last_NH: torch.Tensor) -> torch.Tensor:
        """The target's distribution restricted to the draft vocabulary and renormalised: p_NR."""
        logits_NR = last_NH.to(self._draft_rows_RH.dtype) @ self._draft_rows_RH.T
        return logits_NR.softmax(-1, dtype=torch.promote_types(logits_NR.dtype, torch.float32))

    def argmax_of_batch(self, records: Sequence[TrainingRecord], room: int) -> torch.Tensor:
        """`argmax` of several records, padded with -1 on the right: [B, room]."""
        padded_BS = torch.full((len(records), room), -1, dtype=torch.int64)
        for row, record in enumerate(records):
            padded_BS[row, : len(record.input_ids_T)] = self.argmax(record)
        return padded_BS.to(self._lm_head_VH.device)

    @torch.no_grad()
    def argmax(self, record: TrainingRecord) -> torch.Tensor:
        """Token_T (int64, CPU) that the target would choose after each position, over its whole vocabulary.

        Always computed from one record alone: batched rows may round differently, and a resumed run must see the
        very same labels. Positions that are never a label (outside turns) hold -1.
        """
        known = self._argmax_of.get(record.id)
        if known is None:
            known = self._compute_argmax(record)
            self._argmax_of[record.id] = known
        return known.long()

    def _compute_argmax(self, record: TrainingRecord) -> torch.Tensor:
        argmax_T = torch.full((len(record.input_ids_T),), -1, dtype=torch.int32)
        for start, stop in record.spans:
            # y_q with q from the turn's first token to its last but one predicts a token of the same turn
            for first in range(start, stop - 1, ARGMAX_ROWS):
                last_row = min(first + ARGMAX_ROWS, stop - 1)
                rows_NH = record.last_TH[first:last_row].to(self._lm_head_VH.device, self._lm_head_VH.dtype)
                argmax_T[first:last_row] = (rows_NH @ self._lm_head_VH.T).argmax(-1).to("cpu", torch.int32)
        return argmax_T
