"""Trains a language model on a text, by characters or by WordPieces, generates more of it, and exports it.

python examples/write_text.py
python examples/write_text.py --data input.txt.gz --steps 2000
python examples/write_text.py --strategy mirrored
python examples/cluster/local.py examples/write_text.py --strategy multi_worker
python examples/write_text.py --backend jax --mesh 2x2

input.txt.gz is any text in UTF-8, plain or .gz, such as a book or all of your letters, with line breaks as they are. A
tenth of it is for validation. It must have at least 1,000 characters; a model that writes words takes a million. On
TensorFlow, the model is exported at the end, text in, text out, and `python -m keras_tx.serving.serve` serves it.

On 2 cores without a GPU: tinyshakespeare takes 103 s and reaches a validation loss of 1.73.
"""

import argparse
import os
import shlex
import time

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

from keras_tx import data, generation, models, plots, serving, text, training

# The settings of nanoGPT for a CPU: github.com/karpathy/nanoGPT, "I only have a macbook".
LAYERS, HEADS, WIDTH, CONTEXT, BATCH = 4, 4, 128, 64, 12
LEARNING_RATE, WARM_UP = 1e-3, 100
FEWEST = 1000  # characters
LONGEST_LINE = 200  # of a prompt

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", default="sample", help='"sample", or a text file, plain or .gz')
parser.add_argument("--level", choices=("character", "wordpiece"), default="character", help="the kind of tokens")
parser.add_argument(
    "--vocabulary-size",
    type=option_checks.positive,
    default=2000,
    help="the number of WordPieces, for --level wordpiece",
)
parser.add_argument("--steps", type=int, default=1000, help="training steps, of 12 rows of 64 tokens each")
parser.add_argument("--prompt", help="the beginning of the generated text (default: a line of the validation split)")
parser.add_argument("--length", type=option_checks.positive, default=400, help="the number of tokens to generate")
parser.add_argument(
    "--temperature",
    type=option_checks.positive_number,
    default=0.8,
    help="the temperature of sampling (default: 0.8)",
)
parser.add_argument("--resume", action="store_true", help="continue from the last backup, if there is one")
parser.add_argument(
    "--data-service", metavar="ADDRESS", help="prepare the data there (see examples/cluster), in any order"
)
parser.add_argument("--no-export", action="store_true", help="do not export the model at the end")
parser.add_argument("--out", default="saved_models", help="the folder for results")
device_options.add_arguments(parser)
arguments = parser.parse_args()
device_options.check(parser, arguments)
if arguments.data_service and arguments.strategy == "multi_worker":
    parser.error(
        "--data-service hands out every row once, but with --strategy multi_worker every worker reads all rows"
    )
if arguments.steps <= WARM_UP:
    parser.error(f"--steps must be above {WARM_UP}, the steps of the warm-up")
out = os.path.join(arguments.out, "write_text")
option_checks.check_out(parser, out)
option_checks.check_plots(parser)
start = time.time()
scope, is_chief = several_devices.start(arguments)
keras.utils.set_random_seed(1)

# 1. Text
try:
    texts = data.load_text(arguments.data)
except (ValueError, OSError) as error:  # among them UnicodeDecodeError
    parser.error(f"--data {arguments.data} cannot be read as a text in UTF-8: {error}")
if len(texts.train) < FEWEST or len(texts.validation) <= CONTEXT:
    parser.error(f"--data must be a text of at least {FEWEST} characters. Received: {len(''.join(texts))}")
if not any(part.strip() for part in texts):
    parser.error(f"--data must be a text. Received: {arguments.data}, a file with nothing but spaces and line breaks")
if "\0" in texts.train:
    parser.error(f"--data must be a text. Received: {arguments.data}, a file with zero bytes")
print(f"{arguments.data}: {len(texts.train)} characters to learn from, {len(texts.validation)} to validate with")

# 2. Text -> ids
if arguments.level == "character":
    tokenizer = text.CharacterTokenizer.train([texts.train], cls_token=None, sep_token=None, max_length=2048)
else:
    try:
        tokenizer = text.BertTokenizer.train(texts.train.splitlines(), arguments.vocabulary_size, lowercase=False)
    except ValueError as error:
        rule, _, _ = str(error).partition(" Received: ")
        parser.error(f"--vocabulary-size {arguments.vocabulary_size} does not fit {arguments.data}: {rule}")
if arguments.prompt is not None and not len(tokenizer.tokenize([arguments.prompt])[0]):
    parser.error(f"--prompt must have a token. Received: {arguments.prompt!r}")
