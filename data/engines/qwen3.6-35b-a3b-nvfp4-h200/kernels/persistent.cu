// The resident kernel (producer.cuh): its mixers, and the loop over instructions.

// The past part of a channel's convolution; position p reads ring entries p-3 .. p-1.
struct Tap { float past, weight; };
__device__ __forceinline__ Tap conv_past(const DeltaArgs &a, const float *ring, u64 p, int channel) {
  const float4 w = *(const float4 *)(a.conv + channel * 4);
  const float x3 = p >= 3 ? ring[((p - 3) & 3) * CONV_WIDTH + channel] : 0.f;
  const float x2 = p >= 2 ? ring[((p - 2) & 3) * CONV_WIDTH + channel] : 0.f;
  const float x1 = p >= 1 ? ring[((p - 1) & 3) * CONV_WIDTH + channel] : 0.f;
  return {fmaf(w.x, x3, fmaf(w.y, x2, w.z * x1)), w.w};
}

// Convolution and delta rule: sixteen neighbouring lanes own a state column,
// k = 64 i + 4 (lane % 16) + j.
__device__ __forceinline__ void delta(Consumer &c, u32 tag, const DeltaArgs &a) {
  const StatePart part = state_part();
  const int head = part.head, tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  if (head >= VALUE_HEADS) return;
  const int key_head = head / (VALUE_HEADS / KEY_HEADS);
  float *qs = (float *)c.s.xs, *ks = qs + KEY_DIM, *vs = ks + KEY_DIM;
  float *ring = a.ring + (size_t)c.slot * 4 * CONV_WIDTH, *newest = ring + (c.position & 3) * CONV_WIDTH;
  const bool is_qk = tid < 2 * KEY_DIM, used = tid < 2 * KEY_DIM + STATE_COLUMNS;
  const int channel = is_qk ? tid / KEY_DIM * KEY_WIDTH + key_head * KEY_DIM + tid % KEY_DIM
                            : 2 * KEY_WIDTH + head * VALUE_DIM + part.column + tid - 2 * KEY_DIM;
  Tap tap = {0.f, 0.f};
  if (used) tap = conv_past(a, ring, c.position, channel);
  const float a_log = a.a_log[head], dt_bias = a.dt_bias[head];
  float ab[2], now, x = 0.f;
  if (used) fetch<1>((const Post *)a.qkv + channel, 0, tag, &now);
  fetch<2>((const Post *)a.ab + head, VALUE_HEADS, tag, ab);
  const Gates gates = make_gates(ab[0], ab[1], a_log, dt_bias);
  if (used) {
    x = silu(fmaf(tap.weight, now, tap.past));
    if (!is_qk || (part.column == 0 && head % (VALUE_HEADS / KEY_HEADS) == 0)) newest[channel] = now;
    if (!is_qk) vs[tid - 2 * KEY_DIM] = x;
  }
  const float square = lane_sum(x * x);
  if (lane == 0) c.s.scratch[warp] = square;
  consumer_sync();
  if (is_qk) {
    const float *sums = c.s.scratch + tid / KEY_DIM * (KEY_DIM / 32);
    const float unit = rsqrtf(sums[0] + sums[1] + sums[2] + sums[3] + 1e-6f);
    qs[tid] = x * unit * (tid < KEY_DIM ? rsqrtf((float)KEY_DIM) : 1.f);
  }
  consumer_sync();
  const int column = warp * 2 + (lane >> 4), k0 = (lane & 15) * 4;
  float4 k[2], q[2], s[2];
  float kq = 0.f;
  const float *state = (const float *)c.wait(0) + column * KEY_DIM + k0;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    k[i] = *(const float4 *)(ks + k0 + 64 * i);
    q[i] = *(const float4 *)(qs + k0 + 64 * i);
    s[i] = *(const float4 *)(state + 64 * i);
    kq += dot4(k[i], q[i]);
  }
  const float o = delta_column<2, 16>(s, k, q, lane_sum<16>(kq), vs[column], gates);
  float *to = state_of(a, c.slot) + column * KEY_DIM + k0;
