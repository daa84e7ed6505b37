// A tile of the packed layout (qerl/formats/tiles.py): 16 output rows x 64 inputs, 512 or 1024 bytes of codes and then the scales, in the order in
// which mma.m16n8k16 takes its A operand; and how codes and scales become bfloat16. A kernel is compiled for one format:
//
//   Codes, Word, word_of<J>            a lane's codes of a tile, 16 bytes of each 512, and those of k16 step J
//   Unpacker, unpacker(...)            what a lane needs for all tiles
//   ScaleBytes                         a lane's scales in a tile: those of rows g and g + 8, at TILE_CODES + sizeof(ScaleBytes) * g
//   Rows, rows_of                      what scales need beside them; of a lane's two rows in a row tile, from an input tile on
//   Scales, expand_scales              the scales of a tile, ready to be multiplied with; Rows goes on to the next tile of the same rows
//   Pairs, look_up(word, unpacker)     a Word, as far as it can be brought before it is needed
//   dequantize_step<J>                 the A fragment of k16 step J
//
// A weight is (value of the fragment) * TILE_LIFT / divisor of its row.

#define NVFP4 0
#define MXFP4 1
#define NF4 2
#define NF4_DQ 3  // with doubly quantized scales
#define FP8 4     // E4M3, with a divisor for each row
#ifndef FORMAT
#error "FORMAT names the format of the weights"
#endif
#ifndef PAIR_STRIDE
#define PAIR_STRIDE 128  // bytes from one pair of NF4 codes to the next in the table: 128, or 256, which is faster
#endif

constexpr int CODE_RUN = 512;  // bytes of codes that the lanes of a warp read together

#if FORMAT == FP8

constexpr int TILE_CODES = 2 * CODE_RUN;

struct Codes {
  uint4 first, second;
};

typedef uint2 Word;

template <int J>
__device__ __forceinline__ Word word_of(const Codes& codes) {
  const uint4 run = J < 2 ? codes.first : codes.second;
  return (J & 1) ? make_uint2(run.z, run.w) : make_uint2(run.x, run.y);
}

#else

constexpr int TILE_CODES = CODE_RUN;

typedef uint4 Codes;
typedef u32 Word;

template <int J>
__device__ __forceinline__ Word word_of(const Codes& codes) {
  return J == 0 ? codes.x : J == 1 ? codes.y : J == 2 ? codes.z : codes.w;
}

#endif

// A lane's codes of a tile in shared memory; `place` is its first 16 bytes.
__device__ __forceinline__ Codes load_codes(u32 place) {
#if FORMAT == FP8
  return {load_shared_16(place), load_shared_16(place + CODE_RUN)};
#else
  return load_shared_16(place);
#endif
}

// Those of a tile in global memory.
__device__ __forceinline__ Codes load_codes(const u8* place) {
#if FORMAT == FP8
  return {*reinterpret_cast<const uint4*>(place), *reinterpret_cast<const uint4*>(place + CODE_RUN)};
#else
  return *reinterpret_cast<const uint4*>(place);
#endif
}

__device__ __forceinline__ u32 multiply_bf16x2(u32 a, u32 b) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
  return d;
}

// The bits turned to the right: one instruction.
template <int BITS>
__device__ __forceinline__ u32 turn_right(u32 word) {
  return __funnelshift_r(word, word, BITS);
}

// Four pairs of E2M1 codes as bfloat16 numbers q * 2^-126, in nine operations.
__device__ __forceinline__ void e2m1_fields(u32 word, u32 (&q)[4]) {
  constexpr u32 FIELDS = 0x81C081C0u;
  q[0] = word & FIELDS;
  q[1] = (word << 6) & FIELDS;
  q[2] = turn_right<6>(word) & FIELDS;
  q[3] = ((word << 4) & 0x81808180u) | ((word >> 4) & 0x00400040u);
}

#if FORMAT != NF4_DQ

struct Rows {};

__device__ __forceinline__ Rows rows_of(const float*, int, int, int, int) { return {}; }

#endif

#if FORMAT == NVFP4

constexpr int TILE_BYTES = 576;
constexpr int TABLE_BYTES = 0;
constexpr float TILE_LIFT = 128.0f;

