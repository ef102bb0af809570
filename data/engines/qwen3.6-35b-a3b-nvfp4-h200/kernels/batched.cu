// Products of up to 8, 16 or 32 rows (NT = rows / 8). A block owns TILES row tiles over K_LENGTH
// columns; weights and activations come through a queue of bulk copies, 256 columns a stage. The
// eight warps split each stage's columns, so an activation fragment serves all tiles.

#define BATCH_THREADS 256
#define WARPS 8
#define STAGES 3

enum { FP8, NVFP4, F16 };
enum { STORE, PARTIAL, SWIGLU };

struct BatchArgs {
  const uint4 *weight;
  const float *alpha;
  const uint4 *weight16;  // second matrix in fp16, one tile a block
  const float *alpha16;
  const u16 *x;           // fp16, see activation_index
  float *y, *y16;         // [rows, ld], [rows, ld16]; PARTIAL: [K / K_LENGTH, 32, ld]
  u16 *h;                 // SWIGLU: [rows * ROWS_PER_TOKEN, WIDTH]
  int tiles, tiles16, blocks_main, ld, ld16;
};

constexpr int stage_tile(int kind) { return X_COLUMNS * (kind == F16 ? 32 : kind == FP8 ? 16 : 9); }

// A operands of this warp's two 16 x 16 blocks of a tile: columns warp * 32 .. + 31 of the stage.
template <int KIND> __device__ __forceinline__ void load_blocks(const u8 *tile, u32 (*f)[4]) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (KIND == FP8) {
    const uint4 v = ((const uint4 *)tile)[warp * 32 + lane];
    unpack_fp8(v.x, v.y, f[0]);
    unpack_fp8(v.z, v.w, f[1]);
  } else if (KIND == F16) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const uint4 v = ((const uint4 *)tile)[(warp * 2 + j) * 32 + lane];
      f[j][0] = v.x, f[j][1] = v.y, f[j][2] = v.z, f[j][3] = v.w;
    }
  } else {  // half a 64-column chunk; its scale word holds both blocks of rows g and g + 8
    const u8 *group = tile + (warp >> 2) * GROUP_BYTES;
    const uint2 v = ((const uint2 *)group)[((warp >> 1 & 1) * 32 + lane) * 2 + (warp & 1)];
    scaled_blocks(v.x, v.y, ((const u32 *)(group + GROUP_CODES))[(lane >> 2) * 4 + (warp & 3)], f);
  }
}

// Sums of `count` tiles from column k0 on, left in `memory` as [tile][row][token][warp].
template <int KIND, int K, int K_LENGTH, int NT, int TILES>
__device__ __forceinline__ void block_tiles(const uint4 *weight, const BatchArgs &a, int first,
                                            int count, int k0, u8 *memory, u64 *full, u64 *empty) {
  constexpr int STEPS = K_LENGTH / X_COLUMNS, X_BYTES = NT * 8 * X_STRIDE * 2;
  constexpr int STAGE_BYTES = X_BYTES + TILES * stage_tile(KIND);
  constexpr int TILE_BYTES = stage_tile(KIND) * (K / X_COLUMNS);
  static_assert(TILES < WARPS, "a warp asks for one of them");
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const u64 policy = stream_policy();
  // A warp asks for one tile of a stage, the last for the activations: requests of one thread take
  // some 90 clocks each.
  const bool asks = lane == 0 && warp < count, asks_x = lane == 0 && warp == WARPS - 1;
  const auto request_weights = [&](int step) {
    u64 *barrier = full + step % STAGES;
    barrier_expect(barrier, stage_tile(KIND));
    bulk_copy(memory + step % STAGES * STAGE_BYTES + X_BYTES + warp * stage_tile(KIND),
              (const u8 *)weight + (size_t)(first + warp) * TILE_BYTES + (k0 / X_COLUMNS + step) * stage_tile(KIND),
              stage_tile(KIND), barrier, policy);
  };
  const auto request_x = [&](int step) {
    barrier_expect(full + step % STAGES, X_BYTES);
    bulk_copy(memory + step % STAGES * STAGE_BYTES, a.x + (size_t)(k0 / X_COLUMNS + step) * 32 * X_STRIDE,
              X_BYTES, full + step % STAGES);
  };
  if (asks)
    for (int s = 0; s < min(STAGES, STEPS); s++) request_weights(s);
  pdl_wait();
  pdl_trigger();
  if (asks_x) {
    asm volatile("fence.proxy.async.global;" ::: "memory");  // x was written by ordinary stores
    for (int s = 0; s < min(STAGES, STEPS); s++) request_x(s);
  }
  float acc[TILES][NT][4] = {};
#pragma unroll 1
  for (int step = 0; step < STEPS; step++) {
    const int stage = step % STAGES;
    barrier_wait(full + stage, step / STAGES & 1);
    const u16 *xs = (const u16 *)(memory + stage * STAGE_BYTES) + warp * 32;
    const u8 *tiles = memory + stage * STAGE_BYTES + X_BYTES;
    uint2 b[2][NT];
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
      for (int n = 0; n < NT; n++)
        b[j][n] = *(const uint2 *)(xs + (n * 8 + g) * X_STRIDE + j * 16 + 4 * t);
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      if (i >= count) break;
      u32 f[2][4];
      load_blocks<KIND>(tiles + i * stage_tile(KIND), f);
#pragma unroll
      for (int j = 0; j < 2; j++)
#pragma unroll
        for (int n = 0; n < NT; n++) mma(acc[i][n], f[j], b[j][n]);
    }
    if (step + STAGES >= STEPS) continue;
    __syncwarp();
    if (lane == 0) barrier_arrive(empty + stage);
    if (asks || asks_x) barrier_wait(empty + stage, step / STAGES & 1);
    if (asks) request_weights(step + STAGES);
    if (asks_x) request_x(step + STAGES);
  }
  __syncthreads();  // all stages are consumed: their memory takes the sums
  float *sums = (float *)memory;
