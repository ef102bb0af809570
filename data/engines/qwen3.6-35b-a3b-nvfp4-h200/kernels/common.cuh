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
__device__ __forceinline__ u32 e4m3x2_to_half2(u16 x) {
  u32 r;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(x));
  return r;
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

// One word of eight E2M1 codes -> A operand, values times 2^-14 in fp16 (subnormals included).
// The bit positions are FP16_BITS in formats.py.
__device__ __forceinline__ void unpack_fp4(u32 w, u32 *a) {
  const u32 mask = 0x8E008E00u, sign = 0x80008000u;
  a[0] = w & mask;
  a[1] = (w << 3) & mask;
  a[2] = (((w << 1) & sign) | ((w << 6) & ~sign)) & mask;
  a[3] = (((w << 2) & sign) | ((w << 9) & ~sign)) & mask;
}
__device__ __forceinline__ void unpack_fp8(u32 first, u32 second, u32 *a) {
  a[0] = e4m3x2_to_half2((u16)first);
  a[1] = e4m3x2_to_half2((u16)(first >> 16));
  a[2] = e4m3x2_to_half2((u16)second);
  a[3] = e4m3x2_to_half2((u16)(second >> 16));
}

__device__ __forceinline__ u32 word(const uint4 &q, int i) {
  return i == 0 ? q.x : i == 1 ? q.y : i == 2 ? q.z : q.w;
}

// 16 rows x 128 columns of NVFP4 times NB tokens (1, 2, 4, 8).
// The eight columns of the product are (8 / NB blocks) x (NB tokens): B holds a token's activations
// in the columns of one block only, so several blocks share an accumulator and their scales are
// applied afterwards, one multiply-add for 8 / NB blocks.
// q: the codes; scale: this lane's word for NB == 1, the quad's four words otherwise;
// b[h]: activations of token g % NB, block h * 8 / NB + g / NB, columns 4t..4t+3.
template <int NB>
__device__ __forceinline__ void dot_group(const uint4 *q, const u32 *scale, const uint2 *b,
                                          float *acc) {
  constexpr int BLOCKS = 8 / NB;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int h = 0; h < NB; h++) {
    float d[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
      const int j = h * BLOCKS + i;
      u32 a[4];
      unpack_fp4(word(q[j >> 2], j & 3), a);
      const bool mine = BLOCKS == 1 || g / NB == i;
      mma(d, a, make_uint2(mine ? b[h].x : 0u, mine ? b[h].y : 0u));
    }
    // Bytes of a scale word: (row g: even, odd block), (row g + 8: even, odd block).
    u32 pair;
    if (NB == 1) {
      pair = scale[0];
    } else {
      const int block = h * BLOCKS + 2 * t / NB;  // both of this lane's columns
      const u32 w = NB == 2 ? (t >> 1 ? scale[2 * h + 1] : scale[2 * h]) : scale[h * BLOCKS / 2];
      pair = __byte_perm(w, 0, block & 1 ? 0x3311 : 0x2200);
    }
    const u32 top = e4m3x2_to_half2((u16)pair), bottom = e4m3x2_to_half2((u16)(pair >> 16));
    acc[0] = fmaf(d[0], from_half((u16)top), acc[0]);
    acc[1] = fmaf(d[1], from_half((u16)(top >> 16)), acc[1]);
    acc[2] = fmaf(d[2], from_half((u16)bottom), acc[2]);
    acc[3] = fmaf(d[3], from_half((u16)(bottom >> 16)), acc[3]);
  }
}

// Fold the block columns: afterwards lane (g, t) holds tokens 2t and 2t+1 (token 0 for NB == 1) of
// rows g (acc[0], acc[1]) and g + 8 (acc[2], acc[3]); lanes with 2t >= NB hold copies.
template <int NB> __device__ __forceinline__ void fold_columns(float *acc) {
  if (NB == 1) {
    acc[0] += acc[1];
    acc[2] += acc[3];
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (NB <= 2) acc[i] += __shfl_xor_sync(~0u, acc[i], 1);
    if (NB <= 4) acc[i] += __shfl_xor_sync(~0u, acc[i], 2);
  }
}
#define FP4_UNIT 16384.f  // undoes the 2^-14 of unpack_fp4

// The TOP_K largest router logits, equal ones by lowest id.
// Lane r < TOP_K ends with the id and the softmax weight of the r-th expert.
__device__ __forceinline__ void top_experts(const float *logits, int &id, float &weight) {
  constexpr int PER = EXPERTS / 32;
  const int lane = threadIdx.x & 31;
  u32 key[PER];
#pragma unroll
  for (int i = 0; i < PER; i++) {  // order-preserving integers; 0 marks a taken one
    const u32 bits = __float_as_uint(logits[lane + 32 * i]);
    key[i] = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  }
  id = 0;
  u32 mine = 0, largest = 0;
#pragma unroll 1
  for (int r = 0; r < TOP_K; r++) {
    u32 best = 0;
#pragma unroll
    for (int i = 0; i < PER; i++) best = max(best, key[i]);
    best = __reduce_max_sync(~0u, best);
    u32 where = ~0u;
#pragma unroll
    for (int i = PER - 1; i >= 0; i--) where = key[i] == best ? lane + 32 * i : where;
    where = __reduce_min_sync(~0u, where);
#pragma unroll
    for (int i = 0; i < PER; i++) key[i] = where == lane + 32 * i ? 0u : key[i];
    if (r == 0) largest = best;
    if (lane == r) { id = where; mine = best; }
  }
  const auto value = [](u32 k) { return __uint_as_float(k & 0x80000000u ? k & 0x7FFFFFFFu : ~k); };
  const float e = lane < TOP_K ? __expf(value(mine) - value(largest)) : 0.f;
  weight = e / lane_sum(e);
}

// NVFP4 weights come in groups of 16 rows x 128 columns: codes, then scales.
#define GROUP_CODES 1024
#define GROUP_BYTES (GROUP_CODES + 128)

// Products of a group in shared memory with NB rows, b as in dot_group.
template <int NB>
__device__ __forceinline__ void dot_group_at(const u8 *group, const uint2 *b, float *acc) {
  const int lane = threadIdx.x & 31;
  const uint4 *codes = (const uint4 *)group + lane;
  const uint4 q[2] = {codes[0], codes[32]};
  if (NB == 1) {
    const u32 scale = ((const u32 *)(group + GROUP_CODES))[lane];
    dot_group<NB>(q, &scale, b, acc);
  } else {
    const uint4 v = ((const uint4 *)(group + GROUP_CODES))[lane >> 2];
    const u32 scale[4] = {v.x, v.y, v.z, v.w};
    dot_group<NB>(q, scale, b, acc);
  }
}

// Activations of the batched products: blocks of X_COLUMNS columns, 32 padded rows each, so that
// one bulk copy stages a block.
#define X_COLUMNS 256
#define X_STRIDE (X_COLUMNS + 16)
__device__ __forceinline__ size_t activation_index(int row, int column) {
  return ((size_t)(column / X_COLUMNS) * 32 + row) * X_STRIDE + column % X_COLUMNS;
}
