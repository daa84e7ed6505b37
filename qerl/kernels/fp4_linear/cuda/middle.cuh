// What the kernels of the middle regime share: barriers that count copies, the copy engine, the call, and the end of an output tile.

// A tensor map of the driver (cuTensorMapEncodeTiled).
struct TensorMap {
  alignas(64) u64 words[16];
};

struct MiddleParams {
  TensorMap x_map;     // bfloat16 [m, k], boxes of TOKENS / CLUSTER x 64
  TensorMap tile_map;  // 8-byte words [row tiles, units * words of a tile], boxes of ROW_TILES tiles
  void* out;           // bfloat16 or float32 [m, n]
  const u16* bias;
  const float* side;  // of the format: divisors of NVFP4's segments, what doubly quantized scales need, or null
  const u16* h;      // bfloat16 [m, ranks]
  float4* partials;  // [2 * blocks][TILES][COLUMNS][CONSUMERS]
  u32* counters;     // [tiles * CLUSTER], zeros between launches
  u32* x_ready;      // counted up once by the kernel in front when x is there, and by every block that has seen it; or null
  int m, n, units, token_tiles, steps, ranks;
  int segments, parts, float_out, vectors;
  u32 scale_base;  // 0x70007000
  int segment_stop[4];
  Part part[MAX_PARTS];
};

// One box of a tensor map by the copy engine; its bytes count at the barrier. `column` counts elements of a row. With EVERY it goes to the
// same place in all blocks of the cluster, and counts at each one's barrier.
template <bool EVERY>
__device__ __forceinline__ void copy_box(u32 shared, const TensorMap& map, int column, int row, u32 barrier) {
  if constexpr (EVERY) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(
            shared),
        "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(static_cast<u16>((1 << CLUSTER) - 1))
        : "memory");
    return;
  }
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(shared),
               "l"(&map), "r"(column), "r"(row), "r"(barrier)
               : "memory");
}

// Four 8x8 matrices (two with PAIRS = 1), each transposed: lane i gives the address of row i & 7 of matrix i >> 3.
template <int PAIRS>
__device__ __forceinline__ void store_transposed(u32 address, const u32 (&m)[2 * PAIRS]) {
  if constexpr (PAIRS == 2) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(m[0]), "r"(m[1]), "r"(m[2]),
                 "r"(m[3])
                 : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(address), "r"(m[0]), "r"(m[1]) : "memory");
  }
}

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

