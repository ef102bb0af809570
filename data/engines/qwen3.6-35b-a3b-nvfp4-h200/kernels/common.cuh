// Shared device code: dependent launch, tensor-core products on packed weights, warp reductions.
// The host defines the model's sizes (HIDDEN, WIDTH, ...) on the compiler's command line.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Expert activations are stored as fp16 times this power of two: their range is open-ended.
#define H_SCALE 0.0625f
#define LOGITS_LD ((EXPERTS + 16) / 16 * 16)  // experts, the shared gate, padding to a tile
#define INFINITY_F __int_as_float(0x7F800000)
#define ROWS_PER_TOKEN (TOP_K + 1)            // routed experts, then the shared one

// Every kernel waits for its predecessor before it reads or writes what that one touches, and lets
// its successor start only after its own wait. So a kernel that has started may read, before its
// wait, whatever was finished two kernels ago.
__device__ __forceinline__ void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void pdl_trigger() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Weights are read once, past L1. Not .nc: the assembler would sink such loads behind barriers.
__device__ __forceinline__ uint4 load_stream(const uint4 *p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ u32 load_stream(const u32 *p) {
  u32 v;
  asm volatile("ld.global.L1::no_allocate.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// Bulk copies: one thread asks for a run of bytes, which counts towards a barrier in shared memory.
__device__ __forceinline__ u32 shared_address(const void *p) {
  return (u32)__cvta_generic_to_shared(p);
}
__device__ __forceinline__ void barrier_init(u64 *barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}
// Makes initialised barriers visible to the copy engine; a block barrier must follow.
__device__ __forceinline__ void barrier_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(u64 *barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_expect(u64 *barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u64 *barrier, u32 parity) {
  asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
               "@p bra done;\nbra again;\ndone:\n}" ::"r"(shared_address(barrier)), "r"(parity)
               : "memory");
}
// Weights leave the L2 first: activations, states of a few layers and code stay.
__device__ __forceinline__ u64 stream_policy() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void bulk_copy(void *to, const void *from, u32 bytes, u64 *barrier,
                                          u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)), "l"(from), "r"(bytes),
               "r"(shared_address(barrier)), "l"(policy) : "memory");
}
__device__ __forceinline__ void bulk_copy(void *to, const void *from, u32 bytes, u64 *barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1], %2, [%3];" ::"r"(shared_address(to)), "l"(from), "r"(bytes),
               "r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ u32 pack_half2(float low, float high) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ u16 to_half(float x) {
  u16 r;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ float from_half(u16 x) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
  return r;
}
__device__ __forceinline__ u32 mul_half2(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
// Four E4M3 bytes -> two fp16 pairs. The halves are named inside the assembly: the conversion takes
// either half of a register, a shift would be an instruction of its own.
__device__ __forceinline__ void e4m3x4_to_half2(u32 x, u32 &low, u32 &high) {
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}"
      : "=r"(low), "=r"(high) : "r"(x));
}
__device__ __forceinline__ u16 to_bf16(float x) {
  u16 r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ float bf16_low(u32 x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float bf16_high(u32 x) { return __uint_as_float(x & 0xFFFF0000u); }

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }

template <int WIDTH_ = 32> __device__ __forceinline__ float lane_sum(float x) {
#pragma unroll
  for (int d = WIDTH_ / 2; d; d >>= 1) x += __shfl_xor_sync(~0u, x, d);
  return x;
}

// Sum over the block, the same in every thread; `scratch` holds one float per warp.
template <int WARPS> __device__ __forceinline__ float block_sum(float x, float *scratch) {
  x = lane_sum(x);
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = x;
  __syncthreads();
  float total = 0.f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) total += scratch[w];
  return total;
}

// D[16 rows, 8 columns] += A[16, 16] B[16, 8], fp16 operands, fp32 sums.
__device__ __forceinline__ void mma(float *d, const u32 *a, uint2 b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},"
               "{%8,%9},{%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}

// One word of eight E2M1 codes -> A operand, values times 2^-6. Integer instructions and conversions
// bind these kernels, so the codes lie where two masks and a shift make E4M3 bytes of them.
__device__ __forceinline__ void unpack_fp4(u32 w, u32 *a) {
  const u32 first = w & 0x9C9C9C9Cu, second = ((w << 2) & 0x8C8C8C8Cu) | ((w >> 2) & 0x10101010u);
  e4m3x4_to_half2(first, a[0], a[1]);
  e4m3x4_to_half2(second, a[2], a[3]);
}
#define FP4_UNIT 64.f
__device__ __forceinline__ void unpack_fp8(u32 first, u32 second, u32 *a) {
  e4m3x4_to_half2(first, a[0], a[1]);
  e4m3x4_to_half2(second, a[2], a[3]);
}

__device__ __forceinline__ u32 word(const uint4 &q, int i) {
  return i == 0 ? q.x : i == 1 ? q.y : i == 2 ? q.z : q.w;
}

// A times one half of `scales` (both elements by the same): exact, see README.md.
template <int HALF> __device__ __forceinline__ u32 scale_half2(u32 a, u32 scales) {
  u32 r;
  if (HALF)
    asm("{.reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, %2; mov.b32 s, {h, h}; mul.rn.f16x2 %0, %1, s;}"
        : "=r"(r) : "r"(a), "r"(scales));
  else
    asm("{.reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, %2; mov.b32 s, {l, l}; mul.rn.f16x2 %0, %1, s;}"
        : "=r"(r) : "r"(a), "r"(scales));
  return r;
}

