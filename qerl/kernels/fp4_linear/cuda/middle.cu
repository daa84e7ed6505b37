// y = (x V^T) / G + bias + scale * B h for tens to hundreds of rows of x, on sm_90a: V = q * s is expanded in registers once for TOKENS
// rows and enters wgmma as its A operand; x, the B operand, passes through shared memory.
//
// A block of two warpgroups makes 128 output rows x TOKENS tokens over a slice of the inputs; a cluster of CLUSTER blocks has all
// slices. In each step of 64 inputs a warp expands the tile of its 16 output rows while the products of the step before
// are under way. At the end the partial sums are exchanged inside the cluster: every block adds, in order, those of its
// share of the tokens, and finishes them with bias and adapters.
//
// Compile-time: TOKENS (32, 64 or 128), STAGES (steps in the ring), CLUSTER (divides TOKENS / 8), RESIDENT (blocks of a multiprocessor).

constexpr int THREADS = 256;
constexpr int COLUMNS = TOKENS / 8;
constexpr int MINE = COLUMNS / CLUSTER;
constexpr int X_BYTES = TOKENS * 128;
constexpr int STAGE_BYTES = X_BYTES + 8 * TILE_BYTES + 512;  // a multiple of 1024
static_assert(STAGE_BYTES % 1024 == 0, "the swizzle of 128 bytes repeats every 1024");

struct MiddleParams {
  const u8* tiles;
  const u16* x;
  void* out;  // bfloat16 or float32 [m, n]
  const u16* bias;
  const float* global_scale;
  const u16* h;  // bfloat16 [m, ranks]
  int m, n, k, units, row_tiles, token_tiles, ranks;
  int segments, parts, float_out;
  u32 scale_base;  // 0x70007000
  int unused;
  int segment_stop[4];
  Part part[MAX_PARTS];
};

