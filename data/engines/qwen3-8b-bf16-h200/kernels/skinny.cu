// y[m, n] = sum over k of x[m, k] w[n, k], for at most 32 tokens m: each weight is read once, at the rate of memory.
//
// A thread block takes ROWS rows of w; a cluster of CLUSTER blocks shares them and splits k. Weights stream through a
// ring of STAGES shared-memory stages (asynchronous copies of 16 bytes). The ring is filled before
// the previous kernel of the step has ended, so memory never idles between kernels. Tensor cores multiply 16 rows by
// 8 tokens by 16 k; WR warps split the rows, WK warps the k of a stage. Sums over warps and blocks run in fixed order.
//
// Input norm: x holds r * norm_weight in bfloat16, not yet normalised; its row scale 1 / rms(r) is applied to the
// float32 sums. sumsq_in[m, slot] are the sums of r^2 over 32 columns each.
//
// Compile-time: K, ROWS, CLUSTER, NT (groups of 8 tokens), BK, STAGES, WR, WK, MODE.
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
static_assert(WK * NT * 8 * SUM_STRIDE * 4 <= STAGES * STAGE_BYTES, "sums must fit into the ring");
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
  const u16* source[COPIES];

  DEVICE Ring(u32 base, const u16* w, int tile, int k0, int n_out) : base(base) {
    int chunk = threadIdx.x % CHUNKS, row = threadIdx.x / CHUNKS;
#pragma unroll
    for (int j = 0; j < COPIES; ++j)
      source[j] = w + (u64)weight_row(tile, row + j * (THREADS / CHUNKS), n_out) * K + k0 + chunk * 8;
  }
  DEVICE u32 stage(int step) const { return base + (step % STAGES) * STAGE_BYTES; }

  DEVICE void load_weights(int step) const {
    int chunk = threadIdx.x % CHUNKS, row = threadIdx.x / CHUNKS;
#pragma unroll
    for (int j = 0; j < COPIES; ++j)
      copy_async(stage(step) + swizzled<ROW_BYTES>(row + j * (THREADS / CHUNKS), chunk), source[j] + step * BK);
  }
  // Rows of tokens beyond `tokens` stay unwritten: they only reach columns that nobody reads.
  DEVICE void load_tokens(int step, const u16* x, int k0, int tokens) const {
    for (int i = threadIdx.x; i < tokens * CHUNKS; i += THREADS) {
      int m = i / CHUNKS, chunk = i % CHUNKS;
      copy_async(stage(step) + W_BYTES + swizzled<ROW_BYTES>(m, chunk),
                 x + (u64)m * K + k0 + step * BK + chunk * 8);
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

// sums[wk][token][row] of this block.
DEVICE void store_sums(float* sums, float (&sum)[TILES][NT][4], int wr, int wk, int lane) {
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int row = (wr * TILES + tile) * 16 + (lane >> 2) + (i >> 1) * 8, token = nt * 8 + (lane & 3) * 2 + (i & 1);
        sums[(wk * NT * 8 + token) * SUM_STRIDE + row] = sum[tile][nt][i];
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

extern "C" __global__ void __launch_bounds__(THREADS)
    skinny(const u16* __restrict__ w, const u16* x, const float* sumsq_in,
           const float* residual_in, float* residual_out, const u16* __restrict__ norm_weight, float* sumsq_out,
           void* out, int tokens, int n_out, float eps) {
  extern __shared__ __align__(128) char memory[];
  __shared__ float scale[NT * 8];
  let_next_kernel_start();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wr = warp % WR, wk = warp / WR;
  const int rank = blockIdx.x % CLUSTER, tile = blockIdx.x / CLUSTER, k0 = rank * KC;
  const Ring ring(shared_address(memory), w, tile, k0, n_out);

  for (int s = 0; s < STAGES - 1; ++s) {
    if (s < STEPS) ring.load_weights(s);
    copy_commit();
  }
  wait_for_previous_kernel();
  for (int s = 0; s < STAGES - 1; ++s) {
    if (s < STEPS) ring.load_tokens(s, x, k0, tokens);
    copy_commit();
  }
  if (MODE != MODE_RESIDUAL) row_scales(scale, sumsq_in, tokens, eps, warp, lane);

  float sum[TILES][NT][4] = {};
  for (int step = 0; step < STEPS; ++step) {
    copy_wait<STAGES - 2>();
    __syncthreads();
    int next = step + STAGES - 1;
    if (next < STEPS) {
      ring.load_weights(next);
      ring.load_tokens(next, x, k0, tokens);
    }
    copy_commit();
    multiply_stage(sum, ring.stage(step), wr, wk, lane);
  }

  copy_wait<0>();
  __syncthreads();
  float* sums = (float*)memory;
  store_sums(sums, sum, wr, wk, lane);
  if (CLUSTER > 1) cluster_sync(); else __syncthreads();

  for (int e = threadIdx.x; e < OUT_ROWS * tokens; e += THREADS) {
    int m = e / OUT_ROWS, local = rank * OUT_ROWS + e % OUT_ROWS;
    int n = tile * OUT_ROWS * CLUSTER + local;
    if (n >= n_out) continue;
    u64 at = (u64)m * n_out + n;
    if (MODE == MODE_SCALE) {
      ((float*)out)[at] = scale[m] * total(sums, m, local);
    } else if (MODE == MODE_SILU) {
      int row = (local >> 3) * 16 + (local & 7);
      float gate = scale[m] * total(sums, m, row), up = scale[m] * total(sums, m, row + 8);
      ((u16*)out)[at] = to_bf16(gate / (1.f + __expf(-gate)) * up);
    } else {
      float r = residual_in[at] + total(sums, m, local);
      residual_out[at] = r;
      ((u16*)out)[at] = to_bf16(r * to_float(norm_weight[n]));
      float square = warp_sum(r * r);
      if (lane == 0) sumsq_out[m * (n_out / 32) + n / 32] = square;
    }
  }
  if (CLUSTER > 1) cluster_sync();  // nobody leaves while others still read its sums
}
