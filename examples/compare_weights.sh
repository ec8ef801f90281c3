#!/usr/bin/env bash
# How much should the kv router care about cache hits? Three runs, side by side.
set -euo pipefail
out=${1:-results/weights}
for weight in 0 1 4; do
    dynabench simulate --router-mode kv --kv-overlap-score-weight "$weight" --out "$out/weight-$weight"
done
dynabench compare "$out/weight-0" "$out/weight-1" "$out/weight-4" --out "$out/compared"