#pragma unroll
  for (int i = 0; i < 2; i++) *(float4 *)(to + 64 * i) = s[i];
  if ((lane & 15) == 0) post((Post *)a.o + head * VALUE_DIM + part.column + column, o, tag);
  consumer_sync();  // all warps have read the stage
  if (warp < 4) c.release(0);
  c.cursor++;
}

// Attention over the units of one split, for the query heads of one KV head: a warp a token for the
// scores, a thread a dimension of half the heads for the sums. Only the cache itself is rounded.
struct AttentionMemory {
  u16 fresh[2][HEAD_DIM];  // key and value of the new token
  float scores[GROUP][KV_UNIT + 1], probability[GROUP][KV_UNIT], factor[GROUP];
};

__device__ __forceinline__ float2 bf16_pair(u32 x) { return make_float2(bf16_low(x), bf16_high(x)); }

// Scores of one token: lane holds dimensions 4 lane .. and HEAD_DIM / 2 + 4 lane ..
__device__ __forceinline__ void score_token(const u16 *key, const float *q, float *scores) {
  const int lane = threadIdx.x & 31;
  float4 k[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint2 raw = *(const uint2 *)(key + i * (HEAD_DIM / 2) + 4 * lane);
    const float2 low = bf16_pair(raw.x), high = bf16_pair(raw.y);
    k[i] = make_float4(low.x, low.y, high.x, high.y);
  }
#pragma unroll
  for (int h = 0; h < GROUP; h++) {
    const float *head = q + h * HEAD_DIM + 4 * lane;
    const float s = lane_sum(dot4(k[0], *(const float4 *)head) + dot4(k[1], *(const float4 *)(head + HEAD_DIM / 2)));
    if (lane == 0) scores[h * (KV_UNIT + 1)] = s;
  }
}

// The new token's key and value, rounded, into the cache and into shared memory.
__device__ __forceinline__ void new_token(Consumer &c, u32 tag, const AttentionArgs &a, float2 turn,
                                          AttentionMemory &m) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, kv = blockIdx.x % KV_HEADS;
  u16 *cell = unit_of(a, c.slot, c.position / KV_UNIT) + c.position % KV_UNIT * HEAD_DIM;
  const Post *key = (const Post *)a.qkv + 2 * HEADS * HEAD_DIM + kv * HEAD_DIM + lane;
  float v[HEAD_DIM / 32];
  if (warp == GROUP) {
    fetch<HEAD_DIM / 32>(key, 32, tag, v);
    norm_rope(a.k_norm, turn, a.eps, v);
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 32; i++) cell[lane + 32 * i] = m.fresh[0][lane + 32 * i] = to_bf16(v[i]);
  } else if (warp == GROUP + 1) {
    fetch<HEAD_DIM / 32>(key + KV_HEADS * HEAD_DIM, 32, tag, v);
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 32; i++)
      cell[(size_t)KV_HEADS * PAGE * HEAD_DIM + lane + 32 * i] = m.fresh[1][lane + 32 * i] =
          to_bf16(v[i]);
  }
}

