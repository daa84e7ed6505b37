// y = (x V^T) / divisor + bias + scale * B (A x) for few rows of x; V is read from the packed layout once.
//
// A cluster of CLUSTER blocks takes a contiguous run of row tiles; block `rank` of it takes a slice of the inputs, whose x stays
// in shared memory for the whole launch. The tiles of a round are one flat list of units; every main warp streams an
// equal share of it through a private ring of asynchronous copies, without any barrier. A warp that ends its part of a row tile
// pushes the partial sum into the shared memory of the block that finishes this tile; their bytes
// count at a barrier there, and when all have come, that block adds them in the order of the inputs.
//
// Adapters: h = A x is made once for all blocks. Each has a few rows of A and a run of its slice of the inputs, loaded while x was not there yet; the
// partial sums go through global memory, where a number that is not there yet has bits that no sum has. Four more warps watch for them while the others stream, and
// make bias + scale * B h for the row tiles that their block will finish. All blocks run at the same time.
//
// Compile-time: FORMAT, NT (columns of 8 rows of x), WARPS (main warps), STAGES (depth of a ring, even), CLUSTER, VECTORS (rows of x and A are whole
// chunks of 16 bytes).

constexpr int RING_BYTES = STAGES * TILE_BYTES;
// Partial sums of h that a thread watches together.
constexpr int PIECES_AT_ONCE = 8;

// Writes to the same place in the shared memory of block `rank` of the cluster, where the bytes count at `barrier`.
__device__ __forceinline__ void push(u32 place, int rank, float4 v, u64* barrier) {
#if CLUSTER > 1
  u32 address, count;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(place), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(count) : "r"(smem_address(barrier)), "r"(rank));
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(address),
               "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(count)
               : "memory");
#else
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(place), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
#endif
}

// Bytes of the partial sums that this block is sent in a round of `tiles` row tiles; the lanes of a warp share the count.
__device__ int round_bytes(const DecodeParams& p, const Work& w, int tiles, int lane) {
  const int first = share(w.rank, CLUSTER, tiles), last = share(w.rank + 1, CLUSTER, tiles);
  int slots = 0;
#pragma unroll 1
  for (int i = lane; i < (last - first) * CLUSTER; i += 32) {
    const int rank = i % CLUSTER, tile = first + i / CLUSTER;
    const int slice = share(rank + 1, CLUSTER, p.units) - share(rank, CLUSTER, p.units);
    const int total = tiles * slice, active = min(WARPS, total);
    slots += 1 + holder((tile + 1) * slice - 1, active, total) - holder(tile * slice, active, total);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) slots += __shfl_xor_sync(0xffffffffu, slots, step);
  return slots * NT * 512;
}

// Bytes may come before they are expected: the barrier waits for this arrival.
__device__ __forceinline__ void expect_round(const DecodeParams& p, const Work& w, int tiles, u64* barrier, int warp, int lane) {
#if CLUSTER > 1
  if (warp != WARPS) return;
  const int bytes = round_bytes(p, w, tiles, lane);
  if (lane == 0) barrier_expect(smem_address(barrier), bytes);
#endif
}

// 16 rows of A and a run of halves of a unit, 32 inputs each, of this block's slice: one piece of h = A x. The clusters share out the pieces.
struct Piece {
  int group, chunk, from, to;
};

__device__ __forceinline__ Piece piece_of(const DecodeParams& p, const Work& w, int index) {
  const int chunk = index / p.groups;
  return {index - chunk * p.groups, chunk, share(chunk, p.chunks, 2 * w.slice_units), share(chunk + 1, p.chunks, 2 * w.slice_units)};
}

// HALVES halves of a unit of the rows of A, from half `from` on.
__device__ __forceinline__ void load_a(const DecodeParams& p, const Work& w, int group, int from, int to, int lane, uint4 (&a)[HALVES][2]) {
  const int first = 16 * group + (lane >> 2), column = w.first_unit * 64 + from * 32 + 8 * (lane & 3);
  const u16* row = p.a + static_cast<long long>(first) * p.k;
  const u16* next = row + 8ll * p.k;
  if (VECTORS) {
#pragma unroll
    for (int j = 0; j < HALVES; ++j) {
      const int k = column + 32 * j;
      const bool inside = from + j < to && k < p.k;
      a[j][0] = a[j][1] = make_uint4(0, 0, 0, 0);
      if (inside && first < p.ranks) a[j][0] = load_once_16(row + k);
      if (inside && first + 8 < p.ranks) a[j][1] = load_once_16(next + k);
    }
  } else {
#pragma unroll
    for (int j = 0; j < HALVES; ++j) {
      const int k = column + 32 * j;
      a[j][0] = from + j < to && first < p.ranks ? load_row_8(row, k, p.k, false) : make_uint4(0, 0, 0, 0);
      a[j][1] = from + j < to && first + 8 < p.ranks ? load_row_8(next, k, p.k, false) : make_uint4(0, 0, 0, 0);
    }
  }
}

