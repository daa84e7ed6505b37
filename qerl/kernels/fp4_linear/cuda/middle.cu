// y = (x V^T) / divisor + bias + scale * B h for tens to hundreds of rows of x, on sm_90a: V is expanded in registers once for TOKENS
// rows and enters wgmma as its A operand; x, the B operand, passes through shared memory.
//
// An output tile is 16 * ROW_TILES rows x TOKENS tokens. The steps of all tiles, 64 inputs each, are one list, cut into equal runs: a
// block for each multiprocessor takes one. One warp asks the copy engine for the weights and x of the coming steps; the others expand
// and multiply, one k16 step of a row tile while the products of the two before are under way.
//
// A tile that several blocks have parts of is summed through global memory, in the order of the inputs. The blocks whose run ends
// in this tile finish it: if it is one, it keeps its sums in registers; several share the tokens out among them.
//
// The blocks of a cluster have neighbouring rows; each copies a part of x for all of them.
//
// Compile-time: FORMAT, TOKENS (a multiple of 16), TILES (row tiles of a warp: 1 or 2), GROUPS (warpgroups that multiply), STAGES (steps in the ring),
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
constexpr int STAGING_BYTES = 1024 * TILES;                     // of a warp

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

// Waits until x is there. The shrink kernel in front says so when it begins, and is not waited for here.
__device__ __forceinline__ void x_wait(const MiddleParams& p) {
  if (p.x_ready == nullptr) {
    dependencies_wait();
    return;
  }
  wait_for_count(p.x_ready, 1);
  count_up(p.x_ready, gridDim.x);
  asm volatile("fence.proxy.async;" ::: "memory");
}

// One thread keeps the ring full.
__device__ __forceinline__ void produce(const MiddleParams& p, int start, int count, u32 ring, u32 full, u32 empty) {
  const int ahead = min(count, STAGES);
  Place at = place_of(p, start);
  const Place first = at;
  // Weights never change, so their copies need not wait for the kernel in front of this one.
#pragma unroll 1
  for (int i = 0; i < ahead; ++i, advance(p, at)) {
    barrier_expect(full + 8 * i, STEP_BYTES);
    load_weights(p, at, ring + i * STAGE_BYTES, full + 8 * i);
  }
  // The other blocks' barriers are there.
  cluster_wait();
  x_wait(p);
  at = first;
#pragma unroll 1
  for (int i = 0; i < ahead; ++i, advance(p, at)) load_x(p, at, ring + i * STAGE_BYTES, full + 8 * i);
  int stage = 0;
  u32 parity = 0;
#pragma unroll 1
  for (int i = ahead; i < count; ++i, advance(p, at)) {
    barrier_wait(empty + 8 * stage, parity);
    barrier_expect(full + 8 * stage, STEP_BYTES);
    load_weights(p, at, ring + stage * STAGE_BYTES, full + 8 * stage);
    load_x(p, at, ring + stage * STAGE_BYTES, full + 8 * stage);
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
}

struct Ring {
  u32 stages, full, empty;
  int stage;
  u32 parity;
};

// Products of one k16 step of a tile: expands its weights while those of the steps before are under way, at most two of them.
template <int J>
__device__ __forceinline__ void multiply_k16(float (&d)[TOKENS / 2], u32 (&a)[4], const Pairs& codes, const Scales& scales, u64 x) {
  dequantize_step<J>(codes, scales, a);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  multiply(d, a, x + 2 * J);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  products_wait<2>();
}

// Sums of `steps` steps.
__device__ __forceinline__ void multiply_steps(float (&d)[TILES][TOKENS / 2], Ring& r, int steps, int warp, int lane, Unpacker unpack, Rows (&rows)[TILES]) {
  u32 a[4][4];
#pragma unroll
  for (int i = 0; i < TILES; ++i)
#pragma unroll
    for (int e = 0; e < TOKENS / 2; ++e) d[i][e] = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    barrier_wait(r.full + 8 * r.stage, r.parity);
    // The same in all lanes, which the compiler is told so that it keeps it in a register of the warp.
    const u32 x = __shfl_sync(0xFFFFFFFF, r.stages + r.stage * STAGE_BYTES, 0);
    const u32 tile = x + X_BYTES + warp * (TILES * TILE_BYTES);
    uint4 codes[TILES];
    ScaleBytes bytes[TILES];
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      codes[i] = load_shared_16(tile + i * TILE_BYTES + 16 * lane);
      bytes[i] = load_scale_bytes(tile + i * TILE_BYTES + TILE_CODES + sizeof(ScaleBytes) * (lane >> 2));
    }
    const u64 b = operand(x);
    // Lookups are a step ahead.
    Pairs even = look_up(codes[0].x, unpack), odd;
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      const Scales scales = expand_scales(bytes[i], unpack, rows[i]);
      odd = look_up(codes[i].y, unpack);
      multiply_k16<0>(d[i], a[0], even, scales, b);
      even = look_up(codes[i].z, unpack);
      multiply_k16<1>(d[i], a[1], odd, scales, b);
      odd = look_up(codes[i].w, unpack);
      multiply_k16<2>(d[i], a[2], even, scales, b);
      // Past the second, and surely here, the products of the step before have read their x.
      if (i == 0 && step > 0) release(r.empty + 8 * (r.stage == 0 ? STAGES - 1 : r.stage - 1), lane);
      if (i + 1 < TILES) even = look_up(codes[i + 1 < TILES ? i + 1 : i].x, unpack);
      multiply_k16<3>(d[i], a[3], odd, scales, b);
    }
    if (++r.stage == STAGES) {
      r.stage = 0;
      r.parity ^= 1;
    }
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

