// Routed experts of a prompt: a block walks over items, 32 row tiles of an expert times up to
// PROMPT_UNIT of its rows. Four warps stream weights and activations, each its share of every stage, for one
// thread's requests take some 90 clocks each; sixteen multiply, two tiles each, so that weights are decoded
// once and an activation fragment serves two products. Units come with most rows first and blocks take
// them forth and back, so that all end together. The first eight warps take the first
// half of the tiles, the others the second: a stage is half an item's tiles and 256 columns.

#define ITEM_TILES 32
#define TILE_BYTES (2 * GROUP_BYTES)             // of a stage
#define WEIGHT_BYTES (ITEM_TILES / 2 * TILE_BYTES)
#define X_BYTES (PROMPT_UNIT * X_STRIDE * 2)
#define WEIGHT_STAGES 4
#define X_STAGES 2
#define WARPS 16
#define PRODUCERS 4

struct PromptMoeArgs {
  const u8 *weight;
  const float *alpha;
  const int *units, *members;  // see prompt.cu; a member is row * TOP_K + rank
  const u16 *x;                // gate_up: [rows, HIDDEN]; down: h
  u16 *out;                    // gate_up: h [rows * TOP_K, WIDTH]; down: [rows * TOP_K, HIDDEN]; times H_SCALE
};

struct Item {
  int count;   // rows
  int tile;    // first row tile in the stacked matrix
  int members[PROMPT_UNIT];
};

struct Queues {
  u64 full[WEIGHT_STAGES], empty[WEIGHT_STAGES], x_full[X_STAGES], x_empty[X_STAGES];
  Item items[X_STAGES];
};

