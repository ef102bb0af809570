// Routed experts for many rows. `route` lists units, up to eight rows of one expert each; warps own
// (unit, row tile) pairs, whose weights come through the warp's own queue of bulk copies.

#define UNIT_ROWS 8

struct RouteArgs {
  const float *logits;     // [rows, LOGITS_LD]
  const int *row_slot;     // rows of the scratch slot choose no expert
  float *weights;          // [rows, ROWS_PER_TOKEN]: eight softmax weights, the shared gate
  int *units;              // [0]: how many; then (expert, first member, count) each
  int *members;            // row * ROWS_PER_TOKEN + rank, grouped by unit
  int *touched_sum;        // running total of touched experts, for statistics
  int rows, scratch;
};

// One block; a warp a row; at most 32 rows.
extern "C" __global__ void __launch_bounds__(1024) route(const RouteArgs a) {
  __shared__ u32 chosen[EXPERTS];             // bit r: row r chose this expert
  __shared__ u8 rank_of[32][EXPERTS];
  __shared__ int sums[3][EXPERTS / 32];
  const int row = threadIdx.x >> 5, lane = threadIdx.x & 31;
  pdl_wait();
  pdl_trigger();
  if (threadIdx.x < EXPERTS) chosen[threadIdx.x] = 0;
  __syncthreads();
  if (row < a.rows && a.row_slot[row] != a.scratch) {
    float value, logits[EXPERTS / 32];
#pragma unroll
    for (int i = 0; i < EXPERTS / 32; i++) logits[i] = a.logits[row * LOGITS_LD + lane + 32 * i];
    const int id = top_experts(logits, value);
    const float weight = expert_weight(value);
    if (lane < TOP_K) {
      a.weights[row * ROWS_PER_TOKEN + lane] = weight;
      atomicOr(&chosen[id], 1u << row);
      rank_of[row][id] = lane;
    }
    if (lane == TOP_K)
      a.weights[row * ROWS_PER_TOKEN + lane] = sigmoid(a.logits[row * LOGITS_LD + EXPERTS]);
  }
  __syncthreads();
  const int e = threadIdx.x;
  if (e >= EXPERTS) return;
  const u32 rows = chosen[e];
  const int count = __popc(rows);
  int before = count, unit = (count + UNIT_ROWS - 1) / UNIT_ROWS;  // inclusive scans over experts
  const int own_units = unit;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const int x = __shfl_up_sync(~0u, before, d), y = __shfl_up_sync(~0u, unit, d);
    if (lane >= d) before += x, unit += y;
  }
  const int touched = __popc(__ballot_sync(~0u, count > 0));
  if (lane == 31) sums[0][e >> 5] = before, sums[1][e >> 5] = unit, sums[2][e >> 5] = touched;
  asm volatile("bar.sync 1, %0;" ::"n"(EXPERTS));
  for (int w = 0; w < e >> 5; w++) before += sums[0][w], unit += sums[1][w];
  const int first = before - count;
  for (int i = 0; i < own_units; i++) {
    int *u = a.units + 1 + (unit - own_units + i) * 3;
    u[0] = e, u[1] = first + i * UNIT_ROWS, u[2] = min(count - i * UNIT_ROWS, UNIT_ROWS);
  }
  u32 left = rows;
  for (int i = 0; i < count; i++) {
    const int r = __ffs(left) - 1;
    left &= left - 1;
    a.members[first + i] = r * ROWS_PER_TOKEN + rank_of[r][e];
  }
  if (e == EXPERTS - 1) {
    a.units[0] = unit;
    int total = 0;
    for (int w = 0; w < EXPERTS / 32; w++) total += sums[2][w];
    *a.touched_sum += total;
  }
}

struct MoeArgs {
  const uint4 *weight;
  const float *alpha;
  const uint4 *shared_weight;  // down only
  const float *shared_alpha;
  const int *units, *members;
  const u16 *x;                // gate_up: normed rows; down: h
  u16 *h;                      // gate_up: [rows * ROWS_PER_TOKEN, WIDTH]
  float *out;                  // down: [rows * ROWS_PER_TOKEN, HIDDEN]
  int rows;
  int block_stride, row_stride;  // of x: column c of row r at c / 256 * block + r * row + c % 256
};

