"""Fine-tunes a BERT checkpoint to classify reviews, and saves a checkpoint that transformers and keras_tx load.

python examples/finetune_bert.py
python examples/finetune_bert.py --checkpoint bert-base-uncased --dataset imdb_reviews --data-dir PREPARED_TFDS_FOLDER
python examples/finetune_bert.py --checkpoint MY_BERT --dataset messages.csv --text-column message --label-column team
python examples/finetune_bert.py --lora 4 --bfloat16

--checkpoint takes a directory that transformers saved, or a model id of the Hugging Face hub. Without it, the script
trains a small BERT as a classifier on one half of the reviews, drops its head, and uses it as if it had been pretrained
elsewhere; the other half fine-tunes it. With --lora the kernels of the encoder stay frozen, and each gets two small
matrices (Hu et al. 2021, arXiv:2106.09685), whose product is added to the kernel when the model is saved.

On 2 cores without a GPU: the sample takes less than two minutes and reaches a test accuracy of 0.97; with --lora 4,
0.93.
"""

import argparse
import os
import time
import warnings
from pathlib import Path

import quiet  # noqa: F401  # before Keras: TensorFlow starts without its lines about the machine

# isort: split
import checkpoints
import keras
import numpy as np
import option_checks
import tensorflow as tf

from keras_tx import data, plots, pretrained, text

# The small BERT that stands in for a pretrained one.
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
SMALL |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.12}
LEARNING_RATE = {"small": (2e-3, 3e-3), "given": (3e-5, 3e-4)}  # for all weights, and for LoRA
TOLERANCE = {
    "float32": 1e-4,
    "mixed_bfloat16": 0.05,
}  # of probabilities: LoRA's product is rounded before or after the sum

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--checkpoint", help="a directory, or a model id of the Hugging Face hub (default: train a small BERT)"
)
parser.add_argument(
    "--dataset",
    default="sample",
    help='"sample", the name of a TFDS dataset, or a .jsonl, .csv or .tsv file (default: sample)',
)
parser.add_argument("--text-column", help='the column with the texts (default: "text"; TFDS: found by its type)')
parser.add_argument("--label-column", help='the column with the labels (default: "label"; TFDS: found by its type)')
parser.add_argument("--data-dir", help="the folder in which TFDS keeps prepared datasets (default: that of TFDS)")
parser.add_argument(
    "--max-length",
    type=option_checks.positive,
    default=128,
    help="the largest number of tokens of a text, whose rest is cut off; at most what the checkpoint has positions for "
    "(default: 128)",
)
parser.add_argument("--epochs", type=option_checks.positive, default=4, help="the number of epochs (default: 4)")
parser.add_argument(
    "--learning-rate",
    type=option_checks.positive_number,
    help="the peak learning rate (default: 3e-5, with --lora 3e-4; without --checkpoint 2e-3 and 3e-3)",
)
parser.add_argument(
    "--lora",
    type=option_checks.positive,
    metavar="RANK",
    help="train LoRA matrices of this rank instead of the kernels of the encoder",
)
parser.add_argument("--bfloat16", action="store_true", help="compute in mixed bfloat16, for CPUs with AMX and GPUs")
parser.add_argument("--out", default="saved_models", help="the folder for results (default: saved_models)")
arguments = parser.parse_args()
out = os.path.join(arguments.out, "finetune_bert")
option_checks.check_out(parser, out)
option_checks.check_plots(parser)
checkpoints.check_max_length(parser, arguments)
start = time.time()
keras.utils.set_random_seed(1)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

# 1. Text
columns = {"text_column": arguments.text_column, "label_column": arguments.label_column}
try:
    dataset = data.load_dataset(arguments.dataset, data_dir=arguments.data_dir, **columns)
except (ValueError, OSError) as error:
    parser.error(f"--dataset {arguments.dataset} cannot be read: {error}")
print(f"{arguments.dataset}: {len(dataset.train)} train, {len(dataset.test)} test, labels {dataset.labels}")


# 2. Text -> ids, batches of similar length
def batches(reviews, tokenizer):
    def features(review, label):
        ids = tokenizer(review)["token_ids"]
        return {"input_ids": ids, "attention_mask": tf.ones_like(ids)}, label

    encoded = reviews.map(features, num_parallel_calls=tf.data.AUTOTUNE).cache().shuffle(len(reviews), seed=1)
    padding = {"input_ids": tf.constant(tokenizer.pad_id), "attention_mask": 0}
    bucketed = data.bucket_by_length(encoded, 32, boundaries=(16, 32, 64, 128, 256), padding_values=(padding, 0))
    count = sum(1 for _ in bucketed)  # fills the cache, and counts the batches for the progress bar
    return bucketed.apply(tf.data.experimental.assert_cardinality(count)).prefetch(2)


