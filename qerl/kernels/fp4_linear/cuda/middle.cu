// y = (x V^T) / divisor + bias + scale * B h for tens to hundreds of rows of x, on sm_90a: V is expanded in registers once for TOKENS
// rows and enters wgmma as its A operand; x, the B operand, passes through shared memory.
//
// An output tile is 16 * ROW_TILES rows x TOKENS tokens. The steps of all tiles, 64 inputs each, are one list, cut into equal runs: a
// block for each multiprocessor takes one. One warp asks the copy engine for the weights and x of the coming steps; the others expand
// and multiply, one k16 step of a row tile while the products of the two before are under way.
//
// A tile that several blocks have parts of is summed through global memory, in the order of the inputs. The blocks whose run ends
// in this tile finish it: if it is one, it keeps its sums in registers; several share the tokens out among them. B h is added by the block
// that begins the tile. Its warps make pieces of h before they begin, and helping warps the rest of it (adapters.cuh).
//
// The blocks of a cluster have neighbouring rows; each copies a part of x for all of them.
//
// Compile-time: FORMAT, TOKENS (a multiple of 16), TILES (row tiles of a warp: 1 or 2), GROUPS (warpgroups that multiply), STAGES (steps in the ring),
// CLUSTER (1, 2 or 4), PLACES (of 32 ranks of adapters in shared memory).
// x as the B operand: [TOKENS][64] bfloat16, rows of 128 bytes, 16-byte chunks of row r at chunk ^ (r & 7).
__device__ __forceinline__ u64 operand(u32 address) {
  return static_cast<u64>((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

template <int PENDING>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// The same in all lanes of a warp, which the compiler is told so that it keeps what follows from it in registers of the warp and makes it once.
__device__ __forceinline__ u32 uniform(u32 value) { return __shfl_sync(0xFFFFFFFF, value, 0); }

// This warp has read a stage: told to every block of the cluster, since each copies a part of x for all of them.
__device__ __forceinline__ void release(u32 barrier, int lane) {
  if constexpr (CLUSTER == 1) {
    asm volatile("{\n.reg .pred first;\nsetp.eq.s32 first, %1, 0;\n@first mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(barrier), "r"(lane) : "memory");
  } else if (lane < CLUSTER) {
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(barrier), "r"(lane));
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address) : "memory");
  }
}

__device__ __forceinline__ void load_weights(const MiddleParams& p, const Place& at, u32 stage, u32 barrier) {
  copy_box<false>(stage + X_BYTES, p.tile_map, at.unit * (TILE_BYTES / 8), first_row_tile(at), barrier);
}

__device__ __forceinline__ void load_x(const MiddleParams& p, const Place& at, u32 stage, u32 barrier) {
  const int part = block_rank() * (TOKENS / CLUSTER);
  copy_box<(CLUSTER > 1)>(stage + part * 128, p.x_map, at.unit * 64, at.token_tile * TOKENS + part, barrier);
}

// One thread keeps the ring full: the steps of this block's pieces of h, then those of its run.
__device__ __forceinline__ void produce(const MiddleParams& p, int start, int count, u32 ring, u32 full, u32 empty) {
  const int clusters = gridDim.x / CLUSTER;
  int begin = 0;
  for (int index = first_piece(); index < p.h_pieces; index += clusters) {
    const Piece piece = piece_of(p, index);
    begin += piece.to - piece.from;
  }
  const int ahead = min(count, STAGES - begin);
  Place at = place_of(p, start);
  const Place first = at;
  // Weights never change, so their copies need not wait for the kernel in front of this one.
#pragma unroll 1
  for (int i = 0; i < ahead; ++i, advance(p, at)) {
    const int stage = begin + i;
    barrier_expect(full + 8 * stage, STEP_BYTES);
    load_weights(p, at, ring + stage * STAGE_BYTES, full + 8 * stage);
  }
  // The other blocks' barriers are there.
  cluster_wait();
  dependencies_wait();  // x
  int stage = 0;
  u32 parity = 1;  // at first, all stages are empty
  const auto next = [&] {
    if (++stage < STAGES) return;
    stage = 0;
    parity ^= 1;
  };
#pragma unroll 1
  for (int index = first_piece(); index < p.h_pieces; index += clusters) {
    const Piece piece = piece_of(p, index);
    Place from = {piece.from, piece.token_tile, 0};
#pragma unroll 1
    for (; from.unit < piece.to; ++from.unit, next()) {
      const u32 to = ring + stage * STAGE_BYTES, barrier = full + 8 * stage;
      barrier_wait(empty + 8 * stage, parity);
      barrier_expect(barrier, PIECE_STEP_BYTES);
      copy_box<false>(to + X_BYTES, p.a_map, from.unit * 64, piece.rank, barrier);
      load_x(p, from, to, barrier);
    }
  }
  at = first;
#pragma unroll 1
  for (int i = 0; i < count; ++i, advance(p, at), next()) {
    const u32 to = ring + stage * STAGE_BYTES, barrier = full + 8 * stage;
    if (i >= ahead) {
      barrier_wait(empty + 8 * stage, parity);
      barrier_expect(barrier, STEP_BYTES);
      load_weights(p, at, to, barrier);
    }
    load_x(p, at, to, barrier);
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

// Nothing that reads the sums may move in front of this, which stands behind the wait for their products.
__device__ __forceinline__ void settled(float (&d)[TILES][TOKENS / 2]) {
#pragma unroll
  for (int i = 0; i < TILES; ++i)
#pragma unroll
    for (int e = 0; e < TOKENS / 2; ++e) asm volatile("" : "+f"(d[i][e])::"memory");
}

// A step's weights of a warp, packed.
struct Weights {
  Codes codes[TILES];
  ScaleBytes scales[TILES];
};

__device__ __forceinline__ void load_packed(Weights& w, u32 tile, int lane) {
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    w.codes[i] = load_codes(tile + i * TILE_BYTES + 16 * lane);
    w.scales[i] = load_scale_bytes(tile + i * TILE_BYTES + TILE_CODES + sizeof(ScaleBytes) * (lane >> 2));
  }
}

// Sums of `steps` steps.
__device__ __forceinline__ void multiply_steps(float (&d)[TILES][TOKENS / 2], Ring& r, int steps, int warp, int lane, Unpacker unpack, Rows (&packed_rows)[TILES]) {
  u32 a[4][4];
#pragma unroll
  for (int i = 0; i < TILES; ++i)
#pragma unroll
    for (int e = 0; e < TOKENS / 2; ++e) d[i][e] = 0;
  const u32 mine = r.stages + X_BYTES + warp * (TILES * TILE_BYTES);
  Weights w;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    barrier_wait(r.full + 8 * r.stage, r.parity);
    load_packed(w, mine + r.stage * STAGE_BYTES, lane);
    const u64 x = operand(r.stages + r.stage * STAGE_BYTES);
    const u32 before = r.empty + 8 * (r.stage == 0 ? STAGES - 1 : r.stage - 1);
    if (++r.stage == STAGES) {
      r.stage = 0;
      r.parity ^= 1;
    }
    // Lookups are a k16 step ahead.
    Pairs even = look_up(word_of<0>(w.codes[0]), unpack), odd;
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      const Scales scales = expand_scales(w.scales[i], unpack, packed_rows[i]);
      odd = look_up(word_of<1>(w.codes[i]), unpack);
      multiply_k16<0>(d[i], a[0], even, scales, x);
      even = look_up(word_of<2>(w.codes[i]), unpack);
      multiply_k16<1>(d[i], a[1], odd, scales, x);
      odd = look_up(word_of<3>(w.codes[i]), unpack);
      multiply_k16<2>(d[i], a[2], even, scales, x);
      // Past the second, and surely here, the products of the step before have read their x.
      if (i == 0 && step > 0) release(before, lane);
      if (i + 1 < TILES) even = look_up(word_of<0>(w.codes[i + 1 < TILES ? i + 1 : i]), unpack);
      multiply_k16<3>(d[i], a[3], odd, scales, x);
    }
  }
  products_wait<0>();
  release(r.empty + 8 * (r.stage == 0 ? STAGES - 1 : r.stage - 1), lane);
  settled(d);
}

