// Gated delta rule of one new token per row, with its causal convolution; and its prefill form.
// Eight neighbouring lanes own a state column (one v, all k), four k's each in turns of 32:
// k = 32 i + 4 (lane % 8) + j. State [slots, VALUE_HEADS, VALUE_DIM, KEY_DIM] fp32.

#define DELTA_THREADS 256

// Many rows: a block walks over (row, head) items, states come and go by bulk copies, three items in
// flight; the finished head is normed and gated at once.
#define BATCH_THREADS 512
#define STATE_STAGES 3
#define STATE_BYTES (VALUE_DIM * KEY_DIM * 4)

// What a thread needs of one item, read an item ahead: its channel's columns, gates, output gate.
struct Channel {
  float past3, past2, past1, now, z, a, b, a_log, dt_bias;
  float4 weight;
  float *ring;  // where the new column goes
};

extern "C" __global__ void __launch_bounds__(BATCH_THREADS) delta_batched(const DeltaArgs a) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ __align__(16) float qs[KEY_DIM], ks[KEY_DIM];
  __shared__ float vs[VALUE_DIM], os[VALUE_DIM], sums[8], squares[4];
  __shared__ __align__(8) u64 full[STATE_STAGES];
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, k0 = (lane & 7) * 4;
  const int items = a.rows * VALUE_HEADS;
  const int count = (items - (int)blockIdx.x + gridDim.x - 1) / gridDim.x;
  const auto state_of = [&](int i) {
    const int item = blockIdx.x + i * gridDim.x, slot = a.row_slot[item / VALUE_HEADS];
    return a.state + ((size_t)slot * VALUE_HEADS + item % VALUE_HEADS) * VALUE_DIM * KEY_DIM;
  };
  const auto request = [&](int i) {
    barrier_expect(full + i % STATE_STAGES, STATE_BYTES);
    bulk_copy(memory + i % STATE_STAGES * STATE_BYTES, state_of(i), STATE_BYTES, full + i % STATE_STAGES);
  };
  const auto channel_of = [&](int head) {  // q, k, v of the head: 3 x 128 threads
    const int key_head = head / (VALUE_HEADS / KEY_HEADS);
    return tid < 2 * KEY_DIM ? tid / KEY_DIM * KEY_WIDTH + key_head * KEY_DIM + tid % KEY_DIM
                             : 2 * KEY_WIDTH + head * VALUE_DIM + tid - 2 * KEY_DIM;
  };
  const auto read_channel = [&](int i) {
    Channel c = {};
    if (i >= count) return c;
    const int item = blockIdx.x + i * gridDim.x, row = item / VALUE_HEADS, head = item % VALUE_HEADS;
    const int slot = a.row_slot[row];
    const u64 p = a.position[slot];
    const float *x = a.qkv + (size_t)row * a.ld, *ab = a.ab + (size_t)row * a.ld_ab;
    c.a = ab[head], c.b = ab[VALUE_HEADS + head], c.a_log = a.a_log[head], c.dt_bias = a.dt_bias[head];
    if (tid < 3 * KEY_DIM) {
      const int channel = channel_of(head);
      float *ring = a.ring + (size_t)slot * 4 * CONV_WIDTH + channel;
      c.ring = ring + (p & 3) * CONV_WIDTH;
      c.weight = *(const float4 *)(a.conv + channel * 4);
      if (p >= 3) c.past3 = ring[((p - 3) & 3) * CONV_WIDTH];
      if (p >= 2) c.past2 = ring[((p - 2) & 3) * CONV_WIDTH];
      if (p >= 1) c.past1 = ring[((p - 1) & 3) * CONV_WIDTH];
      c.now = x[channel];
    } else {
      c.z = x[CONV_WIDTH + head * VALUE_DIM + tid - 3 * KEY_DIM];
    }
    return c;
  };
  if (tid == 0) {
    for (int s = 0; s < STATE_STAGES; s++) barrier_init(full + s, 1);
    barrier_fence();
    for (int i = 0; i < min(STATE_STAGES, count); i++) request(i);
  }
  __syncthreads();
  pdl_wait();
  pdl_trigger();
  Channel channel = read_channel(0);
  const float norm = tid >= 3 * KEY_DIM ? a.norm[tid - 3 * KEY_DIM] : 0.f;
#pragma unroll 1
  for (int i = 0; i < count; i++) {
    const int item = blockIdx.x + i * gridDim.x, row = item / VALUE_HEADS, head = item % VALUE_HEADS;
    const Channel next = read_channel(i + 1);
    const float c = silu(fmaf(channel.weight.x, channel.past3,
                              fmaf(channel.weight.y, channel.past2,
                                   fmaf(channel.weight.z, channel.past1, channel.weight.w * channel.now))));
    const Gates gate = make_gates(channel.a, channel.b, channel.a_log, channel.dt_bias);
    if (tid >= 2 * KEY_DIM ? tid < 3 * KEY_DIM : head % (VALUE_HEADS / KEY_HEADS) == 0)
      *channel.ring = channel.now;
    const float square = lane_sum(c * c);
    if (lane == 0 && warp < 8) sums[warp] = square;
    __syncthreads();
    if (tid < 2 * KEY_DIM) {
      const int half = tid / KEY_DIM * 4;
      const float unit = rsqrtf(sums[half] + sums[half + 1] + sums[half + 2] + sums[half + 3] + 1e-6f);
      if (tid < KEY_DIM) qs[tid] = c * unit * rsqrtf((float)KEY_DIM);
      else ks[tid - KEY_DIM] = c * unit;
    } else if (tid < 3 * KEY_DIM) {
      vs[tid - 2 * KEY_DIM] = c;
    }
    __syncthreads();
    float4 k[4], q[4];
    float kq = 0.f;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      k[j] = *(const float4 *)(ks + k0 + 32 * j);
      q[j] = *(const float4 *)(qs + k0 + 32 * j);
      kq += dot4(k[j], q[j]);
    }
    kq = lane_sum<8>(kq);
    barrier_wait(full + i % STATE_STAGES, i / STATE_STAGES & 1);
    float *state = (float *)(memory + i % STATE_STAGES * STATE_BYTES);
