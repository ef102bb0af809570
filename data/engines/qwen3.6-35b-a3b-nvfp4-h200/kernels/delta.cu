// Gated delta rule of one new token per row, with its causal convolution; and its prefill form.
// Eight neighbouring lanes own a state column (one v, all k), four k's each in turns of 32:
// k = 32 i + 4 (lane % 8) + j. State [slots, VALUE_HEADS, VALUE_DIM, KEY_DIM] fp32.

#define DELTA_THREADS 256
#define KEY_WIDTH (KEY_HEADS * KEY_DIM)

struct DeltaArgs {
  const float *qkv;        // [rows, ld] projections: q, k, v, z
  const float *ab;         // [rows, 2 * VALUE_HEADS] (padded to ld_ab)
  const float *conv;       // [CONV_WIDTH, 4]
  const float *a_log, *dt_bias, *norm;
  const int *row_slot;
  const u64 *position;     // [slots]
  float *ring;             // [slots, 4, CONV_WIDTH]
  float *state;
  float *o;                // decode at one row: [rows, VALUE_WIDTH]
  u16 *gated;              // batched decode: fp16 after gate and norm, see activation_index
  int ld, ld_ab;
  float eps;
};

__device__ __forceinline__ float softplus(float x) { return x > 20.f ? x : log1pf(__expf(x)); }

// The past part of a channel's convolution; position p reads ring entries p-3 .. p-1.
struct Tap { float past, weight; };
__device__ __forceinline__ Tap conv_past(const DeltaArgs &a, const float *ring, u64 p, int channel) {
  const float4 w = *(const float4 *)(a.conv + channel * 4);
  const float x3 = p >= 3 ? ring[((p - 3) & 3) * CONV_WIDTH + channel] : 0.f;
  const float x2 = p >= 2 ? ring[((p - 2) & 3) * CONV_WIDTH + channel] : 0.f;
  const float x1 = p >= 1 ? ring[((p - 1) & 3) * CONV_WIDTH + channel] : 0.f;
  return {fmaf(w.x, x3, fmaf(w.y, x2, w.z * x1)), w.w};
}

