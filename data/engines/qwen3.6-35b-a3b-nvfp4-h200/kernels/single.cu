// Products of one token. A block owns whole row tiles, its eight warps split K; the weights come
// through a queue of bulk copies, the first of them before the predecessor has finished.

struct SingleArgs {
  const uint4 *weight;     // main matrix, packed tiles
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

enum { FP8, NVFP4, F16 };
enum { NORM, GATED, RAW };
enum { STORE, RESIDUAL, SWIGLU };
#define SINGLE_THREADS 256
#define WARPS 8
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
  const float r = rsqrtf(block_sum<WARPS>(sum, scratch) / HIDDEN + eps);
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
    norm_to_shared(a.x, norm, a.eps, xs, scratch);
  } else if (PRO == GATED) {
    gate_to_shared(a.x, a.z, a.norm, a.eps, xs);
  } else {
    pdl_wait();
    for (int i = threadIdx.x; i < k / 8; i += SINGLE_THREADS)
      ((uint4 *)xs)[i] = ((const uint4 *)a.half_x)[i];
    __syncthreads();
  }
}

constexpr int tile_bytes(int kind, int k) { return k * (kind == F16 ? 32 : kind == FP8 ? 16 : 9); }

// One warp's K slice of a tile in shared memory -> 16 row sums in red[0..15].
template <int KIND, int K>
__device__ __forceinline__ void tile_rows(const u8 *tile, const u16 *xs, float *red) {
  constexpr int CHUNK = KIND == FP8 ? 32 : KIND == NVFP4 ? 64 : 16, CH = K / WARPS / CHUNK;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const uint4 *q = (const uint4 *)tile + warp * CH * 32 + lane;
  const u16 *x = xs + warp * (K / WARPS);
  float acc[4] = {0.f, 0.f, 0.f, 0.f}, odd[4] = {0.f, 0.f, 0.f, 0.f};
  if (KIND == NVFP4) {
    constexpr int GROUPS = K / WARPS / 128;
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
      const uint2 b = *(const uint2 *)(x + i * 128 + 4 * lane);
      dot_group_at<1>(tile + (warp * GROUPS + i) * GROUP_BYTES, &b, acc);
    }
    fold_columns<1>(acc);
    acc[0] *= FP4_UNIT;
    acc[2] *= FP4_UNIT;
  } else {
#pragma unroll 8
    for (int c = 0; c < CH; c++) {
      const uint4 v = q[c * 32];
      u32 a[4] = {v.x, v.y, v.z, v.w};
      if (KIND == F16) {
        mma(c & 1 ? odd : acc, a, *(const uint2 *)(x + c * 16 + 4 * t));
      } else {
        unpack_fp8(v.x, v.y, a);
        mma(acc, a, *(const uint2 *)(x + c * 32 + 4 * t));
        unpack_fp8(v.z, v.w, a);
        mma(odd, a, *(const uint2 *)(x + c * 32 + 16 + 4 * t));
      }
    }
    acc[0] += odd[0];
    acc[2] += odd[2];
  }
  if (t == 0) {
    red[g] = acc[0];
    red[g + 8] = acc[2];
  }
}

