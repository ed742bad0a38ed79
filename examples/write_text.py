"""Trains a language model on a text, by characters or by WordPieces, and generates more of it.

python examples/write_text.py
python examples/write_text.py --data input.txt.gz --steps 2000

On 2 cores without a GPU: tinyshakespeare takes 103 s and reaches a validation loss of 1.73.
"""

import argparse
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

from keras_tx import data, generation, models, plots, text, training

# The settings of nanoGPT for a CPU: github.com/karpathy/nanoGPT, "I only have a macbook".
LAYERS, HEADS, WIDTH, CONTEXT, BATCH = 4, 4, 128, 64, 12
LEARNING_RATE, WARM_UP = 1e-3, 100

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", default="sample", help='"sample", or a text file, plain or .gz')
parser.add_argument("--level", choices=("character", "wordpiece"), default="character", help="the kind of tokens")
parser.add_argument("--vocabulary-size", type=int, default=2000, help="the number of WordPieces, for --level wordpiece")
parser.add_argument("--steps", type=int, default=1000, help="training steps, of 12 rows of 64 tokens each")
parser.add_argument("--prompt", help="the beginning of the generated text (default: a line of the validation part)")
parser.add_argument("--length", type=int, default=400, help="the number of tokens to generate")
parser.add_argument("--temperature", type=float, default=0.8, help="the temperature of sampling (default: 0.8)")
parser.add_argument("--out", default="saved_models", help="the folder for results")
arguments = parser.parse_args()
if arguments.steps <= WARM_UP:
    parser.error(f"--steps must be above {WARM_UP}, the steps of the warm-up")
start = time.time()
keras.utils.set_random_seed(1)
out = os.path.join(arguments.out, "write_text")
os.makedirs(out, exist_ok=True)

# 1. Text
texts = data.load_text(arguments.data)
print(f"{arguments.data}: {len(texts.train)} characters to learn from, {len(texts.validation)} to validate with")


# 2. Text -> ids
class Characters:
    """A tokenizer whose tokens are the characters of a text; id 0 is padding."""

    def __init__(self, text):
        self.characters = sorted(set(text))
        self.ids = {character: i for i, character in enumerate(self.characters, start=1)}
        self.vocabulary_size = 1 + len(self.characters)

    def tokenize(self, texts):
        return [[self.ids[character] for character in text if character in self.ids] for text in texts]

    def decode(self, rows):
        return ["".join(self.characters[i - 1] for i in row if i) for row in rows]


if arguments.level == "character":
    tokenizer = Characters(texts.train + texts.validation)
else:
    tokenizer = text.BertTokenizer.train(texts.train.splitlines(), arguments.vocabulary_size, lowercase=False)
train, validation = (np.array(list(tokenizer.tokenize([part])[0]), "int32") for part in texts)
print(f"{tokenizer.vocabulary_size} tokens; {len(train)} to learn from")


def rows(ids, starts, batch_size):
    """Batches of CONTEXT tokens, and of the tokens that follow each."""
    windows = tf.data.Dataset.from_tensor_slices(starts).map(lambda i: tf.strided_slice(ids, [i], [i + CONTEXT + 1]))
    windows = windows.map(lambda window: (tf.ensure_shape(window, [CONTEXT + 1])[:-1], window[1:]))
    return windows.batch(batch_size).prefetch(4)


starts = np.random.default_rng(1).integers(0, len(train) - CONTEXT, arguments.steps * BATCH)
validation_starts = np.arange(0, len(validation) - CONTEXT, CONTEXT)

# 3. Ids -> logits. With rotary positions and a window as long as the context, the text may become longer than the
# context.
model = models.CausalLM(
    tokenizer.vocabulary_size,
    num_layers=LAYERS,
    hidden_dim=WIDTH,
    num_heads=HEADS,
    dropout=0.0,
    embedding_options={"position_encoding": None},
    decoder_options={"use_bias": False, "attention_options": {"rotary": True, "sliding_window": CONTEXT}},
)
model.summary()

# 4. Fit
epochs = 5
schedule = keras.optimizers.schedules.CosineDecay(
    0.0, arguments.steps - WARM_UP, alpha=0.1, warmup_target=LEARNING_RATE, warmup_steps=WARM_UP
)
model.compile(
    keras.optimizers.AdamW(schedule, weight_decay=0.1, beta_2=0.99, clipnorm=1.0),
    training.PaddedCrossentropy(),
    metrics=[training.Perplexity()],
    steps_per_execution=arguments.steps // epochs,
)
history = model.fit(
    rows(train, starts, BATCH).repeat(),
    validation_data=rows(validation, validation_starts, 128),
    steps_per_epoch=arguments.steps // epochs,
    epochs=epochs,
    shuffle=False,
    verbose=2,
)
print(f"validation loss {history.history['val_loss'][-1]:.4f} after {time.time() - start:.0f} s")
model.save(os.path.join(out, "model.keras"))
plots.training_curves(history, os.path.join(out, "training_curves.png"))

# 5. Generate
prompt = arguments.prompt or texts.validation.splitlines()[0] + "\n"
print(f"\n{prompt}", end="")
sample = generation.Sample(arguments.temperature, top_k=50, seed=1)
options = {"max_new_tokens": arguments.length, "tokenizer": tokenizer, "start_token": False, "stop_tokens": ()}
for piece in generation.stream(model, prompt, sample, **options):
    print(piece, end="", flush=True)
print(f"\n\n{out}/model.keras, training_curves.png after {time.time() - start:.0f} s")
