// y = (x V^T) / G + bias + scale * B (A x) for few rows of x; V = q * s is read from the packed layout once.
//
// A cluster of CLUSTER blocks takes a contiguous run of row tiles; block `rank` of it takes a slice of the inputs, whose x stays
// in shared memory for the whole launch. The tiles of a round are one flat list of units; every main warp streams an
// equal share of it through a private ring of bulk copies, without any barrier between warps. A warp that ends its part of a row
// tile sends the partial sum into the shared memory of the block that finishes this tile, which waits for the bytes it knows
// will come and adds them in the order of the inputs.
//
// Meanwhile four more warps do the adapters: h = A x of the parts that the cluster's rows need, each block from its slice of x, the
// partial sums sent to every block of the cluster; then bias + scale * B h for the row tiles that this block will finish.
//
// Differs from decode.cu in what moves the bytes: the copy engine (sm_90), counted at barriers in shared memory.
//
// Compile-time: NT (columns of 8 rows of x), WARPS (main warps), CHUNK (units of a copy), STAGES (copies in a ring), CLUSTER.

constexpr int STAGE_BYTES = CHUNK * TILE_BYTES;
constexpr int RING_BYTES = STAGES * STAGE_BYTES;
constexpr int BARRIER_BYTES = (WARPS * STAGES + 3 + 15) / 16 * 128;

// With barriers that count bytes.
struct Counted : Shared {
  u64* x_ready;    // LORA_THREADS arrivals and the bytes of x
  u64* h_arrived;  // the bytes of `sums`
  u64* arrived;    // the bytes of `slots`, a phase a round
};

// Writes to the same place in the shared memory of block `rank` of the cluster, and counts the bytes at its barrier.
__device__ __forceinline__ void send(float4* place, u64* barrier, int rank, float4 v) {
  u32 address, count;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem_address(place)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(count) : "r"(smem_address(barrier)), "r"(rank));
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(address),
               "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(count)
               : "memory");
}

// Loads this block's slice of x. On sm_90 `x_ready` tells when it is there.
__device__ void load_x(const DecodeParams& p, const Counted& s, const Work& w, int thread) {
  const int rows = p.m < COLUMNS ? p.m : COLUMNS, first = w.first_unit * 64, columns = w.slice_units * 64;
  const int chunks = w.slice_units * 8;
  int fast = 0;  // columns that are copied in bulk
  if (p.vectors) {
    fast = min(columns, p.k - first);
    if (thread < 32) {
      if (thread == 0) {
        asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(smem_address(s.x_ready)), "r"(rows * fast * 2) : "memory");
      }
      __syncwarp();
      for (int row = thread; row < rows; row += 32)
        copy_bulk(smem_address(s.x + row * s.stride), p.x + static_cast<long long>(row) * p.k + first, fast * 2, smem_address(s.x_ready));
    }
  }
  const int rest = chunks - fast / 8;
  for (int i = thread; i < rows * rest; i += LORA_THREADS) {
    const int row = i / rest, chunk = fast / 8 + i - row * rest;
    *reinterpret_cast<uint4*>(s.x + row * s.stride + chunk * 8) =
        load_row_8(p.x + static_cast<long long>(row) * p.k, first + chunk * 8, p.k, false);
  }
  barrier_arrive(s.x_ready);
}

// h = A x of the needed parts: two groups of 16 adapter rows at a time, this block's slice of the inputs, sent to the cluster.
template <bool VECTORS>
__device__ void shrink(const DecodeParams& p, const Counted& s, const Work& w, int thread) {
  constexpr int STEPS = NT == 1 ? 4 : 2;  // loads of so many steps are under way together
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
        for (int rank = 0; rank < CLUSTER; ++rank) send(s.sums + (w.rank * p.groups + group) * NT * 32 + i, s.h_arrived, rank, sum);
      }
      lora_sync();
      group += count;
    }
  }
}

// Groups of 16 adapter rows that the cluster's row tiles need.
__device__ __forceinline__ int needed_groups(const DecodeParams& p, const Work& w) {
  int groups = 0;
  for (int q = 0; q < p.parts; ++q)
    if (part_needed(p.part[q], w.tile_start, w.tile_stop)) groups += (p.part[q].rank + 15) / 16;
  return groups;
}

// Waits for the partial sums of h from all blocks, adds them in order and rounds: bfloat16 in shared memory.
__device__ void gather_h(const DecodeParams& p, const Counted& s, const Work& w, int thread) {
  const int fragments = needed_groups(p, w) * NT * 32;
  barrier_wait(smem_address(s.h_arrived), 0);
  for (int i = thread; i < fragments; i += LORA_THREADS) {
    const int group = i / (NT * 32), n = (i / 32) % NT, lane = i & 31, g = lane >> 2, t = lane & 3;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int rank = 0; rank < CLUSTER; ++rank) add(sum, s.sums[rank * p.groups * NT * 32 + i]);
    u16* target = s.h + (8 * n + 2 * t) * s.h_stride + 16 * group + g;
    target[0] = to_bf16(sum.x);
    target[s.h_stride] = to_bf16(sum.y);
    target[8] = to_bf16(sum.z);
    target[s.h_stride + 8] = to_bf16(sum.w);
  }
  lora_sync();
}

