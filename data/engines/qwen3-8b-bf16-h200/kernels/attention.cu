// One decode token per sequence against its paged KV cache, from the raw query, key and value
// products.
//
// A cluster of SPLITS blocks takes one key-value head of one sequence. Each block has GROUPS groups
// of four warps; the groups of all blocks take pages in turn. Past pages are copied before the previous kernel has ended. Each block
// norms and rotates the GROUP query heads; the one that owns the current page also norms, rotates
// and stores the new key and value. Each warp takes 16 tokens of a page: scores q k^T
// and p v by tensor cores, running softmax in float32; then sums over warps and blocks in fixed
// order.
//
// Compile-time: HEADS, KV_HEADS, SPLITS, GROUPS, STAGES. Head dimension 128, pages of 64 tokens.
constexpr int D = 128, PAGE = 64, WARPS = 4 * GROUPS, THREADS = 32 * WARPS;
constexpr int OWNERS = SPLITS * GROUPS;  // of pages, in turn
constexpr int GROUP = HEADS / KV_HEADS;
constexpr int ROW_BYTES = D * 2;
constexpr int PAGE_BYTES = PAGE * ROW_BYTES;
constexpr int STAGE_BYTES = 2 * PAGE_BYTES;
constexpr int QKV = (HEADS + 2 * KV_HEADS) * D;
#define NEVER __int_as_float(0xff800000)  // minus infinity: the score of a token that is not seen
static_assert(GROUP <= 8, "query heads of a group are rows of one 16-row tile");

struct State {  // running softmax of one query head (row lane / 4) over this warp's tokens
  float max, sum, out[D / 8][4];
};

// Rows from `valid` on are filled with zeros: stale bits there could be NaN, and 0 * NaN is not 0.
DEVICE void load_page(u32 stage, const u16* k, const u16* v, int valid) {
#pragma unroll 4
  for (int i = threadIdx.x % 128; i < PAGE * 16; i += 128) {
    int row = i / 16, chunk = i % 16, bytes = row < valid ? 16 : 0;
    u32 to = stage + swizzled<ROW_BYTES>(row, chunk);
    copy_async(to, k + row * D + chunk * 8, bytes);
    copy_async(to + PAGE_BYTES, v + row * D + chunk * 8, bytes);
  }
}

// RMS norm of one head of 128 values, then rotation by halves; the warp writes bfloat16 to `to`.
DEVICE void norm_rotate(const float* x, const u16* weight, const float* cosine, const float* sine,
                        float eps, u16* to) {
  int lane = threadIdx.x & 31;
  float v[4], squares = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = x[lane + 32 * i], squares += v[i] * v[i];
  float scale = rsqrtf(warp_sum(squares) / D + eps);
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] *= scale * to_float(weight[lane + 32 * i]);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float c = cosine[lane + 32 * i], s = sine[lane + 32 * i];
    to[lane + 32 * i] = to_bf16(v[i] * c - v[i + 2] * s);
    to[lane + 32 * i + 64] = to_bf16(v[i + 2] * c + v[i] * s);
  }
}

// Scores of 16 tokens, softmax update, and their part of the output. `first` is the first token's
// position.
DEVICE void attend(State& state, const u32 (&q)[D / 16][2], u32 stage, int token, int first,
                   int last, float scale_log2) {
  int lane = threadIdx.x & 31;
  float score[2][4] = {};
#pragma unroll
  for (int ks = 0; ks < D / 16; ++ks) {
    u32 k[4];
    load_matrix_x4(k, stage + swizzled<ROW_BYTES>(token + (lane & 7) + ((lane >> 4) << 3),
                                                  ks * 2 + ((lane >> 3) & 1)));
    multiply_add(score[0], q[ks][0], 0, q[ks][1], 0, k[0], k[1]);
    multiply_add(score[1], q[ks][0], 0, q[ks][1], 0, k[2], k[3]);
  }
  float p[4], top = state.max;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    bool visible = first + (i >> 1) * 8 + (lane & 3) * 2 + (i & 1) <= last;
    p[i] = visible ? score[i >> 1][i & 1] * scale_log2 : NEVER;
    top = fmaxf(top, p[i]);
  }
  top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
  top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
  float shift = top == NEVER ? 0.f : top;
  float keep = exp2_fast(state.max - shift);
  state.max = top;
  state.sum *= keep;
