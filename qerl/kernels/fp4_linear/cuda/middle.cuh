// What the kernels of the middle regime share: barriers that count copies, the copy engine, the call, and the end of an output tile.

// A tensor map of the driver (cuTensorMapEncodeTiled).
struct TensorMap {
  alignas(64) u64 words[16];
};

struct MiddleParams {
  TensorMap x_map;     // bfloat16 [m, k], boxes of TOKENS / CLUSTER x 64
  TensorMap tile_map;  // 8-byte words [row tiles, units * 72], boxes of ROW_TILES x 72
  void* out;           // bfloat16 or float32 [m, n]
  const u16* bias;
  const float* global_scale;
  const u16* h;      // bfloat16 [m, ranks]
  float4* partials;  // [2 * blocks][TILES][COLUMNS][CONSUMERS]
  u32* counters;     // [tiles], zeros between launches
  int m, n, units, token_tiles, steps, ranks;
  int segments, parts, float_out, vectors, adapter_vectors;
  u32 scale_base;  // 0x70007000
  int segment_stop[4];
  Part part[MAX_PARTS];
};

__device__ __forceinline__ void dependents_may_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ __forceinline__ void dependencies_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

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

__device__ __forceinline__ float row_factor(const MiddleParams& p, int row) {
  int segment = 0;
  while (segment + 1 < p.segments && row >= p.segment_stop[segment]) ++segment;
  return __fdiv_rn(TILE_LIFT, p.global_scale[segment]);
}

// Eight values of a row of an adapter matrix, zeros beyond its end and for rows that are not there.
__device__ __forceinline__ uint4 adapter_row(const u16* row, int column, int columns, bool inside, bool vectors) {
  if (!inside || column >= columns) return make_uint4(0, 0, 0, 0);
  return load_row_8(row, column, columns, vectors);
}

// What a row's sum is made with: y = (sum * factor + bias) / scale, then + B h, then * scale.
struct Row {
  float factor, bias, scale;
};

__device__ __forceinline__ Row row_of(const MiddleParams& p, int row) {
  Row out;
  out.factor = row_factor(p, row);
  out.bias = p.bias != nullptr && row < p.n ? from_bf16(p.bias[row]) : 0;
  out.scale = 1;
  for (int q = 0; q < p.parts; ++q)
    if (row >= p.part[q].row_start && row < p.part[q].row_stop && p.part[q].scale != 0) out.scale = p.part[q].scale;
  return out;
}

// Adds B h of one part to the scaled sums of TILES row tiles from `row` (the lane's first) and NC columns of 8 tokens from `token`.
// Ranks are taken in an order of their own, the same for B and h: a lane's 16 bytes are its share of two k16 steps.
template <int NC>
__device__ __forceinline__ void add_part(const MiddleParams& p, const Part& part, float (&v)[TILES][4 * NC], int row, int token, int lane) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll 1
  for (int rank = 8 * t; rank < part.rank + 8 * t; rank += 32) {
    uint4 b[TILES][2];
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i) {
      const int r = row + 8 * i;
      const u16* source = part.b + static_cast<long long>(r - part.row_start) * part.rank;
      b[i >> 1][i & 1] = adapter_row(source, rank, part.rank, r >= part.row_start && r < part.row_stop, p.adapter_vectors);
    }
#pragma unroll
    for (int c = 0; c < NC; ++c) {
      const int column = token + 8 * c + g;
      const u16* source = p.h + static_cast<long long>(column) * p.ranks + part.rank_start;
      const uint4 h = adapter_row(source, rank, part.rank, column < p.m, p.adapter_vectors);
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
        mma_at(&v[i][4 * c], b[i][0].x, b[i][1].x, b[i][0].y, b[i][1].y, h.x, h.y);
        mma_at(&v[i][4 * c], b[i][0].z, b[i][1].z, b[i][0].w, b[i][1].w, h.z, h.w);
      }
    }
  }
}

// Ends the sums of a warp: TILES row tiles from `row_tile`, NC columns of 8 tokens from `token`. `staging` is the warp's shared memory.
template <int NC>
__device__ __forceinline__ void finish(const MiddleParams& p, float (&v)[TILES][4 * NC], int row_tile, int token, u32 staging, int lane) {
  const int g = lane >> 2, t = lane & 3, first = 16 * row_tile, row = first + g;
  Row rows[TILES][2];
#pragma unroll
  for (int i = 0; i < 2 * TILES; ++i) rows[i >> 1][i & 1] = row_of(p, row + 8 * i);
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    const Row low = rows[i][0], high = rows[i][1];
    const float low_inverse = __fdiv_rn(1.0f, low.scale), high_inverse = __fdiv_rn(1.0f, high.scale);
#pragma unroll
    for (int c = 0; c < NC; ++c) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        v[i][4 * c + e] = (v[i][4 * c + e] * low.factor + low.bias) * low_inverse;
        v[i][4 * c + 2 + e] = (v[i][4 * c + 2 + e] * high.factor + high.bias) * high_inverse;
      }
    }
  }
#pragma unroll 1
  for (int q = 0; q < p.parts; ++q) {
    const Part& part = p.part[q];
    if (part.scale != 0 && part.row_start < first + 16 * TILES && part.row_stop > first) add_part<NC>(p, part, v, row, token, lane);
  }
  // The transposed tile: 8 rows of a token's 16 * TILES values, 16-byte chunks apart by banks.
  constexpr int CHUNKS = 2 * TILES;
  const int matrix = lane >> 3, j = lane & 7;
  const u32 target = staging + j * 16 * CHUNKS + ((matrix ^ (TILES == 2 ? (j >> 1) & 3 : (j >> 2) & 1)) & (CHUNKS - 1)) * 16;
  const int mine = lane / CHUNKS, chunk = lane % CHUNKS;
  const u32 source = staging + mine * 16 * CHUNKS + (chunk ^ (TILES == 2 ? (mine >> 1) & 3 : (mine >> 2) & 1)) * 16;
#pragma unroll
  for (int c = 0; c < NC; ++c) {
    if (token + 8 * c >= p.m) break;
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) v[i][4 * c + e] *= rows[i][e >> 1].scale;
    if (p.float_out) {
#pragma unroll
      for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int column = token + 8 * c + 2 * t + (e & 1), r = row + 16 * i + 8 * (e >> 1);
          if (column < p.m && r < p.n) static_cast<float*>(p.out)[static_cast<long long>(column) * p.n + r] = v[i][4 * c + e];
        }
      continue;
    }
    u32 packed[2 * TILES];
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      packed[2 * i] = pack_bf16(v[i][4 * c], v[i][4 * c + 1]);
      packed[2 * i + 1] = pack_bf16(v[i][4 * c + 2], v[i][4 * c + 3]);
    }
    const u32 turn = (c & 1) * 8 * 16 * CHUNKS;
    store_transposed<TILES>(target + turn, packed);
    __syncwarp();
    if (mine < 8) {
      const uint4 values = load_shared_16(source + turn);
      const int column = token + 8 * c + mine, r = first + 8 * chunk;
      u16* out = static_cast<u16*>(p.out) + static_cast<long long>(column) * p.n + r;
      if (column < p.m) {
        if (p.vectors && r + 8 <= p.n) {
          *reinterpret_cast<uint4*>(out) = values;
        } else {
          const u32 words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
          for (int e = 0; e < 8; ++e)
            if (r + e < p.n) out[e] = static_cast<u16>(words[e >> 1] >> (16 * (e & 1)));
        }
      }
    }
  }
}