#pragma unroll
  for (int i = 0; i < TILES; i++)
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int c = 0; c < 4; c++)
        sums[((i * WARPS + warp) * NT * 8 + n * 8 + 2 * t + c % 2) * 17 + g + c / 2 * 8] = acc[i][n][c];
  __syncthreads();
}

template <int KIND, int K, int K_LENGTH, int NT, int TILES, int EPI>
__device__ __forceinline__ void batched_linear(const BatchArgs &a) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ __align__(8) u64 full[STAGES], empty[STAGES];
  const bool second = blockIdx.x >= a.blocks_main;
  const int first = second ? blockIdx.x - a.blocks_main : blockIdx.x * TILES;
  const int count = second ? 1 : min(TILES, a.tiles - first), part = blockIdx.y;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(full + s, count + 1);
      barrier_init(empty + s, WARPS);
    }
    barrier_fence();
  }
  __syncthreads();
  if (EPI != PARTIAL && second)
    block_tiles<F16, K, K_LENGTH, NT, 1>(a.weight16, a, first, 1, 0, memory, full, empty);
  else
    block_tiles<KIND, K, K_LENGTH, NT, TILES>(a.weight, a, first, count, part * K_LENGTH, memory, full,
                                              empty);
  const float *sums = (const float *)memory;
  const bool swiglu = EPI == SWIGLU && !second;
  const int rows = swiglu ? 8 : 16;
  const float *alpha = second ? a.alpha16 : a.alpha;
  const float unit = KIND == NVFP4 && !second ? FP4_UNIT : 1.f;
  for (int o = threadIdx.x; o < count * NT * 8 * rows; o += BATCH_THREADS) {
    const int row = o % rows, token = o / rows % (NT * 8), i = o / rows / (NT * 8);
    const float *p = sums + (i * WARPS * NT * 8 + token) * 17 + row;
    float v = 0.f, up = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      v += p[w * NT * 8 * 17];
      if (swiglu) up += p[w * NT * 8 * 17 + 8];
    }
    const int tile = first + i, column = tile * 16 + row;
    v *= unit * alpha[tile * 2 + row / 8];
    if (second) a.y16[(size_t)token * a.ld16 + column] = v;
    else if (EPI == STORE) a.y[(size_t)token * a.ld + column] = v;
    else if (EPI == PARTIAL) a.y[((size_t)part * 32 + token) * a.ld + column] = v;
    else
      a.h[((size_t)token * ROWS_PER_TOKEN + TOP_K) * WIDTH + tile * 8 + row] =
          to_half(silu(v) * up * unit * alpha[tile * 2 + 1] * H_SCALE);
  }
}

#define BATCHED(name, kind, k, length, nt, tiles, epi)                                         \
  extern "C" __global__ void __launch_bounds__(BATCH_THREADS) name##_##nt(const BatchArgs a) { \
    batched_linear<kind, k, length, nt, tiles, epi>(a);                                        \
  }
#define SIZES(name, kind, k, length, tiles, epi)   \
  BATCHED(name, kind, k, length, 1, tiles, epi)    \
  BATCHED(name, kind, k, length, 2, tiles, epi)    \
  BATCHED(name, kind, k, length, 4, tiles, epi)
SIZES(batched_in, FP8, HIDDEN, HIDDEN, IN_TILES, STORE)
SIZES(batched_qkv, FP8, HIDDEN, HIDDEN, QKV_TILES, STORE)
SIZES(batched_out, FP8, VALUE_WIDTH, (VALUE_WIDTH / OUT_PARTS), OUT_TILES, PARTIAL)
SIZES(batched_router, NVFP4, HIDDEN, HIDDEN, ROUTER_TILES, SWIGLU)

