// Products of one token. A block owns whole row tiles, its sixteen warps split K; the weights come
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
#define SINGLE_THREADS 512
#define WARPS 16
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

// Norm of each value head times SiLU of the gate; sixteen neighbouring threads own a head.
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

// One warp's K slice of COUNT tiles in shared memory -> 16 row sums each, at red[tile][warp].
template <int KIND, int K, int COUNT>
__device__ __forceinline__ void tile_rows(const u8 *const *tiles, const u16 *xs,
                                          float (*red)[WARPS][16]) {
  constexpr int CHUNK = KIND == FP8 ? 32 : KIND == NVFP4 ? 128 : 16, CH = K / WARPS / CHUNK;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const u16 *x = xs + warp * (K / WARPS) + 4 * t;
  float acc[COUNT][4][4] = {};
#pragma unroll 8
  for (int c = 0; c < CH; c++)
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      if (KIND == NVFP4) {
        dot_group(tiles[i] + (warp * CH + c) * GROUP_BYTES, x + c * 128, acc[i]);
        continue;
      }
      const uint4 v = ((const uint4 *)tiles[i])[(warp * CH + c) * 32 + lane];
      u32 a[4] = {v.x, v.y, v.z, v.w};
      if (KIND == F16) {
        mma(acc[i][c & 3], a, *(const uint2 *)(x + c * 16));
      } else {
        unpack_fp8(v.x, v.y, a);
        mma(acc[i][c & 1 ? 2 : 0], a, *(const uint2 *)(x + c * 32));
        unpack_fp8(v.z, v.w, a);
        mma(acc[i][c & 1 ? 3 : 1], a, *(const uint2 *)(x + c * 32 + 16));
      }
    }
  const float unit = KIND == NVFP4 ? FP4_UNIT : 1.f;
