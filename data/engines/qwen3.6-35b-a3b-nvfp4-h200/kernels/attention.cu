// Decode attention of one new token per row over paged keys and values, split along the context.
// A unit is half a page; its keys and values come by bulk copies, a row each, into padded rows.
// Queries and probabilities are split in two bf16 terms, so only the cache itself is rounded.

#define UNIT 32
#define ATTENTION_THREADS 256
#define STRIDE (HEAD_DIM + 8)          // bf16 elements of a padded row
#define UNIT_BYTES (2 * UNIT * STRIDE * 2)
#define STAGES 2
#define WARP_ROWS (UNIT * 32 / ATTENTION_THREADS)

__device__ __forceinline__ int units_per_split(u64 position, int splits) {
  return ((int)(position / UNIT) + splits) / splits;
}

__device__ __forceinline__ void load_head(const float *x, float *v) {
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 32; i++) v[i] = x[(threadIdx.x & 31) + 32 * i];
}
__device__ __forceinline__ void mma_bf16(float *d, const u32 *a, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},"
               "{%8,%9},{%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Two bf16 terms of a float.
__device__ __forceinline__ void split_bf16(float x, u16 &high, u16 &low) {
  high = to_bf16(x);
  low = to_bf16(x - bf16_low(high));
}

// Block (split, KV head, row): GROUP query heads share the keys.
extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS) attention(const AttentionArgs a) {
  extern __shared__ __align__(128) u8 memory[];  // [STAGES][keys, values][UNIT][STRIDE] bf16
  __shared__ __align__(16) u16 qs[2][GROUP][STRIDE];
  __shared__ float scores[4][UNIT][GROUP + 1];
  __shared__ __align__(16) u16 probability[2][GROUP][UNIT + 8];
  __shared__ float factor[GROUP];
  __shared__ __align__(8) u64 full[STAGES];
  const int split = blockIdx.x, kv = blockIdx.y, row = blockIdx.z;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
  const int slot = a.row_slot[row];
  const u64 p = a.position[slot];
  const int each = units_per_split(p, a.splits), last = p / UNIT;
  const int begin = split * each, end = min(begin + each, last + 1);
  const int *table = a.page_table + slot * a.pages_per_slot;
  const auto source = [&](int unit) {
    return a.pages + (((size_t)table[unit * UNIT / PAGE] * 2 * KV_HEADS + kv) * PAGE + unit * UNIT % PAGE) * HEAD_DIM;
  };
  // Rows of earlier tokens, four of keys and of values a warp: a lane a row. Lanes ask in turns, about
  // 90 clocks each.
  const auto request = [&](int unit) {
    const int stage = (unit - begin) % STAGES, rows = unit == last ? (int)(p % UNIT) : UNIT;
    const int row = warp * WARP_ROWS + lane % WARP_ROWS, values = lane / WARP_ROWS;
    if (lane == 0) barrier_expect(full + stage, max(0, min(rows - row, WARP_ROWS)) * 2 * HEAD_DIM * 2);
    __syncwarp();
    if (row >= rows || values > 1) return;
    bulk_copy((u16 *)(memory + stage * UNIT_BYTES) + (values * UNIT + row) * STRIDE,
              source(unit) + (values * KV_HEADS * PAGE + row) * HEAD_DIM, HEAD_DIM * 2, full + stage);
  };
  if (tid == 0) {
    for (int s = 0; s < STAGES; s++) barrier_init(full + s, ATTENTION_THREADS / 32);
    barrier_fence();
  }
  __syncthreads();
  // Everything before the new token was finished steps ago, by ordinary stores.
  asm volatile("fence.proxy.async.global;" ::: "memory");
  for (int unit = begin; unit < min(begin + STAGES, end); unit++) request(unit);
  const float2 turn = a.rope[p * (ROPE_DIM / 2) + lane];
  pdl_wait();
  pdl_trigger();
  if (begin >= end) return;
  const float *x = a.qkv + (size_t)row * a.ld;
  if (warp < GROUP) {
    float v[HEAD_DIM / 32];
    load_head(x + (kv * GROUP + warp) * 2 * HEAD_DIM, v);
    norm_rope(a.q_norm, turn, a.eps, v);
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 32; i++)
      split_bf16(v[i] * rsqrtf((float)HEAD_DIM), qs[0][warp][lane + 32 * i], qs[1][warp][lane + 32 * i]);
  }
  float maximum = -INFINITY_F, sum = 0.f;  // of head `warp`
  float acc[2][4] = {};                    // dimensions (2 warp + m) * 16 + g (+ 8), heads 2t, 2t + 1
  for (int unit = begin; unit < end; unit++) {
    const int stage = (unit - begin) % STAGES, valid = unit == last ? (int)(p % UNIT) + 1 : UNIT;
    u16 *keys = (u16 *)(memory + stage * UNIT_BYTES), *values = keys + UNIT * STRIDE;
    barrier_wait(full + stage, (unit - begin) / STAGES & 1);
    if (unit == last) {  // this split owns the new token: into the cache and into this unit
      u16 *cell = a.pages + (source(unit) - a.pages) + (valid - 1) * HEAD_DIM;
      const float *key = x + 2 * HEADS * HEAD_DIM + kv * HEAD_DIM;
      if (warp == 0) {
        float v[HEAD_DIM / 32];
        load_head(key, v);
        norm_rope(a.k_norm, turn, a.eps, v);
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 32; i++)
          cell[lane + 32 * i] = keys[(valid - 1) * STRIDE + lane + 32 * i] = to_bf16(v[i]);
      }
      cell[(size_t)KV_HEADS * PAGE * HEAD_DIM + tid] = values[(valid - 1) * STRIDE + tid] =
          to_bf16(key[KV_HEADS * HEAD_DIM + tid]);
      // What lies beyond is anybody's, NaN included.
      for (int r = valid; r < UNIT; r++) values[r * STRIDE + tid] = 0;
    }
    __syncthreads();
    {  // scores: warp = (16 tokens, a quarter of the dimensions)
      const int m = warp & 1, quarter = warp >> 1;
      float s[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int k = 0; k < HEAD_DIM / 64; k++) {
        const int d = quarter * (HEAD_DIM / 4) + k * 16;
        u32 f[4];
        load_matrices<false>(f, keys + (m * 16 + (lane & 15)) * STRIDE + d + (lane >> 4) * 8);
#pragma unroll
        for (int h = 0; h < 2; h++)
          mma_bf16(s, f, *(const u32 *)(qs[h][g] + d + 2 * t), *(const u32 *)(qs[h][g] + d + 8 + 2 * t));
      }
#pragma unroll
      for (int i = 0; i < 4; i++) scores[quarter][m * 16 + g + i / 2 * 8][2 * t + i % 2] = s[i];
    }
    __syncthreads();
    if (warp < GROUP) {  // head `warp`, a lane a token
      float s = scores[0][lane][warp] + scores[1][lane][warp] + scores[2][lane][warp] + scores[3][lane][warp];
      if (lane >= valid) s = -INFINITY_F;
      float top = s;
#pragma unroll
      for (int d = 16; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
      const float next = fmaxf(maximum, top), shrink = __expf(maximum - next), e = __expf(s - next);
      split_bf16(e, probability[0][warp][lane], probability[1][warp][lane]);
      sum = sum * shrink + lane_sum(e);
      maximum = next;
      if (lane == 0) factor[warp] = shrink;
    }
    __syncthreads();
    const float f0 = factor[2 * t], f1 = factor[2 * t + 1];
#pragma unroll
    for (int m = 0; m < 2; m++) {
      acc[m][0] *= f0, acc[m][1] *= f1, acc[m][2] *= f0, acc[m][3] *= f1;
#pragma unroll
      for (int k = 0; k < UNIT / 16; k++) {
        u32 f[4];  // values transposed: rows are dimensions, columns tokens
        load_matrices<true>(f, values + (k * 16 + (lane & 7) + (lane >> 4) * 8) * STRIDE +
                                   (2 * warp + m) * 16 + (lane >> 3 & 1) * 8);
#pragma unroll
        for (int h = 0; h < 2; h++)
          mma_bf16(acc[m], f, *(const u32 *)(probability[h][g] + k * 16 + 2 * t),
                   *(const u32 *)(probability[h][g] + k * 16 + 8 + 2 * t));
      }
    }
    __syncthreads();
    if (unit + STAGES < end) request(unit + STAGES);
  }
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int head = kv * GROUP + 2 * t + i % 2, d = (2 * warp + m) * 16 + g + i / 2 * 8;
      a.parts[(((size_t)row * HEADS + head) * a.splits + split) * HEAD_DIM + d] = acc[m][i];
    }
  if (warp < GROUP && lane == 0)
    a.stats[((size_t)row * HEADS + kv * GROUP + warp) * a.splits + split] = make_float2(maximum, sum);
}

