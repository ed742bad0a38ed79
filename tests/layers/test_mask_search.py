"""Masks behind operations that lose them: all of `keras.ops` and `keras.layers` keep real tokens as they are, or warn.

`Average`, the layer that searches for masks here, adds the mean of all real tokens to each token: with a wrong mask,
padding changes its outputs at real tokens.
"""

import warnings

import keras
import numpy as np
import pytest
from keras import ops

from keras_tx.functional_graph import source_of
from keras_tx.layers.mask_search import mask_of
from keras_tx.layers.masked_layer import MaskedLayer
from tests.tools import to_numpy

D = 6
REAL = np.array([[5, 6, 7], [9, 3, 4]])
PADDINGS = [(0, 0), (0, 2), (2, 0)]  # on the left and on the right
L = keras.layers


class Average(MaskedLayer):
    def call(self, inputs, mask=None):
        inputs = ops.clip(ops.where(ops.isfinite(inputs), inputs, 0.0), -100.0, 100.0)
        mask = ops.ones_like(inputs[..., 0]) if mask is None else ops.cast(mask, inputs.dtype)
        weights = mask / ops.maximum(ops.sum(mask, axis=1, keepdims=True), 1.0)
        return inputs + ops.einsum("bt,btd->bd", weights, inputs)[:, None]

    def compute_output_shape(self, inputs_shape):
        return inputs_shape


@pytest.fixture
def ids():
    return keras.Input((None,), dtype="int32")


@pytest.fixture
def embed():
    """An embedding with a mask, of width D."""
    embedding = L.Embedding(11, D, mask_zero=True)
    embedding.build(())
    embedding.set_weights([np.random.default_rng(0).normal(size=(11, D)).astype("float32")])
    return embedding


