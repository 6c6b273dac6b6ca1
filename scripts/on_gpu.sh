#!/usr/bin/env bash
# All that only a GPU can show, in at most nine minutes: which kernels run, the tests on the GPU, times beside PyTorch's.
#
#     bash scripts/on_gpu.sh [FOLDER]     # writes doctor.txt, tests.txt, gpu.txt and gpu.json there, by default gpu/
#     TESTS=3600 bash scripts/on_gpu.sh FOLDER all    # all tests; without "all", each value of a parameter once
#
# It runs in the Python that has PyTorch with CUDA, Triton, pytest, pytest-xdist and hypothesis; headwise need not be
# installed. What fails is printed at once, so that nothing is lost if the machine is taken away. TESTS and TIMES set, in seconds,
# how long the tests and the benchmark may take. The exit status is 1 if a test failed or a result was wrong.
set -u -o pipefail
cd "$(dirname "$0")/.."
folder=${1:-gpu} python=${PYTHON:-python3}
mkdir -p "$folder"
export PYTHONPATH="$PWD/src:$PWD/textbook/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1

"$python" -c 'import torch, triton; print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)' || exit 1
"$python" -c 'from headwise.cli import main; main()' doctor > "$folder/doctor.txt" 2>&1 || echo "doctor failed: see doctor.txt"
tail -n 4 "$folder/doctor.txt"

# The most telling files are first, and tests are not handed out in chunks, so that they begin in this order. With more
# processes most of the time is that of starting them.
marks="not slow and not thorough"
if [ "${2:-}" = all ]; then marks=""; fi
files="on_device triton_again triton_reads triton_forward triton_gradients triton_statistics triton_check triton_rectangles"
# As a keyboard would end it, so that pytest still says what failed.
timeout -s INT -k 20 "${TESTS:-240}" "$python" -m pytest $(printf 'tests/gpu/test_%s.py ' $files) -m "${MARKS-$marks}" \
  -n "${WORKERS:-6}" --maxschedchunk 1 -p no:cacheprovider -W default --tb=short --durations 30 ${ARGS:-} \
  > "$folder/tests.txt" 2>&1
tests=$?
grep -E '^(FAILED|ERROR)|passed|failed|KeyboardInterrupt' "$folder/tests.txt" | tail -n 60

"$python" -m benchmarks.gpu --seconds "${TIMES:-150}" --json "$folder/gpu.json" 2>&1 | tee "$folder/gpu.txt"
times=$?
exit $((tests > 0 || times > 0))