// Two neighbouring 16 x 16 blocks with their word of scales -> A operands.
__device__ __forceinline__ void scaled_blocks(u32 even, u32 odd, u32 scales, u32 (*f)[4]) {
  u32 top, bottom;
  e4m3x4_to_half2(scales, top, bottom);
  unpack_fp4(even, f[0]);
  unpack_fp4(odd, f[1]);
  f[0][0] = scale_half2<0>(f[0][0], top);
  f[0][1] = scale_half2<0>(f[0][1], bottom);
  f[0][2] = scale_half2<0>(f[0][2], top);
  f[0][3] = scale_half2<0>(f[0][3], bottom);
  f[1][0] = scale_half2<1>(f[1][0], top);
  f[1][1] = scale_half2<1>(f[1][1], bottom);
  f[1][2] = scale_half2<1>(f[1][2], top);
  f[1][3] = scale_half2<1>(f[1][3], bottom);
}

// NVFP4 weights come in groups of 16 rows x 128 columns: codes, then scales.
#define GROUP_CODES 1024
#define GROUP_BYTES (GROUP_CODES + 128)

// A group times up to eight rows; x: this lane's activations (row g, columns 4t ..) of its eight
// blocks. Four sums are kept apart so that products do not wait for each other.
__device__ __forceinline__ void dot_group(const uint4 *q, const uint4 &scales, const uint2 *x,
                                          float (*acc)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint4 &v = q[i / 2];
    u32 f[2][4];
    scaled_blocks(i & 1 ? v.z : v.x, i & 1 ? v.w : v.y, word(scales, i), f);
    mma(acc[i & 1 ? 2 : 0], f[0], x[2 * i]);
    mma(acc[i & 1 ? 3 : 1], f[1], x[2 * i + 1]);
  }
}
__device__ __forceinline__ void dot_group(const u8 *group, const uint2 *x, float (*acc)[4]) {
  const int lane = threadIdx.x & 31;
  const uint4 *codes = (const uint4 *)group + lane;
  const uint4 q[2] = {codes[0], codes[32]};
  dot_group(q, ((const uint4 *)(group + GROUP_CODES))[lane >> 2], x, acc);
}
// Activations of N blocks of 16 columns; p points at this lane's first.
template <int N> __device__ __forceinline__ void load_columns(const u16 *p, uint2 *x) {
#pragma unroll
  for (int i = 0; i < N; i++) x[i] = *(const uint2 *)(p + i * 16);
}
__device__ __forceinline__ float four_sum(float (*acc)[4], int i) {
  return (acc[0][i] + acc[1][i]) + (acc[2][i] + acc[3][i]);
}

// One warp, whose lanes hold the logits lane + 32 i, finds the TOP_K largest, equal ones by lowest id:
// lane r < TOP_K ends with the id of the r-th and its value. Keys are order-preserving integers whose last bits name the
// register, so values and comparisons within a lane are good to 2^-20 of a logit's size.
__device__ __forceinline__ int top_experts(const float *logits, float &value) {  // [EXPERTS / 32]
  constexpr int PER = EXPERTS / 32;
  const int lane = threadIdx.x & 31;
  u32 key[PER];
#pragma unroll
  for (int i = 0; i < PER; i++) {
    const u32 bits = __float_as_uint(logits[i]);
    const u32 ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    key[i] = (ordered & ~(u32)(PER - 1)) | (PER - 1 - i);
  }
#pragma unroll
  for (int pass = 0; pass < PER; pass++)  // odd-even sort, largest first
#pragma unroll
    for (int i = pass & 1; i + 1 < PER; i += 2) {
      const u32 high = max(key[i], key[i + 1]), low = min(key[i], key[i + 1]);
      key[i] = high, key[i + 1] = low;
    }
  int id = 0;
  u32 mine = 0;
#pragma unroll
  for (int r = 0; r < TOP_K; r++) {
    const u32 best = __reduce_max_sync(~0u, key[0]);
    const int owner = __ffs(__ballot_sync(~0u, key[0] == best)) - 1;
    if (lane == r) mine = best, id = owner + 32 * (PER - 1 - (best & (PER - 1)));
    if (lane == owner)
#pragma unroll
      for (int i = 0; i + 1 < PER; i++) key[i] = key[i + 1];
  }
  mine &= ~(u32)(PER - 1);
  value = __uint_as_float(mine & 0x80000000u ? mine ^ 0x80000000u : ~mine);
  return id;
}
// Softmax over the values of the first TOP_K lanes.
__device__ __forceinline__ float expert_weight(float value) {
  const float largest = __shfl_sync(~0u, value, 0);
  const float e = (threadIdx.x & 31) < TOP_K ? __expf(value - largest) : 0.f;
  return e / lane_sum(e);
}

// Activations of the batched products: blocks of X_COLUMNS columns, 32 padded rows each, so that
// one bulk copy stages a block.
#define X_COLUMNS 256
#define X_STRIDE (X_COLUMNS + 16)
__device__ __forceinline__ size_t activation_index(int row, int column) {
  return ((size_t)(column / X_COLUMNS) * 32 + row) * X_STRIDE + column % X_COLUMNS;
}
