"""`fit`, `evaluate`, `predict` and `..._on_batch` say which id or label is wrong, however the data comes."""

import functools

import keras
import numpy as np
import pytest

from keras_tx.models import CausalLM, MaskedLM, Seq2Seq, TextClassifier
from keras_tx.models.checked_data import DataCheck
from keras_tx.pretrained import PretrainedModel
from keras_tx.training import PaddedCrossentropy
from tests.tools import assert_close

EAGERLY = keras.backend.backend() == "tensorflow"  # which takes seconds to trace a graph
V, C = 23, 5
IDS = np.array([[3, 4, 5, 0], [7, 1, 22, 2]], "int32")
SIZES = {"num_layers": 1, "hidden_dim": 4, "num_heads": 1, "intermediate_dim": 4}
BERT = {
    "model_type": "bert",
    "vocab_size": V,
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 4,
    "max_position_embeddings": 8,
    "num_labels": C,
}
OF_TOKENS, OF_TEXTS = PaddedCrossentropy(), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
MODELS = {  # name: model, the name of its ids, its labels, its loss
    "TextClassifier": (lambda: TextClassifier(V, C, **SIZES), "token_ids", IDS[:, 0] % C, OF_TEXTS),
    "MaskedLM": (lambda: MaskedLM(V, **SIZES), "token_ids", IDS, OF_TOKENS),
    "CausalLM": (lambda: CausalLM(V, **SIZES), "token_ids", IDS, OF_TOKENS),
    "Seq2Seq": (lambda: Seq2Seq(V, **SIZES), "source_ids", IDS, OF_TOKENS),
    "PretrainedModel": (
        lambda: PretrainedModel(BERT, "sequence_classification"),
        "input_ids",
        IDS[:, 0] % C,
        {"logits": OF_TEXTS},
    ),
}
METHODS = ["fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"]
FORMS = ["arrays", "generator", "PyDataset", "DataLoader", "tf.data"]


@pytest.fixture(scope="module", params=MODELS)
def case(request):
    """A model, compiled without graphs, which wrong data does not reach."""
    make, name, labels, loss = MODELS[request.param]
    model = make()
    model.compile("sgd", loss, run_eagerly=True)
    return model, name, ({"logits": labels} if isinstance(loss, dict) else labels)


def inputs(model, name, ids):
    return {name: ids, **({"target_ids": IDS} if name == "source_ids" else {})}


class Batches(keras.utils.PyDataset):
    def __init__(self, batch):
        super().__init__()
        self.batch, self.begun, self.ended = batch, 0, 0

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return self.batch

    def on_epoch_begin(self):
        self.begun += 1

    def on_epoch_end(self):
        self.ended += 1


def in_form(form, batch):
    if form == "arrays":
        return batch
    if form == "generator":
        return (((batch) for _ in range(3)),)
    if form == "PyDataset":
        return (Batches(batch),)
    if form == "DataLoader":
        torch = pytest.importorskip("torch")
        tensors = keras.tree.map_structure(torch.tensor, batch)
        return (torch.utils.data.DataLoader([tensors] * 3, batch_size=None),)
    tf = pytest.importorskip("tensorflow")
    return (tf.data.Dataset.from_tensors(batch).repeat(3),)


def run(model, method, *data):
    options = {} if "batch" in method else {"verbose": 0}
    if method == "fit":
        options["shuffle"] = False
    return getattr(model, method)(*data, **options)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (IDS + 1, r"^`{}` must be in \[0, 23\). Received: 23 in {} of shape \(2, 4\)$"),
        (IDS - 1, r"^`{}` must be in \[0, 23\). Received: -1 in {} of shape \(2, 4\)$"),
        (IDS + 0.5, "^`{}` must be integers; .* Received: {} of dtype float64$"),
        (np.array([["dog"], ["cat"]]), "^`{}` must be integers; a tokenizer .* Received: {} of dtype <U3$"),
        (np.array([["dog"], ["cat"]], object), "^`{}` must be integers; a tokenizer .* Received: {} of dtype object$"),
    ],
)
def test_ids_are_checked(case, method, wrong, message):
    model, name, labels = case
    data = (inputs(model, name, wrong), *([] if "predict" in method else [labels]))
    with pytest.raises(ValueError, match=message.format(name, name)):
        run(model, method, *data)


