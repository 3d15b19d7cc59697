#!/usr/bin/env bash
# Draws the pictures of the documentation anew, in docs/images. Needs jax_ring[pictures] installed.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
mkdir -p docs/images
ring() { "$python" -P -m jax_ring.schedule "$@"; }

ring ring --ranks 4 --draw docs/images/ring.svg
ring ring --ranks 4 --animate docs/images/ring.gif
ring rank_ordered_ring --ranks 4 --draw docs/images/rank_ordered_ring.svg
ring one_shot --ranks 4 --draw docs/images/one_shot.svg
ring two_shot --ranks 4 --draw docs/images/two_shot.svg
ring double_tree --ranks 8 --draw docs/images/double_tree.svg
ring halving_doubling --ranks 8 --draw docs/images/halving_doubling.svg
ring two_level --ranks 8 --ranks-per-host 4 --draw docs/images/two_level.svg
for topology in nvswitch8 nvl72 pcie8 rails fat_tree_4to1; do
  ring crossover --topology "$topology" --draw "docs/images/crossover_$topology.svg"
done
ring scaling --draw docs/images/scaling.svg
ring claims --draw docs/images/claims.svg
ring fit benchmarks/results/cpu-2-cores/allreduce-p*.json --draw docs/images/fit.svg
# Of docs/gpu.md. Needs JAX's CUDA plugin and a CUDA toolkit, and no GPU.
"$python" -P benchmarks/overlap.py --draw docs/images/overlap.svg