// Sixteen warps consume, four produce: a block walks over (unit, MOE_TILES row tiles) items, 512
// columns a stage. Producers read the lists and ask for weights and activations stages ahead, each for
// its share: lanes ask in turns, some 90 clocks each. Two consumers share a tile, each half of the
// stage's columns, and finish it by turns.
#define MOE_TILES 8
#define MOE_WARPS (2 * MOE_TILES)
#define MOE_PRODUCERS 4
#define MOE_STAGES 4
#define STAGE_K 512
#define TILE_BYTES (STAGE_K / 128 * GROUP_BYTES)
#define HALF_STRIDE (STAGE_K / 2 + 16)           // fp16 elements of a padded half row
#define HALF_BYTES (UNIT_ROWS * HALF_STRIDE * 2)
#define STAGE_BYTES (MOE_TILES * TILE_BYTES + 2 * HALF_BYTES)

struct Item {
  int count;               // rows
  int shared;              // 1: of the shared expert
  int tile;                // first row tile in the stacked matrix
  int members[UNIT_ROWS];  // row * ROWS_PER_TOKEN + rank
};

struct MoeMemory {
  u64 full[MOE_STAGES], empty[MOE_STAGES];
  Item items[MOE_STAGES];
  float4 halves[2][MOE_TILES][32];  // sums of one warp of a tile, by turns
};

// Asks for this warp's share of all stages of the block: two tiles, every fourth half row. Weights of
// the first stages of a down projection are on their way before its activations are written: the
// lists are older by a kernel.
template <int K, int TILES, bool GATE_UP>
__device__ __forceinline__ void produce(const MoeArgs &a, int items, int units, u8 *memory, MoeMemory &m) {
  constexpr int STEPS = K / STAGE_K, PARTS = TILES / MOE_TILES;
  constexpr int OWN = MOE_TILES / MOE_PRODUCERS;
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) - MOE_WARPS;
  const int stages = max(0, (items - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x) * STEPS;
  const u64 policy = stream_policy();
  struct Work { int count, shared, tile, member; };
  const auto work_of = [&](int s) {
    const int item = blockIdx.x + s / STEPS * gridDim.x, u = item / PARTS;
    Work w;
    w.shared = u >= units;
    const int first = w.shared ? (u - units) * UNIT_ROWS : a.units[2 + u * 3];
    w.count = w.shared ? min(a.rows - first, UNIT_ROWS) : a.units[3 + u * 3];
    w.tile = (w.shared ? 0 : a.units[1 + u * 3] * TILES) + item % PARTS * MOE_TILES;
    w.member = 0;
    if (lane < w.count) w.member = w.shared ? (first + lane) * ROWS_PER_TOKEN + TOP_K : a.members[first + lane];
    return w;
  };
  const auto request_weights = [&](int s, const Work &w) {
    const int stage = s % MOE_STAGES, own = warp * OWN + lane, parts = 2 * w.count - warp;
    if (s >= MOE_STAGES) barrier_wait(m.empty + stage, s / MOE_STAGES - 1 & 1);
    if (warp == 0 && lane < UNIT_ROWS) m.items[stage].members[lane] = w.member;
    if (warp == 0 && lane == 0)
      m.items[stage].count = w.count, m.items[stage].shared = w.shared, m.items[stage].tile = w.tile;
    __syncwarp();
    if (lane == 0)
      barrier_expect(m.full + stage,
                     OWN * TILE_BYTES + max(0, (parts + MOE_PRODUCERS - 1) / MOE_PRODUCERS) * STAGE_K);
    __syncwarp();
    if (lane < OWN)
      bulk_copy(memory + stage * STAGE_BYTES + own * TILE_BYTES,
                (const u8 *)(w.shared ? a.shared_weight : a.weight) +
                    ((size_t)(w.tile + own) * STEPS + s % STEPS) * TILE_BYTES,
                TILE_BYTES, m.full + stage, policy);
  };
  const auto request_rows = [&](int s, const Work &w) {
    const int stage = s % MOE_STAGES, part = warp + lane * MOE_PRODUCERS, row = part / 2, half = part % 2;
    const int member = __shfl_sync(~0u, w.member, row % UNIT_ROWS);
    if (row >= w.count) return;
    bulk_copy(memory + stage * STAGE_BYTES + MOE_TILES * TILE_BYTES + half * HALF_BYTES + row * HALF_STRIDE * 2,
              a.x + (size_t)(GATE_UP ? member / ROWS_PER_TOKEN : member) * a.row_stride +
                  (s % STEPS * 2 + half) * a.block_stride,
              STAGE_K, m.full + stage);
  };
  Work w, ahead[MOE_STAGES];
  const int early = GATE_UP ? 0 : min(MOE_STAGES, stages);
  static_assert(GATE_UP || STEPS == 1, "a stage an item");
#pragma unroll
  for (int s = 0; s < MOE_STAGES; s++)
    if (s < early) request_weights(s, ahead[s] = work_of(s));
  if (!GATE_UP) pdl_wait();
  asm volatile("fence.proxy.async.global;" ::: "memory");  // x was written by ordinary stores
#pragma unroll
  for (int s = 0; s < MOE_STAGES; s++)
    if (s < early) request_rows(s, ahead[s]);
  for (int s = early; s < stages; s++) {
    if (s % STEPS == 0) w = work_of(s);
    request_weights(s, w);
    request_rows(s, w);
  }
}