@pytest.mark.parametrize("method", ["fit", "evaluate", "train_on_batch", "test_on_batch"])
@pytest.mark.parametrize("step", [-30, 30])
def test_labels_are_checked(case, method, step):
    model, name, labels = case
    wrong = keras.tree.map_structure(lambda y: y + step, labels)
    one = keras.tree.flatten(wrong)[0].flat[0]
    with pytest.raises(
        ValueError, match=rf"^The labels must be in \[0, (23\) or the `padding_id` 0|5\)). .* label {one}$"
    ):
        run(model, method, inputs(model, name, IDS), wrong)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize("form", [*FORMS[1:-1], pytest.param("tf.data", marks=pytest.mark.tensorflow)])
def test_every_form_of_data_is_checked(case, method, form):
    model, name, labels = case
    with pytest.raises(ValueError, match=rf"^`{name}` must be in \[0, 23\). Received: 23"):
        run(model, method, *in_form(form, (inputs(model, name, IDS + 1), labels)))
    if method == "evaluate":
        wrong = keras.tree.map_structure(lambda y: y + 30, labels)
        with pytest.raises(ValueError, match=r"^The labels must be in \[0, .* Received: label \d+$"):
            run(model, method, *in_form(form, (inputs(model, name, IDS), wrong)))


@pytest.mark.parametrize("form", ["arrays", *(pytest.param(one, marks=pytest.mark.tensorflow) for one in FORMS[1:])])
def test_validation_data_is_checked(form):
    model = TextClassifier(V, C, **SIZES)
    model.compile("sgd", OF_TEXTS, run_eagerly=True)
    labels = IDS[:, 0] % C
    wrong = in_form(form, (IDS + 1, labels))
    with pytest.raises(ValueError, match=r"^`token_ids` must be in \[0, 23\). Received: 23"):
        model.fit(IDS, labels, validation_data=wrong if form == "arrays" else wrong[0], verbose=0)


def test_data_that_fit_splits_are_checked():
    """Before they are split; layers that run eagerly would check the parts."""
    model = TextClassifier(V, C, **SIZES)
    model.compile("sgd", OF_TEXTS, run_eagerly=True)
    for rows in (IDS + 1, np.stack([IDS[0], IDS[1] + 1])):  # the last ones are for validation
        with pytest.raises(
            ValueError, match=r"^`token_ids` must be in .* Received: 23 in token_ids of shape \(2, 4\)$"
        ):
            model.fit(rows, IDS[:, 0] % C, validation_split=0.5, verbose=0)
    loader = in_form("DataLoader", (IDS, IDS[:, 0] % C))[0]
    with pytest.raises(ValueError, match="`validation_split` is only supported.*DataLoader"):
        model.fit(loader, validation_split=0.5, verbose=0)
    with pytest.warns(UserWarning, match="`shuffle=True` was passed, but will be ignored.*torch DataLoader"):
        model.fit(loader, shuffle=True, verbose=0)


def test_segments_and_learned_positions_are_checked():
    model = MaskedLM(V, **SIZES, embedding_options={"num_segments": 2})
    with pytest.raises(ValueError, match=r"^`segment_ids` must be in \[0, 2\). Received: 2 in segment_ids"):
        model.predict([IDS, np.full_like(IDS, 2)])
    options = {"position_encoding": "learned", "max_length": 7}
    model = CausalLM(V, **SIZES, packed=True, embedding_options=options)
    with pytest.raises(ValueError, match=r"^`positions` must be in \[0, 7\). Received: 7 in positions"):
        model.predict({"token_ids": IDS, "document_ids": IDS, "positions": np.full_like(IDS, 7)})
    model = PretrainedModel(BERT, "base")
    with pytest.raises(ValueError, match=r"^`token_type_ids` must be in \[0, 2\). Received: 2 in token_type_ids"):
        model.predict([IDS, np.ones_like(IDS), np.full_like(IDS, 2)])


@pytest.mark.parametrize("form", FORMS)
def test_right_data_passes_unchanged(form):
    model = TextClassifier(V, C, **SIZES)
    labels = np.array([C - 1, 0])
    model.compile("sgd", OF_TEXTS, run_eagerly=True)
    batch = (IDS, labels)
    options = {"verbose": 0, **({"steps": 3} if form == "generator" else {})}  # Keras warns when generators end
    expected = model.test_on_batch(*batch)
    assert_close(model.evaluate(*in_form(form, batch), **options), expected)
    data = in_form(form, (IDS, labels + C) if form != "arrays" else (IDS,))  # `predict` does not read labels
    assert_close(model.predict(*data, **options)[:2], model(IDS))
    data = in_form(form, (IDS,)) if form != "PyDataset" else (Batches({"token_ids": IDS, "other": labels}),)
    assert_close(model.predict(*data, **options)[-2:], model(IDS))