// This block's pieces of h: all warps multiply, the adapters' warps add up and write to global memory. `a` holds what the first piece begins with.
__device__ __forceinline__ void shrink(const DecodeParams& p, const Shared& s, const Work& w, int cluster, int clusters, uint4 (&a)[HALVES][2],
                                       int warp, int lane) {
  const int g = lane >> 2, t = lane & 3, pieces = p.groups * p.chunks;
  for (int index = cluster; index < pieces; index += clusters) {
    const Piece piece = piece_of(p, w, index);
    const int halves = piece.to - piece.from;
    int step = piece.from + share(warp, WARPS + LORA_WARPS, halves);
    const int to = piece.from + share(warp + 1, WARPS + LORA_WARPS, halves);
    if (index > cluster) load_a(p, w, piece.group, step, to, lane, a);
    float c[NT][4] = {};
#pragma unroll 1
    while (step < to) {
#pragma unroll
      for (int j = 0; j < HALVES; ++j) {
        if (step + j >= to) break;
        const u32 near[4] = {a[j][0].x, a[j][1].x, a[j][0].y, a[j][1].y};
        const u32 far[4] = {a[j][0].z, a[j][1].z, a[j][0].w, a[j][1].w};
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          const uint4 b = *reinterpret_cast<const uint4*>(s.x + (8 * n + g) * s.stride + (step + j) * 32 + 8 * t);
          mma_m16n8k16(c[n], near, b.x, b.y);
          mma_m16n8k16(c[n], far, b.z, b.w);
        }
      }
      step += HALVES;
      if (step < to) load_a(p, w, piece.group, step, to, lane, a);
    }
    if (index > cluster) asm volatile("bar.sync 3, %0;" ::"n"(THREADS) : "memory");  // the last piece's shares have been read
#pragma unroll
    for (int n = 0; n < NT; ++n) s.local[(warp * NT + n) * 32 + lane] = make_float4(c[n][0], c[n][1], c[n][2], c[n][3]);
    if (warp < WARPS) {
      asm volatile("bar.arrive 2, %0;" ::"n"(THREADS) : "memory");
    } else {
      asm volatile("bar.sync 2, %0;" ::"n"(THREADS) : "memory");
      float4* target = p.partials + ((w.rank * p.chunks + piece.chunk) * p.groups + piece.group) * NT * 32;
      for (int i = 32 * (warp - WARPS) + lane; i < NT * 32; i += LORA_THREADS) {
        float4 sum = s.local[i];
#pragma unroll
        for (int other = 1; other < WARPS + LORA_WARPS; ++other) add(sum, s.local[other * NT * 32 + i]);
        store_watched_16(target + i, sum);
      }
    }
  }
}

// Waits for the pieces of h that this cluster's rows need, number by number, adds them in order and rounds: h, bfloat16 in shared memory.
// Tells the first thread how many blocks had it before.
__device__ __forceinline__ u32 gather_h(const DecodeParams& p, const Shared& s, u32 needed, int thread) {
  const int count = CLUSTER * p.chunks, step = p.groups * NT * 32;
  for (int i = thread; i < step; i += LORA_THREADS) {
    const int group = i / (NT * 32), n = (i / 32) % NT, lane = i & 31, g = lane >> 2, t = lane & 3;
    if (group < 32 && !(needed >> group & 1)) continue;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int chunk = 0; chunk < count; chunk += PIECES_AT_ONCE) {
      float4 v[PIECES_AT_ONCE];
      bool wait;
      do {
        wait = false;
#pragma unroll
        for (int j = 0; j < PIECES_AT_ONCE; ++j) v[j] = load_watched_16(p.partials + i + min(chunk + j, count - 1) * step);
#pragma unroll
        for (int j = 0; j < PIECES_AT_ONCE; ++j) wait |= missing(v[j]);
      } while (wait);
#pragma unroll
      for (int j = 0; j < PIECES_AT_ONCE; ++j) {
        if (chunk + j < count) add(sum, v[j]);
      }
    }
    u16* target = s.h + (8 * n + 2 * t) * s.h_stride + 16 * group + g;
    target[0] = to_bf16(sum.x);
    target[s.h_stride] = to_bf16(sum.y);
    target[8] = to_bf16(sum.z);
    target[s.h_stride + 8] = to_bf16(sum.w);
  }
  lora_sync();
  return thread == 0 ? add_relaxed(p.counters, 1) : 0;
}

