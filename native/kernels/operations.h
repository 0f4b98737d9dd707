// The element-wise operations, on whole vectors. Each has `Element`, the type its vectors hold; `kStep`, the bytes it
// takes at a time; `kUnit`, the bytes that must stay together; `kSlow`, whether it takes longer than memory does;
// `kCommon`, whether it is called most; and Apply. Internal linkage throughout: floats.h says why.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "devices/kernels/floats.h"
#include "kernels/vectors.h"

namespace hetcoll {
namespace {

template <class T>
struct Operation {
  using Element = T;
  static constexpr std::size_t kStep = kWidth, kUnit = sizeof(T);
  static constexpr bool kSlow = false, kCommon = false;
};

// ---- Integers, and float and double where the operators mean the same ----

template <class T>
struct Sum : Operation<T> {
  static constexpr bool kCommon = true;

  template <class V>
  static HETCOLL_INLINE V Apply(V a, V b) {
    return a + b;
  }
};

template <class T>
struct Prod : Operation<T> {
  template <class V>
  static HETCOLL_INLINE V Apply(V a, V b) {
    return a * b;
  }
};

template <class T>
struct Max : Operation<T> {
  template <class V>
  static HETCOLL_INLINE V Apply(V a, V b) {
    return a > b ? a : b;
  }
};

template <class T>
struct Min : Operation<T> {
  template <class V>
  static HETCOLL_INLINE V Apply(V a, V b) {
    return a < b ? a : b;
  }
};

template <class T>
struct LogicalAnd : Operation<T> {
  template <class V>
  static HETCOLL_INLINE V Apply(V a, V b) {
    return ((a != 0) & (b != 0)) ? V{} + 1 : V{};
  }
};

template <class T>
struct LogicalOr : Operation<T> {
  template <class V>
  static HETCOLL_INLINE V Apply(V a, V b) {
    return (a | b) != 0 ? V{} + 1 : V{};
  }
};

template <class T>
struct LogicalXor : Operation<T> {
  template <class V>
  static HETCOLL_INLINE V Apply(V a, V b) {
    return ((a != 0) ^ (b != 0)) ? V{} + 1 : V{};
  }
};

// Bits have no width: one kernel serves every integer type.
struct Bits : Operation<std::uint64_t> {
  static constexpr std::size_t kUnit = 1;
};

struct BitAnd : Bits {
  template <class V>
  static HETCOLL_INLINE V Apply(V a, V b) {
    return a & b;
  }
};

struct BitOr : Bits {
  template <class V>
  static HETCOLL_INLINE V Apply(V a, V b) {
    return a | b;
  }
};

struct BitXor : Bits {
  template <class V>
  static HETCOLL_INLINE V Apply(V a, V b) {
    return a ^ b;
  }
};

// ---- float and double: NaN propagates, and -0 is below +0, so that the order of the operands never shows ----

template <class T, bool kLargest>
struct FloatExtreme : Operation<T> {
  template <class V>
  static HETCOLL_INLINE V Apply(V a, V b) {
    using Mask = decltype(a == b);
    const Mask x = BitCast<Mask>(a), y = BitCast<Mask>(b);
    const V best = kLargest ? (a > b ? a : b) : (a < b ? a : b);
    const V equal = BitCast<V>(kLargest ? x & y : x | y);  // differs from them only where they are two zeros
    const V ordered = a == b ? equal : best;
    return ((a != a) | (b != b)) ? V{} + static_cast<T>(__builtin_nan("")) : ordered;
  }
};

// ---- Complex numbers: vectors of (real, imaginary) pairs ----

template <class T>
struct ComplexProd : Operation<T> {
  static constexpr std::size_t kUnit = 2 * sizeof(T);

  template <class V>
  static HETCOLL_INLINE V Apply(V a, V b) {
    return Multiply(a, b, std::make_index_sequence<sizeof(V) / sizeof(T)>());
  }

  template <class V, std::size_t... kI>
  static HETCOLL_INLINE V Multiply(V a, V b, std::index_sequence<kI...>) {
    const V real = __builtin_shufflevector(a, a, (kI & ~std::size_t{1})...);
    const V imaginary = __builtin_shufflevector(a, a, (kI | 1)...);
    const V swapped = __builtin_shufflevector(b, b, (kI ^ 1)...);
    const V sign = {(kI & 1 ? T{0} : -T{0})...};
    using Mask = decltype(a == b);
    // (re re - im im, re im + im re)
    return real * b + BitCast<V>(BitCast<Mask>(imaginary * swapped) ^ BitCast<Mask>(sign));
  }
};

// ---- The formats of floats.h: arithmetic in float32, comparisons on the codes ----

// The float32 values of a vector of codes. Each 32-bit lane holds two or four: taking them in turn needs no widening,
// which would cross lanes.
template <class Format, class V>
struct Widened {
  static constexpr int kBits = 8 * sizeof(typename Format::Storage), kCodes = 32 / kBits;
  using U = Vector<std::uint32_t, sizeof(V)>;
  using F = Vector<float, sizeof(V)>;
  F part[kCodes];

