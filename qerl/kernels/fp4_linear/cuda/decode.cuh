// What the decode kernels have in common: the call, shared memory, adapters' expansion, products of a unit, and the
// reduction at the end of a round.

constexpr int LORA_WARPS = 4;
constexpr int LORA_THREADS = 32 * LORA_WARPS;
constexpr int THREADS = 32 * WARPS + LORA_THREADS;
constexpr int COLUMNS = 8 * NT;
// Halves of a unit of A that are under way to a warp together.
constexpr int HALVES = 2;
// Most lines of B that are brought into the L1 cache ahead.
constexpr int WARM_LINES = 128;
// Independent accumulators of one output, so that one product need not wait for the last.
constexpr int CHAINS = NT <= 2 ? 2 : 1;

struct DecodeParams {
  const u8* tiles;
  const u16* x;
  void* out;  // bfloat16 or float32 [m, n]
  const u16* bias;
  const float* side;  // of the format: divisors of NVFP4's segments or of FP8's rows, what doubly quantized scales need, or null
  const u16* a;
  float4* partials;  // [CLUSTER * chunks][groups][NT][32], MISSING between launches
  u32* counters;     // a zero between launches
  int m, n, k, units, row_tiles;
  int round_tiles, slice_units, rank_slots, ranks;
  int groups, chunks;  // 16 rows of A, and runs of a slice of the inputs: pieces of h
  int segments, parts, float_out;
  u32 scale_base;  // 0x70007000
  int segment_stop[4];
  Part part[MAX_PARTS];
};

struct Shared {
  u16* x;          // [COLUMNS][stride]
  float4* slots;   // [CLUSTER][rank_slots][NT][32]: partial sums of the tiles that this block finishes
  float4* extra;   // [tiles of this block's share of a round][NT][32]: bias + adapters
  float* factor;   // [tiles of this block's share of a round][16]: lift / divisor
  float4* local;   // [WARPS + LORA_WARPS][NT][32]: shares of a piece of h
  u16* h;          // [COLUMNS][h_stride]
  int stride, h_stride;
};

// What a block does: a slice of the inputs of a run of row tiles.
struct Work {
  int tile_start, tile_stop, first_unit, slice_units, rank;
};

// Which of `of` equal parts of `total` holds element `element`.
__device__ __forceinline__ int holder(int element, int of, int total) {
  return static_cast<int>((static_cast<u32>(element + 1) * static_cast<u32>(of) - 1) / static_cast<u32>(total));
}

__device__ __forceinline__ void cluster_sync() {
#if CLUSTER > 1
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// The two halves of a cluster barrier that orders no memory: all blocks have started.
__device__ __forceinline__ void cluster_arrive() {
#if CLUSTER > 1
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if CLUSTER > 1
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ u32 add_relaxed(u32* counter, u32 value) {
  u32 before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(value) : "memory");
  return before;
}

// Reads two bytes, so that their line is in the L1 cache.
__device__ __forceinline__ void warm(const void* pointer) {
  u16 unused;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(unused) : "l"(pointer));
}

__device__ __forceinline__ void lora_sync() { asm volatile("bar.sync 1, %0;" ::"n"(LORA_THREADS) : "memory"); }

__device__ __forceinline__ bool part_needed(const Part& part, int tile_start, int tile_stop) {
  return part.row_start < 16 * tile_stop && part.row_stop > 16 * tile_start;
}

// ---- Adapter warps; `thread` counts them from 0.

// Rows of x come as bulk copies, whose bytes count at a barrier. Their addresses and sizes must be multiples of 16 bytes.
#if VECTORS && __CUDA_ARCH__ >= 900
#define BULK_X 1
#else
#define BULK_X 0
#endif

#if BULK_X
__device__ __forceinline__ void copy_bulk(u32 shared, const void* global, int bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared), "l"(global), "r"(bytes),
               "r"(barrier)
               : "memory");
}

// Inputs of this block's slice that there are.
__device__ __forceinline__ int slice_inputs(const DecodeParams& p, const Work& w) { return min(w.slice_units * 64, p.k - w.first_unit * 64); }

// Before x is there. The first thread tells the barrier how many bytes will come; it may do so when some have come. Others lay zeros behind the end
// of x, where the last unit reaches beyond it and no copy comes.
__device__ __forceinline__ void expect_x(const DecodeParams& p, const Shared& s, const Work& w, int thread, u64* barrier) {
  const int rows = min(p.m, COLUMNS), inputs = slice_inputs(p, w);
  if (thread == 0) barrier_expect(smem_address(barrier), rows * inputs * 2);
  if (thread < rows) {
#pragma unroll 1
    for (int i = inputs; i < w.slice_units * 64; i += 8) *reinterpret_cast<uint4*>(s.x + thread * s.stride + i) = make_uint4(0, 0, 0, 0);
  }
  // The barrier has been initialized: with clusters, theirs has told these warps so.
  if (CLUSTER == 1) lora_sync();
}

