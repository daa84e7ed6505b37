// B h of a middle kernel. The warps that multiply make pieces of h = x A^T before they begin: a few steps of x, with A in the place of the weights.
// Multiprocessors that the tiles would leave idle have blocks that do nothing else. Helping warps do the rest beside the products: they add up
// the slices of the inputs, round, and lay B and h of the coming tile where the others multiply them, and what its rows are made with. A
// counter tells when all pieces are there, another when all of h is. Blocks run at the same time, so that they may wait for one another.
//
// B and h are laid 32 ranks of a tile at a time, in PLACES places in turn: the n-th of all that a block needs goes to place n % PLACES, which is
// full, and empty again, for the n / PLACES-th time. Helpers lay as far ahead as places are empty.

constexpr int HELPERS = 96;  // threads
constexpr int HELPING_WARPS = HELPERS / 32;
constexpr int PIECE_RANKS = 32;
constexpr int PIECE_CHUNK = 32 * COLUMNS;  // sums of 8 ranks, as pairs of tokens: [COLUMNS][lane]
constexpr int PIECE = PIECE_RANKS / 8 * PIECE_CHUNK;
constexpr int PIECE_STEP_BYTES = X_BYTES + PIECE_RANKS * 128;
static_assert(PIECE_STEP_BYTES <= STAGE_BYTES);

// A place for 32 ranks of h and B of a tile: rows of 64 bytes, 16-byte chunks of row r at chunk ^ (r >> 1 & 3).
constexpr int FEED_H = 64 * TOKENS, FEED_BYTES = FEED_H + 64 * BLOCK_ROWS;

