// Vectors of the compiler's own kind (GCC's and Clang's vector_size), and how they get from and to memory.
// Internal linkage throughout: floats.h says why.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define HETCOLL_INLINE inline __attribute__((always_inline))
#define HETCOLL_LAMBDA __attribute__((always_inline))

namespace hetcoll {
namespace {

#if defined(__AVX512F__)
constexpr std::size_t kWidth = 64;  // bytes in the widest vector
#elif defined(__AVX2__)
constexpr std::size_t kWidth = 32;
#else
constexpr std::size_t kWidth = 16;
#endif

constexpr std::size_t kLine = 64;  // bytes in a cache line

template <class T, std::size_t kBytes>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kBytes)));
};
template <class T, std::size_t kBytes>
using Vector = typename VectorOf<T, kBytes>::Type;

template <class V>
HETCOLL_INLINE V Load(const char* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <class V>
HETCOLL_INLINE void Store(char* to, V v) {
  std::memcpy(to, &v, sizeof v);
}

// The first `nbytes` < 16 bytes of a vector of 16, from moves that overlap; zeros after them.
template <class V>
HETCOLL_INLINE V LoadPart(const char* from, std::size_t nbytes) {
  static_assert(sizeof(V) == 16);
  std::uint64_t low = 0, high = 0;
  if (nbytes >= 8) {
    low = Load<std::uint64_t>(from);
    if (nbytes > 8) high = Load<std::uint64_t>(from + nbytes - 8) >> (8 * (16 - nbytes));
  } else if (nbytes >= 4) {
    low = Load<std::uint32_t>(from) | std::uint64_t{Load<std::uint32_t>(from + nbytes - 4)} << (8 * (nbytes - 4));
  } else if (nbytes >= 2) {
    low = Load<std::uint16_t>(from) | std::uint64_t{Load<std::uint16_t>(from + nbytes - 2)} << (8 * (nbytes - 2));
  } else if (nbytes == 1) {
    low = static_cast<unsigned char>(*from);
  }
  return __builtin_bit_cast(V, Vector<std::uint64_t, 16>{low, high});
}

template <class V>
HETCOLL_INLINE void StorePart(char* to, V v, std::size_t nbytes) {
  static_assert(sizeof(V) == 16);
  const auto words = __builtin_bit_cast(Vector<std::uint64_t, 16>, v);
  const std::uint64_t low = words[0];
  if (nbytes >= 8) {
    Store(to, low);
    // The last 8 bytes are the high end of `low` and the low end of the other word.
    if (nbytes > 8) Store(to + nbytes - 8, low >> (8 * (nbytes - 8)) | words[1] << (8 * (16 - nbytes)));
  } else if (nbytes >= 4) {
    Store(to, static_cast<std::uint32_t>(low));
    Store(to + nbytes - 4, static_cast<std::uint32_t>(low >> (8 * (nbytes - 4))));
  } else if (nbytes >= 2) {
    Store(to, static_cast<std::uint16_t>(low));
    Store(to + nbytes - 2, static_cast<std::uint16_t>(low >> (8 * (nbytes - 2))));
  } else if (nbytes == 1) {
    *to = static_cast<char>(low);
  }
}

// A store past the cache, to an address aligned to the vector; StoreFence() orders such stores before what follows.
template <class V>
HETCOLL_INLINE void StoreStream(char* to, V v) {
#if defined(__x86_64__)
  if constexpr (sizeof(V) == 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), __builtin_bit_cast(__m128i, v));
#if defined(__AVX2__)
  } else if constexpr (sizeof(V) == 32) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), __builtin_bit_cast(__m256i, v));
#endif
#if defined(__AVX512F__)
  } else {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), __builtin_bit_cast(__m512i, v));
#endif
  }
#else
  Store(to, v);
#endif
}

HETCOLL_INLINE void StoreFence() {
#ifdef __x86_64__
  _mm_sfence();
#endif
}

// ---- Short copies ----

// Copies the first and the last kBytes of `nbytes`, which may overlap.
template <std::size_t kBytes>
HETCOLL_INLINE void CopyEnds(char* dst, const char* src, std::size_t nbytes) {
  constexpr std::size_t kPart = kBytes < kWidth ? kBytes : kWidth;
  using V = Vector<char, kPart>;
  V first[kBytes / kPart], last[kBytes / kPart];
#pragma GCC unroll 8
  for (std::size_t i = 0; i < kBytes / kPart; ++i) first[i] = Load<V>(src + i * kPart);
#pragma GCC unroll 8
  for (std::size_t i = 0; i < kBytes / kPart; ++i) last[i] = Load<V>(src + nbytes - kBytes + i * kPart);
#pragma GCC unroll 8
  for (std::size_t i = 0; i < kBytes / kPart; ++i) Store(dst + i * kPart, first[i]);
#pragma GCC unroll 8
  for (std::size_t i = 0; i < kBytes / kPart; ++i) Store(dst + nbytes - kBytes + i * kPart, last[i]);
}

constexpr std::size_t kSmallCopy = 256;

// At most kSmallCopy bytes.
HETCOLL_INLINE void CopySmall(char* dst, const char* src, std::size_t nbytes) {
  if (nbytes >= 16) {
    if (nbytes > 128) return CopyEnds<128>(dst, src, nbytes);
    if (nbytes > 64) return CopyEnds<64>(dst, src, nbytes);
    if (nbytes > 32) return CopyEnds<32>(dst, src, nbytes);
    return CopyEnds<16>(dst, src, nbytes);
  }
  if (nbytes >= 8) return CopyEnds<8>(dst, src, nbytes);
  if (nbytes >= 4) return CopyEnds<4>(dst, src, nbytes);
  if (nbytes >= 2) return CopyEnds<2>(dst, src, nbytes);
  if (nbytes == 1) *dst = *src;
}

}  // namespace
}  // namespace hetcoll
