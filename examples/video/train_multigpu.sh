#!/usr/bin/env bash
# examples/video/train_multigpu.sh N [OPTION OF video...]
#
# Trains on N GPUs of this host, one rank per GPU. Without a GPU, trains on N CPU ranks.
#   MASTER_PORT   rendezvous port, 29500 by default; if it is in use, the script finds a free port
#   VIDEO         path of the program, by default build/bin/video
# For example: examples/video/train_multigpu.sh 2 --data data/mouse --save-dir runs/mouse
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
video=${VIDEO:-$root/build/bin/video}

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
[ -x "$video" ] || die "there is no program $video: run script/build first"

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

exec "$video" train --nproc-per-node "$ranks" --master-port "$port" "$@"