def search(x):
    """`Average` of a tensor of any rank and dtype, the mask that it finds, and its warnings."""
    x = ops.cast(x, "float32")
    while len(x.shape) < 3:
        x = ops.expand_dims(x, -1)
    while len(x.shape) > 3:
        x = ops.mean(x, axis=-1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = Average()(x)
    return y, mask_of(x), [str(one.message) for one in caught if "Padding may change" in str(one.message)]


def at_real_tokens(ids, found, left, right):
    """The outputs of {name: (output, mask)} at real tokens, in their order, for ids with so many padding tokens."""
    outputs = {name: output for name, (output, _) in found.items()}
    masks = {f"mask of {name}": mask for name, (_, mask) in found.items() if mask is not None}
    results = keras.Model(ids, {**outputs, **masks})(np.pad(REAL, [(0, 0), (left, right)]))
    results = {name: to_numpy(x) for name, x in results.items()}
    real = {}
    for name in found:
        expected = np.zeros(results[name].shape[:2], "bool")
        expected[:, left : expected.shape[1] - right] = True
        real[name] = results[name][results.get(f"mask of {name}", expected) != 0]
    return real


def changed_by_padding(ids, found):
    """Of {name: (output, mask)}, the names of those that differ at real tokens with and without padding."""
    alone, *others = [at_real_tokens(ids, found, *padding) for padding in PADDINGS]
    close = lambda a, b: a.shape == b.shape and np.allclose(a, b, atol=1e-4, rtol=1e-4)
    return {name for name in found for other in others if not close(alone[name], other[name])}


def told_and_changed(ids, cases):
    """Of (name, tensor (B, T, ...)): the names of those that warn, of those that padding changes, and of all."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras' own about lost masks, and NumPy's
        searched = [(name, *search(y)) for name, y in cases]
        changed = changed_by_padding(ids, {name: (output, mask) for name, output, mask, _ in searched})
    return {name for name, _, _, told in searched if told}, changed, {name for name, *_ in searched}


def results_for_tokens(call, symbolic, eager):
    """The tensors (B, T, ...) that `call` makes of symbolic tensors, if it computes what Keras expects."""
    try:
        with np.errstate(all="ignore"):
            computed = keras.tree.flatten(call(eager))
        expected = keras.tree.flatten(call(symbolic))
    except Exception:  # it does not take these arguments
        return []
    if [len(getattr(y, "shape", ())) for y in computed] != [len(getattr(y, "shape", ())) for y in expected]:
        return []
    operations = [call.operation for call in map(source_of, expected) if call is not None]
    if any(isinstance(one, keras.KerasTensor) for operation in operations for one in vars(operation).values()):
        return []  # the argument is kept out of the graph, so that no model can compute this
    return [y for y in expected if len(getattr(y, "shape", ())) > 1 and y.shape[:2] == (None, None)]


FORMS = {
    "x": lambda f, x: f(x),
    "x, y": lambda f, x: f(x, 0.7 * x),
    "[x, y]": lambda f, x: f([x, 0.7 * x]),
    "[x, y], axis=1": lambda f, x: f([x, 0.7 * x], axis=1),
    "x, 2.0": lambda f, x: f(x, 2.0),
    "x, 1, axis=1": lambda f, x: f(x, 1, axis=1),
    "x, axis=1": lambda f, x: f(x, axis=1),
    "x, axis=-1": lambda f, x: f(x, axis=-1),
    "x, matrix": lambda f, x: f(x, np.ones((D, 2), "float32")),
    "x, bounds": lambda f, x: f(x, -0.5, 0.5),
    "x, dtype": lambda f, x: f(x, "float16"),
    "condition, x, y": lambda f, x: f(x > 0, x, 0.7 * x),
    "heads": lambda f, x: f(x[:, :, None], x[:, :, None], x[:, :, None]),
    "equation": lambda f, x: f("btd,de->bte", x, np.ones((D, 2), "float32")),
    "all tokens": lambda f, x: f("btd,bsd->bts", x, x),
    "function": lambda f, x: f(ops.tanh, x),
}
KERNEL = np.random.default_rng(2).normal(size=(3, D, 2)).astype("float32")
OF_THEIR_OWN = {  # functions for which the forms are wrong; wild numbers for pools end the process
    "adaptive_average_pool": lambda x: ops.adaptive_average_pool(x, 3),
    "adaptive_max_pool": lambda x: ops.adaptive_max_pool(x, 3),
    "average_pool": lambda x: ops.average_pool(x, 2, strides=1, padding="same"),
    "max_pool": lambda x: ops.max_pool(x, 2, strides=1, padding="same"),
    "conv": lambda x: ops.conv(x, KERNEL, padding="same"),
    "depthwise_conv": lambda x: ops.depthwise_conv(x, KERNEL[:, :, :1], padding="same"),
    "trapezoid": lambda x: ops.trapezoid(x, axis=-1),
    "separable_conv": lambda x: ops.separable_conv(x, KERNEL[:, :, :1], KERNEL[:1], padding="same"),
}
# The first ones take no tokens, `meshgrid` flattens the batch, and no functional model can run `conv_transpose`.
LEFT_OUT = "custom_gradient fori_loop while_loop scan associative_scan map shape meshgrid conv_transpose".split()


def cases_of_ops(x, eager):
    for name in sorted(set(dir(ops)) - set(LEFT_OUT)):
        function = getattr(ops, name)
        forms = {"own": lambda _, x, name=name: OF_THEIR_OWN[name](x)} if name in OF_THEIR_OWN else FORMS
        for form, call in forms.items() if callable(function) and name[0] != "_" else ():
            found = results_for_tokens(lambda x, call=call, function=function: call(function, x), x, eager)
            yield from ((f"{name}({form}){index or ''}", y) for index, y in enumerate(found))


@pytest.mark.slow
@pytest.mark.tensorflow
def test_all_functions_of_keras_keep_the_numbers_at_real_tokens_or_warn(ids, embed):
    told, changed, every = told_and_changed(ids, cases_of_ops(embed(ids), embed(REAL)))
    assert changed == told  # no silence, and no noise
    assert len(every) > 250
    expected = "hard_swish erf log1p expm1 celu log_sigmoid hard_sigmoid hard_tanh round nan_to_num reciprocal".split()
    expected = [f"{name}(x)" for name in (*expected, "rms_normalization", "layer_normalization", "flip")]
    expected += [
        "mod(x, 2.0)",
        "floor_divide(x, y)",
        "logaddexp(x, y)",
        "matmul(x, matrix)",
        "concatenate([x, y], axis=1)",
    ]
    assert set(expected) <= every - told
    assert {"softmax(x, axis=1)", "cumsum(x, axis=1)", "conv(own)", "tril(x)", "einsum(all tokens)"} <= told


LAYERS = {  # those that need arguments, or that must return all tokens
    "ActivityRegularization": lambda: L.ActivityRegularization(0.1),
    "AlphaDropout": lambda: L.AlphaDropout(0.2),
    "AveragePooling1D": lambda: L.AveragePooling1D(2, strides=1, padding="same"),
    "Bidirectional": lambda: L.Bidirectional(L.GRU(2, return_sequences=True)),
    "Conv1D": lambda: L.Conv1D(4, 3, padding="same"),
    "Conv1DTranspose": lambda: L.Conv1DTranspose(4, 3, padding="same"),
    "Dense": lambda: L.Dense(4),
    "DepthwiseConv1D": lambda: L.DepthwiseConv1D(3, padding="same"),
    "Dropout": lambda: L.Dropout(0.2),
    "EinsumDense": lambda: L.EinsumDense("btd,de->bte", (None, 4)),
    "GRU": lambda: L.GRU(2, return_sequences=True),
    "GaussianDropout": lambda: L.GaussianDropout(0.2),
    "GaussianNoise": lambda: L.GaussianNoise(0.2),
    "GroupNormalization": lambda: L.GroupNormalization(2),
    "LSTM": lambda: L.LSTM(2, return_sequences=True),
    "Lambda": lambda: L.Lambda(lambda x: ops.flip(x, axis=1)),
    "MaxPooling1D": lambda: L.MaxPooling1D(2, strides=1, padding="same"),
    "RNN": lambda: L.RNN(L.SimpleRNNCell(2), return_sequences=True),
    "STFTSpectrogram": lambda: L.STFTSpectrogram("magnitude"),  # by default its logarithm, which enlarges rounding
    "SeparableConv1D": lambda: L.SeparableConv1D(4, 3, padding="same"),
    "SimpleRNN": lambda: L.SimpleRNN(2, return_sequences=True),
    "SpectralNormalization": lambda: L.SpectralNormalization(L.Dense(4)),
    "TimeDistributed": lambda: L.TimeDistributed(L.Dense(4)),
    "MultiHeadAttention": lambda: L.MultiHeadAttention(2, 3),
    "GroupQueryAttention": lambda: L.GroupQueryAttention(3, 2, 1),
    "SpatialDropout1D": lambda: L.SpatialDropout1D(0.2),
    "Activation": lambda: L.Activation("tanh"),
    "Reshape": lambda: L.Reshape((-1, D // 2)),
}
LAYER_FORMS = {
    "x": lambda f, x: f(x),
    "x, y": lambda f, x: f(x, L.Dense(D)(x)),
    "[x, y]": lambda f, x: f([x, L.Dense(D)(x)]),
}


def cases_of_layers(embed, ids):
    for_images = L.RandomFlip.__mro__[1]  # these take tokens for rows of pixels, and some return their input
    found = {
        getattr(L, name): name for name in sorted(dir(L), reverse=True) if isinstance(getattr(L, name), type)
    }  # without aliases
    for cls, name in found.items():
        if issubclass(cls, L.Layer) and not issubclass(cls, (for_images, L.Cropping1D)):
            for how, factor in (("", None), (" * 1", 1.0)):
                for form, call in LAYER_FORMS.items():
                    new = lambda x, call=call, cls=cls, name=name: call(LAYERS.get(name, cls)(), x)
                    x, eager = (embed(one) if factor is None else embed(one) * factor for one in (ids, REAL))
                    if made := results_for_tokens(new, x, eager):
                        yield f"{name}({form}{how})", made[0]
                        break


@pytest.mark.slow
@pytest.mark.tensorflow
def test_all_layers_of_keras_keep_the_numbers_at_real_tokens_or_warn(ids, embed):
    told, changed, every = told_and_changed(ids, cases_of_layers(embed, ids))
    assert changed == told
    assert len(every) > 80
    expected = {
        "EinsumDense(x)",
        "EinsumDense(x * 1)",
        "BatchNormalization(x * 1)",
        "LSTM(x)",
        "Reshape(x)",
        "Lambda(x)",
    }
    assert expected <= every - told
    assert {
        "Conv1D(x)",
        "GroupNormalization(x)",
        "LSTM(x * 1)",
        "MultiHeadAttention(x, y * 1)",
        "Attention([x, y] * 1)",
    } <= told
