// y[m, n] = sum over k of x[m, k] w[n, k], for at most 32 tokens m: each weight is read once, at the rate of memory.
//
// A thread block takes PASSES tiles of ROWS rows of w, one after the other; a cluster of CLUSTER blocks shares a tile and
// splits k. Weights stream through a ring of STAGES shared-memory stages (asynchronous copies of 16 bytes), and AHEAD
// stages more are asked into L2. LEAD steps before this kernel has asked for its last weights the next kernel of the step
// may start: it fetches its own first weights while this one drains and hands over its sums, so memory does not idle
// between kernels. Tensor cores multiply 16 rows by 8 tokens by 16 k; WR warps split the rows, WK warps the k of a
// stage. Sums over warps and blocks run in fixed order.
//
// Input norm: x holds r * norm_weight in bfloat16, not yet normalised; its row scale 1 / rms(r) is applied to the
// float32 sums. sumsq_in[m, slot] are the sums of r^2 over 32 columns each.
//
// Compile-time: K, ROWS, CLUSTER, PASSES, NT (groups of 8 tokens), BK, STAGES, WR, WK, AHEAD, LEAD, MODE.
#define MODE_SCALE 0     // out[m, n] = scale * y, float32
#define MODE_RESIDUAL 1  // residual += y; out = bfloat16(residual * norm_weight); sumsq_out
#define MODE_SILU 2      // out = silu(gate) * up, bfloat16; rows n and n + n_out of w are gate and up

constexpr int WARPS = WR * WK;
constexpr int THREADS = WARPS * 32;
constexpr int TILES = ROWS / (16 * WR);  // 16-row tiles of a warp
constexpr int KC = K / CLUSTER;
constexpr int STEPS = KC / BK;
constexpr int ROW_BYTES = BK * 2;
constexpr int CHUNKS = ROW_BYTES / 16;
constexpr int COPIES = ROWS * CHUNKS / THREADS;
constexpr int W_BYTES = ROWS * ROW_BYTES;
constexpr int STAGE_BYTES = W_BYTES + NT * 8 * ROW_BYTES;
constexpr int OUT_ROWS = (MODE == MODE_SILU ? ROWS / 2 : ROWS) / CLUSTER;  // outputs that a block finishes
constexpr int SUM_STRIDE = ROWS + 4;  // floats; the 4 keep eight lanes' stores off one bank
static_assert(COPIES * THREADS == ROWS * CHUNKS && THREADS % CHUNKS == 0, "copies must divide evenly");
static_assert(STEPS * BK == KC && KC * CLUSTER == K, "k must divide evenly");
static_assert((BK / 16) % WK == 0 && TILES * 16 * WR == ROWS, "warps must divide the tile");
constexpr int TOTAL = PASSES * STEPS;
constexpr int LAST_ASK = TOTAL - STAGES - AHEAD;  // step that asks for the last weights
constexpr int TRIGGER = LAST_ASK > LEAD ? LAST_ASK - LEAD : 0;
constexpr int SUMS_AT = PASSES > 1 ? STAGES * STAGE_BYTES : 0;  // with one pass the ring is free by then
static_assert(PASSES > 1 || WK * NT * 8 * SUM_STRIDE * 4 <= STAGES * STAGE_BYTES, "sums must fit into the ring");
static_assert(PASSES == 1 || CLUSTER == 1, "blocks of a cluster read each other's sums: one pass only");
static_assert(ROWS <= THREADS, "one thread asks for one row");
static_assert(MODE != MODE_RESIDUAL || OUT_ROWS == 32, "one warp holds one slot of 32 columns");

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
  const u16* asked;           // the row that this thread asks into L2

  DEVICE u32 stage(int step) const { return base + (step % STAGES) * STAGE_BYTES; }
  DEVICE int tile(int step) const { return (blockIdx.x + step / STEPS * gridDim.x) / CLUSTER; }

  DEVICE void load_weights(int step) {
    int chunk = threadIdx.x % CHUNKS, row = threadIdx.x / CHUNKS;
    if (step % STEPS == 0) {
#pragma unroll
      for (int j = 0; j < COPIES; ++j)
        source[j] = w + (u64)weight_row(tile(step), row + j * (THREADS / CHUNKS), n_out) * K + k0 + chunk * 8;
    }
#pragma unroll
    for (int j = 0; j < COPIES; ++j)
      copy_async(stage(step) + swizzled<ROW_BYTES>(row + j * (THREADS / CHUNKS), chunk),
                 source[j] + step % STEPS * BK);
  }
  DEVICE void ask(int step) {
    if (AHEAD == 0 || step >= TOTAL || threadIdx.x >= ROWS) return;
    if (step == STAGES - 1 || step % STEPS == 0) asked = w + (u64)weight_row(tile(step), threadIdx.x, n_out) * K + k0;
    prefetch_l2(asked + step % STEPS * BK, ROW_BYTES);
  }
  // Rows of tokens beyond `tokens` stay unwritten: they only reach columns that nobody reads.
  DEVICE void load_tokens(int step) const {
    for (int i = threadIdx.x; i < tokens * CHUNKS; i += THREADS) {
      int m = i / CHUNKS, chunk = i % CHUNKS;
      copy_async(stage(step) + W_BYTES + swizzled<ROW_BYTES>(m, chunk),
                 x + (u64)m * K + k0 + step % STEPS * BK + chunk * 8);
    }
  }
};