// ---- Adapters.

// This block's pieces of h, by the first warpgroup, half of whose rows are ranks.
__device__ __forceinline__ void add_pieces(const MiddleParams& p, float (&d)[TOKENS / 2], Ring& r, int warp, int lane) {
  const int clusters = gridDim.x / CLUSTER;
#pragma unroll 1
  for (int index = first_piece(); index < p.h_pieces; index += clusters) {
    const Piece piece = piece_of(p, index);
#pragma unroll
    for (int e = 0; e < TOKENS / 2; ++e) d[e] = 0;
#pragma unroll 1
    for (int step = piece.from; step < piece.to; ++step) {
      barrier_wait(r.full + 8 * r.stage, r.parity);
      if (warp < 4) {
        const u32 x = __shfl_sync(0xFFFFFFFF, r.stages + r.stage * STAGE_BYTES, 0);
        u32 a[4][4] = {};
        const int row = 16 * warp + (lane & 15);
#pragma unroll
        for (int k = 0; k < 4; ++k)
          if (warp < 2) ldmatrix_x4(a[k], x + X_BYTES + 128 * row + (((2 * k + (lane >> 4)) ^ (row & 7)) << 4));
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < 4; ++k) multiply(d, a[k], operand(x) + 2 * k);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        products_wait<0>();
      }
      release(r.empty + 8 * r.stage, lane);
      if (++r.stage == STAGES) {
        r.stage = 0;
        r.parity ^= 1;
      }
    }
#pragma unroll
    for (int e = 0; e < TOKENS / 2; ++e) asm volatile("" : "+f"(d[e])::"memory");
    float2* target = p.h_partials + (static_cast<long long>(index) * CLUSTER + block_rank()) * PIECE + 2 * PIECE_CHUNK * warp + lane;
    if (warp < 2) {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        target[32 * c] = make_float2(d[4 * c], d[4 * c + 1]);
        target[32 * c + PIECE_CHUNK] = make_float2(d[4 * c + 2], d[4 * c + 3]);
      }
    }
  }
  if (warp < 4) asm volatile("bar.arrive 7, %0;" ::"n"(128 + HELPERS) : "memory");
}

