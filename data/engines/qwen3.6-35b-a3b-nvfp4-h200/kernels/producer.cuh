// One row as one resident kernel: a program of instructions, of which every block does its part. In
// every block one warp runs ahead through the program and streams what the block will need, weights
// above all, into a ring of stages in shared memory; sixteen warps compute.
//
// Blocks pass activations to each other by post and fetch: a value and the tag of its layer and launch
// in one 8-byte store, which the readers poll. There is no barrier between instructions, and no fence:
// a fence would wait for all bulk copies in flight (2 to 4 us). A tag is written once a launch; a block
// overwrites a place only in a layer whose input depends on all readers of the layer before.
typedef u64 Post;

struct SingleArgs {
  const uint4 *weight;     // main matrix, packed tiles: tile t belongs to block t % grid_main
  const float *alpha;      // one per 8 rows
  const uint4 *weight16;   // second matrix in fp16 (gates, router): a tile a block from grid_main on
  const float *alpha16;
  const Post *in;          // residual stream; OUT_GATED: mixer's output; OUT_RAW: it in pairs of fp16
  const float *norm;       // norm weight
  const Post *z;           // OUT_GATED: gate; GATE_UP: router logits
  Post *out;               // output rows; ROUTE, GATE_UP: pairs of expert activations
  Post *out16;             // rows of the second matrix
  float *residual;         // OUT_*: added to; EMBED: set; of a row only its own block knows
  float *logits;           // HEAD: output
  const u16 *table;        // EMBED: [VOCAB, HIDDEN] bf16
  const u64 *token;        // EMBED: [slots]
  int tiles, tiles16, grid_main;
  float eps;
};

struct DownArgs {
  const uint4 *weight, *shared_weight;
  const float *alpha, *shared_alpha;
  const Post *logits;           // [EXPERTS + 1]
  const Post *h;                // [ROWS_PER_TOKEN][WIDTH / 2] pairs of fp16
  Post *out;                    // residual stream
  float *residual;
};

enum Op { EMBED, PROJECT, DELTA, OUT_GATED, ATTEND, JOIN, OUT_RAW, ROUTE, GATE_UP, DOWN, HEAD };

struct Instruction {
  int op;
  u32 tag;     // of what it posts and, unless it reads the layer before, fetches
  union {
    SingleArgs single;
    DownArgs down;
    DeltaArgs delta;
    AttentionArgs attention;
  };
};

struct PersistentArgs {
  const Instruction *program;
  u32 *state;             // blocks that have finished; number of this launch, from 1
  const int *row_slot;
  const u64 *position;    // [slots]
  int count;
};
#define TAGS 64           // a launch

#define CONSUMERS 16
#define THREADS (CONSUMERS * 32)   // of the consumers; one more warp produces
#define STAGE_BYTES 16384
#define AHEAD 8                    // instructions
#define QUADS (CONSUMERS / 4)     // four warps share a stage
#define BATCH_PARTS 32             // stages whose sums are kept
#define INSTRUCTION_VECTORS (sizeof(Instruction) / 16)
#define KV_UNIT 16                 // tokens of a stage of keys and values
#define KV_BYTES (KV_UNIT * HEAD_DIM * 2)
#define UP_TILES 4                 // of one expert, a block
#define UP_BLOCKS (WIDTH / 8 / UP_TILES)
#define STATE_COLUMNS 32           // of one head, a block
#define DOWN_BYTES (WIDTH / 128 * GROUP_BYTES)
#define DOWN_EXPERTS 2              // a stage

enum { FP8, NVFP4, F16 };
constexpr int tile_bytes(int kind, int k) { return k * (kind == F16 ? 32 : kind == FP8 ? 16 : 9); }
// Columns of a stage: a tile of these, at most, fits one.
constexpr __device__ int part_columns(int kind) { return kind == F16 ? 512 : 1024; }

