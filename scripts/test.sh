#!/usr/bin/env bash
# Run the tests; arguments go to pytest.
#
#   bash scripts/test.sh                       all tests but the slow ones and those for the GPU compiler
#   bash scripts/test.sh tests/moe -k gate     some of them
#   bash scripts/test.sh -m slow               the slow ones
#   bash scripts/test.sh --gpu-compile         those that compile for GPUs without having one, in .venv-cuda (4.8 GB)
#
# MOE_JAX_VENV names another environment folder (with --gpu-compile: that name with -cuda behind it).
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh

venv=${MOE_JAX_VENV:-.venv}
gpu_compile=no
arguments=()
for argument in "$@"; do
  if [ "$argument" = --gpu-compile ]; then
    gpu_compile=yes
  else
    arguments+=("$argument")
  fi
done

# Several hosts on one machine need network namespaces. Without them the tests that use them skip, and pytest counts it.
if [ "$(uname -s)" = Linux ] && ! { command -v ip && command -v tc; } >/dev/null 2>&1; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing iproute2 (ip and tc) for the tests of several hosts" >&2
    { apt-get install -y -qq iproute2 || { apt-get update -qq && apt-get install -y -qq iproute2; }; } >/dev/null 2>&1 ||
      echo "iproute2 cannot be installed; the tests of several hosts will be skipped" >&2
  else
    echo "ip and tc (iproute2) are missing and only root can install them; the tests of several hosts will be skipped" >&2
  fi
fi

if [ "$gpu_compile" = yes ]; then
  venv=$venv-cuda
  # the wheels that the recorded results were compiled with
  make_environment "$venv" 'jax[cuda13]==0.10.2'
  export JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1
  export XLA_FLAGS="--xla_gpu_autotune_level=0 ${XLA_FLAGS:-}"
  exec "$venv/bin/python" -m pytest -m gpu_compile ${arguments[@]+"${arguments[@]}"}
fi
make_environment "$venv"
# Two at a time: most of a test is compiling, on one core. A later -n wins (-n 0 for a debugger).
exec "$venv/bin/python" -m pytest -n 2 ${arguments[@]+"${arguments[@]}"}