__device__ __forceinline__ void attend(Consumer &c, u32 tag, const AttentionArgs &a) {
  static_assert(THREADS == 2 * HEAD_DIM && KV_UNIT == CONSUMERS && GROUP + 2 <= CONSUMERS, "shares");
  static_assert(sizeof(AttentionMemory) <= sizeof(c.s.xs) && GROUP * HEAD_DIM * 4 <= sizeof(c.s.red), "memory");
  AttentionMemory &m = *(AttentionMemory *)c.s.xs;
  float *q = &c.s.red[0][0];
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int kv = blockIdx.x % KV_HEADS, split = blockIdx.x / KV_HEADS, last = c.position / KV_UNIT;
  if (split > last || split >= a.splits) return;
  const float2 turn = a.rope[c.position * (ROPE_DIM / 2) + lane];
  if (warp < GROUP) {
    float v[HEAD_DIM / 32];
    fetch<HEAD_DIM / 32>((const Post *)a.qkv + (kv * GROUP + warp) * 2 * HEAD_DIM + lane, 32, tag, v);
    norm_rope(a.q_norm, turn, a.eps, v);
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 32; i++) q[warp * HEAD_DIM + lane + 32 * i] = v[i] * rsqrtf((float)HEAD_DIM);
  }
  if (last % a.splits == split) new_token(c, tag, a, turn, m);
  consumer_sync();
  const int dim = tid % HEAD_DIM, h0 = tid / HEAD_DIM * (GROUP / 2);
  float maximum = -INFINITY_F, sum = 0.f, acc[GROUP / 2] = {};
#pragma unroll 1
  for (int unit = split; unit <= last; unit += a.splits) {
    const u16 *keys = (const u16 *)c.wait(0), *values = keys + KV_UNIT * HEAD_DIM;
    const int newest = unit == last ? (int)(c.position % KV_UNIT) : KV_UNIT;
    if (warp <= newest) score_token(warp == newest ? m.fresh[0] : keys + warp * HEAD_DIM, q, &m.scores[0][warp]);
    consumer_sync();
    if (warp < GROUP) {  // head `warp`, a lane a token
      const float s = lane < KV_UNIT && lane <= newest ? m.scores[warp][lane] : -INFINITY_F;
      float top = s;
#pragma unroll
      for (int d = 16; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
      const float next = fmaxf(maximum, top), shrink = __expf(maximum - next), e = __expf(s - next);
      if (lane < KV_UNIT) m.probability[warp][lane] = e;
      sum = sum * shrink + lane_sum(e);
      maximum = next;
      if (lane == 0) m.factor[warp] = shrink;
    }
    consumer_sync();
#pragma unroll
    for (int h = 0; h < GROUP / 2; h++) acc[h] *= m.factor[h0 + h];
#pragma unroll
    for (int token = 0; token < KV_UNIT; token++) {
      if (token > newest) break;  // what lies beyond is anybody's, NaN included
      const float v = bf16_low(token == newest ? m.fresh[1][dim] : values[token * HEAD_DIM + dim]);
#pragma unroll
      for (int h = 0; h < GROUP / 2; h++) acc[h] = fmaf(m.probability[h0 + h][token], v, acc[h]);
    }
    consumer_sync();  // all warps have read the stage
    if (warp < 4) c.release(0);
    c.cursor++;
  }
#pragma unroll
  for (int h = 0; h < GROUP / 2; h++)
    post((Post *)a.parts + ((size_t)(kv * GROUP + h0 + h) * a.splits + split) * HEAD_DIM + dim, acc[h], tag);
  if (warp < GROUP && lane < 2)
    post((Post *)a.stats + ((kv * GROUP + warp) * a.splits + split) * 2 + lane, lane ? sum : maximum, tag);
}

