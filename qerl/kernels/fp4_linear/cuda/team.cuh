// Tiles that several blocks have parts of: their sums pass through global memory, and are added in the order of the inputs.
//
// Few sums of a block (WATCHED) pass without a fence or a counter: the places hold MISSING, a part is written word by word in no order, and the one
// thread that adds it loads all of it until nothing is missing, and puts MISSING back.

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

// For a place that is watched: the sums of a NaN must not have the bits of no number.
__device__ __forceinline__ float a_number(float v) { return __uint_as_float(min(__float_as_uint(v), MISSING - 1)); }

// MISSING, which is the largest there is, if a word of `v` is.
__device__ __forceinline__ u32 largest_bits(float4 v) {
  return max(max(__float_as_uint(v.x), __float_as_uint(v.y)), max(__float_as_uint(v.z), __float_as_uint(v.w)));
}

// Takes columns from `c` on, none from `to` on, of members from `j` on, zeros for those that there are not: loads what is missing until nothing is, and
// leaves MISSING in its place. No other thread reads that, and the next kernel that writes it waits for the end of this one. The lanes of a warp go
// on together.
template <int MEMBERS, int CHUNK>
__device__ __forceinline__ void take_parts(const MiddleParams& p, const Team& team, int j, int c, int to, int thread, float4 (&parts)[MEMBERS][TILES][CHUNK]) {
  const float none = __uint_as_float(MISSING);
  const int at = c * CONSUMERS + thread, members = team.members - j, columns = to - c;
  // From the second on, members are equally far apart.
  float4* const first = partial_of(p, team, j) + at;
  float4* const others = partial_of(p, team, j + 1) - 2 * CLUSTER * PARTIAL + at;
  const auto place = [&](int u, int i, int e) { return (u == 0 ? first : others + u * (2 * CLUSTER * PARTIAL)) + (i * COLUMNS + e) * CONSUMERS; };
#pragma unroll
  for (int u = 0; u < MEMBERS; ++u)
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int e = 0; e < CHUNK; ++e) {
        const float v = __uint_as_float(u < members && e < columns ? MISSING : 0);
        parts[u][i][e] = make_float4(v, v, v, v);
      }
  u32 largest;
  do {
    largest = 0;
#pragma unroll
    for (int u = 0; u < MEMBERS; ++u)
#pragma unroll
      for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int e = 0; e < CHUNK; ++e) {
          float4& v = parts[u][i][e];
          asm volatile("{\n.reg .pred missing;\nsetp.eq.u32 missing, %5, %6;\n@missing ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];\n}"
                       : "+f"(v.x), "+f"(v.y), "+f"(v.z), "+f"(v.w)
                       : "l"(place(u, i, e)), "r"(largest_bits(v)), "n"(MISSING)
                       : "memory");
        }
#pragma unroll
    for (int u = 0; u < MEMBERS; ++u)
#pragma unroll
      for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int e = 0; e < CHUNK; ++e) largest = max(largest, largest_bits(parts[u][i][e]));
  } while (__any_sync(0xFFFFFFFF, largest == MISSING));
#pragma unroll
  for (int u = 0; u < MEMBERS; ++u)
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int e = 0; e < CHUNK; ++e)
        if (u < members && e < columns) store_watched_16(place(u, i, e), make_float4(none, none, none, none));
}

// Sums columns [from, to) of 8 tokens of a tile over its members, in order, and finishes them.
__device__ __forceinline__ void finish_columns(const MiddleParams& p, const Team& team, const Row (&rows)[2 * TILES], int from, int to, int row_tile,
                                               int token, u32 staging, int thread) {
  // Loads of so many columns and members are under way together.
  constexpr int CHUNK = TILES > 1 || COLUMNS < 8 ? 2 : COLUMNS < 32 ? 4 : 8, MEMBERS = !WATCHED || COLUMNS >= 8 ? 4 : GROUPS <= 2 ? 6 : 2;
#pragma unroll 1
  for (int c = from; c < to; c += CHUNK) {
    float v[TILES][4 * CHUNK] = {};
#pragma unroll 1
    for (int j = 0; j < team.members; j += MEMBERS) {
      float4 parts[MEMBERS][TILES][CHUNK];
      if constexpr (WATCHED) take_parts(p, team, j, c, to, thread, parts);
#pragma unroll
      for (int u = 0; u < MEMBERS && !WATCHED; ++u) {
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
  const bool alone = team.finishers == 1;
  if constexpr (WATCHED) {
    if (!(alone && me == 0)) {
      float4* target = partial_of(p, team, me) + thread;
#pragma unroll
      for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
          store_watched_16(target + (i * COLUMNS + c) * CONSUMERS, make_float4(a_number(d[i][4 * c]), a_number(d[i][4 * c + 1]), a_number(d[i][4 * c + 2]), a_number(d[i][4 * c + 3])));
    }
    if (me >= team.finishers) return false;
    if (!alone) {
      finish_columns(p, team, rows, share(me, team.finishers, COLUMNS), share(me + 1, team.finishers, COLUMNS), row_tile, token, staging, thread);
      return false;
    }
#pragma unroll 1
    for (int j = 1; j < team.members; ++j) {
      float4 parts[1][TILES][COLUMNS];
      take_parts(p, team, j, 0, COLUMNS, thread, parts);
#pragma unroll
      for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          d[i][4 * c] += parts[0][i][c].x;
          d[i][4 * c + 1] += parts[0][i][c].y;
          d[i][4 * c + 2] += parts[0][i][c].z;
          d[i][4 * c + 3] += parts[0][i][c].w;
        }
    }
    return true;
  }
  const bool speaks = (thread & 127) == 0;
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
