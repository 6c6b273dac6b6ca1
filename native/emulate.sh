#!/usr/bin/env bash
# Runs the tests of the compiled kernels for the targets avx512, avx512bf16 and amx on a CPU with AVX2 only:
# native/emulate.h emulates AVX-512 with AVX2, and native/emulate_tiles.h tiles in C. This tests the results and memory
# accesses of these targets, but neither the AVX-512 code that a compiler generates nor its speed. Arguments are passed to
# pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
build=build/emulate
mkdir -p "$build"

flags=(-std=c++17 -O2 -fPIC -fvisibility=hidden -fno-math-errno -ffp-contract=fast -fno-exceptions -fno-rtti
  -Wall -Wextra -Wno-psabi ${CXXFLAGS:-})
compile() { ${CXX:-g++} "${flags[@]}" "$@"; }

# The dispatcher is compiled to assume that the CPU has every feature.
compile -D'__builtin_cpu_supports(feature)=1' -DHEADWISE_EMULATE_TILES=1 \
  -DHEADWISE_HAS_AVX512=1 -DHEADWISE_HAS_AVX512BF16=1 -DHEADWISE_HAS_AMX=1 \
  -c native/dispatch.cpp -o "$build/dispatch.o"
compile -DHEADWISE_TARGET_PORTABLE=1 -c native/target.cpp -o "$build/portable.o"
for target in AVX512 AVX512BF16 AMX; do
  compile -mavx2 -mfma -mf16c -DHEADWISE_EMULATE=1 -DHEADWISE_EMULATE_TILES=1 -DHEADWISE_ALWAYS_PARTS=1 \
    -DHEADWISE_TARGET_$target=1 -c native/target.cpp -o "$build/$target.o"
done
${CC:-cc} ${CXXFLAGS:-} -shared -o "$build/libheadwise.so" \
  "$build"/{dispatch,portable,AVX512,AVX512BF16,AMX}.o -lpthread -lm

HEADWISE_NATIVE_LIBRARY=$PWD/$build/libheadwise.so \
  "$python" -m pytest tests/native/test_kernel*.py -m 'not slow and not bench' -p no:cacheprovider \
  -k 'not portable' "$@"