  explicit HETCOLL_INLINE Widened(V x) {
#if defined(__AVX512BW__)
    if constexpr (kCodes == 4 && sizeof(V) == 64) {
      LookUp(BitCast<__m512i>(x));
      return;
    }
#endif
#pragma GCC unroll 4
    for (int i = 0; i < kCodes; ++i) part[i] = Format::template Decode<U, F>(BitCast<U>(x) << (32 - kBits * (i + 1)));
  }

#if defined(__AVX512BW__)
  // bfloat16 holds every number of 8 bits: two tables of 64 words, by the sixth bit of the code, and the sign.
  struct Table {
    alignas(64) std::uint16_t word[128];
    constexpr Table() {
      for (std::uint32_t i = 0; i < 128; ++i) {
        word[i] = BitCast<std::uint32_t>(Format::template Decode<std::uint32_t, float>(i << 24)) >> 16;
      }
    }
  };
  static constexpr Table kTable{};

  static HETCOLL_INLINE __m512i Words(__m512i code) {
    const __m512i low =
        _mm512_permutex2var_epi16(_mm512_load_si512(kTable.word), code, _mm512_load_si512(kTable.word + 32));
    const __m512i high =
        _mm512_permutex2var_epi16(_mm512_load_si512(kTable.word + 64), code, _mm512_load_si512(kTable.word + 96));
    return _mm512_mask_blend_epi16(_mm512_test_epi16_mask(code, _mm512_set1_epi16(0x40)), low, high);
  }

  static HETCOLL_INLINE __m512i Signed(__m512i word, __m512i sign_bit) {
    const __m512i word_and_sign = _mm512_or_si512(word, sign_bit);
    if constexpr (Format::kNan <= Format::kMagnitude) return word_and_sign;
    const __mmask32 nan = _mm512_cmpeq_epi16_mask(word_and_sign, _mm512_set1_epi16(-0x8000));  // the code of -0
    return _mm512_mask_mov_epi16(word_and_sign, nan, _mm512_set1_epi16(0x7fc0));
  }

  HETCOLL_INLINE void LookUp(__m512i x) {
    const __m512i sign = _mm512_set1_epi16(-0x8000), upper = _mm512_set1_epi32(-0x10000);
    const __m512i even = Signed(Words(x), _mm512_and_si512(_mm512_slli_epi16(x, 8), sign));
    const __m512i odd = Signed(Words(_mm512_srli_epi16(x, 8)), _mm512_and_si512(x, sign));
    part[0] = BitCast<F>(_mm512_slli_epi32(even, 16));
    part[1] = BitCast<F>(_mm512_slli_epi32(odd, 16));
    part[2] = BitCast<F>(_mm512_and_si512(even, upper));
    part[3] = BitCast<F>(_mm512_and_si512(odd, upper));
  }
#endif
};

// Calls f on the float32 values of the codes in `x...`, and rounds what it returns.
template <class Format>
struct InFloat32 {
  using Element = typename Format::Storage;
  static constexpr std::size_t kStep = kWidth, kUnit = sizeof(Element);
  static constexpr bool kSlow = kWidth < 64;  // AVX-512 looks up

  template <class Function, class... Vs>
  static HETCOLL_INLINE auto Call(Function f, Vs... x) {
    return Round(f, Widened<Format, Vs>(x)...);
  }

  template <class Function, class V, class... Vs>
  static HETCOLL_INLINE V Round(Function f, Widened<Format, V> first, Widened<Format, Vs>... rest) {
    using W = Widened<Format, V>;
    typename W::U result{};
#pragma GCC unroll 4
    for (int i = 0; i < W::kCodes; ++i) {
      const auto value = f(first.part[i], rest.part[i]...);
      result |= Format::template Encode<typename W::U, typename W::F>(value) >> (32 - W::kBits * (i + 1));
    }
    return BitCast<V>(result);
  }
};

// Half the work of the general way. A NaN that comes out of arithmetic on bfloat16 has an empty lower half, whatever
// its payload, so that rounding cannot carry it out of the NaNs.
template <>
struct InFloat32<Bfloat16> {
  using Element = std::uint16_t;
  static constexpr std::size_t kStep = kWidth, kUnit = 2;
  static constexpr bool kSlow = false;

  template <class Function, class V, class... Vs>
  static HETCOLL_INLINE V Call(Function f, V first, Vs... rest) {
    using U = Vector<std::uint32_t, sizeof(V)>;
    using F = Vector<float, sizeof(V)>;
    const F even = f(BitCast<F>(BitCast<U>(first) << 16), BitCast<F>(BitCast<U>(rest) << 16)...);
    const F odd = f(BitCast<F>(BitCast<U>(first) & 0xffff0000u), BitCast<F>(BitCast<U>(rest) & 0xffff0000u)...);
    return BitCast<V>(Round(BitCast<U>(even)) >> 16 | (Round(BitCast<U>(odd)) & 0xffff0000u));
  }

