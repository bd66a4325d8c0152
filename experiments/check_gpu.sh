#!/usr/bin/env bash
# What no card has shown yet, in one call of about five minutes on a first GPU. Flags are train.py's:
#
#     bash experiments/check_gpu.sh --data data/fineweb-edu
#
# The benchmark's table, and a short run of each mode, with its tokens/s.
set -euo pipefail
cd "$(dirname "$0")/.."
python experiments/bench.py "$@"
short() { python train.py --compile on --warmup 15 --eval_interval 50 "$@"; }
short --mode single --steps 300 --out out/check/single "$@"
short --mode multilevel --steps 100 --cycles 2 --out out/check/multilevel "$@"
short --mode nested --steps 200 --start_steps 200 --out out/check/nested "$@"