struct Shared {
  u8 ring[RING_STAGES][STAGE_BYTES];
  __align__(16) u16 xs[VALUE_WIDTH > ROWS_PER_TOKEN * WIDTH ? VALUE_WIDTH : ROWS_PER_TOKEN * WIDTH];
  __align__(16) float red[BATCH_PARTS * 4][16];
  __align__(16) Instruction program[AHEAD];
  int ids[TOP_K];
  float chosen[ROWS_PER_TOKEN];  // logits: of the chosen experts, of the shared one's gate
  float scratch[CONSUMERS];
  u64 full[RING_STAGES], empty[RING_STAGES], ready[AHEAD], done[AHEAD], routed;
};
static_assert(sizeof(Shared) <= PERSISTENT_SHARED, "PERSISTENT_SHARED is too small");
static_assert(RING_STAGES % QUADS == 0 && IN_FLIGHT < RING_STAGES, "four warps see each use of a stage");
static_assert(sizeof(Instruction) % 16 == 0, "instructions are copied in 16-byte vectors");
static_assert(TOP_K * UP_BLOCKS == HIDDEN / 16, "the blocks that route");
static_assert(WIDTH / 8 % UP_TILES == 0 && HIDDEN % (4 * THREADS) == 0, "shares");
static_assert(2 * KV_BYTES <= STAGE_BYTES && STATE_COLUMNS * KEY_DIM * 4 <= STAGE_BYTES, "stages");

__device__ __forceinline__ void post(Post *p, u32 value, u32 tag) {
  asm volatile("{.reg .b64 v; mov.b64 v, {%1, %2}; st.relaxed.gpu.global.b64 [%0], v;}" ::"l"(p), "r"(value),
               "r"(tag) : "memory");
}
__device__ __forceinline__ void post(Post *p, float value, u32 tag) { post(p, __float_as_uint(value), tag); }

