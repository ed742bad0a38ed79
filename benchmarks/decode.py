"""Greedy generation with a model of GPT-2 small's size: tokens a second of CausalLM and of its peers.

python -m benchmarks decode
python -m benchmarks decode --batch-size 8 --rounds 7 --ctranslate2
python -m benchmarks decode --int8
python -m benchmarks decode --batch-size 8 --exported float32 bfloat16 int8 --ctranslate2 float32 int8
python -m benchmarks decode --first-call

All models have random weights of the dtype policy. keras_tx and KerasHub's GPT2CausalLM run on the Keras backend with
their defaults: on TensorFlow and JAX both are compiled by XLA. --transformers and --ctranslate2 (`pip install
ctranslate2 transformers torch`) add these peers, --int8 adds keras_tx with int8 weights, quantized by Keras. --exported
adds keras_tx exported in these precisions, which answers in a process without Keras and with XLA off, as on an
unmodified server whose environment has TF_ONEDNN_ASSUME_FROZEN_WEIGHTS=1; int8 needs a processor with VNNI. The limit
is a decode step that does nothing but read each weight once.
"""

import argparse
import contextlib
import os
import tempfile
import warnings
from collections.abc import Callable

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import keras_tx
from benchmarks import alternating, servables

VOCABULARY, HIDDEN, HEADS, INTERMEDIATE, POSITIONS = 50257, 768, 12, 3072, 1024
PROMPT, SHORTER_PROMPT = 32, 27  # tokens; keras_tx pads both to 32


def our_model(num_layers: int) -> keras.Model:
    return keras_tx.models.CausalLM(
        VOCABULARY,
        num_layers=num_layers,
        hidden_dim=HIDDEN,
        num_heads=HEADS,
        intermediate_dim=INTERMEDIATE,
        dropout=0.0,
        embedding_options={"position_encoding": "learned", "max_length": POSITIONS, "scale": False},
    )


def their_model(num_layers: int) -> keras.Model:
    import keras_hub

    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=VOCABULARY,
        num_layers=num_layers,
        num_heads=HEADS,
        hidden_dim=HIDDEN,
        intermediate_dim=INTERMEDIATE,
        max_sequence_length=POSITIONS,
    )
    model = keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None)
    model.compile(sampler="greedy")
    return model


def their_inputs(prompts: np.ndarray, new_tokens: int) -> dict[str, np.ndarray]:
    room = ((0, 0), (0, new_tokens))
    return {"token_ids": np.pad(prompts, room), "padding_mask": np.pad(np.ones_like(prompts), room)}


def ctranslate2_run(num_layers: int, prompts: np.ndarray, new_tokens: int, kind: str) -> Callable[[], np.ndarray]:
    import ctranslate2
    import transformers
    from ctranslate2.converters.transformers import GPT2Loader

    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=POSITIONS, n_embd=HIDDEN, n_layer=num_layers, n_head=HEADS
    )
    spec = GPT2Loader().get_model_spec(transformers.GPT2LMHeadModel(config).eval())
    spec.register_vocabulary([str(token) for token in range(VOCABULARY)])
    for name in ("bos_token", "eos_token", "unk_token"):
        setattr(spec.config, name, "0")
    spec.validate()
    with tempfile.TemporaryDirectory() as folder:
        spec.save(folder)
        generator = ctranslate2.Generator(folder, compute_type=kind, intra_threads=os.cpu_count())
    texts = [[str(token) for token in row] for row in prompts]
    options = {"max_length": new_tokens, "min_length": new_tokens, "end_token": [], "include_prompt_in_result": False}

    def run() -> np.ndarray:
        written = [row.sequences_ids[0] for row in generator.generate_batch(texts, **options)]
        return np.concatenate([prompts, written], axis=1)

    return run


def transformers_run(num_layers: int, prompts: np.ndarray, new_tokens: int) -> Callable[[], np.ndarray]:
    """transformers' GPT-2 with PyTorch's fused attention, on the GPU if there is one."""
    import torch
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=POSITIONS, n_embd=HIDDEN, n_layer=num_layers, n_head=HEADS
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, keras.config.dtype_policy().compute_dtype)
    model = transformers.GPT2LMHeadModel(config).to(device, dtype).eval()
    model.set_attn_implementation("sdpa")
    ids = torch.tensor(prompts, dtype=torch.long, device=device)
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}

    def run() -> np.ndarray:
        with torch.inference_mode():
            return model.generate(ids, attention_mask=torch.ones_like(ids), **options).cpu().numpy()

    return run


