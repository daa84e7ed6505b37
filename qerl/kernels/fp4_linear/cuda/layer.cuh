// What a call tells the kernels that make a whole layer's output: rows of adapters and segments, and how work is shared out.

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

__device__ __forceinline__ int block_rank() {
#if CLUSTER > 1
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
#else
  return 0;
#endif
}
