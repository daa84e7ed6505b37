// What the helping warps of a middle kernel's block do while the others multiply: h = x A^T for all blocks together, what the rows of a
// tile are made with, and B and h of the coming tile, laid where the others multiply them.
//
// h is cut into pieces of 48 tokens x 32 ranks and a slice of the inputs; a block has one piece or a few. Its sums go through global
// memory, where a counter tells when all are there; each block then adds up some numbers of h, in the order of the inputs, rounds them, and a
// second counter tells when all are done. Blocks run at the same time, so that they may wait for one another.

constexpr int HELPERS = 96;  // threads
constexpr int HELPING_WARPS = HELPERS / 32;
constexpr int PIECE_TOKENS = 16 * HELPING_WARPS, PIECE_RANKS = 32;
constexpr int PIECE_PAIRS = PIECE_TOKENS * PIECE_RANKS / 2;
constexpr int PIECE_STAGE = 128 * (PIECE_TOKENS + PIECE_RANKS);  // 64 inputs
constexpr int PIECE_STAGES = 2;

// 32 ranks of h and B of a tile: rows of 64 bytes, 16-byte chunks of row r at chunk ^ (r >> 1 & 3).
constexpr int FEED_H = 64 * TOKENS, FEED_BYTES = FEED_H + 64 * BLOCK_ROWS;
constexpr int ADAPTER_BYTES = FEED_BYTES > PIECE_STAGES * PIECE_STAGE ? FEED_BYTES : PIECE_STAGES * PIECE_STAGE;

// Barriers in shared memory between the helping warps and the others.
struct Feed {
  u32 memory;                   // ADAPTER_BYTES
  u32 rows;                     // Row [2][BLOCK_ROWS]
  u32 rows_full, rows_empty;    // two each: places of the rows of this tile and the next
  u32 adapter_full, adapter_empty;
};

__device__ __forceinline__ void helpers_sync() { asm volatile("bar.sync 2, %0;" ::"n"(HELPERS) : "memory"); }

__device__ __forceinline__ void arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }

// Copies 16 bytes, or zeros.
__device__ __forceinline__ void copy_async_16_if(bool inside, u32 shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(inside ? 16 : 0) : "memory");
}

// Whether rows [first, first + BLOCK_ROWS) have outputs of this part.
__device__ __forceinline__ bool touches(const Part& part, int first) {
  return part.scale != 0 && part.row_start < first + BLOCK_ROWS && part.row_stop > first;
}

__device__ __forceinline__ void prefetch(const u16* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// A piece of h and the slice of the inputs that is added here.
struct Piece {
  int token, rank, from, to;
};

__device__ __forceinline__ Piece piece_of(const MiddleParams& p, int index) {
  const int group = index / p.h_slices, slice = index - group * p.h_slices, rank_groups = (p.ranks + PIECE_RANKS - 1) / PIECE_RANKS;
  return {PIECE_TOKENS * (group / rank_groups), PIECE_RANKS * (group % rank_groups), share(slice, p.h_slices, p.units),
          share(slice + 1, p.h_slices, p.units)};
}

// Starts the copy of 64 inputs of a piece's x and A: rows of 128 bytes, 16-byte chunks of row r at chunk ^ (r & 7).
__device__ __forceinline__ void load_piece(const MiddleParams& p, const Piece& piece, int step, u32 stage, int thread) {
  constexpr int CHUNKS = 8 * (PIECE_TOKENS + PIECE_RANKS);
  if (step < piece.to) {
#pragma unroll
    for (int i = thread; i < (CHUNKS + HELPERS - 1) / HELPERS * HELPERS; i += HELPERS) {
      const int row = i >> 3, chunk = i & 7, column = 64 * step + 8 * chunk;
      const bool is_x = row < PIECE_TOKENS;
      const int r = is_x ? piece.token + row : piece.rank + row - PIECE_TOKENS;
      const bool inside = column < p.k && r < (is_x ? p.m : p.ranks);
      if (i < CHUNKS)
        copy_async_16_if(inside, stage + 128 * row + ((chunk ^ (row & 7)) << 4),
                         (is_x ? p.x : p.a) + (inside ? static_cast<long long>(r) * p.k + column : 0));
    }
  }
  copy_async_commit();
}

// Sums of a warp's 16 tokens x 32 ranks over 64 inputs.
__device__ __forceinline__ void multiply_piece(float (&c)[4][4], u32 stage, int warp, int lane) {
  const int x_row = 16 * warp + (lane & 15), a_row = PIECE_TOKENS + (lane & 7) + 8 * (lane >> 4);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    u32 x[4];
    ldmatrix_x4(x, stage + 128 * x_row + (((2 * k + (lane >> 4)) ^ (x_row & 7)) << 4));
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
      u32 a[4];
      ldmatrix_x4(a, stage + 128 * (a_row + 8 * n) + (((2 * k + ((lane >> 3) & 1)) ^ (a_row & 7)) << 4));
      mma_m16n8k16(c[n], x, a[0], a[1]);
      mma_m16n8k16(c[n + 1], x, a[2], a[3]);
    }
  }
}

