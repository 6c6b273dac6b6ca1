// What of a forward pass depends on the dtype of its tensors: all other code is compiled once for the dtypes that are
// multiplied alike.

template <Operand OF> struct Dtype {
  int64_t size;  // bytes of a number
  void (*pack_keys)(const char* keys, int64_t stride, int64_t rows, int64_t d, float* panel, Finite<OF>& check);
  void (*pack_values)(const char* values, int64_t stride, int64_t m, int64_t d, int64_t from, int64_t to, int64_t height,
                      float* panels, Finite<OF>& check);
  void (*load_queries)(const char* q, int64_t stride, int rows, int64_t d, const Scaling& scaling, int64_t words,
                       float* queries, bool* broken, Flag& refused);
  void (*write_rows)(char* out, int64_t stride, int rows, const float* sums, int64_t sums_stride, const float* scale,
                     float keep, int64_t d_v);

  char* row(const headwise_tensor& x, int64_t batch, int64_t head, int64_t at) const {
    return (char*)x.data + (batch * x.batch + head * x.head + at * x.row) * size;
  }
};

template <Operand OF, typename T> static Dtype<OF> dtype_of() {
  return {sizeof(T),
          [](const char* keys, int64_t stride, int64_t rows, int64_t d, float* panel, Finite<OF>& check) {
            pack_keys<OF>((const T*)keys, stride, rows, d, panel, check);
          },
          [](const char* values, int64_t stride, int64_t m, int64_t d, int64_t from, int64_t to, int64_t height, float* panels,
             Finite<OF>& check) { pack_values<OF>((const T*)values, stride, m, d, from, to, height, panels, check); },
          [](const char* q, int64_t stride, int rows, int64_t d, const Scaling& scaling, int64_t words, float* queries,
             bool* broken, Flag& refused) {
            load_queries<OF>((const T*)q, stride, rows, d, scaling, words, queries, broken, refused);
          },
          [](char* out, int64_t stride, int rows, const float* sums, int64_t sums_stride, const float* scale, float keep,
             int64_t d_v) {
            for (int r = 0; r < rows; r++) write_row((T*)out + r * stride, sums + r * sums_stride, scale[r] * keep, d_v);
          }};
}
