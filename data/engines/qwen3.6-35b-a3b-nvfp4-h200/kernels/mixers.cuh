// What the single-row and the batched forms of both mixers share: arguments, gates, the update of a
// state column, norm and rotation of a head. For a single row qkv, ab, o, parts, stats and out are
// posts (producer.cuh).

#define KEY_WIDTH (KEY_HEADS * KEY_DIM)
#define PAGE 64
#define GROUP (HEADS / KV_HEADS)

struct DeltaArgs {
  const float *qkv;        // [rows, ld] projections: q, k, v, z
  const float *ab;         // [rows, 2 * VALUE_HEADS] (padded to ld_ab)
  const float *conv;       // [CONV_WIDTH, 4]
  const float *a_log, *dt_bias, *norm;
  const int *row_slot;
  const u64 *position;     // [slots]
  float *ring;             // [slots, 4, CONV_WIDTH]
  float *state;
  float *o;                // one row: [VALUE_WIDTH]
  u16 *gated;              // batched decode: fp16 after gate and norm, see activation_index
  int rows, ld, ld_ab;
  float eps;
};

__device__ __forceinline__ float softplus(float x) { return x > 20.f ? x : log1pf(__expf(x)); }

struct Gates { float decay, beta; };
__device__ __forceinline__ Gates make_gates(float a, float b, float a_log, float dt_bias) {
  return {__expf(-__expf(a_log) * softplus(a + dt_bias)), sigmoid(b)};
}
__device__ __forceinline__ float dot4(const float4 &a, const float4 &b) {
  return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
}
// Dot products of a state column with k and q, and its update: u = beta (v - g s.k), s = g s + u k;
// returns the output g s.q + u (k.q). LANES neighbouring lanes hold N vectors of the column each.
template <int N, int LANES>
__device__ __forceinline__ float delta_column(float4 *s, const float4 *k, const float4 *q, float kq,
                                              float v, Gates gate) {
  float sk = 0.f, sq = 0.f;
#pragma unroll
  for (int i = 0; i < N; i++) sk += dot4(s[i], k[i]), sq += dot4(s[i], q[i]);
  sk = lane_sum<LANES>(sk);
  sq = lane_sum<LANES>(sq);
  const float g = gate.decay, u = gate.beta * (v - g * sk);
#pragma unroll
  for (int i = 0; i < N; i++) {
    s[i].x = fmaf(u, k[i].x, g * s[i].x);
    s[i].y = fmaf(u, k[i].y, g * s[i].y);
    s[i].z = fmaf(u, k[i].z, g * s[i].z);
    s[i].w = fmaf(u, k[i].w, g * s[i].w);
  }
  return fmaf(g, sq, u * kq);
}

struct AttentionArgs {
  const float *qkv;         // [rows, ld]: per head query and gate; keys; values
  const float *q_norm, *k_norm;
  const float2 *rope;       // [positions, ROPE_DIM / 2] cosine and sine
  const int *row_slot;
  const u64 *position;
  const int *page_table;    // [slots, pages_per_slot]
  u16 *pages;               // [n, 2, KV_HEADS, PAGE, HEAD_DIM] bf16
  float *parts;             // [rows, HEADS, splits, HEAD_DIM] unnormalised sums
  float2 *stats;            // [rows, HEADS, splits]: maximum, sum of exponentials
  u16 *out;                 // fp16, see activation_index
  int ld, pages_per_slot, splits;
  float eps;
};

// Norm and rotate one head with a warp: lane holds dimensions lane + 32 i, so a pair is in one lane.
__device__ __forceinline__ void norm_rope(const float *weight, float2 turn, float eps, float *v) {
  const int lane = threadIdx.x & 31;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 32; i++) sum = fmaf(v[i], v[i], sum);
  const float r = rsqrtf(lane_sum(sum) / HEAD_DIM + eps);
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 32; i++) v[i] *= r * (1.f + weight[lane + 32 * i]);
  const float left = v[0], right = v[1];
  v[0] = left * turn.x - right * turn.y;
  v[1] = right * turn.x + left * turn.y;
}

// Four 8 x 8 matrices of 16-bit elements; a lane gives the address of one row.
template <bool TRANSPOSED> __device__ __forceinline__ void load_matrices(u32 *a, const u16 *p) {
  const u32 address = shared_address(p);
  if (TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address) : "memory");
}
