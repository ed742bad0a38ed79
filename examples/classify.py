"""Trains an encoder on labelled texts and exports it as a SavedModel that classifies raw sentences.

python examples/classify.py
python examples/classify.py --data messages.csv --text-column message --label-column team
python examples/classify.py --dataset imdb_reviews --data-dir PREPARED_TFDS_FOLDER

The file of --data is a .csv file (columns separated by commas) or .tsv file (by tabs) whose first line names the
columns, a .jsonl file with one JSON object in each line, or a .parquet file; also compressed as .gz or .zst. Each row
has a text and a label, a word or an integer:

    message,team
    "Where is my parcel?",delivery
    "I paid twice.",payment

Without --test, a tenth of the rows of each class is held out for testing; which rows is the same in every run. Each
class needs at least two rows. Beside the model a logistic regression learns from the same tokens without their order
(a bag of words). If it is better by more than 0.01, the last line says so, and what to try. `tensorboard --logdir
saved_models` shows the curves of the training.

On 2 cores without a GPU, the sample takes 2 minutes and reaches a test accuracy of 0.99 (a bag of words: 0.69).
"""

import argparse
import os
import time
from itertools import islice
from pathlib import Path

import quiet  # noqa: F401  # before Keras: TensorFlow starts without its lines about the machine

# isort: split
import keras
import numpy as np
import option_checks
import tensorflow as tf

from keras_tx import data, models, plots, serving, text

VOCABULARY = 16000  # the most tokens to learn
MAX_LENGTH = 1024  # tokens of a text that are read
PAIRS = 2**18  # weights of a bag of words for pairs of neighbouring tokens; some pairs share one

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
source = parser.add_mutually_exclusive_group()
source.add_argument("--data", help="a file of your own: .csv, .tsv, .jsonl or .parquet")
source.add_argument("--dataset", default="sample", help='"sample" or the name of a TFDS dataset (default: sample)')
parser.add_argument("--text-column", help='the column with the texts (default: "text"; TFDS: found by its type)')
parser.add_argument("--label-column", help='the column with the labels (default: "label"; TFDS: found by its type)')
parser.add_argument("--test", help="a file with the test split, with the same columns (default: a tenth of --data)")
parser.add_argument("--data-dir", help="the folder in which TFDS keeps prepared datasets (default: that of TFDS)")
parser.add_argument(
    "--epochs",
    type=option_checks.positive,
    help="the largest number of epochs; training may stop earlier (default: by the data)",
)
parser.add_argument("--out", default="saved_models", help="the folder for exports")
arguments = parser.parse_args()
name_or_path = Path(arguments.data) if arguments.data else arguments.dataset  # a file may be called "sample"
out = os.path.join(arguments.out, os.path.basename(name_or_path).split(".")[0])
option_checks.check_out(parser, out)
option_checks.check_plots(parser)
start = time.time()
keras.utils.set_random_seed(1)


