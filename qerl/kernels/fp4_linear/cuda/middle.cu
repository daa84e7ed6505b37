// y = (x V^T) / G + bias + scale * B h for tens to hundreds of rows of x, on sm_90a: V = q * s is expanded in registers once for TOKENS
// rows and enters wgmma as its A operand; x, the B operand, passes through shared memory.
//
// An output tile is 16 * ROW_TILES rows x TOKENS tokens. The steps of all tiles, 64 inputs each, are one list, cut into equal runs: a
// block for each multiprocessor takes one. One warp asks the copy engine for the weights and x of the coming steps; the others expand
// and multiply, the products of one row tile under way while the next is expanded.
//
// A tile that several blocks have parts of is summed through global memory, in the order of the inputs. The blocks whose run ends
// in this tile finish it: if it is one, it keeps its sums in registers; several share the tokens out among them.
//
// The blocks of a cluster have neighbouring rows; each copies a part of x for all of them.
//
// Compile-time: TOKENS (a multiple of 16), TILES (row tiles of a warp: 1 or 2), GROUPS (warpgroups that multiply), STAGES (steps in the ring),
// CLUSTER (1, 2 or 4).

constexpr int WARPS = 4 * GROUPS;
constexpr int CONSUMERS = 32 * WARPS;
// Many sums: registers that the copying warps do not need go to the others.
constexpr bool WIDE = TILES * TOKENS > 128;
constexpr int THREADS = CONSUMERS + (WIDE ? 128 : 32);
constexpr int COLUMNS = TOKENS / 8;
constexpr int ROW_TILES = WARPS * TILES;
constexpr int X_BYTES = TOKENS * 128;
constexpr int STEP_BYTES = X_BYTES + ROW_TILES * TILE_BYTES;
constexpr int STAGE_BYTES = (STEP_BYTES + 1023) / 1024 * 1024;  // the swizzle of 128 bytes repeats every 1024
constexpr int STAGING_BYTES = 512 * TILES;                      // of a warp

// x as the B operand: [TOKENS][64] bfloat16, rows of 128 bytes, 16-byte chunks of row r at chunk ^ (r & 7).
__device__ __forceinline__ u64 operand(u32 address) {
  return static_cast<u64>((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

template <int PENDING>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

// This warp has read a stage: told to every block of the cluster, since each copies a part of x for all of them.
__device__ __forceinline__ void release(u32 barrier, int lane) {
  if constexpr (CLUSTER == 1) {
    if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
  } else if (lane < CLUSTER) {
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(barrier), "r"(lane));
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address) : "memory");
  }
}

