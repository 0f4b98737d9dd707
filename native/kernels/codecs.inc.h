// The codecs of codecs.h, compiled once per instruction set: a part of kernels.inc.h. Loops over whole blocks have a
// fixed number of turns, which compilers make vectors of.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/kernel_table.h"
#include "kernels/operations.h"

namespace hetcoll::HETCOLL_ISA_NAMESPACE {
namespace {

using Block = float[kCodecBlock];

constexpr float PowerOfTwo(int e) { return BitCast<float>(static_cast<std::uint32_t>(e + 127) << 23); }

// ---- Elements: as float32, a block at a time ----

struct Single {
  static constexpr std::size_t kSize = 4;
  static constexpr int kHighest = 127;  // the exponent of the largest number
  static constexpr int kLowest = -126;  // of the smallest step that codes may have

  static HETCOLL_INLINE void Load(float* v, const char* from) { std::memcpy(v, from, sizeof(Block)); }
  static HETCOLL_INLINE void Store(char* to, const float* v) { std::memcpy(to, v, sizeof(Block)); }
};

template <class Small, int kHigh, int kLow>
struct Half {
  static constexpr std::size_t kSize = 2;
  static constexpr int kHighest = kHigh, kLowest = kLow;

  static HETCOLL_INLINE void Load(float* v, const char* from) {
    std::uint16_t x[kCodecBlock];
    std::memcpy(x, from, sizeof x);
    for (std::size_t i = 0; i < kCodecBlock; ++i) v[i] = Small::template Decode<std::uint32_t, float>(x[i] << 16);
  }
  static HETCOLL_INLINE void Store(char* to, const float* v) {
    std::uint16_t x[kCodecBlock];
    for (std::size_t i = 0; i < kCodecBlock; ++i) {
      x[i] = static_cast<std::uint16_t>(Small::template Encode<std::uint32_t, float>(v[i]) >> 16);
    }
    std::memcpy(to, x, sizeof x);
  }
};

// ---- Formats: a block of float32 to codes and back ----

struct AsBf16 {
  static constexpr std::size_t kScale = 0, kCode = 2;

  template <class E>
  static HETCOLL_INLINE void Encode(char* to, const float* v) {
    Half<Bfloat16, 0, 0>::Store(to, v);
  }
  static HETCOLL_INLINE void Decode(float* v, const char* from) { Half<Bfloat16, 0, 0>::Load(v, from); }
};

// Codes times a power of two. The largest magnitude decides which: so that it lies in the highest binade of codes, or,
// where it would round up beyond that, in the one below.
template <class Codes>
struct Scaled {
  static constexpr std::size_t kScale = 1, kCode = 1;
  static constexpr unsigned char kNan = 255;  // as a scale

  template <class E>
  static HETCOLL_INLINE void Encode(char* to, const float* v) {
    std::uint32_t top = 0;
    for (std::size_t i = 0; i < kCodecBlock; ++i) {
      const std::uint32_t magnitude = BitCast<std::uint32_t>(v[i]) & 0x7fffffffu;
      top = magnitude > top ? magnitude : top;
    }
    if (top >= 0x7f800000u) {
      std::memset(to, 0, 1 + kCodecBlock);
      *to = static_cast<char>(kNan);
      return;
    }
    constexpr int kMost = E::kHighest - Codes::kBinade, kLeast = E::kLowest + Codes::kStep;
    int e = static_cast<int>(top >> 23) - 127 - Codes::kBinade;
    e = e > kMost ? kMost : e < kLeast ? kLeast : e;
    if (e < kMost && BitCast<float>(top) * PowerOfTwo(-e) >= Codes::kBeyond) ++e;
    *to = static_cast<char>(e + 127);
    const float factor = PowerOfTwo(-e);
    unsigned char codes[kCodecBlock];
    for (std::size_t i = 0; i < kCodecBlock; ++i) {
      const float x = v[i] * factor, low = x < -Codes::kLargest ? -Codes::kLargest : x;
      codes[i] = Codes::Encode(low > Codes::kLargest ? Codes::kLargest : low);
    }
    std::memcpy(to + 1, codes, sizeof codes);
  }

  static HETCOLL_INLINE void Decode(float* v, const char* from) {
    const auto scale = static_cast<unsigned char>(*from);
    unsigned char codes[kCodecBlock];
    std::memcpy(codes, from + 1, sizeof codes);
    const float factor = scale == kNan ? BitCast<float>(0x7fc00000u) : PowerOfTwo(scale == 0 ? 0 : scale - 127);
    for (std::size_t i = 0; i < kCodecBlock; ++i) v[i] = Codes::Decode(codes[i]) * factor;
  }
};

struct Int8Codes {
  static constexpr int kBinade = 6;  // the largest code is 127
  static constexpr int kStep = 0;    // codes are multiples of 2^-kStep
  static constexpr float kLargest = 127, kBeyond = 127.5;

