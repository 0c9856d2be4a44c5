#!/usr/bin/env bash
# Train the demo: a GPT-MoE over 8 CPU devices on the sources of Python's standard library, cut into 2,048 kinds of
# tokens that are learned first; ends with pictures and with a few lines that the trained model writes.
#
#   bash scripts/demo.sh                              first run: makes .venv and installs; then trains
#   bash scripts/demo.sh --gin_bindings='train.steps = 40' --workdir=runs/short
#
# Arguments go to python -m moe_jax.train and win over the ones below. MOE_JAX_VENV names another environment folder.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh

venv=${MOE_JAX_VENV:-.venv}
make_environment "$venv" "core plots tokenizers" # test.sh adds the rest to it
workdir=runs/demo before=
for word in "$@"; do
  case "$word" in --workdir=*) workdir=${word#*=} ;; esac
  case "$before" in --workdir) workdir=$word ;; esac
  before=$word
done
# glibc then takes pages of 2 MB for large arrays; making those of 4 kB is a part of every step (docs/results.md)
export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}
tokenizer=$workdir/tokenizer.json
if [ ! -e "$tokenizer" ]; then
  "$venv/bin/python" scripts/train_tokenizer.py --out="$tokenizer" --vocab_size=2048
fi
"$venv/bin/python" -m moe_jax.train --gin_file=configs/run/demo.gin --workdir=runs/demo --host_devices=8 \
  --gin_bindings="DataConfig.tokenizer = '$tokenizer'" --gin_bindings="train.optimizer = 'muon'" \
  --gin_bindings="ModelConfig.positions = 'rotary'" --gin_bindings='train.steps = 200' "$@"
# one that is told to end has saved, with exit code 75, and nothing follows
if [ -d "$workdir/checkpoints" ]; then
  echo "the model goes on from 'def __init__(self' and 'import os':"
  "$venv/bin/python" -m moe_jax.generate --workdir="$workdir" --host_devices=8 --max_new_tokens=80 \
    --prompt='def __init__(self' --prompt='import os' --temperature=0.7 --top_p=0.95
fi
