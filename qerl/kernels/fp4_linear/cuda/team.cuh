// Tiles that several blocks have parts of: their sums pass through global memory, and are added in the order of the inputs.

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
  const int blocks = p.clusters, start = tile * p.units, stop = start + p.units;
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
  constexpr int CHUNK = TILES > 1 || COLUMNS < 8 ? 2 : COLUMNS < 32 ? 4 : 8, MEMBERS = 4;  // loads of so many columns and members are under way together
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
    finish<CHUNK>(p, rows, v, row_tile, token + 8 * c, min(p.m, token + 8 * to), staging, thread);
  }
}

// Sums a tile that has several members. True if `d` now holds the sums of the whole tile, which the caller finishes. Warpgroups have
// rows of their own and do not wait for one another.
__device__ __forceinline__ bool share_tile(const MiddleParams& p, float (&d)[TILES][TOKENS / 2], const Row (&rows)[2 * TILES], int tile, int row_tile,
                                           int token, u32 staging, int thread) {
  const Team team = team_of(p, tile);
  const int me = blockIdx.x / CLUSTER - team.first;
  const bool alone = team.finishers == 1, speaks = (thread & 127) == 0;
  const u32 arrivals = alone ? team.members - 1 : team.members, last = arrivals + team.finishers - 1;
  u32* counter = p.counters + (tile * CLUSTER + block_rank()) * GROUPS + (thread >> 7);
  if (!(alone && me == 0)) {
    float4* target = partial_of(p, team, me) + thread;
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c)
        target[(i * COLUMNS + c) * CONSUMERS] = make_float4(d[i][4 * c], d[i][4 * c + 1], d[i][4 * c + 2], d[i][4 * c + 3]);
    group_sync(thread);
    if (speaks) count_up(counter, last);
  }
  if (me >= team.finishers) return false;
  if (speaks) wait_for_count(counter, arrivals);
  group_sync(thread);
  if (speaks) count_up_only(counter, last);
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
