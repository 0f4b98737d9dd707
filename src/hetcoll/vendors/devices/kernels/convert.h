// 8-bit floats of OCP's kind as AMD's older one (fnuz), and back: by value.
#pragma once

#include "devices/kernels/floats.h"

namespace hetcoll {
namespace {

// The code in `To` of what `code`, in the lowest 8 bits, stands for in `From`: the nearest value, ties to even. What is
// finite and beyond the largest becomes the largest, infinity becomes NaN where there is none, and -0 becomes 0.
template <class From, class To>
constexpr inline __attribute__((always_inline)) std::uint32_t Convert(std::uint32_t code) {
  const std::uint32_t bits = BitCast<std::uint32_t>(From::template Decode<std::uint32_t, float>(code << 24));
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t top = BitCast<std::uint32_t>(To::template Decode<std::uint32_t, float>(To::kTop << 24));
  const std::uint32_t held = magnitude < 0x7f800000u && magnitude > top ? top | (bits & 0x80000000u) : bits;
  const std::uint32_t found = To::template Encode<std::uint32_t, float>(BitCast<float>(held)) >> 24;
  return found == 0x80u && magnitude < 0x7f800000u ? 0u : found;  // -0, or what was rounded to it
}

// What is left of a code of OCP's kind once it went to `Fnuz` and back: a value that both kinds hold.
template <class Ocp, class Fnuz>
constexpr inline __attribute__((always_inline)) std::uint32_t Common(std::uint32_t code) {
  return Convert<Fnuz, Ocp>(Convert<Ocp, Fnuz>(code));
}

}  // namespace
}  // namespace hetcoll
