// Products of 8, 16 or 32 rows (NT = rows / 8). Clusters of four blocks split K: each block stages a
// quarter of the activations, partial sums meet in distributed shared memory, in rank order.

#define CLUSTER 4
#define BATCH_THREADS 256

enum { FP8, NVFP4, F16 };
enum { STORE, RESIDUAL, SWIGLU };

struct BatchArgs {
  const uint4 *weight;
  const u32 *scales;
  const float *alpha;
  const uint4 *weight16;
  const float *alpha16;
  const u16 *x;        // [rows, K] fp16
  float *y, *y16;      // [rows, ld], [rows, ld16]
  u16 *h;              // SWIGLU: [rows * ROWS_PER_TOKEN, WIDTH]
  int tiles, tiles16, clusters_main, ld, ld16;
};

__device__ __forceinline__ u32 cluster_rank() {
  u32 r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
__device__ __forceinline__ float load_remote(const float *p, u32 rank) {
  u32 local = (u32)__cvta_generic_to_shared(p), remote;
  float v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(remote));
  return v;
}

// One 16-byte chunk of A against NT column tiles. xs: this chunk's columns, row stride `stride`.
template <int KIND, int NT>
__device__ __forceinline__ void mma_chunk(uint4 q, u32 top, u32 bottom, u32 next_top,
                                          u32 next_bottom, const u16 *xs, int stride,
                                          float (*acc)[4]) {
  constexpr int BLOCKS = KIND == FP8 ? 2 : KIND == NVFP4 ? 4 : 1;
  const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
  for (int j = 0; j < BLOCKS; j++) {
    u32 a[4];
    if (KIND == FP8) {
      unpack_fp8(j ? q.z : q.x, j ? q.w : q.y, a);
    } else if (KIND == F16) {
      a[0] = q.x, a[1] = q.y, a[2] = q.z, a[3] = q.w;
    } else {  // scales are fp16, two blocks a word: exact products, see README.md
      unpack_fp4(word(q, j), a);
      const u32 up = __byte_perm(j < 2 ? top : next_top, 0, j & 1 ? 0x3232 : 0x1010);
      const u32 down = __byte_perm(j < 2 ? bottom : next_bottom, 0, j & 1 ? 0x3232 : 0x1010);
      a[0] = mul_half2(a[0], up);
      a[1] = mul_half2(a[1], down);
      a[2] = mul_half2(a[2], up);
      a[3] = mul_half2(a[3], down);
    }
#pragma unroll
    for (int n = 0; n < NT; n++)
      mma(acc[n], a, *(const uint2 *)(xs + (n * 8 + g) * stride + j * 16 + 4 * t));
  }
}

// Scale words of a quad (four words: blocks 0-1, 2-3, 4-5, 6-7) -> fp16 pairs times 2^7, which
// leaves code x scale products exact in fp16.
__device__ __forceinline__ void scale_pair(u32 w, u32 &top, u32 &bottom) {
  top = mul_half2(e4m3x2_to_half2((u16)w), 0x58005800u);
  bottom = mul_half2(e4m3x2_to_half2((u16)(w >> 16)), 0x58005800u);
}
#define WIDE_UNIT 128.f  // 2^-14 of the codes, 2^7 of the scales

