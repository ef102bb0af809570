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
  const u32 *scales;
  const float *alpha;
  const uint4 *shared_weight;  // down only
  const u32 *shared_scales;
  const float *shared_alpha;
  const int *units, *members;
  const u16 *x;                // gate_up: normed rows
  u16 *h;                      // [rows * ROWS_PER_TOKEN, WIDTH]
  float *out;                  // down: [rows * ROWS_PER_TOKEN, HIDDEN]
  int rows;
  int block_stride, row_stride;  // of x: column c of row r at c / 256 * block + r * row + c % 256
};
#define MOE_THREADS 256
#define MOE_STAGES 3

// One pass over a row tile of K columns with NB rows. `x` is this lane's activation pointer.
template <int K, int NB, class Request>
__device__ __forceinline__ void expert_tile(SliceQueue<MOE_STAGES> &queue, const u16 *x,
                                            int block_stride, const Request &request, float *acc) {
  acc[0] = acc[1] = acc[2] = acc[3] = 0.f;
#pragma unroll 1
  for (int piece = 0; piece < K / SLICE_K; piece++) {
    uint2 b[SLICE_K / 128][NB];
#pragma unroll
    for (int i = 0; i < SLICE_K / 128; i++)
#pragma unroll
      for (int h = 0; h < NB; h++)
        b[i][h] = *(const uint2 *)(x + (piece * (SLICE_K / 256) + i / 2) * block_stride + i % 2 * 128 +
                                   h * (8 / NB) * 16);
    dot_slice<NB>(queue.wait(), b, acc);
    __syncwarp();
    if ((threadIdx.x & 31) == 0) request(queue.taken + MOE_STAGES);
    queue.taken++;
  }
  fold_columns<NB>(acc);
}

// All items of this warp. tile_of(item): row tile in the stacked matrix, or -1 - tile in the shared
// one; row_of(item, column): activation row; finish(item, column count, tile, acc).
template <int K, class Tile, class Count, class Row, class Finish>
__device__ __forceinline__ void expert_items(const MoeArgs &a, const u16 *x, int block_stride,
                                             int row_stride, int items, const Tile &tile_of,
                                             const Count &count_of, const Row &row_of,
                                             const Finish &finish) {
  constexpr int PIECES = K / SLICE_K;
  extern __shared__ __align__(128) u8 memory[];
  __shared__ __align__(8) u64 barriers[MOE_THREADS / 32][MOE_STAGES];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int first = blockIdx.x * (MOE_THREADS / 32) + warp, stride = gridDim.x * (MOE_THREADS / 32);
  const int slices = first < items ? ((items - first - 1) / stride + 1) * PIECES : 0;
  SliceQueue<MOE_STAGES> queue = {memory + warp * MOE_STAGES * SLICE_BYTES, barriers[warp],
                                  stream_policy(), 0};
  const auto request = [&](int s) {
    if (s >= slices) return;
    const long long tile = tile_of(first + s / PIECES * stride);
    if (tile >= 0) queue.request(s, a.weight, a.scales, tile * PIECES + s % PIECES);
    else queue.request(s, a.shared_weight, a.shared_scales, (-1 - tile) * PIECES + s % PIECES);
  };
  if (lane == 0) {
    for (int s = 0; s < MOE_STAGES; s++) barrier_init(barriers[warp] + s, 1);
    barrier_fence();
    for (int s = 0; s < MOE_STAGES; s++) request(s);
  }
  __syncwarp();
#pragma unroll 1
  for (int item = first; item < items; item += stride) {
    const int n = count_of(item);
    float acc[4];
    const auto lane_x = [&](int nb) {
      return x + (size_t)row_of(item, min(g % nb, n - 1)) * row_stride + g / nb * 16 + 4 * t;
    };
    if (n == 1) expert_tile<K, 1>(queue, lane_x(1), block_stride, request, acc);
    else if (n == 2) expert_tile<K, 2>(queue, lane_x(2), block_stride, request, acc);
    else if (n <= 4) expert_tile<K, 4>(queue, lane_x(4), block_stride, request, acc);
    else expert_tile<K, 8>(queue, lane_x(8), block_stride, request, acc);
    finish(item, n, tile_of(item), acc);
  }
}

extern "C" __global__ void __launch_bounds__(MOE_THREADS, 2) moe_gate_up(const MoeArgs a) {
  constexpr int TILES = WIDTH / 8;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  pdl_wait();
  pdl_trigger();
  const auto unit = [&](int item) { return a.units + 1 + item / TILES * 3; };
  expert_items<HIDDEN>(
      a, a.x, a.block_stride, a.row_stride, a.units[0] * TILES,
      [&](int item) { return (long long)unit(item)[0] * TILES + item % TILES; },
      [&](int item) { return unit(item)[2]; },
      [&](int item, int column) { return a.members[unit(item)[1] + column] / ROWS_PER_TOKEN; },
      [&](int item, int n, long long tile, const float *acc) {
        const float gate_alpha = a.alpha[tile * 2] * FP4_UNIT;
        const float up_alpha = a.alpha[tile * 2 + 1] * FP4_UNIT;
#pragma unroll
        for (int i = 0; i < 2; i++)
          if (2 * t + i < n)
            a.h[(size_t)a.members[unit(item)[1] + 2 * t + i] * WIDTH + item % TILES * 8 + g] =
                to_half(silu(acc[i] * gate_alpha) * acc[2 + i] * up_alpha * H_SCALE);
      });
}

// The shared expert is the last units: every row is a member.
extern "C" __global__ void __launch_bounds__(MOE_THREADS, 2) moe_down(const MoeArgs a) {
  constexpr int TILES = HIDDEN / 16;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  pdl_wait();
  pdl_trigger();
  const int units = a.units[0];
  const int shared_units = a.shared_weight ? (a.rows + UNIT_ROWS - 1) / UNIT_ROWS : 0;
  const auto unit = [&](int item) { return a.units + 1 + item / TILES * 3; };
  const auto is_shared = [&](int item) { return item / TILES >= units; };
  const auto shared_first = [&](int item) { return (item / TILES - units) * UNIT_ROWS; };
  const auto row_of = [&](int item, int column) {
    return is_shared(item) ? (shared_first(item) + column) * ROWS_PER_TOKEN + TOP_K
                           : a.members[unit(item)[1] + column];
  };
  expert_items<WIDTH>(
      a, a.h, 256, WIDTH, (units + shared_units) * TILES,
      [&](int item) {
        return is_shared(item) ? -1ll - item % TILES : (long long)unit(item)[0] * TILES + item % TILES;
      },
      [&](int item) {
        return is_shared(item) ? min(a.rows - shared_first(item), UNIT_ROWS) : unit(item)[2];
      },
      row_of, [&](int item, int n, long long tile, const float *acc) {
        const float *alpha = tile >= 0 ? a.alpha + tile * 2 : a.shared_alpha + (-1 - tile) * 2;
        const float top = alpha[0] * (FP4_UNIT / H_SCALE), bottom = alpha[1] * (FP4_UNIT / H_SCALE);
#pragma unroll
        for (int i = 0; i < 2; i++)
          if (2 * t + i < n) {
            float *out = a.out + (size_t)row_of(item, 2 * t + i) * HIDDEN + item % TILES * 16;
            out[g] = acc[i] * top;
            out[g + 8] = acc[2 + i] * bottom;
          }
      });
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
