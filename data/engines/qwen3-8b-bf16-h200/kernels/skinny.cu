// y[m, n] = sum over k of x[m, k] w[n, k], for at most 32 tokens m: each weight is read once, at
// the rate of memory.
//
// A thread block takes PASSES tiles of ROWS rows of w, one after the other; a cluster of CLUSTER
// blocks shares a tile and splits k. Weights stream through a ring of STAGES shared-memory stages
// by asynchronous copies; a ring of 200 KB keeps enough of them in flight that all multiprocessors
// are served alike. LEAD steps before a block has asked for its last weights the next kernel of the
// step may start: wherever a block has ended, the next one's fills its ring while others still
// drain. Tensor cores multiply 16 rows by 8 tokens by 16 k; WR warps split the rows, WK warps the k
// of a stage. Sums over warps and blocks run in fixed order.
//
// Input norm: x holds r * norm_weight in bfloat16, not yet normalised; its row scale 1 / rms(r) is
// applied to the float32 sums. sumsq_in[m, slot] are the sums of r^2 over 32 columns each.
//
// Compile-time: K, TOKENS (a power of two), ROWS, CLUSTER, PASSES, BK, STAGES, WR, WK, LEAD,
// SHIFT, MODE.
#define MODE_SCALE 0     // out[m, n] = scale * y, float32
#define MODE_RESIDUAL 1  // residual += y; out = bfloat16(residual * norm_weight); sumsq_out
#define MODE_SILU 2  // out = silu(gate) * up, bfloat16; rows n and n + n_out of w are gate and up

constexpr int NT = TOKENS > 8 ? TOKENS / 8 : 1;  // groups of 8 tokens
constexpr int WARPS = WR * WK;
constexpr int THREADS = WARPS * 32;
constexpr int TILES = ROWS / (16 * WR);  // 16-row tiles of a warp
constexpr int KC = K / CLUSTER;
constexpr int STEPS = KC / BK;
constexpr int TOTAL = PASSES * STEPS;
constexpr int TRIGGER = TOTAL - STAGES > LEAD ? TOTAL - STAGES - LEAD : 0;
constexpr int ROW_BYTES = BK * 2;
constexpr int CHUNKS = ROW_BYTES / 16;
constexpr int COPIES = ROWS * CHUNKS / THREADS;
constexpr int W_BYTES = ROWS * ROW_BYTES;
constexpr int STAGE_BYTES = W_BYTES + TOKENS * ROW_BYTES;
constexpr int OUT_ROWS = (MODE == MODE_SILU ? ROWS / 2 : ROWS) / CLUSTER;  // a block finishes these
constexpr int QUADS = OUT_ROWS / 4;   // a thread finishes four neighbours
constexpr int SUM_STRIDE = ROWS + 4;  // floats; the 4 keep eight lanes' stores off one bank
constexpr int SUM_BYTES = WK * NT * 8 * SUM_STRIDE * 4;
constexpr int SUMS_AT =
    PASSES > 1 ? STAGES * STAGE_BYTES : 0;  // with one pass the ring is free then
static_assert(COPIES * THREADS == ROWS * CHUNKS && THREADS % CHUNKS == 0, "copies divide evenly");
static_assert(STEPS * BK == KC && KC * CLUSTER == K, "k divides evenly");
static_assert((BK / 16) % WK == 0 && TILES * 16 * WR == ROWS, "warps divide the tile");
static_assert(PASSES > 1 || SUM_BYTES <= STAGES * STAGE_BYTES, "sums fit into the ring");
static_assert(PASSES == 1 || CLUSTER == 1, "blocks of a cluster read each other's sums once");
static_assert(MODE != MODE_RESIDUAL || (OUT_ROWS == 32 && THREADS >= QUADS * TOKENS && PASSES == 1),
              "a thread finishes one quad, eight threads one slot of 32 columns");