// Tiles first, first + stride, ... of a matrix through STAGES buffers; sums land in red.
template <int KIND, int K, int PRO, int STAGES>
__device__ __forceinline__ void stream_tiles(const SingleArgs &a, const uint4 *weight, int first,
                                             int stride, int count, u8 *memory, u64 *full,
                                             u64 *empty, u16 *xs, float *scratch,
                                             float (*red)[WARPS][16]) {
  const u64 policy = stream_policy();
  const auto request = [&](int i) {
    const size_t tile = first + (size_t)i * stride;
    u8 *to = memory + i % STAGES * tile_bytes(KIND, K);
    u64 *barrier = full + i % STAGES;
    barrier_expect(barrier, tile_bytes(KIND, K));
    bulk_copy(to, (const u8 *)weight + tile * tile_bytes(KIND, K), tile_bytes(KIND, K), barrier,
              policy);
  };
  if (threadIdx.x == 0)
    for (int i = 0; i < min(STAGES, count); i++) request(i);
  prologue<PRO>(a, xs, scratch, K);
  // The successor starts, and asks for its weights, when nothing is left to ask for here.
  if (count <= STAGES && threadIdx.x == 0) pdl_trigger();
#pragma unroll 1
  for (int i = 0; i < count; i++) {
    barrier_wait(full + i % STAGES, i / STAGES & 1);
    tile_rows<KIND, K>(memory + i % STAGES * tile_bytes(KIND, K), xs, red[i][threadIdx.x >> 5]);
    if (i + STAGES >= count) continue;
    __syncwarp();
    if ((threadIdx.x & 31) == 0) barrier_arrive(empty + i % STAGES);
    if (threadIdx.x == 0) {
      barrier_wait(empty + i % STAGES, i / STAGES & 1);
      request(i + STAGES);
      if (i + STAGES == count - 1) pdl_trigger();
    }
  }
  __syncthreads();
}

template <int KIND, int K, int PRO, int EPI, int STAGES>
__device__ __forceinline__ void single_linear(const SingleArgs &a) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ __align__(16) u16 xs[K];
  __shared__ __align__(8) u64 full[STAGES], empty[STAGES];
  __shared__ float red[MAX_TILES][WARPS][16], scratch[WARPS];
  constexpr int ROWS = EPI == SWIGLU ? 8 : 16;
  const bool second = PRO == NORM && blockIdx.x >= a.grid_main;
  const int first = second ? blockIdx.x - a.grid_main : blockIdx.x;
  const int count = second ? 1 : (a.tiles - first + a.grid_main - 1) / a.grid_main;
  const int i = threadIdx.x / 16, row = threadIdx.x % 16, tile = first + i * a.grid_main;
  float alpha = 0.f, before = 0.f;  // read early: they come from DRAM
  if (i < count) {
    alpha = second ? a.alpha16[tile * 2 + row / 8] : a.alpha[tile * 2 + row / 8];
    if (EPI == RESIDUAL) before = a.y[tile * 16 + row];  // finished two kernels ago
  }
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(full + s, 1);
      barrier_init(empty + s, WARPS);
    }
    barrier_fence();
  }
  __syncthreads();
  if (PRO == NORM && second)
    stream_tiles<F16, K, PRO, 1>(a, a.weight16, first, 0, 1, memory, full, empty, xs, scratch, red);
  else
    stream_tiles<KIND, K, PRO, STAGES>(a, a.weight, first, a.grid_main, count, memory, full, empty,
                                       xs, scratch, red);
  if (i >= count) return;
  float v = 0.f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) v += red[i][w][row];
  v *= alpha;
  if (second) a.y16[tile * 16 + row] = v;
  else if (EPI == STORE) a.y[tile * 16 + row] = v;
  else if (EPI == RESIDUAL) a.y[tile * 16 + row] = before + v;
  else {
    const float up = __shfl_down_sync(~0u >> (count * 16 < 32 ? 16 : 0), v, 8);
    if (row < ROWS) a.h[TOP_K * WIDTH + tile * 8 + row] = to_half(silu(v) * up * H_SCALE);
  }
}

#define SINGLE(name, kind, k, pro, epi, stages)                                                \
  extern "C" __global__ void __launch_bounds__(SINGLE_THREADS, 2) name(const SingleArgs a) {   \
    single_linear<kind, k, pro, epi, stages>(a);                                               \
  }
SINGLE(single_in, FP8, HIDDEN, NORM, STORE, IN_STAGES)  // GDN projections and gates; QKV
SINGLE(single_out_gated, FP8, VALUE_WIDTH, GATED, RESIDUAL, 1)
SINGLE(single_out_raw, FP8, VALUE_WIDTH, RAW, RESIDUAL, 1)
SINGLE(single_router, NVFP4, HIDDEN, NORM, SWIGLU, 1)   // shared expert's gate/up, router logits

