// The last step of the greedy choice: one warp a row joins the chunks of this rank's logits, then
// the ranks. Of equal logits the lowest id wins; sums of exponentials run in fixed order.
//
// Compile-time: WORLD.
DEVICE float warp_max(float v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1)
    v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, offset));
  return v;
}
DEVICE int warp_min(int v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1)
    v = min(v, __shfl_xor_sync(0xffffffffu, v, offset));
  return v;
}

extern "C" __global__ void __launch_bounds__(32)
    pick(const float* top, const int* top_id, const float* total, long long* tokens,
         float* logprobs, int chunks, int width, const u64* peers, const u32* control, int own_rank,
         int place, int bytes_per_rank) {
  wait_for_previous_kernel();
  const Exchange exchange(peers, control, own_rank, place, bytes_per_rank);
  const int row = blockIdx.x, lane = threadIdx.x, nobody = WORLD * width;
  top += row * chunks, top_id += row * chunks, total += row * chunks;
  float most = __int_as_float(0xff800000), sum = 0.f;
  for (int i = lane; i < chunks; i += 32) most = fmaxf(most, top[i]);
  most = warp_max(most);
  int id = nobody;
  for (int i = lane; i < chunks; i += 32) {
    if (top[i] == most) id = min(id, own_rank * width + top_id[i]);
    sum += total[i] * expf(top[i] - most);
  }
  id = warp_min(id), sum = warp_sum(sum);
  if (lane > 0) return;

  float tops[WORLD], sums[WORLD];
  int ids[WORLD];
  if (WORLD > 1) exchange.send(row, make_uint3(__float_as_uint(most), id, __float_as_uint(sum)));
#pragma unroll
  for (int writer = 0; writer < WORLD; ++writer) {
    uint3 words = make_uint3(__float_as_uint(most), id, __float_as_uint(sum));
    if (WORLD > 1 && writer != own_rank) words = exchange.receive(writer, row);
    tops[writer] = __uint_as_float(words.x), ids[writer] = words.y;
    sums[writer] = __uint_as_float(words.z);
  }
  most = tops[0], sum = 0.f, id = nobody;
#pragma unroll
  for (int writer = 1; writer < WORLD; ++writer) most = fmaxf(most, tops[writer]);
#pragma unroll
  for (int writer = 0; writer < WORLD; ++writer) {
    if (tops[writer] == most) id = min(id, ids[writer]);
    sum += sums[writer] * expf(tops[writer] - most);
  }
  tokens[row] = min(id, nobody - 1);  // not a number: any id
  logprobs[row] = -logf(sum);
}