train, validation = (np.array(list(tokenizer.tokenize([part])[0]), "int32") for part in texts)
if min(len(train), len(validation)) <= CONTEXT:
    parser.error(f"--data must have more than {CONTEXT} tokens to learn from and to validate with")
backup = os.path.join(out, "backup")
options = {name: getattr(arguments, name) for name in ("level", "vocabulary_size", "steps")}
resumed_run.begin(parser, out, backup, arguments, is_chief, texts, **options)
if is_chief:
    tokenizer.save(out)
print(f"{tokenizer.vocabulary_size} tokens; {len(train)} to learn from")


def rows(ids, starts, batch_size, service=None):
    """Batches of CONTEXT tokens, and of the tokens that follow each."""
    windows = tf.data.Dataset.from_tensor_slices(starts).map(lambda i: tf.strided_slice(ids, [i], [i + CONTEXT + 1]))
    windows = windows.map(lambda window: (tf.ensure_shape(window, [CONTEXT + 1])[:-1], window[1:]))
    if service:  # its machines share the windows among them
        windows = windows.apply(tf.data.experimental.service.distribute("distributed_epoch", service))
    return windows.batch(batch_size).prefetch(4)


def of_epoch(epoch):
    """The rows of an epoch, which its number determines."""
    return rows(train, tf.gather(starts, epoch), BATCH, arguments.data_service)


epochs, updates = 5, arguments.steps // 5
starts = np.random.default_rng(1).integers(0, len(train) - CONTEXT, (epochs, updates * BATCH))
validation_starts = np.arange(0, len(validation) - CONTEXT, CONTEXT)

# 3. Ids -> logits. With rotary positions and a window as long as the context, the text may become longer than the
# context.
with scope:
    model = models.CausalLM(
        tokenizer.vocabulary_size,
        num_layers=LAYERS,
        hidden_dim=WIDTH,
        num_heads=HEADS,
        dropout=0.0,
        embedding_options={"position_encoding": None},
        decoder_options={"use_bias": False, "attention_options": {"rotary": True, "sliding_window": CONTEXT}},
    )
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, arguments.steps - WARM_UP, alpha=0.1, warmup_target=LEARNING_RATE, warmup_steps=WARM_UP
    )
    model.compile(
        keras.optimizers.AdamW(schedule, weight_decay=0.1, beta_2=0.99, clipnorm=1.0),
        training.PaddedCrossentropy(),
        metrics=[training.Perplexity()],
        steps_per_execution=updates,
    )
model.summary()

# 4. Fit
resume = training.Resume(backup)
history = model.fit(
    resume.dataset(of_epoch),
    validation_data=rows(validation, validation_starts, 128),
    epochs=epochs,
    shuffle=False,
    verbose=2 if is_chief else 0,
    callbacks=[resume],
)
if not is_chief:
    raise SystemExit  # the chief alone writes files and the text
print(f"validation loss {history.history['val_loss'][-1]:.4f} after {time.time() - start:.0f} s")
model.save(os.path.join(out, "model.keras"))
plots.training_curves(history, os.path.join(out, "training_curves.png"))

# 5. Generate
line = next(line for part in (texts.validation, texts.train) for line in part.splitlines() if line.strip())
prompt = arguments.prompt or line[:LONGEST_LINE] + "\n" * (len(line) <= LONGEST_LINE)
print(f"\n{prompt}", end="")
sample = generation.Sample(arguments.temperature, top_k=50, seed=1)
options = {"max_new_tokens": arguments.length, "start_token": False, "stop_tokens": ()}
for piece in generation.stream(model, prompt, sample, tokenizer=tokenizer, **options):
    print(piece, end="", flush=True)
print("\n")

# 6. Export: the beginning of a text in, that and its continuation out
report = None
if not arguments.no_export and arguments.backend == "tensorflow":
    trained = keras.saving.load_model(os.path.join(out, "model.keras"), compile=False)  # of one device
    version = serving.export(
        trained, out, tokenizer=tokenizer, generation={"strategy": sample, **options}, warmup=[prompt]
    )
    report = serving.check(version)
    print(report)
    print(f"python -m keras_tx.serving.serve {shlex.quote(out)}")
else:
    print(device_options.why_no_export(arguments))
print(f"{out}/model.keras, training_curves.png after {time.time() - start:.0f} s")
raise SystemExit(report is not None and not report.ok)
