"""TF_CONFIG is checked, and workers wait for each other, but not for ever."""

import json
import logging
import re
import socket
import threading
import time

import pytest

from keras_tx.distribution import cluster

TWO = {"worker": ["a:1", "b:2"]}


def config(cluster=TWO, **task):
    return json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0, **task}})


def test_the_cluster_of_the_environment(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", config({"chief": ["a:1"], "worker": ["[::1]:2"], "evaluator": ["c:3"]}))
    found = cluster.from_environment()
    assert [str(task) for task in found.tasks] == ["chief 0 (a:1)", "worker 0 ([::1]:2)"]
    assert str(found.own) == "worker 0 ([::1]:2)" and found.own.host_and_port == ("::1", 2)
    assert [task.type for task in found.others] == ["chief"]
    monkeypatch.setenv("TF_CONFIG", config({**TWO, "evaluator": ["c:3"]}, type="evaluator", index="0"))
    assert cluster.from_environment().others == []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "The environment variable TF_CONFIG must be JSON such as"),
        ("{cluster", "must be JSON such as .* Received: TF_CONFIG='{cluster'"),
        ("[1]", "must be JSON such as .* Received: TF_CONFIG='[1]'"),
        ('{"task": {"type": "worker", "index": 0}}', "TF_CONFIG must have the key 'cluster'"),
        (
            json.dumps({"cluster": TWO}),
            "TF_CONFIG must have the key 'task' with 'type' and 'index'. Received: task=None",
        ),
        (json.dumps({"cluster": TWO, "task": {"type": "worker"}}), "must have the key 'task' with 'type' and 'index'"),
        (config({}), "must have a 'cluster' of lists of addresses. Received: cluster={}"),
        (config({"worker": "a:1"}), "must have a 'cluster' of lists of addresses"),
        (config({**TWO, "ps": ["c:1"]}), "must not name 'ps': parameter servers (`ParameterServerStrategy`)"),
        (config({**TWO, "master": ["c:1"]}), "must consist of 'worker', and perhaps one 'chief' and 'evaluator'"),
        (config({**TWO, "chief": ["c:1", "d:1"]}), "must consist of 'worker', and perhaps one 'chief'"),
        (config({"worker": ["a:1", "b"]}), "The addresses in TF_CONFIG must be 'host:port'. Received: 'b'"),
        (config({"worker": ["a:1", "b:99999"]}), "must be 'host:port'. Received: 'b:99999'"),
        (config({"worker": ["a:1", 3]}), "must be 'host:port'. Received: 3"),
        (config({"worker": ["a:1", "a:1"]}), "The addresses in TF_CONFIG must differ"),
        (config(type="chief"), "The task type in TF_CONFIG must be one of ['worker']. Received: type='chief'"),
        (config(index=2), "The task index in TF_CONFIG must be in [0, 2), for the 2 addresses of 'worker'"),
        (config(index=-1), "The task index in TF_CONFIG must be in [0, 2)"),
        (config(index=True), "The task index in TF_CONFIG must be in [0, 2)"),
        (config(index=None), "The task index in TF_CONFIG must be in [0, 2)"),
    ],
)
def test_what_is_wrong_with_the_environment_is_named(text, sentence, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ValueError, match=re.escape(sentence).replace(re.escape(".*"), ".*")):
        cluster.from_environment()


def at(*ports, own=0):
    return cluster.checked({"worker": [f"localhost:{port}" for port in ports]}, "worker", own, "TF_CONFIG")


def free_ports(number):
    servers = [socket.create_server(("", 0)) for _ in range(number)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


def test_a_worker_that_never_comes_is_named(caplog):
    first, second = free_ports(2)
    expected = f"worker 1 (localhost:{second}) could not be reached within 0.2 seconds. Start every worker"
    with pytest.raises(TimeoutError, match=re.escape(expected)), caplog.at_level(logging.WARNING):
        cluster.wait(at(first, second), timeout=0.2)
    assert f"worker 0 (localhost:{first}) waits for worker 1 (localhost:{second})." in caplog.messages


def test_many_missing_workers_are_counted():
    ports = free_ports(9)
    with pytest.raises(TimeoutError, match=re.escape(f"worker 5 (localhost:{ports[5]}) and 3 more could not")):
        cluster.wait(at(*ports), timeout=0.1)


def test_workers_find_each_other_whoever_comes_first():
    ports, found = free_ports(3), []

    def come(own):
        time.sleep(0.1 * own)
        cluster.wait(at(*ports, own=own), timeout=20)
        found.append(own)
        with socket.create_server(("", ports[own])):  # as TensorFlow does then
            done.wait(20)

    done = threading.Event()
    threads = [threading.Thread(target=come, args=(own,)) for own in (2, 0, 1)]
    for thread in threads:
        thread.start()
    limit = time.monotonic() + 20
    while len(found) < 3 and time.monotonic() < limit:
        time.sleep(0.05)
    done.set()
    for thread in threads:
        thread.join()
    assert sorted(found) == [0, 1, 2]


def test_a_port_in_use_is_named():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        expected = f"The port {port} of worker 0 (localhost:{port}) cannot be opened"
        with pytest.raises(RuntimeError, match=re.escape(expected)):
            cluster.wait(at(port, *free_ports(1)), timeout=1)
