// What a prompt needs beside products: norms, attention's heads, routing. Products of torch leave
// multipliers of their columns (`alpha`) to whoever reads them.

struct PromptNormArgs {
  float *x;              // [rows, HIDDEN] residual stream
  const float *add;      // [rows, HIDDEN] times alpha: the mixer's output or the shared expert's, or null
  const float *alpha;    // [HIDDEN]
  const u16 *parts;      // [rows, TOP_K, HIDDEN] fp16 times H_SCALE: routed experts, or null
  const float *weights;  // [rows, ROWS_PER_TOKEN], the shared expert's last; with parts
  const float *norm;
  u16 *xn;               // [rows, HIDDEN] fp16
  float eps;
};

// Add to the residual stream, then norm: a block a row.
extern "C" __global__ void __launch_bounds__(256) prompt_norm(const PromptNormArgs a) {
  constexpr int PER = HIDDEN / 256;
  static_assert(PER == 8, "a vector of eight halves a thread");
  __shared__ float scratch[8];
  const int row = blockIdx.x, first = threadIdx.x * PER;
  const size_t at = (size_t)row * HIDDEN + first;
  float v[PER], sum = 0.f;
  pdl_wait();
  pdl_trigger();
#pragma unroll
  for (int i = 0; i < PER; i += 4) *(float4 *)(v + i) = *(const float4 *)(a.x + at + i);
  if (a.add) {
    const float w = a.parts ? a.weights[row * ROWS_PER_TOKEN + TOP_K] : 1.f;
#pragma unroll
    for (int i = 0; i < PER; i++) v[i] = fmaf(w, a.add[at + i] * a.alpha[first + i], v[i]);
  }
  if (a.parts) {
#pragma unroll
    for (int r = 0; r < TOP_K; r++) {
      const float w = a.weights[row * ROWS_PER_TOKEN + r] / H_SCALE;
      const uint4 part = *(const uint4 *)(a.parts + ((size_t)row * TOP_K + r) * HIDDEN + first);
#pragma unroll
      for (int i = 0; i < PER; i++)
        v[i] = fmaf(w, from_half((u16)(word(part, i / 2) >> i % 2 * 16)), v[i]);
    }
  }
  if (a.add)
#pragma unroll
    for (int i = 0; i < PER; i += 4) *(float4 *)(a.x + at + i) = *(const float4 *)(v + i);
#pragma unroll
  for (int i = 0; i < PER; i++) sum = fmaf(v[i], v[i], sum);
  const float r = rsqrtf(block_sum<8>(sum, scratch) / HIDDEN + a.eps);
  u32 packed[PER / 2];
#pragma unroll
  for (int i = 0; i < PER; i += 2)
    packed[i / 2] = pack_half2(v[i] * r * (1.f + a.norm[first + i]), v[i + 1] * r * (1.f + a.norm[first + i + 1]));
  *(uint4 *)(a.xn + at) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
}

struct PromptHeadsArgs {
  const float *y, *alpha;   // [rows, ld], [ld]: per head query and gate; keys; values
  const float *q_norm, *k_norm;
  const float2 *rope;
  const int *page_table;
  u16 *pages;               // [n, 2, KV_HEADS, PAGE, HEAD_DIM] bf16
  u16 *q, *k, *v;           // [HEADS, rows, HEAD_DIM], [KV_HEADS, rows, HEAD_DIM] bf16
  const u16 *mixed;         // [HEADS, rows, HEAD_DIM] bf16 after attention
  u16 *gated;               // [rows, HEADS * HEAD_DIM] fp16
  const u64 *where;
  int rows, ld, pages_per_slot;
  float eps;
};

// Norm and rotate queries and keys, keep keys and values: grid (rows, heads of all three / 4), a warp
// a head.
extern "C" __global__ void __launch_bounds__(128) prompt_heads(const PromptHeadsArgs a) {
  constexpr int KEYS = 2 * HEADS * HEAD_DIM;  // first column
  static_assert((HEADS + 2 * KV_HEADS) % 4 == 0, "warps a block");
  const int row = blockIdx.x, head = blockIdx.y * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  const bool query = head < HEADS, value = head >= HEADS + KV_HEADS;
  const int kv = value ? head - HEADS - KV_HEADS : head - HEADS;
  const int column = lane + (query ? head * 2 * HEAD_DIM : KEYS + (head - HEADS) * HEAD_DIM);
  pdl_wait();
  pdl_trigger();
  const u64 slot = a.where[0], position = a.where[1] + row;
  float x[HEAD_DIM / 32];
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 32; i++)
    x[i] = a.y[(size_t)row * a.ld + column + 32 * i] * a.alpha[column + 32 * i];
  const bool inside = row < (int)a.where[2];
  if (!value && inside)  // the table of angles ends with the context
    norm_rope(query ? a.q_norm : a.k_norm, a.rope[position * (ROPE_DIM / 2) + lane], a.eps, x);
  u16 *to = (query ? a.q : value ? a.v : a.k) + ((size_t)(query ? head : kv) * a.rows + row) * HEAD_DIM + lane;
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 32; i++) to[32 * i] = to_bf16(x[i]);
  if (query || !inside) return;
  const size_t page = a.page_table[slot * a.pages_per_slot + position / PAGE];
  u16 *cell = a.pages + (((page * 2 + value) * KV_HEADS + kv) * PAGE + position % PAGE) * HEAD_DIM + lane;
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 32; i++) cell[32 * i] = to_bf16(x[i]);
}