// COLUMNS of a head per block: 32 spreads one sequence over the GPU, VALUE_DIM lets the block
// finish the head (norm and gate).
template <int COLUMNS> __device__ __forceinline__ void delta_step(const DeltaArgs &a) {
  constexpr int PARTS = VALUE_DIM / COLUMNS, N = COLUMNS / 32;
  __shared__ __align__(16) float qs[KEY_DIM], ks[KEY_DIM];
  __shared__ float vs[COLUMNS], os[COLUMNS], sums[8], scratch[8];
  const int part = blockIdx.x % PARTS, head = blockIdx.x / PARTS % VALUE_HEADS;
  const int row = blockIdx.x / PARTS / VALUE_HEADS;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int slot = a.row_slot[row], key_head = head / (VALUE_HEADS / KEY_HEADS);
  const u64 p = a.position[slot];
  float *ring = a.ring + (size_t)slot * 4 * CONV_WIDTH;
  float *state = a.state + ((size_t)slot * VALUE_HEADS + head) * VALUE_DIM * KEY_DIM;
  float4 s[N][4];
  const int column = warp * 4 + (lane >> 3), k0 = (lane & 7) * 4;
#pragma unroll
  for (int n = 0; n < N; n++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      s[n][i] = *(const float4 *)(state + (part * COLUMNS + n * 32 + column) * KEY_DIM + k0 + 32 * i);
  const int qk = tid / KEY_DIM * KEY_WIDTH + key_head * KEY_DIM + tid % KEY_DIM;  // q, then k
  const int vc = 2 * KEY_WIDTH + head * VALUE_DIM + part * COLUMNS + tid;
  const Tap tap = conv_past(a, ring, p, qk);
  Tap vtap = {0.f, 0.f};
  if (tid < COLUMNS) vtap = conv_past(a, ring, p, vc);
  const float decay_rate = -__expf(a.a_log[head]), bias = a.dt_bias[head];
  pdl_wait();
  pdl_trigger();
  const float *x = a.qkv + (size_t)row * a.ld;
  const float now = x[qk], c = silu(fmaf(tap.weight, now, tap.past));
  const float *ab = a.ab + (size_t)row * a.ld_ab;
  const float g = __expf(decay_rate * softplus(ab[head] + bias)), beta = sigmoid(ab[VALUE_HEADS + head]);
  float *column_now = ring + (p & 3) * CONV_WIDTH;
  if (tid < COLUMNS) {
    const float v = x[vc];
    vs[tid] = silu(fmaf(vtap.weight, v, vtap.past));
    column_now[vc] = v;
  }
  if (part == 0 && head % (VALUE_HEADS / KEY_HEADS) == 0) column_now[qk] = now;
  const float square = lane_sum(c * c);
  if (lane == 0) sums[warp] = square;
  __syncthreads();
  const int half = tid / KEY_DIM * 4;
  const float unit = rsqrtf(sums[half] + sums[half + 1] + sums[half + 2] + sums[half + 3] + 1e-6f);
  if (tid < KEY_DIM) qs[tid] = c * unit * rsqrtf((float)KEY_DIM);
  else ks[tid - KEY_DIM] = c * unit;
  __syncthreads();
  float4 k[4], q[4];
  float kq = 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    k[i] = *(const float4 *)(ks + k0 + 32 * i);
    q[i] = *(const float4 *)(qs + k0 + 32 * i);
    kq += k[i].x * q[i].x + k[i].y * q[i].y + k[i].z * q[i].z + k[i].w * q[i].w;
  }
  kq = lane_sum<8>(kq);
#pragma unroll
  for (int n = 0; n < N; n++) {
    float sk = 0.f, sq = 0.f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float4 v = s[n][i];
      sk += v.x * k[i].x + v.y * k[i].y + v.z * k[i].z + v.w * k[i].w;
      sq += v.x * q[i].x + v.y * q[i].y + v.z * q[i].z + v.w * q[i].w;
    }
    sk = lane_sum<8>(sk);
    sq = lane_sum<8>(sq);
    const float u = beta * (vs[n * 32 + column] - g * sk);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float4 v = s[n][i];
      v.x = fmaf(u, k[i].x, g * v.x);
      v.y = fmaf(u, k[i].y, g * v.y);
      v.z = fmaf(u, k[i].z, g * v.z);
      v.w = fmaf(u, k[i].w, g * v.w);
      *(float4 *)(state + (part * COLUMNS + n * 32 + column) * KEY_DIM + k0 + 32 * i) = v;
    }
    const float o = fmaf(g, sq, u * kq);
    if ((lane & 7) == 0) {
      if (PARTS > 1) a.o[(size_t)row * VALUE_WIDTH + head * VALUE_DIM + part * COLUMNS + n * 32 + column] = o;
      else os[n * 32 + column] = o;
    }
  }
  if (PARTS > 1) return;
  __syncthreads();
  const float o = tid < VALUE_DIM ? os[tid] : 0.f;
  const float r = rsqrtf(block_sum<8>(o * o, scratch) / VALUE_DIM + a.eps);
  if (tid < VALUE_DIM)
    a.gated[activation_index(row, head * VALUE_DIM + tid)] =
        to_half(o * r * a.norm[tid] * silu(x[CONV_WIDTH + head * VALUE_DIM + tid]));
}
extern "C" __global__ void __launch_bounds__(DELTA_THREADS) delta_single(const DeltaArgs a) {
  delta_step<32>(a);
}
extern "C" __global__ void __launch_bounds__(DELTA_THREADS, 2) delta_batched(const DeltaArgs a) {
  delta_step<VALUE_DIM>(a);
}

struct PrefillArgs {
  const float *qkv;    // [rows, ld]
  const float *ab;
  const float *conv, *a_log, *dt_bias;
  float *ring, *state; // of the slot
  float *mixed;        // [rows, CONV_WIDTH] after convolution; q, k of unit length
  float *gates;        // [rows, 2 * VALUE_HEADS]: decay, beta
  float *o;            // [rows, VALUE_WIDTH]
  u64 start;           // position of row 0
  int rows, ld, ld_ab;
};

// Convolution of 128 channels of one row: grid (CONV_WIDTH / 128, rows).
extern "C" __global__ void __launch_bounds__(128) prefill_conv(const PrefillArgs a) {
  __shared__ float scratch[4];
  const int channel = blockIdx.x * 128 + threadIdx.x, row = blockIdx.y;
  const float4 w = *(const float4 *)(a.conv + channel * 4);
  pdl_wait();
  pdl_trigger();
  float sum = w.w * a.qkv[(size_t)row * a.ld + channel];
#pragma unroll
  for (int back = 1; back < 4; back++) {
    const float tap = back == 1 ? w.z : back == 2 ? w.y : w.x;
    float x = 0.f;
    if (row >= back) x = a.qkv[(size_t)(row - back) * a.ld + channel];
    else if (a.start + row >= back) x = a.ring[((a.start + row - back) & 3) * CONV_WIDTH + channel];
    sum = fmaf(tap, x, sum);
  }
  float c = silu(sum);
  if (channel < 2 * KEY_WIDTH) {
    const float square = block_sum<4>(c * c, scratch);
    c *= rsqrtf(square + 1e-6f) * (channel < KEY_WIDTH ? rsqrtf((float)KEY_DIM) : 1.f);
  }
  a.mixed[(size_t)row * CONV_WIDTH + channel] = c;
  if (blockIdx.x == 0 && threadIdx.x < VALUE_HEADS) {
    const int h = threadIdx.x;
    const float *ab = a.ab + (size_t)row * a.ld_ab;
    a.gates[row * 2 * VALUE_HEADS + h] = __expf(-__expf(a.a_log[h]) * softplus(ab[h] + a.dt_bias[h]));
    a.gates[row * 2 * VALUE_HEADS + VALUE_HEADS + h] = sigmoid(ab[VALUE_HEADS + h]);
  }
}

