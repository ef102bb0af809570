// Products of one token: every block owns whole row tiles, its eight warps split K.

struct SingleArgs {
  const uint4 *weight;     // main matrix, packed tiles
  const u32 *scales;       // NVFP4 only
  const float *alpha;      // one per 8 rows
  const uint4 *weight16;   // second matrix in fp16 (gates, router); blocks from grid_main on
  const float *alpha16;
  const float *x;          // residual stream, or the mixer's output for GATED
  const float *norm;       // norm weight
  const float *z;          // GATED: gate
  const u16 *half_x;       // RAW: activations
  float *y;                // STORE: output rows; RESIDUAL: the residual stream
  float *y16;              // rows of the second matrix
  u16 *h;                  // SWIGLU: expert activations
  int tiles, grid_main;
  float eps;
};

enum { FP8, NVFP4 };
enum { NORM, GATED, RAW };
enum { STORE, RESIDUAL, SWIGLU };
#define SINGLE_THREADS 256
#define MAX_TILES 8

// Zero-centred RMS norm of the residual stream into shared fp16.
struct NormWeights { float w[HIDDEN / SINGLE_THREADS]; };
__device__ __forceinline__ NormWeights load_norm(const float *norm) {
  NormWeights r;
#pragma unroll
  for (int i = 0; i < HIDDEN / SINGLE_THREADS; i += 4)
    *(float4 *)(r.w + i) = *(const float4 *)(norm + threadIdx.x * (HIDDEN / SINGLE_THREADS) + i);
  return r;
}
__device__ __forceinline__ void norm_to_shared(const float *x, const NormWeights &norm, float eps,
                                               u16 *xs, float *scratch) {
  constexpr int PER = HIDDEN / SINGLE_THREADS;
  float v[PER], sum = 0.f;
#pragma unroll
  for (int i = 0; i < PER; i += 4) *(float4 *)(v + i) = *(const float4 *)(x + threadIdx.x * PER + i);
#pragma unroll
  for (int i = 0; i < PER; i++) sum = fmaf(v[i], v[i], sum);
  const float r = rsqrtf(block_sum<8>(sum, scratch) / HIDDEN + eps);
#pragma unroll
  for (int i = 0; i < PER; i += 2)
    *(u32 *)(xs + threadIdx.x * PER + i) =
        pack_half2(v[i] * r * (1.f + norm.w[i]), v[i + 1] * r * (1.f + norm.w[i + 1]));
  __syncthreads();
}

// Norm of each value head times SiLU of the gate; eight neighbouring threads own a head.
__device__ __forceinline__ void gate_to_shared(const float *o, const float *z, const float *norm,
                                               float eps, u16 *xs) {
  constexpr int PER = VALUE_WIDTH / SINGLE_THREADS, THREADS = VALUE_DIM / PER;
  const int first = threadIdx.x * PER;
  float v[PER], factor[PER], sum = 0.f;
#pragma unroll
  for (int i = 0; i < PER; i += 4) *(float4 *)(factor + i) = *(const float4 *)(z + first + i);
#pragma unroll
  for (int i = 0; i < PER; i++) factor[i] = silu(factor[i]) * norm[(first + i) % VALUE_DIM];
  pdl_wait();
  pdl_trigger();
#pragma unroll
  for (int i = 0; i < PER; i += 4) *(float4 *)(v + i) = *(const float4 *)(o + first + i);
#pragma unroll
  for (int i = 0; i < PER; i++) sum = fmaf(v[i], v[i], sum);
  const float r = rsqrtf(lane_sum<THREADS>(sum) / VALUE_DIM + eps);
#pragma unroll
  for (int i = 0; i < PER; i += 2)
    *(u32 *)(xs + first + i) = pack_half2(v[i] * r * factor[i], v[i + 1] * r * factor[i + 1]);
  __syncthreads();
}

template <int PRO> __device__ __forceinline__ void prologue(const SingleArgs &a, u16 *xs,
                                                            float *scratch, int k) {
  if (PRO == NORM) {
    const NormWeights norm = load_norm(a.norm);
    pdl_wait();
    pdl_trigger();
    norm_to_shared(a.x, norm, a.eps, xs, scratch);
  } else if (PRO == GATED) {
    gate_to_shared(a.x, a.z, a.norm, a.eps, xs);
  } else {
    pdl_wait();
    pdl_trigger();
    for (int i = threadIdx.x; i < k / 8; i += SINGLE_THREADS)
      ((uint4 *)xs)[i] = ((const uint4 *)a.half_x)[i];
    __syncthreads();
  }
}

