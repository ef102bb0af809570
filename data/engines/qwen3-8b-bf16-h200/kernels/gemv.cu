// y[n] = sum over k of x[k] w[n, k] for one token: skinny.cu without tensor cores, for the single stream.
//
// A thread block takes 8 rows. Each thread asks for its 16-byte chunks of all 8 rows at once, before the
// previous kernel has ended; then it waits, reads its part of x and multiplies. No shared-memory ring and no
// persistence: small blocks leave the balance between multiprocessors to the hardware, which beats
// any fixed split, and a multiprocessor that is done starts on the next kernel's blocks at once.
//
// Arguments and modes as in skinny.cu. Compile-time: K, MODE, MIN_BLOCKS (per multiprocessor).
#define MODE_SCALE 0
#define MODE_RESIDUAL 1
#define MODE_SILU 2  // rows 0-3 of a block are of gate, 4-7 of up

constexpr int ROWS = 8, THREADS = 256, WARPS = 8;
constexpr int CHUNK = THREADS * 8;               // k that the block's threads cover with 16 bytes each
constexpr int CHUNKS = 2;                        // per row in flight
constexpr int ITERATIONS = (K + CHUNKS * CHUNK - 1) / (CHUNKS * CHUNK);

struct Chunks {
  uint4 row[ROWS][CHUNKS];
};

DEVICE uint4 load_weight(const u16* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

DEVICE bool inside(int k) { return K % (CHUNKS * CHUNK) == 0 || k < K; }

DEVICE void load(Chunks& chunks, const u16* const (&source)[ROWS], int iteration) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j) {
      int k = (iteration * CHUNKS + j) * CHUNK;
      chunks.row[r][j] = inside(k + threadIdx.x * 8) ? load_weight(source[r] + k) : uint4{0, 0, 0, 0};
    }
}

DEVICE float low(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

DEVICE float dot(uint4 w, const float (&x)[8], float sum) {
  sum = fmaf(low(w.x), x[0], sum), sum = fmaf(high(w.x), x[1], sum);
  sum = fmaf(low(w.y), x[2], sum), sum = fmaf(high(w.y), x[3], sum);
  sum = fmaf(low(w.z), x[4], sum), sum = fmaf(high(w.z), x[5], sum);
  sum = fmaf(low(w.w), x[6], sum), sum = fmaf(high(w.w), x[7], sum);
  return sum;
}

DEVICE void multiply(float (&sum)[ROWS], const Chunks& chunks, const u16* x, int iteration) {
#pragma unroll
  for (int j = 0; j < CHUNKS; ++j) {
    int k = (iteration * CHUNKS + j) * CHUNK + threadIdx.x * 8;
    uint4 packed = inside(k) ? *(const uint4*)(x + k) : uint4{0, 0, 0, 0};
    float values[8] = {low(packed.x), high(packed.x), low(packed.y), high(packed.y),
                       low(packed.z), high(packed.z), low(packed.w), high(packed.w)};
#pragma unroll
    for (int r = 0; r < ROWS; ++r) sum[r] = dot(chunks.row[r][j], values, sum[r]);
  }
}

// Eight sums over 32 lanes: each exchange halves the rows a lane holds. Lane l ends with row l / 4.
DEVICE float warp_rows(float (&sum)[ROWS]) {
  int lane = threadIdx.x & 31;
#pragma unroll
  for (int half = 4; half > 0; half >>= 1) {
    bool upper = lane & (half * 4);
#pragma unroll
    for (int i = 0; i < half; ++i) {
      float keep = upper ? sum[i + half] : sum[i], send = upper ? sum[i] : sum[i + half];
      sum[i] = keep + __shfl_xor_sync(0xffffffffu, send, half * 4);
    }
  }
  float y = sum[0];
  y += __shfl_xor_sync(0xffffffffu, y, 2);
  return y + __shfl_xor_sync(0xffffffffu, y, 1);
}

DEVICE float row_scale(const float* squares, float eps) {
  float s = 0.f;
#pragma unroll
  for (int i = (threadIdx.x & 31) * 4; i < K / 8; i += 128) {
    float4 v = *(const float4*)&squares[i];
    s += v.x + v.y + v.z + v.w;
  }
  return rsqrtf(warp_sum(s) / K + eps);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    gemv(const u16* __restrict__ w, const u16* x, const float* sumsq_in, const float* residual_in, float* residual_out,
         const u16* __restrict__ norm_weight, float* sumsq_out, void* out, int n_out, float eps) {
  __shared__ float parts[WARPS][ROWS], shared_scale;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const u16* source[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    int n = MODE == MODE_SILU ? min(blockIdx.x * 4 + r % 4, n_out - 1) + r / 4 * n_out
                              : min(blockIdx.x * ROWS + r, n_out - 1);
    source[r] = w + (u64)n * K + threadIdx.x * 8;
  }
  Chunks chunks;
  load(chunks, source, 0);
  let_next_kernel_start();
  wait_for_previous_kernel();

  const int n = MODE == MODE_SILU ? blockIdx.x * 4 + threadIdx.x : blockIdx.x * ROWS + threadIdx.x;
  const bool finishes = threadIdx.x < (MODE == MODE_SILU ? 4 : ROWS) && n < n_out;
  float residual = MODE == MODE_RESIDUAL && finishes ? residual_in[n] : 0.f;
  if (MODE != MODE_RESIDUAL && warp == WARPS - 1) {
    float scale = row_scale(sumsq_in, eps);
    if (lane == 0) shared_scale = scale;
  }
  float sum[ROWS] = {};
#pragma unroll
  for (int i = 0; i < ITERATIONS; ++i) {
    multiply(sum, chunks, x, i);
    if (i + 1 < ITERATIONS) load(chunks, source, i + 1);
  }
  float y = warp_rows(sum);
  if (lane % 4 == 0) parts[warp][lane / 4] = y;
  __syncthreads();
  if (warp > 0) return;

  float total = 0.f;
#pragma unroll
  for (int i = 0; i < WARPS; ++i) total += parts[i][lane % ROWS];
  if (MODE == MODE_SCALE) {
    if (finishes) ((float*)out)[n] = shared_scale * total;
  } else if (MODE == MODE_SILU) {
    float up = shared_scale * __shfl_down_sync(0xffffffffu, total, 4), gate = shared_scale * total;
    if (finishes) ((u16*)out)[n] = to_bf16(gate / (1.f + __expf(-gate)) * up);
  } else {
    float r = residual + total, squares = finishes ? r * r : 0.f;
    for (int offset = 4; offset > 0; offset >>= 1) squares += __shfl_xor_sync(0xffffffffu, squares, offset);
    if (finishes) {
      residual_out[n] = r;
      ((u16*)out)[n] = to_bf16(r * to_float(norm_weight[n]));
      if (lane == 0) sumsq_out[blockIdx.x] = squares;
    }
  }
}
