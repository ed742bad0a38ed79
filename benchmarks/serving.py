"""Exported models against `model.predict`, a pipeline of transformers, and `generate` compiled by XLA.

python -m benchmarks serving
python -m benchmarks serving --parts decoding --rounds 7

All models have random float32 weights. Exported models answer in a process of their own, without Keras and with XLA
off, as on a stock server. The part `predict` also times the SavedModel inside the process of the Keras model.
"""

import argparse
import functools
import os
import statistics
import tempfile
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from benchmarks import alternating, servables
from benchmarks.clean_server import CleanServer
from keras_tx import models, pretrained, serving

CLEAN = "exported, clean process"
TOKENS = 64  # in a text that is classified
CLASSIFIER = dict(num_layers=6, hidden_dim=384, num_heads=6, intermediate_dim=1536)  # the size of MiniLM
GENERATORS = {
    "language model, 4 layers of width 256": lambda size: models.CausalLM(
        size, num_layers=4, hidden_dim=256, num_heads=4, intermediate_dim=1024
    ),
    "translator, 4 + 4 layers of width 128": lambda size: models.Seq2Seq(
        size, num_layers=4, hidden_dim=128, num_heads=4, intermediate_dim=256
    ),
}


def predict(arguments: argparse.Namespace, folder: Path) -> None:
    """Times classification of texts of one length, for which `predict` traces once."""
    tokenizer = servables.tokenizer(arguments.vocabulary, TOKENS)
    model = servables.with_noise(models.TextClassifier(tokenizer.vocabulary_size, 2, **CLASSIFIER), scale=0.03)
    model.compile()
    version = serving.export(model, folder / "classifier", tokenizer=tokenizer)
    signature = tf.saved_model.load(str(version)).signatures["serving_default"]
    texts = [" ".join(servables.texts(4, seed, most=9)) for seed in range(arguments.texts)]
    ids = tokenizer(texts)["token_ids"].numpy()
    assert (ids != tokenizer.pad_id).all(), "every text must be cut"
    print(f"\nclassifier, {model.count_params():,} parameters, {TOKENS} tokens, jit_compile={model.jit_compile}")

    with CleanServer(version) as server:
        for batch_size in arguments.batch_sizes:
            parts = range(0, len(texts) - batch_size + 1, batch_size)
            batches = [texts[i : i + batch_size] for i in parts]
            tensors = [tf.constant(batch) for batch in batches]
            rows = [ids[i : i + batch_size] for i in parts]
            server.prepare("batches", "serving_default", [{"text": batch} for batch in batches])
            live = functools.partial(model.predict, batch_size=batch_size, verbose=0)
            together = np.concatenate(rows)
            runs = {
                CLEAN: lambda: server.run("batches"),
                "exported, this process": lambda tensors=tensors: [signature(text=one) for one in tensors],
                "predict, texts": lambda live=live, batches=batches: [
                    live(tokenizer(one)["token_ids"]) for one in batches
                ],
                "predict, ids": lambda live=live, rows=rows: [live(one) for one in rows],
                "predict, ids, one call for all": lambda live=live, together=together: live(together),
            }
            for run in runs.values():  # also the warm-up
                answers = run()
                if isinstance(answers, np.ndarray):
                    expected = tf.nn.softmax(answers)
            served = np.concatenate([signature(text=one)["probabilities"] for one in tensors])
            print(f"largest difference of a probability: {np.abs(served - expected).max():.1e}")
            times = alternating.in_turns(runs, arguments.rounds)
            amount = len(batches) * batch_size
            alternating.report(f"batch {batch_size}", times, amount, "texts", ours=CLEAN, file=arguments.json)


