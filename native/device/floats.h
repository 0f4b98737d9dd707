// 16- and 8-bit floating-point formats: conversion from and to float32, rounding to nearest even.
//
// Everything has internal linkage: this file is compiled once per instruction set, and a shared inline function would
// let the linker hand AVX-512 code to a processor that lacks it. For the same reason nothing of <bit> or <algorithm> is
// called. The arithmetic is written without branches, on U and F that may be scalars or vectors of 32-bit lanes.
#pragma once

#include <cstdint>

namespace hetcoll {
namespace {

template <class To, class From>
inline To BitCast(From x) {
  return __builtin_bit_cast(To, x);
}

// What a format does with the codes that IEEE 754 gives to infinities and NaNs.
enum class Specials {
  kIeee,  // the highest exponent holds infinity and NaNs; overflow gives infinity
  kFn,    // no infinity, all ones is NaN; overflow gives NaN
  kFnuz,  // no infinity, no negative zero, whose code is the only NaN; overflow gives NaN
};

// A format of 1 sign bit, `kExponent` bits and `kMantissa` bits, held in the low bits of a wider lane.
// Overflow and NaN are as in ml_dtypes' conversion from float32.
template <class StorageT, int kExponent, int kMantissa, int kBias, Specials kSpecials>
struct SmallFloat {
  using Storage = StorageT;
  static constexpr std::uint32_t kSign = 1u << (kExponent + kMantissa);
  static constexpr std::uint32_t kMagnitude = kSign - 1;
  static constexpr std::uint32_t kInfinity = kMagnitude >> kMantissa << kMantissa;  // kIeee only
  static constexpr std::uint32_t kNan = kSpecials == Specials::kIeee ? kInfinity | 1u << (kMantissa - 1)
                                        : kSpecials == Specials::kFn ? kMagnitude
                                                                     : kSign;
  static constexpr std::uint32_t kLargest = kSpecials == Specials::kIeee ? kInfinity - 1
                                            : kSpecials == Specials::kFn ? kMagnitude - 1
                                                                         : kMagnitude;
  static constexpr std::uint32_t kOverflow = kSpecials == Specials::kIeee ? kInfinity : kNan;

  static bool IsNan(std::uint32_t x) {
    if constexpr (kSpecials == Specials::kFnuz) return x == kNan;
    return (x & kMagnitude) > (kSpecials == Specials::kIeee ? kInfinity : kLargest);
  }

  template <class U, class F>
  static F Decode(U x) {
    constexpr int kShift = 23 - kMantissa;
    constexpr std::uint32_t kOne = 1u << 23;                                    // one step of a float32's exponent
    constexpr std::uint32_t kRebias = static_cast<std::uint32_t>(127 - kBias);  // between the two exponents
    const U magnitude = (x & kMagnitude) << kShift;
    // A subnormal m * 2^(1 - bias) is (1 + m) * 2^(1 - bias) less its leading one: no float32 subnormal comes up.
    constexpr std::uint32_t kLowest = (kRebias + 1) << 23;
    const U normal = magnitude + (kRebias << 23);
    const U subnormal = BitCast<U>(BitCast<F>(magnitude + kLowest) - BitCast<float>(kLowest));
    U bits = magnitude < kOne ? subnormal : normal;
    if constexpr (kSpecials == Specials::kIeee) {
      bits = magnitude >= (kInfinity << kShift) ? magnitude | 0x7f800000u : bits;
    } else if constexpr (kSpecials == Specials::kFn) {
      bits = magnitude == (kNan << kShift) ? magnitude | 0x7fc00000u : bits;
    } else {
      bits = x == kNan ? (magnitude | 0x7fc00000u) : bits;
    }
    const U sign = (x & kSign) << (31 - kExponent - kMantissa);
    return BitCast<F>(bits | sign);
  }

  template <class U, class F>
  static U Encode(F value) {
    constexpr int kShift = 23 - kMantissa;
    const U x = BitCast<U>(value);
    const U magnitude = x & 0x7fffffffu;
    // The last place that stays is rounded by adding just under half of it, and a little more where it is odd; a carry
    // runs into the exponent, as it should.
    constexpr std::uint32_t kHalf = (1u << (kShift - 1)) - 1u - (static_cast<std::uint32_t>(127 - kBias) << 23);
    const U normal = (magnitude + kHalf + ((magnitude >> kShift) & 1u)) >> kShift;
    // Below the smallest normal number, adding 2^23 smallest subnormals makes the addition itself round.
    constexpr std::uint32_t kMagic = static_cast<std::uint32_t>(127 + 23 + 1 - kBias - kMantissa) << 23;
    const U subnormal = BitCast<U>(BitCast<F>(magnitude) + BitCast<float>(kMagic)) - kMagic;
    constexpr std::uint32_t kSmallestNormal = static_cast<std::uint32_t>(128 - kBias) << 23;
    U code = magnitude < kSmallestNormal ? subnormal : normal;
    code = code > kLargest ? code - code + kOverflow : code;
    code = magnitude > 0x7f800000u ? code - code + kNan : code;
    const U sign = (x >> (31 - kExponent - kMantissa)) & kSign;
    if constexpr (kSpecials == Specials::kFnuz) return code == 0u ? code : code | sign;
    return code | sign;
  }
};

// bfloat16 is float32's upper half: its exponent needs no care, its subnormals are float32's.
struct Bfloat16 {
  using Storage = std::uint16_t;
  static constexpr std::uint32_t kSign = 0x8000, kMagnitude = 0x7fff, kInfinity = 0x7f80, kNan = 0x7fc0;

  static bool IsNan(std::uint32_t x) { return (x & kMagnitude) > kInfinity; }

  template <class U, class F>
  static F Decode(U x) {
    return BitCast<F>(x << 16);
  }

  template <class U, class F>
  static U Encode(F value) {
    const U x = BitCast<U>(value);
    const U rounded = (x + 0x7fffu + ((x >> 16) & 1u)) >> 16;
    const U nan = (x >> 16) | 0x40u;
    return (x & 0x7fffffffu) > 0x7f800000u ? nan : rounded;
  }
};

using Float16 = SmallFloat<std::uint16_t, 5, 10, 15, Specials::kIeee>;
using Float8E5m2 = SmallFloat<std::uint8_t, 5, 2, 15, Specials::kIeee>;
using Float8E4m3fn = SmallFloat<std::uint8_t, 4, 3, 7, Specials::kFn>;
using Float8E4m3fnuz = SmallFloat<std::uint8_t, 4, 3, 8, Specials::kFnuz>;
using Float8E5m2fnuz = SmallFloat<std::uint8_t, 5, 2, 16, Specials::kFnuz>;

}  // namespace
}  // namespace hetcoll
