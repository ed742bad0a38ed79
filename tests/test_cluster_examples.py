"""examples/cluster: what starts the workers of a cluster. The scripts need neither TensorFlow nor Keras."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "cluster"
REPORT = "import os, sys; print(os.environ['TF_CONFIG'], sys.argv[1:])\n"
pytestmark = pytest.mark.process


def run(*command, **environment):
    found = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=60,
        env={name: value for name, value in os.environ.items() if name != "TF_CONFIG"} | environment,
    )
    return found.returncode, found.stdout, found.stderr


def script(tmp_path, content):
    path = tmp_path / "script.py"
    path.write_text(content)
    return path


def test_each_local_worker_has_its_own_index(tmp_path):
    status, out, _ = run(FOLDER / "local.py", "--workers", 3, script(tmp_path, REPORT), "--steps", "7")
    assert status == 0
    lines = sorted(out.splitlines())
    assert [line[:4] for line in lines] == ["[0] ", "[1] ", "[2] "]
    configs = [json.loads(line[4:].rpartition(" [")[0]) for line in lines]
    assert [config["task"] for config in configs] == [{"type": "worker", "index": i} for i in range(3)]
    assert all(config["cluster"] == configs[0]["cluster"] for config in configs)
    assert len(set(configs[0]["cluster"]["worker"])) == 3
    assert all(line.endswith("['--steps', '7']") for line in lines)


def test_local_workers_share_the_gpus(tmp_path):
    shown = script(tmp_path, "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
    _, out, _ = run(FOLDER / "local.py", shown, CUDA_VISIBLE_DEVICES="0,1,2,3")
    assert sorted(out.splitlines()) == ["[0] 0,2", "[1] 1,3"]


def test_a_failed_worker_ends_the_others(tmp_path):
    content = (
        "import json, os, sys, time\n"
        "index = json.loads(os.environ['TF_CONFIG'])['task']['index']\n"
        "sys.exit(7) if index else time.sleep(2)\n"
    )
    status, out, _ = run(FOLDER / "local.py", script(tmp_path, content))
    assert status == 7 and "worker 1 failed with the exit status 7" in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_an_interrupt_and_a_closed_terminal_end_all_workers(number, tmp_path):
    content = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n"
    local = str(FOLDER / "local.py")
    # The tests may run below nohup, and a process inherits which signals are ignored.
    begin = f"import runpy, signal; signal.signal({int(number)}, signal.SIG_DFL); "
    begin += f"runpy.run_path({local!r}, run_name='__main__')"
    command = [sys.executable, "-c", begin, script(tmp_path, content)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        numbers = [int(process.stdout.readline().split()[1]) for _ in range(2)]
        process.send_signal(number)
        assert process.wait(30) == 130
    until = time.monotonic() + 10
    while any(Path(f"/proc/{number}").exists() for number in numbers) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{number}").exists() for number in numbers)


def test_workers_go_on_after_nohup(tmp_path):
    content = "import time\nprint(flush=True)\ntime.sleep(1)\n"
    command = ["nohup", sys.executable, FOLDER / "local.py", "--workers", "1", script(tmp_path, content)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGHUP)
        assert process.wait(30) == 0


def test_workers_end_if_their_lines_cannot_be_printed(tmp_path):
    content = "import time\nfor _ in range(2**17): print(7)\ntime.sleep(60)\n"  # more than a pipe holds
    command = [sys.executable, FOLDER / "local.py", script(tmp_path, content)]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=30)
    assert ended.returncode == 1
    assert ended.stderr == (
        "local.py cannot print what the workers print, and ends them: [Errno 28] No space left on device\n"
    )


def test_characters_that_a_terminal_lacks_are_printed_as_escapes(tmp_path):
    content = "import sys; sys.stdout.buffer.write('ü\\n'.encode())"
    environment = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "1"}
    status, out, _ = run(FOLDER / "local.py", "--workers", 1, script(tmp_path, content), **environment)
    assert (status, out) == (0, "[0] \\xfc\n")


def test_local_refuses_what_cannot_run(tmp_path):
    assert "--workers must be at least 1. Received: 0" in run(FOLDER / "local.py", "--workers", 0, "x.py")[2]
    status, _, told = run(FOLDER / "local.py", tmp_path / "none.py")
    assert status == 2 and f"there is no file {tmp_path / 'none.py'}" in told


def test_tf_config_of_kubernetes(tmp_path):
    pod = {"JOB_NAME": "job", "SERVICE_NAME": "service", "NUM_WORKERS": "2", "JOB_COMPLETION_INDEX": "1"}
    command = [sys.executable, str(script(tmp_path, REPORT))]
    status, out, _ = run(FOLDER / "with_tf_config.py", "--port", 7, *command, "a", **pod)
    assert status == 0 and json.loads(out.rpartition(" [")[0]) == {
        "cluster": {"worker": ["job-0.service:7", "job-1.service:7"]},
        "task": {"type": "worker", "index": 1},
    }
    _, _, told = run(FOLDER / "with_tf_config.py", *command, **dict(list(pod.items())[:-1]))
    assert "neither Slurm nor Kubernetes started this: the environment variable 'JOB_COMPLETION_INDEX' is not" in told
    assert "a command must follow" in run(FOLDER / "with_tf_config.py", **pod)[2]


def test_tf_config_of_slurm(tmp_path):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames node[3-4]" ] && printf "node3\\nnode4\\n"\n')
    scontrol.chmod(0o755)
    slurm = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "node[3-4]"}
    slurm["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    command = [FOLDER / "with_tf_config.py", sys.executable, script(tmp_path, REPORT)]
    status, out, _ = run(*command, **slurm)
    assert status == 0 and json.loads(out.rpartition(" [")[0]) == {
        "cluster": {"worker": ["node3:12345", "node4:12345"]},
        "task": {"type": "worker", "index": 1},
    }
    told = run(*command, **slurm | {"SLURM_NTASKS": "4"})[2]
    assert "--ntasks-per-node=1. Received: 4 tasks on 2 nodes" in told


def test_the_script_of_slurm_is_valid():
    path = FOLDER / "slurm.sh"
    assert subprocess.run(["bash", "-n", path]).returncode == 0
    assert os.access(path, os.X_OK)


def test_the_manifest_of_kubernetes_is_valid():
    yaml, validate = pytest.importorskip("yaml"), pytest.importorskip("kubernetes_validate")
    service, job = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    for resource in (service, job):
        validate.validate(resource, validate.latest_version(), strict=True)
    spec = job["spec"]["template"]["spec"]
    environment = {one["name"]: one["value"] for one in spec["containers"][0]["env"]}
    assert environment == {
        "JOB_NAME": job["metadata"]["name"],
        "SERVICE_NAME": service["metadata"]["name"],
        "NUM_WORKERS": str(job["spec"]["completions"]),
    }
    assert spec["subdomain"] == service["metadata"]["name"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