def fit(model, reviews, tokenizer, epochs, learning_rate, **options):
    rows = batches(reviews, tokenizer)
    steps = epochs * len(rows)
    schedule = keras.optimizers.schedules.CosineDecay(0.0, steps, warmup_target=learning_rate, warmup_steps=steps // 10)
    model.compile(keras.optimizers.AdamW(schedule, weight_decay=0.01), loss, metrics=["accuracy"])
    return model.fit(rows, epochs=epochs, shuffle=False, **options)


# 3. A checkpoint
def make_checkpoint(directory, reviews):
    texts = reviews.map(lambda review, label: review)
    tokenizer = text.BertTokenizer.train(texts, 2000, max_length=arguments.max_length)
    sizes = {"vocab_size": tokenizer.vocabulary_size, "max_position_embeddings": arguments.max_length}
    bert = pretrained.PretrainedModel({"model_type": "bert", **SMALL, **sizes}, "base")
    ids, mask = [keras.Input((None,), dtype="int32", name=name) for name in ("input_ids", "attention_mask")]
    head = keras.layers.Dense(len(dataset.labels))
    model = keras.Model([ids, mask], head(bert(ids, attention_mask=mask)["pooler_output"]))
    fit(model, reviews, tokenizer, 4, 2e-3, verbose=2)
    pretrained.save_pretrained(bert, directory, tokenizer=tokenizer)  # without the head


checkpoint, reviews = arguments.checkpoint, dataset.train
if checkpoint is None:
    checkpoint, half = os.path.join(out, "small_bert"), len(dataset.train) // 2
    make_checkpoint(checkpoint, dataset.train.take(half))
    reviews = dataset.train.skip(half)
    print(f"{checkpoint} after {time.time() - start:.0f} s")

# 4. BERT with a new head
if arguments.bfloat16:
    keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "The checkpoint lacks tensors of the task")  # the head, which is trained here
    options = {"task": "sequence_classification", "labels": dataset.labels}
    model, tokenizer = checkpoints.load(parser, checkpoint, arguments.max_length, **options)
if arguments.lora:
    model.get_layer("embedding").trainable = False
    for layer in model.get_layer("encoder").layers:
        layer.trainable = False
        attention, feed_forward = layer.self_attention, layer.feed_forward
        # For a projection to N heads, (D, N, H), these are the matrices (D, RANK) and (RANK, N, H).
        for projection in (
            *(attention.query_dense, attention.key_dense, attention.value_dense, attention.output_dense),
            *(feed_forward.intermediate_dense, feed_forward.output_dense),
        ):
            projection.trainable = True  # first, because weights that are added to a frozen layer are frozen
            projection.enable_lora(arguments.lora)  # freezes the kernel; the bias learns
trained = sum(int(np.prod(weight.shape)) for weight in model.trainable_weights)
print(f"{trained} of {model.count_params()} weights are trained")

# 5. Fine-tune
highest = LEARNING_RATE["given" if arguments.checkpoint else "small"][bool(arguments.lora)]
test = batches(dataset.test, tokenizer)
history = fit(model, reviews, tokenizer, arguments.epochs, arguments.learning_rate or highest, validation_data=test)

# 6. Save in Hugging Face's format, with all weights in float32 as they were trained
saved = Path(out, "checkpoint")
pretrained.save_pretrained(model, saved, tokenizer=tokenizer, dtype="float32")
plots.training_curves(history, f"{out}/training_curves.png")

# 7. Load it again, and compare
again = pretrained.from_pretrained(saved)
rows = list(test)  # the same order for both models
labels = np.concatenate([labels for _, labels in rows])


def probabilities(model):
    logits = np.concatenate([model.predict_on_batch(features)["logits"] for features, _ in rows])
    return keras.ops.convert_to_numpy(keras.ops.softmax(logits.astype("float32")))


answers = probabilities(model), probabilities(again)
accuracy = [float(np.mean(one.argmax(axis=-1) == labels)) for one in answers]
difference = np.abs(answers[0] - answers[1]).max()
print(f"test accuracy {accuracy[0]:.4f}, loaded again {accuracy[1]:.4f}; largest difference {difference:.1e}")

# 8. Classify three texts of the test split
sentences = [sentence.decode() for sentence, _ in dataset.test.take(3).as_numpy_iterator()]
tokens = text.load_tokenizer(saved)(sentences)
logits = again(tokens["token_ids"], attention_mask=tokens["token_ids"] != tokenizer.pad_id)["logits"]
for sentence, chances in zip(sentences, keras.ops.softmax(keras.ops.cast(logits, "float32")).numpy(), strict=True):
    shown = " ".join(sentence.split())
    shown = shown if len(shown) <= 90 else shown[:87] + "..."
    print(f"{again.config['id2label'][str(chances.argmax())]:>10} {chances.max():.3f}  {shown}")
print(f"{saved}, {out}/training_curves.png after {time.time() - start:.0f} s")
raise SystemExit(not difference <= TOLERANCE[keras.config.dtype_policy().name])
