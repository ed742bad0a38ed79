"""Exports a translator and a classifier as SavedModels, and sends requests to every signature of both.

python examples/serve.py

The script trains both for a short time on the data that comes with the package, then exports and checks them. It prints
the command that starts TensorFlow Serving for each model, and a curl command, a gRPC snippet and the SavedModel's
answer for each signature.
"""

import argparse
import base64
import json
import os
import shlex
import time

import quiet  # noqa: F401  # before Keras: TensorFlow starts without its lines about the machine

# isort: split
import keras
import numpy as np
import option_checks
import tensorflow as tf

from keras_tx import data, models, serving, text, training
from keras_tx.generation import Beam

HEADS = 4
BATCHES = {"boundaries": [8, 16, 32], "max_tokens": 2048}
GRPC = """    import grpc
    from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

    stub = prediction_service_pb2_grpc.PredictionServiceStub(grpc.insecure_channel("localhost:8500"))
    request = predict_pb2.PredictRequest()
    request.model_spec.name, request.model_spec.signature_name = {name!r}, {signature!r}
{inputs}
    print(stub.Predict(request, 30.0).outputs)"""

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--epochs",
    type=option_checks.positive,
    default=8,
    help="the number of epochs for the translator; a quarter of it for the classifier",
)
parser.add_argument(
    "--num-layers", type=option_checks.positive, default=2, help="layers of the translator's encoder and of its decoder"
)
parser.add_argument(
    "--hidden-dim",
    type=option_checks.positive,
    default=96,
    help=f"the width of the translator, a multiple of {HEADS}",
)
parser.add_argument("--out", default="saved_models", help="the folder for exports")
arguments = parser.parse_args()
if arguments.hidden_dim % HEADS:
    parser.error(f"--hidden-dim must be a multiple of {HEADS}. Received: {arguments.hidden_dim}")
option_checks.check_out(parser, arguments.out)
start = time.time()
keras.utils.set_random_seed(1)


def batches(features, labels):
    """Batches of ragged rows of similar length, shuffled anew in every epoch."""
    rows = tf.data.Dataset.from_tensor_slices((features, labels)).map(lambda *row: row).cache().shuffle(10_000, seed=1)
    return data.bucket_by_length(rows, **BATCHES).prefetch(2)


def ragged(tokenizer, texts):
    return tf.RaggedTensor.from_tensor(tokenizer(texts)["token_ids"], padding=tokenizer.pad_id)


# 1. A translator
pairs = data.load_translation("sample")
sources, targets = (list(side) for side in zip(*pairs.train.as_numpy_iterator(), strict=True))
words = text.BertTokenizer.train([side.decode() for side in sources + targets], 1000, max_length=64)
translator = models.Seq2Seq(
    words.vocabulary_size,
    num_layers=arguments.num_layers,
    hidden_dim=arguments.hidden_dim,
    num_heads=HEADS,
    intermediate_dim=2 * arguments.hidden_dim,
)
translator.compile(keras.optimizers.Adam(2e-3), training.PaddedCrossentropy(label_smoothing=0.1))
source_ids, target_ids = ragged(words, sources), ragged(words, targets)
rows = {"source_ids": source_ids, "target_ids": target_ids[:, :-1]}, target_ids[:, 1:]
translator.fit(batches(*rows), epochs=arguments.epochs, shuffle=False, verbose=2)

# 2. A classifier
reviews = data.load_dataset("sample")
opinions, labels = zip(*reviews.train.as_numpy_iterator(), strict=True)
pieces = text.BertTokenizer.train([opinion.decode() for opinion in opinions], 1000, max_length=64)
classifier = models.TextClassifier(pieces.vocabulary_size, len(reviews.labels), num_layers=1, hidden_dim=64)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
classifier.compile(keras.optimizers.Adam(2e-3), loss, metrics=["accuracy"])
rows = {"token_ids": ragged(pieces, opinions)}, np.array(labels)
classifier.fit(batches(*rows), epochs=max(1, arguments.epochs // 4), shuffle=False, verbose=2)

# 3. Exports, with warm-up requests that a server answers before it accepts clients
sentences = [source.decode() for source in sources[:2]]
answers = [target.decode() for target in targets[:2]]
opinions = [opinion.decode() for opinion in opinions[:2]]
exports = {
    "translator": (
        serving.export(
            translator,
            os.path.join(arguments.out, "translator"),
            tokenizer=words,
            generation={"max_new_tokens": 32, "strategy": Beam(4)},
            warmup=sentences,
        ),
        words,
        sentences,
    ),
    "opinions": (
        serving.export(
            classifier,
            os.path.join(arguments.out, "opinions"),
            tokenizer=pieces,
            labels=reviews.labels,
            warmup=opinions,
        ),
        pieces,
        opinions,
    ),
}
reports = {name: serving.check(version) for name, (version, _, _) in exports.items()}


# 4. Requests
def example(sentence):
    feature = tf.train.Feature(bytes_list=tf.train.BytesList(value=[sentence.encode()]))
    return tf.train.Example(features=tf.train.Features(feature={"text": feature})).SerializeToString()


def request_for(inputs, tokenizer, texts):
    """Two rows for the inputs of a signature, by their names."""
    ids = tokenizer(texts)["token_ids"].numpy()
    known = {
        "text": texts,
        "target": answers,
        "inputs": [example(sentence) for sentence in texts],
        "token_ids": ids.tolist(),
        "lengths": (ids != tokenizer.pad_id).sum(axis=1).tolist(),
        "max_new_tokens": [16, 16],
        "temperature": [0.0, 0.8],
        "top_k": [0, 20],
        "top_p": [1.0, 0.9],
        "seed": [0, 7],
    }
    return {name: known[name] for name in inputs}


def as_json(value):
    """JSON has no bytes: TensorFlow Serving takes them as {"b64": ...}."""
    return {"b64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def show(value):
    value = np.asarray(value)
    return value.shape if value.size > 12 else np.vectorize(lambda x: x.decode() if isinstance(x, bytes) else x)(value)


for name, (version, tokenizer, texts) in exports.items():
    folder = os.path.abspath(os.path.dirname(version))
    print(f"\n{reports[name]}\n")
    volume = shlex.quote(f"{folder}:/models/{name}")
    print(f"docker run -p 8500:8500 -p 8501:8501 -v {volume} -e MODEL_NAME={name} tensorflow/serving")
    for signature, function in sorted(tf.saved_model.load(str(version)).signatures.items()):
        specs = function.structured_input_signature[1]
        request = request_for(sorted(specs), tokenizer, texts)
        columns = {key: [as_json(value) for value in values] for key, values in request.items()}
        body = shlex.quote(json.dumps({"signature_name": signature, "inputs": columns}, ensure_ascii=False))
        print(f"\n{name}, {signature}:\ncurl -d {body} http://localhost:8501/v1/models/{name}:predict")
        lines = [
            f"    request.inputs[{key!r}].CopyFrom(tf.make_tensor_proto({values!r}, {specs[key].dtype.name!r}))"
            for key, values in request.items()
        ]
        print(GRPC.format(name=name, signature=signature, inputs="\n".join(lines)))
        answer = function(**{key: tf.constant(values, specs[key].dtype) for key, values in request.items()})
        for key, value in sorted(answer.items()):
            print(f"  {key}: {show(value.numpy())}")
print(f"\n{', '.join(str(version) for version, _, _ in exports.values())} after {time.time() - start:.0f} s")
raise SystemExit(not all(report.ok for report in reports.values()))