// A row a thread, since a warp asks for one copy after the other: the rows are dealt out to the warps.
__device__ __forceinline__ void load_x(const DecodeParams& p, const Shared& s, const Work& w, int thread, u64* barrier) {
  const int row = (thread & 31) * LORA_WARPS + (thread >> 5);
  const u16* source = p.x + static_cast<long long>(row) * p.k + w.first_unit * 64;
  if (row < min(p.m, COLUMNS)) copy_bulk(smem_address(s.x + row * s.stride), source, slice_inputs(p, w) * 2, smem_address(barrier));
}
#else
// A thread has the same inputs of every row, so that no division stands between two copies.
__device__ void load_x(const DecodeParams& p, const Shared& s, const Work& w, int thread) {
  const int rows = min(p.m, COLUMNS);
  for (int chunk = thread; chunk < w.slice_units * 8; chunk += LORA_THREADS) {
    const int column = w.first_unit * 64 + chunk * 8;
    const u16* source = p.x + column;
    u16* target = s.x + chunk * 8;
#pragma unroll 1
    for (int row = 0; row < rows; ++row, source += p.k, target += s.stride) {
      if (VECTORS && column < p.k) {
        copy_async_16(smem_address(target), source);
      } else {
        *reinterpret_cast<uint4*>(target) = VECTORS ? make_uint4(0, 0, 0, 0) : load_row_8(source - column, column, p.k, false);
      }
    }
  }
  copy_async_commit();
  copy_async_wait<0>();
}
#endif

// Brings what `expand` will read first into the L1 cache.
__device__ void warm_epilogue(const DecodeParams& p, const Work& w, int thread) {
  const int tiles = min(p.round_tiles, w.tile_stop - w.tile_start);
  const int start = 16 * (w.tile_start + share(w.rank, CLUSTER, tiles)), stop = 16 * (w.tile_start + share(w.rank + 1, CLUSTER, tiles));
  if (p.side != nullptr && thread < p.segments) warm(p.side + thread);
  if (p.bias != nullptr && start + 32 * thread < min(stop, p.n)) warm(p.bias + start + 32 * thread);
  for (int q = 0; q < p.parts; ++q) {
    const Part& part = p.part[q];
    const int first = max(start, part.row_start), last = min(stop, part.row_stop);
    const long long from = static_cast<long long>(first - part.row_start) * part.rank;
    const int elements = min((last - first) * part.rank, WARM_LINES * 64);
    for (int i = 64 * thread; i < elements; i += 64 * LORA_THREADS) warm(part.b + from + i);
  }
}

// lift / divisor of the rows of the row tiles [first, last).
__device__ void find_factors(const DecodeParams& p, const Shared& s, int first, int last, int thread) {
#pragma unroll 1
  for (int i = thread; i < 16 * (last - first); i += LORA_THREADS) {
    const int row = 16 * first + i;
    int segment = 0;
    while (segment + 1 < p.segments && row >= p.segment_stop[segment]) ++segment;
    s.factor[i] = __fdiv_rn(TILE_LIFT, row_divisor(p.side, min(row, p.n - 1), segment));
  }
}

// The groups of 16 rows of A, of the first 32, that adapters of this cluster's rows have.
__device__ u32 needed_groups(const DecodeParams& p, const Work& w) {
  u32 needed = 0;
  for (int q = 0; q < p.parts; ++q) {
    const Part& part = p.part[q];
    if (part.rank == 0 || !part_needed(part, w.tile_start, w.tile_stop)) continue;
    for (int group = part.rank_start / 16; group < min(32, (part.rank_start + part.rank + 15) / 16); ++group) needed |= 1u << group;
  }
  return needed;
}

