"""Training of a draft in one process: batches → TTT loss → AdamW, with evaluation, checkpoints and exact resume.

Owns: the order of these things and their bookkeeping. The loss is `ttt.py`'s, the batches `batches.py`'s, the numbers'
way out `curves.py`'s. float32 on the CPU; the same code under bf16 autocast with float32 weights on CUDA.
Does not know stages, run directories or signals: the caller passes `stop`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from backend.eagle3.accept import AcceptEstimate, Walk, estimate_accept
from backend.eagle3.batches import collate, has_supervision, plan_batches
from backend.eagle3.checkpoints import Checkpoint, load_latest, save_checkpoint
from backend.eagle3.curves import Curves
from backend.eagle3.draft import LlamaEagle3Draft, draft_class
from backend.eagle3.draft_config import DraftConfig
from backend.eagle3.export import check_export, export_draft, require
from backend.eagle3.initial import initialise
from backend.eagle3.records import RecordSource, RecordTokens, TrainingRecord, all_tokens
from backend.eagle3.schedule import lr_factor, share_done
from backend.eagle3.settings import TrainSettings
from backend.eagle3.target import FrozenTarget, TargetCheckpoint
from backend.eagle3.teacher import Teacher
from backend.eagle3.ttt import TttSums, ttt_sums
from backend.eagle3.vocab import Coverage, DraftVocab, build_vocab, coverage
from backend.errors import OperatorError, UsageError
from backend.report import Reporter

LOSS_WINDOW = 20


@dataclass(frozen=True)
class EvalPoint:
    """One evaluation on the validation records."""

    step: int
    seconds: float
    estimate: AcceptEstimate


@dataclass(frozen=True)
class TrainResult:
    """What a run reached. Losses are means over the first and last `LOSS_WINDOW` steps; `tokens` count every pass.

    `draft_dir` is None where the run was stopped before its end; it continues from its checkpoint.
    """

    finished: bool
    steps: int
    epochs_done: int
    seconds: float
    tokens: int
    tokens_s: float
    loss_first: float
    loss_last: float
    losses: tuple[float, ...]
    evaluations: tuple[EvalPoint, ...]
    records_used: int
    records_without_supervision: int
    pairs: int
    off_vocab_pairs: int
    coverage_train: Coverage
    coverage_validation: Coverage
    draft_dir: Path | None
    untrained_dir: Path


@dataclass
class Progress:
    """Where a run stands: everything beside tensors that a resumed run needs. `position` is the next batch."""

    epoch: int = 0
    position: int = 0
    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    pairs: int = 0
    off_vocab_pairs: int = 0
    losses: list[float] = field(default_factory=list)
    evaluations: list[EvalPoint] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON; floats survive exactly."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Progress:
        """The inverse of `as_json`."""
        points = [_eval_point(point) for point in data["evaluations"]]
        return Progress(**{**data, "evaluations": points})


def train(
    settings: TrainSettings,
    train_records: RecordSource,
    validation_records: RecordSource,
    target: TargetCheckpoint,
    out_dir: Path,
    reporter: Reporter,
    *,
    stop: Callable[[], bool] = lambda: False,
) -> TrainResult:
    """Train a draft for `target`, or continue the run whose checkpoints stand in `out_dir`.

    Writes under `out_dir`: `untrained/` and `draft/` (exports, checked), `checkpoints/`, `tensorboard/`. `stop` is
    asked before each step; once it says yes, a checkpoint is written and the result is unfinished. With a fixed thread
    count on a CPU, a resumed run's steps are bit-equal to those of an uninterrupted one (schedule "cosine_steps").
    Raises `OperatorError` with reason `no_supervision`, `non_finite` (names the record), `draft_broken`, and what the
    parts raise (`checkpoint_foreign` …).
    """
    out_dir = Path(out_dir)
    with _threads(settings.threads):
        run = _Run(settings, train_records, validation_records, target, out_dir, reporter)
        with Curves(out_dir / "tensorboard", reporter, run.progress.step) as curves:
            finished = run.go(curves, stop)
        draft_dir = None
        if finished:
            draft_dir = out_dir / "draft"
            export_draft(run.draft, draft_dir, dtype=run.export_dtype)
            checks = check_export(draft_dir, target)
            for check in checks:
                reporter.check(check)
            require(checks)
        return run.result(finished, draft_dir)


class _Run:
    """One run's objects. Everything that decides a step's result is in `draft`, `optimizer` and `progress`."""

    def __init__(
        self,
        settings: TrainSettings,
        train_records: RecordSource,
        validation_records: RecordSource,
        target: TargetCheckpoint,
        out_dir: Path,
        reporter: Reporter,
    ) -> None:
        self.settings, self.reporter = settings, reporter
        self.train_records, self.validation_records = train_records, validation_records
        self.checkpoint_root, self.untrained_dir = out_dir / "checkpoints", out_dir / "untrained"
        self.device = torch.device(settings.device)
        self.export_dtype = "bfloat16" if self.device.type == "cuda" else "float32"
        tokens = all_tokens(train_records)
        self.usable = [index for index, record in enumerate(tokens) if has_supervision(record)]
        self.lengths = [len(tokens[index].input_ids_T) for index in self.usable]
        self.unsupervised = len(tokens) - len(self.usable)
        if not self.usable:
            raise UsageError(
                f"none of the {len(tokens)} training records has an assistant turn of two tokens or more",
                fix="look at the merge report: the loss masks are empty",
                reason="no_supervision",
            )
        vocab = self._vocabulary(tokens, target)
        self.draft = self._new_draft(vocab, target)
        wide = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.target: FrozenTarget = target.frozen(wide).to(self.device, wide)
        self.teacher = Teacher(self.target, self.draft.target_ids_R)
        self.optimizer = torch.optim.AdamW(
            self.draft.parameters(), lr=settings.lr, betas=settings.betas, weight_decay=0.0, fused=True
        )
        self.total_steps = sum(len(self._plan(epoch)) for epoch in range(settings.epochs))
        self.identity = settings.identity() | {"records": _digest(tokens), "draft_vocabulary": _digest_vocab(vocab)}
        self.progress = self._resumed()

    def go(self, curves: Curves, stop: Callable[[], bool]) -> bool:
        """Run to the end of the epochs or of the time; False where `stop` ended it first."""
        if not self.progress.evaluations:
            self._evaluate(curves)
        due_eval = _Due(self.settings.eval_every_s, self.settings.eval_every_steps, self.progress)
        due_save = _Due(self.settings.checkpoint_every_s, self.settings.checkpoint_every_steps, self.progress)
        while self.progress.epoch < self.settings.epochs and not self._out_of_time():
            plan = self._plan(self.progress.epoch)
            while self.progress.position < len(plan) and not self._out_of_time():
                if stop():
                    self._save()
                    return False
                self._step(plan[self.progress.position], curves)
                if due_eval.now(self.progress):
                    self._evaluate(curves)
                if due_save.now(self.progress):
                    self._save()
            if self.progress.position >= len(plan):
                self.progress.epoch, self.progress.position = self.progress.epoch + 1, 0
        if self.progress.evaluations[-1].step != self.progress.step:
            self._evaluate(curves)
        self._save()
        return True

    def result(self, finished: bool, draft_dir: Path | None) -> TrainResult:
        """The run as values."""
        p = self.progress
        first, last = p.losses[:LOSS_WINDOW], p.losses[-LOSS_WINDOW:]
        return TrainResult(
            finished=finished,
            steps=p.step,
            epochs_done=p.epoch,
            seconds=p.seconds,
            tokens=p.tokens,
            tokens_s=p.tokens / p.seconds if p.seconds else 0.0,
            loss_first=sum(first) / len(first) if first else float("nan"),
            loss_last=sum(last) / len(last) if last else float("nan"),
            losses=tuple(p.losses),
            evaluations=tuple(p.evaluations),
            records_used=len(self.usable),
            records_without_supervision=self.unsupervised,
            pairs=p.pairs,
            off_vocab_pairs=p.off_vocab_pairs,
            coverage_train=self.coverage_train,
            coverage_validation=self.coverage_validation,
            draft_dir=draft_dir,
            untrained_dir=self.untrained_dir,
        )

    def _vocabulary(self, tokens: Sequence[RecordTokens], target: TargetCheckpoint) -> DraftVocab:
        vocab = build_vocab(
            tokens,
            self.settings.draft_vocab_size,
            target_size=target.config.vocab_size,
            special_ids=target.config.special_ids,
        )
        self.coverage_train = coverage(vocab, tokens)
        self.coverage_validation = coverage(vocab, all_tokens(self.validation_records))
        self.reporter.note(
            f"draft vocabulary of {len(vocab)}: holds {self.coverage_train.share:.1%} of the training and "
            f"{self.coverage_validation.share:.1%} of the validation predictions"
        )
        return vocab

    def _new_draft(self, vocab: DraftVocab, target: TargetCheckpoint) -> LlamaEagle3Draft:
        config = DraftConfig.for_target(target.config, draft_vocab_size=len(vocab), layers=self.settings.layers)
        draft = draft_class(self.settings.arch)(config, vocab)
        initialise(draft, target, init=self.settings.init, seed=self.settings.seed)
        export_draft(draft, self.untrained_dir, dtype=self.export_dtype)
        return draft.to(self.device)

    def _plan(self, epoch: int) -> list[tuple[int, ...]]:
        return plan_batches(self.lengths, self.settings.batch_tokens, seed=self.settings.seed, epoch=epoch)

    def _out_of_time(self) -> bool:
        limit = self.settings.max_seconds
        return limit is not None and self.progress.seconds >= limit

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    def _sums(self, records: Sequence[TrainingRecord]) -> TttSums:
        steps = self.settings.ttt_steps
        batch = collate(records, steps, self.device)
        argmax_BS = self.teacher.argmax_of_batch(records, batch.input_ids_BS.shape[1])
        with self._autocast():
            return ttt_sums(self.draft, self.target, self.teacher, batch, argmax_BS, steps)

    def _step(self, places: Sequence[int], curves: Curves) -> None:
        started = time.monotonic()
        p, s = self.progress, self.settings
        records = [self.train_records.load(self.usable[place]) for place in places]
        for record in records:
            if not bool(record.aux_TC.isfinite().all() & record.last_TH.isfinite().all()):
                raise self._non_finite([record.id], "its captured states hold NaN or Inf")
        share = share_done(s.schedule, p.step, self.total_steps, p.seconds, s.max_seconds)
        lr = s.lr * lr_factor(share, s.warmup_share)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        sums = self._sums(records)
        loss = sums.mean()
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.draft.parameters(), s.clip)
        if not bool(torch.isfinite(loss) & torch.isfinite(norm)):
            raise self._non_finite(self._guilty(records), "its loss or gradient is not finite")
        self.optimizer.step()
        p.step, p.position = p.step + 1, p.position + 1
        p.tokens += sum(len(record.input_ids_T) for record in records)
        p.pairs += int(sums.count_K.sum())
        p.off_vocab_pairs += int(sums.off_vocab_K.sum())
        p.losses.append(loss.item())
        p.seconds += time.monotonic() - started
        self._tell(curves, sums, lr, norm.item())

    def _tell(self, curves: Curves, sums: TttSums, lr: float, norm: float) -> None:
        p = self.progress
        first = float(sums.hit_K[0]) / max(1.0, float(sums.count_K[0] + sums.off_vocab_K[0]))
        values = {"lr": lr, "grad_norm": norm, "accuracy_0": first, "tokens_s": p.tokens / p.seconds}
        curves.training(p.step, p.seconds, p.losses[-1], values)
        if self.settings.max_seconds is None:
            self.reporter.progress(p.step, self.total_steps, "steps", tokens_s=values["tokens_s"])
        else:
            done = int(min(p.seconds, self.settings.max_seconds))
            self.reporter.progress(done, int(self.settings.max_seconds), "s", tokens_s=values["tokens_s"])

    def _evaluate(self, curves: Curves) -> None:
        with self._autocast():
            estimate, _ = estimate_accept(
                self.draft,
                self.target,
                self.validation_records,
                steps=self.settings.ttt_steps,
                batch_tokens=self.settings.batch_tokens,
                device=self.device,
            )
        self.progress.evaluations.append(EvalPoint(self.progress.step, self.progress.seconds, estimate))
        curves.accept(self.progress.step, estimate)

    def _guilty(self, records: Sequence[TrainingRecord]) -> list[str]:
        """The records whose own loss is not finite; the whole batch where only the gradient is not."""
        with torch.no_grad():
            found = [record.id for record in records if not bool(self._sums([record]).mean().isfinite())]
        return found or [record.id for record in records]

    def _non_finite(self, ids: Sequence[str], why: str) -> OperatorError:
        return OperatorError(
            f"training stopped at step {self.progress.step + 1}: record {', '.join(ids)}: {why}",
            fix="verify that record in the store, or lower lr; the last checkpoint is from before this step",
            reason="non_finite",
        )

    def _save(self) -> None:
        tensors = {"model": self.draft.state_dict(), "optimizer": self.optimizer.state_dict()}
        state = Checkpoint(tensors, self.progress.as_json(), self.identity)
        save_checkpoint(self.checkpoint_root, self.progress.step, state, keep=self.settings.keep_checkpoints)

    def _resumed(self) -> Progress:
        found = load_latest(self.checkpoint_root, self.identity, self.device)
        if found is None:
            return Progress()
        self.draft.load_state_dict(found.tensors["model"])
        self.optimizer.load_state_dict(found.tensors["optimizer"])
        progress = Progress.from_json(found.progress)
        self.reporter.note(f"continuing from the checkpoint of step {progress.step}")
        return progress


class _Due:
    """Whether something is due again: so many training seconds after the last time, or at a multiple of steps."""

    def __init__(self, every_s: float | None, every_steps: int | None, progress: Progress) -> None:
        self._every_s, self._every_steps = every_s, every_steps
        self._last_s = progress.seconds

    def now(self, progress: Progress) -> bool:
        by_time = self._every_s is not None and progress.seconds - self._last_s >= self._every_s
        by_steps = self._every_steps is not None and progress.step % self._every_steps == 0
        if by_time or by_steps:
            self._last_s = progress.seconds
        return by_time or by_steps


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _digest(records: Sequence[RecordTokens]) -> str:
    """Identity of the training data: ids are content ids, so ids, turns and lengths in order say it all."""
    digest = hashlib.blake2b(digest_size=16)
    for record in records:
        digest.update(f"{record.id} {len(record.input_ids_T)} {record.spans}\n".encode())
    return digest.hexdigest()


def _digest_vocab(vocab: DraftVocab) -> str:
    return hashlib.blake2b(vocab.ids_R.numpy().tobytes(), digest_size=16).hexdigest()


def _eval_point(data: dict[str, Any]) -> EvalPoint:
    estimate = dict(data["estimate"])
    estimate["walk"] = Walk(**estimate["walk"])
    estimate["by_depth"] = tuple(estimate["by_depth"])
    return EvalPoint(data["step"], data["seconds"], AcceptEstimate(**estimate))