// Join the splits and apply the gate: 32 dimensions of one head a block, the warps share the splits.
__device__ __forceinline__ void join(Consumer &c, u32 tag, const AttentionArgs &a) {
  constexpr int PARTS = HEAD_DIM / 32;
  const int head = blockIdx.x / PARTS, dim = blockIdx.x % PARTS * 32 + (threadIdx.x & 31);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (head >= HEADS) return;
  const int used = min(a.splits, (int)(c.position / KV_UNIT) + 1);
  float gate, top = -INFINITY_F, acc = 0.f, sum = 0.f;  // of this warp's splits
  fetch<1>((const Post *)a.qkv + (head * 2 + 1) * HEAD_DIM + dim, 0, tag, &gate);
#pragma unroll 1
  for (int s = warp; s < used; s += CONSUMERS) {
    float stats[2], part;
    fetch<1>((const Post *)a.parts + ((size_t)head * a.splits + s) * HEAD_DIM + dim, 0, tag, &part);
    fetch<2>((const Post *)a.stats + (head * a.splits + s) * 2, 1, tag, stats);
    const float next = fmaxf(top, stats[0]), old = __expf(top - next), scale = __expf(stats[0] - next);
    acc = acc * old + scale * part;
    sum = sum * old + scale * stats[1];
    top = next;
  }
  float *tops = c.s.scratch, *sums = &c.s.red[0][0], *accs = sums + CONSUMERS;
  if (lane == 0) tops[warp] = top, sums[warp] = sum;
  accs[warp * 32 + lane] = acc;
  consumer_sync();
  if (warp) return;
#pragma unroll
  for (int w = 0; w < CONSUMERS; w++) top = fmaxf(top, tops[w]);
  acc = sum = 0.f;
#pragma unroll
  for (int w = 0; w < CONSUMERS; w++) {
    const float scale = __expf(tops[w] - top);
    acc = fmaf(scale, accs[w * 32 + lane], acc);
    sum = fmaf(scale, sums[w], sum);
  }
  const float out = acc / sum * sigmoid(gate), next = __shfl_down_sync(~0u, out, 1);
  if (lane % 2 == 0) post((Post *)a.out + (head * HEAD_DIM + dim) / 2, pack_half2(out, next), tag);
}

// The embedding of the last token: 16 elements a block.
__device__ __forceinline__ void embed(Consumer &c, u32 tag, const SingleArgs &a) {
  const int i = blockIdx.x * 16 + threadIdx.x;
  if (threadIdx.x >= 16 || i >= HIDDEN) return;
  const float x = bf16_low(a.table[a.token[c.slot] * HIDDEN + i]);
  post(a.out + i, x, tag);
  a.residual[i] = x;
}

__device__ __forceinline__ void consume(const PersistentArgs &a, Shared &s) {
  Consumer c{s, a};
  pdl_wait();
  c.slot = a.row_slot[0];
  c.position = a.position[c.slot];
  c.base = a.state[1] * TAGS;
#pragma unroll 1
  for (; c.index < a.count; c.index++) {
    const int place = c.index % AHEAD;
    barrier_wait(s.ready + place, c.index / AHEAD & 1);
    const Instruction &in = s.program[place];
    const u32 tag = c.base + in.tag;
#ifdef ONLY  // one operation by itself, for inspection
    const int op = ONLY;
#else
    const int op = in.op;
#endif
    switch (op) {
      case EMBED: embed(c, tag, in.single); break;
      case DELTA: delta(c, tag, in.delta); break;
      case ATTEND: attend(c, tag, in.attention); break;
      case JOIN: join(c, tag, in.attention); break;
      case DOWN: down(c, tag, in.down); break;
      default: linear(c, op, tag, in.single);
    }
    consumer_sync();  // shared memory is free for the next instruction
    if (threadIdx.x == 0) barrier_arrive(s.done + place);
  }
  if (threadIdx.x == 0 && atomicAdd(a.state, 1u) == gridDim.x - 1) {  // the last block to finish
    a.state[0] = 0;
    a.state[1]++;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) decode_one(const PersistentArgs a) {
  extern __shared__ __align__(128) u8 memory[];
  Shared &s = *(Shared *)memory;
  if (threadIdx.x == 0) {
    for (int i = 0; i < RING_STAGES; i++) {
      barrier_init(s.full + i, 1);
      barrier_init(s.empty + i, 4);
    }
    for (int i = 0; i < AHEAD; i++) {
      barrier_init(s.ready + i, 1);
      barrier_init(s.done + i, 1);
    }
    barrier_init(&s.routed, 1);
    barrier_fence();
  }
  __syncthreads();
  pdl_trigger();  // the pick waits for this kernel's end anyhow
  if (threadIdx.x / 32 == CONSUMERS) produce(a, s);
  else consume(a, s);
}
