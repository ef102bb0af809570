// Routed experts for many rows. `route` lists, for each touched expert (a *unit*), the rows that
// chose it; warps own (unit, row tile) pairs and take eight of its rows at a time.

struct RouteArgs {
  const float *logits;     // [rows, LOGITS_LD]
  const int *row_slot;     // rows of the scratch slot choose no expert
  float *weights;          // [rows, ROWS_PER_TOKEN]: eight softmax weights, the shared gate
  int *units;              // [0]: touched experts; then (expert, first, count) each
  int *members;            // row * ROWS_PER_TOKEN + rank, grouped by unit
  int *touched_sum;        // running total of touched experts, for statistics
  int rows, scratch;
};

// One block; a warp a row; at most 32 rows.
extern "C" __global__ void __launch_bounds__(1024) route(const RouteArgs a) {
  __shared__ u32 chosen[EXPERTS];             // bit r: row r chose this expert
  __shared__ u8 rank_of[32][EXPERTS];
  __shared__ int sums[2][EXPERTS / 32];
  const int row = threadIdx.x >> 5, lane = threadIdx.x & 31;
  pdl_wait();
  pdl_trigger();
  if (threadIdx.x < EXPERTS) chosen[threadIdx.x] = 0;
  __syncthreads();
  if (row < a.rows && a.row_slot[row] != a.scratch) {
    int id;
    float weight;
    top_experts(a.logits + row * LOGITS_LD, id, weight);
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
  int before = count, unit = count > 0;  // inclusive scans over the experts
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const int x = __shfl_up_sync(~0u, before, d), y = __shfl_up_sync(~0u, unit, d);
    if (lane >= d) before += x, unit += y;
  }
  if (lane == 31) sums[0][e >> 5] = before, sums[1][e >> 5] = unit;
  asm volatile("bar.sync 1, %0;" ::"n"(EXPERTS));
  for (int w = 0; w < e >> 5; w++) before += sums[0][w], unit += sums[1][w];
  const int first = before - count;
  if (count) {
    int *u = a.units + 1 + (unit - 1) * 3;
    u[0] = e, u[1] = first, u[2] = count;
    u32 left = rows;
    for (int i = 0; i < count; i++) {
      const int r = __ffs(left) - 1;
      left &= left - 1;
      a.members[first + i] = r * ROWS_PER_TOKEN + rank_of[r][e];
    }
  }
  if (e == EXPERTS - 1) {
    a.units[0] = unit;
    *a.touched_sum += unit;
  }
}

struct MoeArgs {
  const uint4 *weight;
  const u32 *scales;
  const float *alpha;
  const uint4 *shared_weight;  // down only
  const u32 *shared_scales;
  const float *shared_alpha;
  const int *units, *members;
  const u16 *x;                // gate_up: normed rows [rows, HIDDEN]
  u16 *h;                      // [rows * ROWS_PER_TOKEN, WIDTH]
  float *out;                  // down: [rows * ROWS_PER_TOKEN, HIDDEN]
  int rows;
};
#define MOE_THREADS 256

// A row tile of one expert times NB rows; x_of(column) is the row of the product's column.
template <int K, int NB, class Rows>
__device__ __forceinline__ void expert_tile(const uint4 *w, const u32 *s, const u16 *x, int ld,
                                            const Rows &row_of, float *acc) {
  constexpr int GROUPS = K / 128, G = NB <= 2 ? 2 : 1;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const u16 *mine = x + (size_t)row_of(g % NB) * ld + g / NB * 16 + 4 * t;
  acc[0] = acc[1] = acc[2] = acc[3] = 0.f;
  uint4 q[2][2 * G];
  u32 scale[2][G][NB == 1 ? 1 : 4];
  uint2 b[2][G][NB];
  const auto fetch = [&](int step, int k) {
#pragma unroll
    for (int i = 0; i < G; i++) {
      const int group = step * G + i;
      q[k][2 * i] = load_stream(w + (group * 2) * 32 + lane);
      q[k][2 * i + 1] = load_stream(w + (group * 2 + 1) * 32 + lane);
      if (NB == 1) {
        scale[k][i][0] = load_stream(s + group * 32 + lane);
      } else {
        const uint4 v = load_stream((const uint4 *)s + group * 8 + g);
        scale[k][i][0] = v.x, scale[k][i][1] = v.y, scale[k][i][2] = v.z, scale[k][i][3] = v.w;
      }
#pragma unroll
      for (int h = 0; h < NB; h++)
        b[k][i][h] = *(const uint2 *)(mine + group * 128 + h * (8 / NB) * 16);
    }
  };
  fetch(0, 0);
#pragma unroll 1
  for (int step = 0; step < GROUPS / G; step += 2) {
    if (step + 1 < GROUPS / G) fetch(step + 1, 1);
#pragma unroll
    for (int i = 0; i < G; i++) dot_group<NB>(q[0] + 2 * i, scale[0][i], b[0][i], acc);
    if (step + 1 >= GROUPS / G) break;
    if (step + 2 < GROUPS / G) fetch(step + 2, 0);
#pragma unroll
    for (int i = 0; i < G; i++) dot_group<NB>(q[1] + 2 * i, scale[1][i], b[1][i], acc);
  }
  fold_columns<NB>(acc);
}