// Sums columns [from, to) of 8 tokens of a tile over its members, in order, and finishes them.
__device__ __forceinline__ void finish_columns(const MiddleParams& p, const Team& team, const Row (&rows)[2 * TILES], int from, int to, int row_tile,
                                               int token, u32 staging, int thread) {
  constexpr int CHUNK = COLUMNS < 2 ? 1 : 2, MEMBERS = 4;  // loads of so many columns and members are under way together
#pragma unroll 1
  for (int c = from; c < to; c += CHUNK) {
    float v[TILES][4 * CHUNK] = {};
#pragma unroll 1
    for (int j = 0; j < team.members; j += MEMBERS) {
      float4 parts[MEMBERS][TILES][CHUNK];
#pragma unroll
      for (int u = 0; u < MEMBERS; ++u) {
        const float4* source = partial_of(p, team, min(j + u, team.members - 1)) + thread;
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
          for (int e = 0; e < CHUNK; ++e) parts[u][i][e] = load_partial(source + (i * COLUMNS + min(c + e, to - 1)) * CONSUMERS);
      }
#pragma unroll
      for (int u = 0; u < MEMBERS; ++u) {
        if (j + u >= team.members) break;
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
          for (int e = 0; e < CHUNK; ++e) {
            v[i][4 * e] += parts[u][i][e].x;
            v[i][4 * e + 1] += parts[u][i][e].y;
            v[i][4 * e + 2] += parts[u][i][e].z;
            v[i][4 * e + 3] += parts[u][i][e].w;
          }
      }
    }
    finish<CHUNK>(p, rows, v, row_tile, token + 8 * c, min(p.m, token + 8 * to), staging, thread & 31);
    __syncwarp();
  }
}

// Sums a tile that has several members. True if `d` now holds the sums of the whole tile, which the caller finishes.
__device__ __forceinline__ bool share_tile(const MiddleParams& p, float (&d)[TILES][TOKENS / 2], Row (&rows)[2 * TILES], int tile, int row_tile,
                                           int token, u32 staging, int thread) {
  const Team team = team_of(p, tile);
  const int me = blockIdx.x / CLUSTER - team.first;
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
  load_rows(p, 16 * row_tile + ((thread & 31) >> 2), rows);
  if (thread == 0) wait_for_count(counter, arrivals);
  consumers_sync();
  if (thread == 0) count_up(counter, last);
  if (!alone) {
    finish_columns(p, team, rows, share(me, team.finishers, COLUMNS), share(me + 1, team.finishers, COLUMNS), row_tile, token, staging, thread);
    return false;
  }
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

__device__ __forceinline__ void consume(const MiddleParams& p, int start, int stop, Ring r, u32 staging, Unpacker unpack, int thread) {
  const int lane = thread & 31, warp = thread >> 5;
  float d[TILES][TOKENS / 2];
#pragma unroll 1
  for (int at = start; at < stop;) {
    const Place place = place_of(p, at);
    const int steps = min(p.units - place.unit, stop - at);
    const int row_tile = first_row_tile(place) + warp * TILES, token = place.token_tile * TOKENS;
    prefetch_adapters(p, row_tile, lane);
    Rows packed_rows[TILES];
#pragma unroll
    for (int i = 0; i < TILES; ++i) packed_rows[i] = rows_of(p.side, p.units, row_tile + i, place.unit, lane);
    multiply_steps(d, r, steps, warp, lane, unpack, packed_rows);
    dependencies_wait();  // h
    Row rows[2 * TILES];
    bool whole = true;
    if (steps == p.units) {
      load_rows(p, 16 * row_tile + (lane >> 2), rows);
    } else {
      whole = share_tile(p, d, rows, (at - place.unit) / p.units, row_tile, token, staging, thread);
    }
    if (whole) finish<COLUMNS>(p, rows, d, row_tile, token, p.m, staging, lane);
    at += steps;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) middle(const __grid_constant__ MiddleParams p) {
  extern __shared__ __align__(1024) u8 memory[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  __shared__ __align__(128) u8 staged[WARPS * STAGING_BYTES];
  const int thread = threadIdx.x, warp = thread >> 5;
  const u32 ring = (smem_address(memory) + TABLE_BYTES + 1023) & ~1023u;
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
  fill_table(memory, p.side, thread, THREADS);
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
    if (p.x_ready == nullptr) dependencies_wait();
    consume(p, start, stop, {ring, full, empty, 0, 0}, smem_address(staged) + warp * STAGING_BYTES, unpacker(p.scale_base, smem_address(memory), thread & 31), thread);
  }
  // No block ends while another may still tell it something.
  cluster_arrive();
  cluster_wait();
}
