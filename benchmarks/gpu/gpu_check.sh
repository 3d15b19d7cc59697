#!/usr/bin/env bash
# The GPU check: builds the CUDA engine, runs its tests and measurements, and writes one JSON and one readable report.
#
#   benchmarks/gpu/gpu_check.sh [--dry] [--out FOLDER] [PART ...]
#
# Needs Python with JAX, nanobind, scikit-build-core, pytest and CMake, and nvcc, but no network. Completed parts are
# skipped, so that the same command resumes an interrupted run; parts that are named run again. --dry runs everything
# without a GPU, on threads of the host. On a GPU no part begins, and none runs on, after 9.5 minutes from the start,
# the build included; GPU_CHECK_SECONDS sets another time. JAX_RING_CUDA_DTYPES=all builds the kernels of all types.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
dry= out= parts=()
while [ $# -gt 0 ]; do
  case $1 in
    --dry) dry=--dry ;;
    --out) out=$2; shift ;;
    -*) echo "unknown option $1" >&2; exit 2 ;;
    *) parts+=("$1") ;;
  esac
  shift
done
out=${out:-build/gpu_check${dry:+_dry}}
site=$PWD/build/gpu_check_site

# The kernels of the other types differ from these only in their elements, and take minutes to compile.
dtypes=${JAX_RING_CUDA_DTYPES:-f32,bf16,u32,u8}
built="$dtypes ${JAX_RING_TOGETHER_DTYPES:-}"
changed() { find ffi jax_ring pyproject.toml -newer "$site/.built" -type f -not -path '*/__pycache__/*' -print -quit; }
if [ "$(cat "$site/.built" 2>/dev/null)" != "$built" ] || [ -n "$(changed)" ]; then
  echo "== build ($("$python" --version))"
  rm -rf "$site"
  # For one compute capability, which takes a third of the build time: that of this GPU, or a common one.
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1 | tr -d .) || true
  export JAX_RING_CUDA=ON JAX_RING_CUDA_DTYPES=${dtypes/#all/}
  "$python" -m pip install --quiet --no-index --no-deps --no-build-isolation --target "$site" . \
    -C cmake.define.JAX_RING_GPU_CHECK=ON -C cmake.define.CMAKE_CUDA_ARCHITECTURES="${capability:-90}"
  # Where jax_ring is installed in editable mode, its import hook would find the source tree before this build.
  echo 'import sys; sys.meta_path[:] = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]' \
    >"$site/sitecustomize.py"
  echo "$built" >"$site/.built"
  rm -f "$out/results.json"  # measured with another build
fi

# PYTHONSAFEPATH keeps the source tree off the path: its jax_ring/ has no native modules.
limit=()
[ -n "$dry" ] || limit=(--seconds $((${GPU_CHECK_SECONDS:-570} - SECONDS)))
PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 \
  "$python" benchmarks/gpu/gpu_check.py $dry "${limit[@]}" --out "$out" "${parts[@]}"
