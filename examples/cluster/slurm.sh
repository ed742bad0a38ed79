#!/bin/bash
# Trains on several nodes of a Slurm cluster: sbatch --nodes=4 examples/cluster/slurm.sh
#
# The folder of the project, the data and --out must be on a file system that all nodes share. A job that was stopped
# goes on from its backup when it is submitted again.
#SBATCH --job-name=keras_tx
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#SBATCH --requeue
set -euo pipefail

# If one task fails, the others end, too: they could not go on without it.
srun --kill-on-bad-exit=1 --label \
    python examples/cluster/with_tf_config.py --port 12345 \
    python examples/write_text.py --strategy multi_worker --resume --out "${OUT:-saved_models}" "$@"
