// h = x A^T, rounded to bfloat16 once, for at most some hundreds of rows of x; on sm_90. A cluster makes 16 ranks x 8 * NT tokens; its
// warps split the inputs and are added up in the order of the inputs.
//
// Inputs are taken in an order of their own, the same for A and x: a lane's 16 bytes are its share of two k16 steps.
//
// Compile-time: NT (columns of 8 tokens), CLUSTER.

constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int FRAGMENTS = 32 * NT;

struct ShrinkParams {
  const u16* x;
  const u16* a;
  u16* h;
  int m, k, ranks, rank_groups, vectors;
};

template <bool VECTORS>
__device__ __forceinline__ uint4 load_8(const u16* row, int column, int columns, bool inside) {
  if (!inside || column >= columns) return make_uint4(0, 0, 0, 0);
  return VECTORS ? *reinterpret_cast<const uint4*>(row + column) : load_row_8(row, column, columns, false);
}

// Adds the products of chunks [from, to) of 32 inputs; `a` and `x` are the lane's first rows.
template <bool VECTORS>
__device__ __forceinline__ void accumulate(const ShrinkParams& p, const u16* a, const u16* x, int from, int to, int first, int token, int lane,
                                           float (&c)[NT][4]) {
  constexpr int STEPS = VECTORS ? 2 : 1;  // loads of so many chunks are under way together
  const int g = lane >> 2, t = lane & 3;
#pragma unroll 1
  for (int chunk = from; chunk < to; chunk += STEPS) {
    uint4 rows[STEPS][2], columns[STEPS][NT];
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const int k = 32 * (chunk + s) + 8 * t;
      const bool mine = chunk + s < to;
#pragma unroll
      for (int i = 0; i < 2; ++i) rows[s][i] = load_8<VECTORS>(a + 8ll * i * p.k, k, p.k, mine && first + g + 8 * i < p.ranks);
#pragma unroll
      for (int n = 0; n < NT; ++n) columns[s][n] = load_8<VECTORS>(x + 8ll * n * p.k, k, p.k, mine && token + 8 * n + g < p.m);
    }
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const u32 near[4] = {rows[s][0].x, rows[s][1].x, rows[s][0].y, rows[s][1].y};
      const u32 far[4] = {rows[s][0].z, rows[s][1].z, rows[s][0].w, rows[s][1].w};
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        mma_m16n8k16(c[n], near, columns[s][n].x, columns[s][n].y);
        mma_m16n8k16(c[n], far, columns[s][n].z, columns[s][n].w);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) shrink(const __grid_constant__ ShrinkParams p) {
  __shared__ float4 local[WARPS][FRAGMENTS];
  __shared__ float4 gathered[CLUSTER][FRAGMENTS];
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, g = lane >> 2, t = lane & 3;
  const int rank = block_rank(), job = blockIdx.x / CLUSTER;
  const int first = 16 * (job % p.rank_groups), token = 8 * NT * (job / p.rank_groups);
  const int chunks = (p.k + 31) / 32;
  const int from = share(rank * WARPS + warp, CLUSTER * WARPS, chunks), to = share(rank * WARPS + warp + 1, CLUSTER * WARPS, chunks);
  dependents_may_start();
  const u16* a = p.a + static_cast<long long>(first + g) * p.k;
  const u16* x = p.x + static_cast<long long>(token + g) * p.k;
  // A comes into the L2 cache meanwhile, where it stays coherent whatever ran before.
  for (int i = lane; i < 8 * (to - from); i += 32) {
    const int row = i & 15, column = 32 * (from + 2 * (i >> 4));
    if (first + row < p.ranks && column < p.k)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(p.a + static_cast<long long>(first + row) * p.k + column));
  }
  dependencies_wait();
  float c[NT][4] = {};
  if (p.vectors) {
    accumulate<true>(p, a, x, from, to, first, token, lane, c);
  } else {
    accumulate<false>(p, a, x, from, to, first, token, lane, c);
  }
#pragma unroll
  for (int n = 0; n < NT; ++n) local[warp][32 * n + lane] = make_float4(c[n][0], c[n][1], c[n][2], c[n][3]);
  // No block sends before all have started; the shared memory of one that has not is not there yet.
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  __syncthreads();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  if (thread < FRAGMENTS) {
    float4 sum = local[0][thread];
#pragma unroll
    for (int i = 1; i < WARPS; ++i) add(sum, local[i][thread]);
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(address) : "r"(smem_address(&gathered[rank][thread])));
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(sum.x), "f"(sum.y), "f"(sum.z), "f"(sum.w) : "memory");
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  if (rank != 0 || thread >= FRAGMENTS) return;
  float4 sum = gathered[0][thread];
#pragma unroll
  for (int i = 1; i < CLUSTER; ++i) add(sum, gathered[i][thread]);
  const int column = token + 8 * (thread >> 5) + 2 * t, row = first + g;
  const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int m = column + (e & 1), r = row + 8 * (e >> 1);
    if (m < p.m && r < p.ranks) p.h[static_cast<long long>(m) * p.ranks + r] = to_bf16(values[e]);
  }
}
