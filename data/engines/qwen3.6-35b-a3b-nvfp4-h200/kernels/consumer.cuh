// The computing warps of the resident kernel (producer.cuh): products. What does not depend on the
// instruction before is read first.

__device__ __forceinline__ void consumer_sync() {
  asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

struct Consumer {
  Shared &s;
  const PersistentArgs &a;
  int index = 0, slot = 0;
  u64 position = 0;
  u32 base = 0;                // of the tags of this launch
  u32 cursor = 0, routed = 0;  // stages consumed; parity

  // Four warps wait for and release a stage, `ahead` of the first that is not yet consumed.
  __device__ __forceinline__ const u8 *wait(u32 ahead) {
    const u32 n = cursor + ahead;
    barrier_wait(s.full + n % RING_STAGES, n / RING_STAGES & 1);
    return s.ring[n % RING_STAGES];
  }
  __device__ __forceinline__ void release(u32 ahead) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) barrier_arrive(s.empty + (cursor + ahead) % RING_STAGES);
  }
  __device__ __forceinline__ void wait_routed() {
    barrier_wait(&s.routed, routed);
    routed ^= 1;
  }
};

// Sum over the consumers, the same in every thread.
__device__ __forceinline__ float consumer_sum(float x, float *scratch) {
  x = lane_sum(x);
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = x;
  consumer_sync();
  float total = 0.f;
#pragma unroll
  for (int w = 0; w < CONSUMERS; w++) total += scratch[w];
  return total;
}

// Zero-centred RMS norm of the residual stream into shared fp16; thread t owns pairs t + THREADS i.
__device__ __forceinline__ void norm_to_shared(const Post *x, const float *norm, float eps, u32 tag, Shared &s) {
  constexpr int PAIRS = HIDDEN / THREADS / 2;
  float2 w[PAIRS];
  uint2 v[PAIRS];
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < PAIRS; i++) w[i] = *(const float2 *)(norm + 2 * (threadIdx.x + i * THREADS));
  fetch_pairs<PAIRS>(x + 2 * threadIdx.x, THREADS, tag, v);
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    const float a = __uint_as_float(v[i].x), b = __uint_as_float(v[i].y);
    sum = fmaf(a, a, fmaf(b, b, sum));
  }
  const float r = rsqrtf(consumer_sum(sum, s.scratch) / HIDDEN + eps);
#pragma unroll
  for (int i = 0; i < PAIRS; i++)
    ((u32 *)s.xs)[threadIdx.x + i * THREADS] = pack_half2(__uint_as_float(v[i].x) * r * (1.f + w[i].x),
                                                          __uint_as_float(v[i].y) * r * (1.f + w[i].y));
  consumer_sync();
}

// Norm of each value head times SiLU of the gate; a warp owns neighbouring heads.
__device__ __forceinline__ void gate_to_shared(const SingleArgs &a, u32 tag, Shared &s) {
  constexpr int PAIRS = VALUE_WIDTH / THREADS / 2, OF_HEAD = VALUE_DIM / 64;
  const int first = (threadIdx.x >> 5) * PAIRS * 32 + (threadIdx.x & 31);
  uint2 z[PAIRS], v[PAIRS];
  float2 factor[PAIRS];
  fetch_pairs<PAIRS>(a.z + 2 * first, 32, tag, z);
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    const float2 w = *(const float2 *)(a.norm + 2 * (first + 32 * i) % VALUE_DIM);
    factor[i] = make_float2(silu(__uint_as_float(z[i].x)) * w.x, silu(__uint_as_float(z[i].y)) * w.y);
  }
  fetch_pairs<PAIRS>(a.in + 2 * first, 32, tag, v);
#pragma unroll
  for (int head = 0; head < PAIRS / OF_HEAD; head++) {
    float sum = 0.f;
#pragma unroll
    for (int i = head * OF_HEAD; i < (head + 1) * OF_HEAD; i++) {
      const float x = __uint_as_float(v[i].x), y = __uint_as_float(v[i].y);
      sum = fmaf(x, x, fmaf(y, y, sum));
    }
    const float r = rsqrtf(lane_sum(sum) / VALUE_DIM + a.eps);
#pragma unroll
    for (int i = head * OF_HEAD; i < (head + 1) * OF_HEAD; i++)
      ((u32 *)s.xs)[first + 32 * i] = pack_half2(__uint_as_float(v[i].x) * r * factor[i].x,
                                                 __uint_as_float(v[i].y) * r * factor[i].y);
  }
  consumer_sync();
}

