// Distributes a call over threads.
//
// Keys and values are packed once for each KV head. With many small heads a thread packs a head and processes all its queries
// (LOCAL: no waiting, the copy stays in its cache, and what the next head needs is fetched meanwhile); else all threads pack,
// then take blocks of queries from one queue, in waves of heads so that the copies stay bounded.

constexpr int64_t WAVE_BYTES = 64 << 20;
constexpr int64_t A_THREADS_WORK = 1 << 18;  // multiply-adds: fewer take less time than starting a thread

template <Operand OF, bool SPREAD, bool REACH> struct Run {
  typedef Forward<OF, SPREAD, REACH> Blocks;
  Blocks forward;
  int64_t groups, heads_a_group, head_bytes, scratch_bytes;
  char *packed, *scratch;
  float* partial;      // [b, h, chunks, m] columns of the chunks
  int64_t wave, wave_end;
  int threads;
  int64_t lines_ahead;  // fetched at once (ahead.h)
  bool local, all_finite_needed;
  Queue queue;
  Flag broken;         // a key or value is not finite
  Flag refused;        // see Forward

  Run(const headwise_forward_call& call, const Dtype<OF>& dtype, const Wanted& wanted)
      : forward{call, dtype, wanted, shape_of<OF>(call, wanted), scaling_of<OF>(call.rule), refused, queue}, queue{}, broken{0},
        refused{0} {}

  Scratch& memory(int worker) {
    Scratch* t;
    lay_out<OF>(forward.wanted, forward.shape, scratch + worker * scratch_bytes, &t);
    return *t;
  }

  // Whether to continue after packing.
  bool finite(const Finite<OF>& check) {
    if (!check.all()) (OF == PARTS ? refused : broken).raise();
    return !stopped();
  }
  bool stopped() const { return refused.value || queue.ended.value || (all_finite_needed && broken.value); }

  // One chunk of one head's query blocks: chunk, chunk + chunks, … last first, since they have the most keys.
  void chunk(int64_t batch, int64_t head, int64_t index, const char* packed_head, Scratch& t) {
    const Shape& s = forward.shape;
    const headwise_forward_call& call = forward.call;
    const float *keys = (const float*)packed_head, *values = (const float*)(packed_head + s.key_bytes);
    if (s.strip) __builtin_memset(t.columns, 0, (size_t)(s.key_blocks * KEYS_A_BLOCK<OF>) * 4);
    const int64_t last = (s.query_blocks - 1 - index) / s.chunks * s.chunks + index;
    for (int64_t block = last; block >= 0 && queue.going(); block -= s.chunks) forward.block(batch, head, block, keys, values, t);
    if (s.strip)
      __builtin_memcpy(partial + ((batch * call.h + head) * s.chunks + index) * call.m, t.columns, (size_t)call.m * 4);
  }

  void pack_wave(int) {
    const int64_t panels = forward.shape.height / PANEL, share = 16;
    for (int64_t task; (task = queue.take()) < (wave_end - wave) * blocks(panels, share);) {
      const int64_t group = task / blocks(panels, share), first = task % blocks(panels, share) * share;
      char* to = packed + group * head_bytes;
      Finite<OF> check;
      for (int64_t p = first; p < least(first + share, panels); p++)
        forward.pack(wave + group, p, to, to + forward.shape.key_bytes, check);
      if (!finite(check)) return;
    }
  }

  void attend_wave(int worker) {
    const Tiles<TILED<OF>> tiles;
    Scratch& t = memory(worker);
    const int64_t chunks = forward.shape.chunks;
    const headwise_forward_call& call = forward.call;
    for (int64_t task; (task = queue.take()) < (wave_end - wave) * heads_a_group * chunks;) {
      const int64_t index = chunks - 1 - task % chunks, head = task / chunks, group = wave + head / heads_a_group;
      chunk(group / call.h_kv, group % call.h_kv * heads_a_group + head % heads_a_group, index,
            packed + (group - wave) * head_bytes, t);
    }
  }

  void attend_local(int worker) {
    const Tiles<TILED<OF>> tiles;
    Scratch& t = memory(worker);
    char* to = packed + worker * head_bytes;
    const headwise_forward_call& call = forward.call;
    for (int64_t group = queue.take(), next; group < groups; group = next < 0 ? queue.take() : next) {
      next = lines_ahead ? queue.reserve(groups, threads) : -1;
      Finite<OF> check;
      for (int64_t p = 0; p < forward.shape.height / PANEL; p++)
        forward.pack(group, p, to, to + forward.shape.key_bytes, check);
      if (!finite(check)) return;
      look_ahead(group, next, t.ahead);
      for (int64_t head = 0; head < heads_a_group; head++)
        for (int64_t index = 0; index < forward.shape.chunks; index++)
          chunk(group / call.h_kv, group % call.h_kv * heads_a_group + head, index, to, t);
    }
  }

  void look_ahead(int64_t group, int64_t next, Ahead& ahead) const {
    const headwise_forward_call& call = forward.call;
    ahead.begin(lines_ahead);
    if (!lines_ahead) return;
    int64_t batch = group / call.h_kv, head = group % call.h_kv;
    const int64_t size = forward.dtype.size;
    ahead.add(call.out, size, batch, head * heads_a_group, heads_a_group, call.d_v, call.n);
    if (next < 0 || next >= groups) return;
    batch = next / call.h_kv, head = next % call.h_kv;
    ahead.add(call.k, size, batch, head, 1, call.d, call.m);
    ahead.add(call.v, size, batch, head, 1, call.d_v, call.m);
    ahead.add(call.q, size, batch, head * heads_a_group, heads_a_group, call.d, call.n);
  }

  int64_t lines_at_once() const {
    const headwise_forward_call& call = forward.call;
    const int64_t bytes = (heads_a_group * call.n + call.m) * (call.d + call.d_v) * forward.dtype.size;
    return lines_ahead_of(bytes, head_bytes, groups, heads_a_group * forward.fetches());
  }

  void add_columns(int) {
    const headwise_forward_call& call = forward.call;
    const Wanted& wanted = forward.wanted;
    for (int64_t head; (head = queue.take()) < call.b * call.h;) {
      const float* parts = partial + head * forward.shape.chunks * call.m;
      float* to = (float*)wanted.of[COLUMNS]->result + head * call.m;
      for (int64_t j = 0; j < call.m; j++) {
        float total = 0.0f;
        for (int64_t c = 0; c < forward.shape.chunks; c++) total += parts[c * call.m + j];
        to[j] = total;
      }
      for (int i = 1; i < wanted.count[COLUMNS]; i++)
        __builtin_memcpy((float*)wanted.of[COLUMNS][i].result + head * call.m, to, (size_t)call.m * 4);
    }
  }

  int go() {
    const headwise_forward_call& call = forward.call;
    const Shape& s = forward.shape;
    groups = call.b * call.h_kv;
    heads_a_group = call.h / call.h_kv;
    head_bytes = s.key_bytes + s.value_bytes;
    Scratch* unused;
    scratch_bytes = padded(lay_out<OF>(forward.wanted, s, nullptr, &unused), 4096);
    const int64_t work = call.b * call.h * call.n * call.m * (call.d + call.d_v) / A_THREADS_WORK;
    threads = (int)least(call.threads, least(1 + work, most(1, groups * heads_a_group * s.query_blocks)));
    local = threads == 1 || (groups >= 4 * threads && head_bytes <= LOCAL_BYTES);
    const int64_t a_wave = local ? threads : most(1, least(groups, WAVE_BYTES / most(1, head_bytes)));
    const int64_t partial_bytes = s.strip ? padded(call.b * call.h * s.chunks * call.m * 4, 64) : 0;
    char* all_memory = borrow((size_t)(threads * scratch_bytes + a_wave * head_bytes + partial_bytes));
    if (!all_memory) return HEADWISE_NO_MEMORY;
    scratch = all_memory;
    packed = scratch + threads * scratch_bytes;
    partial = (float*)(packed + a_wave * head_bytes);
    all_finite_needed = !everything_is_seen(call);
    lines_ahead = lines_at_once();
    if (local) {
      on_all<&Run::attend_local>(this, threads);
    } else {
      for (wave = 0; wave < groups && !stopped(); wave = wave_end) {
        wave_end = least(groups, wave + a_wave);
        on_all<&Run::pack_wave>(this, threads);
        if (!stopped()) on_all<&Run::attend_wave>(this, threads);
      }
    }
    if (s.strip && !stopped()) on_all<&Run::add_columns>(this, threads);
    give_back(all_memory);
    if (refused.value) return REFUSED;
    return stopped() ? HEADWISE_NOT_FINITE : broken.value ? HEADWISE_DONE : HEADWISE_FINITE;
  }
};

