#!/bin/bash
# A run on four nodes of a Slurm cluster: two train, two are rollout servers. sbatch examples/slurm.sh
# The nodes share the folder in which it is started, where `make train` has made .venv.
#SBATCH --job-name=exgrpo
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --requeue
set -euo pipefail

model=Qwen/Qwen2.5-Math-7B
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
trainers=("${nodes[@]:0:2}")
servers=("${nodes[@]:2}")
# shellcheck source=/dev/null
source .venv/bin/activate
EXGRPO_SERVER_TOKEN=$(python -c 'import secrets; print(secrets.token_hex())')
export EXGRPO_SERVER_TOKEN
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun would bind each program to one processor

urls=() processes=()
for node in "${servers[@]}"; do
    srun --nodes=1 --ntasks=1 --nodelist="$node" python -m exgrpo.tools.serve "$model" --dtype bf16 --max-tokens 3072 \
        --host 0.0.0.0 --port 8000 --tensor-parallel-size 4 &
    processes+=("$!") urls+=("http://$node:8000")
done
for i in "${!urls[@]}"; do
    url=${urls[i]}
    until curl --silent --fail --output /dev/null --header "Authorization: Bearer $EXGRPO_SERVER_TOKEN" "$url/health"; do
        kill -0 "${processes[i]}" || { echo "the server at $url has ended: see above" >&2 && exit 1; }
        sleep 5
    done
done

hosts=hosts.$SLURM_JOB_ID
printf '%s slots=4\n' "${trainers[@]}" >"$hosts"
# A launcher on each node; they need no ssh. After a requeue, the run goes on with its newest checkpoint.
# shellcheck disable=SC2016  # the rank is that of the node on which it is read
srun --nodes=2 --ntasks=2 --nodelist="$(IFS=,; echo "${trainers[*]}")" bash -c '
    exec deepspeed --hostfile "$0" --no_ssh --node_rank "$SLURM_PROCID" --master_addr "$1" exgrpo/train/main.py "${@:2}"
' "$hosts" "${trainers[0]}" \
    --resume auto --output.name "slurm_$SLURM_JOB_ID" \
    --policy.path "$model" --data.train questions.parquet --rollout.engine server --rollout.servers "${urls[@]}"
