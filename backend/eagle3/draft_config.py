"""The shape of a Llama-type EAGLE-3 draft, and the `config.json` that SGLang reads for it.

Owns: the translation in both directions, and the rule that layer ids are kept canonical (c = residual stream at the
input of decoder layer c) with SGLang's own numbering written only at this border.
Does not know tensors or training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backend.eagle3.rope import RopeConfig
from backend.eagle3.target import TargetConfig
from backend.engine.layers import default_layers, to_sglang_ids, validate_layers
from backend.errors import OperatorError

ARCHITECTURE = "LlamaForCausalLMEagle3"
# Our own block in config.json: SGLang and transformers keep unknown keys and ignore them.
OWN_KEY = "eagle3_console"


@dataclass(frozen=True)
class DraftConfig:
    """Everything that decides a draft's tensors and how SGLang runs them."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    layers: tuple[int, ...]
    target_architecture: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    dtype: str = "float32"

    @staticmethod
    def for_target(
        target: TargetConfig,
        *,
        draft_vocab_size: int,
        layers: Sequence[int] | None = None,
        dtype: str = "float32",
    ) -> DraftConfig:
        """A draft with the target's own widths, heads and rotary embedding.

        `layers` are canonical, EAGLE-3's default where None. Raises `OperatorError` with reason `bad_layers`, or
        `draft_unsupported` for an activation other than SiLU, which SGLang's Llama draft does not have.
        """
        captured = tuple(layers) if layers is not None else default_layers(target.num_hidden_layers)
        validate_layers(captured, target.num_hidden_layers)
        if target.hidden_act != "silu":
            raise OperatorError(
                f"the target's activation is {target.hidden_act!r}; SGLang's Llama draft computes SiLU",
                reason="draft_unsupported",
            )
        return DraftConfig(
            hidden_size=target.hidden_size,
            intermediate_size=target.intermediate_size,
            num_attention_heads=target.num_attention_heads,
            num_key_value_heads=target.num_key_value_heads,
            head_dim=target.head_dim,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            rms_norm_eps=target.rms_norm_eps,
            max_position_embeddings=target.max_position_embeddings,
            rope=target.rope,
            layers=captured,
            target_architecture=target.architecture,
            bos_token_id=target.bos_token_id,
            eos_token_ids=target.eos_token_ids,
            pad_token_id=target.pad_token_id,
            dtype=dtype,
        )

    def as_json(self) -> dict[str, Any]:
        """SGLang's `config.json`. Layer ids stand under `eagle_config`, where alone SGLang reads them.

        The rotary embedding is written in both spellings: `rope_parameters` (transformers 5) and `rope_theta` +
        `rope_scaling` (transformers 4), since either may load it.
        """
        rope = self.rope.as_rope_parameters()
        scaling = None if self.rope.kind == "default" else {k: v for k, v in rope.items() if k != "rope_theta"}
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_ids),
            "pad_token_id": self.pad_token_id,
            "rope_theta": self.rope.theta,
            "rope_scaling": scaling,
            "rope_parameters": rope,
            "torch_dtype": self.dtype,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": to_sglang_ids(self.layers, self.target_architecture),
            },
            OWN_KEY: {"canonical_layers": list(self.layers), "target_architecture": self.target_architecture},
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> DraftConfig:
        """Rebuild from a `config.json` that `as_json` made.

        Raises `OperatorError` (reason `draft_config`) naming the key that is missing, has the wrong type, or that
        SGLang would read differently from what was trained.
        """
        try:
            own = data[OWN_KEY]
            config = DraftConfig(
                hidden_size=int(data["hidden_size"]),
                intermediate_size=int(data["intermediate_size"]),
                num_attention_heads=int(data["num_attention_heads"]),
                num_key_value_heads=int(data["num_key_value_heads"]),
                head_dim=int(data["head_dim"]),
                vocab_size=int(data["vocab_size"]),
                draft_vocab_size=int(data["draft_vocab_size"]),
                rms_norm_eps=float(data["rms_norm_eps"]),
                max_position_embeddings=int(data["max_position_embeddings"]),
                rope=RopeConfig.from_model_config(data),
                layers=tuple(int(c) for c in own["canonical_layers"]),
                target_architecture=str(own["target_architecture"]),
                bos_token_id=data["bos_token_id"],
                eos_token_ids=tuple(int(t) for t in data["eos_token_id"]),
                pad_token_id=data["pad_token_id"],
                dtype=str(data["torch_dtype"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise OperatorError(
                f"the draft's config.json is not one of ours: {error!r}", fix="export again", reason="draft_config"
            ) from error
        expected = config.as_json()
        differing = sorted(key for key in expected if data.get(key) != expected[key])
        if differing:
            key = differing[0]
            raise OperatorError(
                f"the draft's config.json has {key} = {data.get(key)!r} where training had {expected[key]!r}",
                fix="do not edit an exported config; export again",
                reason="draft_config",
            )
        return config
