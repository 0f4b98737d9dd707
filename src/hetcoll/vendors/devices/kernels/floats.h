// 16- and 8-bit floating-point formats: conversion from and to float32, rounding to nearest even.
//
// Everything has internal linkage: this file is compiled once per instruction set, and a shared inline function would
// let the linker hand AVX-512 code to a processor that lacks it. For the same reason nothing of <bit> or <algorithm> is
// called.
//
// The functions are free of branches and work on U and F: uint32_t and float, or vectors of them. A code sits in the
// highest bits of its U; Decode ignores the bits below, Encode leaves zeros there. No float32 subnormal comes up on the
// way, so that a processor set to flush them gives the same results (bfloat16 has float32's own subnormals).
#pragma once

#include "devices/kernels/integers.h"

namespace hetcoll {
namespace {

template <class To, class From>
constexpr inline __attribute__((always_inline)) To BitCast(From x) {
  return __builtin_bit_cast(To, x);
}

// What a format does with the codes that IEEE 754 gives to infinities and NaNs.
enum class Specials {
  kIeee,  // the highest exponent holds infinity and NaNs; overflow gives infinity
  kFn,    // no infinity, all ones is NaN; overflow gives NaN
  kFnuz,  // no infinity, no negative zero, whose code is the only NaN; overflow gives NaN
};

// A format of 1 sign bit, `kExponent` bits and `kMantissa` bits. Overflow and NaN are as in ml_dtypes' conversion from
// float32.
template <class StorageT, int kExponent, int kMantissa, int kBias, Specials kSpecials>
struct SmallFloat {
  using Storage = StorageT;
  static constexpr int kBits = 1 + kExponent + kMantissa;
  static constexpr std::uint32_t kMagnitude = (1u << (kBits - 1)) - 1;
  static constexpr std::uint32_t kInfinity = kMagnitude >> kMantissa << kMantissa;  // kIeee only
  static constexpr std::uint32_t kTop = kSpecials == Specials::kIeee ? kInfinity
                                        : kSpecials == Specials::kFn ? kMagnitude - 1
                                                                     : kMagnitude;  // the highest that is no NaN
  static constexpr std::uint32_t kNan = kSpecials == Specials::kIeee ? kInfinity | 1u << (kMantissa - 1) : kTop + 1;

  template <class U, class F>
  static constexpr inline __attribute__((always_inline)) F Decode(U x) {
    constexpr std::uint32_t kLowest = (128u - kBias) << 23;  // the smallest normal number
    const U magnitude = (x >> (8 - kExponent)) & (kMagnitude << kDropped);
    // A subnormal m * 2^(1 - bias) is (1 + m) * 2^(1 - bias) less its leading one.
    const U normal = magnitude + ((127u - kBias) << 23);
    const U subnormal = BitCast<U>(BitCast<F>(magnitude + kLowest) - BitCast<float>(kLowest));
    U bits = magnitude < (1u << 23) ? subnormal : normal;
    if constexpr (kSpecials == Specials::kIeee) {
      bits = magnitude >= (kInfinity << kDropped) ? magnitude | 0x7f800000u : bits;
    } else if constexpr (kSpecials == Specials::kFn) {
      bits = magnitude == (kNan << kDropped) ? magnitude | 0x7fc00000u : bits;
    } else {
      bits = (x >> (32 - kBits)) == kNan ? magnitude | 0x7fc00000u : bits;
    }
    return BitCast<F>(bits | (x & 0x80000000u));
  }

  template <class U, class F>
  static constexpr inline __attribute__((always_inline)) U Encode(F value) {
    // The code after the largest finite one is infinity (kIeee) or NaN (the others). Whatever is larger than the number
    // it would stand for overflows as that does.
    constexpr std::uint32_t kOverflow = kSpecials == Specials::kIeee ? kInfinity : kNan;
    constexpr std::uint32_t kBeyond = (kOverflow << kDropped) + ((127u - kBias) << 23);
    constexpr std::uint32_t kLowest = (128u - kBias) << 23;
    const U x = BitCast<U>(value);
    const U finite = x & 0x7fffffffu;
    const U magnitude = finite > kBeyond ? U{} + kBeyond : finite;
    // Adding a power of two whose last place is that of the result makes the addition round.
    const U exponent = magnitude & 0x7f800000u;
    const U place = exponent > kLowest ? exponent : U{} + kLowest;
    const U power = place + (static_cast<std::uint32_t>(kDropped) << 23);
    const U significand = BitCast<U>(BitCast<F>(magnitude) + BitCast<F>(power)) - power;
    U code = significand + (place >> kDropped) - (kLowest >> kDropped);
    if constexpr (kSpecials == Specials::kIeee) code = finite > 0x7f800000u ? U{} + kNan : code;
    const U sign = x & 0x80000000u;
    if constexpr (kSpecials == Specials::kFnuz) return code == 0u ? code : (code << (32 - kBits)) | sign;
    return (code << (32 - kBits)) | sign;
  }

 private:
  static constexpr int kDropped = 23 - kMantissa;  // bits of a float32's significand that the format lacks
};

// bfloat16 is float32's upper half.
struct Bfloat16 {
  using Storage = std::uint16_t;
  [[maybe_unused]] static constexpr std::uint32_t kMagnitude = 0x7fff, kTop = 0x7f80, kNan = 0x7fc0;

  template <class U, class F>
  static constexpr inline __attribute__((always_inline)) F Decode(U x) {
    return BitCast<F>(x & 0xffff0000u);
  }

  template <class U, class F>
  static constexpr inline __attribute__((always_inline)) U Encode(F value) {
    const U x = BitCast<U>(value);
    // Just under half of the last place that stays, and a little more where it is odd.
    const U rounded = x + 0x7fffu + ((x >> 16) & 1u);
    const U result = (x & 0x7fffffffu) > 0x7f800000u ? x | 0x400000u : rounded;
    return result & 0xffff0000u;
  }
};

using Float16 = SmallFloat<std::uint16_t, 5, 10, 15, Specials::kIeee>;
using Float8E5m2 = SmallFloat<std::uint8_t, 5, 2, 15, Specials::kIeee>;
using Float8E4m3fn = SmallFloat<std::uint8_t, 4, 3, 7, Specials::kFn>;
using Float8E4m3fnuz = SmallFloat<std::uint8_t, 4, 3, 8, Specials::kFnuz>;
using Float8E5m2fnuz = SmallFloat<std::uint8_t, 5, 2, 16, Specials::kFnuz>;

}  // namespace
}  // namespace hetcoll