// COUNT words, each a pair of fp16, as they are.
template <int COUNT> __device__ __forceinline__ void words_to_shared(const Post *p, u32 tag, Shared &s) {
#pragma unroll
  for (int first = 0; first < COUNT / 2; first += THREADS) {
    const int i = first + threadIdx.x;
    if ((COUNT / 2) % THREADS && i >= COUNT / 2) break;
    fetch_pairs<1>(p + 2 * i, 0, tag, (uint2 *)s.xs + i);
  }
  consumer_sync();
}

// Sixteen row sums of each of `count` tiles: four warps share a stage, each takes a quarter of its
// columns and leaves its part in `red`.
template <int KIND, int K> __device__ __forceinline__ void sum_tiles(Consumer &c, int count) {
  constexpr int PARTS = K / part_columns(KIND), COLUMNS = part_columns(KIND) / 4;
  const int warp = threadIdx.x >> 5, quarter = warp % 4;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll 1
  for (int j = warp / 4; j < count * PARTS; j += QUADS) {
    const u16 *x = c.s.xs + j % PARTS * part_columns(KIND) + quarter * COLUMNS + 4 * t;
    const u8 *part = c.wait(j) + quarter * (tile_bytes(KIND, part_columns(KIND)) / 4);
    float acc[4][4] = {};
    if (KIND == NVFP4) {
#pragma unroll 2
      for (int i = 0; i < COLUMNS / 128; i++) {
        uint2 columns[8];
        load_columns<8>(x + i * 128, columns);
        dot_group(part + i * GROUP_BYTES, columns, acc);
      }
    } else {
      constexpr int BLOCKS = KIND == FP8 ? 2 : 1;  // of sixteen columns, a vector
#pragma unroll
      for (int i = 0; i < COLUMNS / 16 / BLOCKS; i++) {
        const uint4 v = ((const uint4 *)part)[i * 32 + lane];
        uint2 columns[BLOCKS];
        load_columns<BLOCKS>(x + i * BLOCKS * 16, columns);
        u32 f[4] = {v.x, v.y, v.z, v.w};
        if (KIND == F16) {
          mma(acc[i & 3], f, columns[0]);
        } else {
          unpack_fp8(v.x, v.y, f);
          mma(acc[i & 1 ? 2 : 0], f, columns[0]);
          unpack_fp8(v.z, v.w, f);
          mma(acc[i & 1 ? 3 : 1], f, columns[BLOCKS - 1]);
        }
      }
    }
    c.release(j);
    const float unit = KIND == NVFP4 ? FP4_UNIT : 1.f;
    if (t == 0) {  // every column holds the same token
      c.s.red[j * 4 + quarter][g] = four_sum(acc, 0) * unit;
      c.s.red[j * 4 + quarter][g + 8] = four_sum(acc, 2) * unit;
    }
  }
  c.cursor += count * PARTS;
}
// One row of a tile whose sums are in `count` neighbouring places.
__device__ __forceinline__ float row_sum(const Shared &s, int tile, int count, int row) {
  float v = 0.f;
#pragma unroll 4
  for (int i = 0; i < count; i++) v += s.red[tile * count + i][row];
  return v;
}

