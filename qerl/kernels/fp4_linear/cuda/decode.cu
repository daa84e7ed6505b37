// y = (x V^T) / G + bias + scale * B (A x) for few rows of x; V = q * s is read from the packed layout once.
//
// A cluster of CLUSTER blocks takes a contiguous run of row tiles; block `rank` of it takes a slice of the inputs, whose x stays
// in shared memory for the whole launch. The tiles of a round are one flat list of units; every main warp streams an
// equal share of it through a private ring of asynchronous copies, without any barrier, and leaves one partial sum a row tile.
// At the end of the round the partial sums are added in the order of the inputs and finished.
//
// Meanwhile four more warps do the adapters: partial sums of h = A x, spread over all blocks and exchanged through global
// memory once, then bias + scale * B h for the row tiles that this block will finish.
//
// Compile-time: NT (columns of 8 rows of x), WARPS (main warps), STAGES (depth of a ring), CLUSTER.

constexpr int LORA_WARPS = 4;
constexpr int THREADS = 32 * (WARPS + LORA_WARPS);
constexpr int COLUMNS = 8 * NT;
constexpr int MAX_PARTS = 4;

struct Part {
  const u16* b;
  int row_start, row_stop, rank_start, rank;
  float scale;
  int unused;
};

struct DecodeParams {
  const u8* tiles;
  const u16* x;
  void* out;  // bfloat16 or float32 [m, n]
  const u16* bias;
  const float* global_scale;
  const u16* a;
  float4* partial_h;
  u32* counters;
  int m, n, k, units, row_tiles;
  int ranks, sub_slices;
  int round_tiles, slice_units;
  int segments, parts, float_out;
  int segment_stop[4];
  Part part[MAX_PARTS];
};

struct Shared {
  u16* x;        // [COLUMNS][stride]
  u8* ring;      // [WARPS][STAGES][TILE_BYTES]
  float4* slots; // [round_tiles + WARPS - 1][NT][32]
  float4* extra; // [tiles of this block's share of a round][NT][32]: bias + adapters
  float4* sums;  // [LORA_WARPS][NT][32]
  u16* h;        // [COLUMNS][h_stride]
  int stride, h_stride;
};

// Where part `index` of `of` equal parts of `total` begins.
__device__ __forceinline__ int share(int index, int of, int total) {
  return static_cast<int>(static_cast<u32>(index) * static_cast<u32>(total) / static_cast<u32>(of));
}

__device__ __forceinline__ u32 cluster_rank() {
#if CLUSTER > 1
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#else
  return 0;
#endif
}

__device__ __forceinline__ void cluster_sync() {
#if CLUSTER > 1
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

__device__ __forceinline__ float4 read_block(const float4* pointer, u32 rank) {
#if CLUSTER > 1
  u32 address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem_address(pointer)), "r"(rank));
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
#else
  return *pointer;
#endif
}

__device__ __forceinline__ void lora_sync() { asm volatile("bar.sync 1, %0;" ::"n"(32 * LORA_WARPS) : "memory"); }

__device__ __forceinline__ void add(float4& sum, float4 v) {
  sum.x += v.x;
  sum.y += v.y;
  sum.z += v.z;
  sum.w += v.w;
}

// Loads this block's slice of x; called by the adapter warps alone.
__device__ void load_x(const DecodeParams& p, const Shared& s, int first_unit, int slice_units, int thread) {
  const bool vectors = p.k % 8 == 0;
  const int chunks = slice_units * 8;
  const int rows = p.m < COLUMNS ? p.m : COLUMNS;
  for (int i = thread; i < rows * chunks; i += 32 * LORA_WARPS) {
    const int row = i / chunks, chunk = i - row * chunks;
    const int column = first_unit * 64 + chunk * 8;
    const u16* source = p.x + static_cast<long long>(row) * p.k;
    u16* target = s.x + row * s.stride + chunk * 8;
    if (vectors && column + 8 <= p.k) {
      copy_async_16(smem_address(target), source + column);
    } else {
      *reinterpret_cast<uint4*>(target) = load_row_8(source, column, p.k, vectors);
    }
  }
  copy_async_commit();
  copy_async_wait<0>();
}