// Row of w behind row r of the tile; in MODE_SILU each 16 rows are 8 of gate and their 8 of up.
DEVICE int weight_row(int tile, int r, int n_out) {
  if (MODE == MODE_SILU) {
    int n = min(tile * (ROWS / 2) + (r >> 4) * 8 + (r & 7), n_out - 1);
    return (r & 8) ? n + n_out : n;
  }
  return min(tile * ROWS + r, n_out - 1);
}

struct Ring {
  u32 base;
  const u16 *w, *x;
  int k0, tokens, n_out;
  const u16* source[COPIES];  // this thread's chunks of the tile's first stage

  DEVICE u32 stage(int step) const { return base + (step % STAGES) * STAGE_BYTES; }
  // Where in k a step is. Blocks start SHIFT steps apart, so that they do not all want the same
  // tokens from L2 at the same time.
  DEVICE int k_at(int step) const {
    return k0 + (step + blockIdx.x / CLUSTER * SHIFT) % STEPS * BK;
  }
  DEVICE int tile(int step) const { return (blockIdx.x + step / STEPS * gridDim.x) / CLUSTER; }

  DEVICE void load_weights(int step) {
    int chunk = threadIdx.x % CHUNKS, row = threadIdx.x / CHUNKS;
    if (step % STEPS == 0) {
#pragma unroll
      for (int j = 0; j < COPIES; ++j) {
        int from = weight_row(tile(step), row + j * (THREADS / CHUNKS), n_out);
        source[j] = w + (u64)from * K + chunk * 8;
      }
    }
#pragma unroll
    for (int j = 0; j < COPIES; ++j)
      copy_async(stage(step) + swizzled<ROW_BYTES>(row + j * (THREADS / CHUNKS), chunk),
                 source[j] + k_at(step));
  }
  // The first stages' tokens, if few, through registers: asynchronous copies would wait behind all
  // weights of the ring. Rows beyond `tokens` stay unwritten: they only reach columns that nobody reads.
  DEVICE void copy_first_tokens(char* memory) const {
    constexpr int ROW = TOKENS * CHUNKS, ALL = (STAGES < TOTAL ? STAGES : TOTAL) * ROW;
    constexpr int EACH = (ALL + THREADS - 1) / THREADS, AT_ONCE = EACH < 8 ? EACH : 8;
    for (int first = threadIdx.x; first < ALL; first += AT_ONCE * THREADS) {
      uint4 values[AT_ONCE];
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        int i = first + j * THREADS, step = i / ROW, m = i % ROW / CHUNKS;
        if (i < ALL && m < tokens)
          values[j] = *(const uint4*)&x[(u64)m * K + k_at(step) + i % CHUNKS * 8];
      }
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        int i = first + j * THREADS, step = i / ROW, m = i % ROW / CHUNKS;
        if (i < ALL && m < tokens)
          *(uint4*)(memory + step * STAGE_BYTES + W_BYTES + swizzled<ROW_BYTES>(m, i % CHUNKS)) =
              values[j];
      }
    }
  }
  DEVICE void load_tokens(int step) const {
    for (int i = threadIdx.x; i < tokens * CHUNKS; i += THREADS) {
      int m = i / CHUNKS, chunk = i % CHUNKS;
      copy_async(stage(step) + W_BYTES + swizzled<ROW_BYTES>(m, chunk),
                 x + (u64)m * K + k_at(step) + chunk * 8);
    }
  }
};

DEVICE void load_token_fragment(u32 (&b)[NT][2], u32 tokens, int ks, int lane) {
  int row = lane & 7, chunk = ks * 2 + ((lane >> 3) & 1);
  if constexpr (NT == 1) {
    load_matrix_x2(b[0], tokens + swizzled<ROW_BYTES>(row % TOKENS, chunk));
  } else {
#pragma unroll
    for (int pair = 0; pair < NT / 2; ++pair) {
      u32 r[4];
      load_matrix_x4(r, tokens + swizzled<ROW_BYTES>(pair * 16 + row + ((lane >> 4) << 3), chunk));
      b[2 * pair][0] = r[0], b[2 * pair][1] = r[1];
      b[2 * pair + 1][0] = r[2], b[2 * pair + 1][1] = r[3];
    }
  }
}

