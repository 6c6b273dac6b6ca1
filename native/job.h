// Runs a job whose tasks are independent and only need buffers of their thread, compiled for each dtype.

// Runs all tasks of a job that has `lay_out`, `scratch`, `queue`, `refused` and `work`, such as Pool and Diagonals.
template <typename Job> static int do_all(Job& job, int64_t tasks) {
  const int threads = (int)least(job.call.threads, most(1, tasks));
  typename Job::Memory unused;
  job.scratch_bytes = padded(job.lay_out(nullptr, &unused), 4096);
  job.scratch = borrow((size_t)(threads * job.scratch_bytes));
  if (!job.scratch) return HEADWISE_NO_MEMORY;
  on_all<&Job::work>(&job, threads);
  give_back(job.scratch);
  return job.refused.value ? REFUSED : HEADWISE_DONE;
}

template <template <typename> class Job, typename Call> static int by_dtype(const Call& call) {
  if (call.dtype == HEADWISE_BFLOAT16) return Job<Brain>(call).go();
#if HEADWISE_DOT && !HEADWISE_TILES
  return HEADWISE_DONE;  // unreachable: see target.cpp
#else
  if (call.dtype == HEADWISE_FLOAT16) return Job<Half>(call).go();
  return Job<float>(call).go();
#endif
}

// The same for a read of a map.
template <template <typename> class Job, typename Call> static int read_map(const Call& call) {
  if (HEADWISE_TILES && call.dtype != HEADWISE_BFLOAT16 && (call.single || !parts_pay(call))) return REFUSED;
  return by_dtype<Job>(call);
}