// bias + scale * B h of the row tiles [first, last), one row tile a warp at a time.
__device__ void expand(const DecodeParams& p, const Shared& s, const Work& w, int first, int last, int thread) {
  const int lane = thread & 31, warp = thread >> 5, g = lane >> 2, t = lane & 3;
  for (int tile = first + warp; tile < last; tile += LORA_WARPS) {
    const int row = 16 * tile + g;
    float low = 0, high = 0;
    if (p.bias != nullptr) {
      low = row < p.n ? from_bf16(p.bias[row]) : 0;
      high = row + 8 < p.n ? from_bf16(p.bias[row + 8]) : 0;
    }
    float4 out[NT];
#pragma unroll
    for (int n = 0; n < NT; ++n) out[n] = make_float4(low, low, high, high);
    for (int q = 0; q < p.parts; ++q) {
      const Part& part = p.part[q];
      if (!part_needed(part, tile, tile + 1)) continue;
      const bool low_inside = row >= part.row_start && row < part.row_stop;
      const bool high_inside = row + 8 >= part.row_start && row + 8 < part.row_stop;
      const u16* b_low = part.b + static_cast<long long>(row - part.row_start) * part.rank;
      const u16* b_high = b_low + 8ll * part.rank;
      float c[NT][4] = {};
#pragma unroll 2
      for (int k = 2 * t; k < part.rank + 2 * t; k += 16) {
        const bool near = k < part.rank, far = k + 8 < part.rank;
        u32 a[4];
        a[0] = low_inside && near ? *reinterpret_cast<const u32*>(b_low + k) : 0;
        a[1] = high_inside && near ? *reinterpret_cast<const u32*>(b_high + k) : 0;
        a[2] = low_inside && far ? *reinterpret_cast<const u32*>(b_low + k + 8) : 0;
        a[3] = high_inside && far ? *reinterpret_cast<const u32*>(b_high + k + 8) : 0;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          const u16* h = s.h + (8 * n + g) * s.h_stride + part.rank_start + k;
          mma_m16n8k16(c[n], a, near ? *reinterpret_cast<const u32*>(h) : 0, far ? *reinterpret_cast<const u32*>(h + 8) : 0);
        }
      }
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        out[n].x += part.scale * c[n][0];
        out[n].y += part.scale * c[n][1];
        out[n].z += part.scale * c[n][2];
        out[n].w += part.scale * c[n][3];
      }
    }
#pragma unroll
    for (int n = 0; n < NT; ++n) s.extra[((tile - first) * NT + n) * 32 + lane] = out[n];
  }
}

// ---- Main warps.

// `copy_async_16` where `copies`, without a branch: neighbouring copies stay one run of instructions, before which the assembler puts three more.
__device__ __forceinline__ void copy_async_16_where(bool copies, u32 shared, const void* global) {
  asm volatile("{\n.reg .pred copies;\nsetp.ne.u32 copies, %2, 0;\n@copies cp.async.cg.shared.global [%0], [%1], 16;\n}" ::"r"(shared), "l"(global),
               "r"(static_cast<u32>(copies))
               : "memory");
}

// Starts the copy of this lane's codes of a tile.
__device__ __forceinline__ void copy_codes(u32 target, const u8* source) {
#pragma unroll
  for (int run = 0; run < TILE_CODES; run += CODE_RUN) copy_async_16(target + run, source + run);
}

// Where the copies of one warp are: a run of units over all rounds.
struct Producer {
  const u8* source;
  int left;          // units of this round
  int row_left;      // units until the row tile ends
  int round_tile;    // first row tile of the round
};

// The flat units [from, to) of one warp in a round of `tiles` row tiles. With fewer units than warps, the last warps have none.
__device__ __forceinline__ void warp_range(int tiles, const Work& w, int warp, int& from, int& to) {
  const int total = tiles * w.slice_units, active = min(WARPS, total);
  from = warp < active ? share(warp, active, total) : total;
  to = warp < active ? share(warp + 1, active, total) : total;
}

// One unit: 16 rows x 64 inputs from the ring, times x.
__device__ __forceinline__ void multiply_unit(const Codes& codes, ScaleBytes bytes, Rows& rows, u32 x_at, u32 x_column, Unpacker unpacker, float (&c)[CHAINS][NT][4]) {
  const Scales scales = expand_scales(bytes, unpacker, rows);
  u32 b[NT][4], a[4];
#pragma unroll
  for (int n = 0; n < NT; ++n) ldmatrix_x4(b[n], x_at + n * x_column);
  dequantize_step<0>(look_up(word_of<0>(codes), unpacker), scales, a);
#pragma unroll
  for (int n = 0; n < NT; ++n) mma_m16n8k16(c[0][n], a, b[n][0], b[n][1]);
  dequantize_step<1>(look_up(word_of<1>(codes), unpacker), scales, a);
#pragma unroll
  for (int n = 0; n < NT; ++n) mma_m16n8k16(c[CHAINS - 1][n], a, b[n][2], b[n][3]);
#pragma unroll
  for (int n = 0; n < NT; ++n) ldmatrix_x4(b[n], x_at + n * x_column + 64);
  dequantize_step<2>(look_up(word_of<2>(codes), unpacker), scales, a);
#pragma unroll
  for (int n = 0; n < NT; ++n) mma_m16n8k16(c[0][n], a, b[n][0], b[n][1]);
  dequantize_step<3>(look_up(word_of<3>(codes), unpacker), scales, a);
#pragma unroll
  for (int n = 0; n < NT; ++n) mma_m16n8k16(c[CHAINS - 1][n], a, b[n][2], b[n][3]);
}