// Two neighbours: values in x and z, tags in y and w.
__device__ __forceinline__ uint4 load_posts(const Post *p) {
  uint4 v;
  asm volatile("{.reg .b64 a, b; ld.relaxed.gpu.global.v2.b64 {a, b}, [%4]; mov.b64 {%0, %1}, a; mov.b64 {%2, %3}, b;}"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint2 load_post(const Post *p) {
  uint2 v;
  asm volatile("{.reg .b64 a; ld.relaxed.gpu.global.b64 a, [%2]; mov.b64 {%0, %1}, a;}"
               : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}
// N pairs, `stride` pairs apart.
template <int N>
__device__ __forceinline__ void fetch_pairs(const Post *p, int stride, u32 tag, uint2 *values) {
  bool here;
  do {
    here = true;
#pragma unroll
    for (int i = 0; i < N; i++) {
      const uint4 v = load_posts(p + 2 * i * stride);
      here &= v.y == tag && v.w == tag;
      values[i] = make_uint2(v.x, v.z);
    }
  } while (!here);
}
// N single values, `stride` apart.
template <int N>
__device__ __forceinline__ void fetch(const Post *p, int stride, u32 tag, float *values) {
  bool here;
  do {
    here = true;
#pragma unroll
    for (int i = 0; i < N; i++) {
      const uint2 v = load_post(p + i * stride);
      here &= v.y == tag;
      values[i] = __uint_as_float(v.x);
    }
  } while (!here);
}

// The producer's end of the ring; one lane calls it.
struct Source {
  Shared &s;
  const u64 policy;
  u32 sent = 0;
  // Few stages are in flight at a time: everything else that this multiprocessor asks of the memory
  // queues behind them.
  __device__ __forceinline__ void open(u32 bytes) {
    barrier_wait(s.empty + sent % RING_STAGES, (sent / RING_STAGES & 1) ^ 1);
    if (sent >= IN_FLIGHT) {
      const u32 before = sent - IN_FLIGHT;
      barrier_wait(s.full + before % RING_STAGES, before / RING_STAGES & 1);
    }
    barrier_expect(s.full + sent % RING_STAGES, bytes);
  }
  __device__ __forceinline__ void copy(u32 offset, const void *from, u32 bytes) {
    bulk_copy(s.ring[sent % RING_STAGES] + offset, from, bytes, s.full + sent % RING_STAGES, policy);
  }
  __device__ __forceinline__ void close() { sent++; }
};

// Tiles of a block: those of the main matrix in turns, or one of the second.
struct Share { int first, count; bool second; };
__device__ __forceinline__ Share share_of(const SingleArgs &a) {
  const int b = blockIdx.x, g = a.grid_main;
  if (b >= g && a.tiles16) return {b - g, b - g < a.tiles16, true};
  return {b, (max(a.tiles - b, 0) + g - 1) / g, false};
}
// Of every product: `count` runs of bytes, `stride` apart, each in `parts` stages.
struct Runs {
  const u8 *from;
  size_t stride;
  int count, parts;
  u32 part_bytes;
};
template <int KIND, int K> __device__ __forceinline__ Runs runs_of(const uint4 *weight, int first, int stride, int count) {
  constexpr int BYTES = tile_bytes(KIND, K), PARTS = K / part_columns(KIND);
  return {(const u8 *)weight + (size_t)first * BYTES, (size_t)stride * BYTES, count, PARTS, BYTES / PARTS};
}
__device__ __forceinline__ Runs linear_runs(int op, const SingleArgs &a, const int *ids) {
  const Share share = share_of(a);
  if (op == GATE_UP) {
    const int first = ids[blockIdx.x / UP_BLOCKS] * (WIDTH / 8) + blockIdx.x % UP_BLOCKS * UP_TILES;
    return runs_of<NVFP4, HIDDEN>(a.weight, first, 1, UP_TILES);
  }
  if (share.second) return runs_of<F16, HIDDEN>(a.weight16, share.first, 0, share.count);
  if (op == PROJECT) return runs_of<FP8, HIDDEN>(a.weight, share.first, a.grid_main, share.count);
  if (op == OUT_GATED || op == OUT_RAW)
    return runs_of<FP8, VALUE_WIDTH>(a.weight, share.first, a.grid_main, share.count);
  return runs_of<NVFP4, HIDDEN>(a.weight, share.first, a.grid_main, share.count);
}
__device__ __forceinline__ void send_runs(Source &to, Runs r) {
#pragma unroll 1
  for (int i = 0; i < r.count; i++, r.from += r.stride)
#pragma unroll 1
    for (int p = 0; p < r.parts; p++) {
      to.open(r.part_bytes);
      to.copy(0, r.from + p * r.part_bytes, r.part_bytes);
      to.close();
    }
}

// The state columns that this block updates.
struct StatePart { int head, column; };
__device__ __forceinline__ StatePart state_part() {
  constexpr int PARTS = VALUE_DIM / STATE_COLUMNS;
  return {(int)blockIdx.x / PARTS, (int)blockIdx.x % PARTS * STATE_COLUMNS};
}
__device__ __forceinline__ float *state_of(const DeltaArgs &a, int slot) {
  const StatePart p = state_part();
  return a.state + (((size_t)slot * VALUE_HEADS + p.head) * VALUE_DIM + p.column) * KEY_DIM;
}

// Units of keys and values, dealt in turns to the splits; a block is one split of one KV head.
__device__ __forceinline__ u16 *unit_of(const AttentionArgs &a, int slot, int unit) {
  const int page = a.page_table[slot * a.pages_per_slot + unit * KV_UNIT / PAGE];
  return a.pages + (((size_t)page * 2 * KV_HEADS + blockIdx.x % KV_HEADS) * PAGE + unit * KV_UNIT % PAGE) * HEAD_DIM;
}
__device__ __forceinline__ void send_keys(Source &to, const AttentionArgs &a, int slot, u64 position) {
  const int split = blockIdx.x / KV_HEADS, last = split < a.splits ? (int)(position / KV_UNIT) : -1;
  for (int unit = split; unit <= last; unit += a.splits) {
    const u16 *keys = unit_of(a, slot, unit);
    to.open(2 * KV_BYTES);
    to.copy(0, keys, KV_BYTES);
    to.copy(KV_BYTES, keys + KV_HEADS * PAGE * HEAD_DIM, KV_BYTES);
    to.close();
  }
}

// Two chosen experts a stage, then the shared one.
__device__ __forceinline__ void send_down(Source &to, const DownArgs &a, const int *ids) {
  constexpr int TILES = HIDDEN / 16;
#pragma unroll 1
  for (int rank = 0; rank <= TOP_K; rank += DOWN_EXPERTS) {
    const int experts = rank < TOP_K ? DOWN_EXPERTS : 1;
    to.open(experts * DOWN_BYTES);
#pragma unroll 1
    for (int i = 0; i < experts; i++) {
      const u8 *from = rank < TOP_K ? (const u8 *)a.weight + (size_t)ids[rank + i] * TILES * DOWN_BYTES
                                    : (const u8 *)a.shared_weight;
      to.copy(i * DOWN_BYTES, from + (size_t)blockIdx.x * DOWN_BYTES, DOWN_BYTES);
    }
    to.close();
  }
}

// Routing, once a layer and block: ids and their logits into shared memory.
__device__ __forceinline__ void route(Shared &s, const Post *logits, u32 tag) {
  const int lane = threadIdx.x & 31;
  float values[EXPERTS / 32], value;
  fetch<1>(logits + EXPERTS, 0, tag, &value);  // all lanes one place: the poll
  if (lane == 0) s.chosen[TOP_K] = value;
  fetch<EXPERTS / 32>(logits + lane, 32, tag, values);
  __syncwarp();
  const int id = top_experts(values, value);
  if (lane < TOP_K) s.ids[lane] = id, s.chosen[lane] = value;
  __syncwarp();
  if (lane == 0) barrier_arrive(&s.routed);
}

__device__ __forceinline__ void produce(const PersistentArgs &a, Shared &s) {
  const int lane = threadIdx.x & 31;
  Source to{s, stream_policy()};
  const uint4 *program = (const uint4 *)a.program;
  uint4 next = {};
  if (lane < INSTRUCTION_VECTORS) next = program[lane];
  int slot = -1;
  u64 position = 0;
  u32 base = 0;
#pragma unroll 1
  for (int i = 0; i < a.count; i++) {
    Instruction &in = s.program[i % AHEAD];
    barrier_wait(s.done + i % AHEAD, (i / AHEAD & 1) ^ 1);
    if (lane < INSTRUCTION_VECTORS) {
      ((uint4 *)&in)[lane] = next;
      if (i + 1 < a.count) next = program[(i + 1) * INSTRUCTION_VECTORS + lane];
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(s.ready + i % AHEAD);
    const int op = in.op;
    if (slot < 0 && (op == DELTA || op == ATTEND || op == GATE_UP || op == DOWN)) {
      pdl_wait();  // weights alone may be asked for before it
      asm volatile("fence.proxy.async.global;" ::: "memory");
      slot = a.row_slot[0];
      position = a.position[slot];
      base = a.state[1] * TAGS;
    }
    if (blockIdx.x < HIDDEN / 16) {
      if (op == GATE_UP) route(s, in.single.z, base + in.tag);
      if (op == DOWN && i == 0) route(s, in.down.logits, base + in.tag);
    }
    if (lane == 0) {
      if (op == DOWN) {
        if (blockIdx.x < HIDDEN / 16) send_down(to, in.down, s.ids);
      } else if (op == ATTEND) {
        send_keys(to, in.attention, slot, position);
      } else if (op != EMBED && op != JOIN) {
        Runs runs = {nullptr, 0, state_part().head < VALUE_HEADS, 1, STATE_COLUMNS * KEY_DIM * 4};
        if (op == DELTA) runs.from = (const u8 *)state_of(in.delta, slot);
        else runs = linear_runs(op, in.single, s.ids);
        if (op != GATE_UP || blockIdx.x < HIDDEN / 16) send_runs(to, runs);
      }
    }
    __syncwarp();
  }
}