// The item of a turn: forth, then back.
__device__ __forceinline__ int item_of(int turn) {
  return turn * gridDim.x + (turn & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

template <int K, int TILES, bool GATE_UP>
__device__ __forceinline__ void produce(const PromptMoeArgs &a, int items, u8 *memory, Queues &m) {
  constexpr int PARTS = TILES / ITEM_TILES, OWN = ITEM_TILES / 2 / PRODUCERS;
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) - WARPS, row = warp + lane * PRODUCERS;
  const u64 policy = stream_policy();
  u32 sent = 0, x_sent = 0;
  const auto request_weights = [&](int tile, int step, int half) {
    const int stage = sent % WEIGHT_STAGES, own = warp * OWN + lane;
    barrier_wait(m.empty + stage, (sent++ / WEIGHT_STAGES & 1) ^ 1);
    if (lane == 0) barrier_expect(m.full + stage, OWN * TILE_BYTES);
    __syncwarp();
    if (lane < OWN)
      bulk_copy(memory + stage * WEIGHT_BYTES + own * TILE_BYTES,
                a.weight + ((size_t)(tile + half * (ITEM_TILES / 2) + own) * (K / X_COLUMNS) + step) * TILE_BYTES,
                TILE_BYTES, m.full + stage, policy);
  };
  if (!GATE_UP) {  // the first item's weights need not wait for its activations: lists are older by a kernel
    static_assert(GATE_UP || 2 * (K / X_COLUMNS) == WEIGHT_STAGES, "an item fills the stages");
    const int item = item_of(0);
    if (item < items)
      for (int i = 0; i < WEIGHT_STAGES; i++)
        request_weights(a.units[1 + item / PARTS * 3] * TILES + item % PARTS * ITEM_TILES, i / 2, i % 2);
    pdl_wait();
  }
  asm volatile("fence.proxy.async.global;" ::: "memory");  // x was written by ordinary stores
  for (int turn = 0, item; (item = item_of(turn)) < items; turn++) {
    const int *unit = a.units + 1 + item / PARTS * 3;
    const int count = unit[2], tile = unit[0] * TILES + item % PARTS * ITEM_TILES;
    const int member = row < count ? a.members[unit[1] + row] : 0;
    const u16 *x = a.x + (size_t)(GATE_UP ? member / TOP_K : member) * K;
    for (int step = 0; step < K / X_COLUMNS; step++, x_sent++) {
      const int slot = x_sent % X_STAGES;
      barrier_wait(m.x_empty + slot, (x_sent / X_STAGES & 1) ^ 1);
      if (row < count) m.items[slot].members[row] = member;
      if (warp == 0 && lane == 0) m.items[slot].count = count, m.items[slot].tile = tile;
      __syncwarp();
      if (lane == 0)
        barrier_expect(m.x_full + slot, max(0, (count - warp + PRODUCERS - 1) / PRODUCERS) * X_COLUMNS * 2);
      __syncwarp();
      if (row < count)
        bulk_copy(memory + WEIGHT_STAGES * WEIGHT_BYTES + slot * X_BYTES + row * X_STRIDE * 2, x + step * X_COLUMNS,
                  X_COLUMNS * 2, m.x_full + slot);
      if (GATE_UP || turn)
        for (int half = 0; half < 2; half++) request_weights(tile, step, half);
    }
  }
}

// Lane (g, t) holds rows 8 n + 2t, + 1 of a unit, of tile rows g and g + 8.
template <int TILES, bool GATE_UP>
__device__ __forceinline__ void finish_tile(const PromptMoeArgs &a, const Item &item, int tile, float (*acc)[4]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, within = tile % TILES;
  const float top = a.alpha[tile * 2] * FP4_UNIT, bottom = a.alpha[tile * 2 + 1] * FP4_UNIT;
#pragma unroll
  for (int n = 0; n < PROMPT_UNIT / 8; n++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = n * 8 + 2 * t + i;
      if (row >= item.count) continue;
      const size_t member = item.members[row];
      const float first = acc[n][i] * top, second = acc[n][2 + i] * bottom;
      if (GATE_UP) {
        a.out[member * WIDTH + within * 8 + g] = to_half(silu(first) * second * H_SCALE);
      } else {
        u16 *out = a.out + member * HIDDEN + within * 16 + g;
        out[0] = to_half(first);  // h bears H_SCALE
        out[8] = to_half(second);
      }
    }
}

// Two neighbouring tiles times NT tiles of up to eight rows over a stage's columns; x: this lane's first
// activation. Columns of missing rows are never read.
template <int NT>
__device__ __forceinline__ void multiply(const u8 *tile, const u16 *x, float (*acc)[PROMPT_UNIT / 8][4]) {
  const int lane = threadIdx.x & 31, g = lane >> 2;
#pragma unroll 1
  for (int pair = 0; pair < 4; pair++, x += 64) {  // 64 columns
    const u8 *group = tile + pair / 2 * GROUP_BYTES;
    uint4 codes[2];
    uint2 scales[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      codes[j] = ((const uint4 *)(group + j * TILE_BYTES))[pair % 2 * 32 + lane];
      scales[j] = ((const uint2 *)(group + j * TILE_BYTES + GROUP_CODES))[g * 2 + pair % 2];
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      u32 f[2][2][4];
#pragma unroll
      for (int j = 0; j < 2; j++)
        scaled_blocks(i ? codes[j].z : codes[j].x, i ? codes[j].w : codes[j].y, i ? scales[j].y : scales[j].x, f[j]);
#pragma unroll
      for (int k = 0; k < 2; k++)
#pragma unroll
        for (int n = 0; n < NT; n++) {
          const uint2 b = *(const uint2 *)(x + n * 8 * X_STRIDE + i * 32 + k * 16);
          mma(acc[0][n], f[0][k], b);
          mma(acc[1][n], f[1][k], b);
        }
    }
  }
}

template <int K, int TILES, bool GATE_UP> __device__ __forceinline__ void prompt_items(const PromptMoeArgs &a) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ Queues m;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  if (threadIdx.x == 0) {
    for (int s = 0; s < WEIGHT_STAGES; s++) {
      barrier_init(m.full + s, PRODUCERS);
      barrier_init(m.empty + s, WARPS / 2);
    }
    for (int s = 0; s < X_STAGES; s++) {
      barrier_init(m.x_full + s, PRODUCERS);
      barrier_init(m.x_empty + s, WARPS);
    }
    barrier_fence();
  }
  __syncthreads();
  if (GATE_UP) pdl_wait();
  pdl_trigger();
  const int items = a.units[0] * (TILES / ITEM_TILES);
  if (warp >= WARPS) {  // registers are dealt to groups of four warps
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    produce<K, TILES, GATE_UP>(a, items, memory, m);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
  if (!GATE_UP) pdl_wait();
  const int half = warp / 8, own = warp % 8 * 2;  // tiles own, own + 1 of every other stage
  u32 seen = 0;
  for (int turn = 0; item_of(turn) < items; turn++) {
    float acc[2][PROMPT_UNIT / 8][4] = {};
    for (int step = 0; step < K / X_COLUMNS; step++, seen++) {
      const int slot = seen % X_STAGES, use = 2 * seen + half, stage = use % WEIGHT_STAGES;
      barrier_wait(m.x_full + slot, seen / X_STAGES & 1);
      barrier_wait(m.full + stage, use / WEIGHT_STAGES & 1);
      const int tiles_of_rows = (m.items[slot].count + 7) / 8;
      const u8 *tile = memory + stage * WEIGHT_BYTES + own * TILE_BYTES;
      const u16 *x = (const u16 *)(memory + WEIGHT_STAGES * WEIGHT_BYTES + slot * X_BYTES) + g * X_STRIDE + 4 * t;
      switch (tiles_of_rows) {
        case 1: multiply<1>(tile, x, acc); break;
        case 2: multiply<2>(tile, x, acc); break;
        case 3: multiply<3>(tile, x, acc); break;
        case 4: multiply<4>(tile, x, acc); break;
        case 5: multiply<5>(tile, x, acc); break;
        default: multiply<PROMPT_UNIT / 8>(tile, x, acc);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(m.empty + stage);
      if (step == K / X_COLUMNS - 1)
#pragma unroll
        for (int j = 0; j < 2; j++)
          finish_tile<TILES, GATE_UP>(a, m.items[slot], m.items[slot].tile + half * (ITEM_TILES / 2) + own + j, acc[j]);
      __syncwarp();
      if (lane == 0) barrier_arrive(m.x_empty + slot);
    }
  }
}

#define PROMPT_MOE_THREADS ((WARPS + PRODUCERS) * 32)
extern "C" __global__ void __launch_bounds__(PROMPT_MOE_THREADS, 1) prompt_gate_up(const PromptMoeArgs a) {
  prompt_items<HIDDEN, WIDTH / 8, true>(a);
}
extern "C" __global__ void __launch_bounds__(PROMPT_MOE_THREADS, 1) prompt_down(const PromptMoeArgs a) {
  prompt_items<WIDTH, HIDDEN / 16, false>(a);
}
