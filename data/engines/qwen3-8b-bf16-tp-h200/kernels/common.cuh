// PTX in small functions: what the decode kernels share. No headers, so that NVRTC needs no include
// path.
typedef unsigned short u16;  // a bfloat16 as bits
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// 16 bytes from global to shared memory, past L1; `bytes` below 16 fills the rest with zeros.
DEVICE void copy_async(u32 to, const void* from, int bytes = 16) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(bytes)
               : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Programmatic dependent launch. Every thread waits before its first read of what an earlier kernel
// of the step wrote, and before its first write; only weights, past KV pages and tables are read
// earlier. What an earlier kernel wrote is never declared __restrict__: the compiler could then
// move its loads before the wait.
DEVICE void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
DEVICE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}
// What thread block `rank` of this cluster holds at the same shared address.
DEVICE float load_from_rank(const float* p, int rank) {
  u32 address;
  float value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address)
               : "r"(shared_address(p)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

DEVICE float4 load_from_rank(const float4* p, int rank) {
  u32 address;
  float4 v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address)
               : "r"(shared_address(p)), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

DEVICE void load_matrix_x4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
DEVICE void load_matrix_x2(u32 (&r)[2], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(address)
               : "memory");
}
DEVICE void load_matrix_x4_transposed(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// d[16 x 8] += a[16 x 16] b[16 x 8], bfloat16 in, float32 sums.
DEVICE void multiply_add(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

DEVICE float to_float(u16 v) { return __uint_as_float((u32)v << 16); }
DEVICE u32 pack_bf16(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
DEVICE u16 to_bf16(float v) { return (u16)(pack_bf16(v, 0.f) & 0xffffu); }
DEVICE float exp2_fast(float v) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

DEVICE float warp_sum(float v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) v += __shfl_xor_sync(0xffffffffu, v, offset);
  return v;
}

// Byte offset of 16-byte chunk `chunk` of row `row`; the exclusive-or spreads eight rows over all
// 32 banks.
template <int ROW_BYTES>
DEVICE u32 swizzled(int row, int chunk) {
  return row * ROW_BYTES + ((chunk ^ (row & 7)) << 4);
}

#ifndef WORLD
#define WORLD 1
#endif

// One exchange between the GPUs of all ranks; see exchange.py. 16 bytes travel and arrive together:
// three words and the number of the exchange. Words with the right number beside them are there.
struct Exchange {
  const u64* peers;  // addresses of all ranks' buffers
  u32 number, limit_ms;
  int rank, bytes;

  // After wait_for_previous_kernel.
  DEVICE Exchange(const u64* peers, const u32* control, int rank, int place, int bytes)
      : peers(peers), rank(rank), bytes(bytes) {
    if (WORLD > 1) number = control[0] + place, limit_ms = control[1];
  }
  DEVICE u64 slot(int reader, int writer, int index) const {
    return peers[reader] + ((u64)(number & 1) * WORLD + writer) * bytes + (u64)index * 16;
  }
  DEVICE void send(int index, uint3 words) const {
#pragma unroll
    for (int reader = 0; reader < WORLD; ++reader)
      if (reader != rank)
        asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(
                         slot(reader, rank, index)),
                     "r"(words.x), "r"(words.y), "r"(words.z), "r"(number)
                     : "memory");
  }
  // Waits at most limit_ms; a rank that does not send by then is lost, and with it this kernel.
  DEVICE uint3 receive(int writer, int index) const {
    u64 from = slot(rank, writer, index), started = 0, now;
    for (u32 tries = 1;; ++tries) {
      uint4 got;
      asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(got.x), "=r"(got.y), "=r"(got.z), "=r"(got.w)
                   : "l"(from)
                   : "memory");
      if (got.w == number) return make_uint3(got.x, got.y, got.z);
      if (tries % 1024) continue;
      asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
      if (started == 0) started = now;
      if (now - started > limit_ms * 1000000ull) asm volatile("trap;");
    }
  }
};

// Four sums travel with 24 bits each (2^-16 off at most), so that they and their number
// fill 16 bytes. All ranks add the same rounded values in the same order and hold the same bits.
DEVICE u32 to_24_bits(float v) {
  u32 bits = __float_as_uint(v);
  return (bits + ((bits & 0x7f800000u) == 0x7f800000u ? 0u : 0x80u)) >> 8;
}
DEVICE uint3 pack(float4 v) {
  u32 a = to_24_bits(v.x), b = to_24_bits(v.y), c = to_24_bits(v.z), d = to_24_bits(v.w);
  return make_uint3(a | b << 24, b >> 8 | c << 16, c >> 16 | d << 8);
}
DEVICE float4 unpack(uint3 w) {
  return make_float4(__uint_as_float(w.x << 8), __uint_as_float(w.x >> 24 << 8 | w.y << 16),
                     __uint_as_float(w.y >> 16 << 8 | w.z << 24), __uint_as_float(w.z & ~0xffu));
}

// This rank's quad `index`, summed over ranks in their order.
DEVICE float4 sum_of_ranks(const Exchange& exchange, float4 own, int index) {
  uint3 mine = pack(own);
  exchange.send(index, mine);
  float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int writer = 0; writer < WORLD; ++writer) {
    float4 part = unpack(writer == exchange.rank ? mine : exchange.receive(writer, index));
    sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
  }
  return sum;
}