  template <class U>
  static HETCOLL_INLINE U Round(U x) {
    return x + 0x7fffu + ((x >> 16) & 1u);
  }
};

#if defined(__F16C__)
template <>
struct InFloat32<Float16> {
  using Element = std::uint16_t;
  static constexpr std::size_t kUnit = 2, kStep = kWidth / 2;  // the instructions widen to a whole vector
  static constexpr bool kSlow = false;

  template <class Function, class... Vs>
  static HETCOLL_INLINE auto Call(Function f, Vector<std::uint16_t, 16> first, Vs... rest) {
    const __m256 value = f(_mm256_cvtph_ps(BitCast<__m128i>(first)), _mm256_cvtph_ps(BitCast<__m128i>(rest))...);
    return BitCast<Vector<std::uint16_t, 16>>(_mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  }
#if defined(__AVX512F__)
  template <class Function, class... Vs>
  static HETCOLL_INLINE auto Call(Function f, Vector<std::uint16_t, 32> first, Vs... rest) {
    const __m512 value = f(_mm512_cvtph_ps(BitCast<__m256i>(first)), _mm512_cvtph_ps(BitCast<__m256i>(rest))...);
    return BitCast<Vector<std::uint16_t, 32>>(_mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  }
#endif
};
#elif defined(__aarch64__)
template <>
struct InFloat32<Float16> {
  using Element = std::uint16_t;
  static constexpr std::size_t kUnit = 2, kStep = kWidth;
  static constexpr bool kSlow = false;

  template <class Function, class V, class... Vs>
  static HETCOLL_INLINE V Call(Function f, V first, Vs... rest) {
    const float32x4_t low = f(vcvt_f32_f16(vget_low_f16(BitCast<float16x8_t>(first))),
                              vcvt_f32_f16(vget_low_f16(BitCast<float16x8_t>(rest)))...);
    const float32x4_t high =
        f(vcvt_high_f32_f16(BitCast<float16x8_t>(first)), vcvt_high_f32_f16(BitCast<float16x8_t>(rest))...);
    return BitCast<V>(vcvt_high_f16_f32(vcvt_f16_f32(low), high));
  }
};
#endif

template <class Format>
struct NarrowSum : InFloat32<Format> {
  static constexpr bool kCommon = true;

  template <class V>
  static HETCOLL_INLINE V Apply(V a, V b) {
    return InFloat32<Format>::Call([](auto x, auto y) HETCOLL_LAMBDA { return x + y; }, a, b);
  }
};

template <class Format>
struct NarrowProd : InFloat32<Format> {
  static constexpr bool kCommon = false;

  template <class V>
  static HETCOLL_INLINE V Apply(V a, V b) {
    return InFloat32<Format>::Call([](auto x, auto y) HETCOLL_LAMBDA { return x * y; }, a, b);
  }
};

template <class Format, bool kLargest>
struct NarrowExtreme : Operation<typename Format::Storage> {
  using Signed = std::make_signed_t<typename Format::Storage>;

  template <class V>
  static HETCOLL_INLINE V Apply(V a, V b) {
    using S = Vector<Signed, sizeof(V)>;  // not decltype(a == b), whose char may have no sign
    const S x = Ordered(BitCast<S>(a)), y = Ordered(BitCast<S>(b));
    const V best = BitCast<V>(Ordered(kLargest ? (x > y ? x : y) : (x < y ? x : y)));
    const V nan = V{} + static_cast<typename Format::Storage>(Format::kNan);
    if constexpr (Format::kNan > Format::kMagnitude) {
      return ((a == nan) | (b == nan)) ? nan : best;
    } else {
      const auto magnitude = static_cast<Signed>(Format::kMagnitude);
      const S p = BitCast<S>(a) & magnitude, q = BitCast<S>(b) & magnitude;
      return (p > q ? p : q) > static_cast<Signed>(Format::kTop) ? nan : best;
    }
  }

  // From sign and magnitude to two's complement and back: flips the magnitude of negative codes.
  template <class S>
  static HETCOLL_INLINE S Ordered(S x) {
    return x ^ (BitCast<S>(x < 0) & static_cast<Signed>(Format::kMagnitude));
  }
};

// ---- One NaN ----

// The same, and whatever NaN comes out is the quiet one of sign 0 without a payload, which min and max give, too.
template <class E>
struct OneNan : E {
  template <class V>
  static HETCOLL_INLINE V Apply(V a, V b) {
    const V x = E::Apply(a, b);
    return x != x ? V{} + static_cast<typename E::Element>(__builtin_nan("")) : x;
  }
};

template <class Format, class E>
struct NarrowOneNan : E {
  template <class V>
  static HETCOLL_INLINE V Apply(V a, V b) {
    using Signed = std::make_signed_t<typename Format::Storage>;
    const V x = E::Apply(a, b);
    const auto magnitude = BitCast<Vector<Signed, sizeof(V)>>(x) & static_cast<Signed>(Format::kMagnitude);
    return magnitude > static_cast<Signed>(Format::kTop) ? V{} + static_cast<typename Format::Storage>(Format::kNan)
                                                         : x;
  }
};

}  // namespace
}  // namespace hetcoll
