// y = (x V^T) / G + bias + scale * B (A x) for few rows of x; V = q * s is read from the packed layout once.
//
// A cluster of CLUSTER blocks takes a contiguous run of row tiles; block `rank` of it takes a slice of the inputs, whose x stays
// in shared memory for the whole launch. The tiles of a round are one flat list of units; every main warp streams an
// equal share of it through a private ring of asynchronous copies, without any barrier. A warp that ends its part of a row tile
// pushes the partial sum into the shared memory of the block that finishes this tile; after one cluster barrier a round,
// that block adds them in the order of the inputs.
//
// Meanwhile four more warps do the adapters: h = A x of the parts that the cluster's rows need, each block from its slice of x, the
// partial sums pushed to every block of the cluster; then bias + scale * B h for the row tiles that this block will finish.
//
// Compile-time: NT (columns of 8 rows of x), WARPS (main warps), STAGES (depth of a ring, even), CLUSTER.

constexpr int LORA_WARPS = 4;
constexpr int LORA_THREADS = 32 * LORA_WARPS;
constexpr int THREADS = 32 * WARPS + LORA_THREADS;
constexpr int COLUMNS = 8 * NT;
constexpr int MAX_PARTS = 4;
// Independent accumulators of one output, so that one product need not wait for the last.
constexpr int CHAINS = NT <= 2 ? 2 : 1;
constexpr int RING_BYTES = STAGES * TILE_BYTES;

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
  int m, n, k, units, row_tiles;
  int round_tiles, slice_units, rank_slots, groups;
  int segments, parts, float_out, vectors;
  u32 scale_base;  // 0x70007000
  int segment_stop[4];
  Part part[MAX_PARTS];
};

struct Shared {
  u16* x;          // [COLUMNS][stride]
  float4* slots;   // [CLUSTER][rank_slots][NT][32]: partial sums of the tiles that this block finishes
  float4* extra;   // [tiles of this block's share of a round][NT][32]: bias + adapters
  float* factor;   // [tiles of this block's share of a round][16]: lift / G
  float4* local;   // [LORA_WARPS][2][NT][32]
  float4* sums;    // [CLUSTER][groups][NT][32]: partial sums of h
  u16* h;          // [COLUMNS][h_stride]
  int stride, h_stride;
};

// What a block does: a slice of the inputs of a run of row tiles.
struct Work {
  int tile_start, tile_stop, first_unit, slice_units, rank;
};

// Where part `index` of `of` equal parts of `total` begins.
__device__ __forceinline__ int share(int index, int of, int total) {
  return static_cast<int>(static_cast<u32>(index) * static_cast<u32>(total) / static_cast<u32>(of));
}

// Which of `of` equal parts of `total` holds element `element`.
__device__ __forceinline__ int holder(int element, int of, int total) {
  return static_cast<int>((static_cast<u32>(element + 1) * static_cast<u32>(of) - 1) / static_cast<u32>(total));
}

__device__ __forceinline__ int block_rank() {
#if CLUSTER > 1
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
#else
  return 0;
#endif
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

// Writes to the same place in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ void push(float4* place, int rank, float4 v) {
#if CLUSTER > 1
  u32 address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem_address(place)), "r"(rank));
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
#else
  *place = v;
#endif
}

__device__ __forceinline__ void dependencies_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void dependents_may_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void prefetch(const void* pointer) { asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer)); }

__device__ __forceinline__ void lora_sync() { asm volatile("bar.sync 1, %0;" ::"n"(LORA_THREADS) : "memory"); }

__device__ __forceinline__ void add(float4& sum, float4 v) {
  sum.x += v.x;
  sum.y += v.y;
  sum.z += v.z;
  sum.w += v.w;
}

__device__ __forceinline__ bool part_needed(const Part& part, int tile_start, int tile_stop) {
  return part.row_start < 16 * tile_stop && part.row_stop > 16 * tile_start;
}

// ---- Adapter warps; `thread` counts them from 0.

// Brings what the adapters will read into the L2 cache, where it stays coherent whatever ran before.
__device__ void prefetch_adapters(const DecodeParams& p, const Work& w, int thread) {
  for (int q = 0; q < p.parts; ++q) {
    const Part& part = p.part[q];
    if (!part_needed(part, w.tile_start, w.tile_stop)) continue;
    for (int i = thread; i < part.rank * w.slice_units; i += LORA_THREADS) {
      const int row = i / w.slice_units, column = (w.first_unit + i - row * w.slice_units) * 64;
      if (column < p.k) prefetch(p.a + static_cast<long long>(part.rank_start + row) * p.k + column);
    }
    const int first = max(16 * w.tile_start, part.row_start), last = min(16 * w.tile_stop, part.row_stop);
    const long long from = static_cast<long long>(first - part.row_start) * part.rank;
    const long long elements = static_cast<long long>(last - first) * part.rank;
    for (long long i = 64ll * (w.rank * LORA_THREADS + thread); i < elements; i += 64ll * CLUSTER * LORA_THREADS)
      prefetch(part.b + from + i);
  }
}

