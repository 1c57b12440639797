"""The run config: one typed tree shared by both sides.

Owns the shape and the defaults of `eagle3.toml`. The console resolves a config (`backend.resolve`) to plain JSON; the
host reads that JSON back with `Config.model_validate`. Knows nothing of files, environment variables or stages.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    """A config table: frozen, and a key that it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class HostConfig(Section):
    """Where the stages run. `address` is "local"; `python` is the interpreter that has torch and SGLang."""

    address: str = "local"
    work: str = "."
    home: str = ""
    python: str = ""
    device: Literal["cpu", "cuda"] = "cuda"
    gpus: Annotated[int, Field(ge=0)] = 8


class TargetConfig(Section):
    """The model that the draft is made for. The figures are for planning, until its config.json can be read."""

    name: str
    model: str
    trust_remote_code: bool = False
    hidden_size: Positive | None = None
    num_layers: Positive | None = None
    vocab_size: Positive | None = None
    weight_gb: Annotated[float, Field(gt=0)] | None = None


class SourceConfig(Section):
    """One data source: files, folders or globs in one format. `max_bad` is the share of records it may lose."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    paths: Annotated[list[str], Field(min_length=1)]
    format: str = "auto"
    on_policy: bool = False
    max_records: Positive | None = None
    max_bad: Share = 0.01


class DataConfig(Section):
    """The merge: sources, the split, and what happens to records longer than `max_tokens`."""

    sources: Annotated[list[SourceConfig], Field(min_length=1)]
    out: str = "data"
    max_tokens: Positive = 8192
    overlength: Literal["drop", "cut"] = "cut"
    heldout_share: Share = 0.01
    validation_share: Share = 0.005
    seed: int = 0
    expected_records: Positive | None = None
    expected_tokens: Positive | None = None

    @model_validator(mode="after")
    def _names_are_unique(self) -> DataConfig:
        names = [source.name for source in self.sources]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"source name used twice: {', '.join(twice)}")
        return self

    @model_validator(mode="after")
    def _something_is_left_to_train_on(self) -> DataConfig:
        if self.heldout_share + self.validation_share >= 1:
            raise ValueError(
                f"heldout_share {self.heldout_share} + validation_share {self.validation_share} leave nothing"
            )
        return self


class CaptureConfig(Section):
    """How hidden states leave SGLang. `layers` are canonical indices (input of layer c); empty = [2, N//2, N-3]."""

    route: Literal["plugin"] = "plugin"
    layers: list[Annotated[int, Field(ge=0)]] = []
    dump_dir: str = "/dev/shm/sglang_hs"

    @model_validator(mode="after")
    def _layers_ascend(self) -> CaptureConfig:
        if self.layers != sorted(set(self.layers)):
            raise ValueError(f"layers = {self.layers} must be distinct and ascending")
        return self


class StoreConfig(Section):
    """The hidden-state store. `reserve_gb` overrides the free space that is never used (see docs/store.md)."""

    root: str = "store"
    scheme: Literal["bf16", "float32", "aux8"] = "bf16"
    shard_gb: Annotated[float, Field(gt=0)] = 2.0
    reserve_gb: Annotated[float, Field(ge=0)] | None = None


OWNED_FLAGS = frozenset(
    f"--{name}"
    for name in (
        *("model-path", "model", "host", "port", "tp-size", "tensor-parallel-size", "weight-version", "dtype"),
        *("attention-backend", "mem-fraction-static", "max-total-tokens", "max-running-requests"),
        *("chunked-prefill-size", "context-length", "trust-remote-code", "device"),
        *("speculative-algorithm", "speculative-draft-model-path", "speculative-num-steps"),
        *("speculative-eagle-topk", "speculative-num-draft-tokens"),
    )
)
"""Flags of SGLang that the config sets itself: given twice, the last one would silently win."""


class EngineConfig(Section):
    """Settings of one SGLang launch. None = SGLang's own default, and `plan` says so."""

    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    attention_backend: str | None = None
    mem_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    max_total_tokens: Positive | None = None
    max_running_requests: Positive | None = None
    chunked_prefill: Positive | None = None
    context_length: Positive | None = None
    extra_args: list[str] = []
    env: dict[str, str] = {}

    @model_validator(mode="after")
    def _extra_args_contradict_nothing(self) -> EngineConfig:
        ours = sorted({arg.partition("=")[0] for arg in self.extra_args} & OWNED_FLAGS)
        if ours:
            raise ValueError(f"extra_args may not set {', '.join(ours)}: the config has keys for that")
        return self


class ServerConfig(EngineConfig):
    """The extraction server, and the address that every server of the pipeline uses."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(gt=0, le=55535)] = 8000
    """At most 55535: SGLang takes this port and another one 10000 above it."""
    tp: Positive = 1
    expected_load_s: Annotated[float, Field(gt=0)] = 300.0


class GateConfig(Section):
    """The readiness gate: attempts × interval and a deadline, whichever comes first; times in seconds."""

    attempts: Positive = 60
    interval_s: Annotated[float, Field(gt=0)] = 10.0
    deadline_s: Annotated[float, Field(gt=0)] = 600.0
    warn_after_s: Annotated[float, Field(gt=0)] | None = None
    probe_timeout_s: Annotated[float, Field(gt=20)] = 25.0
    stability_s: Annotated[float, Field(ge=0)] = 10.0
    hf_parity: bool = False


class ExtractConfig(Section):
    """The extractor: requests in flight, and the rate assumed by `plan` until one is measured."""

    concurrency: Positive = 32
    expected_tokens_s: Annotated[float, Field(gt=0)] | None = None


class TrainConfig(Section):
    """Draft training. `schedule = "cosine_wall"` decays over `max_seconds`, "cosine_steps" over the epochs' steps."""

    out: str = "train"
    arch: Literal["llama"] = "llama"
    ttt_steps: Annotated[int, Field(ge=1, le=16)] = 7
    batch_tokens: Positive = 8192
    lr: Annotated[float, Field(gt=0)] = 1e-4
    warmup_share: Share = 0.015
    clip: Annotated[float, Field(gt=0)] = 1.0
    schedule: Literal["cosine_steps", "cosine_wall"] = "cosine_steps"
    epochs: Positive = 1
    max_seconds: Annotated[float, Field(gt=0)] | None = None
    seed: int = 0
    draft_vocab_size: Positive = 32000
    init: Literal["layer", "random"] = "random"
    threads: Positive | None = None
    checkpoint_every_s: Annotated[float, Field(gt=0)] = 600.0
    eval_every_s: Annotated[float, Field(gt=0)] = 600.0
    expected_tokens_s: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _wall_schedule_has_an_end(self) -> TrainConfig:
        if self.schedule == "cosine_wall" and self.max_seconds is None:
            raise ValueError('schedule = "cosine_wall" needs max_seconds')
        return self


class DeployConfig(EngineConfig):
    """The speculative server. `keep` leaves it running at the end of the pipeline."""

    spec_steps: Positive = 3
    spec_topk: Positive = 1
    spec_draft_tokens: Positive = 4
    keep: bool = True

    @model_validator(mode="after")
    def _a_chain_has_one_token_a_step(self) -> DeployConfig:
        if self.spec_topk == 1 and self.spec_draft_tokens != self.spec_steps + 1:
            raise ValueError(
                f"spec_draft_tokens = {self.spec_draft_tokens}: with spec_topk = 1 it must be spec_steps + 1 = "
                f"{self.spec_steps + 1} (SGLang would change it silently)"
            )
        return self


class BenchConfig(Section):
    """The benchmark: held-out prompts × new tokens, per concurrency, beside the named baselines."""

    prompts: Positive = 64
    max_new_tokens: Positive = 256
    concurrency: Annotated[list[Positive], Field(min_length=1)] = [1, 8]
    baselines: list[Literal["none", "untrained"]] = ["none"]


class Config(Section):
    """The whole run config; `docs/config.md` shows it with every default."""

    host: HostConfig = HostConfig()
    target: TargetConfig
    data: DataConfig
    capture: CaptureConfig = CaptureConfig()
    store: StoreConfig = StoreConfig()
    server: ServerConfig = ServerConfig()
    gate: GateConfig = GateConfig()
    extract: ExtractConfig = ExtractConfig()
    train: TrainConfig = TrainConfig()
    deploy: DeployConfig = DeployConfig()
    bench: BenchConfig = BenchConfig()

    @model_validator(mode="after")
    def _the_gpus_are_enough(self) -> Config:
        if self.host.device == "cuda" and self.server.tp > self.host.gpus:
            raise ValueError(f"[server] tp = {self.server.tp} needs more than the {self.host.gpus} GPUs of [host] gpus")
        return self
