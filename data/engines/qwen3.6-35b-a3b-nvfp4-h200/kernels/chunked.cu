// Gated delta rule of a prompt in chunks of 64 tokens (arXiv 2412.06464, section 3.3): within a chunk
// by products, from chunk to chunk by the state. With c the summed log decay inside the chunk,
//   D_ij = exp(c_i - c_j) for i >= j;  A = strict lower(beta_i k_i.k_j D_ij);
//   U = (1 + A)^-1 beta V;  W = (1 + A)^-1 beta e^c K;  P = lower(Q K^T D);
//   V' = U - W S;  O = e^c Q S + P V';  S <- e^(c of the last) S + (e^(c of the last - c) K)^T V'.
// q and k are rounded to fp16 once and used so everywhere, hence the system stays consistent; it is
// solved in fp32. Rows beyond the prompt have k = v = beta = 0 and no decay: the state ignores them.

#define CHUNK 64
#define ROW (KEY_DIM + 8)    // fp16 of a padded row of q, k, w
#define PAIR (CHUNK + 8)     // elements of a padded row of p (fp16), of a column of u (fp32)
#define V_UNIT 16.f          // values, states and outputs are fp16 times this: 4e-6 .. 4,000
#define PARTS (VALUE_DIM / 32)
#define AB (CONV_WIDTH + VALUE_WIDTH)  // where the gates' columns begin

struct ChunkArgs {
  const float *y;      // [rows, ld]: q, k, v, z, a, b before the multipliers of their columns
  const float *alpha;  // [ld]
  const float *conv, *a_log, *dt_bias, *norm;
  float *ring, *state; // of all slots
  u16 *q, *k;          // [KEY_HEADS, padded, ROW] fp16: of unit length, q times KEY_DIM^-1/2
  float *v;            // [padded, VALUE_WIDTH]
  float *gates;        // [2, VALUE_HEADS, padded]: log decay, beta
  float *sums;         // [VALUE_HEADS, padded]: log decay summed within the chunk
  u16 *w, *p;          // [VALUE_HEADS, chunks, CHUNK, ROW], [.., CHUNK, PAIR] fp16
  float *u;            // [VALUE_HEADS, chunks, VALUE_DIM, PAIR]
  float *o;            // [padded, VALUE_WIDTH]
  u16 *gated;          // [rows, VALUE_WIDTH] fp16
  const u64 *where;    // slot, position of row 0, rows: on the device, so that a graph serves all
  int padded, ld;      // rows to whole chunks
  float eps;
};

__device__ __forceinline__ float4 times(const float4 &a, const float4 &b) {
  return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}

