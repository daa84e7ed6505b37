// x on its way into shared memory: as it lies in memory, or made there of what the layers in front have written, without a launch of its own.
//
// INPUT_GATED    x = silu(gate) * up, both rounded as the activation's kernel rounds
// INPUT_NORMED   stream = x + residual; x = stream / sqrt(mean(stream^2) + eps) * (scale + z). Every block makes its slice of the inputs, the
//                blocks of a cluster tell each other their sums of squares, and the first cluster writes the stream.

constexpr int INPUT_PLAIN = 0, INPUT_GATED = 1, INPUT_NORMED = 2;
// Chunks of 8 inputs whose loads a thread has under way together.
constexpr int AT_ONCE = INPUT == INPUT_NORMED && CLUSTER == 8 ? NT : 2;

__device__ __forceinline__ uint4 load_x_16(const u16* place) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(place) : "memory");
  return v;
}

__device__ __forceinline__ void unpack_bf16(u32 pair, float& low, float& high) {
  low = __uint_as_float(pair << 16);
  high = __uint_as_float(pair & 0xFFFF0000u);
}

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// A sum of two pairs, rounded once.
__device__ __forceinline__ u32 add_pairs(u32 a, u32 b) {
  float a_low, a_high, b_low, b_high;
  unpack_bf16(a, a_low, a_high);
  unpack_bf16(b, b_low, b_high);
  return pack_bf16(__fadd_rn(a_low, b_low), __fadd_rn(a_high, b_high));
}

__device__ __forceinline__ float square_sum(u32 pair, float sum) {
  float low, high;
  unpack_bf16(pair, low, high);
  return fmaf(high, high, fmaf(low, low, sum));
}

__device__ __forceinline__ u32 gate_pair(u32 gate, u32 up) {
  float g_low, g_high, u_low, u_high;
  unpack_bf16(gate, g_low, g_high);
  unpack_bf16(up, u_low, u_high);
  const u32 silu = pack_bf16(__fdividef(g_low, 1.0f + __expf(-g_low)), __fdividef(g_high, 1.0f + __expf(-g_high)));
  float s_low, s_high;
  unpack_bf16(silu, s_low, s_high);
  return pack_bf16(__fmul_rn(s_low, u_low), __fmul_rn(s_high, u_high));
}

__device__ __forceinline__ u32 norm_pair(u32 pair, float r, float low_scale, float high_scale) {
  float low, high;
  unpack_bf16(pair, low, high);
  return pack_bf16(__fmul_rn(__fmul_rn(low, r), low_scale), __fmul_rn(__fmul_rn(high, r), high_scale));
}

// p.x is [m, 2 k]: gate and up. All threads of the block.
__device__ __forceinline__ void load_gated(const DecodeParams& p, const Shared& s, const Work& w, int thread) {
  const int chunks = w.slice_units * 8, total = p.m * chunks;
#pragma unroll 1
  for (int start = thread; start < total; start += AT_ONCE * THREADS) {
    uint4 gate[AT_ONCE], up[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      // Beyond the end the last chunk is read again: a branch would keep the loads apart.
      const int i = min(start + j * THREADS, total - 1), row = i / chunks;
      const int column = min(w.first_unit * 64 + (i - row * chunks) * 8, p.k - 8);
      const u16* source = p.x + 2ll * row * p.k + column;
      gate[j] = load_x_16(source);
      up[j] = load_x_16(source + p.k);
    }
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      const int i = start + j * THREADS;
      if (i >= total) break;
      const int row = i / chunks, chunk = i - row * chunks;
      uint4 v = make_uint4(0, 0, 0, 0);
      if (w.first_unit * 64 + chunk * 8 < p.k) {
        v = make_uint4(gate_pair(gate[j].x, up[j].x), gate_pair(gate[j].y, up[j].y), gate_pair(gate[j].z, up[j].z), gate_pair(gate[j].w, up[j].w));
      }
      *reinterpret_cast<uint4*>(s.x + row * s.stride + chunk * 8) = v;
    }
  }
}

// Brings what `load_normed` reads at its end, and what the kernel in front does not write, into the first-level cache.
__device__ void warm_norm(const DecodeParams& p, const Work& w, int thread) {
  const int first = w.first_unit * 64, last = min(first + w.slice_units * 64, p.k);
  for (int i = first + 32 * thread; i < last; i += 32 * LORA_THREADS) {
    warm(p.norm + i);
    if (p.z != nullptr && p.z_stride == 0) warm(p.z + i);
  }
}