// One warp's K slice of a tile -> 16 row sums in red[0..15].
template <int KIND, int CH>
__device__ __forceinline__ void tile_rows(const uint4 *q, const u32 *s, const u16 *xs, float *red) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  float acc[4] = {0.f, 0.f, 0.f, 0.f}, odd[4] = {0.f, 0.f, 0.f, 0.f};
  if (KIND == FP8) {
#pragma unroll
    for (int c = 0; c < CH; c++) {
      u32 a[4];
      unpack_fp8(q[c].x, q[c].y, a);
      mma(acc, a, *(const uint2 *)(xs + c * 32 + 4 * t));
      unpack_fp8(q[c].z, q[c].w, a);
      mma(odd, a, *(const uint2 *)(xs + c * 32 + 16 + 4 * t));
    }
    acc[0] += odd[0];
    acc[2] += odd[2];
  } else {
#pragma unroll
    for (int c = 0; c < CH; c += 2) {
      const uint2 b = *(const uint2 *)(xs + c * 64 + 4 * lane);
      dot_group<1>(q + c, s + c / 2, &b, acc);
    }
    fold_columns<1>(acc);
    acc[0] *= FP4_UNIT;
    acc[2] *= FP4_UNIT;
  }
  if (t == 0) {
    red[g] = acc[0];
    red[g + 8] = acc[2];
  }
}

template <int KIND, int K, int PRO, int EPI>
__device__ __forceinline__ void single_linear(const SingleArgs &a) {
  constexpr int CHUNK = KIND == FP8 ? 32 : 64, CH = K / 8 / CHUNK, TOTAL = K / CHUNK;
  constexpr int BUFFERS = CH <= 8 ? 2 : 1;
  __shared__ __align__(16) u16 xs[K];
  __shared__ float red[MAX_TILES][8][16], scratch[8];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u16 *slice = xs + warp * (K / 8);
  if (PRO == NORM && blockIdx.x >= a.grid_main) {  // a tile of the fp16 matrix
    constexpr int C16 = K / 8 / 16;
    const int tile = blockIdx.x - a.grid_main;
    uint4 q[C16];
#pragma unroll
    for (int c = 0; c < C16; c++)
      q[c] = load_stream(a.weight16 + ((size_t)tile * (K / 16) + warp * C16 + c) * 32 + lane);
    prologue<PRO>(a, xs, scratch, K);
    float acc[2][4] = {};
#pragma unroll
    for (int c = 0; c < C16; c++) {
      const u32 f[4] = {q[c].x, q[c].y, q[c].z, q[c].w};
      mma(acc[c & 1], f, *(const uint2 *)(slice + c * 16 + 4 * (lane & 3)));
    }
    if ((lane & 3) == 0) {
      red[0][warp][lane >> 2] = acc[0][0] + acc[1][0];
      red[0][warp][8 + (lane >> 2)] = acc[0][2] + acc[1][2];
    }
    __syncthreads();
    if (threadIdx.x < 16) {
      float v = 0.f;
#pragma unroll
      for (int w = 0; w < 8; w++) v += red[0][w][threadIdx.x];
      a.y16[tile * 16 + threadIdx.x] = v * a.alpha16[tile * 2 + threadIdx.x / 8];
    }
    return;
  }
  const int count = (a.tiles - (int)blockIdx.x + a.grid_main - 1) / a.grid_main;
  uint4 q[BUFFERS][CH];
  u32 s[BUFFERS][CH / 2];
  const auto fetch = [&](int i, uint4 *dst, u32 *scale) {
    const size_t tile = blockIdx.x + (size_t)i * a.grid_main;
#pragma unroll
    for (int c = 0; c < CH; c++)
      dst[c] = load_stream(a.weight + (tile * TOTAL + warp * CH + c) * 32 + lane);
    if (KIND == NVFP4)
#pragma unroll
      for (int c = 0; c < CH / 2; c++)
        scale[c] = load_stream(a.scales + (tile * (TOTAL / 2) + warp * (CH / 2) + c) * 32 + lane);
  };
#pragma unroll
  for (int b = 0; b < BUFFERS; b++)
    if (b < count) fetch(b, q[b], s[b]);
  prologue<PRO>(a, xs, scratch, K);
  if (BUFFERS == 1) tile_rows<KIND, CH>(q[0], s[0], slice, red[0][warp]);  // one tile a block
  for (int i = 0; BUFFERS > 1 && i < count; i += BUFFERS) {
#pragma unroll
    for (int b = 0; b < BUFFERS; b++) {
      if (i + b < count) tile_rows<KIND, CH>(q[b], s[b], slice, red[i + b][warp]);
      if (i + b + BUFFERS < count) fetch(i + b + BUFFERS, q[b], s[b]);
    }
  }
  __syncthreads();
  constexpr int ROWS = EPI == SWIGLU ? 8 : 16;
  for (int o = threadIdx.x; o < count * ROWS; o += SINGLE_THREADS) {
    const int i = o / ROWS, row = o % ROWS, tile = blockIdx.x + i * a.grid_main;
    float v = 0.f, up = 0.f;
#pragma unroll
    for (int w = 0; w < 8; w++) {
      v += red[i][w][row];
      if (EPI == SWIGLU) up += red[i][w][row + 8];
    }
    v *= a.alpha[tile * 2 + row / 8];
    if (EPI == STORE) a.y[tile * 16 + row] = v;
    if (EPI == RESIDUAL) a.y[tile * 16 + row] += v;
    if (EPI == SWIGLU)
      a.h[TOP_K * WIDTH + tile * 8 + row] =
          to_half(silu(v) * up * a.alpha[tile * 2 + 1] * H_SCALE);
  }
}