__device__ void load_x(const DecodeParams& p, const Shared& s, const Work& w, int thread) {
  const bool vectors = p.vectors;
  const int chunks = w.slice_units * 8;
  const int rows = p.m < COLUMNS ? p.m : COLUMNS;
  for (int i = thread; i < rows * chunks; i += LORA_THREADS) {
    const int row = i / chunks, chunk = i - row * chunks;
    const int column = w.first_unit * 64 + chunk * 8;
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

// Eight values of a row of A, zeros beyond its end and for rows that are not there.
template <bool VECTORS>
__device__ __forceinline__ uint4 load_adapter(const DecodeParams& p, const u16* row, int column, bool inside) {
  if (VECTORS) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (inside && column < p.k) v = __ldg(reinterpret_cast<const uint4*>(row + column));
    return v;
  }
  return inside ? load_row_8(row, column, p.k, false) : make_uint4(0, 0, 0, 0);
}

// h = A x of the needed parts: two groups of 16 adapter rows at a time, this block's slice of the inputs, pushed to the cluster.
template <bool VECTORS>
__device__ void shrink(const DecodeParams& p, const Shared& s, const Work& w, int thread) {
  constexpr int STEPS = 2;  // loads of so many steps are under way together
  const int lane = thread & 31, warp = thread >> 5, g = lane >> 2, t = lane & 3;
  // Halves of a unit, 32 inputs each.
  const int from = share(warp, LORA_WARPS, 2 * w.slice_units), to = share(warp + 1, LORA_WARPS, 2 * w.slice_units);
  int group = 0;
  for (int q = 0; q < p.parts; ++q) {
    const Part& part = p.part[q];
    if (!part_needed(part, w.tile_start, w.tile_stop)) continue;
    for (int first = 0; first < part.rank; first += 32) {
      const u16* row = p.a + static_cast<long long>(part.rank_start + first + g) * p.k;
      const long long eight = 8ll * p.k;
      float c[2][NT][4] = {};
#pragma unroll 1
      for (int step = from; step < to; step += STEPS) {
        uint4 a[STEPS][4];
#pragma unroll
        for (int j = 0; j < STEPS; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            a[j][i] = load_adapter<VECTORS>(p, row + i * eight, w.first_unit * 64 + (step + j) * 32 + 8 * t,
                                            step + j < to && first + g + 8 * i < part.rank);
#pragma unroll
        for (int j = 0; j < STEPS; ++j) {
          if (step + j >= to) break;
#pragma unroll
          for (int n = 0; n < NT; ++n) {
            const uint4 b = *reinterpret_cast<const uint4*>(s.x + (8 * n + g) * s.stride + (step + j) * 32 + 8 * t);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const u32 near[4] = {a[j][2 * i].x, a[j][2 * i + 1].x, a[j][2 * i].y, a[j][2 * i + 1].y};
              const u32 far[4] = {a[j][2 * i].z, a[j][2 * i + 1].z, a[j][2 * i].w, a[j][2 * i + 1].w};
              mma_m16n8k16(c[i][n], near, b.x, b.y);
              mma_m16n8k16(c[i][n], far, b.z, b.w);
            }
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int n = 0; n < NT; ++n)
          s.local[((warp * 2 + i) * NT + n) * 32 + lane] = make_float4(c[i][n][0], c[i][n][1], c[i][n][2], c[i][n][3]);
      lora_sync();
      const int count = first + 16 < part.rank ? 2 : 1;
      for (int i = thread; i < count * NT * 32; i += LORA_THREADS) {
        float4 sum = s.local[i];
#pragma unroll
        for (int other = 1; other < LORA_WARPS; ++other) add(sum, s.local[other * 2 * NT * 32 + i]);
#pragma unroll
        for (int rank = 0; rank < CLUSTER; ++rank) push(s.sums + (w.rank * p.groups + group) * NT * 32 + i, rank, sum);
      }
      lora_sync();
      group += count;
    }
  }
}

// Waits for the partial sums of h from all blocks, adds them in order and rounds: bfloat16 in shared memory.
__device__ void gather_h(const DecodeParams& p, const Shared& s, const Work& w, u64* arrived, int thread) {
#if CLUSTER > 1
  if (thread < CLUSTER) {
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem_address(arrived)), "r"(thread));
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(address) : "memory");
  }
  u32 done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(smem_address(arrived))
        : "memory");
  } while (!done);
