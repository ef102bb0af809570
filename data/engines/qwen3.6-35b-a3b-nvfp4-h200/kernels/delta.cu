// Gated delta rule of one new token per row, with its causal convolution. Eight neighbouring lanes
// own a state column (one v, all k), four k's each in turns of 32: k = 32 i + 4 (lane % 8) + j.
// State [slots, VALUE_HEADS, VALUE_DIM, KEY_DIM] fp32.

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