#define SINGLE(name, kind, k, pro, epi)                                                     \
  extern "C" __global__ void __launch_bounds__(SINGLE_THREADS, 2) name(const SingleArgs a) {   \
    single_linear<kind, k, pro, epi>(a);                                                    \
  }
SINGLE(single_in, FP8, HIDDEN, NORM, STORE)             // GDN projections and gates; QKV
SINGLE(single_out_gated, FP8, VALUE_WIDTH, GATED, RESIDUAL)
SINGLE(single_out_raw, FP8, VALUE_WIDTH, RAW, RESIDUAL)
SINGLE(single_router, NVFP4, HIDDEN, NORM, SWIGLU)      // shared expert's gate/up, router logits

struct ExpertArgs {
  const uint4 *weight;
  const u32 *scales;
  const float *alpha;
  const uint4 *shared_weight;   // down only
  const u32 *shared_scales;
  const float *shared_alpha;
  const float *logits;          // [LOGITS_LD]
  const float *norm;
  float *x;                     // residual stream
  u16 *h;                       // [ROWS_PER_TOKEN][WIDTH]
  float eps;
};

// Gate and up of the chosen experts: block (rank, four tiles).
#define UP_TILES 4
extern "C" __global__ void __launch_bounds__(SINGLE_THREADS) single_gate_up(const ExpertArgs a) {
  constexpr int CH = HIDDEN / 8 / 64, TOTAL = HIDDEN / 64, TILES = WIDTH / 8;
  __shared__ __align__(16) u16 xs[HIDDEN];
  __shared__ float red[UP_TILES][8][16], scratch[8];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int rank = blockIdx.x / (TILES / UP_TILES);
  const int first = blockIdx.x % (TILES / UP_TILES) * UP_TILES;
  norm_to_shared(a.x, load_norm(a.norm), a.eps, xs, scratch);  // finished two kernels ago
  pdl_wait();
  pdl_trigger();
  int id;
  float weight;
  top_experts(a.logits, id, weight);
  const size_t expert = __shfl_sync(~0u, id, rank);
  uint4 q[UP_TILES][CH];
  u32 s[UP_TILES][CH / 2];
#pragma unroll
  for (int i = 0; i < UP_TILES; i++) {
    const size_t tile = expert * TILES + first + i;
#pragma unroll
    for (int c = 0; c < CH; c++)
      q[i][c] = load_stream(a.weight + (tile * TOTAL + warp * CH + c) * 32 + lane);
#pragma unroll
    for (int c = 0; c < CH / 2; c++)
      s[i][c] = load_stream(a.scales + (tile * (TOTAL / 2) + warp * (CH / 2) + c) * 32 + lane);
  }
  __syncthreads();  // keeps the assembler from sinking the loads to their uses
#pragma unroll
  for (int i = 0; i < UP_TILES; i++)
    tile_rows<NVFP4, CH>(q[i], s[i], xs + warp * (HIDDEN / 8), red[i][warp]);
  __syncthreads();
  if (threadIdx.x < UP_TILES * 8) {
    const int i = threadIdx.x / 8, row = threadIdx.x % 8;
    const float *alpha = a.alpha + (expert * TILES + first + i) * 2;
    float gate = 0.f, up = 0.f;
#pragma unroll
    for (int w = 0; w < 8; w++) {
      gate += red[i][w][row];
      up += red[i][w][row + 8];
    }
    a.h[rank * WIDTH + (first + i) * 8 + row] =
        to_half(silu(gate * alpha[0]) * up * alpha[1] * H_SCALE);
  }
}

