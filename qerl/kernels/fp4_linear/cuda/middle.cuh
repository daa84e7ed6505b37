// What the parts of the middle kernel share: sizes, the call, the list of steps, the copy engine, and the end of an output tile.

constexpr int WARPS = 4 * GROUPS;
constexpr int CONSUMERS = 32 * WARPS;
// Many sums: registers that the other warps do not need go to those that multiply.
constexpr bool WIDE = TILES * TOKENS > 128;
constexpr int THREADS = CONSUMERS + 128;  // a warp that copies, three that help
// A block never has more registers than it starts with: a warpgroup that asks for more waits for ever.
constexpr int REGISTERS = 65536 / THREADS / 8 * 8, MANY_REGISTERS = 216, FEW_REGISTERS = 72;
static_assert(!WIDE || CONSUMERS * MANY_REGISTERS + 128 * FEW_REGISTERS <= THREADS * REGISTERS);
constexpr int COLUMNS = TOKENS / 8;
// Few sums: parts of a tile go from block to block as words that are watched, and are put back to MISSING. Of many, putting back takes longer than
// a fence and a counter.
constexpr bool WATCHED = TILES * TOKENS <= 64;
constexpr int ROW_TILES = WARPS * TILES;
constexpr int BLOCK_ROWS = 16 * ROW_TILES;
constexpr int X_BYTES = TOKENS * 128;
constexpr int STEP_BYTES = X_BYTES + ROW_TILES * TILE_BYTES;
constexpr int STAGE_BYTES = (STEP_BYTES + 1023) / 1024 * 1024;  // the swizzle of 128 bytes repeats every 1024
constexpr int STAGING_BYTES = 4096;                             // of a warpgroup

// A tensor map of the driver (cuTensorMapEncodeTiled).
struct TensorMap {
  alignas(64) u64 words[16];
};

struct MiddleParams {
  TensorMap x_map;     // bfloat16 [m, k], boxes of TOKENS / CLUSTER x 64
  TensorMap a_map;     // bfloat16 [ranks, k], boxes of 32 x 64
  TensorMap tile_map;  // 8-byte words [row tiles, units * words of a tile], boxes of ROW_TILES tiles
  void* out;           // bfloat16 or float32 [m, n]
  const u16* bias;
  const float* side;   // of the format: divisors of NVFP4's segments or of FP8's rows, what doubly quantized scales need, or null
  const u16* a;        // bfloat16 [ranks, k]
  u16* h;              // bfloat16 [m, ranks], made here
  float4* partials;    // [2 * blocks][TILES][COLUMNS][CONSUMERS]; MISSING between launches if WATCHED
  float2* h_partials;  // [h_pieces][CLUSTER][PIECE]
  u32* counters;       // [tiles * CLUSTER * GROUPS], zeros between launches
  u32* h_counters;     // two more
  int m, n, k, units, token_tiles, clusters, steps, ranks, h_slices, h_pieces, h_steps;  // `clusters` share the steps; a slice has `h_steps`
  int segments, parts, float_out;
  u32 per_units, per_token_tiles, per_slices;  // for `divide`
  u32 scale_base;  // 0x70007000
  int segment_stop[4];
  Part part[MAX_PARTS];
};

// What a row's sum is made with: y = sum * factor + bias; the sum is multiplied by `down` (factor over the adapter's scale) before B h is
// added, and by `up` (the inverse) behind.
struct alignas(16) Row {
  float factor, bias, down, up;
};

// n / d, with `per` the next whole number above 2^32 / d, or 0 for a d of 1: exact while n * d is less than 2^32.
__device__ __forceinline__ int divide(int n, u32 per) { return per == 0 ? n : static_cast<int>(__umulhi(n, per)); }

// Where in the list of steps a block is.
struct Place {
  int unit, token_tile, row_block;
};

__device__ __forceinline__ Place place_of(const MiddleParams& p, int step) {
  const int tile = divide(step, p.per_units), row_block = divide(tile, p.per_token_tiles);
  return {step - tile * p.units, tile - row_block * p.token_tiles, row_block};
}

__device__ __forceinline__ void advance(const MiddleParams& p, Place& at) {
  if (++at.unit < p.units) return;
  at.unit = 0;
  if (++at.token_tile < p.token_tiles) return;
  at.token_tile = 0;
  ++at.row_block;
}