__device__ __forceinline__ void start_round(const DecodeParams& p, Producer& at, const Work& w, int warp) {
  int from, to;
  warp_range(min(p.round_tiles, w.tile_stop - at.round_tile), w, warp, from, to);
  const int tile = from / w.slice_units, column = from - tile * w.slice_units;
  at.row_left = w.slice_units - column;
  at.left = to - from;
  at.source = p.tiles + (static_cast<long long>(at.round_tile + tile) * p.units + w.first_unit + column) * TILE_BYTES;
}

// Starts the copy of the next units, CHUNK at most and of one row tile, into a stage of the ring.
__device__ __forceinline__ void produce(const DecodeParams& p, Producer& at, const Work& w, u32 target, u32 barrier, u32 row_jump, int warp, int lane) {
  if (at.left == 0) {
    while (at.left == 0 && at.round_tile + p.round_tiles < w.tile_stop) {
      at.round_tile += p.round_tiles;
      start_round(p, at, w, warp);
    }
  }
  if (at.left > 0) {
    const int count = min(CHUNK, min(at.left, at.row_left)), bytes = count * TILE_BYTES;
    if (lane == 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
      copy_bulk(target, at.source, bytes, barrier);
    }
    at.left -= count;
    at.row_left -= count;
    at.source += bytes;
    if (at.row_left == 0) {
      at.row_left = w.slice_units;
      at.source += row_jump;
    }
  }
}

// Bytes of all partial sums that a round's share [first, last) of row tiles gets.
__device__ __forceinline__ int share_bytes(const DecodeParams& p, int tiles, int first, int last) {
  int slots = 0;
  if (last > first) {
#pragma unroll 1
    for (int rank = 0; rank < CLUSTER; ++rank) {
      const int slice = share(rank + 1, CLUSTER, p.units) - share(rank, CLUSTER, p.units);
      const int total = tiles * slice, active = min(WARPS, total);
      slots += last - first + holder(last * slice - 1, active, total) - holder(first * slice, active, total);
    }
  }
  return slots * NT * 512;
}

// Ends a round in which all partial sums of this block's share have been sent or are on their way: every thread calls it.
__device__ __forceinline__ void end_round(const DecodeParams& p, const Counted& s, const Work& w, int round, int tiles, int thread) {
  const int first = share(w.rank, CLUSTER, tiles), last = share(w.rank + 1, CLUSTER, tiles);
  __syncthreads();
  barrier_wait(smem_address(s.arrived), (round - w.tile_start) / p.round_tiles & 1);
  finish(p, s, round, tiles, first, last, thread >> 5, thread & 31);
  const int following = round + p.round_tiles;
  if (following < w.tile_stop) {
    if (thread == 0) {
      const int more = min(p.round_tiles, w.tile_stop - following);
      barrier_expect(s.arrived, share_bytes(p, more, share(w.rank, CLUSTER, more), share(w.rank + 1, CLUSTER, more)));
    }
    // The next round writes to the same places.
    cluster_sync();
  }
}

__device__ __forceinline__ void adapter_warps(const DecodeParams& p, const Counted& s, const Work& w) {
  const int thread = threadIdx.x - 32 * WARPS;
  prefetch_adapters(p, w, thread);
  __syncthreads();
  cluster_arrive();
  dependencies_wait();
  load_x(p, s, w, thread);
  barrier_wait(smem_address(s.x_ready), 0);
  cluster_wait();
  if (p.parts > 0) {
    if (p.vectors) {
      shrink<true>(p, s, w, thread);
    } else {
      shrink<false>(p, s, w, thread);
    }
    gather_h(p, s, w, thread);
  }
  for (int round = w.tile_start; round < w.tile_stop; round += p.round_tiles) {
    const int tiles = min(p.round_tiles, w.tile_stop - round);
    expand(p, s, w, round + share(w.rank, CLUSTER, tiles), round + share(w.rank + 1, CLUSTER, tiles), thread);
    end_round(p, s, w, round, tiles, threadIdx.x);
  }
}

