#!/usr/bin/env bash
# Run the tests; arguments go to pytest.
#
#   bash scripts/test.sh                       all tests but the slow ones and those for the GPU compiler
#   bash scripts/test.sh tests/routers -k topk some of them
#   bash scripts/test.sh -m slow               the slow ones
#   bash scripts/test.sh --ecosystem           those with torch, transformers and others, in .venv-ecosystem
#   bash scripts/test.sh --slurm               those on a real Slurm, which it installs (root; Debian or Ubuntu)
#   bash scripts/test.sh --gpu-compile         those that compile for GPUs without having one, in .venv-cuda (4.8 GB)
#   bash scripts/test.sh --gpu-compile --jax=0.11.2    the same with another jax, in .venv-cuda-0.11.2
#
# MOE_JAX_VENV names another environment folder (with --ecosystem: that name with -ecosystem behind it; with --gpu-compile
# -cuda, and the version of another jax behind that). MOE_JAX_JAX=0.11.2 is as --jax=0.11.2.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh

recorded=0.10.2 # the jax whose wheels most recorded results were compiled with
venv=${MOE_JAX_VENV:-.venv}
jax=${MOE_JAX_JAX:-}
gpu_compile=no ecosystem=no slurm=no
arguments=()
for argument in "$@"; do
  case $argument in
    --gpu-compile) gpu_compile=yes ;;
    --ecosystem) ecosystem=yes ;;
    --slurm) slurm=yes ;;
    --jax=*) jax=${argument#--jax=} ;;
    *) arguments+=("$argument") ;;
  esac
done
if [ -n "$jax" ] && [ "$gpu_compile" = no ]; then
  echo "--jax=$jax (or MOE_JAX_JAX) goes with --gpu-compile; without it the tests run with the jax of $venv" >&2
  exit 2
fi
case ${jax:=$recorded} in
  0.10.* | 0.11.* | 0.12.*) ;;
  *)
    echo "--jax=$jax (or MOE_JAX_JAX) is no version of jax 0.10, 0.11 or 0.12, such as 0.11.2" >&2
    exit 2
    ;;
esac

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
  if [ "$jax" != "$recorded" ]; then
    venv=$venv-$jax
    least_minor=12 # of Python, for jax 0.11 and newer
  fi
  make_environment "$venv" "" "jax[cuda13]==$jax"
  export JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1
  export XLA_FLAGS="--xla_gpu_autotune_level=0 ${XLA_FLAGS:-}"
  exec "$venv/bin/python" -m pytest -m gpu_compile ${arguments[@]+"${arguments[@]}"}
fi
if [ "$ecosystem" = yes ]; then
  venv=$venv-ecosystem
  make_environment "$venv" "" torch transformers peft lm_eval accelerate mkdocs-material
  exec "$venv/bin/python" -m pytest -n 2 -m ecosystem ${arguments[@]+"${arguments[@]}"}
fi
make_environment "$venv" ""
if [ "$slurm" = yes ]; then
  exec "$venv/bin/python" -m pytest -m slurm tests/slurm ${arguments[@]+"${arguments[@]}"}
fi
# Two at a time: most of a test is compiling, on one core. Each begins at its end of the list, which keeps modules
# together, and takes over from the other what that has left. A later -n wins (-n 0 for a debugger).
exec "$venv/bin/python" -m pytest -n 2 --dist=worksteal ${arguments[@]+"${arguments[@]}"}