// Logits of up to NT * 8 rows: all activations stay in shared memory; a warp owns HEAD_TILES
// neighbouring tiles, 128 columns at a time through its own queue.
#define HEAD_TILES 2
#define HEAD_WARPS 16
#define HEAD_STAGES 2
#define HEAD_BYTES (HEAD_TILES * GROUP_BYTES)
template <int NT> __device__ __forceinline__ void batched_head(const BatchArgs &a) {
  constexpr int PIECES = HIDDEN / 128, BLOCKS = HIDDEN / X_COLUMNS, X_BYTES = NT * 8 * X_STRIDE * 2;
  extern __shared__ __align__(128) u8 memory[];
  __shared__ __align__(8) u64 barriers[HEAD_WARPS][HEAD_STAGES], x_full;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int groups = a.tiles / HEAD_TILES, first = blockIdx.x * HEAD_WARPS + warp;
  const int stride = gridDim.x * HEAD_WARPS;
  const int steps = (groups - first + stride - 1) / stride * PIECES;
  const u64 policy = stream_policy();
  u8 *mine = memory + BLOCKS * X_BYTES + warp * HEAD_STAGES * HEAD_BYTES;
  const auto request = [&](int step) {  // lanes 0 .. HEAD_TILES - 1: a tile each
    if (step >= steps) return;
    const int stage = step % HEAD_STAGES;
    if (lane == 0) barrier_expect(barriers[warp] + stage, HEAD_BYTES);
    __syncwarp();
    if (lane >= HEAD_TILES) return;
    const size_t tile = (size_t)(first + step / PIECES * stride) * HEAD_TILES + lane;
    const size_t piece = tile * PIECES + step % PIECES;
    bulk_copy(mine + stage * HEAD_BYTES + lane * GROUP_BYTES, (const u8 *)a.weight + piece * GROUP_BYTES,
              GROUP_BYTES, barriers[warp] + stage, policy);
  };
  if (lane == 0) {
    for (int s = 0; s < HEAD_STAGES; s++) barrier_init(barriers[warp] + s, 1);
    if (warp == 0) barrier_init(&x_full, 1);
    barrier_fence();
  }
  __syncthreads();
  for (int s = 0; s < HEAD_STAGES; s++) request(s);
  pdl_wait();
  pdl_trigger();
  if (threadIdx.x == 0) {
    asm volatile("fence.proxy.async.global;" ::: "memory");
    barrier_expect(&x_full, BLOCKS * X_BYTES);
    for (int b = 0; b < BLOCKS; b++)
      bulk_copy(memory + b * X_BYTES, a.x + (size_t)b * 32 * X_STRIDE, X_BYTES, &x_full);
  }
  barrier_wait(&x_full, 0);
  float acc[HEAD_TILES][NT][4];
#pragma unroll 1
  for (int step = 0; step < steps; step++) {
    const int stage = step % HEAD_STAGES, piece = step % PIECES;
    if (piece == 0)
#pragma unroll
      for (int i = 0; i < HEAD_TILES; i++)
#pragma unroll
        for (int n = 0; n < NT; n++) acc[i][n][0] = acc[i][n][1] = acc[i][n][2] = acc[i][n][3] = 0.f;
    barrier_wait(barriers[warp] + stage, step / HEAD_STAGES & 1);
    const u8 *pieces = mine + stage * HEAD_BYTES;
    const u16 *xs = (const u16 *)(memory + piece * 128 / X_COLUMNS * X_BYTES) + piece * 128 % X_COLUMNS;
#pragma unroll 1
    for (int j = 0; j < 8; j += 2) {
      uint2 b[2][NT];
#pragma unroll
      for (int k = 0; k < 2; k++)
#pragma unroll
        for (int n = 0; n < NT; n++)
          b[k][n] = *(const uint2 *)(xs + (n * 8 + g) * X_STRIDE + (j + k) * 16 + 4 * t);
#pragma unroll
      for (int i = 0; i < HEAD_TILES; i++) {
        const uint2 v = ((const uint2 *)(pieces + i * GROUP_BYTES))[(j / 4 * 32 + lane) * 2 + (j / 2 & 1)];
        u32 f[2][4];
        scaled_blocks(v.x, v.y, ((const u32 *)(pieces + i * GROUP_BYTES + GROUP_CODES))[g * 4 + j / 2], f);
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
          for (int n = 0; n < NT; n++) mma(acc[i][n], f[k], b[k][n]);
      }
    }
    __syncwarp();
    request(step + HEAD_STAGES);
    if (piece < PIECES - 1) continue;
#pragma unroll
    for (int i = 0; i < HEAD_TILES; i++) {
      const int tile = (first + step / PIECES * stride) * HEAD_TILES + i;
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const float unit = FP4_UNIT * a.alpha[tile * 2 + c / 2];
#pragma unroll
        for (int n = 0; n < NT; n++)
          a.y[(size_t)(n * 8 + 2 * t + c % 2) * a.ld + tile * 16 + g + c / 2 * 8] = acc[i][n][c] * unit;
      }
    }
  }
}
#define HEAD(nt)                                                                              \
  extern "C" __global__ void __launch_bounds__(HEAD_WARPS * 32) head_##nt(const BatchArgs a) {  \
    batched_head<nt>(a);                                                                      \
  }
HEAD(1)
HEAD(2)
HEAD(4)