// The sums of squares that this block knows of, one a row, in the memory of every block of the cluster: [CLUSTER][COLUMNS] there.
__device__ __forceinline__ void tell_sums(float* shares, int rank, int row, int to, float sum) {
#if CLUSTER > 1
  u32 address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem_address(shares + rank * COLUMNS + row)), "r"(to));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(sum) : "memory");
#else
  shares[rank * COLUMNS + row] = sum;
#endif
}

// All threads of the block. s.local is free until h is made.
__device__ __forceinline__ void load_normed(const DecodeParams& p, const Shared& s, const Work& w, int cluster, int thread) {
  const int lane = thread & 31, chunks = w.slice_units * 8, segments = (chunks + 31) / 32, items = p.m * segments;
  constexpr int ALL_WARPS = THREADS / 32;
  float* shares = reinterpret_cast<float*>(s.local);
  float* sums = shares + CLUSTER * COLUMNS;  // [m][segments]
#pragma unroll 1
  for (int start = thread >> 5; start < items; start += AT_ONCE * ALL_WARPS) {
    uint4 v[AT_ONCE], add[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      const int item = min(start + j * ALL_WARPS, items - 1), row = item / segments;
      const int column = min(w.first_unit * 64 + ((item - row * segments) * 32 + lane) * 8, p.k - 8);
      const long long place = static_cast<long long>(row) * p.k + column;
      v[j] = load_x_16(p.x + place);
      add[j] = p.residual == nullptr ? make_uint4(0, 0, 0, 0) : load_x_16(p.residual + place);
    }
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      const int item = start + j * ALL_WARPS;
      if (item >= items) break;
      const int row = item / segments, chunk = (item - row * segments) * 32 + lane, column = w.first_unit * 64 + chunk * 8;
      float sum = 0;
      if (chunk < chunks) {
        if (p.residual != nullptr) {
          v[j] = make_uint4(add_pairs(v[j].x, add[j].x), add_pairs(v[j].y, add[j].y), add_pairs(v[j].z, add[j].z), add_pairs(v[j].w, add[j].w));
        }
        if (column >= p.k) v[j] = make_uint4(0, 0, 0, 0);
        *reinterpret_cast<uint4*>(s.x + row * s.stride + chunk * 8) = v[j];
        if (cluster == 0 && p.stream != nullptr && column < p.k) {
          *reinterpret_cast<uint4*>(p.stream + static_cast<long long>(row) * p.k + column) = v[j];
        }
        sum = square_sum(v[j].w, square_sum(v[j].z, square_sum(v[j].y, square_sum(v[j].x, 0))));
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
      if (lane == 0) sums[item] = sum;
    }
  }
  __syncthreads();
  for (int i = thread; i < CLUSTER * p.m; i += THREADS) {
    const int to = i / p.m, row = i - to * p.m;
    float sum = 0;
    for (int segment = 0; segment < segments; ++segment) sum += sums[row * segments + segment];
    tell_sums(shares, w.rank, row, to, sum);
  }
  cluster_sync();
  for (int item = thread >> 5; item < items; item += ALL_WARPS) {
    const int row = item / segments, chunk = (item - row * segments) * 32 + lane, column = w.first_unit * 64 + chunk * 8;
    if (chunk >= chunks || column >= p.k) continue;
    float sum = 0;
#pragma unroll
    for (int rank = 0; rank < CLUSTER; ++rank) sum += shares[rank * COLUMNS + row];
    const float r = __frcp_rn(__fsqrt_rn(__fadd_rn(__fdiv_rn(sum, static_cast<float>(p.k)), p.eps)));
    float scale[8];
#pragma unroll
    for (int j = 0; j < 8; j += 4) *reinterpret_cast<float4*>(scale + j) = *reinterpret_cast<const float4*>(p.norm + column + j);
    if (p.z != nullptr) {
      const float* z = p.z + static_cast<long long>(row) * p.z_stride + column;
#pragma unroll
      for (int j = 0; j < 8; ++j) scale[j] = __fadd_rn(scale[j], z[j]);
    }
    uint4* place = reinterpret_cast<uint4*>(s.x + row * s.stride + chunk * 8);
    const uint4 v = *place;
    *place = make_uint4(norm_pair(v.x, r, scale[0], scale[1]), norm_pair(v.y, r, scale[2], scale[3]), norm_pair(v.z, r, scale[4], scale[5]),
                        norm_pair(v.w, r, scale[6], scale[7]));
  }
}

// All threads of the block.
__device__ __forceinline__ void make_x(const DecodeParams& p, const Shared& s, const Work& w, int cluster, int thread) {
#if INPUT == 1
  load_gated(p, s, w, thread);
#elif INPUT == 2
  load_normed(p, s, w, cluster, thread);
#endif
}