def pipeline(arguments: argparse.Namespace, folder: Path) -> None:
    """Times a random BERT of transformers, the same checkpoint exported, and a `TextClassifier` of its size."""
    import torch
    import transformers

    tokenizer = servables.tokenizer(arguments.vocabulary, 2 * TOKENS)
    tokenizer.save(folder / "bert")
    theirs = transformers.AutoTokenizer.from_pretrained(folder / "bert")
    assert len(theirs) == tokenizer.vocabulary_size, len(theirs)
    config = transformers.BertConfig(
        vocab_size=len(theirs),
        hidden_size=CLASSIFIER["hidden_dim"],
        num_hidden_layers=CLASSIFIER["num_layers"],
        num_attention_heads=CLASSIFIER["num_heads"],
        intermediate_size=CLASSIFIER["intermediate_dim"],
        initializer_range=0.1,  # else all answers are nearly alike
    )
    torch.manual_seed(7)
    bert = transformers.BertForSequenceClassification(config).eval()
    transformers.utils.logging.disable_progress_bar()
    bert.save_pretrained(folder / "bert")
    pipe = transformers.pipeline("text-classification", bert, tokenizer=theirs, device="cpu")
    same_weights = pretrained.from_pretrained(folder / "bert")
    same_size = models.TextClassifier(
        len(theirs),
        2,
        **CLASSIFIER,
        pooling="first",
        embedding_options={"position_encoding": "learned", "max_length": 512, "num_segments": 2},
    )
    texts = servables.texts(arguments.texts)
    lengths = (tokenizer(texts)["token_ids"].numpy() != tokenizer.pad_id).sum(1)
    print(
        f"\n{bert.num_parameters():,} parameters (TextClassifier {same_size.count_params():,}), {len(texts)} texts of "
        f"{lengths.min()} to {lengths.max()} tokens, torch with {torch.get_num_threads()} threads"
    )
    exports = {"exported BERT": same_weights, "exported TextClassifier": same_size}
    labels = list(config.id2label.values())
    servers = {}
    try:
        for name, model in exports.items():
            servers[name] = CleanServer(serving.export(model, folder / name, tokenizer=tokenizer, labels=labels))
            for index, text in enumerate(texts):  # also the warm-up
                servers[name].prepare(index, "serving_default", [{"text": [text]}])
        answers = servers["exported BERT"].answer("serving_default", text=texts)
        expected = pipe(texts, top_k=1)
        best = np.max(answers["probabilities"], axis=1)
        error = max(abs(one["score"] - ours) for (one,), ours in zip(expected, best, strict=True))
        same = sum(one["label"] == label for (one,), label in zip(expected, answers["label"], strict=True))
        print(f"labels equal: {same} of {len(texts)}, largest difference of a probability: {error:.1e}")
        medians: dict[str, list[float]] = {name: [] for name in ("transformers pipeline", *exports)}
        for _ in range(arguments.rounds):
            taken: dict[str, list[float]] = {name: [] for name in medians}
            for index, text in enumerate(texts):
                taken["transformers pipeline"].append(alternating.seconds(lambda text=text: pipe(text)))
                for name, server in servers.items():
                    taken[name] += server.run(index)
            for name, one in taken.items():
                medians[name].append(statistics.median(one))
    finally:
        for server in servers.values():
            server.__exit__()
    for name, one in medians.items():
        print(f"  {name:32} p50 {alternating.spread([1000 * seconds for seconds in one], '.2f')} ms")
    for name in exports:
        times = {one: medians[one] for one in (name, "transformers pipeline")}
        alternating.report("p50 with batch 1, as requests/s", times, 1, "requests", ours=name, file=arguments.json)


def decoding(arguments: argparse.Namespace, folder: Path) -> None:
    """Times greedy decoding of `NEW_TOKENS` tokens; no end token stops it."""
    tokenizer = servables.tokenizer(arguments.vocabulary)
    options = {"max_new_tokens": servables.NEW_TOKENS, "stop_tokens": ()}
    texts = servables.texts(max(arguments.batch_sizes), most=3)
    for name, make in GENERATORS.items():
        model = servables.with_noise(make(tokenizer.vocabulary_size))
        version = serving.export(model, folder / name.partition(",")[0], tokenizer=tokenizer, generation=options)
        print(f"\n{name}, {model.count_params():,} parameters")
        with CleanServer(version) as server:
            for batch_size in arguments.batch_sizes:
                batch = texts[:batch_size]
                write = functools.partial(model.generate, batch, tokenizer=tokenizer, **options)
                server.prepare("batch", "serving_default", [{"text": batch}])
                served = server.answer("serving_default", text=batch)["text"]
                same = sum(ours == live for ours, live in zip(served, write(), strict=True))
                runs = {CLEAN: lambda: server.run("batch"), "generate under XLA": write}
                times = alternating.in_turns(runs, arguments.rounds)
                amount = batch_size * servables.NEW_TOKENS
                case = f"{name}, batch {batch_size}, {same} of {batch_size} texts equal"
                alternating.report(case, times, amount, "tokens", ours=CLEAN, file=arguments.json)


PARTS = {"predict": predict, "pipeline": pipeline, "decoding": decoding}


def main() -> None:
    parser = alternating.parser(__doc__)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--batch-sizes", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--texts", type=int, default=64, help="texts that are classified in a round")
    parser.add_argument("--vocabulary", type=int, default=8000, help="size of the vocabulary")
    arguments = parser.parse_args()
    if keras.backend.backend() != "tensorflow":
        parser.error("it must run on the TensorFlow backend")
    keras.utils.set_random_seed(7)
    print(f"{os.cpu_count()} cores, medians of {arguments.rounds} rounds (least to most)")
    with tempfile.TemporaryDirectory() as folder:
        for part in arguments.parts:
            PARTS[part](arguments, Path(folder))


if __name__ == "__main__":
    main()