// Adds this block's pieces and leaves the sums, pairs of ranks, in the order [piece][warp][8 ranks][token or token + 8][lane].
__device__ __forceinline__ void add_pieces(const MiddleParams& p, u32 memory, int thread) {
  const int lane = thread & 31, warp = thread >> 5;
#pragma unroll 1
  for (int index = blockIdx.x; index < p.h_pieces; index += gridDim.x) {
    const Piece piece = piece_of(p, index);
    float c[4][4] = {};
#pragma unroll
    for (int i = 0; i < PIECE_STAGES; ++i) load_piece(p, piece, piece.from + i, memory + i * PIECE_STAGE, thread);
    int stage = 0;
#pragma unroll 1
    for (int step = piece.from; step < piece.to; ++step) {
      copy_async_wait<PIECE_STAGES - 1>();
      helpers_sync();
      multiply_piece(c, memory + stage * PIECE_STAGE, warp, lane);
      helpers_sync();
      load_piece(p, piece, step + PIECE_STAGES, memory + stage * PIECE_STAGE, thread);
      stage = stage + 1 == PIECE_STAGES ? 0 : stage + 1;
    }
    float2* target = p.h_partials + static_cast<long long>(index) * PIECE_PAIRS + 256 * warp + lane;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      target[64 * n] = make_float2(c[n][0], c[n][1]);
      target[64 * n + 32] = make_float2(c[n][2], c[n][3]);
    }
  }
}

// Adds up pairs of h over the slices, all blocks together.
__device__ __forceinline__ void round_h(const MiddleParams& p, int thread) {
  constexpr int TOGETHER = 8;  // loads that are under way together
  const int pairs = p.h_pieces / p.h_slices * PIECE_PAIRS;
#pragma unroll 1
  for (int i = blockIdx.x * HELPERS + thread; i < pairs; i += gridDim.x * HELPERS) {
    const int group = i / PIECE_PAIRS, e = i - group * PIECE_PAIRS;
    const Piece piece = piece_of(p, group * p.h_slices);
    const float2* from = p.h_partials + static_cast<long long>(group) * p.h_slices * PIECE_PAIRS + e;
    float2 sum = make_float2(0, 0);
#pragma unroll 1
    for (int s = 0; s < p.h_slices; s += TOGETHER) {
      float2 v[TOGETHER];
#pragma unroll
      for (int u = 0; u < TOGETHER; ++u)
        asm volatile("ld.global.cg.v2.f32 {%0,%1}, [%2];"
                     : "=f"(v[u].x), "=f"(v[u].y)
                     : "l"(from + static_cast<long long>(min(s + u, p.h_slices - 1)) * PIECE_PAIRS)
                     : "memory");
#pragma unroll
      for (int u = 0; u < TOGETHER; ++u) {
        sum.x += s + u < p.h_slices ? v[u].x : 0;
        sum.y += s + u < p.h_slices ? v[u].y : 0;
      }
    }
    const int lane = e & 31, token = piece.token + 16 * (e >> 8) + 8 * (e >> 5 & 1) + (lane >> 2), rank = piece.rank + 8 * (e >> 6 & 3) + 2 * (lane & 3);
    if (token < p.m && rank < p.ranks) *reinterpret_cast<u32*>(p.h + static_cast<long long>(token) * p.ranks + rank) = pack_bf16(sum.x, sum.y);
  }
}

// Tells that this block has come so far, and waits for the others. The counter is zero again when all have seen it.
__device__ __forceinline__ void all_blocks(u32* counter, int thread) {
  helpers_sync();
  if (thread == 0) {
    count_up(counter, 2 * gridDim.x - 1);
    wait_for_count(counter, gridDim.x);
    count_up_only(counter, 2 * gridDim.x - 1);
  }
  helpers_sync();
}

__device__ __forceinline__ void make_h(const MiddleParams& p, u32 memory, int thread) {
  add_pieces(p, memory, thread);
  all_blocks(p.h_counters, thread);
  round_h(p, thread);
  all_blocks(p.h_counters + 1, thread);
}

// What the rows from `first` on are made with. All loads are under way together.
__device__ __forceinline__ void lay_rows(const MiddleParams& p, int first, u32 target, int thread) {
#pragma unroll
  for (int i = thread; i < (BLOCK_ROWS + HELPERS - 1) / HELPERS * HELPERS; i += HELPERS) {
    const int r = min(first + i, p.n - 1);
    int segment = 0;
#pragma unroll
    for (int s = 0; s < 3; ++s) segment += s + 1 < p.segments && r >= p.segment_stop[s];
    float scale = 1;
#pragma unroll
    for (int q = 0; q < MAX_PARTS; ++q)
      if (q < p.parts && r >= p.part[q].row_start && r < p.part[q].row_stop && p.part[q].scale != 0) scale = p.part[q].scale;
    const float factor = __fdiv_rn(TILE_LIFT, row_divisor(p.side, segment)), bias = p.bias != nullptr ? from_bf16(p.bias[r]) : 0;
    if (i < BLOCK_ROWS)
      asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(target + 16 * i), "f"(factor), "f"(bias), "f"(__fdiv_rn(factor, scale)),
                   "f"(__fdiv_rn(scale, factor))
                   : "memory");
  }
}