// h as the B operand: [TOKENS][32] bfloat16, rows of 64 bytes.
__device__ __forceinline__ u64 h_operand(u32 address) {
  return static_cast<u64>((address & 0x3FFFF) >> 4) | (1ull << 16) | (32ull << 32) | (2ull << 62);
}

// Multiplies the sums of every row by `down` or `up`.
__device__ __forceinline__ void scale_sums(float (&d)[TILES][TOKENS / 2], const Row (&rows)[2 * TILES], bool back) {
#pragma unroll
  for (int i = 0; i < 2 * TILES; ++i) {
    const float by = back ? rows[i].up : rows[i].down;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      d[i >> 1][4 * c + 2 * (i & 1)] *= by;
      d[i >> 1][4 * c + 2 * (i & 1) + 1] *= by;
    }
  }
}

// Adds scale * B h to the sums of a tile, 32 ranks of a part at a time, as the helping warps lay them.
__device__ __forceinline__ void add_adapters(const MiddleParams& p, float (&d)[TILES][TOKENS / 2], const Row (&rows)[2 * TILES], int first,
                                             const Feed& feed, u32& uses, int warp, int lane) {
  scale_sums(d, rows, false);
#pragma unroll 1
  for (int q = 0; q < p.parts; ++q) {
    const Part& part = p.part[q];
    if (!touches(part, first)) continue;
#pragma unroll 1
    for (int rank = 0; rank < part.rank; rank += PIECE_RANKS, ++uses) {
      const u32 place = uses % PLACES, memory = feed.memory + place * FEED_BYTES;
      barrier_wait(feed.adapter_full + 8 * place, uses / PLACES & 1);
      if constexpr (PLACES > 1) laid_visible();
      u32 b[TILES][2][4];
#pragma unroll
      for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int row = 16 * (warp * TILES + i) + (lane & 15);
          ldmatrix_x4(b[i][k], memory + FEED_H + 64 * row + (((2 * k + (lane >> 4)) ^ (row >> 1 & 3)) << 4));
        }
      const u64 h = h_operand(__shfl_sync(0xFFFFFFFF, memory, 0));
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int k = 0; k < 2; ++k) multiply(d[i], b[i][k], h + 2 * k);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      products_wait<0>();
      settled(d);
      __syncwarp();  // lane 0 speaks for the reads of all
      if (lane == 0) arrive(feed.adapter_empty + 8 * place);
    }
  }
  scale_sums(d, rows, true);
}

__device__ __forceinline__ void load_rows(Row (&rows)[2 * TILES], u32 from) {
#pragma unroll
  for (int i = 0; i < 2 * TILES; ++i)
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(rows[i].factor), "=f"(rows[i].bias), "=f"(rows[i].down), "=f"(rows[i].up)
                 : "r"(from + 8 * 16 * i)
                 : "memory");
}