// Partial sums of h = A x over parts of this block's slice, to global memory.
__device__ void shrink(const DecodeParams& p, const Shared& s, int cluster, int clusters, u32 rank, int first_unit, int slice_units, int thread) {
  const int lane = thread & 31, warp = thread >> 5, g = lane >> 2, t = lane & 3;
  const int groups = (p.ranks + 15) / 16;
  const bool vectors = p.k % 8 == 0;
  for (int item = cluster; item < groups * p.sub_slices; item += clusters) {
    const int group = item % groups, sub = item / groups;
    const int begin = share(sub, p.sub_slices, slice_units), end = share(sub + 1, p.sub_slices, slice_units);
    // In halves of a unit, 32 inputs each.
    const int from = 2 * begin + share(warp, LORA_WARPS, 2 * (end - begin));
    const int to = 2 * begin + share(warp + 1, LORA_WARPS, 2 * (end - begin));
    const int row = 16 * group + g;
    const u16* low = p.a + static_cast<long long>(row) * p.k;
    const u16* high = low + 8ll * p.k;
    float c[NT][4] = {};
#pragma unroll 2
    for (int step = from; step < to; ++step) {
      const int local = step * 32 + 8 * t, column = first_unit * 64 + local;
      const uint4 zero = make_uint4(0, 0, 0, 0);
      const uint4 a_low = row < p.ranks ? load_row_8(low, column, p.k, vectors) : zero;
      const uint4 a_high = row + 8 < p.ranks ? load_row_8(high, column, p.k, vectors) : zero;
      const u32 first[4] = {a_low.x, a_high.x, a_low.y, a_high.y};
      const u32 second[4] = {a_low.z, a_high.z, a_low.w, a_high.w};
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const uint4 b = *reinterpret_cast<const uint4*>(s.x + (8 * n + g) * s.stride + local);
        mma_m16n8k16(c[n], first, b.x, b.y);
        mma_m16n8k16(c[n], second, b.z, b.w);
      }
    }
#pragma unroll
    for (int n = 0; n < NT; ++n) s.sums[(warp * NT + n) * 32 + lane] = make_float4(c[n][0], c[n][1], c[n][2], c[n][3]);
    lora_sync();
    for (int i = thread; i < NT * 32; i += 32 * LORA_WARPS) {
      float4 sum = s.sums[i];
#pragma unroll
      for (int w = 1; w < LORA_WARPS; ++w) add(sum, s.sums[w * NT * 32 + i]);
      const int slice = rank * p.sub_slices + sub;
      p.partial_h[(static_cast<long long>(slice) * groups + group) * NT * 32 + i] = sum;
    }
    __threadfence();
    lora_sync();
    if (thread == 0) atomicAdd(&p.counters[0], 1u);
  }
}

// Waits for all partial sums of h and adds those that the row tiles [tile_start, tile_stop) need: bfloat16 in shared memory.
__device__ void gather_h(const DecodeParams& p, const Shared& s, int tile_start, int tile_stop, int thread) {
  const int groups = (p.ranks + 15) / 16, slices = CLUSTER * p.sub_slices;
  if (thread == 0) {
    const u32 wanted = static_cast<u32>(groups * slices);
    u32 seen;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(p.counters) : "memory");
    } while (seen < wanted);
  }
  lora_sync();
  for (int i = thread; i < groups * NT * 32; i += 32 * LORA_WARPS) {
    const int group = i / (NT * 32), n = (i / 32) % NT, lane = i & 31, g = lane >> 2, t = lane & 3;
    bool needed = false;
    for (int q = 0; q < p.parts; ++q) {
      const Part& part = p.part[q];
      needed |= part.row_start < 16 * tile_stop && part.row_stop > 16 * tile_start &&
                part.rank_start < 16 * group + 16 && part.rank_start + part.rank > 16 * group;
    }
    if (!needed) continue;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 8
    for (int slice = 0; slice < slices; ++slice) add(sum, __ldcg(p.partial_h + static_cast<long long>(slice) * groups * NT * 32 + i));
    u16* target = s.h + (8 * n + 2 * t) * s.h_stride + 16 * group + g;
    target[0] = to_bf16(sum.x);
    target[s.h_stride] = to_bf16(sum.y);
    target[8] = to_bf16(sum.z);
    target[s.h_stride + 8] = to_bf16(sum.w);
  }
  lora_sync();
  // The last block to have read resets both counters for the next launch.
  if (thread == 0) {
    __threadfence();
    if (atomicAdd(&p.counters[1], 1u) == gridDim.x - 1) {
      p.counters[0] = 0;
      p.counters[1] = 0;
    }
  }
}

