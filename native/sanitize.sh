#!/usr/bin/env bash
# `make sanitize`: runs the tests of the compiled kernels on a build with AddressSanitizer and UndefinedBehaviorSanitizer,
# which terminate the process at the first error. Arguments are passed to pytest. HEADWISE_TEST_TARGETS=avx512bf16,portable
# compiles and runs these targets.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}

"$python" native/compile.py --sanitize
library=$PWD/build/sanitize/libheadwise.so

# Python is not linked with the sanitizer, so its runtime is preloaded, together with libstdc++, in which it intercepts
# the exceptions that PyTorch throws.
runtime=$(ldd "$library" | awk '$1 ~ /asan/ && $3 ~ /^\// { print $3 }')
standard=$(ldd "$library" | awk '$1 ~ /libstdc\+\+/ && $3 ~ /^\// { print $3 }')
if [ -z "$runtime" ]; then
  echo "the runtime of AddressSanitizer was not found; ldd $library shows what is missing" >&2
  exit 1
fi
# PyTorch and Python keep memory until they exit, so leak detection is off.
export HEADWISE_TEST_TARGETS
HEADWISE_TEST_TARGETS=$("$python" -c "import sys; sys.path[:0] = ['native']; import compile; print(*compile.sanitized_targets(), sep=',')")
# Chances and rounding over many numbers, which read and write as the same calls with few do.
numbers=(
  test_kernel_gradients.py::test_dropout_is_fair_and_independent test_kernel_statistics.py::test_many_equal_weights
  test_kernel_statistics.py::test_column_mass_of_many_equal_rows test_kernel_matrix.py::test_squares_of_many_equal_weights
)
LD_PRELOAD="$runtime${standard:+:$standard}" HEADWISE_NATIVE_LIBRARY=$library \
  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
  OMP_NUM_THREADS=1 "$python" -m pytest tests/native/test_kernel*.py tests/core/test_map_compiled.py "${numbers[@]/#/--deselect=tests/native/}" \
  -m 'not slow and not bench' -n auto --maxprocesses 4 --dist worksteal -p no:cacheprovider "$@"
