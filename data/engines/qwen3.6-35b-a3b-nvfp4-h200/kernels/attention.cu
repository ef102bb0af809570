// Decode attention of one new token per row over paged keys and values, split along the pages.

#define PAGE 64
#define ATTENTION_THREADS 256
#define GROUP (HEADS / KV_HEADS)

struct AttentionArgs {
  const float *qkv;         // [rows, ld]: per head query and gate; keys; values
  const float *q_norm, *k_norm;
  const float2 *rope;       // [positions, ROPE_DIM / 2] cosine and sine
  const int *row_slot;
  const u64 *position;
  const int *page_table;    // [slots, pages_per_slot]
  u16 *pages;               // [n, 2, KV_HEADS, PAGE, HEAD_DIM] bf16
  float *parts;             // [rows, HEADS, splits, HEAD_DIM] unnormalised sums
  float2 *stats;            // [rows, HEADS, splits]: maximum, sum of exponentials
  u16 *out;                 // [rows, HEADS * HEAD_DIM] fp16
  int ld, pages_per_slot, splits;
  float eps;
};

__device__ __forceinline__ int pages_per_split(u64 position, int splits) {
  return ((int)(position / PAGE) + 1 + splits - 1) / splits;
}

// Norm and rotate one head with a warp: lane holds dimensions lane + 32 i, so a pair is in one lane.
__device__ __forceinline__ void norm_rope(const float *x, const float *weight, float2 turn, float eps,
                                          float *v) {
  const int lane = threadIdx.x & 31;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 32; i++) {
    v[i] = x[lane + 32 * i];
    sum = fmaf(v[i], v[i], sum);
  }
  const float r = rsqrtf(lane_sum(sum) / HEAD_DIM + eps);
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 32; i++) v[i] *= r * (1.f + weight[lane + 32 * i]);
  const float left = v[0], right = v[1];
  v[0] = left * turn.x - right * turn.y;
  v[1] = right * turn.x + left * turn.y;
}

// Block (split, KV head, row): GROUP query heads share the keys.
extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS) attention(const AttentionArgs a) {
  __shared__ __align__(16) float qs[GROUP][HEAD_DIM];
  __shared__ __align__(16) float probability[PAGE][GROUP];
  __shared__ float factor[GROUP];
  const int split = blockIdx.x, kv = blockIdx.y, row = blockIdx.z;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int slot = a.row_slot[row];
  const u64 p = a.position[slot];
  const int each = pages_per_split(p, a.splits), last = p / PAGE;
  const int begin = split * each, end = min(begin + each, last + 1);
  pdl_wait();
  pdl_trigger();
  if (begin >= end) return;
  const float *x = a.qkv + (size_t)row * a.ld;
  const float2 turn = a.rope[p * (ROPE_DIM / 2) + lane];
  const int *table = a.page_table + slot * a.pages_per_slot;
  if (warp < GROUP) {
    float v[HEAD_DIM / 32];
    norm_rope(x + (kv * GROUP + warp) * 2 * HEAD_DIM, a.q_norm, turn, a.eps, v);
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 32; i++) qs[warp][lane + 32 * i] = v[i] * rsqrtf((float)HEAD_DIM);
  }
  if (end == last + 1) {  // this split owns the new token
    u16 *cell = a.pages + (((size_t)table[last] * 2 * KV_HEADS + kv) * PAGE + p % PAGE) * HEAD_DIM;
    const float *key = x + 2 * HEADS * HEAD_DIM + kv * HEAD_DIM;
    if (warp == 0) {
      float v[HEAD_DIM / 32];
      norm_rope(key, a.k_norm, turn, a.eps, v);
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 32; i++) cell[lane + 32 * i] = to_bf16(v[i]);
    }
    if (tid < HEAD_DIM)
      cell[(size_t)KV_HEADS * PAGE * HEAD_DIM + tid] = to_bf16(key[KV_HEADS * HEAD_DIM + tid]);
  }
  __syncthreads();
  float acc[GROUP] = {};
  float maximum = -INFINITY_F, sum = 0.f;  // of head `warp`
  for (int page = begin; page < end; page++) {
    const u16 *keys = a.pages + ((size_t)table[page] * 2 * KV_HEADS + kv) * PAGE * HEAD_DIM;
    const u16 *values = keys + (size_t)KV_HEADS * PAGE * HEAD_DIM;
    const int valid = page == last ? (int)(p % PAGE) + 1 : PAGE;
    // Scores: four lanes a token, interleaved 8-element pieces of its key.
    const int token = tid / 4, quarter = tid % 4;
    float score[GROUP] = {};
    if (token < valid) {
      uint4 k[HEAD_DIM / 32];
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 32; i++)
        k[i] = *(const uint4 *)(keys + token * HEAD_DIM + i * 32 + quarter * 8);
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 32; i++) {
        const float f[8] = {bf16_low(k[i].x), bf16_high(k[i].x), bf16_low(k[i].y), bf16_high(k[i].y),
                            bf16_low(k[i].z), bf16_high(k[i].z), bf16_low(k[i].w), bf16_high(k[i].w)};
#pragma unroll
        for (int h = 0; h < GROUP; h++) {
          const float4 q0 = *(const float4 *)(&qs[h][i * 32 + quarter * 8]);
          const float4 q1 = *(const float4 *)(&qs[h][i * 32 + quarter * 8 + 4]);
          score[h] += f[0] * q0.x + f[1] * q0.y + f[2] * q0.z + f[3] * q0.w + f[4] * q1.x +
                      f[5] * q1.y + f[6] * q1.z + f[7] * q1.w;
        }
      }
    }