DEVICE void load_token_fragment(u32 (&b)[NT][2], u32 tokens, int ks, int lane) {
  if constexpr (NT == 1) {
    load_matrix_x2(b[0], tokens + swizzled<ROW_BYTES>(lane & 7, ks * 2 + ((lane >> 3) & 1)));
  } else {
#pragma unroll
    for (int pair = 0; pair < NT / 2; ++pair) {
      u32 r[4];
      load_matrix_x4(r, tokens + swizzled<ROW_BYTES>(pair * 16 + (lane & 7) + ((lane >> 4) << 3),
                                                     ks * 2 + ((lane >> 3) & 1)));
      b[2 * pair][0] = r[0], b[2 * pair][1] = r[1], b[2 * pair + 1][0] = r[2], b[2 * pair + 1][1] = r[3];
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
      load_matrix_x4(a, stage + swizzled<ROW_BYTES>((wr * TILES + tile) * 16 + (lane & 15), ks * 2 + (lane >> 4)));
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) multiply_add(sum[tile][nt], a[0], a[1], a[2], a[3], b[nt][0], b[nt][1]);
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
        int row = (wr * TILES + tile) * 16 + (lane >> 2) + (i >> 1) * 8, token = nt * 8 + (lane & 3) * 2 + (i & 1);
        sums[(wk * NT * 8 + token) * SUM_STRIDE + row] = sum[tile][nt][i];
        sum[tile][nt][i] = 0.f;
      }
}

DEVICE float total(const float* sums, int token, int row) {
  float y = 0.f;
#pragma unroll
  for (int rank = 0; rank < CLUSTER; ++rank)
#pragma unroll
    for (int wk = 0; wk < WK; ++wk) {
      const float* p = sums + (wk * NT * 8 + token) * SUM_STRIDE + row;
      y += CLUSTER == 1 ? *p : load_from_rank(p, rank);
    }
  return y;
}

// 1 / rms of each token's residual, from its sums of squares in their fixed order.
DEVICE void row_scales(float* scale, const float* sumsq, int tokens, float eps, int warp, int lane) {
  for (int m = warp; m < tokens; m += WARPS) {
    float s = 0.f;
    for (int slot = lane; slot < K / 32; slot += 32) s += sumsq[m * (K / 32) + slot];
    s = warp_sum(s);
    if (lane == 0) scale[m] = rsqrtf(s / K + eps);
  }
}

struct Result {
  const float* residual_in;
  float* residual_out;
  const u16* norm_weight;
  float* sumsq_out;
  void* out;
  int tokens, n_out;
};

// What becomes of the sums of one tile; `rank` is this block's share of its rows.
DEVICE void finish(const Result& to, const float* sums, const float* scale, int tile, int rank) {
  for (int e = threadIdx.x; e < OUT_ROWS * to.tokens; e += THREADS) {
    int m = e / OUT_ROWS, local = rank * OUT_ROWS + e % OUT_ROWS;
    int n = tile * OUT_ROWS * CLUSTER + local;
    if (n >= to.n_out) continue;
    u64 at = (u64)m * to.n_out + n;
    if (MODE == MODE_SCALE) {
      ((float*)to.out)[at] = scale[m] * total(sums, m, local);
    } else if (MODE == MODE_SILU) {
      int row = (local >> 3) * 16 + (local & 7);
      float gate = scale[m] * total(sums, m, row), up = scale[m] * total(sums, m, row + 8);
      ((u16*)to.out)[at] = to_bf16(gate / (1.f + __expf(-gate)) * up);
    } else {
      float r = to.residual_in[at] + total(sums, m, local);
      to.residual_out[at] = r;
      ((u16*)to.out)[at] = to_bf16(r * to_float(to.norm_weight[n]));
      float squares = warp_sum(r * r);
      if ((threadIdx.x & 31) == 0) to.sumsq_out[m * (to.n_out / 32) + n / 32] = squares;
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    skinny(const u16* __restrict__ w, const u16* x, const float* sumsq_in, const float* residual_in,
           float* residual_out, const u16* __restrict__ norm_weight, float* sumsq_out, void* out, int tokens,
           int n_out, float eps) {
  extern __shared__ __align__(128) char memory[];
  __shared__ float scale[NT * 8];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wr = warp % WR, wk = warp / WR;
  const int rank = blockIdx.x % CLUSTER;
  const Result result = {residual_in, residual_out, norm_weight, sumsq_out, out, tokens, n_out};
  Ring ring = {shared_address(memory), w, x, rank * KC, tokens, n_out};
  float* sums = (float*)(memory + SUMS_AT);

  for (int s = 0; s < STAGES - 1; ++s) {
    if (s < TOTAL) ring.load_weights(s);
    copy_commit();
  }
  for (int s = STAGES - 1; s < STAGES - 1 + AHEAD; ++s) ring.ask(s);
  wait_for_previous_kernel();
  for (int s = 0; s < STAGES - 1; ++s) {
    if (s < TOTAL) ring.load_tokens(s);
    copy_commit();
  }
  if (MODE != MODE_RESIDUAL) row_scales(scale, sumsq_in, tokens, eps, warp, lane);

  float sum[TILES][NT][4] = {};
  for (int step = 0; step < TOTAL; ++step) {
    copy_wait<STAGES - 2>();
    __syncthreads();
    int next = step + STAGES - 1;
    if (next < TOTAL) {
      ring.load_weights(next);
      ring.load_tokens(next);
    }
    copy_commit();
    ring.ask(next + AHEAD);
    if (step == TRIGGER) let_next_kernel_start();
    multiply_stage(sum, ring.stage(step), wr, wk, lane);

    if ((step + 1) % STEPS == 0) {
      if (PASSES == 1) {  // the sums take the ring's place
        copy_wait<0>();
        __syncthreads();
      }
      store_sums(sums, sum, wr, wk, lane);
      if (CLUSTER > 1) cluster_sync(); else __syncthreads();
      finish(result, sums, scale, ring.tile(step), rank);
    }
  }
  if (CLUSTER > 1) cluster_sync();  // nobody leaves while others still read its sums
}
