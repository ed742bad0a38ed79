"""Beam search of a translator of 6 + 6 layers: tokens a second of keras_tx, KerasHub and transformers, in turns.

python -m benchmarks beam
python -m benchmarks beam --layers 2 --rounds 1

BART with a width of 512, 8 heads, a feed-forward of 2048, 32,000 tokens and random float32 weights; 16 sources of 32
tokens, 4 beams, 32 new tokens each. No end token stops a beam. keras_tx and KerasHub are compiled by XLA; PyTorch runs
eagerly.
"""

import argparse
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

from benchmarks import alternating
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


def ours(sources: np.ndarray, arguments: argparse.Namespace):
    model = pretrained.PretrainedModel(config(arguments.layers))
    strategy, options = Beam(arguments.beams), {"max_new_tokens": arguments.new_tokens, "stop_tokens": ()}
    return model.count_params(), lambda: model.generate({"input_ids": sources}, strategy, **options)


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
    arguments = parser.parse_args()
    keras.utils.set_random_seed(7)
    shape = (arguments.batch_size, arguments.source_tokens)
    sources = np.random.default_rng(7).integers(3, VOCABULARY, shape, dtype="int32")
    runs = {}
    for name, make in ((alternating.OURS, ours), ("KerasHub, XLA", keras_hub), ("transformers, PyTorch", transformers)):
        parameters, runs[name] = make(sources, arguments)
        written = np.shape(runs[name]())  # also the warm-up
        assert written[0] == arguments.batch_size and written[1] - arguments.new_tokens in (0, 1), written
        print(f"{name:24} {parameters:,} parameters, {written[0]} x {written[1]} tokens")
    case = f"beam {arguments.beams}, batch {arguments.batch_size}, {arguments.new_tokens} tokens"
    times = alternating.in_turns(runs, arguments.rounds)
    alternating.report(case, times, arguments.batch_size * arguments.new_tokens, "tokens", file=arguments.json)


if __name__ == "__main__":
    main()