def test_a_sequence_of_batches_is_told_of_epochs_as_by_keras():
    told = []
    model = TextClassifier(V, C, **SIZES)
    for one in (model, keras.Model(model.inputs[0], model.outputs)):
        one.compile("sgd", OF_TEXTS, run_eagerly=True)
        batches = Batches((IDS, IDS[:, 0] % C))
        one.evaluate(batches, verbose=0)
        told.append((batches.begun, batches.ended))
    assert told[0] == told[1]
    assert min(told[0]) > 0


@pytest.mark.parametrize("form", ["generator", "PyDataset"])
def test_a_later_batch_is_checked(form):
    class Later(Batches):
        def __getitem__(self, index):
            return (IDS + (index == 4), *self.batch)

        def __len__(self):
            return 5

    batches = Later(())
    model = TextClassifier(V, C, **SIZES)
    model.compile("sgd", run_eagerly=True)
    data = batches if form == "PyDataset" else (batches[index] for index in range(5))
    with pytest.raises(ValueError, match=r"^`token_ids` must be in \[0, 23\). Received: 23 in .* shape \(2, 4\)$"):
        model.predict(data, steps=5, verbose=0)


@pytest.mark.tensorflow
def test_labels_that_the_loss_ignores_pass():
    model = TextClassifier(V, C, activation="softmax", **SIZES)
    labels = np.array([C, 1])
    message = rf"^The labels must be in \[0, 5\){{}}. Received: label {C}$"
    for loss in ("sparse_categorical_crossentropy", keras.losses.sparse_categorical_crossentropy, [OF_TEXTS]):
        model.compile("sgd", loss, run_eagerly=True)
        with pytest.raises(ValueError, match=message.format("")):
            model.evaluate(IDS, labels if not isinstance(loss, list) else [labels], verbose=0)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(ignore_class=-1), run_eagerly=True)
    with pytest.raises(ValueError, match=message.format(" or the `ignore_class` -1")):
        model.evaluate(IDS, labels, verbose=0)
    for ignored in (-1, C):
        loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=ignored)
        model.compile("sgd", loss, run_eagerly=True)
        expected = model.evaluate(IDS[1:], labels[1:], verbose=0)
        assert_close(model.evaluate(IDS, np.array([ignored, 1]), verbose=0), expected)
    model.compile("sgd", "mse", run_eagerly=True)
    model.evaluate(IDS, np.full((2, C), 99.0), verbose=0)


@pytest.mark.parametrize("texts", ["dog", ["dog", "cat"], np.array(["dog"]), {"token_ids": np.array(["dog"])}])
def test_a_call_with_texts_is_refused(texts):
    with pytest.raises(ValueError, match="^`inputs` must be integers; a tokenizer of `keras_tx.text` makes them"):
        TextClassifier(V, C, **SIZES)(texts)


def test_datasets_are_checked_before_a_graph_that_xla_compiles():
    model = TextClassifier(V, C, **SIZES)
    model.compile("sgd", OF_TEXTS, jit_compile="auto" if keras.backend.backend() == "torch" else True)
    with pytest.raises(ValueError, match=r"^`token_ids` must be in \[0, 23\). Received: -1$"):
        model.predict(*in_form("tf.data", (IDS - 1,)), verbose=0)


@pytest.mark.tensorflow
def test_errors_of_tensorflow_itself_become_sentences(monkeypatch):
    monkeypatch.setattr(DataCheck, "arrays", lambda *_: None)  # as for data that cannot be checked before
    model = TextClassifier(V, C, **SIZES)
    model.compile("sgd", OF_TEXTS, run_eagerly=True)
    with pytest.raises(ValueError, match=r"^The labels must be in \[0, 5\). Received: label 7$"):
        model.evaluate(IDS, np.array([1, 7]), verbose=0)
    model.compile(jit_compile=False)
    with pytest.raises(ValueError, match=r"^The ids must be in \[0, 23\). Received: 23$"):
        model.predict(IDS + 1, verbose=0)


@pytest.mark.tensorflow
@pytest.mark.parametrize(("kind", "size"), [("bert", 3), ("roberta", 5)])  # RoBERTa has two rows for padding
def test_rows_longer_than_the_positions_are_not_said_to_have_wrong_ids(kind, size):
    tf = pytest.importorskip("tensorflow")
    config = {
        "model_type": kind,
        "pad_token_id": 1 if kind == "roberta" else 0,
        "vocab_size": V,
        "hidden_size": 4,
        "num_hidden_layers": 1,
    }
    config |= {"num_attention_heads": 1, "intermediate_size": 4, "max_position_embeddings": size}
    model = PretrainedModel(config, "base")
    rows = {name: np.full((2, 4), number, "int32") for name, number in {"input_ids": 2, "attention_mask": 1}.items()}
    spec = tf.TensorSpec([None, None], "int32")  # a graph for any length finds out only when it runs
    data = tf.data.Dataset.from_generator(lambda: [rows], output_signature=dict.fromkeys(rows, spec))
    message = (
        "^Rows must not have more tokens than the model has positions, 3. Received: position 3. Give the tokenizer"
    )
    with pytest.raises(ValueError, match=message):
        model.predict(data, verbose=0)