// Barriers in shared memory between the helping warps and the others.
struct Feed {
  u32 memory;                       // FEED_BYTES [PLACES]
  u32 rows;                         // Row [2][BLOCK_ROWS]
  u32 rows_full, rows_empty;        // two each: places of the rows of this tile and the next
  u32 adapter_full, adapter_empty;  // one for each place
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

// A piece of h: 32 ranks of all tokens of an output tile, and the slice of the inputs that is added here. A block has a few of them, or one,
// or none; the blocks of a cluster have the same tokens and inputs.
struct Piece {
  int token_tile, rank, from, to;
};

__device__ __forceinline__ Piece piece_of(const MiddleParams& p, int index) {
  const int group = divide(index, p.per_slices), first = (index - group * p.h_slices) * p.h_steps;
  const int rank_group = divide(group, p.per_token_tiles), token_tile = group - rank_group * p.token_tiles;
  return {token_tile, PIECE_RANKS * (rank_group * CLUSTER + block_rank()), first, min(first + p.h_steps, p.units)};
}

// The first of this cluster's pieces: the last clusters, which may have nothing else to do, come first.
__device__ __forceinline__ int first_piece() { return gridDim.x / CLUSTER - 1 - blockIdx.x / CLUSTER; }

__device__ __forceinline__ float2 load_pair(const float2* from) {
  float2 v;
  asm volatile("ld.global.cg.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(from) : "memory");
  return v;
}

// Adds up the slices of h, all blocks together, and rounds. A warp takes 8 pairs; four lanes have every fourth slice of one.
__device__ __forceinline__ void round_h(const MiddleParams& p, int thread) {
  constexpr int TOGETHER = 8;  // loads that are under way together
  constexpr int STRIDE = CLUSTER * PIECE;
  const int tasks = divide(p.h_pieces, p.per_slices) * (STRIDE / 8), lane = thread & 31, quarter = lane >> 3;
#pragma unroll 1
  for (int task = blockIdx.x * HELPING_WARPS + (thread >> 5); task < tasks; task += gridDim.x * HELPING_WARPS) {
    const int group = task / (STRIDE / 8), e = 8 * (task - group * (STRIDE / 8)) + (lane & 7);
    const float2* from = p.h_partials + static_cast<long long>(group) * p.h_slices * STRIDE + e;
    float2 sum = make_float2(0, 0);
#pragma unroll 1
    for (int s = quarter; s < p.h_slices; s += 4 * TOGETHER) {
      float2 v[TOGETHER];
#pragma unroll
      for (int u = 0; u < TOGETHER; ++u) v[u] = load_pair(from + static_cast<long long>(min(s + 4 * u, p.h_slices - 1)) * STRIDE);
#pragma unroll
      for (int u = 0; u < TOGETHER; ++u) {
        sum.x += s + 4 * u < p.h_slices ? v[u].x : 0;
        sum.y += s + 4 * u < p.h_slices ? v[u].y : 0;
      }
    }
    __syncwarp();
#pragma unroll
    for (int by = 8; by < 32; by *= 2) {
      sum.x += __shfl_xor_sync(0xFFFFFFFF, sum.x, by);
      sum.y += __shfl_xor_sync(0xFFFFFFFF, sum.y, by);
    }
    const int chunk = e / PIECE_CHUNK, l = e & 31, rank_group = divide(group, p.per_token_tiles);
    const int token = (group - rank_group * p.token_tiles) * TOKENS + 8 * (e / 32 % COLUMNS) + 2 * (l & 3);
    const int rank = PIECE_RANKS * CLUSTER * rank_group + 8 * chunk + (l >> 2);
    if (quarter != 0 || rank >= p.ranks) continue;
    u16* h = p.h + static_cast<long long>(token) * p.ranks + rank;
    if (token < p.m) h[0] = to_bf16(sum.x);
    if (token + 1 < p.m) h[p.ranks] = to_bf16(sum.y);
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

// The warps that make pieces have made this block's.
__device__ __forceinline__ void pieces_wait() { asm volatile("bar.sync 7, %0;" ::"n"(128 + HELPERS) : "memory"); }

__device__ __forceinline__ void make_h(const MiddleParams& p, int thread) {
  pieces_wait();
  all_blocks(p.h_counters, thread);
  round_h(p, thread);
  all_blocks(p.h_counters + 1, thread);
}

// What the rows from `first` on are made with.
__device__ __forceinline__ void lay_rows(const MiddleParams& p, int first, u32 target, int thread) {
#pragma unroll 1
  for (int i = thread; i < (BLOCK_ROWS + HELPERS - 1) / HELPERS * HELPERS; i += HELPERS) {
    const int r = min(first + i, p.n - 1);
    int segment = 0;
#pragma unroll
    for (int s = 0; s < 3; ++s) segment += s + 1 < p.segments && r >= p.segment_stop[s];
    float scale = 1;
#pragma unroll
    for (int q = 0; q < MAX_PARTS; ++q)
      if (q < p.parts && r >= p.part[q].row_start && r < p.part[q].row_stop && p.part[q].scale != 0) scale = p.part[q].scale;
    const float factor = __fdiv_rn(TILE_LIFT, row_divisor(p.side, r, segment)), bias = p.bias != nullptr ? from_bf16(p.bias[r]) : 0;
    if (i < BLOCK_ROWS)
      asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(target + 16 * i), "f"(factor), "f"(bias), "f"(__fdiv_rn(factor, scale)),
                   "f"(__fdiv_rn(scale, factor))
                   : "memory");
  }
}

// Lays a thread's chunks of 16 bytes of 32 columns: one of every LAID_TOGETHER-th of `rows` rows in shared memory, at the same chunk of each; row `at + i`
// of a matrix of rows `stride` apart, zeros where it has none. All but a few additions are made before the loop: written with a part's fields,
// its body loads them for every chunk anew, one behind the other.
constexpr int LAID_TOGETHER = HELPERS / 4;
static_assert(LAID_TOGETHER % 8 == 0);  // so far apart, rows have the same swizzle

__device__ __forceinline__ void lay_columns(const u16* matrix, int stride, int at, bool any, int matrix_rows, int rows, u32 memory, int thread) {
  const int row = thread >> 2, chunk = thread & 3;
  const u32 inside = any ? matrix_rows : 0;
  u32 r = at + row, to = memory + 64 * row + ((chunk ^ (row >> 1 & 3)) << 4);
  const u32 stop = memory + 64 * rows;
  const u16* from = matrix + static_cast<long long>(at + row) * stride;
#pragma unroll 1
  for (; to < stop; to += 64 * LAID_TOGETHER, r += LAID_TOGETHER, from += LAID_TOGETHER * stride)
    copy_async_16_if(r < inside, to, r < inside ? from : matrix);
}

// 32 ranks of B, zeros where there are none.
__device__ __forceinline__ void lay_b(const Part& part, int rank, int first, u32 memory, int thread) {
  const int column = rank + 8 * (thread & 3);
  lay_columns(part.b + column, part.rank, first - part.row_start, column < part.rank, part.row_stop - part.row_start, BLOCK_ROWS, memory + FEED_H, thread);
}

// 32 ranks of h.
__device__ __forceinline__ void lay_h(const MiddleParams& p, const Part& part, int rank, int token, u32 memory, int thread) {
  const int column = rank + 8 * (thread & 3);
  lay_columns(p.h + part.rank_start + column, p.ranks, token, column < part.rank, p.m, TOKENS, memory, thread);
}

// For the matrix units, which read h from shared memory themselves.
__device__ __forceinline__ void laid_visible() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Tells that what this thread has laid is there. With one place there is nothing to begin meanwhile; with several, the thread goes on, the copies tell
// when they have ended, and who multiplies calls `laid_visible`.
__device__ __forceinline__ void tell_laid(u32 barrier) {
  if constexpr (PLACES == 1) {
    copy_async_commit();
    copy_async_wait<0>();
    laid_visible();
    arrive(barrier);
  } else {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
  }
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

// Calls `visit` with all that has a place: each 32 ranks of the parts that a tile begins with, in the order in which they are added.
template <class Visit>
__device__ __forceinline__ void each_use(const MiddleParams& p, const Place& at, const Visit& visit) {
  const int first = 16 * first_row_tile(at);
#pragma unroll 1
  for (int q = 0; q < p.parts && at.unit == 0; ++q) {
    const Part& part = p.part[q];
    if (!touches(part, first)) continue;
#pragma unroll 1
    for (int rank = 0; rank < part.rank; rank += PIECE_RANKS) visit(part, rank, first);
  }
}

// The helping warps' part of a block's run of steps. Tiles are visited in the order in which the others do.
__device__ __forceinline__ void help(const MiddleParams& p, int start, int stop, const Feed& feed, int thread) {
  int laid = 0, next = start;
  u32 uses = 0;
  const auto lay_next = [&] {
    if (next >= stop) return;
    const Place at = place_of(p, next);
    if (laid > 1) barrier_wait(feed.rows_empty + 8 * (laid & 1), (laid >> 1 & 1) ^ 1);
    lay_rows(p, 16 * first_row_tile(at), feed.rows + (laid & 1) * (BLOCK_ROWS * 16), thread);
    arrive(feed.rows_full + 8 * (laid & 1));
    ++laid;
    next += min(p.units - at.unit, stop - next);
  };
#pragma unroll 1
  for (int i = 0; i < 2; ++i) lay_next();
  if (p.parts > 0) {
    // B of the first places does not wait for h.
    u32 ahead = 0;
    each_tile(p, start, stop, [&](const Place& at) {
      each_use(p, at, [&](const Part& part, int rank, int first) {
        if (ahead < PLACES) lay_b(part, rank, first, feed.memory + ahead++ * FEED_BYTES, thread);
      });
      return ahead >= PLACES;
    });
    make_h(p, thread);
  }
  each_tile(p, start, stop, [&](const Place& at) {
    each_use(p, at, [&](const Part& part, int rank, int first) {
      const u32 place = uses % PLACES, memory = feed.memory + place * FEED_BYTES;
      if (uses >= PLACES) {
        barrier_wait(feed.adapter_empty + 8 * place, uses / PLACES + 1 & 1);
        lay_b(part, rank, first, memory, thread);
      }
      lay_h(p, part, rank, at.token_tile * TOKENS, memory, thread);
      tell_laid(feed.adapter_full + 8 * place);
      ++uses;
    });
    lay_next();
    return false;
  });
  // No thread ends before its copies.
  if constexpr (PLACES > 1) {
    copy_async_commit();
    copy_async_wait<0>();
  }
}

// A and B come into the L2 cache before the kernel in front has ended, where they stay coherent whatever ran before.
__device__ __forceinline__ void prefetch_adapters(const MiddleParams& p, int start, int stop, int thread) {
  if (p.parts == 0) return;
  if (first_piece() < p.h_pieces) {
    const Piece piece = piece_of(p, first_piece());
    const int row = piece.rank + thread % PIECE_RANKS;
#pragma unroll 1
    for (int step = piece.from + thread / PIECE_RANKS; step < piece.to && row < p.ranks; step += HELPERS / PIECE_RANKS)
      prefetch(p.a + static_cast<long long>(row) * p.k + 64 * step);
  }
  each_tile(p, start, stop, [&](const Place& at) {
    const int first = 16 * first_row_tile(at);
#pragma unroll 1
    for (int q = 0; q < p.parts && at.unit == 0; ++q) {
      const Part& part = p.part[q];
      const int low = max(first, part.row_start), numbers = (min(first + BLOCK_ROWS, part.row_stop) - low) * part.rank;
      const u16* from = part.b + static_cast<long long>(low - part.row_start) * part.rank;
      // 64 bytes each: of a line of 128, two.
#pragma unroll 1
      for (int i = 32 * thread; i < numbers; i += 32 * HELPERS) prefetch(from + i);
    }
    return false;
  });
}