#pragma unroll
  for (int i = 0; i < COUNT; i++)
    if (t == 0) {  // every column holds the same token
      red[i][warp][g] = four_sum(acc[i], 0) * unit;
      red[i][warp][g + 8] = four_sum(acc[i], 2) * unit;
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
  // Two tiles at a time, so that their products overlap.
#pragma unroll 1
  for (int i = 0; i < count; i += 2) {
    const int pair = min(2, count - i);
    const u8 *tiles[2] = {memory + i % STAGES * tile_bytes(KIND, K),
                          memory + (i + 1) % STAGES * tile_bytes(KIND, K)};
    barrier_wait(full + i % STAGES, i / STAGES & 1);
    if (pair == 2) barrier_wait(full + (i + 1) % STAGES, (i + 1) / STAGES & 1);
    if (STAGES > 1 && pair == 2) tile_rows<KIND, K, STAGES == 1 ? 1 : 2>(tiles, xs, red + i);
    else tile_rows<KIND, K, 1>(tiles, xs, red + i);
    if (i + STAGES >= count) continue;
    __syncwarp();
    for (int j = 0; j < pair && i + j + STAGES < count; j++) {
      if ((threadIdx.x & 31) == 0) barrier_arrive(empty + (i + j) % STAGES);
      if (threadIdx.x == 0) {
        barrier_wait(empty + (i + j) % STAGES, (i + j) / STAGES & 1);
        request(i + j + STAGES);
        if (i + j + STAGES == count - 1) pdl_trigger();
      }
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
  extern "C" __global__ void __launch_bounds__(SINGLE_THREADS) name(const SingleArgs a) {   \
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
extern "C" __global__ void __launch_bounds__(SINGLE_THREADS) single_gate_up(const ExpertArgs a) {
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
  for (int i = 0; i < UP_TILES; i += 2) {
    barrier_wait(full + i, 0);
    barrier_wait(full + i + 1, 0);
    const u8 *tiles[2] = {memory + i * BYTES, memory + (i + 1) * BYTES};
    tile_rows<NVFP4, HIDDEN, 2>(tiles, xs, red + i);
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
// Block: one row tile; two warps share an expert. The routing was finished two kernels ago.
#define DOWN_WARPS (2 * ROWS_PER_TOKEN)
extern "C" __global__ void __launch_bounds__(DOWN_WARPS * 32) single_down(const ExpertArgs a) {
  constexpr int GROUPS = WIDTH / 128 / 2, TILES = HIDDEN / 16;
  __shared__ __align__(16) u16 hs[DOWN_WARPS][WIDTH / 2];
  __shared__ float red[DOWN_WARPS][16], weights[ROWS_PER_TOKEN];
  __shared__ int ids[ROWS_PER_TOKEN];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, tile = blockIdx.x;
  const int rank = warp / 2, half = warp % 2;
  const float before = a.x[tile * 16 + lane % 16];
  if (warp == 0) {
    int id;
    float weight;
    top_experts(a.logits, id, weight);
    if (lane < TOP_K) ids[lane] = id, weights[lane] = weight;
    if (lane == TOP_K) ids[lane] = 0, weights[lane] = sigmoid(a.logits[EXPERTS]);
  }
  __syncthreads();
  const bool shared = rank == TOP_K;
  const size_t where = (size_t)ids[rank] * TILES + tile;
  const float weight = weights[rank];
  const u8 *w = (const u8 *)(shared ? a.shared_weight : a.weight) +
                (where * 2 + half) * GROUPS * GROUP_BYTES;
  const float *alpha = (shared ? a.shared_alpha : a.alpha) + where * 2;
  uint4 q[GROUPS][2], s[GROUPS];
#pragma unroll
  for (int i = 0; i < GROUPS; i++) {
    const uint4 *codes = (const uint4 *)(w + i * GROUP_BYTES) + lane;
    q[i][0] = load_stream(codes);
    q[i][1] = load_stream(codes + 32);
    s[i] = load_stream((const uint4 *)(w + i * GROUP_BYTES + GROUP_CODES) + (lane >> 2));
  }
  const float scale[2] = {alpha[0] * weight / H_SCALE, alpha[1] * weight / H_SCALE};
  pdl_wait();
  pdl_trigger();
  *(uint4 *)(hs[warp] + lane * 8) = *(const uint4 *)(a.h + warp * (WIDTH / 2) + lane * 8);
  __syncwarp();
  float acc[4][4] = {};
#pragma unroll
  for (int i = 0; i < GROUPS; i++) dot_group(q[i], s[i], hs[warp] + i * 128 + 4 * (lane & 3), acc);
  if ((lane & 3) == 0) {
    red[warp][lane >> 2] = four_sum(acc, 0) * FP4_UNIT * scale[0];
    red[warp][8 + (lane >> 2)] = four_sum(acc, 2) * FP4_UNIT * scale[1];
  }
  __syncthreads();
  if (threadIdx.x < 16) {
    float v = before;
#pragma unroll
    for (int e = 0; e < DOWN_WARPS; e++) v += red[e][threadIdx.x];
    a.x[tile * 16 + threadIdx.x] = v;
  }
}

// Logits of one token: a warp owns a tile, 512 columns a stage through the warp's own queue.
#define HEAD_STAGES 2
#define HEAD_BYTES (4 * GROUP_BYTES)
extern "C" __global__ void __launch_bounds__(SINGLE_THREADS) single_head(const SingleArgs a) {
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
  float acc[4][4], top = 0.f, bottom = 0.f;
#pragma unroll 1
  for (int p = 0; p < pieces; p++) {
    const int tile = first + p / PIECES * stride, stage = p % HEAD_STAGES;
    if (p % PIECES == 0) {
#pragma unroll
      for (int i = 0; i < 16; i++) acc[i / 4][i % 4] = 0.f;
      top = a.alpha[tile * 2] * FP4_UNIT;
      bottom = a.alpha[tile * 2 + 1] * FP4_UNIT;
    }
    barrier_wait(barriers[warp] + stage, p / HEAD_STAGES & 1);
#pragma unroll
    for (int i = 0; i < 4; i++)
      dot_group(mine + stage * HEAD_BYTES + i * GROUP_BYTES,
                xs + p % PIECES * 512 + i * 128 + 4 * (lane & 3), acc);
    __syncwarp();
    if (lane == 0) request(p + HEAD_STAGES);
    if (p % PIECES < PIECES - 1) continue;
    if ((lane & 3) == 0) {
      a.y[tile * 16 + (lane >> 2)] = four_sum(acc, 0) * top;
      a.y[tile * 16 + 8 + (lane >> 2)] = four_sum(acc, 2) * bottom;
    }
  }
}