#endif
  const int fragments = p.groups * NT * 32;
  for (int i = thread; i < fragments; i += LORA_THREADS) {
    const int group = i / (NT * 32), n = (i / 32) % NT, lane = i & 31, g = lane >> 2, t = lane & 3;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int rank = 0; rank < CLUSTER; ++rank) add(sum, s.sums[rank * fragments + i]);
    u16* target = s.h + (8 * n + 2 * t) * s.h_stride + 16 * group + g;
    target[0] = to_bf16(sum.x);
    target[s.h_stride] = to_bf16(sum.y);
    target[8] = to_bf16(sum.z);
    target[s.h_stride + 8] = to_bf16(sum.w);
  }
  lora_sync();
}

// bias + scale * B h, and lift / G, of the row tiles [first, last), one row tile a warp at a time.
__device__ void expand(const DecodeParams& p, const Shared& s, const Work& w, int first, int last, int thread) {
  const int lane = thread & 31, warp = thread >> 5, g = lane >> 2, t = lane & 3;
  for (int tile = first + warp; tile < last; tile += LORA_WARPS) {
    const int row = 16 * tile + g;
    if (lane < 16) {
      int segment = 0;
      while (segment + 1 < p.segments && 16 * tile + lane >= p.segment_stop[segment]) ++segment;
      s.factor[(tile - first) * 16 + lane] = __fdiv_rn(TILE_LIFT, p.global_scale[segment]);
    }
    float low = 0, high = 0;
    if (p.bias != nullptr) {
      low = row < p.n ? from_bf16(p.bias[row]) : 0;
      high = row + 8 < p.n ? from_bf16(p.bias[row + 8]) : 0;
    }
    float4 out[NT];
#pragma unroll
    for (int n = 0; n < NT; ++n) out[n] = make_float4(low, low, high, high);
    int group = 0;
    for (int q = 0; q < p.parts; ++q) {
      const Part& part = p.part[q];
      if (!part_needed(part, w.tile_start, w.tile_stop)) continue;
      const int h_start = 16 * group;
      group += (part.rank + 15) / 16;
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
          const u16* h = s.h + (8 * n + g) * s.h_stride + h_start + k;
          mma_m16n8k16(c[n], a, *reinterpret_cast<const u32*>(h), *reinterpret_cast<const u32*>(h + 8));
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

// Where the copies of one warp are: a run of units over all rounds.
struct Producer {
  const u8* source;  // of this lane
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

__device__ __forceinline__ void start_round(const DecodeParams& p, Producer& at, const Work& w, int warp, int lane) {
  int from, to;
  warp_range(min(p.round_tiles, w.tile_stop - at.round_tile), w, warp, from, to);
  const int tile = from / w.slice_units, column = from - tile * w.slice_units;
  at.row_left = w.slice_units - column;
  at.left = to - from;
  at.source = p.tiles + (static_cast<long long>(at.round_tile + tile) * p.units + w.first_unit + column) * TILE_BYTES + 16 * lane;
}

// Starts the copies of the next pair of units, or of the last one of a round, as one group; an empty group at the end.
// `target` is this lane's place.
__device__ __forceinline__ void produce(const DecodeParams& p, Producer& at, const Work& w, u32 target, u32 row_jump, int warp, int lane) {
  if (at.left == 0) {
    while (at.left == 0 && at.round_tile + p.round_tiles < w.tile_stop) {
      at.round_tile += p.round_tiles;
      start_round(p, at, w, warp, lane);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (at.left > 0) {
      copy_async_16(target + i * TILE_BYTES, at.source);
      if (lane < 4) copy_async_16(target + i * TILE_BYTES + TILE_CODES, at.source + TILE_CODES);
      --at.left;
      u32 step = TILE_BYTES;
      if (--at.row_left == 0) {
        at.row_left = w.slice_units;
        step = row_jump;
      }
      at.source += step;
    }
  }
  copy_async_commit();
}

// One unit: 16 rows x 64 inputs from the ring, times x.
__device__ __forceinline__ void multiply_unit(uint4 codes, uint2 scales, u32 x_at, u32 x_column, u32 scale_base, float (&c)[CHAINS][NT][4]) {
  const uint2 low = expand_scales(scales.x, scale_base), high = expand_scales(scales.y, scale_base);
  u32 b[NT][4], a[4];
#pragma unroll
  for (int n = 0; n < NT; ++n) ldmatrix_x4(b[n], x_at + n * x_column);
  dequantize_step(codes.x, step_scale<0>(low), step_scale<0>(high), a);
#pragma unroll
  for (int n = 0; n < NT; ++n) mma_m16n8k16(c[0][n], a, b[n][0], b[n][1]);
  dequantize_step(codes.y, step_scale<1>(low), step_scale<1>(high), a);
#pragma unroll
  for (int n = 0; n < NT; ++n) mma_m16n8k16(c[CHAINS - 1][n], a, b[n][2], b[n][3]);
#pragma unroll
  for (int n = 0; n < NT; ++n) ldmatrix_x4(b[n], x_at + n * x_column + 64);
  dequantize_step(codes.z, step_scale<2>(low), step_scale<2>(high), a);
#pragma unroll
  for (int n = 0; n < NT; ++n) mma_m16n8k16(c[0][n], a, b[n][0], b[n][1]);
  dequantize_step(codes.w, step_scale<3>(low), step_scale<3>(high), a);
#pragma unroll
  for (int n = 0; n < NT; ++n) mma_m16n8k16(c[CHAINS - 1][n], a, b[n][2], b[n][3]);
}

// Where the partial sums of one warp go: to the block that finishes the tile, the next slot for the next tile of the same block.
struct Delivery {
  float4* slot;
  int owner, owner_stop;
};

__device__ __forceinline__ void address(const DecodeParams& p, const Shared& s, const Work& w, Delivery& to, int tiles, int tile, int warp, int lane) {
  const int total = tiles * w.slice_units, active = min(WARPS, total);
  to.owner = holder(tile, CLUSTER, tiles);
  to.owner_stop = share(to.owner + 1, CLUSTER, tiles);
  const int first = share(to.owner, CLUSTER, tiles);
  const int slot = w.rank * p.rank_slots + tile - first + warp - holder(first * w.slice_units, active, total);
  to.slot = s.slots + slot * NT * 32 + lane;
}

// Adds the partial sums of (row tile, column of 8) over blocks and warps, in the order of the inputs.
__device__ __forceinline__ float4 reduce(const DecodeParams& p, const Shared& s, int tiles, int first, int tile, int n, int lane) {
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int rank = 0; rank < CLUSTER; ++rank) {
    const int slice = share(rank + 1, CLUSTER, p.units) - share(rank, CLUSTER, p.units);
    const int total = tiles * slice, active = min(WARPS, total), base = holder(first * slice, active, total);
    const int from = holder(tile * slice, active, total) - base, to = holder((tile + 1) * slice - 1, active, total) - base;
    const float4* slot = s.slots + ((rank * p.rank_slots + tile - first + from) * NT + n) * 32 + lane;
#pragma unroll 2
    for (int i = from; i <= to; ++i, slot += NT * 32) add(sum, *slot);
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

// Finishes this block's share of a round: row tiles [first, last) of `tiles`, which begin at row tile `round`.
__device__ __forceinline__ void finish(const DecodeParams& p, const Shared& s, int round, int tiles, int first, int last, int warp, int lane) {
  const int g = lane >> 2, t = lane & 3;
  for (int item = warp; item < (last - first) * NT; item += THREADS / 32) {
    const int n = item % NT, local = item / NT;
    const float4 sum = reduce(p, s, tiles, first, first + local, n, lane);
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

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ u64 arrived;
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const int cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
  Work w;
  w.rank = block_rank();
  w.tile_start = share(cluster, clusters, p.row_tiles);
  w.tile_stop = share(cluster + 1, clusters, p.row_tiles);
  w.first_unit = share(w.rank, CLUSTER, p.units);
  w.slice_units = share(w.rank + 1, CLUSTER, p.units) - w.first_unit;

  Shared s;
  s.stride = p.slice_units * 64 + 8;
  s.h_stride = p.groups * 16 + 8;
  const int share_tiles = (p.round_tiles + CLUSTER - 1) / CLUSTER;
  u8* next = memory + WARPS * RING_BYTES;
  s.slots = reinterpret_cast<float4*>(next), next += CLUSTER * p.rank_slots * NT * 512;
  s.extra = reinterpret_cast<float4*>(next), next += share_tiles * NT * 512;
  s.factor = reinterpret_cast<float*>(next), next += share_tiles * 64;
  s.local = reinterpret_cast<float4*>(next), next += LORA_WARPS * 2 * NT * 512;
  s.sums = reinterpret_cast<float4*>(next), next += CLUSTER * p.groups * NT * 512;
  s.x = reinterpret_cast<u16*>(next), next += COLUMNS * s.stride * 2;
  s.h = reinterpret_cast<u16*>(next);

  dependents_may_start();
  Producer at = {nullptr, 0, 0, w.tile_start};
  const u32 ring = smem_address(memory) + warp * RING_BYTES;
  const u32 row_jump = (p.units - w.slice_units + 1) * TILE_BYTES;
#if CLUSTER > 1
  if (thread == 32 * WARPS) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(&arrived)), "r"(CLUSTER) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
#endif
  cluster_arrive();
  if (warp < WARPS) {
    // Weights never change, so their copies need not wait for the kernel in front of this one.
    start_round(p, at, w, warp, lane);
#pragma unroll 1
    for (int i = 0; i < STAGES - 2; i += 2) produce(p, at, w, ring + i * TILE_BYTES + 16 * lane, row_jump, warp, lane);
  } else {
    const int own = thread - 32 * WARPS;
    prefetch_adapters(p, w, own);
    dependencies_wait();
    load_x(p, s, w, own);
  }
  __syncthreads();
  cluster_wait();
  if (warp >= WARPS && p.parts > 0) {
    if (p.vectors) {
      shrink<true>(p, s, w, thread - 32 * WARPS);
    } else {
      shrink<false>(p, s, w, thread - 32 * WARPS);
    }
    gather_h(p, s, w, &arrived, thread - 32 * WARPS);
  }

  const u32 scale_base = p.scale_base;
  const u32 x_column = 16 * s.stride;
  const u32 x_row = smem_address(s.x) + ((lane & 7) * s.stride + (lane >> 3) * 8) * 2;
  const u32 codes_at = ring + 16 * lane, scales_at = ring + TILE_CODES + 8 * (lane >> 2);
  u32 stage = 0, free_stage = (STAGES - 2) * TILE_BYTES;  // offsets in the ring, of pairs of units
  for (int round = w.tile_start; round < w.tile_stop; round += p.round_tiles) {
    const int tiles = min(p.round_tiles, w.tile_stop - round);
    const int first = share(w.rank, CLUSTER, tiles), last = share(w.rank + 1, CLUSTER, tiles);
    if (warp < WARPS) {
      int from, stop;
      warp_range(tiles, w, warp, from, stop);
      int tile = from / w.slice_units, left = stop - from;
      int row_left = (tile + 1) * w.slice_units - from;
      u32 x_at = x_row + (w.slice_units - row_left) * 128;
      Delivery to;
      if (left > 0) address(p, s, w, to, tiles, tile, warp, lane);
      float c[CHAINS][NT][4] = {};
#pragma unroll 1
      while (left > 0) {
        copy_async_wait<STAGES / 2 - 2>();
        __syncwarp();
        uint4 codes[2];
        uint2 scales[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          codes[i] = load_shared_16(codes_at + stage + i * TILE_BYTES);
          scales[i] = load_shared_8(scales_at + stage + i * TILE_BYTES);
        }
        produce(p, at, w, codes_at + free_stage, row_jump, warp, lane);
        free_stage = stage;
        stage = stage == (STAGES - 2) * TILE_BYTES ? 0 : stage + 2 * TILE_BYTES;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (i == 1 && left == 0) break;
          multiply_unit(codes[i], scales[i], x_at, x_column, scale_base, c);
          x_at += 128;
          --left;
          if (--row_left == 0 || left == 0) {
            if (tile == to.owner_stop) address(p, s, w, to, tiles, tile, warp, lane);
#pragma unroll
            for (int n = 0; n < NT; ++n) {
              float4 sum = make_float4(c[0][n][0], c[0][n][1], c[0][n][2], c[0][n][3]);
              if (CHAINS == 2) add(sum, make_float4(c[CHAINS - 1][n][0], c[CHAINS - 1][n][1], c[CHAINS - 1][n][2], c[CHAINS - 1][n][3]));
              push(to.slot + n * 32, to.owner, sum);
#pragma unroll
              for (int j = 0; j < 4; ++j) c[0][n][j] = c[CHAINS - 1][n][j] = 0;
            }
            to.slot += NT * 32;
            ++tile;
            row_left = w.slice_units;
            x_at = x_row;
          }
        }
      }
    } else {
      expand(p, s, w, round + first, round + last, thread - 32 * WARPS);
    }
    cluster_sync();
    finish(p, s, round, tiles, first, last, warp, lane);
    // The next round writes to the same places.
    if (round + p.round_tiles < w.tile_stop) cluster_sync();
  }
}