struct Unpacker {
  u32 scale_base;
};

__device__ __forceinline__ Unpacker unpacker(u32 scale_base, u32, int) { return {scale_base}; }

// E2M1 codes are bits that need no table.
typedef u32 Pairs;

__device__ __forceinline__ Pairs look_up(u32 word, Unpacker) { return word; }

typedef uint2 ScaleBytes;

// Of one row in four k16 steps, as bfloat16 pairs s * 2^119: .x holds steps 0 and 2, .y steps 1 and 3.
struct Scales {
  uint2 low, high;
};

// Bytes 5.3, unsigned, of a word turned by 4 bits. `scale_base` is 0x70007000, a value that the compiler does not know, so that mask and base are one instruction.
__device__ __forceinline__ Scales expand_scales(ScaleBytes bytes, Unpacker u, Rows&) {
  Scales s;
  s.low.x = (bytes.x & 0x0FF00FF0u) | u.scale_base;
  s.low.y = (turn_right<8>(bytes.x) & 0x0FF00FF0u) | u.scale_base;
  s.high.x = (bytes.y & 0x0FF00FF0u) | u.scale_base;
  s.high.y = (turn_right<8>(bytes.y) & 0x0FF00FF0u) | u.scale_base;
  return s;
}

// The scale of step J in both halves.
template <int J>
__device__ __forceinline__ u32 step_scale(uint2 pairs) {
  u16 low, high;
  asm("mov.b32 {%0, %1}, %2;" : "=h"(low), "=h"(high) : "r"((J & 1) ? pairs.y : pairs.x));
  const u16 half = (J & 2) ? high : low;
  u32 both;
  asm("mov.b32 %0, {%1, %1};" : "=r"(both) : "h"(half));
  return both;
}

// q * s * 2^-7, exact.
template <int J>
__device__ __forceinline__ void dequantize_step(Pairs word, const Scales& s, u32 (&a)[4]) {
  const u32 low = step_scale<J>(s.low), high = step_scale<J>(s.high);
  e2m1_fields(word, a);
  a[0] = multiply_bf16x2(a[0], low);
  a[1] = multiply_bf16x2(a[1], high);
  a[2] = multiply_bf16x2(a[2], low);
  a[3] = multiply_bf16x2(a[3], high);
}

#elif FORMAT == MXFP4

constexpr int TILE_BYTES = 544;
constexpr int TABLE_BYTES = 0;
constexpr float TILE_LIFT = 1.0f;
constexpr float TILE_DIVISOR = 1.0f;

struct Unpacker {};

__device__ __forceinline__ Unpacker unpacker(u32, u32, int) { return {}; }

typedef u32 Pairs;

__device__ __forceinline__ Pairs look_up(u32 word, Unpacker) { return word; }

typedef u32 ScaleBytes;

// Of a row's two blocks of 32, 2^(e - 1) in both halves.
struct Scales {
  u32 low[2], high[2];
};

__device__ __forceinline__ Scales expand_scales(ScaleBytes bytes, Unpacker, Rows&) {
  Scales s;
  s.low[0] = __byte_perm(bytes, 0, 0x4040) << 7;
  s.low[1] = __byte_perm(bytes, 0, 0x4141) << 7;
  s.high[0] = __byte_perm(bytes, 0, 0x4242) << 7;
  s.high[1] = __byte_perm(bytes, 0, 0x4343) << 7;
  return s;
}

// The weight itself, exact.
template <int J>
__device__ __forceinline__ void dequantize_step(Pairs word, const Scales& s, u32 (&a)[4]) {
  e2m1_fields(word, a);
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = multiply_bf16x2(a[i], (i & 1) ? s.high[J / 2] : s.low[J / 2]);
}

#elif FORMAT == FP8

constexpr int TILE_BYTES = TILE_CODES;
constexpr int TABLE_BYTES = 0;
constexpr float TILE_LIFT = 1.0f;

struct Unpacker {};

__device__ __forceinline__ Unpacker unpacker(u32, u32, int) { return {}; }

typedef Word Pairs;

__device__ __forceinline__ Pairs look_up(Word word, Unpacker) { return word; }

struct ScaleBytes {};

struct Scales {};

