"""examples/serving: the configuration of TensorFlow Serving for docker compose and for Kubernetes.

tensorflow-serving-api ships the schema of models.config; those of the other files are in tests/serving/protos.py.
"""

from pathlib import Path

import pytest

from tests.serving.protos import message

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "serving"
NAMES = {"models.config", "batching.config", "monitoring.config"}


@pytest.fixture
def files():
    """The documents of both files."""
    yaml = pytest.importorskip("yaml")
    (compose,) = yaml.safe_load_all((FOLDER / "docker-compose.yaml").read_text())
    return compose, list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))


def test_the_models_are_a_message_of_tensorflow_serving():
    pytest.importorskip("tensorflow_serving.config")
    from google.protobuf import text_format
    from tensorflow_serving.config import model_server_config_pb2

    config = text_format.Parse((FOLDER / "models.config").read_text(), model_server_config_pb2.ModelServerConfig())
    reviews, translator = config.model_config_list.config
    for model, name in ((reviews, "reviews"), (translator, "translator")):
        assert (model.name, model.base_path, model.model_platform) == (name, f"/models/{name}", "tensorflow")
    assert reviews.model_version_policy.latest.num_versions == 2


def test_batching_and_monitoring_are_messages_of_tensorflow_serving():
    from google.protobuf import text_format

    batching = text_format.Parse((FOLDER / "batching.config").read_text(), message("BatchingParameters")())
    assert (batching.num_batch_threads.value, batching.thread_pool_name.value) == (4, "batches")
    monitoring = text_format.Parse((FOLDER / "monitoring.config").read_text(), message("MonitoringConfig")())
    assert monitoring.prometheus_config.enable and monitoring.prometheus_config.path.startswith("/monitoring/")


def test_both_start_the_server_with_the_same_flags_and_the_files_that_are_there(files):
    compose, (config, deployment, _) = files
    server, container = compose["services"]["serving"], deployment["spec"]["template"]["spec"]["containers"][0]
    assert server["command"] == container["args"] and server["image"] == container["image"]
    assert server["environment"] == {one["name"]: one["value"] for one in container["env"]}
    assert server["environment"] == {"TF_ONEDNN_ASSUME_FROZEN_WEIGHTS": "1"}
    used = {flag.rpartition("/config/")[2] for flag in server["command"] if "/config/" in flag}
    assert used == set(config["data"]) == NAMES == {path.name for path in FOLDER.glob("*.config")}
    assert all((FOLDER / name).read_text() == text for name, text in config["data"].items())
    assert server["volumes"] == ["../../saved_models:/models:ro", ".:/config:ro"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"models": "/models", "config": "/config"}


def test_the_manifest_of_kubernetes_is_valid(files):
    validate = pytest.importorskip("kubernetes_validate")
    config, deployment, service = files[1]
    for resource in (config, deployment, service):
        validate.validate(resource, validate.latest_version(), strict=True)
    template = deployment["spec"]["template"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert deployment["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    (container,) = template["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"grpc": 8500, "rest": 8501}
    assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == ports
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    assert volumes["config"]["configMap"]["name"] == config["metadata"]["name"]