// The last block to have read h leaves nothing of it behind for the next kernel, which waits for the end of this one. One warp.
__device__ __forceinline__ void clear_h(const DecodeParams& p, u32 before, int lane) {
  if (__shfl_sync(0xFFFFFFFFu, before, 0) != gridDim.x - 1) return;
  const float none = __uint_as_float(MISSING);
  for (int i = lane; i < CLUSTER * p.chunks * p.groups * NT * 32; i += 32) store_watched_16(p.partials + i, make_float4(none, none, none, none));
  if (lane == 0) p.counters[0] = 0;
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
  if (at.left >= 2 && at.row_left > 2) {
    copy_codes(target, at.source);
    copy_codes(target + TILE_BYTES, at.source + TILE_BYTES);
    if (SCALE_CHUNKS > 0) {
      copy_async_16_where(lane < SCALE_CHUNKS, target + TILE_CODES, at.source + TILE_CODES);
      copy_async_16_where(lane < SCALE_CHUNKS, target + TILE_BYTES + TILE_CODES, at.source + TILE_BYTES + TILE_CODES);
    }
    at.left -= 2;
    at.row_left -= 2;
    at.source += 2 * TILE_BYTES;
  } else {
#pragma unroll 1
    for (int i = min(at.left, 2); i > 0; --i) {
      copy_codes(target, at.source);
      if (SCALE_CHUNKS > 0) copy_async_16_where(lane < SCALE_CHUNKS, target + TILE_CODES, at.source + TILE_CODES);
      target += TILE_BYTES;
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
#if BULK_X
  __shared__ u64 x_there;
#endif
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
  u8* next = memory + TABLE_BYTES + WARPS * RING_BYTES;
  s.slots = reinterpret_cast<float4*>(next), next += CLUSTER * p.rank_slots * NT * 512;
  s.extra = reinterpret_cast<float4*>(next), next += share_tiles * NT * 512;
  s.factor = reinterpret_cast<float*>(next), next += share_tiles * 64;
  s.local = reinterpret_cast<float4*>(next), next += (WARPS + LORA_WARPS) * NT * 512;
  s.x = reinterpret_cast<u16*>(next), next += COLUMNS * s.stride * 2;
  s.h = reinterpret_cast<u16*>(next);

  dependents_may_start();
  Producer at = {nullptr, 0, 0, w.tile_start};
  const u32 ring = smem_address(memory) + TABLE_BYTES + warp * RING_BYTES;
  const u32 row_jump = (p.units - w.slice_units + 1) * TILE_BYTES;
#if BULK_X || CLUSTER > 1
  if (thread == 32 * WARPS) {
    barrier_init(&arrived, 1);
#if BULK_X
    barrier_init(&x_there, 1);
#endif
    barrier_inits_visible();
  }
#endif
  cluster_arrive();
  if (warp < WARPS) {
    // Weights never change, so their copies need not wait for the kernel in front of this one.
    start_round(p, at, w, warp, lane);
#pragma unroll 1
    for (int i = 0; i < STAGES - 2; i += 2) produce(p, at, w, ring + i * TILE_BYTES + 16 * lane, row_jump, warp, lane);
  }
  fill_table(memory, p.side, thread, THREADS);
  cluster_wait();
  // What follows from the shapes alone is found before x is there.
  int tiles = min(p.round_tiles, w.tile_stop - w.tile_start);
  int first = share(w.rank, CLUSTER, tiles), last = share(w.rank + 1, CLUSTER, tiles);
  u32 of = sources(p, tiles, first, first + warp / NT, lane);
  Course at_work = {};
  if (warp < WARPS) {
    at_work = course(p, s, w, tiles, warp, lane);
  } else {
    expect_round(p, w, tiles, &arrived, warp, lane);
    warm_epilogue(p, w, thread - 32 * WARPS);
  }
  // Nor do adapters change under the kernel in front, where launches overlap at all (in captures).
  uint4 a[HALVES][2];
  if (cluster < p.groups * p.chunks) {
    const Piece piece = piece_of(p, w, cluster);
    const int from = piece.from + share(warp, WARPS + LORA_WARPS, piece.to - piece.from);
    load_a(p, w, piece.group, from, piece.from + share(warp + 1, WARPS + LORA_WARPS, piece.to - piece.from), lane, a);
  }
  if (warp >= WARPS) {
#if BULK_X
    expect_x(p, s, w, thread - 32 * WARPS, &x_there);
    dependencies_wait();
    load_x(p, s, w, thread - 32 * WARPS, &x_there);
#else
    dependencies_wait();
    load_x(p, s, w, thread - 32 * WARPS);
#endif
  }
  // The table, zeros behind x and the barrier for x are there for all threads, and no thread goes on before the kernel in front has ended.
  __syncthreads();
#if BULK_X
  barrier_wait(smem_address(&x_there), 0);
#endif
  u32 before = 0;
  if (p.parts > 0) {
    shrink(p, s, w, cluster, clusters, a, warp, lane);
    if (warp >= WARPS) {
      // While pieces of h are on their way; without adapters while the others stream. In front of x it would keep x waiting.
      find_factors(p, s, w.tile_start + first, w.tile_start + last, thread - 32 * WARPS);
      before = gather_h(p, s, needed_groups(p, w), thread - 32 * WARPS);
    }
  }

  const Unpacker unpack = unpacker(p.scale_base, smem_address(memory), lane);
  const u32 x_column = 16 * s.stride;
  const u32 x_row = smem_address(s.x) + ((lane & 7) * s.stride + (lane >> 3) * 8) * 2;
  const u32 codes_at = ring + 16 * lane, scales_at = ring + TILE_CODES + sizeof(ScaleBytes) * (lane >> 2);
  u32 stage = 0, free_stage = (STAGES - 2) * TILE_BYTES;  // offsets in the ring, of pairs of units
  u32 parity = 0;
  for (int round = w.tile_start;;) {
    if (warp < WARPS) {
      int tile = at_work.tile, left = at_work.left;
      int run = min(left, at_work.row_left);  // units until the row tile or this warp's share ends
      Delivery to = at_work.to;
      u32 x_at = x_row + (w.slice_units - at_work.row_left) * 128;
      Rows rows = rows_of(p.side, p.units, round + tile, w.first_unit + w.slice_units - at_work.row_left, lane);
      float c[CHAINS][NT][4] = {};
#pragma unroll 1
      while (left > 0) {
        copy_async_wait<STAGES / 2 - 2>();
        __syncwarp();
        produce(p, at, w, codes_at + free_stage, row_jump, warp, lane);
        free_stage = stage;
        const int now = min(left, 2);
        left -= now;
        const auto multiply_next = [&] {
          multiply_unit(load_codes(codes_at + stage), load_scale_bytes(scales_at + stage), rows, x_at, x_column, unpack, c);
          stage += TILE_BYTES;
          x_at += 128;
        };
        // Most pairs end no row tile, and need one turn. For more rows of x there are not the registers.
        const bool both = NT <= 2 && run > 2;
        if (both) {
          multiply_next();
          multiply_next();
          run -= 2;
        }
#pragma unroll 1
        for (int i = both ? 0 : now; i > 0; --i) {
          multiply_next();
          if (--run == 0) {
            if (tile == to.owner_stop) address(p, s, w, to, tiles, tile, warp, lane);
#pragma unroll
            for (int n = 0; n < NT; ++n) {
              float4 sum = make_float4(c[0][n][0], c[0][n][1], c[0][n][2], c[0][n][3]);
              if (CHAINS == 2) add(sum, make_float4(c[CHAINS - 1][n][0], c[CHAINS - 1][n][1], c[CHAINS - 1][n][2], c[CHAINS - 1][n][3]));
              push(to.slot + n * 512, to.owner, sum, &arrived);
#pragma unroll
              for (int j = 0; j < 4; ++j) c[0][n][j] = c[CHAINS - 1][n][j] = 0;
            }
            to.slot += NT * 512;
            ++tile;
            rows = rows_of(p.side, p.units, round + tile, w.first_unit, lane);
            run = min(left + i - 1, w.slice_units);
            x_at = x_row;
          }
        }
        stage = free_stage == (STAGES - 2) * TILE_BYTES ? 0 : free_stage + 2 * TILE_BYTES;
      }
    } else {
      if (p.parts == 0 || round > w.tile_start) find_factors(p, s, round + first, round + last, thread - 32 * WARPS);
      expand(p, s, w, round + first, round + last, thread - 32 * WARPS);
    }
    __syncthreads();
#if CLUSTER > 1
    barrier_wait(smem_address(&arrived), parity);
#endif
    finish(p, s, of, round, tiles, first, last, warp, lane);
    round += p.round_tiles;
    if (round >= w.tile_stop) break;
    // The next round writes to the same places.
    cluster_sync();
    parity ^= 1;
    tiles = min(p.round_tiles, w.tile_stop - round);
    first = share(w.rank, CLUSTER, tiles), last = share(w.rank + 1, CLUSTER, tiles);
    of = sources(p, tiles, first, first + warp / NT, lane);
    if (warp < WARPS) {
      at_work = course(p, s, w, tiles, warp, lane);
    } else {
      expect_round(p, w, tiles, &arrived, warp, lane);
    }
  }
  if (p.parts > 0 && warp == WARPS) clear_h(p, before, lane);
}