template <Operand OF, typename T, bool SPREAD, bool REACH>
static int run(const headwise_forward_call& call, const Wanted& wanted) {
  const bool few = !(wanted.needs & NEEDS_BLOCKS);
  if (call.key_scales.data)
    return fits_eight(call) && few ? Decode<T, Eight, SPREAD, REACH>(call, wanted).go() : HEADWISE_TOO_MANY_QUERIES;
  if (few_queries(call) && few) return Decode<T, T, SPREAD, REACH>(call, wanted).go();
  if (OF == PARTS && !parts_pay(call)) return REFUSED;
  return Run<OF, SPREAD, REACH>(call, dtype_of<OF, T>(), wanted).go();
}

template <Operand OF, typename T> static int run(const headwise_forward_call& call) {
  const Wanted wanted(call);
  const bool spread = wanted.needs & NEEDS_SPREAD, reach = wanted.needs & NEEDS_REACH;
  if (spread && reach) return run<OF, T, true, true>(call, wanted);
  if (spread) return run<OF, T, true, false>(call, wanted);
  if (reach) return run<OF, T, false, true>(call, wanted);
  return run<OF, T, false, false>(call, wanted);
}

static int forward(const headwise_forward_call& call) {
  if (call.dtype == HEADWISE_BFLOAT16) return run<OPERAND<Brain>, Brain>(call);
#if HEADWISE_DOT && !HEADWISE_TILES
  return HEADWISE_DONE;  // unreachable: see target.cpp
#else
  if (call.dtype == HEADWISE_FLOAT16) return run<OPERAND<Half>, Half>(call);
  return run<OPERAND<float>, float>(call);
#endif
}