// 32 ranks of B and h, zeros where there are none.
__device__ __forceinline__ void lay_adapter(const MiddleParams& p, const Part& part, int rank, int token, int first, u32 memory, int thread) {
#pragma unroll 4
  for (int i = thread; i < 4 * BLOCK_ROWS; i += HELPERS) {
    const int row = i >> 2, chunk = i & 3, r = first + row;
    const bool inside = r >= part.row_start && r < part.row_stop && rank + 8 * chunk < part.rank;
    copy_async_16_if(inside, memory + FEED_H + 64 * row + ((chunk ^ (row >> 1 & 3)) << 4),
                     part.b + (inside ? static_cast<long long>(r - part.row_start) * part.rank + rank + 8 * chunk : 0));
  }
#pragma unroll 4
  for (int i = thread; i < 4 * TOKENS; i += HELPERS) {
    const int row = i >> 2, chunk = i & 3;
    const bool inside = token + row < p.m && rank + 8 * chunk < part.rank;
    copy_async_16_if(inside, memory + 64 * row + ((chunk ^ (row >> 1 & 3)) << 4),
                     p.h + (inside ? static_cast<long long>(token + row) * p.ranks + part.rank_start + rank + 8 * chunk : 0));
  }
  copy_async_commit();
  copy_async_wait<0>();
  // For the matrix units, which read h from shared memory themselves.
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Calls `visit` with the place of every tile in a block's run of steps, until it says that it is enough.
template <class Visit>
__device__ __forceinline__ void each_tile(const MiddleParams& p, int start, int stop, const Visit& visit) {
#pragma unroll 1
  for (int step = start; step < stop;) {
    const Place at = place_of(p, step);
    if (visit(at)) return;
    step += min(p.units - at.unit, stop - step);
  }
}

// The helping warps' part of a block's run of steps. Tiles are visited in the order in which the others do.
__device__ __forceinline__ void help(const MiddleParams& p, int start, int stop, const Feed& feed, int thread) {
  int laid = 0, next = start, uses = 0;
  const auto lay_next = [&] {
    if (next >= stop) return;
    const Place at = place_of(p, next);
    if (laid > 1) barrier_wait(feed.rows_empty + 8 * (laid & 1), (laid >> 1 & 1) ^ 1);
    lay_rows(p, 16 * first_row_tile(at), feed.rows + (laid & 1) * (BLOCK_ROWS * 16), thread);
    arrive(feed.rows_full + 8 * (laid & 1));
    ++laid;
    next += min(p.units - at.unit, stop - next);
  };
  lay_next();
  lay_next();
  if (p.parts > 0) make_h(p, feed.memory, thread);
  each_tile(p, start, stop, [&](const Place& at) {
    const int first = 16 * first_row_tile(at);
#pragma unroll 1
    for (int q = 0; q < p.parts && at.unit == 0; ++q) {
      const Part& part = p.part[q];
      if (!touches(part, first)) continue;
#pragma unroll 1
      for (int rank = 0; rank < part.rank; rank += 32, ++uses) {
        if (uses > 0) barrier_wait(feed.adapter_empty, (uses & 1) ^ 1);
        lay_adapter(p, part, rank, at.token_tile * TOKENS, first, feed.memory, thread);
        arrive(feed.adapter_full);
      }
    }
    lay_next();
    return false;
  });
}

// A and B come into the L2 cache before the kernel in front has ended, where they stay coherent whatever ran before.
__device__ __forceinline__ void prefetch_adapters(const MiddleParams& p, int start, int stop, int thread) {
  if (p.parts == 0) return;
  if (blockIdx.x < p.h_pieces) {
    const Piece piece = piece_of(p, blockIdx.x);
    const int steps = piece.to - piece.from;
    for (int i = thread; i < PIECE_RANKS * steps; i += HELPERS) {
      const int row = piece.rank + i / steps, column = 64 * (piece.from + i % steps);
      if (row < p.ranks && column < p.k) prefetch(p.a + static_cast<long long>(row) * p.k + column);
    }
  }
  each_tile(p, start, stop, [&](const Place& at) {
    const int first = 16 * first_row_tile(at);
#pragma unroll 1
    for (int q = 0; q < p.parts && at.unit == 0; ++q) {
      const Part& part = p.part[q];
      for (int row = max(first, part.row_start) + thread; row < min(first + BLOCK_ROWS, part.row_stop); row += HELPERS)
        for (int rank = 0; rank < part.rank; rank += 64) prefetch(part.b + static_cast<long long>(row - part.row_start) * part.rank + rank);
    }
    return false;
  });
}