// The B operand: [TOKENS][64] bfloat16 rows of 128 bytes, 16-byte chunks of row r at chunk ^ (r & 7), at a multiple of 1024.
__device__ __forceinline__ u64 operand(u32 address) {
  return static_cast<u64>((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

__device__ __forceinline__ void copy_async_16_or_zero(u32 shared, const void* global, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(inside ? 16 : 0) : "memory");
}

struct Step {
  const u8* tile;        // this lane's part of the next tile of this warp's rows
  const u16* x;          // this thread's chunk of the first of its rows of x
  int column, row;       // of that chunk
  bool rows_inside;      // the warp has a row tile
};

__device__ __forceinline__ void load_weights(Step& at, u32 stage, int warp, int lane) {
  const u32 target = stage + X_BYTES + warp * TILE_BYTES + 16 * lane;
  if (at.rows_inside) {
    copy_async_16(target, at.tile);
    if (lane < 4) copy_async_16(target + TILE_CODES, at.tile + TILE_CODES);
  }
  at.tile += TILE_BYTES;
}

__device__ __forceinline__ void load_x(const MiddleParams& p, Step& at, u32 stage) {
  const int chunk = threadIdx.x & 7, first = threadIdx.x >> 3;
#pragma unroll
  for (int i = 0; i < TOKENS / 32; ++i) {
    const int row = first + 32 * i;
    const bool inside = at.row + 32 * i < p.m && at.column < p.k;
    copy_async_16_or_zero(stage + row * 128 + ((chunk ^ (row & 7)) << 4), inside ? at.x + 32ll * i * p.k : p.x, inside);
  }
  at.x += 64;
  at.column += 64;
}

__device__ __forceinline__ void expand_tile(u32 stage, int warp, int lane, bool inside, u32 scale_base, u32 (&a)[4][4]) {
  const u32 unit = stage + X_BYTES + warp * TILE_BYTES;
  uint4 codes = load_shared_16(unit + 16 * lane);
  if (!inside) codes = make_uint4(0, 0, 0, 0);
  const uint2 scales = load_shared_8(unit + TILE_CODES + 8 * (lane >> 2));
  const uint2 low = expand_scales(inside ? scales.x : 0, scale_base), high = expand_scales(inside ? scales.y : 0, scale_base);
  dequantize_step(codes.x, step_scale<0>(low), step_scale<0>(high), a[0]);
  dequantize_step(codes.y, step_scale<1>(low), step_scale<1>(high), a[1]);
  dequantize_step(codes.z, step_scale<2>(low), step_scale<2>(high), a[2]);
  dequantize_step(codes.w, step_scale<3>(low), step_scale<3>(high), a[3]);
}

__device__ __forceinline__ void store(const MiddleParams& p, long long place, float value) {
  if (p.float_out) {
    static_cast<float*>(p.out)[place] = value;
  } else {
    static_cast<u16*>(p.out)[place] = to_bf16(value);
  }
}

// bias + scale * B h of 16 rows (row is the lane's first) and 8 tokens from `token`.
__device__ __forceinline__ float4 adapters(const MiddleParams& p, int row, int token, int g, int t) {
  float4 out = make_float4(0, 0, 0, 0);
  if (p.bias != nullptr) {
    out.x = out.y = row < p.n ? from_bf16(p.bias[row]) : 0;
    out.z = out.w = row + 8 < p.n ? from_bf16(p.bias[row + 8]) : 0;
  }
  const int base = row - g;
  for (int q = 0; q < p.parts; ++q) {
    const Part& part = p.part[q];
    if (part.row_start >= base + 16 || part.row_stop <= base) continue;
    const bool low_inside = row >= part.row_start && row < part.row_stop;
    const bool high_inside = row + 8 >= part.row_start && row + 8 < part.row_stop;
    const u16* b_low = part.b + static_cast<long long>(row - part.row_start) * part.rank;
    const u16* b_high = b_low + 8ll * part.rank;
    const u16* h = p.h + static_cast<long long>(token + g) * p.ranks + part.rank_start;
    const bool token_inside = token + g < p.m;
    float c[4] = {};
#pragma unroll 2
    for (int k = 2 * t; k < part.rank + 2 * t; k += 16) {
      const bool near = k < part.rank, far = k + 8 < part.rank;
      u32 a[4];
      a[0] = low_inside && near ? *reinterpret_cast<const u32*>(b_low + k) : 0;
      a[1] = high_inside && near ? *reinterpret_cast<const u32*>(b_high + k) : 0;
      a[2] = low_inside && far ? *reinterpret_cast<const u32*>(b_low + k + 8) : 0;
      a[3] = high_inside && far ? *reinterpret_cast<const u32*>(b_high + k + 8) : 0;
      const u32 b0 = token_inside && near ? *reinterpret_cast<const u32*>(h + k) : 0;
      const u32 b1 = token_inside && far ? *reinterpret_cast<const u32*>(h + k + 8) : 0;
      mma_m16n8k16(c, a, b0, b1);
    }
    out.x += part.scale * c[0];
    out.y += part.scale * c[1];
    out.z += part.scale * c[2];
    out.w += part.scale * c[3];
  }
  return out;
}

__device__ __forceinline__ float row_factor(const MiddleParams& p, int row) {
  int segment = 0;
  while (segment + 1 < p.segments && row >= p.segment_stop[segment]) ++segment;
  return __fdiv_rn(TILE_LIFT, p.global_scale[segment]);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) middle(const __grid_constant__ MiddleParams p) {
  extern __shared__ __align__(1024) u8 memory[];
  __shared__ __align__(8) u64 arrived;
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const int rank = block_rank(), job = blockIdx.x / CLUSTER;
  const int token_tile = job % p.token_tiles, block = job / p.token_tiles;
  const int first_unit = share(rank, CLUSTER, p.units), steps = share(rank + 1, CLUSTER, p.units) - first_unit;
  const u32 ring = (smem_address(memory) + 1023) & ~1023u;
  const int row_tile = 8 * block + warp;

  Step at;
  at.rows_inside = row_tile < p.row_tiles;
  at.tile = p.tiles + (static_cast<long long>(row_tile) * p.units + first_unit) * TILE_BYTES + 16 * lane;
  at.row = token_tile * TOKENS + (thread >> 3);
  at.column = first_unit * 64 + (thread & 7) * 8;
  at.x = p.x + static_cast<long long>(at.row) * p.k + at.column;

  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#if CLUSTER > 1
  if (thread == 0) {
    barrier_init(&arrived, 1);
    barrier_inits_visible();
    barrier_expect(&arrived, CLUSTER * MINE * THREADS * 16);
  }
#endif
  // Weights never change, so their copies need not wait for the kernel in front of this one.
#pragma unroll 1
  for (int i = 0; i < STAGES - 1; ++i)
    if (i < steps) load_weights(at, ring + i * STAGE_BYTES, warp, lane);
  asm volatile("griddepcontrol.wait;" ::: "memory");
#pragma unroll 1
  for (int i = 0; i < STAGES - 1; ++i) {
    if (i < steps) load_x(p, at, ring + i * STAGE_BYTES);
    copy_async_commit();
  }

  float d[TOKENS / 2];
#pragma unroll
  for (int i = 0; i < TOKENS / 2; ++i) d[i] = 0;
  u32 a[2][4][4];
  u32 place = ring, loading = ring + (STAGES - 1) * STAGE_BYTES;
  const u32 end = ring + STAGES * STAGE_BYTES;

  copy_async_wait<STAGES - 2>();
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  expand_tile(place, warp, lane, at.rows_inside, p.scale_base, a[0]);

  auto step = [&](int index, u32(&now)[4][4], u32(&next)[4][4]) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int j = 0; j < 4; ++j) multiply(d, now[j], operand(place + 32 * j));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    place = place + STAGE_BYTES == end ? ring : place + STAGE_BYTES;
    if (index + 1 < steps) {
      // The next step has landed, and every warp is past the products that read the stage which is loaded next.
      copy_async_wait<STAGES - 3>();
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncthreads();
      if (index + STAGES - 1 < steps) {
        load_weights(at, loading, warp, lane);
        load_x(p, at, loading);
      }
      copy_async_commit();
      loading = loading + STAGE_BYTES == end ? ring : loading + STAGE_BYTES;
      expand_tile(place, warp, lane, at.rows_inside, p.scale_base, next);
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  };
#pragma unroll 1
  for (int index = 0; index < steps; index += 2) {
    step(index, a[0], a[1]);
    if (index + 1 < steps) step(index + 1, a[1], a[0]);
  }
  // Nothing that reads the sums may move in front of the wait.
#pragma unroll
  for (int i = 0; i < TOKENS / 2; ++i) asm volatile("" : "+f"(d[i])::"memory");

  const int g = lane >> 2, t = lane & 3, row = 16 * row_tile + g;
  const int first_column = rank * MINE;
#if CLUSTER > 1
  // All copies have landed and, past the barrier, all products have read the ring: it takes the partial sums.
  copy_async_wait<0>();
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#pragma unroll
  for (int column = 0; column < COLUMNS; ++column) {
    const int owner = column / MINE;
    const u32 place = ring + ((rank * MINE + column % MINE) * THREADS + thread) * 16;
    u32 address, count;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(place), "r"(owner));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(count) : "r"(smem_address(&arrived)), "r"(owner));
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(address),
                 "f"(d[4 * column]), "f"(d[4 * column + 1]), "f"(d[4 * column + 2]), "f"(d[4 * column + 3]), "r"(count)
                 : "memory");
  }
  const float low = row_factor(p, row), high = row_factor(p, row + 8);
  barrier_wait(smem_address(&arrived), 0);
#else
  const float low = row_factor(p, row), high = row_factor(p, row + 8);
#endif
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
    const int token = token_tile * TOKENS + 8 * (first_column + i), column = token + 2 * t;
    if (token >= p.m) break;
#if CLUSTER > 1
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int source = 0; source < CLUSTER; ++source) {
      const uint4 v = load_shared_16(ring + ((source * MINE + i) * THREADS + thread) * 16);
      sum.x += __uint_as_float(v.x);
      sum.y += __uint_as_float(v.y);
      sum.z += __uint_as_float(v.z);
      sum.w += __uint_as_float(v.w);
    }
#else
    const float4 sum = make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]);
#endif
    const float4 extra = adapters(p, row, token, g, t);
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
