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

constexpr int RING_BYTES = STAGES * TILE_BYTES;

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