__device__ __forceinline__ void main_warps(const DecodeParams& p, const Counted& s, const Work& w, u32 ring, u32 barriers) {
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const u32 row_jump = (p.units - w.slice_units) * TILE_BYTES;
  Producer at = {nullptr, 0, 0, w.tile_start};
  // Weights never change, so their copies need not wait for the kernel in front of this one.
  start_round(p, at, w, warp);
#pragma unroll 1
  for (int i = 0; i < STAGES; ++i) produce(p, at, w, ring + i * STAGE_BYTES, barriers + 8 * i, row_jump, warp, lane);
  __syncthreads();
  cluster_arrive();
  barrier_wait(smem_address(s.x_ready), 0);
  cluster_wait();
  const u32 x_column = 16 * s.stride;
  const u32 x_row = smem_address(s.x) + ((lane & 7) * s.stride + (lane >> 3) * 8) * 2;
  const u32 codes_at = ring + 16 * lane, scales_at = ring + TILE_CODES + 8 * (lane >> 2);
  u32 stage = 0, parity = 0;
  for (int round = w.tile_start; round < w.tile_stop; round += p.round_tiles) {
    const int tiles = min(p.round_tiles, w.tile_stop - round);
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
      const int count = min(CHUNK, min(left, row_left));
      uint4 codes[CHUNK];
      uint2 scales[CHUNK];
      barrier_wait(barriers + 8 * stage, parity);
#pragma unroll
      for (int i = 0; i < CHUNK; ++i) {
        codes[i] = load_shared_16(codes_at + stage * STAGE_BYTES + i * TILE_BYTES);
        scales[i] = load_shared_8(scales_at + stage * STAGE_BYTES + i * TILE_BYTES);
      }
      __syncwarp();
      produce(p, at, w, ring + stage * STAGE_BYTES, barriers + 8 * stage, row_jump, warp, lane);
      if (++stage == STAGES) {
        stage = 0;
        parity ^= 1;
      }
#pragma unroll
      for (int i = 0; i < CHUNK; ++i) {
        if (i >= count) break;
        multiply_unit(codes[i], scales[i], x_at, x_column, p.scale_base, c);
        x_at += 128;
      }
      left -= count;
      row_left -= count;
      if (row_left == 0 || left == 0) {
        if (tile == to.owner_stop) address(p, s, w, to, tiles, tile, warp, lane);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          float4 sum = make_float4(c[0][n][0], c[0][n][1], c[0][n][2], c[0][n][3]);
          if (CHAINS == 2) add(sum, make_float4(c[CHAINS - 1][n][0], c[CHAINS - 1][n][1], c[CHAINS - 1][n][2], c[CHAINS - 1][n][3]));
          send(to.slot + n * 32, s.arrived, to.owner, sum);
#pragma unroll
          for (int j = 0; j < 4; ++j) c[0][n][j] = c[CHAINS - 1][n][j] = 0;
        }
        to.slot += NT * 32;
        ++tile;
        row_left = w.slice_units;
        x_at = x_row;
      }
    }
    end_round(p, s, w, round, tiles, thread);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_bulk(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(128) u8 memory[];
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const int cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
  Work w;
  w.rank = block_rank();
  w.tile_start = share(cluster, clusters, p.row_tiles);
  w.tile_stop = share(cluster + 1, clusters, p.row_tiles);
  w.first_unit = share(w.rank, CLUSTER, p.units);
  w.slice_units = share(w.rank + 1, CLUSTER, p.units) - w.first_unit;

  Counted s;
  s.stride = p.slice_units * 64 + 8;
  s.h_stride = p.groups * 16 + 8;
  const int share_tiles = (p.round_tiles + CLUSTER - 1) / CLUSTER;
  u8* next = memory + WARPS * RING_BYTES;
  u64* full = reinterpret_cast<u64*>(next);  // [WARPS][STAGES]
  s.x_ready = full + WARPS * STAGES, s.h_arrived = s.x_ready + 1, s.arrived = s.x_ready + 2;
  next += BARRIER_BYTES;
  s.slots = reinterpret_cast<float4*>(next), next += CLUSTER * p.rank_slots * NT * 512;
  s.extra = reinterpret_cast<float4*>(next), next += share_tiles * NT * 512;
  s.factor = reinterpret_cast<float*>(next), next += share_tiles * 64;
  s.local = reinterpret_cast<float4*>(next), next += LORA_WARPS * 2 * NT * 512;
  s.sums = reinterpret_cast<float4*>(next), next += CLUSTER * p.groups * NT * 512;
  s.x = reinterpret_cast<u16*>(next), next += COLUMNS * s.stride * 2;
  s.h = reinterpret_cast<u16*>(next);

  dependents_may_start();
  const u32 ring = smem_address(memory) + warp * RING_BYTES;
  const u32 barriers = smem_address(full + warp * STAGES);
  if (thread == 32 * WARPS) {
    const int tiles = min(p.round_tiles, w.tile_stop - w.tile_start);
    barrier_init(s.x_ready, LORA_THREADS);
    barrier_init(s.h_arrived, 1);
    barrier_init(s.arrived, 1);
    barrier_inits_visible();
    barrier_expect(s.h_arrived, CLUSTER * needed_groups(p, w) * NT * 512);
    barrier_expect(s.arrived, share_bytes(p, tiles, share(w.rank, CLUSTER, tiles), share(w.rank + 1, CLUSTER, tiles)));
  }
  if (warp < WARPS && lane < STAGES) {
    barrier_init(full + warp * STAGES + lane, 1);
    barrier_inits_visible();
  }
  __syncwarp();
  if (warp < WARPS) {
    main_warps(p, s, w, ring, barriers);
  } else {
    adapter_warps(p, s, w);
  }
}