// bias + scale * B h of the row tiles [first, last), one row tile a warp at a time.
__device__ void expand(const DecodeParams& p, const Shared& s, int first, int last, int thread) {
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
      if (part.row_start >= 16 * tile + 16 || part.row_stop <= 16 * tile) continue;
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
          const u32 b0 = near ? *reinterpret_cast<const u32*>(h) : 0;
          const u32 b1 = far ? *reinterpret_cast<const u32*>(h + 8) : 0;
          mma_m16n8k16(c[n], a, b0, b1);
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

// Where the copies of one warp are: a run of units over all rounds.
struct Producer {
  const u8* source;   // of this lane
  int left;           // units of this round
  int row_left;       // units until the row tile ends
  int round_tile;     // first row tile of the round
};

__device__ __forceinline__ void start_round(const DecodeParams& p, Producer& at, int tile_stop, int first_unit, int slice_units, int warp, int lane) {
  const int tiles = min(p.round_tiles, tile_stop - at.round_tile);
  const int from = share(warp, WARPS, tiles * slice_units), to = share(warp + 1, WARPS, tiles * slice_units);
  const int tile = from / slice_units, column = from - tile * slice_units;
  at.row_left = slice_units - column;
  at.left = to - from;
  at.source = p.tiles + (static_cast<long long>(at.round_tile + tile) * p.units + first_unit + column) * TILE_BYTES + 16 * lane;
}

// Starts the copy of the next unit, if there is one; commits a group in either case. `target` is this lane's place.
__device__ __forceinline__ void produce(const DecodeParams& p, Producer& at, u32 target, int tile_stop, int first_unit, int slice_units, u32 row_jump, int warp, int lane) {
  if (at.left == 0) {
    while (at.left == 0 && at.round_tile + p.round_tiles < tile_stop) {
      at.round_tile += p.round_tiles;
      start_round(p, at, tile_stop, first_unit, slice_units, warp, lane);
    }
  }
  if (at.left > 0) {
    copy_async_16(target, at.source);
    if (lane < 4) copy_async_16(target + TILE_CODES, at.source + TILE_CODES);
    --at.left;
    u32 step = TILE_BYTES;
    if (--at.row_left == 0) {
      at.row_left = slice_units;
      step = row_jump;
    }
    at.source += step;
  }
  copy_async_commit();
}

// Adds the partial sums of (row tile, column of 8) over blocks and warps, in the order of the inputs.
__device__ __forceinline__ float4 reduce(const DecodeParams& p, const Shared& s, int tiles, int tile, int n, int lane) {
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int rank = 0; rank < CLUSTER; ++rank) {
    const int slice = share(rank + 1, CLUSTER, p.units) - share(rank, CLUSTER, p.units);
    const int total = tiles * slice, begin = tile * slice;
    int warp = total == 0 ? WARPS : share(begin, total, WARPS);
    for (; warp < WARPS; ++warp) {
      const int from = share(warp, WARPS, total), to = share(warp + 1, WARPS, total);
      if (from >= begin + slice) break;
      if (to > begin && to > from) add(sum, read_block(s.slots + ((tile + warp) * NT + n) * 32 + lane, rank));
    }
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

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(128) u8 memory[];
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const u32 rank = cluster_rank();
  const int cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
  const int tile_start = share(cluster, clusters, p.row_tiles), tile_stop = share(cluster + 1, clusters, p.row_tiles);
  const int first_unit = share(rank, CLUSTER, p.units);
  const int slice_units = share(rank + 1, CLUSTER, p.units) - first_unit;

  Shared s;
  s.stride = p.slice_units * 64 + 8;
  s.h_stride = (p.ranks + 15) / 16 * 16 + 8;
  u8* next = memory;
  s.ring = next, next += WARPS * STAGES * TILE_BYTES;
  s.x = reinterpret_cast<u16*>(next), next += COLUMNS * s.stride * 2;
  s.slots = reinterpret_cast<float4*>(next), next += (p.round_tiles + WARPS - 1) * NT * 512;
  s.extra = reinterpret_cast<float4*>(next), next += ((p.round_tiles + CLUSTER - 1) / CLUSTER) * NT * 512;
  s.sums = reinterpret_cast<float4*>(next), next += LORA_WARPS * NT * 512;
  s.h = reinterpret_cast<u16*>(next);

  Producer at = {nullptr, 0, 0, tile_start};
  const u32 ring = smem_address(s.ring) + warp * STAGES * TILE_BYTES;
  const u32 row_jump = (p.units - slice_units + 1) * TILE_BYTES;
  u32 scale_base;
  asm volatile("mov.u32 %0, 0x70007000;" : "=r"(scale_base));
  if (warp < WARPS) {
    start_round(p, at, tile_stop, first_unit, slice_units, warp, lane);
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) produce(p, at, ring + i * TILE_BYTES + 16 * lane, tile_stop, first_unit, slice_units, row_jump, warp, lane);
  } else {
    load_x(p, s, first_unit, slice_units, thread - 32 * WARPS);
  }
  __syncthreads();
  if (warp >= WARPS && p.parts > 0) {
    shrink(p, s, cluster, clusters, rank, first_unit, slice_units, thread - 32 * WARPS);
    gather_h(p, s, tile_start, tile_stop, thread - 32 * WARPS);
  }

  u32 stage = 0, free_stage = (STAGES - 1) * TILE_BYTES;  // offsets in the ring
  const u32 codes_at = ring + 16 * lane, scales_at = ring + TILE_CODES + 8 * (lane >> 2);
  for (int round = tile_start; round < tile_stop; round += p.round_tiles) {
    const int tiles = min(p.round_tiles, tile_stop - round);
    const int mine = share(rank, CLUSTER, tiles), mine_stop = share(rank + 1, CLUSTER, tiles);
    if (warp < WARPS) {
      const int from = share(warp, WARPS, tiles * slice_units), to = share(warp + 1, WARPS, tiles * slice_units);
      int left = to - from, tile = from / max(slice_units, 1), column = from - tile * slice_units;
      const u32 x_row = smem_address(s.x) + ((lane & 7) * s.stride + (lane >> 3) * 8) * 2;
      while (left > 0) {
        const int run = min(left, slice_units - column);
        float c[2][NT][4] = {};
        u32 x_at = x_row + column * 128;
#pragma unroll 1
        for (int i = 0; i < run; ++i) {
          copy_async_wait<STAGES - 2>();
          __syncwarp();
          const uint4 codes = load_shared_16(codes_at + stage);
          const uint2 scales = load_shared_8(scales_at + stage);
          u32 b[NT][2][4];
#pragma unroll
          for (int n = 0; n < NT; ++n) {
            ldmatrix_x4(b[n][0], x_at + n * 8 * s.stride * 2);
            ldmatrix_x4(b[n][1], x_at + n * 8 * s.stride * 2 + 64);
          }
          produce(p, at, codes_at + free_stage, tile_stop, first_unit, slice_units, row_jump, warp, lane);
          free_stage = stage;
          stage = stage == (STAGES - 1) * TILE_BYTES ? 0 : stage + TILE_BYTES;
          const uint2 low = expand_scales(scales.x, scale_base), high = expand_scales(scales.y, scale_base);
          u32 a[4];
          dequantize_step(codes.x, step_scale<0>(low), step_scale<0>(high), a);
#pragma unroll
          for (int n = 0; n < NT; ++n) mma_m16n8k16(c[0][n], a, b[n][0][0], b[n][0][1]);
          dequantize_step(codes.y, step_scale<1>(low), step_scale<1>(high), a);
#pragma unroll
          for (int n = 0; n < NT; ++n) mma_m16n8k16(c[1][n], a, b[n][0][2], b[n][0][3]);
          dequantize_step(codes.z, step_scale<2>(low), step_scale<2>(high), a);
#pragma unroll
          for (int n = 0; n < NT; ++n) mma_m16n8k16(c[0][n], a, b[n][1][0], b[n][1][1]);
          dequantize_step(codes.w, step_scale<3>(low), step_scale<3>(high), a);
#pragma unroll
          for (int n = 0; n < NT; ++n) mma_m16n8k16(c[1][n], a, b[n][1][2], b[n][1][3]);
          x_at += 128;
        }
#pragma unroll
        for (int n = 0; n < NT; ++n)
          s.slots[((tile + warp) * NT + n) * 32 + lane] = make_float4(
              c[0][n][0] + c[1][n][0], c[0][n][1] + c[1][n][1], c[0][n][2] + c[1][n][2], c[0][n][3] + c[1][n][3]);
        left -= run;
        column = 0;
        ++tile;
      }
    } else {
      expand(p, s, round + mine, round + mine_stop, thread - 32 * WARPS);
    }
    cluster_sync();
    for (int item = warp; item < (mine_stop - mine) * NT; item += WARPS + LORA_WARPS) {
      const int n = item % NT, local = item / NT, tile = mine + local, g = lane >> 2, t = lane & 3;
      const float4 sum = reduce(p, s, tiles, tile, n, lane);
      const float4 extra = s.extra[(local * NT + n) * 32 + lane];
      const int row = 16 * (round + tile) + g, column = 8 * n + 2 * t;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = row + 8 * half;
        if (r >= p.n) continue;
        int segment = 0;
        while (segment + 1 < p.segments && r >= p.segment_stop[segment]) ++segment;
        const float divisor = p.global_scale[segment];
        const long long place = static_cast<long long>(column) * p.n + r;
        const float first = __fdiv_rn((half ? sum.z : sum.x) * TILE_LIFT, divisor) + (half ? extra.z : extra.x);
        const float second = __fdiv_rn((half ? sum.w : sum.y) * TILE_LIFT, divisor) + (half ? extra.w : extra.y);
        if (column < p.m) store(p, place, first);
        if (column + 1 < p.m) store(p, place + p.n, second);
      }
    }
    cluster_sync();
  }
}
