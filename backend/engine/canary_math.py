"""The arithmetic of the canary: log-probabilities from states, the nearest boundary, errors per token, and verdicts.

Owns the numbers a check is judged by (tolerances per dtype) and the rule that every check must also be able to fail:
its negative control has to miss the tolerance by a factor of ten. Pure functions on tensors; knows nothing of servers,
files or checkpoints.

Shapes: T tokens, H hidden size, V vocabulary, N decoder layers (boundary c = residual stream at the input of layer c).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

CONTROL_FACTOR = 10.0
"""A negative control must be at least this many times worse than the tolerance."""
NEIGHBOUR_FACTOR = 5.0
"""A captured layer must be at least this many times nearer to its own boundary than to c-1 and c+1."""


@dataclass(frozen=True)
class Tolerance:
    """Bounds for one server dtype; the measurements behind them stand in docs/gate.md."""

    logprob_mean: float
    """Mean |Δ log p| over the prompt, in nats."""
    parity_median: float
    """Median over tokens of the relative error against Hugging Face in float32."""
    parity_max: float
    """Largest relative error of a token."""
    rounding: float
    """Relative spacing of the dtype: two captures that differ by less are equal."""


TOLERANCES: Mapping[torch.dtype, Tolerance] = {
    torch.float32: Tolerance(logprob_mean=1e-4, parity_median=1e-5, parity_max=1e-4, rounding=2.0**-23),
    torch.bfloat16: Tolerance(logprob_mean=5e-2, parity_median=2e-2, parity_max=5e-2, rounding=2.0**-8),
    torch.float16: Tolerance(logprob_mean=1e-2, parity_median=4e-3, parity_max=1e-2, rounding=2.0**-11),
}


@dataclass(frozen=True)
class Measured:
    """What a check measured: `error` must stay under `bound`, and the wrong answer's `control` over ten times it."""

    error: float
    bound: float
    control: float

    @property
    def right(self) -> bool:
        """The states are what they should be. NaN is not."""
        return self.error <= self.bound

    @property
    def telling(self) -> bool:
        """The check would have noticed the wrong states."""
        return self.control >= CONTROL_FACTOR * self.bound

    @property
    def ok(self) -> bool:
        """Right, and able to be wrong."""
        return self.right and self.telling


def prompt_logprobs(last_TH: Tensor, ids_T: Tensor, head_blocks_vH: Iterable[Tensor]) -> Tensor:
    """log p(id[t+1] | id[:t+1]) for t = 0..T-2 as a [T-1] float32 tensor.

    `head_blocks_vH` are consecutive row blocks of the output head: one of gigabytes is never whole in memory. Logits
    are rounded to the dtype of the states, as an engine that multiplies in that dtype does: with logits of 30 the
    rounding of bf16 alone is worth 0.025 nats on average, and none of it remains when it is made on both sides.
    """
    dtype, states_TH = last_TH.dtype, last_TH[:-1].float()
    wanted_T = ids_T[1:].long()
    normaliser_T = torch.full((len(states_TH),), float("-inf"))
    chosen_T = torch.full((len(states_TH),), float("nan"))
    start = 0
    for block_vH in head_blocks_vH:
        logits_Tv = (states_TH @ block_vH.to(dtype).float().T).to(dtype).float()
        normaliser_T = torch.logaddexp(normaliser_T, logits_Tv.logsumexp(-1))
        inside_T = (wanted_T >= start) & (wanted_T < start + len(block_vH))
        chosen_T[inside_T] = logits_Tv[inside_T].gather(1, (wanted_T[inside_T] - start)[:, None]).squeeze(1)
        start += len(block_vH)
    return chosen_T - normaliser_T


def rms_norm(states_TH: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
    """RMSNorm in float32, as Llama and DeepSeek define it."""
    values_TH = states_TH.float()
    return values_TH * torch.rsqrt(values_TH.pow(2).mean(-1, keepdim=True) + epsilon) * weight_H.float()


def relative_errors(value_TH: Tensor, reference_TH: Tensor) -> Tensor:
    """‖value - reference‖ / ‖reference‖ of every token, [T]. Per token, because a few positions of a real model have
    norms a thousand times the others' and hardly change from layer to layer: they would drown everything else."""
    size_T: Tensor = torch.linalg.vector_norm(reference_TH.float(), dim=-1)
    error_T: Tensor = torch.linalg.vector_norm(value_TH.float() - reference_TH.float(), dim=-1)
    return error_T / size_T


@dataclass(frozen=True)
class Nearest:
    """Where a captured tensor really comes from: errors are medians over tokens, against boundaries of one prompt."""

    claimed: int
    nearest: int
    error: float
    neighbour: int
    neighbour_error: float
    rounding: float

    @property
    def ok(self) -> bool:
        """The nearest boundary is the claimed one, clearly nearer than its neighbours, and these can be told apart."""
        floor = max(self.error, self.rounding)
        return self.nearest == self.claimed and self.neighbour_error >= NEIGHBOUR_FACTOR * floor


def nearest_boundary(claimed: int, state_TH: Tensor, boundaries: Mapping[int, Tensor]) -> Nearest:
    """Compare one captured layer with every boundary c → [T, H] of the same prompt."""
    errors = {c: float(relative_errors(state_TH, boundary_TH).median()) for c, boundary_TH in boundaries.items()}
    neighbours = {c: errors[c] for c in (claimed - 1, claimed + 1) if c in errors}
    closest = min(neighbours, key=neighbours.__getitem__)
    return Nearest(
        claimed=claimed,
        nearest=min(errors, key=errors.__getitem__),
        error=errors.get(claimed, float("nan")),
        neighbour=closest,
        neighbour_error=neighbours[closest],
        rounding=TOLERANCES[state_TH.dtype].rounding,
    )


def prompt_ids(count: int, vocab_size: int, avoid: Iterable[int]) -> list[int]:
    """A fixed prompt of `count` plain token ids, all different while the vocabulary allows it.

    Strides through the lower three quarters of the vocabulary, because special, padding and image ids stand at its
    ends, and skips the ids in `avoid`. The same checkpoint always gives the same prompt.
    """
    banned = set(avoid)
    plain = [i for i in range(vocab_size // 64, vocab_size * 3 // 4) if i not in banned]
    # The golden-ratio stride spreads any number of picks evenly; coprime to the length, so that none comes twice.
    stride = int(len(plain) * 0.6180339887)
    while math.gcd(stride, len(plain)) != 1:
        stride += 1
    return [plain[(7 + i * stride) % len(plain)] for i in range(count)]