template <int KIND, int K, int NT, int WK, int TPC>
__device__ __forceinline__ void partial_tiles(const uint4 *weight, const u32 *scales, int base,
                                              int count, const BatchArgs &a, u16 *xs, float *part) {
  constexpr int KC = K / CLUSTER, KW = KC / WK, WR = 8 / WK, STRIDE = KC + 16;
  constexpr int CHUNK = KIND == FP8 ? 32 : KIND == NVFP4 ? 64 : 16;
  constexpr int CH = KW / CHUNK, U = CH < 8 ? CH : 8, STEPS = CH / U, PT = NT * 8 + 1;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int wr = warp / WK, wk = warp % WK, rank = cluster_rank();
  const int chunk0 = (rank * KC + wk * KW) / CHUNK;
  const int steps = (count - wr + WR - 1) / WR * STEPS;
  uint4 q[2][U], s[2][(U + 1) / 2];
  const auto fetch = [&](int step, uint4 *dst, uint4 *scale) {
    const size_t tile = base + wr + step / STEPS * WR;
    const size_t chunk = tile * (K / CHUNK) + chunk0 + step % STEPS * U;
#pragma unroll
    for (int c = 0; c < U; c++) dst[c] = load_stream(weight + (chunk + c) * 32 + lane);
    if (KIND == NVFP4)
#pragma unroll
      for (int c = 0; c < U / 2; c++)
        scale[c] = load_stream((const uint4 *)scales + (chunk / 2 + c) * 8 + g);
  };
  float acc[NT][4];
  const auto use = [&](int step, const uint4 *src, const uint4 *scale) {
    if (step % STEPS == 0)
#pragma unroll
      for (int n = 0; n < NT; n++) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.f;
    const u16 *x = xs + wk * KW + step % STEPS * U * CHUNK;
#pragma unroll
    for (int c = 0; c < U; c++) {
      u32 top = 0, bottom = 0, next_top = 0, next_bottom = 0;
      if (KIND == NVFP4) {
        scale_pair(word(scale[c / 2], c & 1 ? 2 : 0), top, bottom);
        scale_pair(word(scale[c / 2], c & 1 ? 3 : 1), next_top, next_bottom);
      }
      mma_chunk<KIND, NT>(src[c], top, bottom, next_top, next_bottom, x + c * CHUNK, STRIDE, acc);
    }
    if (step % STEPS == STEPS - 1) {
      float *out = part + ((wr + step / STEPS * WR) * WK + wk) * 16 * PT;
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) out[(g + i / 2 * 8) * PT + n * 8 + 2 * t + i % 2] = acc[n][i];
    }
  };
  if (steps > 0) fetch(0, q[0], s[0]);
  if (steps > 1) fetch(1, q[1], s[1]);
  pdl_wait();
  pdl_trigger();
  for (int i = threadIdx.x; i < NT * 8 * KC / 8; i += BATCH_THREADS) {
    const int row = i / (KC / 8), c = i % (KC / 8);
    *(uint4 *)(xs + row * STRIDE + c * 8) = *(const uint4 *)(a.x + (size_t)row * K + rank * KC + c * 8);
  }
  __syncthreads();
  for (int step = 0; step < steps; step += 2) {
    use(step, q[0], s[0]);
    if (step + 2 < steps) fetch(step + 2, q[0], s[0]);
    if (step + 1 < steps) use(step + 1, q[1], s[1]);
    if (step + 3 < steps) fetch(step + 3, q[1], s[1]);
  }
}

template <int KIND, int K, int NT, int WK, int TPC, int EPI>
__device__ __forceinline__ void batched_linear(const BatchArgs &a) {
  constexpr int KC = K / CLUSTER, PT = NT * 8 + 1;
  extern __shared__ __align__(16) u8 memory[];
  u16 *xs = (u16 *)memory;
  float *part = (float *)(memory + NT * 8 * (KC + 16) * 2);
  const int cluster = blockIdx.x / CLUSTER;
  const bool second = cluster >= a.clusters_main;
  const int base = (second ? cluster - a.clusters_main : cluster) * TPC;
  const int count = min(TPC, (second ? a.tiles16 : a.tiles) - base);
  if (second)
    partial_tiles<F16, K, NT, WK, TPC>(a.weight16, nullptr, base, count, a, xs, part);
  else
    partial_tiles<KIND, K, NT, WK, TPC>(a.weight, a.scales, base, count, a, xs, part);
  cluster_sync();
  const bool swiglu = EPI == SWIGLU && !second;
  const int rows = swiglu ? 8 : 16, total = count * NT * 8 * rows;
  const float *alpha = second ? a.alpha16 : a.alpha;
  const float unit = KIND == NVFP4 && !second ? WIDE_UNIT : 1.f;
  for (int i = cluster_rank() * BATCH_THREADS + threadIdx.x; i < total;
       i += CLUSTER * BATCH_THREADS) {
    const int row = i % rows, token = i / rows % (NT * 8), tile = i / rows / (NT * 8);
    const float *p = part + tile * WK * 16 * PT + row * PT + token;
    float v = 0.f, up = 0.f;
#pragma unroll
    for (u32 r = 0; r < CLUSTER; r++)
#pragma unroll
      for (int k = 0; k < WK; k++) {
        v += load_remote(p + k * 16 * PT, r);
        if (EPI == SWIGLU && swiglu) up += load_remote(p + k * 16 * PT + 8 * PT, r);
      }
    v *= unit * alpha[(base + tile) * 2 + row / 8];
    const int column = (base + tile) * 16 + row;
    if (second) {
      a.y16[(size_t)token * a.ld16 + column] = v;
    } else if (EPI == STORE) {
      a.y[(size_t)token * a.ld + column] = v;
    } else if (EPI == RESIDUAL) {
      a.y[(size_t)token * a.ld + column] += v;
    } else {
      up *= unit * alpha[(base + tile) * 2 + 1];
      a.h[((size_t)token * ROWS_PER_TOKEN + TOP_K) * WIDTH + (base + tile) * 8 + row] =
          to_half(silu(v) * up * H_SCALE);
    }
  }
  cluster_sync();  // nobody leaves while its partial sums are being read
}

