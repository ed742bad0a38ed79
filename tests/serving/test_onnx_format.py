"""Models exported to ONNX, with their tokenizers, answer in ONNX Runtime as live."""

import json
import shutil
import sys

import keras
import numpy as np
import pytest

from keras_tx.models import CausalLM, MaskedLM
from keras_tx.pretrained import PretrainedModel, from_pretrained
from keras_tx.serving import export
from keras_tx.text import load_tokenizer
from tests.pretrained import tiny
from tests.serving.conftest import LABELS, VOCABULARY
from tests.serving.user_models import bag
from tests.tools import assert_close, randomize, to_numpy

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.filterwarnings("ignore:In the future `np.object`:FutureWarning"),  # of Keras' patch of tf2onnx
]
SIZES = dict(num_layers=1, hidden_dim=8, num_heads=2, intermediate_dim=5)
TEXTS = ["the cat sat", "", "not wonderful but dull , one two three café !"]


def bert():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 5}
    labels = {"id2label": dict(enumerate(LABELS)), "max_position_embeddings": 16}
    config = {"model_type": "bert", "vocab_size": len(VOCABULARY), "hidden_act": "gelu", **sizes, **labels}
    return PretrainedModel(config, "sequence_classification")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["classifier", "masked_lm", "bert"])
def test_texts_are_answered_as_by_the_live_model(kind, make, tokenizer, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    transformers = pytest.importorskip("transformers")
    model = {"classifier": make, "masked_lm": lambda: MaskedLM(len(VOCABULARY), **SIZES), "bert": bert}[kind]()
    randomize(model, seed=3)
    labels = {"labels": LABELS} if kind == "classifier" else {}
    version = export(model, tmp_path / "reviews", tokenizer=tokenizer, format="onnx", **labels)
    assert version == tmp_path / "reviews" / "1"
    card = json.loads((version / "MODEL_CARD.json").read_text())
    assert card.get("labels") == (None if kind == "masked_lm" else LABELS)
    assert 0 < card["largest_difference"] < 1e-4
    assert card["name"] == "reviews" and card["tokenizer"]["kind"] == "BertTokenizer"
    assert card["model"]["dtypes"] == ["float32"] and card["model"]["parameters"] == model.count_params()
    assert card["versions"]["onnxruntime"] == onnxruntime.__version__ and card["exported"].endswith("+00:00")

    # As one does who has neither Keras nor TensorFlow.
    session = onnxruntime.InferenceSession(version / "model.onnx", providers=["CPUExecutionProvider"])
    ids = transformers.AutoTokenizer.from_pretrained(version)(TEXTS, padding=True, return_tensors="np")
    own = load_tokenizer(version)(TEXTS)
    np.testing.assert_array_equal(ids["input_ids"], own["token_ids"])
    values = {"token_ids": ids["input_ids"], "segment_ids": ids["token_type_ids"], "input_ids": ids["input_ids"], **ids}
    fed = {one.name: values[one.name].astype("int32") for one in session.get_inputs()}
    assert list(card["inputs"]) == list(fed)
    (name,) = card["outputs"]
    (answers,) = session.run([name], fed)
    expected = model(fed if len(fed) > 1 else fed["token_ids"], training=False)
    expected = to_numpy(keras.tree.flatten(expected)[0])
    real = ids["attention_mask"].astype(bool) if kind == "masked_lm" else slice(None)
    assert_close(answers[real], expected[real], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("text_pairs", [False, True])
def test_the_file_takes_what_the_tokenizer_makes(tmp_path, text_pairs):
    """RoBERTa knows a single segment, of which its tokenizer says nothing."""
    onnxruntime = pytest.importorskip("onnxruntime")
    path = tiny.checkpoint("roberta")
    model, tokenizer = from_pretrained(path, task="base"), load_tokenizer(path, max_length=17)
    version = export(model, tmp_path / "roberta", tokenizer=tokenizer, format="onnx", text_pairs=text_pairs)
    session = onnxruntime.InferenceSession(version / "model.onnx")
    names = {one.name for one in session.get_inputs()}
    assert (
        names == {*json.loads((version / "MODEL_CARD.json").read_text())["inputs"]} == {"input_ids", "attention_mask"}
    )
    ids = to_numpy(tokenizer(TEXTS, **({"pairs": TEXTS[::-1]} if text_pairs else {}))["token_ids"])
    fed = {"input_ids": ids, "attention_mask": (ids != tokenizer.pad_id).astype("int32")}
    (found,), live = session.run(["last_hidden_state"], fed), model(fed)["last_hidden_state"]
    real = fed["attention_mask"].astype(bool)
    assert_close(found[real], to_numpy(live)[real], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_pairs_of_texts_are_compared_and_answered(tokenizer, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    model = randomize(bert(), seed=3)
    version = export(model, tmp_path / "pairs", tokenizer=tokenizer, format="onnx", text_pairs=True)
    card = json.loads((version / "MODEL_CARD.json").read_text())
    assert card["text_pairs"] is True and card["multi_label"] is False and 0 < card["largest_difference"] < 1e-4
    session = onnxruntime.InferenceSession(version / "model.onnx", providers=["CPUExecutionProvider"])
    found = load_tokenizer(version)(TEXTS, TEXTS[::-1])
    ids, segments = (to_numpy(found[name]) for name in ("token_ids", "segment_ids"))
    fed = {"input_ids": ids, "token_type_ids": segments, "attention_mask": (ids != 0).astype("int32")}
    fed = {one.name: fed[one.name] for one in session.get_inputs()}
    assert "token_type_ids" in fed and segments.any()
    assert_close(session.run(["logits"], fed)[0], model(fed)["logits"], atol=1e-5)


@pytest.mark.slow
def test_without_a_tokenizer_rows_of_ids_are_compared(make, tmp_path, monkeypatch):
    onnxruntime = pytest.importorskip("onnxruntime")
    model = make(pooling="max")
    version = export(model, tmp_path / "reviews", format="onnx")
    assert sorted(one.name for one in version.iterdir()) == ["MODEL_CARD.json", "model.onnx"]
    written, session = version / "model.onnx", onnxruntime.InferenceSession
    ids = np.array([[7, 2, 0], [0, 0, 0], [5, 5, 3]], "int32")  # the second row is padding alone
    assert_close(session(written).run(None, {"token_ids": ids})[0], model(ids), atol=1e-5)
    # It is the same model, whose conversion takes seconds.
    monkeypatch.setattr(keras.Model, "export", lambda self, path, **options: shutil.copy(written, path))
    messages = {1e-2: r"differ by \d", np.nan: "differ by nan", None: r"of shape \(2, 3\) live and \(2, 1\) in ONNX"}
    for wrong, message in messages.items():

        class Wrong(session):
            def run(self, *arguments, error=wrong):
                found = super().run(*arguments)
                return [one[:, :1] if error is None else one + np.float32(error) for one in found]

        monkeypatch.setattr(onnxruntime, "InferenceSession", Wrong)
        with pytest.raises(ValueError, match=rf"`model` must have .* in ONNX Runtime.*Received: .*{message}"):
            export(model, tmp_path / "reviews", format="onnx")
        assert [one.name for one in (tmp_path / "reviews").iterdir()] == ["1"]
    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    assert export(model, tmp_path / "reviews", format="onnx").name == "2"  # else the errors above would show nothing


def test_a_model_whose_outputs_depend_on_padding_is_refused(tmp_path):
    ids = keras.Input((None,), dtype="int32")
    mean = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(11, 3)(ids))
    with pytest.raises(ValueError, match="padding"):
        export(keras.Model(ids, keras.layers.Dense(2)(mean)), tmp_path / "mean", format="onnx")
    assert not (tmp_path / "mean").exists()


@pytest.mark.slow
def test_a_model_that_has_no_answer_to_padding_alone_is_exported(tmp_path):
    """It divides by the number of real tokens."""
    onnxruntime = pytest.importorskip("onnxruntime")
    ids = keras.Input((None,), dtype="int32", name="ids")
    mean = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(11, 3, mask_zero=True)(ids))
    model = keras.Model(ids, keras.layers.Dense(2)(mean))
    rows = np.array([[7, 2, 0], [5, 10, 3], [0, 0, 0]], "int32")
    live = to_numpy(model(rows))
    assert np.isnan(live[2]).all()
    version = export(model, tmp_path / "mean", format="onnx")
    assert_close(
        onnxruntime.InferenceSession(version / "model.onnx").run(None, {"ids": rows[:2]})[0], live[:2], atol=1e-5
    )


class Bessel(keras.layers.Layer):
    """An operation that TensorFlow has and ONNX lacks."""

    def call(self, x):
        import tensorflow as tf

        return tf.math.bessel_i0(x)


@pytest.mark.parametrize("stage", ["run", "convert"])
def test_an_operation_that_onnx_lacks_is_named(stage, tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("tf2onnx")
    if stage == "convert":

        def fail(self, path, **options):
            raise NotImplementedError(f"BesselI0 cannot be written to {path}")

        monkeypatch.setattr(keras.Model, "export", fail)
    message = "`model` must have operations that ONNX has. Received: .*BesselI0"
    with pytest.raises(ValueError, match=message) as error:
        export(bag(layer=Bessel()), tmp_path / "reviews", format="onnx")
    assert str(tmp_path) not in str(error.value) and not list((tmp_path / "reviews").iterdir())


def test_what_onnx_has_not_is_refused(make, tokenizer, tmp_path):
    for name, value in (("precision", "int8"), ("constant_weights", True), ("warmup", ["a"]), ("max_batch", 8)):
        given = {name: value, "format": "onnx", "tokenizer": tokenizer}
        with pytest.raises(ValueError, match=f"`{name}` is only for format='tf_saved_model'. Received: {name}="):
            export(make(), tmp_path / "reviews", **given)
    with pytest.raises(ValueError, match="for models that classify or encode. Received: a model of type CausalLM"):
        export(CausalLM(11, **SIZES), tmp_path / "reviews", format="onnx")
    with pytest.raises(
        ValueError, match="does not compute in half precision. Received: a model that computes in bfloat16"
    ):
        export(make(dtype="mixed_bfloat16"), tmp_path / "reviews", format="onnx")
    with pytest.raises(ValueError, match="`format` must be one of.*Received: format='tflite'"):
        export(make(), tmp_path / "reviews", format="tflite")
    assert not (tmp_path / "reviews").exists()


def test_another_backend_is_refused(make, tmp_path, monkeypatch):
    model = make()
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(ValueError, match="needs Keras' TensorFlow backend.*Received: backend 'jax'"):
        export(model, tmp_path / "reviews", format="onnx")


@pytest.mark.parametrize(("package", "install"), [("tf2onnx", r"keras-tx\[formats\]"), ("onnxruntime", "onnxruntime")])
def test_a_missing_package_is_named_before_anything_is_written(package, install, make, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"`{package}` is needed here.*pip install '{install}'"):
        export(make(), tmp_path / "reviews", format="onnx")
    assert not (tmp_path / "reviews").exists()
