#!/usr/bin/env bash
# Runs all measurements of docs/performance.md, writes them to benchmarks/results/NAME (cpu-...), and makes the tables of
# that page and of the lab book from these and all others. Takes about an hour on two cores. The rows of mpi4jax and
# torch.distributed need pip install --editable '.[peers]'.
#
#   benchmarks/run_all.sh NAME [RUNS]
set -euo pipefail
case ${1:-} in "" | -*) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" && exit $(($# == 0)) ;; esac
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
out=benchmarks/results/$1
runs=${2:-3}
sizes=4,4K,64K,256K,1M,4M,16M
mkdir -p "$out"
for run in $(seq "$runs"); do
  for p in 2 4 8 16; do
    # With more processes than twice the cores, the benchmark would measure the scheduler.
    peers=$([ "$p" -le 4 ] && echo ",mpi4jax,torch/Gloo" || true)
    "$python" benchmarks/allreduce.py --devices "$p" --sizes "$sizes" -n 12 --impl "ring_psum,lax.psum$peers" \
      --json "$out/allreduce-p$p-$run.json"
  done
  "$python" benchmarks/allreduce.py --devices 8 -b 64K -e 16M -f 16 -n 12 -d bfloat16,float16,float8_e4m3fn,int32 \
    --impl ring_psum,lax.psum --json "$out/allreduce-dtypes-$run.json"
  "$python" benchmarks/processes.py --layout 2x1,4x1 -b 4 -e 64M -f 64 -n 6 --json "$out/processes-$run.json"
  "$python" benchmarks/processes.py --layout 2x4 --hosts 2 -b 64K -e 16M -f 16 -n 6 --impl ring_psum,lax.psum \
    --json "$out/two_level-$run.json"
  for p in 2 4 8 16; do
    "$python" benchmarks/loops.py --devices "$p" --sizes 4K,64K,256K,1M,4M,16M --json "$out/loops-p$p-$run.json"
  done
  # Narrower instruction sets, and ranks that share one core.
  for p in 2 8; do
    for isa in avx2 baseline; do
      JAX_RING_ISA=$isa "$python" benchmarks/allreduce.py --devices "$p" --sizes "$sizes" -n 12 --impl ring_psum,lax.psum \
        --json "$out/allreduce-$isa-p$p-$run.json"
    done
    taskset -c 0 "$python" benchmarks/allreduce.py --devices "$p" --sizes 4,4K,64K,256K,1M,4M -n 12 \
      --impl ring_psum,lax.psum --json "$out/allreduce-one-core-p$p-$run.json"
  done
  for p in 4 8; do
    "$python" benchmarks/train_step.py --devices "$p" --json "$out/train_step-p$p-$run.json"
  done
done
"$python" benchmarks/allreduce.py --devices 8 -f 4 -n 12 --impl "ring_psum,ring_psum(ring),lax.psum,ppermute" \
  --plot "$out/allreduce.png"
"$python" benchmarks/scaling.py "$out"
"$python" benchmarks/tables.py
