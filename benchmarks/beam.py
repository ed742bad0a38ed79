"""Beam search of a translator of 6 + 6 layers: tokens a second of keras_tx, KerasHub and transformers, in turns.

python -m benchmarks beam
python -m benchmarks beam --layers 2 --rounds 1
python -m benchmarks beam --exported float32 bfloat16 --ctranslate2 float32 int8

BART with a width of 512, 8 heads, a feed-forward of 2048, 32,000 tokens and random float32 weights; 16 sources of 32
tokens, 4 beams, 32 new tokens each. No end token stops a beam. keras_tx and KerasHub are compiled by XLA; PyTorch runs
eagerly. --ctranslate2 (`pip install ctranslate2`) adds this peer, --exported adds keras_tx exported in these
precisions, which answers in a process without Keras and with XLA off, whose environment has
TF_ONEDNN_ASSUME_FROZEN_WEIGHTS=1.
"""

import argparse
import contextlib
import os
import tempfile
from collections.abc import Callable

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

from benchmarks import alternating, servables
from keras_tx import pretrained
from keras_tx.generation import Beam

VOCABULARY, WIDTH, HEADS, INTERMEDIATE, POSITIONS, START = 32000, 512, 8, 2048, 128, 2


def config(num_layers: int) -> dict:
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", num_layers), ("attention_heads", HEADS), ("ffn_dim", INTERMEDIATE))
    }
    tokens = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": START, "decoder_start_token_id": START}
    return {
        "model_type": "bart",
        "architectures": ["BartForConditionalGeneration"],
        "vocab_size": VOCABULARY,
        "d_model": WIDTH,
        "max_position_embeddings": POSITIONS,
        "activation_function": "gelu",
        "forced_eos_token_id": None,
        **sides,
        **tokens,
    }


def our_options(arguments: argparse.Namespace) -> dict:
    return {"strategy": Beam(arguments.beams), "max_new_tokens": arguments.new_tokens, "stop_tokens": ()}


def ours(sources: np.ndarray, arguments: argparse.Namespace):
    model = pretrained.PretrainedModel(config(arguments.layers))
    return model.count_params(), lambda: model.generate({"input_ids": sources}, **our_options(arguments))


def exported(stack: contextlib.ExitStack, precision: str) -> Callable:
    def make(sources: np.ndarray, arguments: argparse.Namespace):
        model = pretrained.PretrainedModel(config(arguments.layers))
        return model.count_params(), servables.exported(stack, model, precision, sources, our_options(arguments))

    return make


def ctranslate2(kind: str) -> Callable:
    def make(sources: np.ndarray, arguments: argparse.Namespace):
        import ctranslate2
        import transformers
        from ctranslate2.converters.transformers import BartLoader

        settings = transformers.BartConfig(**config(arguments.layers), normalize_before=False)  # the converter asks
        model = transformers.BartForConditionalGeneration(settings).eval()
        spec = BartLoader().get_model_spec(model)
        tokens = [str(token) for token in range(VOCABULARY)]
        spec.register_source_vocabulary(tokens)
        spec.register_target_vocabulary(tokens)
        for name, token in (("unk", 3), ("bos", 0), ("eos", START), ("decoder_start", START)):
            setattr(spec.config, f"{name}_token", str(token))
        spec.validate()
        with tempfile.TemporaryDirectory() as folder:
            spec.save(folder)
            translator = ctranslate2.Translator(folder, compute_type=kind, intra_threads=os.cpu_count())
        texts = [[str(token) for token in row] for row in sources]
        length = arguments.new_tokens
        options = {"beam_size": arguments.beams, "min_decoding_length": length, "max_decoding_length": length}

        def run() -> np.ndarray:
            written = translator.translate_batch(texts, end_token=[], **options)
            return np.array([[int(token) for token in row.hypotheses[0]] for row in written])

        return model.num_parameters(), run

    return make


def keras_hub(sources: np.ndarray, arguments: argparse.Namespace):
    import keras_hub

    backbone = keras_hub.models.BartBackbone(
        VOCABULARY, arguments.layers, HEADS, WIDTH, INTERMEDIATE, dropout=0.0, max_sequence_length=POSITIONS
    )
    model = keras_hub.models.BartSeq2SeqLM(backbone=backbone, preprocessor=None)
    model.compile(sampler=keras_hub.samplers.BeamSampler(num_beams=arguments.beams))
    started = np.zeros((len(sources), 1 + arguments.new_tokens), "int32")
    started[:, 0] = START
    inputs = {
        "encoder_token_ids": sources,
        "encoder_padding_mask": np.ones_like(sources),
        "decoder_token_ids": started,
        "decoder_padding_mask": (np.arange(started.shape[1]) == 0)[None].repeat(len(sources), 0).astype("int32"),
    }
    return model.count_params(), lambda: model.generate(inputs, stop_token_ids=None)["decoder_token_ids"]


def transformers(sources: np.ndarray, arguments: argparse.Namespace):
    import torch
    import transformers

    torch.set_num_threads(os.cpu_count() or 1)
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(**config(arguments.layers))).eval()
    ids, length = torch.tensor(sources, dtype=torch.long), arguments.new_tokens
    options = {"num_beams": arguments.beams, "min_new_tokens": length, "max_new_tokens": length, "do_sample": False}

    def run() -> np.ndarray:
        with torch.inference_mode():
            return model.generate(ids, attention_mask=torch.ones_like(ids), **options).numpy()

    return model.num_parameters(), run


def main() -> None:
    parser = alternating.parser(__doc__, rounds=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--source-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--layers", type=int, default=6, help="layers of the encoder; the decoder has as many")
    parser.add_argument(
        "--exported", nargs="*", default=[], metavar="PRECISION", help="exports in these precisions, too"
    )
    parser.add_argument("--ctranslate2", nargs="*", default=[], metavar="TYPE", help="CTranslate2, too, in these types")
    parser.add_argument("--only", action="store_true", help="without KerasHub and transformers")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        side_by_side(arguments, stack)


def side_by_side(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> None:
    keras.utils.set_random_seed(7)
    shape = (arguments.batch_size, arguments.source_tokens)
    sources = np.random.default_rng(7).integers(3, VOCABULARY, shape, dtype="int32")
    runs, makers = {}, {alternating.OURS: ours}
    variants = [f"{alternating.OURS}, exported {precision}" for precision in arguments.exported]
    makers |= {name: exported(stack, one) for name, one in zip(variants, arguments.exported, strict=True)}
    makers |= {} if arguments.only else {"KerasHub, XLA": keras_hub, "transformers, PyTorch": transformers}
    makers |= {f"CTranslate2, {kind}": ctranslate2(kind) for kind in arguments.ctranslate2}
    for name, make in makers.items():
        parameters, runs[name] = make(sources, arguments)
        written = np.shape(runs[name]())  # also the warm-up
        assert written[0] == arguments.batch_size and written[1] - arguments.new_tokens in (0, 1), written
        print(f"{name:24} {parameters:,} parameters, {written[0]} x {written[1]} tokens")
    case = f"beam {arguments.beams}, batch {arguments.batch_size}, {arguments.new_tokens} tokens"
    times = alternating.in_turns(runs, arguments.rounds)
    options = {"file": arguments.json, "variants": variants}
    alternating.report(case, times, arguments.batch_size * arguments.new_tokens, "tokens", **options)


if __name__ == "__main__":
    main()
