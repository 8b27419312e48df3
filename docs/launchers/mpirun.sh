#!/usr/bin/env bash
# docs/launchers/mpirun.sh N PROGRAM [ARGUMENT...]
#
# Starts PROGRAM on N ranks of this host by Open MPI, which only starts them: they do not use MPI.
# On several hosts: mpirun --host a:2,b:2 -x MASTER_ADDR=a -x MASTER_PORT=29500 PROGRAM
set -euo pipefail
ranks=$1
shift
as_root=()
[ "$(id -u)" -ne 0 ] || as_root=(--allow-run-as-root)
# A free port of this host.
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
cores=$(($(nproc) / ranks))
exec mpirun "${as_root[@]}" --oversubscribe --bind-to none -np "$ranks" \
  -x MASTER_PORT="$port" -x OMP_NUM_THREADS="$((cores > 0 ? cores : 1))" "$@"
