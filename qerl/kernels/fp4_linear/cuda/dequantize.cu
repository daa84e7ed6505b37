// V = q * s of a tiled weight, bfloat16 [n, k] with rows `stride` apart, exact; one pass. A warp takes a tile at a time.

struct DequantizeParams {
  const u8* tiles;
  u16* out;
  int n, k, stride, units, row_tiles;
  u32 scale_base;  // 0x70007000
};

constexpr int WARPS_A_BLOCK = 8;
constexpr int STAGE_STRIDE = 144;  // bytes of a staged row of 64 values; the padding keeps banks apart

extern "C" __global__ void __launch_bounds__(32 * WARPS_A_BLOCK) dequantize(const __grid_constant__ DequantizeParams p) {
  __shared__ __align__(16) u8 staged[WARPS_A_BLOCK][16 * STAGE_STRIDE];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int total = p.units * p.row_tiles;
  const bool vectors = p.k % 8 == 0 && p.stride % 8 == 0;
  u8* mine = staged[warp];
  const u32 scale_base = p.scale_base;
  const int step = gridDim.x * WARPS_A_BLOCK;
  int index = blockIdx.x * WARPS_A_BLOCK + warp;
  if (index >= total) return;
  const u8* tile = p.tiles + static_cast<long long>(index) * TILE_BYTES;
  uint4 codes = *reinterpret_cast<const uint4*>(tile + 16 * lane);
  uint2 scales = *reinterpret_cast<const uint2*>(tile + TILE_CODES + 8 * g);
  while (index < total) {
    const uint2 low = expand_scales(scales.x, scale_base), high = expand_scales(scales.y, scale_base);
    const u32 low_step[4] = {step_scale<0>(low), step_scale<1>(low), step_scale<2>(low), step_scale<3>(low)};
    const u32 high_step[4] = {step_scale<0>(high), step_scale<1>(high), step_scale<2>(high), step_scale<3>(high)};
    const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
    const int current = index;
    index += step;
    if (index < total) {
      tile = p.tiles + static_cast<long long>(index) * TILE_BYTES;
      codes = *reinterpret_cast<const uint4*>(tile + 16 * lane);
      scales = *reinterpret_cast<const uint2*>(tile + TILE_CODES + 8 * g);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      u32 a[4];
      dequantize_step(words[j], low_step[j], high_step[j], a);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = g + 8 * (i & 1), column = 16 * j + 8 * (i >> 1) + 2 * t;
        *reinterpret_cast<u32*>(mine + row * STAGE_STRIDE + 2 * column) = multiply_bf16x2(a[i], 0x43004300u);
      }
    }
    __syncwarp();
    const int row_tile = current / p.units, unit = current - row_tile * p.units;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 4 * i + (lane >> 3), chunk = lane & 7;
      const uint4 values = *reinterpret_cast<const uint4*>(mine + row * STAGE_STRIDE + 16 * chunk);
      const int r = 16 * row_tile + row, column = 64 * unit + 8 * chunk;
      if (r >= p.n || column >= p.k) continue;
      u16* out = p.out + static_cast<long long>(r) * p.stride + column;
      if (vectors) {
        *reinterpret_cast<uint4*>(out) = values;
      } else {
        const u32 parts[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
        for (int e = 0; e < 8; ++e)
          if (column + e < p.k) out[e] = static_cast<u16>(parts[e >> 1] >> (16 * (e & 1)));
      }
    }
    __syncwarp();
  }
}
