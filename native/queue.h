// What threads share: the next task, and whether something went wrong.

struct Flag {
  int32_t value;
  void raise() { __atomic_store_n(&value, 1, __ATOMIC_RELAXED); }
};

struct Queue {
  int64_t next;
  int64_t take() { return __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED); }
};

// Runs job->STEP(worker) on all threads at once, its queue begun anew.
template <auto STEP, typename Job> static void on_all(Job* job, int threads) {
  job->queue.next = 0;
  parallel(threads, [](void* self, int worker) { (((Job*)self)->*STEP)(worker); }, job);
}
