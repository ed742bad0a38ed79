"""Trains an encoder-decoder on sentence pairs, translates by beam search, and exports text in, text out.

python examples/translate.py
python examples/translate.py --data FOLDER_OF_PARALLEL_FILES --source en --target de --bfloat16

FOLDER_OF_PARALLEL_FILES holds train.en, train.de, val.en, val.de, test.en and test.de, plain or .gz: UTF-8 texts with
one sentence per line, where line 7 of train.de is the translation of line 7 of train.en. train.en may begin

    Two dogs run across the grass.
    A man in a red shirt is reading.

and train.de then begins

    Zwei Hunde laufen über das Gras.
    Ein Mann in einem roten Hemd liest.

Training needs at least ten pairs; a usable translator needs tens of thousands. Alternatively --dataset takes the name
of a TFDS dataset, such as ted_hrlr_translate/pt_to_en. --resume continues an interrupted run. `tensorboard --logdir
saved_models` shows the curves of the training. On TensorFlow, the translator is exported at the end, and `python -m
keras_tx.serving.serve` serves it. On several devices or machines:

python examples/translate.py --strategy mirrored
python examples/cluster/local.py examples/translate.py --strategy multi_worker
python examples/translate.py --backend jax --mesh 2x2

On 2 cores without a GPU: the sample takes four minutes and reaches BLEU 97. Multi30k, tokenized, reaches BLEU 41.8
with --bfloat16, in about an hour.
"""

import argparse
import json
import os
import shlex
import time
import urllib.parse
from pathlib import Path

import device_options

os.environ["KERAS_BACKEND"] = device_options.backend()
os.environ["XLA_FLAGS"] = device_options.xla_flags()

import quiet  # noqa: F401  # before Keras: TensorFlow starts without its lines about the machine

# isort: split
import keras
import numpy as np
import option_checks
import resumed_run
import several_devices
import tensorflow as tf

try:
    import sacrebleu
except ModuleNotFoundError:
    raise SystemExit("translate.py needs sacrebleu. Install it: pip install 'keras-tx[metrics]'") from None

from keras_tx import data, models, plots, serving, text, training
from keras_tx.generation import Beam

# The sample has few words and needs a small model; natural languages get Transformer-Tiny (Wu et al. 2021,
# arXiv:2105.14462).
SMALL = {"vocabulary_size": 1000, "num_layers": 2, "hidden_dim": 96, "intermediate_dim": 192, "dropout": 0.1}
SMALL |= {"piece_dropout": 0.0, "epochs": 12, "learning_rate": 3e-3, "tokens": 2048}
TINY = {"vocabulary_size": 10000, "num_layers": 4, "hidden_dim": 128, "intermediate_dim": 256, "dropout": 0.15}
TINY |= {"piece_dropout": 0.1, "epochs": 48, "learning_rate": 4e-3, "tokens": 4096}
BEAM = Beam(5, length_penalty=1.0)
BLOCKS = {"normalize_first": True, "normalization": "rms_norm", "use_bias": False}
HEADS = 4
FEWEST = 10  # pairs to learn from

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
places = parser.add_mutually_exclusive_group()
places.add_argument("--dataset", default="sample", help='"sample" (default), or the name of a TFDS translation dataset')
places.add_argument("--data", help="a folder of parallel files, instead of --dataset")
parser.add_argument("--data-dir", help="the folder in which TFDS keeps prepared datasets (default: that of TFDS)")
parser.add_argument("--source", help="the source language: the suffix of its files, such as en")
parser.add_argument("--target", help="the target language: the suffix of its files, such as de")
parser.add_argument(
    "--epochs", type=option_checks.positive, help="the number of epochs (default: 12 for the sample, otherwise 48)"
)
parser.add_argument(
    "--num-layers",
    type=option_checks.positive,
    help="layers of the encoder, and of the decoder (default: 2 for the sample, otherwise 4)",
)
parser.add_argument(
    "--hidden-dim",
    type=option_checks.positive,
    help=f"the width of the model, a multiple of {HEADS} (default: 96 for the sample, otherwise 128)",
)
parser.add_argument(
    "--bleu",
    default="13a",
    choices=sorted(sacrebleu.BLEU.TOKENIZERS),
    metavar="TOKENIZER",
    help='the tokenizer of sacreBLEU (default: 13a); "none" for texts that are tokenized already',
)
parser.add_argument("--bfloat16", action="store_true", help="compute in mixed bfloat16, for CPUs with AMX and GPUs")
parser.add_argument("--resume", action="store_true", help="continue from the last backup, if there is one")
parser.add_argument("--no-export", action="store_true", help="do not export the model at the end")
parser.add_argument("--out", default="saved_models", help="the folder for results (default: saved_models)")
device_options.add_arguments(parser)
arguments = parser.parse_args()
device_options.check(parser, arguments)
if arguments.hidden_dim and arguments.hidden_dim % HEADS:
    parser.error(f"--hidden-dim must be a multiple of {HEADS}. Received: {arguments.hidden_dim}")