// Attention's output times the sigmoid of its gate: grid (rows, HEADS / 4), a warp a head.
extern "C" __global__ void __launch_bounds__(128) prompt_gate(const PromptHeadsArgs a) {
  static_assert(HEAD_DIM == 256, "eight elements a lane");
  const int row = blockIdx.x, head = blockIdx.y * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  const int column = (2 * head + 1) * HEAD_DIM + 8 * lane;
  pdl_wait();
  pdl_trigger();
  const uint4 mixed = *(const uint4 *)(a.mixed + ((size_t)head * a.rows + row) * HEAD_DIM + 8 * lane);
  u32 packed[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 gate = *(const float2 *)(a.y + (size_t)row * a.ld + column + 2 * i);
    const float2 unit = *(const float2 *)(a.alpha + column + 2 * i);
    const u32 pair = word(mixed, i);
    packed[i] = pack_half2(bf16_low(pair) * sigmoid(gate.x * unit.x), bf16_high(pair) * sigmoid(gate.y * unit.y));
  }
  *(uint4 *)(a.gated + ((size_t)row * HEADS + head) * HEAD_DIM + 8 * lane) =
      make_uint4(packed[0], packed[1], packed[2], packed[3]);
}

struct PromptRouteArgs {
  const float *y, *alpha;  // [rows, ld], [ld]: router logits and the shared gate; shared gate, up
  u8 *ids;                 // [rows, TOP_K]
  float *weights;          // [rows, ROWS_PER_TOKEN]: softmax weights, the shared gate
  u16 *shared;             // [rows, WIDTH] fp16 times H_SCALE: the shared expert's activations
  int *members;            // [EXPERTS, rows]: row * TOP_K + rank, by row
  int *counts;             // [EXPERTS]
  int *units;              // [0]: how many; then (expert, first member, count) each
  int rows, ld;
};

// A block a row: one warp finds its experts, all make the shared expert's activations.
extern "C" __global__ void __launch_bounds__(256) prompt_route(const PromptRouteArgs a) {
  const int row = blockIdx.x, lane = threadIdx.x & 31;
  pdl_wait();
  pdl_trigger();
  const float *y = a.y + (size_t)row * a.ld;
  for (int c = threadIdx.x; c < WIDTH; c += 256) {
    const int gate = LOGITS_LD + c / 8 * 16 + c % 8;
    const float x = y[gate] * a.alpha[gate], up = y[gate + 8] * a.alpha[gate + 8];
    a.shared[(size_t)row * WIDTH + c] = to_half(silu(x) * up * H_SCALE);
  }
  if (threadIdx.x >= 32) return;
  float value, values[EXPERTS / 32];
#pragma unroll
  for (int i = 0; i < EXPERTS / 32; i++) values[i] = y[lane + 32 * i] * a.alpha[lane + 32 * i];
  const int id = top_experts(values, value);
  const float weight = expert_weight(value);
  if (lane < TOP_K) a.ids[row * TOP_K + lane] = id;
  if (lane <= TOP_K)
    a.weights[row * ROWS_PER_TOKEN + lane] = lane < TOP_K ? weight : sigmoid(y[EXPERTS] * a.alpha[EXPERTS]);
}

// Rows of an expert, in their order: a block each.
extern "C" __global__ void __launch_bounds__(256) prompt_members(const PromptRouteArgs a) {
  static_assert(EXPERTS == 256 && TOP_K == 8, "ids of a row are eight bytes");
  __shared__ int sums[8];
  const int e = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  pdl_wait();
  pdl_trigger();
  int count = 0;
  for (int first = 0; first < a.rows; first += 256) {
    const int row = first + threadIdx.x;
    const u64 ids = row < a.rows ? ((const u64 *)a.ids)[row] : 0;
    int rank = -1;
#pragma unroll
    for (int r = 0; r < TOP_K; r++)
      if (row < a.rows && (int)(ids >> 8 * r & 255) == e) rank = r;
    const u32 found = __ballot_sync(~0u, rank >= 0);
    if (lane == 0) sums[warp] = __popc(found);
    __syncthreads();
    int before = count + __popc(found & ((1u << lane) - 1));
#pragma unroll
    for (int w = 0; w < 8; w++) before += w < warp ? sums[w] : 0, count += sums[w];
    if (rank >= 0) a.members[(size_t)e * a.rows + before] = row * TOP_K + rank;
    __syncthreads();
  }
  if (threadIdx.x == 0) a.counts[e] = count;
}

// Units of up to PROMPT_UNIT rows of an expert, those of most row tiles first: one block, a thread an
// expert.
extern "C" __global__ void __launch_bounds__(EXPERTS) prompt_units(const PromptRouteArgs a) {
  __shared__ int sums[EXPERTS / 32];
  const int e = threadIdx.x, lane = e & 31;
  pdl_wait();
  pdl_trigger();
  const int count = a.counts[e], whole = count / PROMPT_UNIT, rest = count % PROMPT_UNIT;
  int units = 0;
#pragma unroll 1
  for (int tiles = PROMPT_UNIT / 8; tiles; tiles--) {
    const int first = tiles == PROMPT_UNIT / 8 ? 0 : whole;
    const int own = (tiles == PROMPT_UNIT / 8 ? whole : 0) + ((rest + 7) / 8 == tiles);
    int end = own;  // inclusive scan
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const int x = __shfl_up_sync(~0u, end, d);
      if (lane >= d) end += x;
    }
    if (lane == 31) sums[e >> 5] = end;
    __syncthreads();
    end += units;
#pragma unroll
    for (int w = 0; w < EXPERTS / 32; w++) end += w < e >> 5 ? sums[w] : 0, units += sums[w];
    for (int i = 0; i < own; i++) {
      int *unit = a.units + 1 + (end - own + i) * 3;
      const int row = (first + i) * PROMPT_UNIT;
      unit[0] = e, unit[1] = e * a.rows + row, unit[2] = min(count - row, PROMPT_UNIT);
    }
    __syncthreads();
  }
  if (e == 0) a.units[0] = units;
}