#pragma unroll
  for (int i = 0; i < 4; ++i) p[i] = exp2_fast(p[i] - shift), state.sum += p[i];
  u32 low = pack_bf16(p[0], p[1]), high = pack_bf16(p[2], p[3]);
#pragma unroll
  for (int j = 0; j < D / 16; ++j) {
    u32 v[4];
    load_matrix_x4_transposed(
        v, stage + PAGE_BYTES + swizzled<ROW_BYTES>(token + (lane & 15), j * 2 + (lane >> 4)));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float (&o)[4] = state.out[2 * j + half];
      o[0] *= keep, o[1] *= keep;
      multiply_add(o, low, 0, high, 0, v[2 * half], v[2 * half + 1]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    decode_attention(const float* qkv, const u16* __restrict__ q_norm,
                     const u16* __restrict__ k_norm, const float* __restrict__ cosine,
                     const float* __restrict__ sine, u16* k_cache, u16* v_cache,
                     const int* __restrict__ block_table, const int* __restrict__ positions,
                     u16* __restrict__ out, int table_stride, float eps, float scale_log2) {
  extern __shared__ __align__(128) char memory[];
  __shared__ u16 query[GROUP][D], fresh[2][D];
  __shared__ float warp_max[WARPS][8], warp_sum_[WARPS][8], block_max[8], block_sum[8],
      block_out[GROUP][D];
  const int rank = blockIdx.x, head = blockIdx.y, row = blockIdx.z;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int group = threadIdx.x / 128, owner = rank * GROUPS + group, d = threadIdx.x % 128;
  const int* table = block_table + row * table_stride;
  int first_pages[STAGES];  // read before the position is known: one latency instead of two
#pragma unroll
  for (int i = 0; i < STAGES; ++i)
    first_pages[i] = owner + i * OWNERS < table_stride ? table[owner + i * OWNERS] : 0;
  const int position = positions[row], last_page = position / PAGE;
  const u32 ring = shared_address(memory);
  const int turns = last_page < rank * GROUPS ? 0 : (last_page - rank * GROUPS) / OWNERS + 1;
  auto stage_at = [&](int i) { return (i % STAGES * GROUPS + group) * STAGE_BYTES; };
  auto start = [&](int i, int page) {
    u64 at = ((u64)page * KV_HEADS + head) * PAGE * D;
    if (owner + i * OWNERS <= last_page)
      load_page(ring + stage_at(i), k_cache + at, v_cache + at,
                position - (owner + i * OWNERS) * PAGE);
  };
#pragma unroll
  for (int i = 0; i < STAGES; ++i) {
    if (i < turns) start(i, first_pages[i]);
    copy_commit();
  }
  if (turns <= STAGES)
    let_next_kernel_start();  // later, its weights would compete with these pages
  wait_for_previous_kernel();

  const float* mine = qkv + (u64)row * QKV;
  const float *c = cosine + (u64)position * (D / 2), *s = sine + (u64)position * (D / 2);
  for (int h = warp; h < GROUP; h += WARPS)
    norm_rotate(mine + (head * GROUP + h) * D, q_norm, c, s, eps, query[h]);
  if (last_page % OWNERS / GROUPS == rank) {  // this block owns the new token
    u64 at = (((u64)table[last_page] * KV_HEADS + head) * PAGE + position % PAGE) * D;
    if (warp == GROUP % WARPS) norm_rotate(mine + (HEADS + head) * D, k_norm, c, s, eps, fresh[0]);
    if (group == 0) fresh[1][d] = to_bf16(mine[(HEADS + KV_HEADS + head) * D + d]);
    __syncthreads();
    if (group == 0) k_cache[at + d] = fresh[0][d], v_cache[at + d] = fresh[1][d];
  }
  __syncthreads();

  u32 q[D / 16][2];
#pragma unroll
  for (int ks = 0; ks < D / 16; ++ks)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      q[ks][half] = g < GROUP ? *(const u32*)&query[g][ks * 16 + half * 8 + t * 2] : 0u;

  State state = {NEVER, 0.f, {}};
  for (int i = 0; i < turns; ++i) {
    int page = owner + i * OWNERS;
    u32 stage = stage_at(i);
    copy_wait<STAGES - 1>();
    __syncthreads();
    if (last_page % OWNERS / GROUPS == rank && i + 1 == turns) {
      if (page == last_page) {
        u32 at = stage + swizzled<ROW_BYTES>(position % PAGE, d / 8) + (d % 8) * 2;
        *(u16*)(memory + at) = fresh[0][d];
        *(u16*)(memory + at + PAGE_BYTES) = fresh[1][d];
      }
      __syncthreads();
    }
    int token = warp % 4 * 16;
    if (page * PAGE + token <= position)
      attend(state, q, ring + stage, token, page * PAGE + token, position, scale_log2);
    if (i + STAGES < turns) {
      __syncthreads();
      int next = page + STAGES * OWNERS;
      start(i + STAGES, next <= last_page ? table[next] : 0);
      if (i + STAGES + 1 == turns) let_next_kernel_start();
    }
    copy_commit();
  }

  // All warps into one: out, max and sum of this block.
  copy_wait<0>();
  __syncthreads();
  float* parts = (float*)memory;  // [warp][query head][D]
  state.sum += __shfl_xor_sync(0xffffffffu, state.sum, 1);
  state.sum += __shfl_xor_sync(0xffffffffu, state.sum, 2);
  if (g < GROUP) {
    if (t == 0) warp_max[warp][g] = state.max, warp_sum_[warp][g] = state.sum;
#pragma unroll
    for (int j = 0; j < D / 8; ++j)
      *(float2*)&parts[(warp * GROUP + g) * D + j * 8 + t * 2] =
          make_float2(state.out[j][0], state.out[j][1]);
  }
  __syncthreads();
  for (int h = group; h < GROUP; h += GROUPS) {
    float top = NEVER, sum = 0.f, value = 0.f;
    for (int w = 0; w < WARPS; ++w) top = fmaxf(top, warp_max[w][h]);
    for (int w = 0; w < WARPS; ++w) {
      float weight = warp_max[w][h] == NEVER ? 0.f : exp2_fast(warp_max[w][h] - top);
      sum += weight * warp_sum_[w][h];
      value += weight * parts[(w * GROUP + h) * D + d];
    }
    block_out[h][d] = value;
    if (d == 0) block_max[h] = top, block_sum[h] = sum;
  }

  // Blocks of the cluster into one; each finishes its share of the GROUP * D outputs.
  if (SPLITS > 1)
    cluster_sync();
  else
    __syncthreads();
  constexpr int SHARE = GROUP * D / SPLITS;
  for (int e = threadIdx.x; e < SHARE; e += THREADS) {
    int h = (rank * SHARE + e) / D, d = (rank * SHARE + e) % D;
    float top[SPLITS], most = NEVER, sum = 0.f, value = 0.f;
#pragma unroll
    for (int b = 0; b < SPLITS; ++b) {
      top[b] = SPLITS == 1 ? block_max[h] : load_from_rank(&block_max[h], b);
      most = fmaxf(most, top[b]);
    }
#pragma unroll
    for (int b = 0; b < SPLITS; ++b) {
      float weight = exp2_fast(top[b] - most);
      sum += weight * (SPLITS == 1 ? block_sum[h] : load_from_rank(&block_sum[h], b));
      value += weight * (SPLITS == 1 ? block_out[h][d] : load_from_rank(&block_out[h][d], b));
    }
    out[((u64)row * HEADS + head * GROUP + h) * D + d] = to_bf16(value / sum);
  }
  if (SPLITS > 1) cluster_sync();
}