#pragma unroll
    for (int h = 0; h < GROUP; h++) {
      score[h] = lane_sum<4>(score[h]);
      if (quarter == h % 4) probability[token][h] = token < valid ? score[h] : -INFINITY_F;
    }
    __syncthreads();
    if (warp < GROUP) {
      const float s0 = probability[lane][warp], s1 = probability[lane + 32][warp];
      float top = fmaxf(s0, s1);
#pragma unroll
      for (int d = 16; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
      const float next = fmaxf(maximum, top), shrink = __expf(maximum - next);
      const float e0 = __expf(s0 - next), e1 = __expf(s1 - next);
      probability[lane][warp] = e0;
      probability[lane + 32][warp] = e1;
      sum = sum * shrink + lane_sum(e0 + e1);
      maximum = next;
      if (lane == 0) factor[warp] = shrink;
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < GROUP; h++) acc[h] *= factor[h];
#pragma unroll 16
    for (int i = 0; i < PAGE; i++) {  // beyond `valid` lies anybody's memory, NaN included
      const float v = i < valid ? __uint_as_float((u32)values[i * HEAD_DIM + tid] << 16) : 0.f;
#pragma unroll
      for (int h = 0; h < GROUP; h += 4) {
        const float4 w = *(const float4 *)(&probability[i][h]);
        acc[h] = fmaf(w.x, v, acc[h]);
        acc[h + 1] = fmaf(w.y, v, acc[h + 1]);
        acc[h + 2] = fmaf(w.z, v, acc[h + 2]);
        acc[h + 3] = fmaf(w.w, v, acc[h + 3]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int h = 0; h < GROUP; h++)
    a.parts[(((size_t)row * HEADS + kv * GROUP + h) * a.splits + split) * HEAD_DIM + tid] = acc[h];
  if (warp < GROUP && lane == 0)
    a.stats[((size_t)row * HEADS + kv * GROUP + warp) * a.splits + split] = make_float2(maximum, sum);
}

// Join the splits and apply the gate: block (head, row), a thread a dimension.
extern "C" __global__ void __launch_bounds__(HEAD_DIM) attention_join(const AttentionArgs a) {
  const int head = blockIdx.x, row = blockIdx.y, tid = threadIdx.x;
  const u64 p = a.position[a.row_slot[row]];
  const int used = ((int)(p / PAGE) + pages_per_split(p, a.splits)) / pages_per_split(p, a.splits);
  const float gate = a.qkv[(size_t)row * a.ld + (head * 2 + 1) * HEAD_DIM + tid];
  pdl_wait();
  pdl_trigger();
  const float2 *stats = a.stats + ((size_t)row * HEADS + head) * a.splits;
  const float *parts = a.parts + ((size_t)row * HEADS + head) * a.splits * HEAD_DIM + tid;
  float top = -INFINITY_F, sum = 0.f, acc = 0.f;
  for (int s = 0; s < used; s++) top = fmaxf(top, stats[s].x);
#pragma unroll 8
  for (int s = 0; s < used; s++) {
    const float w = __expf(stats[s].x - top);
    sum = fmaf(w, stats[s].y, sum);
    acc = fmaf(w, parts[s * HEAD_DIM], acc);
  }
  a.out[((size_t)row * HEADS + head) * HEAD_DIM + tid] = to_half(acc / sum * sigmoid(gate));
}