// Join the splits and apply the gate: block (head, row), a thread a dimension.
extern "C" __global__ void __launch_bounds__(HEAD_DIM) attention_join(const AttentionArgs a) {
  __shared__ float weights[64];
  const int head = blockIdx.x, row = blockIdx.y, tid = threadIdx.x, lane = tid & 31;
  const u64 p = a.position[a.row_slot[row]];
  const int each = units_per_split(p, a.splits), used = ((int)(p / UNIT) + each) / each;
  const float gate = a.qkv[(size_t)row * a.ld + (head * 2 + 1) * HEAD_DIM + tid];
  pdl_wait();
  pdl_trigger();
  const float *parts = a.parts + ((size_t)row * HEADS + head) * a.splits * HEAD_DIM + tid;
  if (tid < 32) {
    const float2 *stats = a.stats + ((size_t)row * HEADS + head) * a.splits;
    const float2 none = make_float2(-INFINITY_F, 0.f);
    const float2 s0 = lane < used ? stats[lane] : none, s1 = lane + 32 < used ? stats[lane + 32] : none;
    float top = fmaxf(s0.x, s1.x);
#pragma unroll
    for (int d = 16; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    const float w0 = __expf(s0.x - top), w1 = __expf(s1.x - top);
    const float total = lane_sum(w0 * s0.y + w1 * s1.y);
    weights[lane] = w0 / total;
    weights[lane + 32] = w1 / total;
  }
  __syncthreads();
  float acc = 0.f;
#pragma unroll 16
  for (int s = 0; s < used; s++) acc = fmaf(weights[s], parts[s * HEAD_DIM], acc);
  const int k = head * HEAD_DIM + tid;
  a.out[activation_index(row, k)] = to_half(acc * sigmoid(gate));
}