__device__ __forceinline__ void mma_at(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// What a row's sum is made with: y = (sum * factor + bias) / scale, then + B h, then * scale.
struct Row {
  float factor, bias, scale;
};

// Of the lane's rows in TILES row tiles, 8 apart from `row`. All loads are under way together.
__device__ __forceinline__ void load_rows(const MiddleParams& p, int row, Row (&rows)[2 * TILES]) {
  float divisors[2 * TILES];
  u16 bias[2 * TILES];
#pragma unroll
  for (int i = 0; i < 2 * TILES; ++i) {
    const int r = min(row + 8 * i, p.n - 1);
    int segment = 0;
#pragma unroll
    for (int s = 0; s < 3; ++s) segment += s + 1 < p.segments && r >= p.segment_stop[s];
    divisors[i] = row_divisor(p.side, segment);
    bias[i] = p.bias != nullptr ? p.bias[r] : 0;
    rows[i].scale = 1;
#pragma unroll
    for (int q = 0; q < MAX_PARTS; ++q)
      if (q < p.parts && r >= p.part[q].row_start && r < p.part[q].row_stop && p.part[q].scale != 0) rows[i].scale = p.part[q].scale;
  }
#pragma unroll
  for (int i = 0; i < 2 * TILES; ++i) {
    rows[i].factor = __fdiv_rn(TILE_LIFT, divisors[i]);
    rows[i].bias = from_bf16(bias[i]);
  }
}

// Eight values of a row of an adapter matrix, zeros where there is none. There is no branch, so that loads are under way together.
__device__ __forceinline__ uint4 adapter_row(const u16* matrix, int row, int rows, int stride, int column, int columns) {
  const bool inside = row >= 0 && row < rows && column < columns;
  const long long place = static_cast<long long>(min(max(row, 0), rows - 1)) * stride + (column < columns ? column : 0);
  const uint4 v = *reinterpret_cast<const uint4*>(matrix + place);
  return make_uint4(inside ? v.x : 0, inside ? v.y : 0, inside ? v.z : 0, inside ? v.w : 0);
}

// Adds B h of one part to the scaled sums of TILES row tiles from `row` (the lane's first) and NC columns of 8 tokens from `token`.
// Ranks are taken in an order of their own, the same for B and h: a lane's 16 bytes are its share of two k16 steps.
template <int NC>
__device__ __forceinline__ void add_part(const MiddleParams& p, const Part& part, float (&v)[TILES][4 * NC], int row, int token, int lane) {
  const int g = lane >> 2, t = lane & 3, height = part.row_stop - part.row_start;
#pragma unroll 1
  for (int rank = 8 * t; rank < part.rank + 8 * t; rank += 32) {
    uint4 b[2 * TILES];
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i) b[i] = adapter_row(part.b, row + 8 * i - part.row_start, height, part.rank, rank, part.rank);
#pragma unroll
    for (int from = 0; from < NC; from += 4) {
      uint4 h[4];
#pragma unroll
      for (int c = from; c < from + 4 && c < NC; ++c)
        h[c - from] = adapter_row(p.h + part.rank_start, token + 8 * c + g, p.m, p.ranks, rank, part.rank);
#pragma unroll
      for (int c = from; c < from + 4 && c < NC; ++c)
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
          mma_at(&v[i][4 * c], b[2 * i].x, b[2 * i + 1].x, b[2 * i].y, b[2 * i + 1].y, h[c - from].x, h[c - from].y);
          mma_at(&v[i][4 * c], b[2 * i].z, b[2 * i + 1].z, b[2 * i].w, b[2 * i + 1].w, h[c - from].z, h[c - from].w);
        }
    }
  }
}

// Brings the rows of B that a warp will add into the L2 cache, where they stay coherent whatever ran before.
__device__ __forceinline__ void prefetch_adapters(const MiddleParams& p, int row_tile, int lane) {
  const int row = 16 * row_tile + lane;
  if (lane >= 16 * TILES) return;
#pragma unroll 1
  for (int q = 0; q < p.parts; ++q) {
    const Part& part = p.part[q];
    if (row < part.row_start || row >= part.row_stop) continue;
    const u16* from = part.b + static_cast<long long>(row - part.row_start) * part.rank;
    for (int rank = 0; rank < part.rank; rank += 64) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + rank));
  }
}

// Divides the sums by the scale of their row's adapter, or multiplies.
template <int NC>
__device__ __forceinline__ void scale_rows(float (&v)[TILES][4 * NC], const Row (&rows)[2 * TILES], bool divide) {
#pragma unroll
  for (int i = 0; i < 2 * TILES; ++i) {
    const float scale = divide ? __fdiv_rn(1.0f, rows[i].scale) : rows[i].scale;
#pragma unroll
    for (int c = 0; c < NC; ++c) {
      v[i >> 1][4 * c + 2 * (i & 1)] *= scale;
      v[i >> 1][4 * c + 2 * (i & 1) + 1] *= scale;
    }
  }
}

template <int NC>
__device__ __forceinline__ void store_floats(const MiddleParams& p, const float (&v)[TILES][4 * NC], int row, int token, int stop, int lane) {
#pragma unroll
  for (int c = 0; c < NC; ++c)
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int column = token + 8 * c + 2 * (lane & 3) + (e & 1), r = row + 16 * i + 8 * (e >> 1);
        if (column < stop && r < p.n) static_cast<float*>(p.out)[static_cast<long long>(column) * p.n + r] = v[i][4 * c + e];
      }
}

