#!/usr/bin/env bash
# What no card has shown yet, in one call of about five minutes on a first GPU. Flags are train.py's:
#
#     bash experiments/check_gpu.sh --data data/fineweb-edu
#
# The benchmark's table; a short run of each mode, with its tokens/s; the multilevel one once more with CUDA graphs, and then the held-out
# losses of both, which should agree to rounding.
set -euo pipefail
cd "$(dirname "$0")/.."
python experiments/bench.py "$@"
short() { python train.py --compile on --warmup 15 --eval_interval 50 "$@"; }
short --mode single --steps 300 --out out/check/single "$@"
short --mode multilevel --steps 100 --cycles 2 --out out/check/multilevel "$@"
short --mode multilevel --steps 100 --cycles 2 --out out/check/graph --compile graph "$@"
paste -d, out/check/multilevel/log.csv out/check/graph/log.csv | awk -F, '$8 { print $1, $2, $8, $17 }'
