"""The canary: proof that the states a server captures are the states they are called.

Sends two short requests to a capturing server (all layer boundaries; then the configured layers with log-probabilities)
and judges the dumps against the checkpoint, against each other and, for small targets, against Hugging Face. Every
check has a negative control that must fail clearly, or it proves nothing. Owns the requests, the checks and the digest
that a store keeps; the arithmetic is `canary_math`'s, the reference `parity`'s. Knows nothing of processes or launches.

Shapes: T prompt tokens, H hidden size, V vocabulary, N decoder layers, C captured layers × H.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from backend.eagle3.target import TargetCheckpoint
from backend.engine.canary_math import (
    NEIGHBOUR_FACTOR,
    TOLERANCES,
    Measured,
    nearest_boundary,
    prompt_ids,
    prompt_logprobs,
    relative_errors,
    rms_norm,
)
from backend.engine.capture import BOUNDARIES_RID, Capture, read_capture
from backend.engine.client import Reply, SGLangClient
from backend.engine.parity import is_mixture, reference_states, weight_bytes
from backend.errors import OperatorError
from backend.report import Check, Reporter

CANARY_RID = "eagle3-canary-"
_HEAD_ROWS = 8192
_TRIES = 3


@dataclass(frozen=True)
class CanarySettings:
    """What the canary asks for. `layers` are the canonical ids that the server was told to capture.

    `hf_parity` "auto" compares with Hugging Face where the checkpoint has at most `max_parity_bytes` on disk.
    """

    dump_dir: str | Path
    layers: tuple[int, ...]
    prompt_tokens: int = 64
    hf_parity: Literal["auto"] | bool = "auto"
    max_parity_bytes: int = 2_000_000_000


@dataclass(frozen=True)
class CanaryResult:
    """The checks in order. `digest` names what was proven, equal for equal proofs; None where a check failed."""

    checks: tuple[Check, ...]
    digest: str | None

    @property
    def ok(self) -> bool:
        """No check failed."""
        return all(check.ok is not False for check in self.checks)


@dataclass(frozen=True)
class Evidence:
    """The two captures of one prompt and the checkpoint that they are judged by."""

    target: TargetCheckpoint
    ids: list[int]
    boundaries: Mapping[int, Tensor]
    layers: Mapping[int, Tensor]
    last_TH: Tensor
    logprobs_T: Tensor

    @property
    def ids_T(self) -> Tensor:
        return torch.tensor(self.ids)


def run_canary(
    client: SGLangClient,
    model: str | Path,
    settings: CanarySettings,
    *,
    launch_id: str,
    ranks: int,
    trust_remote_code: bool,
    reporter: Reporter,
) -> CanaryResult:
    """Run every check that this host can make; reports each as it is made. Raises nothing for a wrong server."""
    checks: list[Check] = []

    def made(check: Check) -> None:
        checks.append(check)
        reporter.check(check)

    try:
        evidence = _collect(client, TargetCheckpoint(Path(model)), settings, launch_id)
    except OperatorError as error:
        made(Check("canary.capture", False, error.what, {"reason": error.reason}, error.fix))
        return CanaryResult(tuple(checks), None)
    made(_captured(evidence, settings))
    made(check_last_hidden(evidence))
    made(check_embedding(evidence))
    made(check_layers(evidence))
    made(check_ranks(ranks))
    made(_parity(evidence, settings, trust_remote_code))
    ok = all(check.ok is not False for check in checks)
    return CanaryResult(tuple(checks), digest_of(evidence, checks) if ok else None)


def _collect(client: SGLangClient, target: TargetCheckpoint, settings: CanarySettings, launch_id: str) -> Evidence:
    """Both requests and what they left."""
    config = target.config
    ids = prompt_ids(settings.prompt_tokens, config.vocab_size, config.special_ids)
    folder = Path(settings.dump_dir)
    every = _capture_boundaries(client, folder, ids, launch_id)
    reply, normal = _request(client, folder, CANARY_RID, ids, launch_id)
    _expect_layers(every, tuple(range(config.num_hidden_layers)), "the request for all boundaries")
    _expect_layers(normal, settings.layers, "a normal request")
    return Evidence(
        target=target,
        ids=ids,
        boundaries=_split(every),
        layers=_split(normal),
        last_TH=normal.last_TH,
        logprobs_T=_logprobs(reply, ids),
    )


def _capture_boundaries(client: SGLangClient, folder: Path, ids: list[int], launch_id: str) -> Capture:
    """The capture at every boundary; asked again where somebody's health probe shared its batch."""
    for _ in range(_TRIES - 1):
        try:
            return _request(client, folder, BOUNDARIES_RID, ids, launch_id)[1]
        except OperatorError as error:
            if error.reason != "capture_failed":
                raise
    return _request(client, folder, BOUNDARIES_RID, ids, launch_id)[1]


