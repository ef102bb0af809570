// First and last kernels of a step: embedding rows, and the pick of the next token.

struct EmbedArgs {
  const u16 *table;        // [VOCAB, HIDDEN] bf16
  const int *row_slot;
  const u64 *token;        // [slots]
  float *x;                // [rows, HIDDEN]
};

extern "C" __global__ void __launch_bounds__(256) embed(const EmbedArgs a) {
  pdl_wait();
  pdl_trigger();
  const u16 *source = a.table + a.token[a.row_slot[blockIdx.x]] * HIDDEN;
  for (int i = threadIdx.x * 2; i < HIDDEN; i += 512) {
    const u32 pair = *(const u32 *)(source + i);
    *(float2 *)(a.x + (size_t)blockIdx.x * HIDDEN + i) = make_float2(bf16_low(pair), bf16_high(pair));
  }
}

struct PickArgs {
  const float *logits;       // [rows, VOCAB] that are sampled
  const float *model_logits; // [rows, VOCAB] that the log probability is of
  const int *row_slot;
  u64 *token, *position;     // [slots]
  const float *temperature;  // [slots]
  const u64 *seed;           // [slots]
  float4 *parts;             // [rows, PICK_BLOCKS]: best score, its id, maximum, sum of exponentials
  int *out_token;            // [rows]
  float *out_logprob;        // [rows]
  int advance, scratch;      // 1: the position moves on before the pick
};
#define PICK_BLOCKS 64

__device__ __forceinline__ u32 mix(u32 x) {
  x ^= x >> 16;
  x *= 0x85EBCA6Bu;
  x ^= x >> 13;
  x *= 0xC2B2AE35u;
  return x ^ (x >> 16);
}

struct Best { float score; int id; float top, sum; };
__device__ __forceinline__ void merge(Best &a, const Best &b) {
  if (b.score > a.score || (b.score == a.score && b.id < a.id)) a.score = b.score, a.id = b.id;
  const float top = fmaxf(a.top, b.top);
  const float left = a.top == top ? a.sum : a.sum * __expf(a.top - top);
  const float right = b.top == top ? b.sum : b.sum * __expf(b.top - top);
  a.sum = left + right;
  a.top = top;
}
__device__ __forceinline__ Best warp_best(Best b) {
#pragma unroll
  for (int d = 16; d; d >>= 1) {
    const Best other = {__shfl_xor_sync(~0u, b.score, d), __shfl_xor_sync(~0u, b.id, d),
                        __shfl_xor_sync(~0u, b.top, d), __shfl_xor_sync(~0u, b.sum, d)};
    // Both lanes merge in the same order, so both hold the same bits.
    Best low = threadIdx.x & d ? other : b;
    merge(low, threadIdx.x & d ? b : other);
    b = low;
  }
  return b;
}

// Block (part, row): best of a slice of the vocabulary.
extern "C" __global__ void __launch_bounds__(256) pick_part(const PickArgs a) {
  __shared__ Best warps[8];
  const int row = blockIdx.y, slot = a.row_slot[row];
  const float temperature = a.temperature[slot];
  const u64 seed = a.seed[slot];
  pdl_wait();
  pdl_trigger();
  const u64 position = a.position[slot] + a.advance;
  const u32 base = mix(mix((u32)seed) ^ (u32)(seed >> 32) ^ (u32)position * 0x9E3779B1u);
  constexpr int PART = (VOCAB + PICK_BLOCKS - 1) / PICK_BLOCKS;
  const int begin = blockIdx.x * PART, end = min(begin + PART, VOCAB);
  const float inverse = temperature > 0.f ? 1.f / fmaxf(temperature, 1e-6f) : 0.f;
  Best best = {-INFINITY_F, VOCAB, -INFINITY_F, 0.f};
  for (int i = begin + threadIdx.x; i < end; i += 256) {
    const float x = a.logits[(size_t)row * VOCAB + i], model = a.model_logits[(size_t)row * VOCAB + i];
    float score = x;
    if (temperature > 0.f) {
      const float uniform = ((mix(base ^ mix(i)) >> 9) + 0.5f) * 1.1920928955078125e-7f;  // never 1
      score = x * inverse - logf(-logf(uniform));
    }
    merge(best, {score, i, model, 1.f});
  }
  best = warp_best(best);
  if ((threadIdx.x & 31) == 0) warps[threadIdx.x >> 5] = best;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < 8; w++) merge(best, warps[w]);
    a.parts[row * PICK_BLOCKS + blockIdx.x] =
        make_float4(best.score, __int_as_float(best.id), best.top, best.sum);
  }
}

// One block, a warp a row: the token, its log probability, and the sequence moves on.
extern "C" __global__ void __launch_bounds__(1024) pick_final(const PickArgs a) {
  const int row = threadIdx.x >> 5, lane = threadIdx.x & 31, slot = a.row_slot[row];
  pdl_wait();
  pdl_trigger();
  Best best = {-INFINITY_F, VOCAB, -INFINITY_F, 0.f};
#pragma unroll
  for (int i = lane; i < PICK_BLOCKS; i += 32) {
    const float4 p = a.parts[row * PICK_BLOCKS + i];
    merge(best, {p.x, __float_as_int(p.y), p.z, p.w});
  }
  best = warp_best(best);
  if (lane) return;
  const int id = min(best.id, VOCAB - 1);
  a.out_token[row] = id;
  a.out_logprob[row] = a.model_logits[(size_t)row * VOCAB + id] - best.top - logf(best.sum);
  if (slot == a.scratch) return;
  a.token[slot] = id;
  a.position[slot] += a.advance;
}