// One code for all products of one row: it must stay in the instruction cache.
__device__ __forceinline__ void linear(Consumer &c, int op, u32 tag, const SingleArgs &a) {
  Share share = share_of(a);
  const bool experts = op == GATE_UP, residual = op == OUT_GATED || op == OUT_RAW;
  if (experts) share = {(int)blockIdx.x % UP_BLOCKS * UP_TILES, blockIdx.x < HIDDEN / 16 ? UP_TILES : 0, false};
  if (!share.count) return;
  const bool swiglu = (op == ROUTE && !share.second) || experts;
  const int i = threadIdx.x / 16, row = threadIdx.x % 16, stride = experts ? 1 : a.grid_main;
  const auto tile_of = [&](int done) { return share.first + (done + i) * stride; };
  if (op == OUT_GATED) gate_to_shared(a, tag, c.s);
  else if (op == OUT_RAW) words_to_shared<VALUE_WIDTH / 2>(a.in, tag, c.s);
  else norm_to_shared(a.in, a.norm, a.eps, op == ROUTE || experts ? tag : tag - 1, c.s);
  const float *alphas = share.second ? a.alpha16 : a.alpha;
  Post *out = share.second ? a.out16 : a.out;
  if (experts) {
    c.wait_routed();
    alphas += (size_t)c.s.ids[blockIdx.x / UP_BLOCKS] * (WIDTH / 4);
    out += blockIdx.x / UP_BLOCKS * (WIDTH / 2);
  }
  const int parts = residual || share.second ? 4 : 2, batch = BATCH_PARTS / parts;
#pragma unroll 1
  for (int done = 0; done < share.count; done += batch) {
    const int count = min(batch, share.count - done), tile = tile_of(done), at = tile * 16 + row;
    float2 alpha = {0.f, 0.f};  // of rows 0 to 7, 8 to 15
    float before = 0.f;
    if (i < count) {
      alpha = *(const float2 *)(alphas + tile * 2);
      if (residual) before = a.residual[at];
    }
    if (done) consumer_sync();  // the sums of the batch before have been read
    if (share.second) sum_tiles<F16, HIDDEN>(c, count);
    else if (op == PROJECT) sum_tiles<FP8, HIDDEN>(c, count);
    else if (residual) sum_tiles<FP8, VALUE_WIDTH>(c, count);
    else sum_tiles<NVFP4, HIDDEN>(c, count);
    consumer_sync();
    float v = i < count ? row_sum(c.s, i, parts * 4, row) * (row < 8 ? alpha.x : alpha.y) : 0.f;
    if (swiglu) {
      v = silu(v) * __shfl_down_sync(~0u, v, 8) * H_SCALE;
      const float next = __shfl_down_sync(~0u, v, 1);
      if (i < count && row < 8 && row % 2 == 0) post(out + tile * 4 + row / 2, pack_half2(v, next), tag);
    } else if (i < count) {
      if (op == HEAD) a.logits[at] = v;
      else post(out + at, v + before, tag);
      if (residual) a.residual[at] = v + before;
    }
  }
}

// Down of the chosen experts and the shared one, combined into the residual stream: a row tile a
// block. A stage holds two experts, half an expert a warp; the last one the shared expert.
__device__ __forceinline__ void down(Consumer &c, u32 tag, const DownArgs &a) {
  constexpr int TILES = HIDDEN / 16, GROUPS = WIDTH / 128, ROUNDS = TOP_K / DOWN_EXPERTS;
  static_assert(GROUPS == 4 && ROUNDS == QUADS, "two warps an expert, four for the shared one");
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, tile = blockIdx.x, rank = warp / 2;
  if (tile >= TILES) return;
  if (c.index == 0) c.wait_routed();
  const float2 alpha = *(const float2 *)(a.alpha + ((size_t)c.s.ids[rank] * TILES + tile) * 2);
  const float2 shared_alpha = *(const float2 *)(a.shared_alpha + tile * 2);
  const float before = threadIdx.x < 16 ? a.residual[tile * 16 + threadIdx.x] : 0.f;
  float total = 0.f;
#pragma unroll
  for (int r = 0; r < TOP_K; r++) total += __expf(c.s.chosen[r] - c.s.chosen[0]);
  const float weight = __expf(c.s.chosen[rank] - c.s.chosen[0]) / total * (FP4_UNIT / H_SCALE);
  const float shared_weight = sigmoid(c.s.chosen[TOP_K]) * (FP4_UNIT / H_SCALE);
  words_to_shared<ROWS_PER_TOKEN * WIDTH / 2>(a.h, tag, c.s);
  float top = 0.f, bottom = 0.f;
#pragma unroll 1
  for (int i = 0; i < 3; i++) {  // two groups of an expert; the first four warps one of the shared
    const bool shared = i == 2;
    if (shared && warp >= GROUPS) break;
    const int stage = shared ? ROUNDS : warp / 4, group = shared ? warp : warp % 2 * 2 + i;
    const u8 *part = c.wait(stage) + ((shared ? 0 : rank % 2 * GROUPS) + group) * GROUP_BYTES;
    float acc[4][4] = {};
    uint2 x[8];
    load_columns<8>(c.s.xs + (shared ? TOP_K : rank) * WIDTH + group * 128 + 4 * (lane & 3), x);
    dot_group(part, x, acc);
    if (i) c.release(stage);
    top = fmaf(four_sum(acc, 0), shared ? shared_alpha.x * shared_weight : alpha.x * weight, top);
    bottom = fmaf(four_sum(acc, 2), shared ? shared_alpha.y * shared_weight : alpha.y * weight, bottom);
  }
  if ((lane & 3) == 0) c.s.red[warp][lane >> 2] = top, c.s.red[warp][8 + (lane >> 2)] = bottom;
  c.cursor += ROUNDS + 1;
  consumer_sync();
  if (threadIdx.x >= 16) return;
  const float v = before + row_sum(c.s, 0, CONSUMERS, threadIdx.x);
  post(a.out + tile * 16 + threadIdx.x, v, tag);
  a.residual[tile * 16 + threadIdx.x] = v;
}