def test_other_errors_stay_as_they_are():
    model = TextClassifier(V, C, **SIZES)

    def fails():
        raise KeyError("mine")
        yield

    with pytest.raises(KeyError, match="mine"):
        model.predict(fails(), verbose=0)


LOSSES = ["sparse_categorical_crossentropy", "BinaryCrossentropy", keras.losses.categorical_crossentropy]


@pytest.mark.parametrize("loss", [*LOSSES, keras.losses.CategoricalFocalCrossentropy(), [LOSSES[0]]])
def test_a_loss_of_probabilities_is_refused_by_models_that_return_logits(loss):
    """Keras would clip logits to [0, 1], and train something else without a word."""
    for model in models_of_logits():
        model.compile("sgd", loss)
        with pytest.raises(ValueError, match="`loss` must have `from_logits=True`, .* Received: loss="):
            model.fit(IDS, IDS, verbose=0)


@functools.cache
def models_of_logits():
    return TextClassifier(V, C, **SIZES), CausalLM(V, **SIZES)


def test_losses_of_the_outputs_that_a_model_has_are_taken():
    of_probabilities = TextClassifier(V, C, activation="softmax", **SIZES)
    of_probabilities.compile("sgd", LOSSES[0], run_eagerly=EAGERLY)
    of_probabilities.train_on_batch(IDS, np.array([1, 2]))
    of_logits = TextClassifier(V, C, **SIZES)
    of_logits.compile("sgd", keras.losses.Hinge(), run_eagerly=EAGERLY)
    of_logits.train_on_batch(IDS, np.ones((2, C)))


def test_arrays_need_labels():
    model = CausalLM(V, **SIZES)
    model.compile("sgd", PaddedCrossentropy())
    for call in (model.fit, model.evaluate, model.train_on_batch, model.test_on_batch):
        with pytest.raises(ValueError, match="`y` must be the labels if `x` is an array .* Received: y=None"):
            call(IDS)
    with pytest.raises(ValueError, match="`y` must be the labels"):
        model.fit({"token_ids": IDS}, verbose=0)


def test_a_subclass_may_make_labels_itself():
    class Next(CausalLM):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return super().compute_loss(x, x[:, 1:], y_pred[:, :-1], sample_weight, training)

    def with_softmax(y_true, y_pred, from_logits=False):
        return keras.losses.sparse_categorical_crossentropy(y_true, keras.ops.softmax(y_pred))

    own = TextClassifier(V, C, **SIZES)
    own.compile("sgd", with_softmax, run_eagerly=EAGERLY)
    own.train_on_batch(IDS, np.array([1, 2]))
    model = Next(V, **SIZES)
    model.compile("sgd", PaddedCrossentropy(), run_eagerly=EAGERLY)
    model.fit(IDS, verbose=0)


def test_class_weights_are_refused_for_labels_of_tokens():
    """Keras would take the weight of the position of the largest label of a row."""
    model = CausalLM(V, **SIZES)
    model.compile("sgd", PaddedCrossentropy())
    weights = {index: 1.0 + index for index in range(V)}
    with pytest.raises(
        ValueError, match=r"`class_weight` must be None for labels .* Received: class_weight=\{0: 1.0, "
    ):
        model.fit(IDS, IDS, class_weight=weights, verbose=0)


@pytest.mark.tensorflow
def test_class_weights_of_labels_with_an_axis_more_are_keras_own():
    import tensorflow as tf

    model = CausalLM(V, **SIZES)
    model.compile("sgd", OF_TEXTS, run_eagerly=True)
    weights = {index: 1.0 + index for index in range(V)}
    data = tf.data.Dataset.from_tensors((IDS, IDS[..., None]))
    model.fit(data, class_weight=weights, verbose=0)
    with pytest.raises(ValueError, match="`class_weight` must be None for labels"):
        model.fit(tf.data.Dataset.from_tensors((IDS, IDS)), class_weight=weights, verbose=0)


def test_labels_that_are_names_are_to_be_numbered():
    model = TextClassifier(V, C, **SIZES)
    model.compile("sgd", OF_TEXTS)
    with pytest.raises(ValueError, match="`y` must be integers; number the classes. Received: y of dtype <U3"):
        model.fit(IDS, np.array(["pos", "neg"]), verbose=0)