// Down of the chosen experts and the shared one, combined into the residual stream.
// Block: one row tile; warp: one expert. The routing was finished two kernels ago.
extern "C" __global__ void __launch_bounds__(ROWS_PER_TOKEN * 32) single_down(const ExpertArgs a) {
  constexpr int CH = WIDTH / 64, TILES = HIDDEN / 16;
  __shared__ float red[ROWS_PER_TOKEN][16];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, tile = blockIdx.x;
  int id;
  float weight;
  top_experts(a.logits, id, weight);
  const bool shared = warp == TOP_K;
  const size_t where = (shared ? 0 : (size_t)__shfl_sync(~0u, id, warp) * TILES) + tile;
  weight = shared ? sigmoid(a.logits[EXPERTS]) : __shfl_sync(~0u, weight, warp);
  const uint4 *w = (shared ? a.shared_weight : a.weight) + where * CH * 32 + lane;
  const u32 *sw = (shared ? a.shared_scales : a.scales) + where * (CH / 2) * 32 + lane;
  const float *alpha = (shared ? a.shared_alpha : a.alpha) + where * 2;
  uint4 q[CH];
  u32 s[CH / 2];
#pragma unroll
  for (int c = 0; c < CH; c++) q[c] = load_stream(w + c * 32);
#pragma unroll
  for (int c = 0; c < CH / 2; c++) s[c] = load_stream(sw + c * 32);
  const float scale[2] = {alpha[0] * weight / H_SCALE, alpha[1] * weight / H_SCALE};
  pdl_wait();
  pdl_trigger();
  float acc[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int c = 0; c < CH; c += 2) {
    const uint2 b = *(const uint2 *)(a.h + warp * WIDTH + c * 64 + 4 * lane);
    dot_group<1>(q + c, s + c / 2, &b, acc);
  }
  fold_columns<1>(acc);
  if ((lane & 3) == 0) {
    red[warp][lane >> 2] = acc[0] * FP4_UNIT * scale[0];
    red[warp][8 + (lane >> 2)] = acc[2] * FP4_UNIT * scale[1];
  }
  __syncthreads();
  if (threadIdx.x < 16) {
    float v = a.x[tile * 16 + threadIdx.x];
#pragma unroll
    for (int e = 0; e < ROWS_PER_TOKEN; e++) v += red[e][threadIdx.x];
    a.x[tile * 16 + threadIdx.x] = v;
  }
}

// Logits of one token: a warp owns a tile, two sets of registers hold eight 128-wide groups.
extern "C" __global__ void __launch_bounds__(SINGLE_THREADS) single_head(const SingleArgs a) {
  constexpr int TOTAL = HIDDEN / 64, G = 4, STEPS = TOTAL / 2 / G;
  __shared__ __align__(16) u16 xs[HIDDEN];
  __shared__ float scratch[8];
  const int lane = threadIdx.x & 31, first = blockIdx.x * 8 + (threadIdx.x >> 5);
  const int stride = gridDim.x * 8;
  const int steps = (a.tiles - first + stride - 1) / stride * STEPS;
  uint4 q[2][2 * G];
  u32 s[2][G];
  const auto fetch = [&](int step, uint4 *dst, u32 *scale) {
    const size_t tile = first + (size_t)(step / STEPS) * stride;
    const size_t group = tile * (TOTAL / 2) + step % STEPS * G;
#pragma unroll
    for (int c = 0; c < 2 * G; c++) dst[c] = load_stream(a.weight + (group * 2 + c) * 32 + lane);
#pragma unroll
    for (int c = 0; c < G; c++) scale[c] = load_stream(a.scales + (group + c) * 32 + lane);
  };
  float acc[4];
  const auto use = [&](int step, const uint4 *src, const u32 *scale) {
    if (step % STEPS == 0) acc[0] = acc[1] = acc[2] = acc[3] = 0.f;
#pragma unroll
    for (int c = 0; c < G; c++) {
      const uint2 b = *(const uint2 *)(xs + (step % STEPS * G + c) * 128 + 4 * lane);
      dot_group<1>(src + 2 * c, scale + c, &b, acc);
    }
    if (step % STEPS == STEPS - 1) {
      const int tile = first + step / STEPS * stride, g = lane >> 2;
      fold_columns<1>(acc);
      if ((lane & 3) == 0) {
        a.y[tile * 16 + g] = acc[0] * FP4_UNIT * a.alpha[tile * 2];
        a.y[tile * 16 + g + 8] = acc[2] * FP4_UNIT * a.alpha[tile * 2 + 1];
      }
    }
  };
  if (steps > 0) fetch(0, q[0], s[0]);
  if (steps > 1) fetch(1, q[1], s[1]);
  const NormWeights norm = load_norm(a.norm);
  pdl_wait();
  pdl_trigger();
  norm_to_shared(a.x, norm, a.eps, xs, scratch);
  for (int step = 0; step < steps; step += 2) {
    use(step, q[0], s[0]);
    if (step + 2 < steps) fetch(step + 2, q[0], s[0]);
    if (step + 1 < steps) use(step + 1, q[1], s[1]);
    if (step + 3 < steps) fetch(step + 3, q[1], s[1]);
  }
}
