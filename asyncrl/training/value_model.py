"""The value model: a causal LM whose head is one number a token, the return to be expected from here on.

model directory -> [value_model] -> critic

Its state is that of a Hugging Face token classifier with one label, whose logit is the value.

Where we differ from verl 0.9.1:
1. The head starts at zero instead of at random: every first value is exactly 0, so the advantages of the first step are those
   without a baseline, and no seed has a say.
2. The head is float32 where the weights below are bfloat16, and so is its own computation under mixed precision.
"""

import json
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES

from asyncrl.config import FSDPConfig, ModelConfig
from asyncrl.training.mesh import Mesh
from asyncrl.training.model import Wrapper, decoder_layers, hidden_states, load_model, prepare
from asyncrl.training.placement import Placement
from asyncrl.training.sharding import shard
from asyncrl.training.token_batch import TokenBatch

_FSDP = FSDPConfig()
_HERE = Placement()


class ValueModel(Wrapper):
    """Values of chosen positions. The head is float32 or wider: a step of size lr is less than bfloat16 can add to a weight."""

    def __init__(self, lm: PreTrainedModel, placement: Placement = _HERE) -> None:
        super().__init__()
        self.placement = placement
        self._config = json.loads(lm.config.to_json_string()) | {
            "architectures": [MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.get(lm.config.model_type, "")],
            "id2label": {"0": "value"},
            "label2id": {"value": 0},
        }
        self._prefix = lm.base_model_prefix
        self.backbone = cast("PreTrainedModel", lm.base_model)
        wide = torch.promote_types(lm.dtype, torch.float32)
        self.score = nn.Linear(cast("int", lm.config.get_text_config().hidden_size), 1, dtype=wide, device=lm.device)
        nn.init.zeros_(self.score.weight)
        nn.init.zeros_(self.score.bias)

    @property
    def vocab_size(self) -> int:
        """Tokens that it has an embedding of."""
        return cast("nn.Embedding", self.backbone.get_input_embeddings()).num_embeddings

    def forward(self, batch: TokenBatch) -> torch.Tensor:
        """values_n, float32: for each policy token of the batch, read at the position that predicts it, before it is sampled."""
        part = self.placement.part(batch)
        values_n1: torch.Tensor = self.score(hidden_states(self.backbone, part).to(self.score.weight.dtype))
        return part.whole(values_n1[:, 0].clone())  # FSDP takes no view

    def hf_name(self, name: str) -> str:
        return name.replace("backbone.", f"{self._prefix}.", 1) if name.startswith("backbone.") else name

    def config_json(self) -> str:
        return json.dumps(self._config, indent=2, sort_keys=True) + "\n"


def build_value_model(config: ModelConfig, mesh: Mesh, fsdp: FSDPConfig = _FSDP, *, key: str = "critic.model_path") -> ValueModel:
    """The backbone of the causal LM at `config.path` under a head of zeros, sharded over the mesh. key: what names it to the user.

    Raises ModelError as `load_model` does, and ConfigError as `shard`.
    """
    lm = load_model(config, key=key)
    model = ValueModel(lm, prepare(lm, mesh, config))
    shard(model, decoder_layers(lm), mesh, fsdp, wide=[model.score])  # the head apart: the weights of a unit have one type
    return model