// Of this block; the blocks of a cluster have neighbouring rows of the same tokens.
__device__ __forceinline__ int first_row_tile(const Place& at) { return (at.row_block * CLUSTER + block_rank()) * ROW_TILES; }

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

// Four 8x8 matrices, each transposed: lane i gives the address of row i & 7 of matrix i >> 3.
__device__ __forceinline__ void store_transposed(u32 address, const u32 (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
               : "memory");
}

// Of a warpgroup.
__device__ __forceinline__ void group_sync(int thread) { asm volatile("bar.sync %0, 128;" ::"r"(3 + (thread >> 7)) : "memory"); }

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
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

// Rounds, and turns the tile in shared memory: a token's 64 * TILES values of a warpgroup are neighbours in memory. `first` is the
// warpgroup's first row.
template <int NC>
__device__ __forceinline__ void store_rounded(const MiddleParams& p, const float (&v)[TILES][4 * NC], int first, int token, int stop, u32 staging,
                                              int thread) {
  constexpr int CHUNKS = 8 * TILES;  // of 8 values, 16 bytes, for each token; chunk c of token j at c ^ (j & 7)
  constexpr int ROUND = 2 / TILES;   // columns of 8 tokens at a time; two places for them
  const int lane = thread & 31, warp = thread >> 5 & 3, matrix = lane >> 3, j = lane & 7;
  const int mine = (thread & 127) / CHUNKS, chunk = (thread & 127) % CHUNKS, r = first + 8 * chunk;
  const u32 target = staging + ((TILES == 1 ? 8 * (matrix >> 1) : 0) + j) * 16 * CHUNKS + (((TILES == 1 ? 2 * warp + (matrix & 1) : 4 * warp + matrix) ^ j) << 4);
  const u32 source = staging + mine * 16 * CHUNKS + ((chunk ^ (mine & 7)) << 4);
  u16* out = static_cast<u16*>(p.out) + static_cast<long long>(token + mine) * p.n + r;
  const bool vectors = VECTORS && r + 8 <= p.n;
  group_sync(thread);
#pragma unroll
  for (int from = 0; from < NC; from += ROUND) {
    if (token + 8 * from >= stop) break;
    const u32 place = from / ROUND % 2 * (STAGING_BYTES / 2);
    u32 packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = TILES == 1 ? &v[0][4 * (from + (i >> 1)) + 2 * (i & 1)] : &v[TILES - 1 & i >> 1][4 * from + 2 * (i & 1)];
      packed[i] = pack_bf16(pair[0], pair[1]);
    }
    store_transposed(target + place, packed);
    group_sync(thread);
    const uint4 values = load_shared_16(source + place);
    if (token + 8 * from + mine >= stop) continue;
    u16* to = out + 8ll * from * p.n;
    if (vectors) {
      asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(values.x), "r"(values.y), "r"(values.z), "r"(values.w) : "memory");
    } else if (!VECTORS) {
      const u32 words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (r + e < p.n) to[e] = static_cast<u16>(words[e >> 1] >> (16 * (e & 1)));
    }
  }
}

// Ends the sums of a warp: TILES row tiles from `row_tile`, NC columns of 8 tokens from `token`, none from `stop` on. `staging` is shared memory of
// the warpgroup, whose warps come here together.
template <int NC>
__device__ __forceinline__ void finish(const MiddleParams& p, const Row (&rows)[2 * TILES], float (&v)[TILES][4 * NC], int row_tile, int token,
                                       int stop, u32 staging, int thread) {
#pragma unroll
  for (int i = 0; i < 2 * TILES; ++i)
#pragma unroll
    for (int c = 0; c < NC; ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& sum = v[i >> 1][4 * c + 2 * (i & 1) + e];
        sum = sum * rows[i].factor + rows[i].bias;
      }
  if (p.float_out) {
    store_floats<NC>(p, v, 16 * row_tile + ((thread & 31) >> 2), token, stop, thread & 31);
  } else {
    store_rounded<NC>(p, v, 16 * (row_tile - (thread >> 5 & 3) * TILES), token, stop, staging, thread);
  }
}