DEVICE void multiply_stage(float (&sum)[TILES][NT][4], u32 stage, int wr, int wk, int lane) {
#pragma unroll
  for (int ks = wk; ks < BK / 16; ks += WK) {
    u32 b[NT][2];
    load_token_fragment(b, stage + W_BYTES, ks, lane);
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      u32 a[4];
      int row = (wr * TILES + tile) * 16 + (lane & 15);
      load_matrix_x4(a, stage + swizzled<ROW_BYTES>(row, ks * 2 + (lane >> 4)));
#pragma unroll
      for (int nt = 0; nt < NT; ++nt)
        multiply_add(sum[tile][nt], a[0], a[1], a[2], a[3], b[nt][0], b[nt][1]);
    }
  }
}

// sums[wk][token][row] of this block; clears the registers for the next tile.
DEVICE void store_sums(float* sums, float (&sum)[TILES][NT][4], int wr, int wk, int lane) {
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int row = (wr * TILES + tile) * 16 + (lane >> 2) + (i >> 1) * 8;
        int token = nt * 8 + (lane & 3) * 2 + (i & 1);
        sums[(wk * NT * 8 + token) * SUM_STRIDE + row] = sum[tile][nt][i];
        sum[tile][nt][i] = 0.f;
      }
}

// Four neighbouring rows, summed over warps and blocks.
DEVICE float4 total(const float* sums, int token, int row) {
  float4 y = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int rank = 0; rank < CLUSTER; ++rank)
#pragma unroll
    for (int wk = 0; wk < WK; ++wk) {
      const float4* p = (const float4*)&sums[(wk * NT * 8 + token) * SUM_STRIDE + row];
      float4 v = CLUSTER == 1 ? *p : load_from_rank(p, rank);
      y.x += v.x, y.y += v.y, y.z += v.z, y.w += v.w;
    }
  return y;
}

// 1 / rms of each token's residual, from its sums of squares in their fixed order.
DEVICE void row_scales(float* scale, const float* sumsq, int tokens, float eps, int warp,
                       int lane) {
  for (int m = warp; m < tokens; m += WARPS) {
    float s = 0.f;
#pragma unroll
    for (int slot = lane; slot < K / 32; slot += 32) s += sumsq[m * (K / 32) + slot];
    s = warp_sum(s);
    if (lane == 0) scale[m] = rsqrtf(s / K + eps);
  }
}

DEVICE void finish_scaled(float* out, const float* sums, const float* scale, int tokens, int n_out,
                          int tile, int rank) {
  for (int e = threadIdx.x; e < QUADS * tokens; e += THREADS) {
    int m = e / QUADS, local = rank * OUT_ROWS + e % QUADS * 4, n = tile * ROWS + local;
    float4 y = total(sums, m, local);
    float s = scale[m];
    if (n < n_out)
      *(float4*)&out[(u64)m * n_out + n] = make_float4(s * y.x, s * y.y, s * y.z, s * y.w);
  }
}

DEVICE float silu(float x) { return x / (1.f + __expf(-x)); }

DEVICE void finish_silu(u16* out, const float* sums, const float* scale, int tokens, int n_out,
                        int tile) {
  for (int e = threadIdx.x; e < QUADS * tokens; e += THREADS) {
    int m = e / QUADS, local = e % QUADS * 4, n = tile * OUT_ROWS + local;
    int row = (local >> 3) * 16 + (local & 7);
    float4 g = total(sums, m, row), u = total(sums, m, row + 8);
    float s = scale[m];
    if (n < n_out)
      *(uint2*)&out[(u64)m * n_out + n] =
          make_uint2(pack_bf16(silu(s * g.x) * s * u.x, silu(s * g.y) * s * u.y),
                     pack_bf16(silu(s * g.z) * s * u.z, silu(s * g.w) * s * u.w));
  }
}

struct Residual {
  int at, n, token;  // this thread's quad; token >= tokens: none
  float4 value;

