// Row 21, prompts: prompt_experts.cu as it was measured, the parts that differ from what is kept. Written
// down again from the text that was compiled; the measured file itself was not kept.
#define ITEM_TILES 32
#define WARPS 8
#define WARP_TILES (ITEM_TILES / WARPS)
#define STAGE_K 128
#define STAGES 4
#define STAGE_STRIDE (STAGE_K + 16)
#define WEIGHT_BYTES (ITEM_TILES * GROUP_BYTES)
#define STAGE_BYTES (WEIGHT_BYTES + PROMPT_UNIT * STAGE_STRIDE * 2)

// A block's share of the row tiles of all units, TILES each: neighbouring ones, ITEM at most at a time.
// Steps of 32 rows used the same with ITEM 8 and a granule of one tile.
template <int TILES, int ITEM, int STEPS> struct Portion {
  int begin, end, stages;
  __device__ Portion(int units, int granule) {
    const long long granules = (long long)units * (TILES / granule);
    begin = (int)(granules * blockIdx.x / gridDim.x) * granule;
    end = (int)(granules * (blockIdx.x + 1) / gridDim.x) * granule;
    stages = end > begin ? ((end + ITEM - 1) / ITEM - begin / ITEM) * STEPS : 0;
  }
  __device__ int first(int stage) const { return max(begin, (begin / ITEM + stage / STEPS) * ITEM); }
  __device__ int past(int stage) const { return min(end, (begin / ITEM + stage / STEPS + 1) * ITEM); }
};

// One warp asked for 32 tiles and all rows of a stage: `if (lane < tiles) bulk_copy(weights of tile lane)`,
// then `for (row = lane; row < count; row += 32) bulk_copy(row)`; setmaxnreg 40 and 232.
template <int NT>
__device__ __forceinline__ void multiply(const u8 *tiles, const u16 *x, float (*acc)[PROMPT_UNIT / 8][4]) {
  const int lane = threadIdx.x & 31, g = lane >> 2;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    uint4 codes[WARP_TILES];
    uint2 scales[WARP_TILES];
#pragma unroll
    for (int j = 0; j < WARP_TILES; j++) {
      codes[j] = ((const uint4 *)(tiles + j * GROUP_BYTES))[half * 32 + lane];
      scales[j] = ((const uint2 *)(tiles + j * GROUP_BYTES + GROUP_CODES))[g * 2 + half];
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      u32 f[WARP_TILES][2][4];
#pragma unroll
      for (int j = 0; j < WARP_TILES; j++)
        scaled_blocks(i ? codes[j].z : codes[j].x, i ? codes[j].w : codes[j].y, i ? scales[j].y : scales[j].x, f[j]);
#pragma unroll
      for (int k = 0; k < 2; k++)
#pragma unroll
        for (int n = 0; n < NT; n++) {
          const uint2 b = *(const uint2 *)(x + n * 8 * STAGE_STRIDE + half * 64 + i * 32 + k * 16);
#pragma unroll
          for (int j = 0; j < WARP_TILES; j++) mma(acc[j][n], f[j][k], b);
        }
    }
  }
}
