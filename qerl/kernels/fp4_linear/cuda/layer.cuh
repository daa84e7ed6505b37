// What a call tells the kernels that make a whole layer's output: rows of adapters and segments, and how blocks share work
// and follow one another.

constexpr int MAX_PARTS = 4;

struct Part {
  const u16* b;
  int row_start, row_stop, rank_start, rank;
  float scale;
  int unused;
};

// Where part `index` of `of` equal parts of `total` begins.
__device__ __forceinline__ int share(int index, int of, int total) {
  return static_cast<int>(static_cast<u32>(index) * static_cast<u32>(total) / static_cast<u32>(of));
}

// Two launches in a row may overlap: the second waits before it touches what the first writes.

__device__ __forceinline__ void dependencies_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void dependents_may_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void add(float4& sum, float4 v) {
  sum.x += v.x;
  sum.y += v.y;
  sum.z += v.z;
  sum.w += v.w;
}

// Words that another block watches: written and read one by one, in no order with anything else.
__device__ __forceinline__ void store_watched_16(float4* place, float4 v) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(place), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

__device__ __forceinline__ float4 load_watched_16(const float4* place) {
  float4 v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(place) : "memory");
  return v;
}

// Stands for a number that is not there yet: no sum has these bits.
constexpr u32 MISSING = 0xFFFFFFFFu;

__device__ __forceinline__ bool missing(float4 v) {
  return __float_as_uint(v.x) == MISSING || __float_as_uint(v.y) == MISSING || __float_as_uint(v.z) == MISSING || __float_as_uint(v.w) == MISSING;
}

// Counts up to `last` and then begins at 0 again.
__device__ __forceinline__ void count_up_only(u32* counter, u32 last) {
  asm volatile("red.inc.relaxed.gpu.global.u32 [%0], %1;" ::"l"(counter), "r"(last) : "memory");
}

// The same; what this thread knows of was done before.
__device__ __forceinline__ void count_up(u32* counter, u32 last) {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  count_up_only(counter, last);
}

__device__ __forceinline__ void wait_for_count(const u32* counter, u32 count) {
  u32 now;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  } while (now < count);
}

__device__ __forceinline__ int block_rank() {
#if CLUSTER > 1
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
#else
  return 0;
#endif
}