def choose_settings(rows, words, length):
    """The settings for `rows` training texts with `words` different tokens and `length` words in a text.

    Where each word comes in many texts, little but their order is left to learn: two layers and no dropout. Otherwise
    the model would learn the texts by heart: it has one layer that sees texts with words left out (Iyyer et al. 2015),
    and a bag of words beside it (the number is how fast its weights learn, compared with those of the encoder). A few
    hundred texts need small batches and many epochs (about 375 batches in all) to be learnt at all, and have too few
    pairs of words to learn from.
    """
    if rows < 2000:
        chosen = {"num_layers": 1, "num_heads": 1, "dropout": 0.5, "word_dropout": 0.2, "weight_decay": 0.01}
        chosen |= {"epochs": max(10, 6000 // max(rows, 16)), "batch": 16, "bag_of_words": 100.0}
        chosen |= {"pairs": 0, "stop_early": False}
    elif rows > 4 * words and length < 100:
        chosen = {"num_layers": 2, "num_heads": 4, "dropout": 0.0, "word_dropout": 0.0, "weight_decay": 0.004}
        chosen |= {"epochs": 6, "batch": 32, "bag_of_words": None, "pairs": 0, "stop_early": True}
        return chosen | {"position_encoding": "learned", "normalize_first": True}
    else:
        chosen = {"num_layers": 1, "num_heads": 1, "dropout": 0.5, "word_dropout": 0.5, "weight_decay": 0.3}
        chosen |= {"epochs": 3, "batch": 32, "bag_of_words": 100.0, "pairs": PAIRS, "stop_early": True}
        if length < 100:
            chosen |= {"word_dropout": 0.3, "epochs": 8}
    return chosen | {"position_encoding": "sinusoidal", "normalize_first": False}


# 1. Text
try:
    options = {"text_column": arguments.text_column, "label_column": arguments.label_column, "test": arguments.test}
    if arguments.data and not os.path.isfile(arguments.data):
        raise FileNotFoundError(f"`--data` must be a file that exists. Received: --data {arguments.data}")
    dataset = data.load_dataset(name_or_path, data_dir=arguments.data_dir, **options)
except (ValueError, FileNotFoundError) as error:
    raise SystemExit(f"classify.py: {error}") from None
counts = np.bincount([int(label) for _, label in dataset.train.as_numpy_iterator()], minlength=len(dataset.labels))
held_out = len(dataset.train) // 20
print(f"{name_or_path}: {len(dataset.train)} train, {len(dataset.test)} test, labels {dataset.labels}")
if counts.max() > 3 * counts.mean() or counts.max() > 10 * counts.min():
    often, rare = counts.argmax(), counts.argmin()
    print(f"not balanced: {dataset.labels[often]} {counts[often]} texts, {dataset.labels[rare]} {counts[rare]}")

# 2. Text -> ids, batches of similar length
try:
    tokenizer = text.BertTokenizer.train(
        dataset.train.map(lambda sentence, label: sentence), VOCABULARY, max_length=MAX_LENGTH
    )
except ValueError as error:
    rule, _, _ = str(error).partition(" Received: ")
    raise SystemExit(f"classify.py: {name_or_path} has nothing to learn from: {rule}") from None
lengths = [len(sentence.split()) for sentence, _ in dataset.train.take(1000).as_numpy_iterator()]
settings = choose_settings(len(dataset.train), tokenizer.vocabulary_size, float(np.mean(lengths)))
epochs = arguments.epochs or settings["epochs"]
print(f"vocabulary: {tokenizer.vocabulary_size} tokens\nsettings: {settings}")


def encode(texts):
    def ids(sentence, label):
        return {"token_ids": tokenizer(sentence)["token_ids"]}, label

    return texts.map(ids, num_parallel_calls=tf.data.AUTOTUNE).cache()


def batches(encoded):
    bucketed = data.bucket_by_length(encoded, settings["batch"], boundaries=(16, 32, 64, 128, 192, 256, 384, 512, 768))
    count = sum(1 for _ in bucketed)  # fills the cache, and counts the batches for the progress bar
    return bucketed.apply(tf.data.experimental.assert_cardinality(count)).prefetch(2)


encoded = encode(dataset.train.skip(held_out))
train = batches(encoded.shuffle(len(dataset.train), seed=1))
validation = batches(encode(dataset.train.take(held_out))) if held_out else None
test = batches(encode(dataset.test))
print(f"tokenized after {time.time() - start:.0f} s")

# 3. Ids -> logits: an encoder; for most data it sees texts with words left out, and has a bag of words beside it
model = encoder = models.TextClassifier(
    tokenizer.vocabulary_size,
    num_classes=len(dataset.labels),
    num_layers=settings["num_layers"],
    hidden_dim=64,
    num_heads=settings["num_heads"],
    intermediate_dim=128,
    dropout=settings["dropout"],
    embedding_options={"position_encoding": settings["position_encoding"]}
    | ({"max_length": MAX_LENGTH} if settings["position_encoding"] == "learned" else {"scale": True}),
    encoder_options={"normalize_first": settings["normalize_first"], "attention_dropout": 0.0},
)


def with_pairs(ids):
    """The ids of tokens, then a number for each pair of neighbours. The id 0 is padding, and so is its number."""
    if not settings["pairs"]:
        return ids
    first, second = ids[:, :-1], ids[:, 1:]
    pairs = tokenizer.vocabulary_size + (first * tokenizer.vocabulary_size + second) % settings["pairs"]
    return keras.ops.concatenate([ids, keras.ops.where(keras.ops.equal(second, 0), 0, pairs)], axis=1)


def naive_bayes():
    """The first weights of the bag: how much likelier each token and each pair is in the texts of each class than in
    those of all (Wang and Manning 2012). The smoothing by 10 keeps rare ones from counting much."""
    counts = np.full([tokenizer.vocabulary_size + settings["pairs"], len(dataset.labels)], 10.0)
    for features, labels in train.as_numpy_iterator():
        numbers = keras.ops.convert_to_numpy(with_pairs(features["token_ids"]))
        for label in np.unique(labels):
            counts[:, label] += np.bincount(numbers[labels == label].ravel(), minlength=len(counts))
    counts[0] = 1  # of padding
    ratios = np.log(counts / counts.sum(axis=0))
    return ratios - ratios.mean(axis=1, keepdims=True)


if settings["bag_of_words"]:
    ids = encoder.inputs[0]
    is_kept = keras.layers.Dropout(settings["word_dropout"])(keras.ops.ones_like(ids, "float32"))
    is_left_out = keras.ops.logical_and(keras.ops.equal(is_kept, 0), keras.ops.not_equal(ids, 0))
    logits = encoder(keras.ops.where(is_left_out, tokenizer.unknown_id, ids))
    weights = keras.layers.Embedding(tokenizer.vocabulary_size + settings["pairs"], len(dataset.labels), mask_zero=True)
    bag = keras.layers.GlobalAveragePooling1D()(weights(with_pairs(ids)))
    # The first logits are 30 times the mean of the ratios, however fast the weights learn.
    weights.set_weights([naive_bayes() * 30 / settings["bag_of_words"]])
    model = keras.Model({"token_ids": ids}, logits + settings["bag_of_words"] * bag)
    model.attention_scores = encoder.attention_scores
model.summary()

# 4. Fit
steps = epochs * len(train)
schedule = keras.optimizers.schedules.CosineDecay(0.0, steps, warmup_target=1e-3, warmup_steps=steps // 20)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.AdamW(schedule, settings["weight_decay"]), loss, metrics=["accuracy"])
callbacks = [keras.callbacks.TensorBoard(os.path.join(out, "logs"))]
if settings["stop_early"]:  # a validation split of a few texts can't say when
    callbacks.append(keras.callbacks.EarlyStopping("val_accuracy", patience=2, restore_best_weights=True))
verbose = "auto" if epochs <= 10 else 0
if not verbose:
    print(f"training for {epochs} epochs of {len(train)} batches, without a line for each")
history = model.fit(
    train, validation_data=validation, epochs=epochs, callbacks=callbacks, shuffle=False, verbose=verbose
)

# 5. Evaluate, and compare with a logistic regression on the same tokens without their order
bag_of_words = keras.Sequential(
    [
        keras.layers.Embedding(tokenizer.vocabulary_size, len(dataset.labels), mask_zero=True),
        keras.layers.GlobalAveragePooling1D(),
    ]
)
bag_of_words.compile(keras.optimizers.Adam(0.05), loss, metrics=["accuracy"])
tokens = [part.map(lambda features, label: (features["token_ids"], label)) for part in (train, test)]
epochs_of_bag = 5 if settings["stop_early"] else settings["epochs"]
print(f"training the bag of words for {epochs_of_bag} epochs, whatever --epochs says")
bag_of_words.fit(tokens[0], epochs=epochs_of_bag, verbose=0, shuffle=False)
accuracy, of_bag = model.evaluate(test, verbose=0)[1], bag_of_words.evaluate(tokens[1], verbose=0)[1]
print(f"test accuracy {accuracy:.4f}; bag of words {of_bag:.4f}")
most_frequent = np.bincount([int(label) for _, label in dataset.test.as_numpy_iterator()]).max() / len(dataset.test)
if most_frequent > 0.5:
    print(f"always answering the most frequent label would reach {most_frequent:.4f}")

# 6. Export and check
version = serving.export(model, out, tokenizer=tokenizer, labels=dataset.labels)
report = serving.check(version)
print(report)

# 7. Classify texts of the test split with the export, and draw pictures
served = tf.saved_model.load(str(version)).signatures
examples = list(islice(dataset.test.shuffle(len(dataset.test), seed=1).as_numpy_iterator(), 3))
answers = served["serving_default"](text=tf.constant([sentence for sentence, _ in examples]))
for (sentence, label), answer, probabilities in zip(
    examples, *(answers[key].numpy() for key in ("label", "probabilities")), strict=True
):
    shown = " ".join(sentence.decode().split())
    shown = shown if len(shown) <= 90 else shown[:87] + "..."
    wrong = "" if answer.decode() == dataset.labels[label] else f" (labelled {dataset.labels[label]})"
    print(f"{answer.decode():>10} {probabilities.max():.3f}  {shown}{wrong}")
shortest = min((sentence for sentence, _ in examples), key=len)
explained = served["explain"](text=tf.constant([shortest]))
seen = [token.decode() for token in explained["tokens"][0].numpy()][:40]
labels, predictions = [], []
for features, label in test:
    labels += label.numpy().tolist()
    predictions += model.predict_on_batch(features).argmax(axis=-1).tolist()
plots.training_curves(history, f"{out}/training_curves.png")
plots.attention_map(explained["scores"][0][..., : len(seen), : len(seen)], seen, f"{out}/attention.png")
plots.confusion_matrix(labels, predictions, dataset.labels, f"{out}/confusion_matrix.png")
pictures = ", ".join(f"{out}/{picture}.png" for picture in ("training_curves", "attention", "confusion_matrix"))
print(f"{version}, {pictures} after {time.time() - start:.0f} s")
if of_bag > accuracy + 0.01:
    print(
        f"The bag of words is better by {of_bag - accuracy:.4f}: do not use this model as it is. Try another number of "
        f"--epochs (now {epochs}), more rows, at least 50 for each label, and look at the confusion matrix."
    )
raise SystemExit(not report.ok)
