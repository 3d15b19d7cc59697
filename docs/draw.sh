#!/usr/bin/env bash
# Draws the pictures of the documentation anew, in docs/images. Needs jax_ring[benchmarks] installed.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
mkdir -p docs/images
model() { "$python" benchmarks/model "$@"; }

model ring --ranks 4 --draw docs/images/ring.svg
model ring --ranks 4 --animate docs/images/ring.gif
model rank_ordered_ring --ranks 4 --draw docs/images/rank_ordered_ring.svg
model one_shot --ranks 4 --draw docs/images/one_shot.svg
model two_shot --ranks 4 --draw docs/images/two_shot.svg
model double_tree --ranks 8 --draw docs/images/double_tree.svg
model halving_doubling --ranks 8 --draw docs/images/halving_doubling.svg
model two_level --ranks 8 --ranks-per-host 4 --draw docs/images/two_level.svg
for topology in nvswitch8 nvl72 pcie8 rails fat_tree_4to1; do
  model crossover --topology "$topology" --draw "docs/images/crossover_$topology.svg"
done
model scaling --draw docs/images/scaling.svg
model claims --draw docs/images/claims.svg
model fit benchmarks/results/cpu-2-cores/allreduce-p*.json --draw docs/images/fit.svg
# Of docs/gpu.md. Needs JAX's CUDA plugin and a CUDA toolkit, and no GPU.
"$python" -P benchmarks/gpu/overlap.py --draw docs/images/overlap.svg
# Of the README and docs/performance.md.
"$python" benchmarks/draw_speedup.py docs/images/speed.svg \
  benchmarks/results/cpu-2-cores-zen4 benchmarks/results/cpu-2-cores-zen4-jax-0.12 benchmarks/results/cpu-2-cores-zen5