// Lane (g, t) holds columns 2t, 2t + 1 of rows g (x, y) and g + 8 (z, w) of a tile's product.
template <int TILES, bool GATE_UP>
__device__ __forceinline__ void finish_tile(const MoeArgs &a, const Item &item, int own, float2 alpha, float4 sum) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int within = item.tile % TILES + own;
  const float top = alpha.x * FP4_UNIT, bottom = alpha.y * FP4_UNIT;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (2 * t + i >= item.count) continue;
    const size_t member = item.members[2 * t + i];
    const float first = i ? sum.y : sum.x, second = i ? sum.w : sum.z;
    if (GATE_UP) {
      a.h[member * WIDTH + within * 8 + g] = to_half(silu(first * top) * second * bottom * H_SCALE);
    } else {
      float *out = a.out + member * HIDDEN + within * 16 + g;
      out[0] = first * (top / H_SCALE);
      out[8] = second * (bottom / H_SCALE);
    }
  }
}

template <int K, int TILES, bool GATE_UP>
__device__ __forceinline__ void expert_items(const MoeArgs &a) {
  constexpr int STEPS = K / STAGE_K, PARTS = TILES / MOE_TILES;
  extern __shared__ __align__(128) u8 memory[];
  __shared__ MoeMemory m;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  if (threadIdx.x == 0) {
    for (int s = 0; s < MOE_STAGES; s++) {
      barrier_init(m.full + s, MOE_PRODUCERS);
      barrier_init(m.empty + s, MOE_WARPS);
    }
    barrier_fence();
  }
  __syncthreads();
  if (GATE_UP) pdl_wait();
  pdl_trigger();
  const int units = a.units[0];
  const int shared_units = a.shared_weight ? (a.rows + UNIT_ROWS - 1) / UNIT_ROWS : 0;
  const int items = (units + shared_units) * PARTS;
  if (warp >= MOE_WARPS) {
    produce<K, TILES, GATE_UP>(a, items, units, memory, m);
    return;
  }
  if (!GATE_UP) pdl_wait();
  const int own = warp % MOE_TILES, half = warp / MOE_TILES;
  int stage = 0, round = 0, turn = 0;
  for (int item = blockIdx.x; item < items; item += gridDim.x, turn ^= 1) {
    float acc[4][4] = {};
    for (int step = 0; step < STEPS; step++) {
      barrier_wait(m.full + stage, round & 1);
      const u8 *tile = memory + stage * STAGE_BYTES + own * TILE_BYTES + half * TILE_BYTES / 2;
      const u16 *x = (const u16 *)(memory + stage * STAGE_BYTES + MOE_TILES * TILE_BYTES +
                                   half * HALF_BYTES) +
                     g * HALF_STRIDE + 4 * t;  // columns of missing rows are never read
      float2 alpha;  // asked for before the products, needed after them
      if (step == STEPS - 1 && half == turn)
        alpha = ((const float2 *)(m.items[stage].shared ? a.shared_alpha : a.alpha))[m.items[stage].tile + own];
#pragma unroll
      for (int i = 0; i < STAGE_K / 256; i++) {
        uint2 columns[8];
        load_columns<8>(x + i * 128, columns);
        dot_group(tile + i * GROUP_BYTES, columns, acc);
      }
      if (step == STEPS - 1) {
        float4 sum = {four_sum(acc, 0), four_sum(acc, 1), four_sum(acc, 2), four_sum(acc, 3)};
        if (half != turn) m.halves[turn][own][lane] = sum;
        asm volatile("bar.sync %0, 64;" ::"r"(1 + own) : "memory");  // the tile's two warps
        if (half == turn) {
          const float4 other = m.halves[turn][own][lane];
          sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
          finish_tile<TILES, GATE_UP>(a, m.items[stage], own, alpha, sum);
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(m.empty + stage);
      if (++stage == MOE_STAGES) stage = 0, round++;
    }
  }
}

#define MOE_THREADS ((MOE_WARPS + MOE_PRODUCERS) * 32)
extern "C" __global__ void __launch_bounds__(MOE_THREADS) moe_gate_up(const MoeArgs a) {
  expert_items<HIDDEN, WIDTH / 8, true>(a);
}
// The shared expert is the last units: every row is a member.
extern "C" __global__ void __launch_bounds__(MOE_THREADS) moe_down(const MoeArgs a) {
  expert_items<WIDTH, HIDDEN / 16, false>(a);
}

struct NormArgs {
  float *x;               // [rows, HIDDEN] residual stream
  const float *parts;     // experts [rows * ROWS_PER_TOKEN, HIDDEN] or null
  const float *weights;   // [rows, ROWS_PER_TOKEN]
  const float *sums;      // partial sums of the mixer's projection [OUT_PARTS, 32, HIDDEN] or null
  const float *norm;
  const int *row_slot;
  u16 *xn;                // normed, strides as in MoeArgs
  int scratch, block_stride, row_stride;
  float eps;
};

// Add partial sums and experts in their order, if there are any, then norm: one block a row.
extern "C" __global__ void __launch_bounds__(256) combine_norm(const NormArgs a) {
  constexpr int PER = HIDDEN / 256;
  __shared__ float scratch[8];
  const int row = blockIdx.x, first = threadIdx.x * PER;
  float v[PER], norm[PER], sum = 0.f;
#pragma unroll
  for (int i = 0; i < PER; i += 4) *(float4 *)(norm + i) = *(const float4 *)(a.norm + first + i);
  pdl_wait();
  pdl_trigger();
  float *x = a.x + (size_t)row * HIDDEN + first;
#pragma unroll
  for (int i = 0; i < PER; i += 4) *(float4 *)(v + i) = *(const float4 *)(x + i);
  if (a.sums) {
#pragma unroll
    for (int p = 0; p < OUT_PARTS; p++)
#pragma unroll
      for (int i = 0; i < PER; i += 4) {
        const float4 s = *(const float4 *)(a.sums + ((size_t)p * 32 + row) * HIDDEN + first + i);
        v[i] += s.x, v[i + 1] += s.y, v[i + 2] += s.z, v[i + 3] += s.w;
      }
  }
  if (a.parts && a.row_slot[row] != a.scratch) {
#pragma unroll
    for (int r = 0; r < ROWS_PER_TOKEN; r++) {
      const float w = a.weights[row * ROWS_PER_TOKEN + r];
      const float *part = a.parts + ((size_t)row * ROWS_PER_TOKEN + r) * HIDDEN + first;
#pragma unroll
      for (int i = 0; i < PER; i += 4) {
        const float4 p = *(const float4 *)(part + i);
        v[i] = fmaf(w, p.x, v[i]);
        v[i + 1] = fmaf(w, p.y, v[i + 1]);
        v[i + 2] = fmaf(w, p.z, v[i + 2]);
        v[i + 3] = fmaf(w, p.w, v[i + 3]);
      }
    }
  }
  if (a.parts || a.sums)
#pragma unroll
    for (int i = 0; i < PER; i += 4) *(float4 *)(x + i) = *(const float4 *)(v + i);
#pragma unroll
  for (int i = 0; i < PER; i++) sum = fmaf(v[i], v[i], sum);
  const float r = rsqrtf(block_sum<8>(sum, scratch) / HIDDEN + a.eps);
#pragma unroll
  for (int i = 0; i < PER; i += 2)
    *(u32 *)(a.xn + (size_t)(first / 256) * a.block_stride + (size_t)row * a.row_stride + first % 256 + i) =
        pack_half2(v[i] * r * (1.f + norm[i]), v[i + 1] * r * (1.f + norm[i + 1]));
}