name = Path(arguments.data) if arguments.data else arguments.dataset  # a folder may be called "sample"
out = os.path.join(arguments.out, f"translate_{os.path.basename(os.path.normpath(name))}")
option_checks.check_out(parser, out)
option_checks.check_plots(parser)
start = time.time()
scope, is_chief = several_devices.start(arguments)
keras.utils.set_random_seed(1)
if arguments.bfloat16:
    keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
settings = SMALL if name == "sample" else TINY
epochs = arguments.epochs or settings["epochs"]
hidden_dim = arguments.hidden_dim or settings["hidden_dim"]

# 1. Text
if arguments.data and not os.path.isdir(arguments.data):
    parser.error(f"--data must be a folder that exists. Received: {arguments.data}")
try:
    dataset = data.load_translation(name, source=arguments.source, target=arguments.target, data_dir=arguments.data_dir)
    parts = {
        part: [[side.decode() for side in pair] for pair in getattr(dataset, part).as_numpy_iterator()]
        for part in ("train", "validation", "test")
    }
except (ValueError, OSError) as error:  # among them UnicodeDecodeError
    parser.error(f"{name} cannot be read as parallel texts in UTF-8: {error}")
for part, fewest in (("train", FEWEST), ("validation", 1), ("test", 1)):
    if len(parts[part]) < fewest:
        parser.error(f"the {part} part of {name} must have at least {fewest} pairs. Received: {len(parts[part])}")
print(f"{name}: {' to '.join(dataset.languages)}, { ({part: len(pairs) for part, pairs in parts.items()}) }")


options = {"languages": list(dataset.languages), "num_layers": arguments.num_layers, "hidden_dim": hidden_dim}
texts = (side for part in parts.values() for pair in part for side in pair)
backup = os.path.join(out, "backup")
resumed_run.begin(parser, out, backup, arguments, is_chief, texts, **options)

# 2. Text -> ids. A word at the beginning of a text has the same tokens as within it.
tokenizer = text.BytePairTokenizer.train(
    (side for pair in parts["train"] for side in pair),
    settings["vocabulary_size"],
    add_prefix_space=True,
    max_length=512,
)
if is_chief:
    tokenizer.save(out)


# Each merged token -> the two tokens that it was merged from; for the others, the token itself and -1. A space ("Ġ")
# stays with the letter after it: " a" is one token; and a character of several bytes stays whole.
ids = np.arange(tokenizer.vocabulary_size, dtype="int32")
is_whole = ["\N{REPLACEMENT CHARACTER}" not in piece for piece in tokenizer.decode(ids[:, None])]
halves = np.stack([ids, np.full_like(ids, -1)], 1)
for merge in json.loads(tokenizer.get_config()["definition"])["model"]["merges"]:
    token, *both = (tokenizer.token_to_id(piece) for piece in ("".join(merge), *merge))
    if merge[0] != "Ġ" and all(is_whole[half] for half in both):
        halves[token] = both


def split(rows, dropout, seed):
    """Undoes a part of the merges, then of the merges of these halves, like BPE-dropout (Provilkov et al. 2020,
    arXiv:1910.13267)."""
    is_new = tf.ones_like(rows.values, "bool")
    for depth in range(3):
        ids = rows.values
        chosen = tf.random.stateless_uniform([tf.size(ids)], (seed[0], 3 * seed[1] + depth)) < dropout
        is_split = chosen & is_new
        pairs = tf.where(is_split[:, None], tf.gather(halves, ids), tf.stack([ids, -tf.ones_like(ids)], 1))
        is_new = tf.boolean_mask(tf.stack([is_split, is_split], 1), pairs >= 0)
        rows = rows.with_values(tf.RaggedTensor.from_tensor(pairs, padding=-1)).merge_dims(1, 2)
    return rows


def texts_of(part):
    return tf.data.Dataset.from_tensor_slices(tuple([pair[side] for pair in parts[part]] for side in (0, 1)))


def batches(texts, dropout=0.0, epoch=0):
    """Ids of the sources, ids of the targets after a start token, and labels: the targets one step ahead.

    A batch holds sentences of similar length, as many as have `tokens` ids together.
    """

    def ids(number, sides):
        rows = [tokenizer.tokenize(side) for side in sides]
        if dropout:
            rows = [split(row, dropout, (epoch, 2 * number + i)) for i, row in enumerate(rows)]
        first, last = (tf.fill([tf.size(sides[0]), 1], x) for x in (tokenizer.cls_id, tokenizer.sep_id))
        sources, targets = (tf.concat([first, x[:, : tokenizer.max_length - 2], last], 1) for x in rows)
        return {"source_ids": sources, "target_ids": targets[:, :-1]}, targets[:, 1:]

    rows = texts.batch(500).enumerate().map(ids).prefetch(2)
    rows = rows.unbatch().map(lambda *row: row)  # after `map`, rows are plain tensors instead of ragged ones
    return data.bucket_by_length(rows, max_tokens=settings["tokens"], boundaries=[*range(6, 40, 2), 48, 64, 128])


def counted(batches, count):
    return batches.apply(tf.data.experimental.assert_cardinality(count)).prefetch(4)