#pragma unroll
    for (int pass = 0; pass < 2; pass++) {
      const int column = pass * (BATCH_THREADS / 8) + (tid >> 3);
      float4 s[4];
#pragma unroll
      for (int j = 0; j < 4; j++) s[j] = *(const float4 *)(state + column * KEY_DIM + k0 + 32 * j);
      const float o = delta_column<4, 8>(s, k, q, kq, vs[column], gate);
#pragma unroll
      for (int j = 0; j < 4; j++) *(float4 *)(state + column * KEY_DIM + k0 + 32 * j) = s[j];
      if ((lane & 7) == 0) os[column] = o;
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (tid == 0) {
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(state_of(i)),
                   "r"(shared_address(state)), "r"(STATE_BYTES) : "memory");
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      // The item before has been read out when only this one's store is pending.
      if (i && i + STATE_STAGES - 1 < count) {
        asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
        request(i + STATE_STAGES - 1);
      }
    }
    const int d = tid - 3 * KEY_DIM;  // the last four warps, which hold the gate
    const float o = d >= 0 ? os[d] : 0.f;
    const float o_square = lane_sum(o * o);
    if (d >= 0 && lane == 0) squares[warp - 12] = o_square;
    __syncthreads();
    if (d >= 0) {
      const float r = rsqrtf((squares[0] + squares[1] + squares[2] + squares[3]) / VALUE_DIM + a.eps);
      a.gated[activation_index(row, head * VALUE_DIM + d)] = to_half(o * r * norm * silu(channel.z));
    }
    channel = next;
  }
  if (tid == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

struct PrefillArgs {
  const float *qkv;    // [rows, ld]
  const float *ab;
  const float *conv, *a_log, *dt_bias;
  float *ring, *state; // of all slots
  float *mixed;        // [rows, CONV_WIDTH] after convolution; q, k of unit length
  float *gates;        // [rows, 2 * VALUE_HEADS]: decay, beta
  float *o;            // [rows, VALUE_WIDTH]
  const u64 *where;    // slot, position of row 0, rows: on the device, so that a graph serves all
  int ld, ld_ab;
};

// Convolution of 128 channels of one row: grid (CONV_WIDTH / 128, rows).
extern "C" __global__ void __launch_bounds__(128) prefill_conv(const PrefillArgs a) {
  __shared__ float scratch[4];
  const int channel = blockIdx.x * 128 + threadIdx.x, row = blockIdx.y;
  const float4 w = *(const float4 *)(a.conv + channel * 4);
  pdl_wait();
  pdl_trigger();
  const u64 start = a.where[1];
  const float *ring = a.ring + a.where[0] * 4 * CONV_WIDTH + channel;
  float sum = w.w * a.qkv[(size_t)row * a.ld + channel];
#pragma unroll
  for (int back = 1; back < 4; back++) {
    const float tap = back == 1 ? w.z : back == 2 ? w.y : w.x;
    float x = 0.f;
    if (row >= back) x = a.qkv[(size_t)(row - back) * a.ld + channel];
    else if (start + row >= back) x = ring[((start + row - back) & 3) * CONV_WIDTH];
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
  const u64 start = a.where[1];
  const int rows = a.where[2];
  float *ring = a.ring + a.where[0] * 4 * CONV_WIDTH + channel;
  for (int row = max(0, rows - 4); row < rows; row++)
    ring[((start + row) & 3) * CONV_WIDTH] = a.qkv[(size_t)row * a.ld + channel];
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
  float4 s[4];
  pdl_wait();
  pdl_trigger();
  const int rows = a.where[2];
  float *state = a.state + ((a.where[0] * VALUE_HEADS + head) * VALUE_DIM + part * 32 + column) * KEY_DIM + k0;
#pragma unroll
  for (int i = 0; i < 4; i++)
    s[i] = a.where[1] ? *(const float4 *)(state + 32 * i) : make_float4(0.f, 0.f, 0.f, 0.f);
  const auto stage = [&](int set, int buffer) {  // 8 tokens x 128 q and k: one vector a thread
    const int token = tid / 32, row = set * STAGE + token, c = tid % 32 * 4;
    if (row >= rows) return;
    const float *m = a.mixed + (size_t)row * CONV_WIDTH;
    *(float4 *)(&qs[buffer][token][c]) = *(const float4 *)(m + key_head * KEY_DIM + c);
    *(float4 *)(&ks[buffer][token][c]) = *(const float4 *)(m + KEY_WIDTH + key_head * KEY_DIM + c);
    vs[buffer][token][tid % 32] = m[2 * KEY_WIDTH + head * VALUE_DIM + part * 32 + tid % 32];
    if (tid % 32 < 2) gs[buffer][token][tid % 32] = a.gates[(row * 2 + tid % 32) * VALUE_HEADS + head];
  };
  const int sets = (rows + STAGE - 1) / STAGE;
  stage(0, 0);
  __syncthreads();
  for (int set = 0; set < sets; set++) {
    const int buffer = set & 1, tokens = min(STAGE, rows - set * STAGE);
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
