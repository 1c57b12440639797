"""Batches: which records go together in which order, and how they become padded tensors.

Owns: the batch plan (length-grouped, by token budget, a pure function of lengths, seed and epoch, so that a resumed run
meets the same batches) and the collation with its supervision vector. Does not know models or losses.

Legend: B records, T longest record of the batch, S = T + K + 1 (room for the chain's shifts), K chain steps,
C captured width, H hidden size.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from backend.eagle3.records import RecordTokens, TrainingRecord

# Records whose lengths differ by less than this may swap places between epochs, so that batches are not the same
# groups every time; the padding that this costs stays under this many tokens a record.
LENGTH_JITTER = 16


@dataclass(frozen=True)
class Batch:
    """One padded batch on one device.

    `left_BS[b, t]` is the number of tokens left in the assistant turn that token t belongs to, t included; 0 outside
    turns and in the padding. It decides supervision: see `supervised`.
    """

    ids: tuple[str, ...]
    sources: tuple[str, ...]
    input_ids_BS: torch.Tensor
    left_BS: torch.Tensor
    aux_BTC: torch.Tensor
    last_BTH: torch.Tensor
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Real tokens, padding not counted."""
        return sum(self.lengths)

    def supervised(self, step: int) -> torch.Tensor:
        """Mask_BT of the anchors p whose chain up to `step` stays in one assistant turn.

        (p, k) is supervised iff x_{p+1} … x_{p+2+k} are tokens of one turn: x_{p+1} is the token that the target just
        sampled, the rest are what the draft would propose. Equivalent: at least k + 2 tokens are left from x_{p+1} on.
        """
        anchors = self.aux_BTC.shape[1]
        return self.left_BS[:, 1 : anchors + 1] >= step + 2


def has_supervision(record: RecordTokens) -> bool:
    """Whether any anchor of the record is supervised at step 0: a turn of two tokens with something before it."""
    return any(stop - max(start, 1) >= 2 for start, stop in record.spans)


def plan_batches(lengths: Sequence[int], budget: int, *, seed: int, epoch: int) -> list[tuple[int, ...]]:
    """Positions of the records of each batch, for one epoch.

    Records × longest record stays within `budget` tokens; a record longer than the budget is a batch of its own.
    """
    rng = random.Random(f"{seed}:{epoch}")
    jittered = [length + rng.random() * LENGTH_JITTER for length in lengths]
    batches: list[tuple[int, ...]] = []
    current: list[int] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=jittered.__getitem__):
        longest = max(longest, lengths[index])
        if current and (len(current) + 1) * longest > budget:
            batches.append(tuple(current))
            current, longest = [], lengths[index]
        current.append(index)
    if current:
        batches.append(tuple(current))
    rng.shuffle(batches)
    return batches


def collate(records: Sequence[TrainingRecord], steps: int, device: torch.device) -> Batch:
    """Pad records on the right into one batch with room for `steps` chain steps; states become float32."""
    count, longest = len(records), max(len(r.input_ids_T) for r in records)
    room = longest + steps + 1
    input_ids_BS = torch.zeros(count, room, dtype=torch.int64)
    left_BS = torch.zeros(count, room, dtype=torch.int64)
    aux_BTC = torch.zeros(count, longest, records[0].aux_TC.shape[1])
    last_BTH = torch.zeros(count, longest, records[0].last_TH.shape[1])
    for row, record in enumerate(records):
        length = len(record.input_ids_T)
        input_ids_BS[row, :length] = record.input_ids_T
        aux_BTC[row, :length] = record.aux_TC
        last_BTH[row, :length] = record.last_TH
        for start, stop in record.spans:
            left_BS[row, start:stop] = torch.arange(stop - start, 0, -1)
    return Batch(
        ids=tuple(r.id for r in records),
        sources=tuple(r.source for r in records),
        input_ids_BS=input_ids_BS.to(device),
        left_BS=left_BS.to(device),
        aux_BTC=aux_BTC.to(device),
        last_BTH=last_BTH.to(device),
        lengths=tuple(len(r.input_ids_T) for r in records),
    )