#define BATCHED(name, kind, k, nt, wk, tpc, epi)                                              \
  extern "C" __global__ void __launch_bounds__(BATCH_THREADS) __cluster_dims__(CLUSTER, 1, 1) \
      name##_##nt(const BatchArgs a) {                                                        \
    batched_linear<kind, k, nt, wk, tpc, epi>(a);                                             \
  }
#define SIZES(name, kind, k, wk, tpc, epi)                                                    \
  BATCHED(name, kind, k, 1, wk, tpc, epi)                                                     \
  BATCHED(name, kind, k, 2, wk, tpc, epi)                                                     \
  BATCHED(name, kind, k, 4, wk, tpc, epi)
SIZES(batched_in, FP8, HIDDEN, 1, IN_TILES, STORE)
SIZES(batched_qkv, FP8, HIDDEN, 1, QKV_TILES, STORE)
SIZES(batched_out, FP8, VALUE_WIDTH, 2, OUT_TILES, RESIDUAL)
SIZES(batched_router, NVFP4, HIDDEN, 4, ROUTER_TILES, SWIGLU)

// Logits of up to NT * 8 rows: all activations in shared memory, a warp owns a tile.
#define HEAD_THREADS 512
template <int NT> __device__ __forceinline__ void batched_head(const BatchArgs &a) {
  constexpr int CH = HIDDEN / 64, U = 4, STEPS = CH / U, STRIDE = HIDDEN + 16;
  extern __shared__ __align__(16) u8 memory[];
  u16 *xs = (u16 *)memory;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int warps = HEAD_THREADS / 32, first = blockIdx.x * warps + (threadIdx.x >> 5);
  const int stride = gridDim.x * warps;
  const int steps = (a.tiles - first + stride - 1) / stride * STEPS;
  uint4 q[2][U], s[2][U / 2];
  const auto fetch = [&](int step, uint4 *dst, uint4 *scale) {
    const size_t tile = first + (size_t)(step / STEPS) * stride;
    const size_t chunk = tile * CH + step % STEPS * U;
#pragma unroll
    for (int c = 0; c < U; c++) dst[c] = load_stream(a.weight + (chunk + c) * 32 + lane);
#pragma unroll
    for (int c = 0; c < U / 2; c++)
      scale[c] = load_stream((const uint4 *)a.scales + (chunk / 2 + c) * 8 + g);
  };
  float acc[NT][4];
  const auto use = [&](int step, const uint4 *src, const uint4 *scale) {
    if (step % STEPS == 0)
#pragma unroll
      for (int n = 0; n < NT; n++) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.f;
#pragma unroll
    for (int c = 0; c < U; c++) {
      u32 top, bottom, next_top, next_bottom;
      scale_pair(word(scale[c / 2], c & 1 ? 2 : 0), top, bottom);
      scale_pair(word(scale[c / 2], c & 1 ? 3 : 1), next_top, next_bottom);
      mma_chunk<NVFP4, NT>(src[c], top, bottom, next_top, next_bottom,
                           xs + (step % STEPS * U + c) * 64, STRIDE, acc);
    }
    if (step % STEPS == STEPS - 1) {
      const int tile = first + step / STEPS * stride;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int row = g + i / 2 * 8;
        const float unit = WIDE_UNIT * a.alpha[tile * 2 + i / 2];
#pragma unroll
        for (int n = 0; n < NT; n++)
          a.y[(size_t)(n * 8 + 2 * t + i % 2) * a.ld + tile * 16 + row] = acc[n][i] * unit;
      }
    }
  };
  if (steps > 0) fetch(0, q[0], s[0]);
  if (steps > 1) fetch(1, q[1], s[1]);
  pdl_wait();
  pdl_trigger();
  for (int i = threadIdx.x; i < NT * HIDDEN; i += HEAD_THREADS) {
    const int row = i / (HIDDEN / 8), c = i % (HIDDEN / 8);
    *(uint4 *)(xs + row * STRIDE + c * 8) = *(const uint4 *)(a.x + (size_t)row * HIDDEN + c * 8);
  }
  __syncthreads();
  for (int step = 0; step < steps; step += 2) {
    use(step, q[0], s[0]);
    if (step + 2 < steps) fetch(step + 2, q[0], s[0]);
    if (step + 1 < steps) use(step + 1, q[1], s[1]);
    if (step + 3 < steps) fetch(step + 3, q[1], s[1]);
  }
}
#define HEAD(nt)                                                                       \
  extern "C" __global__ void __launch_bounds__(HEAD_THREADS) head_##nt(const BatchArgs a) { \
    batched_head<nt>(a);                                                               \
  }
HEAD(1)
HEAD(2)
HEAD(4)
