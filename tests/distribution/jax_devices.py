"""A program that trains tiny models on JAX on one device and on four, and prints as JSON how much they differ.

    export KERAS_BACKEND=jax XLA_FLAGS=--xla_force_host_platform_device_count=4
    python -m tests.distribution.jax_devices CASES CASES_OF_EQUAL

Each case trains with the same global batches on one device, with `DataParallel` on four, and with `ModelParallel` on a
mesh of 2 x 2. The rows of a batch have different numbers of tokens, so the devices have, too. CASES_OF_EQUAL
are those of `tests.distribution.equal`, whose batches do not divide. Commas join the names of cases.
"""

import json
import sys
import tempfile
import tracemalloc

import keras
import numpy as np

import keras_tx
from keras_tx.models import TextClassifier
from keras_tx.training import PaddedCrossentropy
from tests.distribution import equal
from tests.pretrained.tiny import checkpoint

VOCABULARY, ROWS, LENGTH, STEPS, FEW = 26, 8, 10, 20, 4
# Fused projections in both orders, and tables of positions and of relative positions; half precision; HDF5
LOADED = ["gpt2", "modernbert", "t5", "vit", "llama_bf16_sharded", "distilbert_cls_tf_h5"]
SIZES = {"num_layers": 1, "hidden_dim": 16, "num_heads": 4, "intermediate_dim": 24, "dropout": 0.0}


def mesh(shape=(2, 2)):
    return keras.distribution.DeviceMesh(shape, ["batch", "model"])


def model_parallel(shape=(2, 2)):
    layouts = keras_tx.distribution.get_layout_map(mesh(shape))
    return keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")


def ids(seed, rows=ROWS, length=LENGTH):
    """(B, T) ids padded on the right: rows of 1, 2, ... tokens, so that each device has another number of them."""
    values = np.random.default_rng(seed).integers(1, VOCABULARY, (rows, length)).astype("int32")
    values[np.arange(length) > np.arange(rows)[:, None] % length] = 0
    return values


def language_batches(seed=0):
    return [(x, np.roll(x, -1, axis=1) * (np.roll(x, -1, axis=1) != 0)) for x in map(ids, range(seed, seed + 4))]


def causal():
    """4 heads with 2 key heads, rotary positions, gates, RMS norms, and a kernel of its own for the logits."""
    attention = {"rotary": True, "num_key_value_heads": 2, "use_gate": True}
    return keras_tx.models.CausalLM(
        VOCABULARY,
        **SIZES,
        decoder_options={"gated": True, "attention_options": attention, "normalization": "rms_norm", "remat": True},
        embedding_options={"position_encoding": None},
        tie_embeddings=False,
        use_output_bias=True,
        packed=True,
    )


def packed_batches():
    """Rows of several documents of different lengths; later rows have fewer."""
    x, y = ids(1), ids(2)
    documents = np.cumsum(x % 3 == 0, axis=1).astype("int32") + 1
    starts = np.diff(documents, axis=1, prepend=0) > 0
    slots = np.arange(LENGTH)
    positions = (slots - np.maximum.accumulate(np.where(starts, slots, 0), axis=1)).astype("int32")
    real = np.sign(x)
    return [({"token_ids": x, "document_ids": documents * real, "positions": positions * real}, y * real)]


def masked():
    return keras_tx.models.MaskedLM(VOCABULARY, **SIZES, encoder_options={"skip_padding": True})


def bucketed_batches():
    """Batches of two lengths, for `Seq2Seq`."""
    return [((ids(n, length=n), ids(n + 1, length=n)), ids(n + 1, length=n)) for n in (4, 9)]


def classifier():
    return keras_tx.models.TextClassifier(VOCABULARY, 3, **SIZES, dtype="mixed_bfloat16")


def classes():
    return [(ids(i), np.arange(ROWS) % 3) for i in range(3)]


def functional():
    """A user's model: layers under other names, and layers of Keras."""
    tokens = keras.Input((None,), dtype="int32")
    hidden = keras_tx.layers.TokenEmbedding(VOCABULARY, 16, position_encoding="learned", max_length=26)(tokens)
    attended = keras_tx.layers.MultiHeadAttention(4, 4, blockwise=True, name="look")(hidden, hidden)
    hidden = keras_tx.layers.FeedForward(24, name="think")(keras.layers.Add()([hidden, attended]))
    hidden = keras.layers.Dense(6, activation="relu", name="query")(hidden)  # a name of ours, in a layer of Keras
    return keras.Model(tokens, keras.layers.Dense(VOCABULARY, name="output")(hidden))


def llama():
    return keras_tx.pretrained.from_pretrained(checkpoint("llama"))


def llama_batches():
    return [({"input_ids": x, "attention_mask": np.sign(x)}, {"logits": x}) for x in [ids(1)]]


def clipped_average():
    return keras.optimizers.SGD(0.3, global_clipnorm=0.5, use_ema=True, ema_overwrite_frequency=3)


def accumulated():
    return keras.optimizers.AdamW(1e-3, gradient_accumulation_steps=2)


