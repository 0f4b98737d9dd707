// How elements travel over a compressed edge: blocks of 32 elements, for 8-bit formats with a scale of one byte in
// front, a power of two, as in OCP's Microscaling formats (MXFP8 E4M3, MXINT8). Powers of two make rounding idempotent:
// what was rounded once is encoded and decoded without a loss, as often as it travels, as long as blocks begin where
// they did.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/types.h"

namespace hetcoll {

enum class Format : std::uint8_t { kNone = 0, kBf16 = 1, kFp8 = 2, kInt8 = 3 };  // compression.py has the same numbers
inline constexpr int kFormats = 4;
inline constexpr std::size_t kCodecBlock = 32;  // elements

struct Codec {
  std::size_t scale;  // bytes of a block's scale
  std::size_t code;   // bytes of an element

  // dst = what src, to which the residual was added, is on the wire; the residual becomes what was lost, in float32, or
  // 0 where that is no finite number. `residual` may be null; dst may be src. Infinities and NaNs: an 8-bit block that
  // has one becomes all NaN.
  void (*round)(void* dst, const void* src, float* residual, std::size_t count);
  void (*encode)(std::byte* wire, const void* src, std::size_t count);
  void (*decode)(void* dst, const std::byte* wire, std::size_t count);

  // The bytes of `count` elements on the wire.
  std::size_t Bytes(std::size_t count) const { return count * code + (count + kCodecBlock - 1) / kCodecBlock * scale; }
  // The elements that are whole in so many bytes.
  std::size_t Elements(std::size_t nbytes) const {
    const std::size_t block = scale + kCodecBlock * code, rest = nbytes % block;
    return nbytes / block * kCodecBlock + (rest > scale ? (rest - scale) / code : 0);
  }
};

// For float32, float16 and bfloat16; null for other types, and where the format is as wide as the type.
const Codec* FindCodec(DType dtype, Format format);

}  // namespace hetcoll
