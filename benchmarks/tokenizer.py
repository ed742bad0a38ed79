"""Tokenization: sentences a second of BertTokenizer in the TensorFlow graph and of transformers' BertTokenizer.

python -m benchmarks tokenizer
python -m benchmarks tokenizer --data sentences.txt --vocabulary vocab.txt
"""

import functools
import gzip
import os
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
from transformers import BertTokenizer as HuggingFace

from benchmarks import alternating
from keras_tx.text import BertTokenizer

SENTENCES = 16384  # that are made up if there is no --data
WORDS = 2000
LETTERS = np.array(list("eeeeaaaiiooutttnnnsssrrrhhldcumfpgwybvkäöüß"))


def made_sentences() -> list[str]:
    """Sentences of 5 to 20 words, frequent words as in Zipf's law; one letter in 14 is not ASCII."""
    random = np.random.default_rng(7)
    words = np.array(["".join(random.choice(LETTERS, random.integers(1, 9))) for _ in range(WORDS)])
    chances = 1 / np.arange(1, WORDS + 1)
    chances /= chances.sum()
    lengths = random.integers(5, 21, SENTENCES)
    return [" ".join(random.choice(words, n, p=chances)).capitalize() + "." for n in lengths]


def read_sentences(paths: list[Path]) -> list[str]:
    """The lines of text files, gzipped or not."""
    openers = [gzip.open if path.suffix == ".gz" else open for path in paths]
    files = [opener(path, "rt", encoding="utf-8") for opener, path in zip(openers, paths, strict=True)]
    return [line.rstrip("\n") for file in files for line in file]


def all_of(function, batches) -> None:
    for batch in batches:
        function(batch)


def main() -> None:
    parser = alternating.parser(__doc__)
    parser.add_argument(
        "--data", type=Path, nargs="*", default=[], help="text files with one sentence a line; .gz is read, too"
    )
    parser.add_argument(
        "--vocabulary", type=Path, help="vocab.txt; if left out, a vocabulary of up to 8,000 tokens is trained"
    )
    parser.add_argument("--batch-size", type=int, default=1024)
    arguments = parser.parse_args()

    texts = read_sentences(arguments.data) if arguments.data else made_sentences()
    if arguments.vocabulary:
        ours = BertTokenizer.from_vocabulary(arguments.vocabulary)
    else:
        ours = BertTokenizer.train(texts, 8000)
    with tempfile.TemporaryDirectory() as directory:
        ours.save(directory)
        theirs = HuggingFace.from_pretrained(directory)

    batches = [texts[i : i + arguments.batch_size] for i in range(0, len(texts), arguments.batch_size)]
    tensors = [tf.constant(batch) for batch in batches]
    graph = tf.function(ours, input_signature=[tf.TensorSpec([None], tf.string)])
    for batch, tensor in zip(batches, tensors, strict=True):  # also the warm-up
        expected = theirs(batch, padding=True, truncation=True, max_length=512, return_tensors="np")["input_ids"]
        assert np.array_equal(graph(tensor)["token_ids"], expected)

    names = {alternating.OURS: (graph, tensors), "transformers": (lambda batch: theirs(batch), batches)}
    print(f"vocabulary {ours.vocabulary_size:,}, {os.cpu_count()} cores; all ids equal")
    runs = {name: functools.partial(all_of, function, inputs) for name, (function, inputs) in names.items()}
    case = f"{len(texts):,} sentences, batches of {arguments.batch_size}"
    alternating.report(case, alternating.in_turns(runs, arguments.rounds), len(texts), "sentences", file=arguments.json)


if __name__ == "__main__":
    main()
