"""examples/serve.py, after an epoch: the exports are in order, and each signature has its requests and its answers."""

import ast
import json
import re
import textwrap

import pytest

from tests.test_examples import run

SIGNATURES = {
    "translator": {
        "serving_default": ["text"],
        "generate": ["num_tokens", "score", "text"],
        "beam": ["scores", "text"],
        "score": ["log_probability", "num_tokens", "token_log_probabilities", "tokens"],
        "tokens": ["lengths", "token_ids"],
        "explain": ["cross_scores", "decoder_scores", "encoder_scores", "source_tokens", "text", "tokens"],
        "embed": ["embedding"],
    },
    "opinions": {
        "serving_default": ["label", "probabilities"],
        "tokens": ["label", "probabilities"],
        "classify": ["classes", "scores"],
        "explain": ["label", "probabilities", "scores", "tokens"],
        "embed": ["embedding"],
    },
}


def sections(printed):
    """{(model, signature): what is printed for it}."""
    parts = re.split(r"^(translator|opinions), (\w+):\n", printed, flags=re.MULTILINE)[1:]
    return dict(zip(zip(parts[::3], parts[1::3], strict=True), parts[2::3], strict=True))


@pytest.mark.slow
@pytest.mark.tensorflow
def test_serve_exports_and_asks_every_signature(tmp_path):
    printed = run(tmp_path, "serve.py", "--epochs", "1")
    found = sections(printed)
    assert set(found) == {(name, one) for name, signatures in SIGNATURES.items() for one in signatures}
    for name, signatures in SIGNATURES.items():
        folder = tmp_path / "saved_models" / name
        assert f"saved_models/{name}/1: ok" in printed and (folder / "1" / "saved_model.pb").is_file()
        assert f'docker run -p 8500:8500 -p 8501:8501 -v "{folder}:/models/{name}" -e MODEL_NAME={name} tens' in printed
        for signature, outputs in signatures.items():
            section = found[name, signature]
            curl = re.match(rf"curl -d '(.*)' http://localhost:8501/v1/models/{name}:predict\n", section)
            body = json.loads(curl[1].replace("'\\''", "'"))  # as a shell reads it
            assert body["signature_name"] == signature
            assert {len(values) for values in body["inputs"].values()} == {2}  # rows

            grpc = section[curl.end() :].partition("  print(stub.Predict(request, 30.0).outputs)\n")
            ast.parse(textwrap.dedent("".join(grpc[:2])))
            assert f"request.model_spec.signature_name = {name!r}, {signature!r}" in grpc[0]
            assert re.findall(r"request\.inputs\['(\w+)'\]\.CopyFrom", grpc[0]) == sorted(body["inputs"])
            assert re.findall(r"^  (\w+): ", grpc[2].partition("\n\n")[0], flags=re.MULTILINE) == outputs
