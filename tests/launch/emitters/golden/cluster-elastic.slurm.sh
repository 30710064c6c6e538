#!/bin/bash
#SBATCH --job-name=holdfast-0123456789abcdef-3
#SBATCH --nodes=2-4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --mem=262144M
#SBATCH --gres=gpu:4
#SBATCH --switches=1@0
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
#SBATCH --signal=B:TERM@55
# cluster.queue is for Kubernetes. Here: sbatch --partition.
# cluster.priority_class is for Kubernetes. Here: sbatch --qos.

set -euo pipefail
export PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=8
# What a job step that sbatch was called from left: srun would take it as options.
for inherited in "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_BIND@}" "${!SLURM_STEP@}" "${!PMI@}"; do
  unset "$inherited"
done

restart="${SLURM_RESTART_COUNT:-0}"
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export PET_NNODES="${#hosts[@]}"
export PET_MASTER_ADDR="${hosts[0]}"
export PET_RDZV_ID=0123456789abcdef-3-"$restart"
# A port that nobody can compute, and the key by which the nodes know each other: it stands in no file and no command.
read -r PET_MASTER_PORT HOLDFAST_LAUNCH_KEY < <(python -c 'from holdfast.launch.ports import free_port; from holdfast.runtime.sealing import new_key; print(free_port(), new_key())')
export PET_MASTER_PORT HOLDFAST_LAUNCH_KEY

# How each node ended, beside the log, where every node can write: srun itself tells only the highest code.
export endings="$PWD/holdfast-0123456789abcdef-3-$SLURM_JOB_ID-$restart.endings"
mkdir -p "$endings"
for node in "${!hosts[@]}"; do : >"$endings/$node"; done

# shellcheck disable=SC2016 # SLURM_NODEID is known on the node only
srun --wait=40 bash -c \
  'PET_NODE_RANK="$SLURM_NODEID" HOLDFAST_ENDING_FILE="$endings/$SLURM_NODEID" exec "$@"' node \
  python -m holdfast.launch.torchrun --max-restarts=0 --monitor-interval=0.1 --shutdown-timeout=25 --nproc-per-node=4 --rdzv-conf=timeout=600 -m holdfast.components.train.worker --run-id 0123456789abcdef --launch 3 --store s3://my-bucket/holdfast &
gang=$!
told=false
trap 'told=true; kill -TERM "$gang" 2>/dev/null || true' TERM

while :; do
  code=0
  wait "$gang" || code=$?
  if ! $told; then break; fi
  told=false # the signal ended the wait, not the gang
done

# srun tells the highest code. The one that explains the others is decided where every launcher decides it.
if cause="$(python -c 'import sys; from holdfast.launch.ending import cause_in; print(cause_in(sys.argv[1], int(sys.argv[2])))' "$endings" "$code")"; then code="$cause"; fi
rm -rf "$endings"

if ((code == 0)); then exit 0; fi
echo "holdfast: holdfast-0123456789abcdef-3 ended with exit code $code after $restart restarts" >&2
state="$(squeue --noheader --job="$SLURM_JOB_ID" --format=%T || true)"
if ((code >= 128 && restart < 10)) && [[ "$state" == RUNNING ]]; then # not cancelled, nor preempted and requeued
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