// Convolution and gates: block (head of 128 channels, chunk), a warp eight rows, a lane four channels;
// the last block of a chunk makes the gates, a lane a head.
extern "C" __global__ void __launch_bounds__(256) prompt_conv(const ChunkArgs a) {
  const int lane = threadIdx.x & 31, first = blockIdx.y * CHUNK + (threadIdx.x >> 5) * 8;
  pdl_wait();
  pdl_trigger();
  const long long start = a.where[1];
  const int rows = a.where[2], head = blockIdx.x;
  if (head == CONV_WIDTH / 128) {
    static_assert(VALUE_HEADS == 32, "a lane a head");
    for (int row = first; row < first + 8; row++) {
      float decay = 0.f, beta = 0.f;
      if (row < rows) {
        const float *ab = a.y + (size_t)row * a.ld + AB + lane, *unit = a.alpha + AB + lane;
        decay = -__expf(a.a_log[lane]) * softplus(ab[0] * unit[0] + a.dt_bias[lane]);
        beta = sigmoid(ab[VALUE_HEADS] * unit[VALUE_HEADS]);
      }
      a.gates[lane * a.padded + row] = decay;
      a.gates[(VALUE_HEADS + lane) * a.padded + row] = beta;
    }
    return;
  }
  const int channel = head * 128 + 4 * lane;
  const float4 unit = *(const float4 *)(a.alpha + channel);
  const float *ring = a.ring + a.where[0] * 4 * CONV_WIDTH + channel;
  float4 tap[4], past[3];
#pragma unroll
  for (int j = 0; j < 4; j++) tap[j] = *(const float4 *)(a.conv + (channel + j) * 4);
#pragma unroll
  for (int back = 3; back; back--) {
    const int row = first - back;
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
    if (row >= 0 && row < rows) x = times(*(const float4 *)(a.y + (size_t)row * a.ld + channel), unit);
    else if (row < 0 && start + row >= 0) x = *(const float4 *)(ring + (start + row & 3) * CONV_WIDTH);
    past[3 - back] = x;
  }
  const auto mix = [](const float4 &w, float x3, float x2, float x1, float x0) {
    return silu(fmaf(w.x, x3, fmaf(w.y, x2, fmaf(w.z, x1, w.w * x0))));
  };
#pragma unroll
  for (int row = first; row < first + 8; row++) {
    float4 c = make_float4(0.f, 0.f, 0.f, 0.f);
    if (row < rows) {
      const float4 x = times(*(const float4 *)(a.y + (size_t)row * a.ld + channel), unit);
      c.x = mix(tap[0], past[0].x, past[1].x, past[2].x, x.x);
      c.y = mix(tap[1], past[0].y, past[1].y, past[2].y, x.y);
      c.z = mix(tap[2], past[0].z, past[1].z, past[2].z, x.z);
      c.w = mix(tap[3], past[0].w, past[1].w, past[2].w, x.w);
      past[0] = past[1], past[1] = past[2], past[2] = x;
    }
    if (head >= 2 * KEY_HEADS) {
      *(float4 *)(a.v + (size_t)row * VALUE_WIDTH + channel - 2 * KEY_WIDTH) = c;
      continue;
    }
    const float square = lane_sum(c.x * c.x + c.y * c.y + c.z * c.z + c.w * c.w);
    const float length = rsqrtf(square + 1e-6f) * (head < KEY_HEADS ? rsqrtf((float)KEY_DIM) : 1.f);
    u16 *to = (head < KEY_HEADS ? a.q : a.k) + ((size_t)(head % KEY_HEADS) * a.padded + row) * ROW;
    *(uint2 *)(to + 4 * lane) = make_uint2(pack_half2(c.x * length, c.y * length),
                                           pack_half2(c.z * length, c.w * length));
  }
}

// Addresses for ldmatrix of a 16 x 16 block of fp16 rows: as an A operand (or, transposed, two B
// operands), and as two B operands of eight rows each.
__device__ __forceinline__ void load_a(u32 *f, const u16 *block, int stride) {
  const int lane = threadIdx.x & 31;
  load_matrices<false>(f, block + ((lane & 7) + (lane >> 3 & 1) * 8) * stride + (lane >> 4) * 8);
}
__device__ __forceinline__ void load_transposed(u32 *f, const u16 *block, int stride) {
  const int lane = threadIdx.x & 31;
  load_matrices<true>(f, block + ((lane & 7) + (lane >> 3 & 1) * 8) * stride + (lane >> 4) * 8);
}
__device__ __forceinline__ void load_b(u32 *f, const u16 *block, int stride) {
  const int lane = threadIdx.x & 31;
  load_matrices<false>(f, block + ((lane & 7) + (lane >> 4) * 8) * stride + (lane >> 3 & 1) * 8);
}
__device__ __forceinline__ void mma_two(float (*d)[4], const u32 *f, const u32 *b) {
  mma(d[0], f, make_uint2(b[0], b[1]));
  mma(d[1], f, make_uint2(b[2], b[3]));
}