  static HETCOLL_INLINE unsigned char Encode(float x) {  // the addition rounds; its last bits are the code
    return static_cast<unsigned char>(BitCast<std::uint32_t>(x + 12582912.0f));
  }
  static HETCOLL_INLINE float Decode(unsigned char code) { return static_cast<float>(static_cast<signed char>(code)); }
};

struct Fp8Codes {
  static constexpr int kBinade = 8, kStep = 9;
  static constexpr float kLargest = 448, kBeyond = 464.5;  // at 464, a tie, rounding goes to 448

  static HETCOLL_INLINE unsigned char Encode(float x) {
    return static_cast<unsigned char>(Float8E4m3fn::Encode<std::uint32_t, float>(x) >> 24);
  }
  static HETCOLL_INLINE float Decode(unsigned char code) {
    return Float8E4m3fn::Decode<std::uint32_t, float>(static_cast<std::uint32_t>(code) << 24);
  }
};

// ---- Any number of elements: the last block may be short, and goes through memory that holds a whole one ----

template <class E, class F>
struct Coding {
  static constexpr std::size_t kBytes = kCodecBlock * E::kSize;             // of a block of elements
  static constexpr std::size_t kWire = F::kScale + kCodecBlock * F::kCode;  // on the wire

  static void Encode(std::byte* wire, const void* src, std::size_t count) {
    auto* to = reinterpret_cast<char*>(wire);
    const auto* from = static_cast<const char*>(src);
    char part[kBytes] = {}, codes[kWire];
    for (std::size_t n; count > 0; count -= n, from += n * E::kSize, to += F::kScale + n * F::kCode) {
      n = count < kCodecBlock ? count : kCodecBlock;
      const bool whole = n == kCodecBlock;
      if (!whole) std::memcpy(part, from, n * E::kSize);
      Block v;
      E::Load(v, whole ? from : part);
      F::template Encode<E>(whole ? to : codes, v);
      if (!whole) std::memcpy(to, codes, F::kScale + n * F::kCode);
    }
  }

  static void Decode(void* dst, const std::byte* wire, std::size_t count) {
    auto* to = static_cast<char*>(dst);
    const auto* from = reinterpret_cast<const char*>(wire);
    char part[kBytes], codes[kWire] = {};
    for (std::size_t n; count > 0; count -= n, from += F::kScale + n * F::kCode, to += n * E::kSize) {
      n = count < kCodecBlock ? count : kCodecBlock;
      const bool whole = n == kCodecBlock;
      if (!whole) std::memcpy(codes, from, F::kScale + n * F::kCode);
      Block v;
      F::Decode(v, whole ? from : codes);
      E::Store(whole ? to : part, v);
      if (!whole) std::memcpy(to, part, n * E::kSize);
    }
  }

  static HETCOLL_INLINE void RoundBlock(char* to, const char* from, float* residual) {
    Block v, y;
    char codes[kWire];
    E::Load(v, from);
    if (residual != nullptr) {
      for (std::size_t i = 0; i < kCodecBlock; ++i) v[i] += residual[i];
    }
    F::template Encode<E>(codes, v);
    F::Decode(y, codes);
    E::Store(to, y);
    if (residual == nullptr) return;
    for (std::size_t i = 0; i < kCodecBlock; ++i) {
      const float lost = v[i] - y[i];
      residual[i] = (BitCast<std::uint32_t>(lost) & 0x7f800000u) == 0x7f800000u ? 0.0f : lost;
    }
  }

  static void Round(void* dst, const void* src, float* residual, std::size_t count) {
    auto* to = static_cast<char*>(dst);
    const auto* from = static_cast<const char*>(src);
    const bool kept = residual != nullptr;
    char part[kBytes] = {};
    Block lost = {};
    for (std::size_t n; count > 0; count -= n, from += n * E::kSize, to += n * E::kSize) {
      n = count < kCodecBlock ? count : kCodecBlock;
      const bool whole = n == kCodecBlock;
      if (!whole) std::memcpy(part, from, n * E::kSize);
      if (!whole && kept) std::memcpy(lost, residual, n * sizeof(float));
      RoundBlock(whole ? to : part, whole ? from : part, !kept ? nullptr : whole ? residual : lost);
      if (!whole) std::memcpy(to, part, n * E::kSize);
      if (!whole && kept) std::memcpy(residual, lost, n * sizeof(float));
      if (kept) residual += n;
    }
  }
};

template <class E, class F>
constexpr Codec MakeCodec() {
  return {F::kScale, F::kCode, &Coding<E, F>::Round, &Coding<E, F>::Encode, &Coding<E, F>::Decode};
}

template <class E>
constexpr void AddCodecs(KernelTable& table, DType dtype) {
  Codec* row = table.codec[static_cast<int>(dtype)];
  if (E::kSize > 2) row[static_cast<int>(Format::kBf16)] = MakeCodec<E, AsBf16>();
  row[static_cast<int>(Format::kFp8)] = MakeCodec<E, Scaled<Fp8Codes>>();
  row[static_cast<int>(Format::kInt8)] = MakeCodec<E, Scaled<Int8Codes>>();
}

}  // namespace
}  // namespace hetcoll::HETCOLL_ISA_NAMESPACE