  DEVICE Residual(const float* residual, int tokens, int n_out, int tile, int rank) {
    token = threadIdx.x / QUADS;
    n = tile * ROWS + rank * OUT_ROWS + threadIdx.x % QUADS * 4;
    at = token * n_out + n;
    if (token < tokens) value = *(const float4*)&residual[at];
  }
  DEVICE void finish(const float* sums, float* residual, u16* out, const u16* norm_weight,
                     float* sumsq, int tokens, int n_out, int rank) const {
    float squares = 0.f;
    if (token < tokens) {
      float4 y = total(sums, token, rank * OUT_ROWS + threadIdx.x % QUADS * 4);
      float4 r = make_float4(value.x + y.x, value.y + y.y, value.z + y.z, value.w + y.w);
      const u16* w = norm_weight + n;
      *(float4*)&residual[at] = r;
      *(uint2*)&out[at] = make_uint2(pack_bf16(r.x * to_float(w[0]), r.y * to_float(w[1])),
                                     pack_bf16(r.z * to_float(w[2]), r.w * to_float(w[3])));
      squares = r.x * r.x + r.y * r.y + r.z * r.z + r.w * r.w;
    }
#pragma unroll
    for (int offset = 4; offset > 0; offset >>= 1)
      squares += __shfl_xor_sync(0xffffffffu, squares, offset);
    if (token < tokens && n % 32 == 0) sumsq[token * (n_out / 32) + n / 32] = squares;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    skinny(const u16* __restrict__ w, const u16* x, const float* sumsq_in, const float* residual_in,
           float* residual_out, const u16* __restrict__ norm_weight, float* sumsq_out, void* out,
           int tokens, int n_out, float eps) {
  extern __shared__ __align__(128) char memory[];
  __shared__ float scale[TOKENS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wr = warp % WR, wk = warp / WR;
  const int rank = blockIdx.x % CLUSTER;
  Ring ring = {shared_address(memory), w, x, rank * KC, tokens, n_out};
  float* sums = (float*)(memory + SUMS_AT);

  for (int s = 0; s < STAGES; ++s) {
    if (s < TOTAL) ring.load_weights(s);
    copy_commit();
  }
  wait_for_previous_kernel();
  if (TOKENS <= 4) {
    ring.copy_first_tokens(memory);
  } else {
    for (int s = 0; s < STAGES; ++s) {
      if (s < TOTAL) ring.load_tokens(s);
      copy_commit();
    }
  }
  const Residual residual(residual_in, MODE == MODE_RESIDUAL ? tokens : 0, n_out, ring.tile(0),
                          rank);

  float sum[TILES][NT][4] = {};
  for (int step = 0; step < TOTAL; ++step) {
    copy_wait<STAGES - 2>();
    __syncthreads();
    int next = step + STAGES - 1;
    if (step > 0 && next < TOTAL) {
      ring.load_weights(next);
      ring.load_tokens(next);
    }
    copy_commit();
    if (step == TRIGGER) let_next_kernel_start();
    multiply_stage(sum, ring.stage(step), wr, wk, lane);
    if (step == 0 && MODE != MODE_RESIDUAL) row_scales(scale, sumsq_in, tokens, eps, warp, lane);

    if ((step + 1) % STEPS == 0) {
      if (PASSES == 1) {  // the sums take the ring's place
        copy_wait<0>();
        __syncthreads();
      }
      store_sums(sums, sum, wr, wk, lane);
      if (CLUSTER > 1)
        cluster_sync();
      else
        __syncthreads();
      int tile = ring.tile(step);
      if (MODE == MODE_SCALE) finish_scaled((float*)out, sums, scale, tokens, n_out, tile, rank);
      if (MODE == MODE_SILU) finish_silu((u16*)out, sums, scale, tokens, n_out, tile);
      if (MODE == MODE_RESIDUAL)
        residual.finish(sums, residual_out, (u16*)out, norm_weight, sumsq_out, tokens, n_out, rank);
    }
  }
  if (CLUSTER > 1) cluster_sync();  // nobody leaves while others still read its sums
}
