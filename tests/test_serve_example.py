"""The example examples/serve.py, run as a newcomer runs it: what it prints for every signature."""

import re
import shlex

import pytest

from keras_tx import serving
from tests.test_examples import reports_on, run_here, smaller

pytestmark = pytest.mark.tensorflow
OUTPUTS = {
    "translator": {
        "serving_default": {"text"},
        "generate": {"num_tokens", "score", "text"},
        "beam": {"scores", "text"},
        "score": {"log_probability", "num_tokens", "token_log_probabilities", "tokens"},
        "tokens": {"lengths", "token_ids"},
        "explain": {"cross_scores", "decoder_scores", "encoder_scores", "source_tokens", "text", "tokens"},
        "embed": {"embedding"},
    },
    "opinions": {
        "serving_default": {"label", "probabilities"},
        "tokens": {"label", "probabilities"},
        "classify": {"classes", "scores"},
        "explain": {"label", "probabilities", "scores", "tokens"},
        "embed": {"embedding"},
    },
}


@pytest.fixture
def checked_together(monkeypatch):
    """`serving.check` starts one process for all versions when the first report is read, instead of one for each."""
    versions, reports = [], []

    class Report:
        def __init__(self, version):
            self.number = len(versions)
            versions.append(version)

        @property
        def report(self):
            reports.extend(() if reports else reports_on(*versions))
            return reports[self.number]

        def __str__(self):
            return str(self.report)

        @property
        def ok(self):
            return self.report.ok

    monkeypatch.setattr(serving, "check", Report)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.usefixtures("checked_together")
def test_serve_asks_every_signature_as_clients_would(tmp_path):
    pytest.importorskip("tensorflow_text")  # brings the ops of the graph
    less = [(f"{name}.train.as_", f"{name}.train.take(64).as_") for name in ("pairs", "reviews")]
    less += [('"max_new_tokens": 32, "strategy": Beam(4)', '"max_new_tokens": 16, "strategy": Beam(2)')]
    # To trace the graphs in which they would learn takes longer than one epoch.
    for call in ("label_smoothing=0.1)", 'metrics=["accuracy"]'):
        less.append((f"{call})", f"{call}, run_eagerly=True)"))
    examples = smaller(tmp_path / "examples", "serve.py", *less)
    tmp_path = tmp_path / "it's $HOME"  # the commands that are printed must also be right here
    tmp_path.mkdir()
    printed = run_here(
        tmp_path, "serve.py", "--epochs", "1", "--num-layers", "1", "--hidden-dim", "16", examples=examples
    )
    parts = re.split(r"^(translator|opinions), (\w+):$", printed, flags=re.MULTILINE)
    found = {name: {} for name in OUTPUTS}
    for name, signature, section in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        outputs = section.split("print(stub.Predict(request, 30.0).outputs)\n")[1].split("\n\n")[0]
        found[name][signature] = set(re.findall(r"^  (\w+): ", outputs, re.MULTILINE))
        assert f'curl -d \'{{"signature_name": "{signature}"' in section
        assert f"http://localhost:8501/v1/models/{name}:predict" in section
        assert f"request.model_spec.signature_name = {name!r}, {signature!r}" in section
    assert found == OUTPUTS
    for name in OUTPUTS:
        folder = tmp_path / "saved_models" / name
        (command,) = re.findall(rf"^docker run .* -e MODEL_NAME={name} tensorflow/serving$", printed, re.MULTILINE)
        assert f"{folder}:/models/{name}" in shlex.split(command)
        assert f"saved_models/{name}/1: ok" in printed
        assert (folder / "1/assets.extra/tf_serving_warmup_requests").stat().st_size > 0
