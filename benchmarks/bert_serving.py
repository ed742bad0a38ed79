"""An exported BERT-base that classifies texts, against ONNX Runtime, OpenVINO and PyTorch, tokenizers included.

python -m benchmarks bert_serving
python -m benchmarks bert_serving --precision bfloat16 --layers 4

The weights are random. Ours answers in a process without Keras and with XLA off, as on an unmodified server, whose
environment has TF_ONEDNN_ASSUME_FROZEN_WEIGHTS=1; "unset" is in float32 without it. ONNX Runtime runs the model after
its own transformer optimizer, in float32 and with dynamic int8 weights, and OpenVINO runs the model as PyTorch exported
it; they and PyTorch use the tokenizer of transformers. Batches of several rows have texts of a quarter to the full
length. `pip install openvino` adds OpenVINO.
"""

import argparse
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import torch
import transformers

from benchmarks import alternating, servables
from benchmarks.clean_server import CleanServer
from keras_tx import pretrained, serving

SHAPES = ((1, 16), (1, 64), (8, 64))
OURS = "keras_tx"
THREADS = os.cpu_count() or 1


def checkpoint(folder: Path, layers: int) -> tuple[torch.nn.Module, object, object]:
    """A random BERT-base with two classes, saved in `folder`, and its tokenizers: ours and that of transformers."""
    tokenizer = servables.tokenizer(30522, 512)
    tokenizer.save(folder)
    config = transformers.BertConfig(num_labels=2, num_hidden_layers=layers, initializer_range=0.05)
    torch.manual_seed(7)
    model = transformers.BertForSequenceClassification(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(std=0.02)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    return model, tokenizer, transformers.AutoTokenizer.from_pretrained(folder)


def texts_of(tokenizer: object, rows: int, length: int, count: int) -> list[list[str]]:
    """`count` batches of `rows` texts. The longest text of each has `length` tokens, the others down to a quarter."""
    random, words = np.random.default_rng(length), servables.sentences()
    known = [word for word in dict.fromkeys(" ".join(words).split()) if word.isalpha()]
    known = [word for word in known if (tokenizer([word])["token_ids"].numpy() != 0).sum() == 3][:2000]
    lengths = np.linspace(length // 4, length, rows).astype(int) if rows > 1 else [length]
    return [[" ".join(random.choice(known, n - 2)) for n in random.permutation(lengths)] for _ in range(count)]


def onnx_files(checkpoint: Path, folder: Path) -> tuple[Path, Path, Path]:
    """The model as exported by PyTorch, after ONNX Runtime's transformer optimizer, and that with int8 weights."""
    import onnx
    from onnxruntime.quantization import quantize_dynamic
    from onnxruntime.transformers import optimizer

    # The optimizer knows this form of attention, and not the one with PyTorch's fused kernel.
    model = transformers.BertForSequenceClassification.from_pretrained(checkpoint, attn_implementation="eager").eval()
    names = ["input_ids", "attention_mask", "token_type_ids"]
    plain, fused, int8 = (folder / f"{name}.onnx" for name in ("plain", "fused", "int8"))
    ids = torch.ones((2, 8), dtype=torch.long)

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            return self.model(**dict(zip(names, inputs, strict=True))).logits

    axes = {name: {0: "batch", 1: "length"} for name in names} | {"logits": {0: "batch"}}
    torch.onnx.export(
        Logits(), (ids, ids, ids), str(plain), input_names=names, output_names=["logits"], dynamic_axes=axes,
        opset_version=17, dynamo=False,
    )  # fmt: skip
    made = optimizer.optimize_model(str(plain), model_type="bert", num_heads=12, hidden_size=768, opt_level=1)
    made.save_model_to_file(str(fused))
    print(f"ONNX Runtime fused {made.get_fused_operator_statistics()}")
    quantize_dynamic(str(fused), str(int8), extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT})
    return plain, fused, int8


def softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def peers(model: torch.nn.Module, tokenizer: object, folder: Path) -> dict[str, Callable[[list[str]], np.ndarray]]:
    """{name: a function from texts to probabilities}."""
    import onnxruntime

    plain, fused, int8 = onnx_files(folder / "bert", folder)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS

    def features(texts: list[str], kind: str) -> dict[str, object]:
        return dict(tokenizer(texts, padding=True, truncation=True, return_tensors=kind))

    def by_onnx(path: Path) -> Callable[[list[str]], np.ndarray]:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        return lambda texts: softmax(session.run(["logits"], features(texts, "np"))[0])

    def by_torch(texts: list[str]) -> np.ndarray:
        with torch.inference_mode():
            return model(**features(texts, "pt")).logits.softmax(-1).numpy()

    runs = {"ONNX Runtime": by_onnx(fused), "ONNX Runtime, dynamic int8": by_onnx(int8), "PyTorch": by_torch}
    if importlib.util.find_spec("openvino"):
        import openvino

        for name, precision in (("OpenVINO", "f32"), ("OpenVINO, bfloat16", "bf16")):
            settings = {"INFERENCE_NUM_THREADS": THREADS, "INFERENCE_PRECISION_HINT": precision}
            compiled = openvino.compile_model(str(plain), "CPU", settings)
            runs[name] = lambda texts, compiled=compiled: softmax(compiled(features(texts, "np"))[0])
    return runs


def main() -> None:
    parser = alternating.parser(__doc__)
    parser.add_argument(
        "--precision",
        nargs="*",
        default=["float32", "bfloat16", "unset"],
        help="float32, bfloat16, int8 (needs VNNI), unset",
    )
    parser.add_argument("--layers", type=int, default=12, help="12 are those of BERT-base")
    parser.add_argument("--texts", type=int, default=10, help="requests in a round")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model, ours, theirs = checkpoint(folder / "bert", arguments.layers)
        run(arguments, folder, model, ours, theirs)


def run(arguments: argparse.Namespace, folder: Path, model: torch.nn.Module, ours: object, theirs: object) -> None:
    torch.set_num_threads(THREADS)
    loaded = pretrained.from_pretrained(folder / "bert")
    servers = {}
    try:
        for precision in arguments.precision:
            options = {} if precision == "unset" else {"precision": precision}
            name = OURS if precision == "float32" else f"{OURS}, {precision}"
            version = serving.export(
                loaded, folder / f"exported {precision}", tokenizer=ours, labels=["dull", "fun"], **options
            )
            size = sum(path.stat().st_size for path in version.rglob("*") if path.is_file())
            frozen = "0" if precision == "unset" else "1"
            servers[name] = CleanServer(version, TF_ONEDNN_ASSUME_FROZEN_WEIGHTS=frozen)
            print(f"{name}: {size / 2**20:,.0f} MiB on disk")
        others = peers(model, theirs, folder)
        for rows, length in SHAPES:
            batches = texts_of(ours, rows, length, arguments.texts)
            expected = [others["PyTorch"](batch) for batch in batches]
            runs: dict[str, Callable[[], object]] = {}
            for name, server in servers.items():
                server.prepare("batches", "serving_default", [{"text": batch} for batch in batches])
                answers = [server.answer("serving_default", text=batch)["probabilities"] for batch in batches]
                runs[name] = lambda server=server: sum(server.run("batches"))
                difference(name, answers, expected)
            for name, other in others.items():
                difference(name, [other(batch) for batch in batches], expected)
                runs[name] = lambda other=other, batches=batches: timed(other, batches)
            times: dict[str, list[float]] = {name: [] for name in runs}
            for turn in range(arguments.rounds):
                for name in list(runs)[:: 1 if turn % 2 else -1]:
                    times[name].append(runs[name]())
                    time.sleep(0.1)  # ONNX Runtime's threads still wait actively for a while
            title = f"BERT-base, {rows} x {length}, {len(batches)} requests"
            for name in servers:
                chosen = {name: times[name], **{one: times[one] for one in others}}
                alternating.report(title, chosen, len(batches), "requests", ours=name, file=arguments.json,
                                   steps=len(batches))  # fmt: skip
            for name, taken in times.items():
                print(f"  {name:32} {alternating.spread([1000 * one / len(batches) for one in taken], '.1f')} ms")
    finally:
        for server in servers.values():
            server.__exit__()


def difference(name: str, answers: list, expected: list[np.ndarray]) -> None:
    most = max(np.abs(np.asarray(one) - other).max() for one, other in zip(answers, expected, strict=True))
    print(f"  {name}: largest difference of a probability to PyTorch in float32 {most:.1e}")


def timed(run: Callable[[list[str]], object], batches: list[list[str]]) -> float:
    started = time.perf_counter()
    for batch in batches:
        run(batch)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
