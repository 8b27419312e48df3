#!/usr/bin/env bash
# examples/video/train_multigpu.sh N [OPTION OF video...]
#
# Trains on N GPUs of this host, one rank per GPU. Without a GPU, trains on N CPU ranks.
#   MASTER_PORT   rendezvous port, 29500 by default; if it is in use, the script finds a free port
#   VIDEO, DDPKIT paths of the programs, by default in build/bin
# For example: examples/video/train_multigpu.sh 2 --data data/mouse --save-dir runs/mouse
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
video=${VIDEO:-$root/build/bin/video}
ddpkit=${DDPKIT:-$root/build/bin/ddpkit}

die() {
  printf 'train_multigpu.sh: %s\n' "$*" >&2
  exit 2
}

case ${1:-} in
  -h | --help) sed -n '2,/^[^#]/{s/^# \{0,1\}//p;}' "$0"; exit 0 ;;
  "") die "how many GPUs? (see --help)" ;;
esac
[[ $1 =~ ^[1-9][0-9]{0,3}$ ]] || die "'$1' is not a number of GPUs (see --help)"
ranks=$1
shift
for program in "$video" "$ddpkit"; do
  [ -x "$program" ] || die "there is no program $program: run script/build first"
done

gpus=0
listed=
if command -v nvidia-smi >/dev/null 2>&1 && listed=$(nvidia-smi -L 2>/dev/null); then
  gpus=$(grep -c '^GPU' <<<"$listed" || true)  # Not the MIG devices below them.
  if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then gpus=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .); fi
fi
if [ "$gpus" -gt 0 ] && [ "$ranks" -gt "$gpus" ]; then
  die "$ranks ranks, but this host shows $gpus GPU(s): one rank a GPU"
fi

# The port is in use if a connection succeeds.
is_taken() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

wanted=${MASTER_PORT:-29500}
if ! [[ $wanted =~ ^[1-9][0-9]{0,4}$ ]] || [ "$wanted" -gt 65535 ]; then die "MASTER_PORT '$wanted' is no port"; fi
port=$wanted
while is_taken "$port"; do
  port=$((port < 65535 ? port + 1 : 1024))
  [ "$port" -ne "$wanted" ] || die "there is no free port"
done
[ "$port" -eq "$wanted" ] || printf 'Port %s is taken: using %s\n' "$wanted" "$port" >&2

line=$(printf '=%.0s' {1..42})
{
  printf '%s\nMulti-GPU Training Launcher\n%s\n' "$line" "$line"
  if [ "$gpus" -gt 0 ]; then
    printf 'Number of GPUs: %s\nAvailable GPUs:\n%s\n' "$ranks" "$listed"
  else
    printf 'Number of ranks: %s (CPU)\n' "$ranks"
  fi
  echo "Launching distributed training..."
} >&2
exec "$ddpkit" run -n "$ranks" --master-port "$port" -- "$video" train "$@"