// Inside a chunk: block (chunk, head). Products in tensor cores; then a thread solves one column.
extern "C" __global__ void __launch_bounds__(256, 2) prompt_chunk(const ChunkArgs a) {
  extern __shared__ __align__(16) u8 memory[];
  float *system = (float *)memory;  // [CHUNK, PAIR]
  u16 *ks = (u16 *)(system + CHUNK * PAIR), *qs = ks + CHUNK * ROW;
  __shared__ float sums[CHUNK], betas[CHUNK];
  const int chunk = blockIdx.x, head = blockIdx.y, tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int g = lane >> 2, t = lane & 3, row0 = chunk * CHUNK;
  const size_t place = (size_t)head * gridDim.x + chunk;
  pdl_wait();
  pdl_trigger();
  const int rows = a.where[2];
  if (chunk == 0) {  // keep the last columns for whoever goes on: prompt_conv has read the old ones
    static_assert(CONV_WIDTH == VALUE_HEADS * 256, "a thread a channel");
    const int channel = head * 256 + tid;
    float *ring = a.ring + a.where[0] * 4 * CONV_WIDTH + channel;
    for (int row = max(0, rows - 4); row < rows; row++)
      ring[(a.where[1] + row & 3) * CONV_WIDTH] = a.y[(size_t)row * a.ld + channel] * a.alpha[channel];
  }
  if (row0 >= rows) return;
  const size_t keys = ((size_t)(head / (VALUE_HEADS / KEY_HEADS)) * a.padded + row0) * ROW;
  for (int i = tid; i < CHUNK * ROW / 8; i += 256) {
    ((uint4 *)ks)[i] = ((const uint4 *)(a.k + keys))[i];
    ((uint4 *)qs)[i] = ((const uint4 *)(a.q + keys))[i];
  }
  const float *gates = a.gates + head * a.padded + row0;
  if (warp == 0) {
    const float2 decay = *(const float2 *)(gates + 2 * lane);
    float sum = decay.x + decay.y;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const float x = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += x;
    }
    const float2 both = make_float2(sum - decay.y, sum);
    *(float2 *)(sums + 2 * lane) = both;
    *(float2 *)(a.sums + head * a.padded + row0 + 2 * lane) = both;
  } else if (warp < 3) {
    const int i = tid - 32;
    betas[i] = gates[VALUE_HEADS * a.padded + i];
  }
  __syncthreads();
  float kk[4][4] = {}, qk[4][4] = {};
  const int m0 = (warp & 3) * 16, n0 = (warp >> 2) * 32;
#pragma unroll
  for (int s = 0; s < KEY_DIM; s += 16) {
    u32 fk[4], fq[4], b[4];
    load_a(fk, ks + m0 * ROW + s, ROW);
    load_a(fq, qs + m0 * ROW + s, ROW);
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
      load_b(b, ks + (n0 + n * 8) * ROW + s, ROW);
      mma_two(kk + n, fk, b);
      mma_two(qk + n, fq, b);
    }
  }
#pragma unroll
  for (int n = 0; n < 4; n++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int i = m0 + g + half * 8, j = n0 + n * 8 + 2 * t;
      const float d0 = j <= i ? __expf(sums[i] - sums[j]) : 0.f;
      const float d1 = j + 1 <= i ? __expf(sums[i] - sums[j + 1]) : 0.f;
      const float beta = betas[i];
      *(float2 *)(system + i * PAIR + j) = make_float2(j < i ? beta * kk[n][2 * half] * d0 : 0.f,
                                                       j + 1 < i ? beta * kk[n][2 * half + 1] * d1 : 0.f);
      *(u32 *)(a.p + (place * CHUNK + i) * PAIR + j) =
          pack_half2(qk[n][2 * half] * d0, qk[n][2 * half + 1] * d1);
    }
  __syncthreads();
  const bool of_keys = tid >= VALUE_DIM;  // a column of W, not of U
  const int column = tid % VALUE_DIM;
  float *solved = (float *)qs + tid;  // a column of its own in [CHUNK, 256]: q is no longer needed
#pragma unroll 1
  for (int i0 = 0; i0 < CHUNK; i0 += 16) {  // loops, for code that runs once is bound by its fetching
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; i++)
      x[i] = betas[i0 + i] * (of_keys ? __expf(sums[i0 + i]) * from_half(ks[(i0 + i) * ROW + column])
                                      : V_UNIT * a.v[(size_t)(row0 + i0 + i) * VALUE_WIDTH + head * VALUE_DIM + column]);
#pragma unroll 1
    for (int j0 = 0; j0 < i0; j0 += 4) {
      const float u0 = solved[j0 * 256], u1 = solved[j0 * 256 + 256], u2 = solved[j0 * 256 + 512],
                  u3 = solved[j0 * 256 + 768];
#pragma unroll
      for (int i = 0; i < 16; i++) {
        const float4 l = *(const float4 *)(system + (i0 + i) * PAIR + j0);
        x[i] -= (l.x * u0 + l.y * u1) + (l.z * u2 + l.w * u3);
      }
    }
#pragma unroll
    for (int i = 0; i < 16; i++) {
#pragma unroll
      for (int j = 0; j < i; j++) x[i] = fmaf(-system[(i0 + i) * PAIR + i0 + j], x[j], x[i]);
      solved[(i0 + i) * 256] = x[i];
      if (of_keys) a.w[(place * CHUNK + i0 + i) * ROW + column] = to_half(x[i]);
    }
    if (of_keys) continue;
    float *u = a.u + (place * VALUE_DIM + column) * PAIR + i0;