// Calls finish(column, NB, acc) after each pass over up to eight of a unit's rows.
template <int K, class Rows, class Finish>
__device__ __forceinline__ void expert_passes(const uint4 *w, const u32 *s, const u16 *x, int ld,
                                              int count, const Rows &row_of, const Finish &finish) {
  float acc[4];
  for (int first = 0; first < count; first += 8) {
    const int n = min(8, count - first);
    const auto row = [&](int column) { return row_of(first + min(column, n - 1)); };
    if (n == 1) expert_tile<K, 1>(w, s, x, ld, row, acc);
    else if (n == 2) expert_tile<K, 2>(w, s, x, ld, row, acc);
    else if (n <= 4) expert_tile<K, 4>(w, s, x, ld, row, acc);
    else expert_tile<K, 8>(w, s, x, ld, row, acc);
    finish(first, n, acc);
  }
}

extern "C" __global__ void __launch_bounds__(MOE_THREADS, 2) moe_gate_up(const MoeArgs a) {
  constexpr int TILES = WIDTH / 8;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  pdl_wait();
  pdl_trigger();
  const int items = a.units[0] * TILES, stride = gridDim.x * (MOE_THREADS / 32);
  for (int item = blockIdx.x * (MOE_THREADS / 32) + (threadIdx.x >> 5); item < items;
       item += stride) {
    const int *unit = a.units + 1 + item / TILES * 3;
    const size_t tile = (size_t)unit[0] * TILES + item % TILES;
    const int *members = a.members + unit[1];
    const float gate_alpha = a.alpha[tile * 2] * FP4_UNIT, up_alpha = a.alpha[tile * 2 + 1] * FP4_UNIT;
    expert_passes<HIDDEN>(
        a.weight + tile * (HIDDEN / 64) * 32, a.scales + tile * (HIDDEN / 128) * 32, a.x, HIDDEN,
        unit[2], [&](int i) { return members[i] / ROWS_PER_TOKEN; },
        [&](int first, int n, const float *acc) {
#pragma unroll
          for (int i = 0; i < 2; i++)
            if (2 * t + i < n)
              a.h[(size_t)members[first + 2 * t + i] * WIDTH + item % TILES * 8 + g] =
                  to_half(silu(acc[i] * gate_alpha) * acc[2 + i] * up_alpha * H_SCALE);
        });
  }
}

// The shared expert is the last unit: every row is a member.
extern "C" __global__ void __launch_bounds__(MOE_THREADS, 2) moe_down(const MoeArgs a) {
  constexpr int TILES = HIDDEN / 16;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  pdl_wait();
  pdl_trigger();
  const int units = a.units[0], stride = gridDim.x * (MOE_THREADS / 32);
  for (int item = blockIdx.x * (MOE_THREADS / 32) + (threadIdx.x >> 5);
       item < (units + (a.shared_weight != nullptr)) * TILES; item += stride) {
    const int u = item / TILES;
    const bool shared = u == units;
    const int *unit = a.units + 1 + u * 3;
    const size_t tile = (shared ? 0 : (size_t)unit[0] * TILES) + item % TILES;
    const int *members = a.members + (shared ? 0 : unit[1]);
    const float *alpha = (shared ? a.shared_alpha : a.alpha) + tile * 2;
    const float unit0 = alpha[0] * (FP4_UNIT / H_SCALE), unit1 = alpha[1] * (FP4_UNIT / H_SCALE);
    const auto row_of = [&](int i) { return shared ? i * ROWS_PER_TOKEN + TOP_K : members[i]; };
    expert_passes<WIDTH>(
        (shared ? a.shared_weight : a.weight) + tile * (WIDTH / 64) * 32,
        (shared ? a.shared_scales : a.scales) + tile * (WIDTH / 128) * 32, a.h, WIDTH,
        shared ? a.rows : unit[2], row_of, [&](int first, int n, const float *acc) {
#pragma unroll
          for (int i = 0; i < 2; i++)
            if (2 * t + i < n) {
              float *out = a.out + (size_t)row_of(first + 2 * t + i) * HIDDEN + item % TILES * 16;
              out[g] = acc[i] * unit0;
              out[g + 8] = acc[2 + i] * unit1;
            }
        });
  }
}

struct NormArgs {
  float *x;               // [rows, HIDDEN] residual stream
  const float *parts;     // [rows * ROWS_PER_TOKEN, HIDDEN] or null
  const float *weights;   // [rows, ROWS_PER_TOKEN]
  const float *norm;
  const int *row_slot;
  u16 *xn;                // [rows, HIDDEN] normed
  int scratch;
  float eps;
};

// Add the experts in rank order (if any), then norm: one block a row.
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
#pragma unroll
    for (int i = 0; i < PER; i += 4) *(float4 *)(x + i) = *(const float4 *)(v + i);
  }
#pragma unroll
  for (int i = 0; i < PER; i++) sum = fmaf(v[i], v[i], sum);
  const float r = rsqrtf(block_sum<8>(sum, scratch) / HIDDEN + a.eps);
#pragma unroll
  for (int i = 0; i < PER; i += 2)
    *(u32 *)(a.xn + (size_t)row * HIDDEN + first + i) =
        pack_half2(v[i] * r * (1.f + norm[i]), v[i + 1] * r * (1.f + norm[i + 1]));
}