// Keep the last columns: after prefill_conv has read the old ones.
extern "C" __global__ void __launch_bounds__(128) prefill_ring(const PrefillArgs a) {
  const int channel = blockIdx.x * 128 + threadIdx.x;
  pdl_wait();
  pdl_trigger();
  for (int row = max(0, a.rows - 4); row < a.rows; row++)
    a.ring[((a.start + row) & 3) * CONV_WIDTH + channel] = a.qkv[(size_t)row * a.ld + channel];
}

// The recurrence over all rows of one sequence: block (32 columns, head), tokens staged in sets.
#define STAGE 8
extern "C" __global__ void __launch_bounds__(DELTA_THREADS) prefill_delta(const PrefillArgs a) {
  constexpr int PARTS = VALUE_DIM / 32;
  __shared__ __align__(16) float qs[2][STAGE][KEY_DIM], ks[2][STAGE][KEY_DIM];
  __shared__ float vs[2][STAGE][32], gs[2][STAGE][2];
  const int part = blockIdx.x % PARTS, head = blockIdx.x / PARTS;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int key_head = head / (VALUE_HEADS / KEY_HEADS), column = warp * 4 + (lane >> 3);
  const int k0 = (lane & 7) * 4;
  float *state = a.state + (size_t)head * VALUE_DIM * KEY_DIM + (part * 32 + column) * KEY_DIM + k0;
  float4 s[4];
  pdl_wait();
  pdl_trigger();
#pragma unroll
  for (int i = 0; i < 4; i++)
    s[i] = a.start ? *(const float4 *)(state + 32 * i) : make_float4(0.f, 0.f, 0.f, 0.f);
  const auto stage = [&](int set, int buffer) {  // 8 tokens x 128 q and k: one vector a thread
    const int token = tid / 32, row = set * STAGE + token, c = tid % 32 * 4;
    if (row >= a.rows) return;
    const float *m = a.mixed + (size_t)row * CONV_WIDTH;
    *(float4 *)(&qs[buffer][token][c]) = *(const float4 *)(m + key_head * KEY_DIM + c);
    *(float4 *)(&ks[buffer][token][c]) = *(const float4 *)(m + KEY_WIDTH + key_head * KEY_DIM + c);
    vs[buffer][token][tid % 32] = m[2 * KEY_WIDTH + head * VALUE_DIM + part * 32 + tid % 32];
    if (tid % 32 < 2) gs[buffer][token][tid % 32] = a.gates[(row * 2 + tid % 32) * VALUE_HEADS + head];
  };
  const int sets = (a.rows + STAGE - 1) / STAGE;
  stage(0, 0);
  __syncthreads();
  for (int set = 0; set < sets; set++) {
    const int buffer = set & 1, tokens = min(STAGE, a.rows - set * STAGE);
    if (set + 1 < sets) stage(set + 1, buffer ^ 1);
    for (int token = 0; token < tokens; token++) {
      const float g = gs[buffer][token][0], beta = gs[buffer][token][1];
      float4 k[4];
      float sk = 0.f, sq = 0.f, kq = 0.f;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        k[i] = *(const float4 *)(&ks[buffer][token][k0 + 32 * i]);
        const float4 q = *(const float4 *)(&qs[buffer][token][k0 + 32 * i]);
        sk += s[i].x * k[i].x + s[i].y * k[i].y + s[i].z * k[i].z + s[i].w * k[i].w;
        sq += s[i].x * q.x + s[i].y * q.y + s[i].z * q.z + s[i].w * q.w;
        kq += k[i].x * q.x + k[i].y * q.y + k[i].z * q.z + k[i].w * q.w;
      }
      sk = lane_sum<8>(sk);
      sq = lane_sum<8>(sq);
      kq = lane_sum<8>(kq);
      const float u = beta * (vs[buffer][token][column] - g * sk);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        s[i].x = fmaf(u, k[i].x, g * s[i].x);
        s[i].y = fmaf(u, k[i].y, g * s[i].y);
        s[i].z = fmaf(u, k[i].z, g * s[i].z);
        s[i].w = fmaf(u, k[i].w, g * s[i].w);
      }
      if ((lane & 7) == 0)
        a.o[(size_t)(set * STAGE + token) * VALUE_WIDTH + head * VALUE_DIM + part * 32 + column] =
            fmaf(g, sq, u * kq);
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 4; i++) *(float4 *)(state + 32 * i) = s[i];
}