__device__ __forceinline__ Scales expand_scales(ScaleBytes, Unpacker, Rows&) { return {}; }

// Two pairs of E4M3 codes as bfloat16 numbers q * 2^-120, subnormal ones too.
__device__ __forceinline__ void e4m3_fields(u32 word, u32& first, u32& second) {
  first = word & 0x87F087F0u;
  second = ((word << 4) & 0x80F080F0u) | ((word >> 4) & 0x07000700u);
}

// q, exact: four significant bits times 2^120.
template <int J>
__device__ __forceinline__ void dequantize_step(const Pairs& words, const Scales&, u32 (&a)[4]) {
  e4m3_fields(words.x, a[0], a[1]);
  e4m3_fields(words.y, a[2], a[3]);
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = multiply_bf16x2(a[i], 0x7B807B80u);
}

#else

constexpr int PAIR_BYTES = 256 * PAIR_STRIDE;
#if FORMAT == NF4
constexpr int TILE_BYTES = 576;
constexpr int TABLE_BYTES = PAIR_BYTES;
#else
constexpr int TILE_BYTES = 528;
constexpr int TABLE_BYTES = PAIR_BYTES + 1024;  // and the 256 values that scales can have before they are scaled
#endif
constexpr float TILE_LIFT = 1.0f;
// Of every row: c of qerl/formats/nf4.py.
constexpr float TILE_DIVISOR = 0.718353271484375f;

// c * q as bfloat16, by code.
__constant__ u16 CODEBOOK[16] = {0xBF38, 0xBF00, 0xBEC1, 0xBE91, 0xBE51, 0xBE08, 0xBD86, 0x0000,
                                0x3D6A, 0x3DED, 0x3E35, 0x3E79, 0x3EA2, 0x3ECF, 0x3F05, 0x3F38};

// Of doubly quantized scales, float32 and int32 (qerl/formats/double_quant.py): where segments stop, what to add to row * units for the place of a row's first
// block, the values of codes, and scale and offset of each group of 256 blocks.
constexpr int SIDE_STOP = 0, SIDE_START = 4, SIDE_MAP = 8, SIDE_GROUPS = SIDE_MAP + 256;

// A table of all pairs of codes in shared memory, once for each lane, so that lookups meet no conflict of banks; 128 bytes for each pair, PAIR_STRIDE apart.
__device__ __forceinline__ void fill_table(u8* table, const float* side, int thread, int threads) {
  for (int i = thread; i < 256 * 8; i += threads) {
    const int byte = i >> 3;
    const u32 pair = CODEBOOK[byte & 15] | static_cast<u32>(CODEBOOK[byte >> 4]) << 16;
    *reinterpret_cast<uint4*>(table + byte * PAIR_STRIDE + (i & 7) * 16) = make_uint4(pair, pair, pair, pair);
  }
#if FORMAT == NF4_DQ
  for (int i = thread; i < 256; i += threads) reinterpret_cast<float*>(table + PAIR_BYTES)[i] = side[SIDE_MAP + i];
#endif
}

struct Unpacker {
  u32 table, lane;
};

__device__ __forceinline__ Unpacker unpacker(u32, u32 table, int lane) { return {table, 4u * lane}; }

// Byte I of a word of codes.
template <int I>
__device__ __forceinline__ u32 look_up_pair(u32 word, Unpacker u) {
  u32 offset, pair;
  if constexpr (PAIR_STRIDE == 256) {
    offset = __byte_perm(word, u.lane, 0x7704 | I << 4);  // one instruction
  } else {
    offset = ((I == 0 ? word << 7 : word >> (8 * I - 7)) & 0x7F80u) | u.lane;
  }
  asm("ld.shared.u32 %0, [%1];" : "=r"(pair) : "r"(u.table + offset));
  return pair;
}

struct Pairs {
  u32 of[4];
};

__device__ __forceinline__ Pairs look_up(u32 word, Unpacker u) {
  return {{look_up_pair<0>(word, u), look_up_pair<1>(word, u), look_up_pair<2>(word, u), look_up_pair<3>(word, u)}};
}

#if FORMAT == NF4

typedef uint2 ScaleBytes;  // absmax of the two rows, float32

#else

typedef u16 ScaleBytes;  // codes of the two rows' absmax