def read_memory(size: int) -> Callable[[], object]:
    """Reads `size` bytes, with all cores."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        numbers = tf.ones((size // 4,))
        return tf.function(lambda: tf.reduce_max(numbers))
    numbers = keras.ops.ones((size // 4,))
    return lambda: keras.ops.convert_to_numpy(keras.ops.max(numbers))


def random_prompts(batch_size: int, length: int) -> np.ndarray:
    return np.random.default_rng(7).integers(1, VOCABULARY, (batch_size, length), dtype="int32")


def first_calls(arguments: argparse.Namespace) -> None:
    """Times keras_tx alone: what compiling costs, and that a prompt of another length does not compile again."""
    model = our_model(arguments.layers)
    for name, length in (
        (f"first call, {PROMPT} tokens: compiles", PROMPT),
        (f"second call, {SHORTER_PROMPT} tokens: another length", SHORTER_PROMPT),
        (f"third call, {SHORTER_PROMPT} tokens: nothing is new", SHORTER_PROMPT),
    ):
        prompts = random_prompts(arguments.batch_size, length)
        took = alternating.seconds(lambda prompts=prompts: model.generate(prompts, max_new_tokens=arguments.new_tokens))
        print(f"{name:42} {took:6.2f} s")
        if name.startswith("first"):
            report_first("generate", took, arguments)
    rows = random_prompts(arguments.batch_size, PROMPT)
    for name in (f"first call of predict, {PROMPT} tokens", f"second call of predict, {PROMPT} tokens"):
        took = alternating.seconds(lambda: model.predict(rows, verbose=0))
        print(f"{name:42} {took:6.2f} s")
        if name.startswith("first"):
            report_first("predict", took, arguments)


def report_first(method: str, took: float, arguments: argparse.Namespace) -> None:
    """Writes a row that compares a first call with the aim of 3 seconds."""
    times = {alternating.OURS: [took], "3 seconds": [3.0]}
    alternating.report(f"first call of {method}", times, 1, "calls", file=arguments.json)


def checked(run: Callable[[], object], shape: tuple[int, int]) -> Callable[[], None]:
    """`run`, which must return ids of this shape."""

    def checking() -> None:
        found = np.shape(run())
        assert found == shape, found

    return checking


def side_by_side(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> None:
    prompts = random_prompts(arguments.batch_size, PROMPT)
    new_tokens, ours, theirs = arguments.new_tokens, our_model(arguments.layers), their_model(arguments.layers)
    inputs = their_inputs(prompts, new_tokens)
    runs = {
        "keras_tx": lambda: ours.generate(prompts, max_new_tokens=new_tokens),
        "keras_hub": lambda: theirs.generate(inputs, stop_token_ids=None)["token_ids"],
    }
    for name, model in (("keras_tx", ours), ("keras_hub", theirs)):
        print(f"{name:14} {model.count_params():,} parameters")
    if arguments.int8:
        rounded = our_model(arguments.layers)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras warns of every layer that has no kernel
            rounded.quantize("int8")
        runs["keras_tx, int8"] = lambda: rounded.generate(prompts, max_new_tokens=new_tokens)
    if arguments.transformers:
        runs["transformers, PyTorch"] = transformers_run(arguments.layers, prompts, new_tokens)
    for kind in arguments.ctranslate2 or ():
        name = "ctranslate2" if kind == "float32" else f"ctranslate2, {kind}"
        runs[name] = ctranslate2_run(arguments.layers, prompts, new_tokens, kind)
    exported = {f"{alternating.OURS}, exported {one}": one for one in arguments.exported}
    for name, precision in exported.items():
        answer = servables.exported(stack, ours, precision, prompts, {"max_new_tokens": new_tokens})
        runs[name] = lambda answer=answer: np.concatenate([prompts, answer()], axis=1)
    runs = {name: checked(run, (arguments.batch_size, PROMPT + new_tokens)) for name, run in runs.items()}
    alternating.warm_up({name: [run] for name, run in runs.items()}, times=1)

    case = f"greedy, batch {arguments.batch_size}, {new_tokens} tokens after {PROMPT}, {arguments.policy}"
    size = int(arguments.memory * 2**30)
    runs["memory"] = read_memory(size)
    runs["memory"]()
    times = alternating.in_turns(runs, arguments.rounds)
    speed = size / np.median(times.pop("memory"))  # bytes a second
    number_bytes = 4 if keras.config.dtype_policy().variable_dtype == "float32" else 2
    limit = arguments.batch_size * speed / (number_bytes * ours.count_params())
    options = {"file": arguments.json, "limit": limit, "steps": new_tokens, "variants": list(exported)}
    alternating.report(case, times, arguments.batch_size * new_tokens, "tokens", **options)
    print(f"  the limit, each weight read once a step: {speed / 1e9:.1f} GB/s")


def main() -> None:
    parser = alternating.parser(__doc__)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--policy", default="float32", help="dtype policy")
    parser.add_argument("--memory", type=float, default=0.5, help="GiB that are read to measure the limit")
    parser.add_argument("--transformers", action="store_true", help="transformers on PyTorch, too")
    parser.add_argument(
        "--ctranslate2",
        nargs="*",
        metavar="TYPE",
        help="CTranslate2, too, with these types of numbers (default: float32)",
    )
    parser.add_argument(
        "--exported", nargs="*", default=[], metavar="PRECISION", help="exports in float32, bfloat16 or int8, too"
    )
    parser.add_argument("--int8", action="store_true", help='keras_tx after `quantize("int8")`, too')
    parser.add_argument("--first-call", action="store_true", help="only keras_tx, only the first three calls")
    arguments = parser.parse_args()
    if arguments.ctranslate2 == []:
        arguments.ctranslate2 = ["float32"]
    keras.config.set_dtype_policy(arguments.policy)
    print(
        f"{arguments.layers} layers, prompts of {PROMPT}, {arguments.new_tokens} new tokens, "
        f"batch {arguments.batch_size}, {arguments.policy}, "
        f"{os.cpu_count()} cores, medians of {arguments.rounds} rounds (least to most)"
    )
    if arguments.first_call:
        first_calls(arguments)
        return
    with contextlib.ExitStack() as stack:
        side_by_side(arguments, stack)


if __name__ == "__main__":
    main()