struct ExpertArgs {
  const uint4 *weight;
  const float *alpha;
  const uint4 *shared_weight;   // down only
  const float *shared_alpha;
  const float *logits;          // [LOGITS_LD]
  const float *norm;
  float *x;                     // residual stream
  u16 *h;                       // [ROWS_PER_TOKEN][WIDTH]
  float eps;
};

// Gate and up of the chosen experts: block (rank, four tiles).
#define UP_TILES 4
extern "C" __global__ void __launch_bounds__(SINGLE_THREADS, 2) single_gate_up(const ExpertArgs a) {
  constexpr int TILES = WIDTH / 8, BYTES = tile_bytes(NVFP4, HIDDEN);
  extern __shared__ __align__(128) u8 memory[];
  __shared__ __align__(16) u16 xs[HIDDEN];
  __shared__ __align__(8) u64 full[UP_TILES];
  __shared__ float red[UP_TILES][WARPS][16], scratch[WARPS];
  const int rank = blockIdx.x / (TILES / UP_TILES);
  const int first = blockIdx.x % (TILES / UP_TILES) * UP_TILES;
  if (threadIdx.x == 0) {
    for (int s = 0; s < UP_TILES; s++) barrier_init(full + s, 1);
    barrier_fence();
  }
  norm_to_shared(a.x, load_norm(a.norm), a.eps, xs, scratch);  // finished two kernels ago
  pdl_wait();
  float alpha[2];
  if (threadIdx.x < 32) {
    int id;
    float weight;
    top_experts(a.logits, id, weight);
    const size_t tile = (size_t)__shfl_sync(~0u, id, rank) * TILES + first;
    if (threadIdx.x == 0) {
      const u64 policy = stream_policy();
      for (int i = 0; i < UP_TILES; i++) {
        barrier_expect(full + i, BYTES);
        bulk_copy(memory + i * BYTES, (const u8 *)a.weight + (tile + i) * BYTES, BYTES, full + i,
                  policy);
      }
      pdl_trigger();
    }
    alpha[0] = a.alpha[(tile + threadIdx.x / 8) * 2];
    alpha[1] = a.alpha[(tile + threadIdx.x / 8) * 2 + 1];
  }
#pragma unroll 1
  for (int i = 0; i < UP_TILES; i++) {
    barrier_wait(full + i, 0);
    tile_rows<NVFP4, HIDDEN>(memory + i * BYTES, xs, red[i][threadIdx.x >> 5]);
  }
  __syncthreads();
  if (threadIdx.x < UP_TILES * 8) {
    const int i = threadIdx.x / 8, row = threadIdx.x % 8;
    float gate = 0.f, up = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
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
  constexpr int GROUPS = WIDTH / 128, TILES = HIDDEN / 16;
  __shared__ float red[ROWS_PER_TOKEN][16];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, tile = blockIdx.x;
  int id;
  float weight;
  const float before = a.x[tile * 16 + lane % 16];
  top_experts(a.logits, id, weight);
  const bool shared = warp == TOP_K;
  const size_t where = (shared ? 0 : (size_t)__shfl_sync(~0u, id, warp) * TILES) + tile;
  weight = shared ? sigmoid(a.logits[EXPERTS]) : __shfl_sync(~0u, weight, warp);
  const u8 *w = (const u8 *)(shared ? a.shared_weight : a.weight) + where * GROUPS * GROUP_BYTES;
  const float *alpha = (shared ? a.shared_alpha : a.alpha) + where * 2;
  uint4 q[GROUPS][2];
  u32 s[GROUPS];
#pragma unroll
  for (int i = 0; i < GROUPS; i++) {
    const uint4 *codes = (const uint4 *)(w + i * GROUP_BYTES) + lane;
    q[i][0] = load_stream(codes);
    q[i][1] = load_stream(codes + 32);
    s[i] = load_stream((const u32 *)(w + i * GROUP_BYTES + GROUP_CODES) + lane);
  }
  const float scale[2] = {alpha[0] * weight / H_SCALE, alpha[1] * weight / H_SCALE};
  pdl_wait();
  pdl_trigger();
  float acc[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int i = 0; i < GROUPS; i++) {
    const uint2 b = *(const uint2 *)(a.h + warp * WIDTH + i * 128 + 4 * lane);
    dot_group<1>(q[i], s + i, &b, acc);
  }
  fold_columns<1>(acc);
  if ((lane & 3) == 0) {
    red[warp][lane >> 2] = acc[0] * FP4_UNIT * scale[0];
    red[warp][8 + (lane >> 2)] = acc[2] * FP4_UNIT * scale[1];
  }
  __syncthreads();
  if (threadIdx.x < 16) {
    float v = before;
#pragma unroll
    for (int e = 0; e < ROWS_PER_TOKEN; e++) v += red[e][threadIdx.x];
    a.x[tile * 16 + threadIdx.x] = v;
  }
}

// Logits of one token: a warp owns a tile, 512 columns a stage through the warp's own queue.
#define HEAD_STAGES 2
#define HEAD_BYTES (4 * GROUP_BYTES)
extern "C" __global__ void __launch_bounds__(SINGLE_THREADS, 2) single_head(const SingleArgs a) {
  constexpr int PIECES = HIDDEN / 512;
  extern __shared__ __align__(128) u8 memory[];
  __shared__ __align__(16) u16 xs[HIDDEN];
  __shared__ __align__(8) u64 barriers[WARPS][HEAD_STAGES];
  __shared__ float scratch[WARPS];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, first = blockIdx.x * WARPS + warp;
  const int stride = gridDim.x * WARPS;
  const int pieces = (a.tiles - first + stride - 1) / stride * PIECES;
  const u64 policy = stream_policy();
  u8 *mine = memory + warp * HEAD_STAGES * HEAD_BYTES;
  const auto request = [&](int p) {
    if (p >= pieces) return;
    const size_t index = (first + (size_t)(p / PIECES) * stride) * PIECES + p % PIECES;
    u64 *barrier = barriers[warp] + p % HEAD_STAGES;
    barrier_expect(barrier, HEAD_BYTES);
    bulk_copy(mine + p % HEAD_STAGES * HEAD_BYTES, (const u8 *)a.weight + index * HEAD_BYTES,
              HEAD_BYTES, barrier, policy);
  };
  if (lane == 0) {
    for (int s = 0; s < HEAD_STAGES; s++) barrier_init(barriers[warp] + s, 1);
    barrier_fence();
    for (int s = 0; s < HEAD_STAGES; s++) request(s);
  }
  const NormWeights norm = load_norm(a.norm);
  pdl_wait();
  pdl_trigger();
  norm_to_shared(a.x, norm, a.eps, xs, scratch);
  float acc[4], top = 0.f, bottom = 0.f;
#pragma unroll 1
  for (int p = 0; p < pieces; p++) {
    const int tile = first + p / PIECES * stride, stage = p % HEAD_STAGES;
    if (p % PIECES == 0) {
      acc[0] = acc[1] = acc[2] = acc[3] = 0.f;
      top = a.alpha[tile * 2] * FP4_UNIT;
      bottom = a.alpha[tile * 2 + 1] * FP4_UNIT;
    }
    barrier_wait(barriers[warp] + stage, p / HEAD_STAGES & 1);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint2 b = *(const uint2 *)(xs + p % PIECES * 512 + i * 128 + 4 * lane);
      dot_group_at<1>(mine + stage * HEAD_BYTES + i * GROUP_BYTES, &b, acc);
    }
    __syncwarp();
    if (lane == 0) request(p + HEAD_STAGES);
    if (p % PIECES < PIECES - 1) continue;
    fold_columns<1>(acc);
    if ((lane & 3) == 0) {
      a.y[tile * 16 + (lane >> 2)] = acc[0] * top;
      a.y[tile * 16 + 8 + (lane >> 2)] = acc[2] * bottom;
    }
  }
}