__device__ __forceinline__ void consume(const MiddleParams& p, int start, int stop, Ring r, const Feed& feed, u32 staging, Unpacker unpack, int warp, int thread) {
  const int lane = thread & 31;
  float d[TILES][TOKENS / 2];
  int visit = 0;
  u32 uses = 0;
  if (p.parts > 0) add_pieces(p, d[0], r, warp, lane);
#pragma unroll 1
  for (int at = start; at < stop; ++visit) {
    const Place place = place_of(p, at);
    const int steps = min(p.units - place.unit, stop - at), first = first_row_tile(place);
    const int row_tile = first + warp * TILES, token = place.token_tile * TOKENS;
    Rows packed_rows[TILES];
#pragma unroll
    for (int i = 0; i < TILES; ++i) packed_rows[i] = rows_of(p.side, p.units, row_tile + i, place.unit, lane);
    multiply_steps(d, r, steps, warp, lane, unpack, packed_rows);
    Row rows[2 * TILES];
    barrier_wait(feed.rows_full + 8 * (visit & 1), visit >> 1 & 1);
    load_rows(rows, feed.rows + 16 * ((visit & 1) * BLOCK_ROWS + 16 * warp * TILES + (lane >> 2)));
    // A tile's first member has its sums for the longest time until it sends or finishes them.
    if (p.parts > 0 && place.unit == 0) add_adapters(p, d, rows, 16 * first, feed, uses, warp, lane);
    const bool whole = steps == p.units || share_tile(p, d, rows, (at - place.unit) / p.units, row_tile, token, staging, thread);
    if (whole) finish<COLUMNS>(p, rows, d, row_tile, token, p.m, staging, thread);
    __syncwarp();
    if (lane == 0) arrive(feed.rows_empty + 8 * (visit & 1));
    at += steps;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) middle(const __grid_constant__ MiddleParams p) {
  extern __shared__ __align__(1024) u8 memory[];
  constexpr int OTHERS = 4 + 2 * PLACES;  // barriers beside the ring's
  __shared__ __align__(8) u64 barriers[2 * STAGES + OTHERS];
  __shared__ __align__(128) u8 staged[GROUPS * STAGING_BYTES];
  __shared__ __align__(16) Row rows[2 * BLOCK_ROWS];
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));  // read once
  const int warp = uniform(thread >> 5);
  const u32 ring = (uniform(smem_address(memory)) + TABLE_BYTES + 1023) & ~1023u;
  const u32 full = uniform(smem_address(barriers)), empty = full + 8 * STAGES, others = empty + 8 * STAGES;
  const Feed feed = {ring + STAGES * STAGE_BYTES, smem_address(rows), others, others + 16, others + 32, others + 32 + 8 * PLACES};
  // Clusters beyond those that share the steps only make pieces of h.
  const int cluster = min(static_cast<int>(blockIdx.x) / CLUSTER, p.clusters), next = min(cluster + 1, p.clusters);
  const int start = share(cluster, p.clusters, p.steps), stop = share(next, p.clusters, p.steps);
  dependents_may_start();
  if (thread == CONSUMERS) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(barriers + i, 1);
      barrier_init(barriers + STAGES + i, WARPS * CLUSTER);
    }
    for (int i = 0; i < OTHERS; ++i) barrier_init(barriers + 2 * STAGES + i, i < 2 || (i >= 4 && i < 4 + PLACES) ? HELPERS : WARPS);
    barrier_inits_visible();
  }
  fill_table(memory, p.side, thread, THREADS);
  __syncthreads();
  cluster_arrive();
  if (warp >= WARPS) {
    if constexpr (WIDE) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FEW_REGISTERS));
    if (thread == CONSUMERS) {
      produce(p, start, stop - start, ring, full, empty);
    } else {
      const int helper = thread - CONSUMERS - 32;
      if (helper >= 0) prefetch_adapters(p, start, stop, helper);
      cluster_wait();
      dependencies_wait();
      if (helper >= 0) help(p, start, stop, feed, helper);
    }
  } else {
    if constexpr (WIDE) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MANY_REGISTERS));
    cluster_wait();
    dependencies_wait();
    consume(p, start, stop, {ring, full, empty, 0, 0}, feed, smem_address(staged) + (warp >> 2) * STAGING_BYTES, unpacker(p.scale_base, uniform(smem_address(memory)), thread & 31), warp, thread);
  }
  // No block ends while another may still tell it something.
  cluster_arrive();
  cluster_wait();
}