#pragma unroll
    for (int i = 0; i < 16; i += 4) *(float4 *)(u + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
  }
}

struct ChunkStage {
  u16 k[CHUNK * ROW], q[CHUNK * ROW], w[CHUNK * ROW], p[CHUNK * PAIR];
  float u[32 * PAIR], sums[CHUNK];
};

// From chunk to chunk: block (32 columns of the values, head), a warp sixteen of them. All products
// have the transposed state, values and outputs as rows, so that a warp passes its results on to its
// next products in registers.
extern "C" __global__ void __launch_bounds__(64) prompt_scan(const ChunkArgs a) {
  extern __shared__ __align__(128) u8 memory[];
  ChunkStage *stages = (ChunkStage *)memory;
  __shared__ __align__(8) u64 full[2];
  const int part = blockIdx.x % PARTS, head = blockIdx.x / PARTS;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
  const int chunks = a.padded / CHUNK, column = part * 32 + warp * 16 + g;
  if (tid == 0) {
    barrier_init(full, 1);
    barrier_init(full + 1, 1);
    barrier_fence();
  }
  __syncthreads();
  pdl_wait();
  pdl_trigger();
  const int count = ((int)a.where[2] + CHUNK - 1) / CHUNK;
  const auto request = [&](int chunk) {
    ChunkStage &s = stages[chunk & 1];
    u64 *barrier = full + (chunk & 1);
    const size_t place = (size_t)head * chunks + chunk;
    const size_t keys = ((size_t)(head / (VALUE_HEADS / KEY_HEADS)) * a.padded + chunk * CHUNK) * ROW;
    barrier_expect(barrier, sizeof(ChunkStage));
    bulk_copy(s.k, a.k + keys, sizeof(s.k), barrier);
    bulk_copy(s.q, a.q + keys, sizeof(s.q), barrier);
    bulk_copy(s.w, a.w + place * CHUNK * ROW, sizeof(s.w), barrier);
    bulk_copy(s.p, a.p + place * CHUNK * PAIR, sizeof(s.p), barrier);
    bulk_copy(s.u, a.u + (place * VALUE_DIM + part * 32) * PAIR, sizeof(s.u), barrier);
    bulk_copy(s.sums, a.sums + head * a.padded + chunk * CHUNK, sizeof(s.sums), barrier);
  };
  if (tid == 0) {
    asm volatile("fence.proxy.async.global;" ::: "memory");  // all was written by ordinary stores
    for (int chunk = 0; chunk < min(2, count); chunk++) request(chunk);
  }
  float state[KEY_DIM / 8][4];  // rows g, g + 8 of this warp's columns; k = 8 n + 2 t, + 1
  float *kept = a.state + ((a.where[0] * VALUE_HEADS + head) * VALUE_DIM + column) * KEY_DIM + 2 * t;
#pragma unroll
  for (int n = 0; n < KEY_DIM / 8; n++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float2 s = a.where[1] ? *(const float2 *)(kept + half * 8 * KEY_DIM + n * 8) : make_float2(0.f, 0.f);
      state[n][2 * half] = s.x * V_UNIT, state[n][2 * half + 1] = s.y * V_UNIT;
    }
  for (int chunk = 0; chunk < count; chunk++) {
    const ChunkStage &s = stages[chunk & 1];
    u32 f[KEY_DIM / 16][4], v[CHUNK / 16][4], b[4];
#pragma unroll
    for (int k = 0; k < KEY_DIM / 16; k++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        f[k][i] = pack_half2(state[2 * k + i / 2][i % 2 * 2], state[2 * k + i / 2][i % 2 * 2 + 1]);
    barrier_wait(full + (chunk & 1), chunk >> 1 & 1);
    float values[CHUNK / 8][4] = {}, out[CHUNK / 8][4] = {};
#pragma unroll
    for (int k = 0; k < KEY_DIM / 16; k++)
#pragma unroll
      for (int n = 0; n < CHUNK / 8; n += 2) {
        load_b(b, s.w + n * 8 * ROW + k * 16, ROW);
        mma_two(values + n, f[k], b);
        load_b(b, s.q + n * 8 * ROW + k * 16, ROW);
        mma_two(out + n, f[k], b);
      }
    const float last = s.sums[CHUNK - 1];
    float2 later[CHUNK / 8];  // decay from a token to the end of the chunk
#pragma unroll
    for (int n = 0; n < CHUNK / 8; n++) {
      const float2 c = *(const float2 *)(s.sums + n * 8 + 2 * t);
      const float e0 = __expf(c.x), e1 = __expf(c.y);
      later[n] = make_float2(__expf(last - c.x), __expf(last - c.y));
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float2 u = *(const float2 *)(s.u + (warp * 16 + g + half * 8) * PAIR + n * 8 + 2 * t);
        values[n][2 * half] = u.x - values[n][2 * half];
        values[n][2 * half + 1] = u.y - values[n][2 * half + 1];
        out[n][2 * half] *= e0, out[n][2 * half + 1] *= e1;
      }
    }
#pragma unroll
    for (int k = 0; k < CHUNK / 16; k++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        v[k][i] = pack_half2(values[2 * k + i / 2][i % 2 * 2], values[2 * k + i / 2][i % 2 * 2 + 1]);
#pragma unroll
    for (int k = 0; k < CHUNK / 16; k++)
#pragma unroll
      for (int n = 2 * k; n < CHUNK / 8; n += 2) {  // p is lower triangular
        load_b(b, s.p + n * 8 * PAIR + k * 16, PAIR);
        mma_two(out + n, v[k], b);
      }
    float *o = a.o + (size_t)chunk * CHUNK * VALUE_WIDTH + head * VALUE_DIM + column;
#pragma unroll
    for (int n = 0; n < CHUNK / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        o[(size_t)(n * 8 + 2 * t + i % 2) * VALUE_WIDTH + i / 2 * 8] = out[n][i] / V_UNIT;
#pragma unroll
    for (int k = 0; k < CHUNK / 16; k++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int n = 2 * k + i / 2, at = i % 2 * 2;
        v[k][i] = pack_half2(values[n][at] * later[n].x, values[n][at + 1] * later[n].y);
      }
    const float decay = __expf(last);
#pragma unroll
    for (int n = 0; n < KEY_DIM / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) state[n][i] *= decay;
#pragma unroll
    for (int k = 0; k < CHUNK / 16; k++)
#pragma unroll
      for (int n = 0; n < KEY_DIM / 8; n += 2) {
        load_transposed(b, s.k + k * 16 * ROW + n * 8, ROW);
        mma_two(state + n, v[k], b);
      }
    __syncthreads();
    if (tid == 0 && chunk + 2 < count) request(chunk + 2);
  }
#pragma unroll
  for (int n = 0; n < KEY_DIM / 8; n++)
#pragma unroll
    for (int half = 0; half < 2; half++)
      *(float2 *)(kept + half * 8 * KEY_DIM + n * 8) =
          make_float2(state[n][2 * half] / V_UNIT, state[n][2 * half + 1] / V_UNIT);
}

// Norm of each head's output, times SiLU of the gate: grid (rows, VALUE_HEADS / 8), a warp a head.
extern "C" __global__ void __launch_bounds__(256) prompt_gated(const ChunkArgs a) {
  const int row = blockIdx.x, lane = threadIdx.x & 31;
  const int column = (blockIdx.y * 8 + (threadIdx.x >> 5)) * VALUE_DIM + 4 * lane;
  const float4 norm = *(const float4 *)(a.norm + 4 * lane);
  const float4 unit = *(const float4 *)(a.alpha + CONV_WIDTH + column);
  pdl_wait();
  pdl_trigger();
  uint2 *to = (uint2 *)(a.gated + (size_t)row * VALUE_WIDTH + column);
  if (row >= (int)a.where[2]) {  // beyond the prompt: a NaN there would pass through masked values
    *to = make_uint2(0, 0);
    return;
  }
  const float4 o = *(const float4 *)(a.o + (size_t)row * VALUE_WIDTH + column);
  const float4 z = times(*(const float4 *)(a.y + (size_t)row * a.ld + CONV_WIDTH + column), unit);
  const float square = lane_sum(o.x * o.x + o.y * o.y + o.z * o.z + o.w * o.w);
  const float r = rsqrtf(square / VALUE_DIM + a.eps);
  *to = make_uint2(pack_half2(o.x * r * norm.x * silu(z.x), o.y * r * norm.y * silu(z.y)),
                   pack_half2(o.z * r * norm.z * silu(z.z), o.w * r * norm.w * silu(z.w)));
}
