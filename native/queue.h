// State shared by threads: the next task, and whether an error occurred.

struct Flag {
  int32_t value;
  void raise() { __atomic_store_n(&value, 1, __ATOMIC_RELAXED); }
};

struct Queue {
  int64_t next;
  int64_t take() { return __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED); }
};

// Resets the job's queue and runs job->STEP(worker) on all threads.
template <auto STEP, typename Job> static void on_all(Job* job, int threads) {
  job->queue.next = 0;
  parallel(threads, [](void* self, int worker) { (((Job*)self)->*STEP)(worker); }, job);
}