CASES = {  # name: (model, batches, loss, optimizer)
    "causal": (causal, packed_batches, PaddedCrossentropy(chunk_size=7), clipped_average),
    "masked": (masked, language_batches, PaddedCrossentropy(), lambda: keras.optimizers.SGD(0.3)),
    "seq2seq": (
        lambda: keras_tx.models.Seq2Seq(VOCABULARY, **SIZES),
        bucketed_batches,
        PaddedCrossentropy(),
        lambda: keras_tx.training.Muon(1e-3),
    ),
    "classifier": (
        classifier,
        classes,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        lambda: keras.optimizers.SGD(0.05),
    ),
    "functional": (functional, language_batches, PaddedCrossentropy(), accumulated),
    "llama": (llama, llama_batches, {"logits": PaddedCrossentropy()}, lambda: keras.optimizers.SGD(0.05)),
}


def trained(name, distribution, rows=slice(None)):
    """The model of a case after the updates, with these rows of each batch."""
    make, batches, loss, optimizer = CASES[name]
    batches = keras.tree.map_structure(lambda x: x[rows], batches())
    keras.utils.set_random_seed(3)
    keras.distribution.set_distribution(distribution)
    model = make()
    model.compile(optimizer(), loss)
    for step in range(FEW if name == "functional" else STEPS):  # XLA, not optimizing, is slow with blocks
        model.train_on_batch(*batches[step % len(batches)])
    return model


def largest_difference(ours, theirs):
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(ours, theirs, strict=True))


def used(model):
    """What `evaluate`, `predict` and `generate` return."""
    x, y = packed_batches()[0]
    loss = model.evaluate(x, y, batch_size=ROWS, verbose=0)
    generated = model.generate([[5, 7, 11], [5]], max_new_tokens=4)
    return [loss], model.predict(x, batch_size=ROWS, verbose=0), generated


def loaded(name):
    """Whether a checkpoint has the same weights on four devices, and how many of them are split."""
    keras.distribution.set_distribution(None)
    whole = keras_tx.pretrained.from_pretrained(checkpoint(name), dtype="bfloat16" if "bf16" in name else None)
    keras.distribution.set_distribution(model_parallel())
    split = keras_tx.pretrained.from_pretrained(checkpoint(name), dtype="bfloat16" if "bf16" in name else None)
    pairs = zip(split.weights, whole.weights, strict=True)
    same = all(a.value.dtype == b.value.dtype and np.array_equal(a.value, b.value) for a, b in pairs)
    return same, sum(not weight.value.is_fully_replicated for weight in split.weights)


def held_after_saving():
    """The bytes of arrays of NumPy that are left when a split model has been saved, and those of its weights."""
    keras.distribution.set_distribution(model_parallel())
    model = llama()
    with tempfile.TemporaryDirectory() as folder:
        tracemalloc.start()
        keras_tx.pretrained.save_pretrained(model, folder)
        snapshot = tracemalloc.take_snapshot()
        tracemalloc.stop()
    of_numpy = snapshot.filter_traces([tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)])
    return sum(trace.size for trace in of_numpy.traces), sum(weight.value.nbytes for weight in model.weights)


def shared(names):
    """{case: (what `equal.train` returns on four devices, and on one)}, for batches that do not divide."""
    found, devices = {}, keras.distribution.DataParallel(devices=[f"cpu:{i}" for i in range(4)])
    for name in names:
        keras.distribution.set_distribution(None)
        expected = equal.train(name)
        keras.distribution.set_distribution(devices)
        found[name] = equal.train(name), expected
    model = equal.built("sample_weight")
    x, y, _ = equal.weighted()
    rows = model.predict_on_batch(x[:5])
    np.testing.assert_allclose(rows, model.predict(x[:5], verbose=0), atol=1e-6)
    whole = model.evaluate(x[:5], y[:5], verbose=0)
    np.testing.assert_allclose(model.test_on_batch(x[:5], y[:5]), whole, rtol=1e-5)
    losses = []
    for distribution in (devices, None):
        keras.distribution.set_distribution(distribution)
        keras.utils.set_random_seed(3)
        model = TextClassifier(11, 2, num_layers=1, hidden_dim=6, num_heads=2, intermediate_dim=5, dropout=0.0)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        ids, labels = np.arange(15).reshape(5, 3) % 11, np.array([0, 1, 1, 0, 1])
        losses.append(model.train_on_batch(ids, labels, class_weight={0: 1.0, 1: 3.0}))
    np.testing.assert_allclose(*losses, rtol=1e-5)
    return found


def main(names, names_of_equal):
    report = {"loaded": {name: loaded(name) for name in LOADED}, "held": held_after_saving()}
    report["shared"] = shared(names_of_equal.split(","))
    for name in names.split(","):
        one = trained(name, None)
        found = report[name] = {}
        ours = used(one) if name == "causal" else None
        found["data"] = largest_difference(
            trained(name, keras.distribution.DataParallel(auto_shard_dataset=False)).weights, one.weights
        )
        split = trained(name, model_parallel())
        found["model"] = largest_difference(split.weights, one.weights)
        found["split"] = sum(not weight.value.is_fully_replicated for weight in split.weights)
        if ours is not None:
            theirs = used(split)
            found["loss"], found["predictions"] = (largest_difference(theirs[i], ours[i]) for i in (0, 1))
            found["generated"] = [ours[2], theirs[2]]
        print(name, found, file=sys.stderr)
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
