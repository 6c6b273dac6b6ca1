// State shared by threads: the next task, and whether an error or a signal occurred.

struct Flag {
  int32_t value;
  void raise() { __atomic_store_n(&value, 1, __ATOMIC_RELAXED); }
};

struct Queue {
  static constexpr int64_t NONE = (int64_t)1 << 40;  // more than there are tasks
  int64_t next;
  Flag ended;  // by a signal
  int64_t take() { return going() ? __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED) : NONE; }
  // Whether to continue. Called at least every few hundred microseconds of work, so that a signal is answered soon.
  bool going() {
    if (signals_due()) {
      const TilesKept tiles;
      if (answer_signals()) ended.raise();
    }
    return !__atomic_load_n(&ended.value, __ATOMIC_RELAXED);
  }
  // A task to do after the present one, so that it can be prepared; −1 near the end, where another thread may be free sooner.
  int64_t reserve(int64_t tasks, int threads) {
    return tasks - __atomic_load_n(&next, __ATOMIC_RELAXED) > threads ? take() : -1;
  }
};

// Resets the job's queue and runs job->STEP(worker) on all threads.
template <auto STEP, typename Job> static void on_all(Job* job, int threads) {
  job->queue.next = 0;
  parallel(threads, [](void* self, int worker) { (((Job*)self)->*STEP)(worker); }, job);
}
