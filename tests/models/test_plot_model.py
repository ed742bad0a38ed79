"""`keras.utils.plot_model` draws the models of this package. It needs pydot, of the extra `plots`, and Graphviz."""

import re
import shutil

import keras
import pytest

from keras_tx.models import CausalLM, MaskedLM, Seq2Seq, TextClassifier
from keras_tx.pretrained import PretrainedModel

pytestmark = pytest.mark.tensorflow
SIZES = {"num_layers": 1, "hidden_dim": 4, "num_heads": 1, "intermediate_dim": 4}
BERT = {"model_type": "bert", "vocab_size": 11, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
BERT |= {"intermediate_size": 4, "max_position_embeddings": 8}
MODELS = {  # and the classes of layers that a drawing shows
    "TextClassifier": (lambda: TextClassifier(11, 3, **SIZES), {"TokenEmbedding", "Encoder"}),
    "MaskedLM": (lambda: MaskedLM(11, **SIZES), {"TokenEmbedding", "Encoder"}),
    "CausalLM": (lambda: CausalLM(11, **SIZES), {"TokenEmbedding", "Decoder"}),
    "Seq2Seq": (lambda: Seq2Seq(11, **SIZES), {"TokenEmbedding", "Encoder", "Decoder"}),
    "PretrainedModel": (lambda: PretrainedModel(BERT, "sequence_classification"), {"TokenEmbedding", "Encoder"}),
}
ALL = {"show_shapes": True, "show_dtype": True, "show_layer_names": True, "expand_nested": True}
ALL |= {"show_layer_activations": True, "show_trainable": True}


@pytest.mark.parametrize("name", MODELS)
def test_a_drawing_shows_the_layers_of_a_model_and_how_they_are_connected(name):
    pytest.importorskip("pydot", reason="pydot is not installed")
    make, expected = MODELS[name]
    model = make()
    for options in ({}, ALL):
        drawn = keras.utils.model_to_dot(model, **options).to_string()
        layers = set(re.findall(r"\((\w+)\)</font>|<b>\w+</b> \((\w+)\)", drawn))
        assert expected <= {one for pair in layers for one in pair}
        assert drawn.count("->") >= len(expected)


def test_plot_model_writes_a_picture(tmp_path):
    pytest.importorskip("pydot", reason="pydot is not installed")
    if shutil.which("dot") is None:
        pytest.skip("Graphviz' program dot is not installed")
    keras.utils.plot_model(MODELS["Seq2Seq"][0](), tmp_path / "model.png", **ALL)
    assert (tmp_path / "model.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