def _request(client: SGLangClient, folder: Path, prefix: str, ids: list[int], launch_id: str) -> tuple[Reply, Capture]:
    """One request and its dump, which is read and removed whatever happens."""
    rid = prefix + secrets.token_hex(4)
    try:
        reply = client.generate(ids, rid=rid, max_new_tokens=1, return_logprob=True)
        return reply, _read(folder, rid, ids, launch_id)
    finally:
        for left in folder.glob(f"{rid}.*"):
            left.unlink()


def _logprobs(reply: Reply, ids: list[int]) -> Tensor:
    """The server's log p of tokens 1..T-1; the first has none."""
    values = (reply.input_token_logprobs or ())[1:]
    if len(values) != len(ids) - 1 or None in values:
        raise OperatorError(
            f"the server returned {len(values)} prompt log-probabilities, {len(ids) - 1} were asked for",
            fix="serve with --disable-radix-cache: cached tokens have no log-probabilities",
            reason="bad_reply",
        )
    return torch.tensor(values, dtype=torch.float32)


def _read(folder: Path, rid: str, ids: list[int], launch_id: str) -> Capture:
    capture = read_capture(folder / f"{rid}.safetensors")
    if capture.input_ids_T.tolist() != ids:
        raise OperatorError(
            f"the dump of {rid} holds {len(capture.input_ids_T)} token ids that differ from the {len(ids)} sent",
            fix="chunks of prompts were joined wrongly: check the capture plugin",
            reason="capture_mismatch",
        )
    if capture.launch_id != launch_id or not capture.post_norm:
        raise OperatorError(
            f"the dump of {rid} is of launch {capture.launch_id} (post_norm {capture.post_norm}), not of {launch_id}",
            fix="another server writes into the same dump folder: stop it, launch again",
            reason="capture_mismatch",
        )
    return capture


def _expect_layers(capture: Capture, layers: tuple[int, ...], what: str) -> None:
    if capture.layers != layers:
        raise OperatorError(
            f"{what} was captured at layers {list(capture.layers)}, not {list(layers)}",
            fix="stop the server and launch again with the wanted [capture] layers",
            reason="capture_layers",
        )


def _split(capture: Capture) -> dict[int, Tensor]:
    """aux_TC by captured layer, [T, H] each."""
    return dict(zip(capture.layers, capture.aux_TC.chunk(len(capture.layers), -1), strict=True))


def _captured(evidence: Evidence, settings: CanarySettings) -> Check:
    return Check(
        "canary.capture",
        True,
        f"{len(evidence.ids)} tokens captured at all {len(evidence.boundaries)} layer inputs and at "
        f"{list(settings.layers)}, {_dtype(evidence)}",
        {"tokens": len(evidence.ids), "layers": list(settings.layers), "dtype": _dtype(evidence)},
    )


def check_last_hidden(evidence: Evidence) -> Check:
    """(a) lm_head · h rebuilds the server's own log-probabilities.

    Control: the input of the last layer, as it is (what a capture before the final norm looks like) and normed.
    """
    target, before_TH = evidence.target, evidence.boundaries[max(evidence.boundaries)]
    normed_TH = rms_norm(before_TH, target.final_norm(), target.config.rms_norm_eps)
    controls = [_logprob_error(evidence, wrong_TH) for wrong_TH in (before_TH, normed_TH)]
    measured = Measured(
        error=_logprob_error(evidence, evidence.last_TH),
        bound=TOLERANCES[evidence.last_TH.dtype].logprob_mean,
        control=min(controls),
    )
    return _judge(
        "canary.last_hidden",
        measured,
        f"lm_head · h rebuilds the server's log-probabilities to {measured.error:.2g} nats on average "
        f"(bound {measured.bound:g}); one layer earlier misses by {measured.control:.2g}",
        fix="the stored last hidden state is not the input of lm_head: taken before the final norm, or of other rows",
    )


def check_embedding(evidence: Evidence) -> Check:
    """(b) boundary 0 equals the checkpoint's embedding rows bit for bit; control: every other token's row does not."""
    dtype = evidence.boundaries[0].dtype
    rows_TH = evidence.target.embed_rows(evidence.ids).to(dtype)
    equal = int((evidence.boundaries[0] == rows_TH).all(-1).sum())
    by_chance = int((evidence.boundaries[0] == rows_TH.roll(1, 0)).all(-1).sum())
    total = len(evidence.ids)
    return Check(
        "canary.embedding",
        equal == total and by_chance == 0,
        f"boundary 0 equals {equal} of {total} embedding rows bit for bit; rows of the token before: {by_chance}",
        {"equal": equal, "tokens": total, "control": by_chance},
        fix="the server serves other weights than [target] model, or boundary 0 is not the first layer's input",
    )


def check_layers(evidence: Evidence) -> Check:
    """(b) each captured layer is nearest to the boundary whose name it bears, five times nearer than c-1 and c+1."""
    found = [nearest_boundary(c, state_TH, evidence.boundaries) for c, state_TH in evidence.layers.items()]
    texts = [
        f"{near.claimed} is nearest to {near.nearest} ({near.error:.2g}; {near.neighbour}: {near.neighbour_error:.2g})"
        for near in found
    ]
    return Check(
        "canary.layers",
        all(near.ok for near in found),
        "; ".join(texts),
        {
            str(near.claimed): {
                "nearest": near.nearest,
                "error": near.error,
                "neighbour": near.neighbour,
                "neighbour_error": near.neighbour_error,
            }
            for near in found
        },
        fix="the captured layers are not those that the plugin names (off by one?): nothing captured can be used. "
        f"Needed: nearest = its own name, {NEIGHBOUR_FACTOR:g} times nearer than the neighbours",
    )


