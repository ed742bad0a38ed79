"""`is_causal` of config.json makes decoders of transformers see later tokens, and keeps encoders from doing so."""

import numpy as np
import pytest
import torch
import transformers

from keras_tx.pretrained import registry
from keras_tx.pretrained.registry import read_family
from tests.pretrained.small_configs import small

IDS = np.array([[5, 9, 2, 7, 11, 3]])


def answers(config):
    """What a model of transformers with random weights computes for this config."""
    torch.manual_seed(3)
    kind = transformers.AutoConfig.for_model(config["model_type"])
    model = transformers.AutoModel.from_config(type(kind)(**config)).eval()
    inputs = {"input_ids": torch.tensor(IDS)}
    if config["model_type"] == "vit":
        inputs = {"pixel_values": torch.linspace(-1, 1, 3 * 8 * 8).reshape(1, 3, 8, 8) ** 2}
    elif kind.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.tensor(IDS + 1)
    with torch.no_grad():
        for parameter in model.parameters():  # attention with the initial weights is nearly uniform
            parameter.add_(0.3 * torch.randn_like(parameter))
        return model(**inputs).last_hidden_state.numpy()


@pytest.mark.parametrize("model_type", sorted(registry.FILES))
def test_is_causal_is_refused_where_it_changes_what_transformers_computes(model_type):
    defaults = transformers.AutoConfig.for_model(model_type).to_dict()
    config = small({name: value for name, value in defaults.items() if value is not None})
    config |= {"image_size": 8, "patch_size": 4} if model_type == "vit" else {}
    with torch.device("cpu"):
        usual, given = answers(config), {value: answers({**config, "is_causal": value}) for value in (True, False)}
    read_family({**config, "is_causal": None}, "base")
    accepted = []
    for value, computed in given.items():
        if np.allclose(computed, usual, rtol=0, atol=1e-5):
            accepted.append(value)
            read_family({**config, "is_causal": value}, "base")
        else:
            assert np.abs(computed - usual).max() > 1e-3
            with pytest.raises(ValueError, match=f"`is_causal` in config.json must be .* Received: is_causal={value}"):
                read_family({**config, "is_causal": value}, "base")
    assert len(accepted) == (0 if registry.FILES[model_type] in ("bart", "marian", "t5") else 1)
