// Peak performance of the machine, measured with the instructions that the kernels use.

struct Peak {
  int dtype;
  int64_t rounds;
};

template <bool DOT> static void multiply(Peak& peak) {
  Floats acc[12];
  for (int i = 0; i < 12; i++) acc[i] = all((float)i);
  Floats a = all(1e-9f), b = all(0.5f);
  for (int64_t i = 0; i < peak.rounds; i++) {
    a = kept(a);  // else the compiler would multiply once and only add
#pragma GCC unroll 12
    for (int j = 0; j < 12; j++) acc[j] = multiply_add<DOT>(acc[j], a, b);
  }
  Floats total = acc[0];
  for (int i = 1; i < 12; i++) total += acc[i];
  static volatile float keep;
  keep = sum(total);
  (void)keep;
}

#if HEADWISE_TILES
static void multiply_tiles(Peak& peak) {
  const Tiles<true> tiles;
  for (int64_t i = 0; i < peak.rounds; i++) {
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 5);
    _tile_dpbf16ps(2, 4, 5);
    _tile_dpbf16ps(3, 4, 5);
  }
}
#endif

static void multiply_all(void* context, int) {
  Peak& peak = *(Peak*)context;
#if HEADWISE_TILES
  return multiply_tiles(peak);
#elif HEADWISE_DOT
  if (peak.dtype == HEADWISE_BFLOAT16) return multiply<true>(peak);
#endif
  multiply<false>(peak);
}

// The maximum of a few rounds, in operations per second; a multiply-add counts as two. With tiles, a product of float32 is six
// of its parts.
static double peak(int dtype, int threads) {
  const bool dot = HEADWISE_DOT && dtype == HEADWISE_BFLOAT16;
  // With tiles, four products of 16 × 32 by 32 × 16.
  const double a_round = HEADWISE_TILES ? 4 * 16 * 32 * 16 / (dot ? 1.0 : 6.0) : 12 * W * (dot ? 2 : 1);
  const int64_t rounds = HEADWISE_TILES ? 1 << 17 : 4 << 20;  // each a few milliseconds
  double best = 0.0;
  for (int i = 0; i < 12; i++) {
    Peak work = {dtype, rounds};
    const double begun = seconds();
    parallel(threads, multiply_all, &work);
    const double rate = 2.0 * a_round * (double)rounds * threads / (seconds() - begun);
    if (rate > best) best = rate;
  }
  return best;
}

struct Reading {
  const float* memory;
  int64_t size, share;
  Queue queue;
};

static void read_all(void* context, int) {
  Reading& reading = *(Reading*)context;
  Floats a = all(0.0f), b = a, c = a, d = a;
  for (int64_t part; (part = reading.queue.take()) * reading.share < reading.size;) {
    const float* x = reading.memory + part * reading.share;
    for (int64_t i = 0; i < reading.share; i += 4 * W) {
      a = (Floats)((Words)a ^ (Words)load(x + i));
      b = (Floats)((Words)b ^ (Words)load(x + i + W));
      c = (Floats)((Words)c ^ (Words)load(x + i + 2 * W));
      d = (Floats)((Words)d ^ (Words)load(x + i + 3 * W));
    }
  }
  static volatile float keep;
  keep = sum((Floats)((Words)a ^ (Words)b ^ (Words)c ^ (Words)d));
  (void)keep;
}

// Bytes per second read from a buffer much larger than the caches; 0 if memory is insufficient.
static double bandwidth(int threads) {
  const int64_t size = 128 << 20;  // floats: 512 MB
  float* memory = (float*)borrow((size_t)size * 4);
  if (!memory) return 0.0;
  for (int64_t i = 0; i < size; i += 1024) memory[i] = 1.0f;
  double best = 0.0;
  for (int i = 0; i < 5; i++) {
    Reading reading = {memory, size, 1 << 18, {}};
    const double begun = seconds();
    parallel(threads, read_all, &reading);
    const double rate = 4.0 * (double)size / (seconds() - begun);
    if (rate > best) best = rate;
  }
  give_back((char*)memory);
  return best;
}