// Where the partial sums of one warp go: to the block that finishes the tile, the next slot for the next tile of the same block.
struct Delivery {
  u32 slot;  // in shared memory
  int owner, owner_stop;
};

// Where the products of one warp are in a round.
struct Course {
  int tile, left, row_left;  // units of the warp, and of its row tile
  Delivery to;
};

__device__ __forceinline__ void address(const DecodeParams& p, const Shared& s, const Work& w, Delivery& to, int tiles, int tile, int warp, int lane) {
  const int total = tiles * w.slice_units, active = min(WARPS, total);
  to.owner = holder(tile, CLUSTER, tiles);
  to.owner_stop = share(to.owner + 1, CLUSTER, tiles);
  const int first = share(to.owner, CLUSTER, tiles);
  const int slot = w.rank * p.rank_slots + tile - first + warp - holder(first * w.slice_units, active, total);
  to.slot = smem_address(s.slots) + (slot * NT * 32 + lane) * 16;
}

__device__ __forceinline__ Course course(const DecodeParams& p, const Shared& s, const Work& w, int tiles, int warp, int lane) {
  Course at;
  int from, stop;
  warp_range(tiles, w, warp, from, stop);
  at.tile = from / w.slice_units;
  at.left = stop - from;
  at.row_left = (at.tile + 1) * w.slice_units - from;
  if (at.left > 0) address(p, s, w, at.to, tiles, at.tile, warp, lane);
  return at;
}

// Where the partial sums of a row tile lie: a lane of the warp knows the first slot (lower half) and the number of those that the block of its
// number sent.
__device__ __forceinline__ u32 sources(const DecodeParams& p, int tiles, int first, int tile, int lane) {
  const int rank = min(lane, CLUSTER - 1), slice = share(rank + 1, CLUSTER, p.units) - share(rank, CLUSTER, p.units);
  const int total = tiles * slice, active = min(WARPS, total), base = holder(first * slice, active, total);
  const int from = holder(tile * slice, active, total), to = holder((tile + 1) * slice - 1, active, total);
  return static_cast<u32>(rank * p.rank_slots + tile - first + from - base) | static_cast<u32>(to - from + 1) << 16;
}

// Adds the partial sums of (row tile, column of 8) over blocks and warps, in the order of the inputs.
__device__ __forceinline__ float4 reduce(const Shared& s, u32 of, int n, int lane) {
  const float4* slots = s.slots + n * 32 + lane;
  u32 from[CLUSTER];
  float4 first[CLUSTER];
#pragma unroll
  for (int rank = 0; rank < CLUSTER; ++rank) {
    from[rank] = __shfl_sync(0xFFFFFFFFu, of, rank);
    first[rank] = slots[(from[rank] & 0xFFFF) * NT * 32];
  }
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int rank = 0; rank < CLUSTER; ++rank) {
    add(sum, first[rank]);
#pragma unroll 1
    for (u32 i = 1; i < from[rank] >> 16; ++i) add(sum, slots[((from[rank] & 0xFFFF) + i) * NT * 32]);
  }
  return sum;
}

__device__ __forceinline__ void store(const DecodeParams& p, long long place, float value) {
  if (p.float_out) {
    static_cast<float*>(p.out)[place] = value;
  } else {
    static_cast<u16*>(p.out)[place] = to_bf16(value);
  }
}

// Finishes this block's share of a round: row tiles [first, last) of `tiles`, which begin at row tile `round`. `of`: the sources of the
// first tile of this warp.
__device__ __forceinline__ void finish(const DecodeParams& p, const Shared& s, u32 of, int round, int tiles, int first, int last, int warp, int lane) {
  const int g = lane >> 2, t = lane & 3;
  for (int item = warp; item < (last - first) * NT; item += THREADS / 32) {
    const int n = item % NT, local = item / NT;
    if (item != warp) of = sources(p, tiles, first, first + local, lane);
    const float4 sum = reduce(s, of, n, lane);
    const float4 extra = s.extra[(local * NT + n) * 32 + lane];
    const float low = s.factor[local * 16 + g], high = s.factor[local * 16 + g + 8];
    const int row = 16 * (round + first + local) + g, column = 8 * n + 2 * t;
    const long long place = static_cast<long long>(column) * p.n + row;
    if (row < p.n) {
      if (column < p.m) store(p, place, sum.x * low + extra.x);
      if (column + 1 < p.m) store(p, place + p.n, sum.y * low + extra.y);
    }
    if (row + 8 < p.n) {
      if (column < p.m) store(p, place + 8, sum.z * high + extra.z);
      if (column + 1 < p.m) store(p, place + p.n + 8, sum.w * high + extra.w);
    }
  }
}