training_texts, dropout = texts_of("train"), settings["piece_dropout"]
updates = sum(1 for _ in batches(training_texts, dropout))  # in an epoch
validation = batches(texts_of("validation")).cache()
validation = counted(validation, sum(1 for _ in validation))


def of_epoch(epoch):
    """The training part, shuffled and partly split into other pieces, both by the number of the epoch."""
    made = batches(training_texts.shuffle(len(parts["train"]), seed=epoch), dropout, epoch)
    return counted(made.repeat().take(updates), updates)  # other pieces of words may need a batch more or less


# 3. Ids -> logits
with scope:
    model = models.Seq2Seq(
        tokenizer.vocabulary_size,
        num_layers=arguments.num_layers or settings["num_layers"],
        hidden_dim=hidden_dim,
        num_heads=HEADS,
        intermediate_dim=2 * hidden_dim,
        dropout=settings["dropout"],
        encoder_options=BLOCKS,
        decoder_options=BLOCKS,
    )
    steps = epochs * updates
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, steps, warmup_target=settings["learning_rate"], warmup_steps=min(600, steps // 8)
    )
    loss = training.PaddedCrossentropy(label_smoothing=0.1, chunk_size=1024)
    optimizer = training.Muon(schedule, adam_beta_2=0.98, epsilon=1e-9, weight_decay=None, adam_weight_decay=None)
    model.compile(optimizer, loss)
model.summary()


def translate(sentences, strategy=None):
    rows = np.asarray(tokenizer(sentences)["token_ids"])
    ids = model.generate(
        {"source_ids": rows}, strategy, max_new_tokens=64, start_token=tokenizer.cls_id, stop_tokens=tokenizer.sep_id
    )
    return tokenizer.decode(ids)


# 4. Fit
resume = training.Resume(backup)
sources, references = zip(*parts["validation"], strict=True)
bleu = training.Bleu(
    sources, references, translate=translate, batch_size=128, every=4 if epochs >= 8 else 1, tokenize=arguments.bleu
)
board = [keras.callbacks.TensorBoard(os.path.join(out, "logs"))] if is_chief else []
print(f"{steps} updates; {time.time() - start:.0f} s until here")
history = model.fit(
    resume.dataset(of_epoch),
    validation_data=validation,
    epochs=epochs,
    callbacks=[bleu, *board, resume],
    shuffle=False,
    verbose=2 if is_chief else 0,
)
if not is_chief:
    raise SystemExit  # the chief alone writes files
model.save(os.path.join(out, "model.keras"))
plots.training_curves(history, os.path.join(out, "training_curves.png"))

# 5. Translate the test split
sources, references = (list(side) for side in zip(*parts["test"], strict=True))
order = np.argsort([len(source) for source in sources])
for label, strategy in (("greedy", None), ("beam 5", BEAM)):
    written = {}
    progress = keras.utils.Progbar(len(order))
    for batch in np.array_split(order, -(-len(order) // 100)):
        written.update(zip(batch, translate([sources[i] for i in batch], strategy), strict=True))
        progress.add(len(batch))
    translations = [written[i] for i in range(len(sources))]
    metric = sacrebleu.BLEU(tokenize=arguments.bleu, force=True)
    score = metric.corpus_score(translations, [references])
    print(f"test, {label}: {score} {metric.get_signature()}")
if score.score < 5:
    print(
        f"This model can't translate yet: it has learned from {steps} batches. Try more --epochs (now {epochs}) or "
        "more pairs; a usable translator needs tens of thousands."
    )
with open(os.path.join(out, "test.txt"), "w", encoding="utf-8") as file:
    file.write("\n".join(translations) + "\n")

# 6. Draw the attention of a translated sentence
source, translation = sources[0], translations[0]
print(f"{source}\n-> {translation}")
rows, columns = (np.asarray(tokenizer([sentence])["token_ids"]) for sentence in (translation, source))
scores = model.attention_scores([columns, rows[:, :-1]])["cross"][0, -1]
labels = [[tokenizer.decode([i], skip_special_tokens=False).strip() for i in ids[0]] for ids in (rows[:, 1:], columns)]
picture = os.path.join(out, "attention.png")
plots.attention_map(scores, labels[0], picture, key_tokens=labels[1], title=f"{source} -> {translation}")

# 7. Export: text in, text out
report = None
if not arguments.no_export and arguments.backend == "tensorflow":
    trained = keras.saving.load_model(os.path.join(out, "model.keras"), compile=False)  # of one device
    version = serving.export(
        trained, out, tokenizer=tokenizer, generation={"strategy": BEAM, "max_new_tokens": 64}, warmup=sources[:2]
    )
    report = serving.check(version)
    print(report)
    address = f"http://localhost:8501/v1/models/{urllib.parse.quote(os.path.basename(out))}:predict"
    print(f"python -m keras_tx.serving.serve {shlex.quote(out)}")
    print(f"curl -d {shlex.quote(json.dumps({'instances': sources[:1]}, ensure_ascii=False))} {address}")
else:
    print(device_options.why_no_export(arguments))
print(f"{out}/model.keras, training_curves.png, attention.png, test.txt after {time.time() - start:.0f} s")
raise SystemExit(report is not None and not report.ok)