struct Rows {
  const float2* groups;
  int low, high;  // the next blocks of rows g and g + 8
  float2 low_group, high_group;
};

__device__ __forceinline__ int block_of(const int* side, int units, int row, int unit) {
  row = min(row, side[SIDE_STOP + 3] - 1);
  int segment = 0;
#pragma unroll
  for (int s = 0; s < 3; ++s) segment += row >= side[SIDE_STOP + s];
  return row * units + unit + side[SIDE_START + segment];
}

__device__ __forceinline__ Rows rows_of(const float* side, int units, int row_tile, int unit, int lane) {
  const int* numbers = reinterpret_cast<const int*>(side);
  const int row = 16 * row_tile + (lane >> 2), low = block_of(numbers, units, row, unit), high = block_of(numbers, units, row + 8, unit);
  const float2* groups = reinterpret_cast<const float2*>(side + SIDE_GROUPS);
  return {groups, low, high, __ldg(groups + (low >> 8)), __ldg(groups + (high >> 8))};
}

#endif

// absmax = first + rest, both bfloat16, in both halves: the upper half of its bits, and what they leave.
struct Scales {
  u32 low_first, low_rest, high_first, high_rest;
};

__device__ __forceinline__ void split(u32 absmax, u32& first, u32& rest) {
  const float left = __uint_as_float(absmax) - __uint_as_float(absmax & 0xFFFF0000u);
  first = __byte_perm(absmax, 0, 0x3232);
  asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(rest) : "f"(left));
}

#if FORMAT == NF4

__device__ __forceinline__ Scales expand_scales(ScaleBytes bytes, Unpacker, Rows&) {
  Scales s;
  split(bytes.x, s.low_first, s.low_rest);
  split(bytes.y, s.high_first, s.high_rest);
  return s;
}

#else

// And goes on to the next block, which may have the next group's scale; there is none behind the last one's.
__device__ __forceinline__ u32 absmax_of(u32 code, int& block, float2& group, const Rows& rows, Unpacker u) {
  const float value = __uint_as_float(load_shared_4(u.table + PAIR_BYTES + 4 * code));
  const u32 absmax = __float_as_uint(__fadd_rn(__fmul_rn(value, group.x), group.y));
  if ((++block & 255) == 0) group = __ldg(rows.groups + (block >> 8));
  return absmax;
}

__device__ __forceinline__ Scales expand_scales(ScaleBytes bytes, Unpacker u, Rows& rows) {
  Scales s;
  split(absmax_of(bytes & 0xFF, rows.low, rows.low_group, rows, u), s.low_first, s.low_rest);
  split(absmax_of(bytes >> 8, rows.high, rows.high_group, rows, u), s.high_first, s.high_rest);
  return s;
}

#endif

// bfloat16(cq * first + bfloat16(cq * rest)), the same numbers wherever a weight is unpacked.
template <int J>
__device__ __forceinline__ void dequantize_step(const Pairs& q, const Scales& s, u32 (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 rest = multiply_bf16x2(q.of[i], (i & 1) ? s.high_rest : s.low_rest);
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(a[i]) : "r"(q.of[i]), "r"((i & 1) ? s.high_first : s.low_first), "r"(rest));
  }
}

#endif

#if FORMAT == NVFP4 || FORMAT == MXFP4 || FORMAT == FP8
__device__ __forceinline__ void fill_table(u8*, const float*, int, int) {}
#endif

// Copies of 16 bytes that the scales of a tile take.
constexpr int SCALE_CHUNKS = (TILE_BYTES - TILE_CODES) / 16;

__device__ __forceinline__ ScaleBytes load_scale_bytes(u32 shared) {
#if FORMAT == MXFP4
  return load_shared_4(shared);
#elif FORMAT == NF4_DQ
  return load_shared_2(shared);
#elif FORMAT == FP8
  return {};
#else
  return load_shared_8(shared);
#endif
}

// What sums of row `row`, of segment `segment`, are divided by, after the lift.
__device__ __forceinline__ float row_divisor(const float* side, int row, int segment) {
#if FORMAT == NVFP4
  return side[segment];
#elif FORMAT == FP8
  return side[row];
#else
  return TILE_DIVISOR;
#endif
}