__device__ __forceinline__ void cluster_arrive() {
#if CLUSTER > 1
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if CLUSTER > 1
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

__device__ __forceinline__ void barrier_expect_at(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Where in the list of steps a block is.
struct Place {
  int unit, token_tile, row_block;
};

__device__ __forceinline__ Place place_of(const MiddleParams& p, int step) {
  const int tile = step / p.units;
  return {step - tile * p.units, tile % p.token_tiles, tile / p.token_tiles};
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

__device__ __forceinline__ void load_weights(const MiddleParams& p, const Place& at, u32 stage, u32 barrier) {
  copy_box<false>(stage + X_BYTES, p.tile_map, at.unit * (TILE_BYTES / 8), first_row_tile(at), barrier);
}

__device__ __forceinline__ void load_x(const MiddleParams& p, const Place& at, u32 stage, u32 barrier) {
  const int part = block_rank() * (TOKENS / CLUSTER);
  copy_box<(CLUSTER > 1)>(stage + part * 128, p.x_map, at.unit * 64, at.token_tile * TOKENS + part, barrier);
}

// One thread keeps the ring full.
__device__ __forceinline__ void produce(const MiddleParams& p, int start, int count, u32 ring, u32 full, u32 empty) {
  const int ahead = min(count, STAGES);
  Place at = place_of(p, start);
  const Place first = at;
  // Weights never change, so their copies need not wait for the kernel in front of this one.
#pragma unroll 1
  for (int i = 0; i < ahead; ++i, advance(p, at)) {
    barrier_expect_at(full + 8 * i, STEP_BYTES);
    load_weights(p, at, ring + i * STAGE_BYTES, full + 8 * i);
  }
  // The other blocks' barriers are there.
  cluster_wait();
  dependencies_wait();
  at = first;
#pragma unroll 1
  for (int i = 0; i < ahead; ++i, advance(p, at)) load_x(p, at, ring + i * STAGE_BYTES, full + 8 * i);
  int stage = 0;
  u32 parity = 0;
#pragma unroll 1
  for (int i = ahead; i < count; ++i, advance(p, at)) {
    barrier_wait(empty + 8 * stage, parity);
    barrier_expect_at(full + 8 * stage, STEP_BYTES);
    load_weights(p, at, ring + stage * STAGE_BYTES, full + 8 * stage);
    load_x(p, at, ring + stage * STAGE_BYTES, full + 8 * stage);
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
}

__device__ __forceinline__ void expand_tile(uint4 codes, uint2 scales, u32 scale_base, u32 (&a)[4][4]) {
  const uint2 low = expand_scales(scales.x, scale_base), high = expand_scales(scales.y, scale_base);
  dequantize_step(codes.x, step_scale<0>(low), step_scale<0>(high), a[0]);
  dequantize_step(codes.y, step_scale<1>(low), step_scale<1>(high), a[1]);
  dequantize_step(codes.z, step_scale<2>(low), step_scale<2>(high), a[2]);
  dequantize_step(codes.w, step_scale<3>(low), step_scale<3>(high), a[3]);
}

struct Ring {
  u32 stages, full, empty;
  int stage;
  u32 parity;
};

// One step: `turn` tells which of the two sets of expanded weights is free.
template <int TURN>
__device__ __forceinline__ void multiply_step(float (&d)[TILES][TOKENS / 2], u32 (&a)[2][4][4], Ring& r, int warp, int lane, u32 scale_base, bool first) {
  barrier_wait(r.full + 8 * r.stage, r.parity);
  const u32 x = r.stages + r.stage * STAGE_BYTES;
  const u32 tile = x + X_BYTES + warp * (TILES * TILE_BYTES);
  uint4 codes[TILES];
  uint2 scales[TILES];
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    codes[i] = load_shared_16(tile + i * TILE_BYTES + 16 * lane);
    scales[i] = load_shared_8(tile + i * TILE_BYTES + TILE_CODES + 8 * (lane >> 2));
  }
  const u64 b = operand(x);
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    u32(&now)[4][4] = a[(TURN + i) & 1];
    expand_tile(codes[i], scales[i], scale_base, now);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int j = 0; j < 4; ++j) multiply(d[i], now[j], b + 2 * j);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    products_wait<1>();
    // Past it, the products of the step before have read their x.
    if (i == 0 && !first) release(r.empty + 8 * (r.stage == 0 ? STAGES - 1 : r.stage - 1), lane);
  }
  if (++r.stage == STAGES) {
    r.stage = 0;
    r.parity ^= 1;
  }
}

// Sums of `steps` steps.
__device__ __forceinline__ void multiply_steps(float (&d)[TILES][TOKENS / 2], Ring& r, int steps, int warp, int lane, u32 scale_base) {
  u32 a[2][4][4];
#pragma unroll
  for (int i = 0; i < TILES; ++i)
#pragma unroll
    for (int e = 0; e < TOKENS / 2; ++e) d[i][e] = 0;
  if constexpr (TILES % 2 == 0) {
#pragma unroll 1
    for (int step = 0; step < steps; ++step) multiply_step<0>(d, a, r, warp, lane, scale_base, step == 0);
  } else {
#pragma unroll 1
    for (int step = 0; step + 1 < steps; step += 2) {
      multiply_step<0>(d, a, r, warp, lane, scale_base, step == 0);
      multiply_step<1>(d, a, r, warp, lane, scale_base, false);
    }
    if (steps % 2 == 1) multiply_step<0>(d, a, r, warp, lane, scale_base, steps == 1);
  }
  products_wait<0>();
  release(r.empty + 8 * (r.stage == 0 ? STAGES - 1 : r.stage - 1), lane);
  // Nothing that reads the sums may move in front of the wait.
#pragma unroll
  for (int i = 0; i < TILES; ++i)
#pragma unroll
    for (int e = 0; e < TOKENS / 2; ++e) asm volatile("" : "+f"(d[i][e])::"memory");
}

// ---- Tiles of several blocks.

// Counts up to `last` and then begins at 0 again.
__device__ __forceinline__ void count_up(u32* counter, u32 last) {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  asm volatile("red.inc.relaxed.gpu.global.u32 [%0], %1;" ::"l"(counter), "r"(last) : "memory");
}

__device__ __forceinline__ void wait_for_count(const u32* counter, u32 count) {
  u32 now;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  } while (now < count);
}

__device__ __forceinline__ float4 load_partial(const float4* from) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from) : "memory");
  return v;
}

constexpr int PARTIAL = TILES * COLUMNS * CONSUMERS;

// The clusters that have a tile between them; each block of them has to do with its own rows of it.
struct Team {
  int first;      // the cluster that begins it
  int members;
  int finishers;  // members whose run ends in this tile
};

__device__ __forceinline__ Team team_of(const MiddleParams& p, int tile) {
  const int blocks = gridDim.x / CLUSTER, start = tile * p.units, stop = start + p.units;
  Team team;
  team.first = static_cast<int>(((static_cast<u64>(start) + 1) * blocks - 1) / p.steps);
  const int last = static_cast<int>((static_cast<u64>(stop) * blocks - 1) / p.steps);
  team.members = last - team.first + 1;
  team.finishers = share(last + 1, blocks, p.steps) == stop ? team.members : team.members - 1;
  return team;
}