// Rounds, and turns the tile in shared memory: a token's 16 * TILES values are neighbours in memory. `first` is the warp's first row.
template <int NC>
__device__ __forceinline__ void store_rounded(const MiddleParams& p, const float (&v)[TILES][4 * NC], int first, int token, int stop, u32 staging,
                                              int lane) {
  constexpr int CHUNKS = 2 * TILES;       // of 8 values, 16 bytes, for each token; in an order that keeps banks apart
  constexpr int BYTES = 8 * 16 * CHUNKS;  // of a column of 8 tokens
  const int matrix = lane >> 3, j = lane & 7, mine = lane / CHUNKS, chunk = lane % CHUNKS;
  const u32 target = staging + j * 16 * CHUNKS + ((matrix ^ (TILES == 2 ? (j >> 1) & 3 : (j >> 2) & 1)) & (CHUNKS - 1)) * 16;
  const u32 source = staging + (mine & 7) * 16 * CHUNKS + (chunk ^ (TILES == 2 ? (mine >> 1) & 3 : (mine >> 2) & 1)) * 16;
  const int r = first + 8 * chunk;
  u16* out = static_cast<u16*>(p.out) + static_cast<long long>(token + mine) * p.n + r;
  const bool vectors = p.vectors && r + 8 <= p.n;
#pragma unroll
  for (int from = 0; from < NC; from += 4) {
    if (token + 8 * from >= stop) break;
    __syncwarp();
#pragma unroll
    for (int c = from; c < from + 4 && c < NC; ++c) {
      u32 packed[CHUNKS];
#pragma unroll
      for (int i = 0; i < CHUNKS; ++i) packed[i] = pack_bf16(v[i >> 1][4 * c + 2 * (i & 1)], v[i >> 1][4 * c + 2 * (i & 1) + 1]);
      store_transposed<TILES>(target + (c - from) * BYTES, packed);
    }
    __syncwarp();
    uint4 values[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) values[c] = load_shared_16(source + c * BYTES);
#pragma unroll
    for (int c = from; c < from + 4 && c < NC; ++c) {
      if (mine >= 8 || token + 8 * c + mine >= stop) continue;
      u16* place = out + 8ll * c * p.n;
      if (vectors) {
        *reinterpret_cast<uint4*>(place) = values[c - from];
      } else {
        const u32 words[4] = {values[c - from].x, values[c - from].y, values[c - from].z, values[c - from].w};
#pragma unroll
        for (int e = 0; e < 8; ++e)
          if (r + e < p.n) place[e] = static_cast<u16>(words[e >> 1] >> (16 * (e & 1)));
      }
    }
  }
}

// Ends the sums of a warp: TILES row tiles from `row_tile`, NC columns of 8 tokens from `token`, none from `stop` on. `staging` is the
// warp's shared memory.
template <int NC>
__device__ __forceinline__ void finish(const MiddleParams& p, const Row (&rows)[2 * TILES], float (&v)[TILES][4 * NC], int row_tile, int token,
                                       int stop, u32 staging, int lane) {
  const int g = lane >> 2, first = 16 * row_tile, row = first + g;
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    const Row low = rows[2 * i], high = rows[2 * i + 1];
#pragma unroll
    for (int c = 0; c < NC; ++c) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        v[i][4 * c + e] = v[i][4 * c + e] * low.factor + low.bias;
        v[i][4 * c + 2 + e] = v[i][4 * c + 2 + e] * high.factor + high.bias;
      }
    }
  }
  if (p.parts > 0) {
    scale_rows<NC>(v, rows, true);
#pragma unroll 1
    for (int q = 0; q < p.parts; ++q) {
      const Part& part = p.part[q];
      if (part.scale == 0 || part.row_start >= first + 16 * TILES || part.row_stop <= first) continue;
      add_part<NC>(p, part, v, row, token, lane);
    }
    scale_rows<NC>(v, rows, false);
  }
  if (p.float_out) {
    store_floats<NC>(p, v, row, token, stop, lane);
  } else {
    store_rounded<NC>(p, v, first, token, stop, staging, lane);
  }
}
