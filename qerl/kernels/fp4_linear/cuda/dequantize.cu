// V of a tiled weight, bfloat16 [n, k] with rows `stride` apart; one pass. A warp takes a tile at a time.

struct DequantizeParams {
  const u8* tiles;
  u16* out;
  const float* side;
  int n, k, stride, units, row_tiles;
  u32 scale_base;  // 0x70007000
};

// Compile-time: FORMAT.

constexpr int WARPS_A_BLOCK = 8;
constexpr int STAGE_STRIDE = 144;  // bytes of a staged row of 64 values; the padding keeps banks apart

// The value itself: 128 times as much for NVFP4.
__device__ __forceinline__ u32 lift(u32 pair) {
#if FORMAT == NVFP4
  return multiply_bf16x2(pair, 0x43004300u);
#else
  return pair;
#endif
}

extern "C" __global__ void __launch_bounds__(32 * WARPS_A_BLOCK) dequantize(const __grid_constant__ DequantizeParams p) {
  extern __shared__ __align__(128) u8 memory[];  // the table, and 16 * STAGE_STRIDE bytes a warp
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int total = p.units * p.row_tiles;
  const bool vectors = p.k % 8 == 0 && p.stride % 8 == 0;
  u8* mine = memory + TABLE_BYTES + warp * (16 * STAGE_STRIDE);
  const Unpacker unpack = unpacker(p.scale_base, smem_address(memory), lane);
  const int step = gridDim.x * WARPS_A_BLOCK;
  int index = blockIdx.x * WARPS_A_BLOCK + warp;
  fill_table(memory, p.side, threadIdx.x, 32 * WARPS_A_BLOCK);
  if constexpr (TABLE_BYTES > 0) __syncthreads();
  if (index >= total) return;
  const u8* tile = p.tiles + static_cast<long long>(index) * TILE_BYTES;
  Codes codes = load_codes(tile + 16 * lane);
  ScaleBytes bytes = *reinterpret_cast<const ScaleBytes*>(tile + TILE_CODES + sizeof(ScaleBytes) * g);
  while (index < total) {
    const int row_tile = index / p.units, unit = index - row_tile * p.units;
    Rows rows = rows_of(p.side, p.units, row_tile, unit, lane);
    const Scales scales = expand_scales(bytes, unpack, rows);
    u32 a[4][4];
    dequantize_step<0>(look_up(word_of<0>(codes), unpack), scales, a[0]);
    dequantize_step<1>(look_up(word_of<1>(codes), unpack), scales, a[1]);
    dequantize_step<2>(look_up(word_of<2>(codes), unpack), scales, a[2]);
    dequantize_step<3>(look_up(word_of<3>(codes), unpack), scales, a[3]);
    index += step;
    if (index < total) {
      tile = p.tiles + static_cast<long long>(index) * TILE_BYTES;
      codes = load_codes(tile + 16 * lane);
      bytes = *reinterpret_cast<const ScaleBytes*>(tile + TILE_CODES + sizeof(ScaleBytes) * g);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = g + 8 * (i & 1), column = 16 * j + 8 * (i >> 1) + 2 * t;
        *reinterpret_cast<u32*>(mine + row * STAGE_STRIDE + 2 * column) = lift(a[j][i]);
      }
    }
    __syncwarp();
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