// The partial sums of member `j`: the one that begins the tile has its second place.
__device__ __forceinline__ float4* partial_of(const MiddleParams& p, const Team& team, int j) {
  return p.partials + static_cast<long long>((2 * (team.first + j) + (j == 0)) * CLUSTER + block_rank()) * PARTIAL;
}

// Sums a tile that has several members. True if `d` now holds the sums of the whole tile, which the caller finishes.
__device__ __forceinline__ bool share_tile(const MiddleParams& p, float (&d)[TILES][TOKENS / 2], int tile, int row_tile, int token, u32 staging,
                                           int thread) {
  const Team team = team_of(p, tile);
  const int me = blockIdx.x / CLUSTER - team.first, lane = thread & 31;
  const bool alone = team.finishers == 1;
  const u32 arrivals = alone ? team.members - 1 : team.members, last = arrivals + team.finishers - 1;
  u32* counter = p.counters + tile * CLUSTER + block_rank();
  if (!(alone && me == 0)) {
    float4* target = partial_of(p, team, me) + thread;
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c)
        target[(i * COLUMNS + c) * CONSUMERS] = make_float4(d[i][4 * c], d[i][4 * c + 1], d[i][4 * c + 2], d[i][4 * c + 3]);
    consumers_sync();
    if (thread == 0) count_up(counter, last);
  }
  if (me >= team.finishers) return false;
  if (thread == 0) wait_for_count(counter, arrivals);
  consumers_sync();
  if (thread == 0) count_up(counter, last);
  if (alone) {
#pragma unroll 1
    for (int j = 1; j < team.members; ++j) {
      const float4* source = partial_of(p, team, j) + thread;
#pragma unroll
      for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          const float4 v = load_partial(source + (i * COLUMNS + c) * CONSUMERS);
          d[i][4 * c] += v.x;
          d[i][4 * c + 1] += v.y;
          d[i][4 * c + 2] += v.z;
          d[i][4 * c + 3] += v.w;
        }
    }
    return true;
  }
#pragma unroll 1
  for (int c = share(me, team.finishers, COLUMNS); c < share(me + 1, team.finishers, COLUMNS); ++c) {
    float v[TILES][4] = {};
#pragma unroll 4
    for (int j = 0; j < team.members; ++j) {
      const float4* source = partial_of(p, team, j) + thread;
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
        const float4 part = load_partial(source + (i * COLUMNS + c) * CONSUMERS);
        v[i][0] += part.x;
        v[i][1] += part.y;
        v[i][2] += part.z;
        v[i][3] += part.w;
      }
    }
    finish<1>(p, v, row_tile, token + 8 * c, staging, lane);
    __syncwarp();
  }
  return false;
}

__device__ __forceinline__ void consume(const MiddleParams& p, int start, int stop, Ring r, u32 staging, int thread) {
  const int lane = thread & 31, warp = thread >> 5;
  float d[TILES][TOKENS / 2];
#pragma unroll 1
  for (int at = start; at < stop;) {
    const Place place = place_of(p, at);
    const int steps = min(p.units - place.unit, stop - at);
    multiply_steps(d, r, steps, warp, lane, p.scale_base);
    const int row_tile = first_row_tile(place) + warp * TILES, token = place.token_tile * TOKENS;
    const bool whole = steps == p.units || share_tile(p, d, (at - place.unit) / p.units, row_tile, token, staging, thread);
    if (whole) finish<COLUMNS>(p, d, row_tile, token, staging, lane);
    at += steps;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) middle(const __grid_constant__ MiddleParams p) {
  extern __shared__ __align__(1024) u8 memory[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  __shared__ __align__(128) u8 staged[WARPS * STAGING_BYTES];
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const u32 ring = (smem_address(memory) + 1023) & ~1023u;
  const u32 full = smem_address(barriers), empty = full + 8 * STAGES;
  const int cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
  const int start = share(cluster, clusters, p.steps), stop = share(cluster + 1, clusters, p.steps);
  dependents_may_start();
  if (thread == CONSUMERS) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(barriers + i, 1);
      barrier_init(barriers + STAGES + i, WARPS * CLUSTER);
    }
    barrier_inits_visible();
  }
  __syncthreads();
  cluster_arrive();
  if (warp >= WARPS) {
    if constexpr (WIDE) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (thread == CONSUMERS) {
      produce(p, start, stop - start, ring, full, empty);
    } else {
      cluster_wait();
    }
  } else {
    if constexpr (WIDE) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    cluster_wait();
    dependencies_wait();
    consume(p, start, stop, {ring, full, empty, 0, 0}, smem_address(staged) + warp * STAGING_BYTES, thread);
  }
  // No block ends while another may still tell it something.
  cluster_arrive();
  cluster_wait();
}