def check_ranks(ranks: int) -> Check:
    """(c) every attention-TP rank holds the same states."""
    if ranks == 1:
        return Check("canary.ranks", None, "one rank: nothing to compare")
    return Check("canary.ranks", None, f"the plugin writes rank 0 only; {ranks} ranks were not compared")


def _parity(evidence: Evidence, settings: CanarySettings, trust_remote_code: bool) -> Check:
    """(d), where asked for and possible."""
    folder = evidence.target.folder
    size = weight_bytes(folder)
    if settings.hf_parity is False:
        return Check("canary.parity", None, "switched off by config")
    if settings.hf_parity == "auto" and size > settings.max_parity_bytes:
        return Check("canary.parity", None, f"{size / 1e9:.0f} GB of weights are too large to load a second time")
    if is_mixture(folder) and evidence.last_TH.dtype != torch.float32:
        return Check("canary.parity", None, "a mixture of experts below float32: rounding flips the routing")
    try:
        states = reference_states(folder, evidence.ids, trust_remote_code=trust_remote_code)
    except OperatorError as error:
        return Check("canary.parity", False, error.what, {"reason": error.reason}, error.fix)
    return check_parity(evidence, states)


def check_parity(evidence: Evidence, states: list[Tensor]) -> Check:
    """(d) every captured state against Hugging Face in float32; control: the same states one token further."""
    tolerance = TOLERANCES[evidence.last_TH.dtype]
    captured = {**evidence.layers, len(states) - 1: evidence.last_TH}
    worst_token, medians, controls = 0.0, {}, {}
    for c, state_TH in captured.items():
        errors_T = relative_errors(state_TH, states[c])
        medians[c] = float(errors_T.median())
        worst_token = max(worst_token, float(errors_T.max()))
        controls[c] = float(relative_errors(state_TH, states[c].roll(1, 0)).median())
    measured = Measured(max(medians.values()), tolerance.parity_median, min(controls.values()))
    shown = ", ".join(f"{c}: {error:.2g}" for c, error in medians.items())
    check = _judge(
        "canary.parity",
        measured,
        f"relative error against Hugging Face float32, median per layer: {shown}; worst token "
        f"{worst_token:.2g} (bounds {tolerance.parity_median:g}, {tolerance.parity_max:g}); "
        f"rows off by one token: {measured.control:.2g}",
        fix="the captured states are not the model's: compare the engine's version and dtype, then the layer indices",
        detail={"worst_token": worst_token, "medians": {str(c): error for c, error in medians.items()}},
    )
    if worst_token <= tolerance.parity_max:
        return check
    return Check(check.name, False, check.evidence, check.detail, check.fix)


def _judge(
    name: str, measured: Measured, evidence: str, *, fix: str, detail: Mapping[str, object] | None = None
) -> Check:
    numbers = {"error": measured.error, "bound": measured.bound, "control": measured.control, **(detail or {})}
    if measured.right and not measured.telling:
        fix = "the check cannot tell right from wrong on this model (its negative control nearly passes)"
    return Check(name, measured.ok, evidence, numbers, fix)


def _logprob_error(evidence: Evidence, states_TH: Tensor) -> float:
    rebuilt_T = prompt_logprobs(states_TH, evidence.ids_T, _head_blocks(evidence.target))
    return float((rebuilt_T - evidence.logprobs_T).abs().mean())


def _head_blocks(target: TargetCheckpoint) -> Iterator[Tensor]:
    """The output head in blocks of rows: 2.3 GB for a vocabulary of 164k are read and forgotten piece by piece."""
    total = target.config.vocab_size
    for start in range(0, total, _HEAD_ROWS):
        yield target.head_rows(range(start, min(start + _HEAD_ROWS, total)))


def _dtype(evidence: Evidence) -> str:
    return str(evidence.last_TH.dtype).removeprefix("torch.")


def digest_of(evidence: Evidence, checks: list[Check]) -> str:
    """A name of what was proven: weights (embedding rows, final norm), prompt, layers, dtype and outcomes.

    No measured number goes in: bf16 results differ in their last digits from launch to launch, and a store must accept
    the next launch of the same model.
    """
    proven = {
        "ids": evidence.ids,
        "boundaries": len(evidence.boundaries),
        "layers": list(evidence.layers),
        "dtype": _dtype(evidence),
        "checks": [[check.name, check.ok] for check in checks],
    }
    digest = hashlib.blake2b(json.dumps(proven, sort_keys=True).encode(), digest_size=16)
    for tensor in (evidence.target.embed_rows(evidence.ids), evidence.target.final_norm()):
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
