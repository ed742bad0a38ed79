"""Sets TF_CONFIG from what Slurm or Kubernetes says, and becomes the given command.

srun python examples/cluster/with_tf_config.py python train.py      in a Slurm job, see slurm.sh
python with_tf_config.py python train.py                            in a Job of Kubernetes, see kubernetes.yaml
"""

import argparse
import json
import os
import subprocess
import sys


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=12345, help="the port of every worker (default: 12345)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command, with its arguments")
    given = parser.parse_args()
    if not given.command:
        parser.error("a command must follow")
    try:
        hosts, index = of_slurm() if "SLURM_PROCID" in os.environ else of_kubernetes()
    except KeyError as missing:
        parser.error(f"neither Slurm nor Kubernetes started this: the environment variable {missing} is not set")
    cluster = {"worker": [f"{host}:{given.port}" for host in hosts]}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
    os.execvp(given.command[0], given.command)


def of_slurm():
    """The hosts of the job, with one task on each, and the number of this task."""
    nodes = os.environ["SLURM_STEP_NODELIST"]
    hosts = subprocess.run(["scontrol", "show", "hostnames", nodes], check=True, capture_output=True, text=True)
    hosts, tasks = hosts.stdout.split(), int(os.environ["SLURM_NTASKS"])
    if len(hosts) != tasks:
        sys.exit(
            f"start one task on each node, with --ntasks-per-node=1. Received: {tasks} tasks on {len(hosts)} nodes"
        )
    return hosts, int(os.environ["SLURM_PROCID"])


def of_kubernetes():
    """The names that the headless service gives to the pods of an indexed Job, and the number of this pod."""
    job, service, count = (os.environ[name] for name in ("JOB_NAME", "SERVICE_NAME", "NUM_WORKERS"))
    return [f"{job}-{i}.{service}" for i in range(int(count))], int(os.environ["JOB_COMPLETION_INDEX"])


if __name__ == "__main__":
    main()
