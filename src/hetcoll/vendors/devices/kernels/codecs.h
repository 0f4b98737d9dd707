// How elements travel over a compressed edge: native/kernels/codecs.h says how, codecs.inc.h there does the same on a
// processor, with the same bits. A thread takes a block of 32 elements; the last block may be short.
#pragma once

#include "devices/kernels/reduce.h"

namespace hetcoll {

constexpr unsigned kCodecBlock = 32;

HETCOLL_DEVICE float PowerOfTwo(int e) { return BitCast<float>(static_cast<unsigned>(e + 127) << 23); }

// The exponents of a type's largest number, and of the smallest step that codes may have.
template <class Type>
struct Reach {
  [[maybe_unused]] static constexpr int kHighest = 127, kLowest = -126;
};
template <>
struct Reach<type_float16> {
  [[maybe_unused]] static constexpr int kHighest = 15, kLowest = -24;
};

// ---- Formats: a block of float32 to codes and back; `n` of its elements are there ----

struct AsBf16 {
  static constexpr unsigned kScale = 0, kCode = 2;

  template <class Type>
  HETCOLL_DEVICE void Encode(char* to, const float* v, unsigned n) {
    HETCOLL_UNROLL
    for (unsigned i = 0; i < kCodecBlock; ++i) {
      if (i < n) Store<2>(to + 2 * i, type_bfloat16::Narrow(v[i]));
    }
  }
  HETCOLL_DEVICE void Decode(float* v, const char* from, unsigned n) {
    HETCOLL_UNROLL
    for (unsigned i = 0; i < kCodecBlock; ++i) {
      v[i] = i < n ? type_bfloat16::Widen(Load<type_bfloat16::Storage, 2>(from + 2 * i)) : 0.0f;
    }
  }
  template <class Type>
  HETCOLL_DEVICE void Round(float* v) {
    HETCOLL_UNROLL
    for (unsigned i = 0; i < kCodecBlock; ++i) v[i] = type_bfloat16::Widen(type_bfloat16::Narrow(v[i]));
  }
};

// Codes times a power of two, which the largest magnitude of the block decides.
template <class Codes>
struct Scaled {
  static constexpr unsigned kScale = 1, kCode = 1;
  static constexpr unsigned kNan = 255;  // as a scale

  // The scale's code; kNan of a block that has an infinity or a NaN.
  template <class Type>
  HETCOLL_DEVICE unsigned Scale(const float* v) {
    unsigned top = 0;
    HETCOLL_UNROLL
    for (unsigned i = 0; i < kCodecBlock; ++i) {
      const unsigned magnitude = BitCast<unsigned>(v[i]) & 0x7fffffffu;
      top = magnitude > top ? magnitude : top;
    }
    if (top >= 0x7f800000u) return kNan;
    constexpr int kMost = Reach<Type>::kHighest - Codes::kBinade, kLeast = Reach<Type>::kLowest + Codes::kStep;
    int e = static_cast<int>(top >> 23) - 127 - Codes::kBinade;
    e = e > kMost ? kMost : e < kLeast ? kLeast : e;
    if (e < kMost && BitCast<float>(top) * PowerOfTwo(-e) >= Codes::kBeyond) ++e;
    return static_cast<unsigned>(e + 127);
  }
  HETCOLL_DEVICE unsigned Code(float x, unsigned scale) {
    const float y = x * PowerOfTwo(127 - static_cast<int>(scale)), low = y < -Codes::kLargest ? -Codes::kLargest : y;
    return Codes::Encode(low > Codes::kLargest ? Codes::kLargest : low);
  }
  HETCOLL_DEVICE float Value(unsigned code, unsigned scale) {
    const float factor = scale == kNan ? Nan<float>() : PowerOfTwo(scale == 0 ? 0 : static_cast<int>(scale) - 127);
    return Codes::Decode(code) * factor;
  }

  template <class Type>
  HETCOLL_DEVICE void Encode(char* to, const float* v, unsigned n) {
    const unsigned scale = Scale<Type>(v);
    *to = static_cast<char>(scale);
    HETCOLL_UNROLL
    for (unsigned i = 0; i < kCodecBlock; ++i) {
      if (i < n) to[1 + i] = static_cast<char>(scale == kNan ? 0 : Code(v[i], scale));
    }
  }
  HETCOLL_DEVICE void Decode(float* v, const char* from, unsigned n) {
    const unsigned scale = static_cast<unsigned char>(*from);
    HETCOLL_UNROLL
    for (unsigned i = 0; i < kCodecBlock; ++i) {
      v[i] = i < n ? Value(static_cast<unsigned char>(from[1 + i]), scale) : 0.0f;
    }
  }
  template <class Type>
  HETCOLL_DEVICE void Round(float* v) {
    const unsigned scale = Scale<Type>(v);
    HETCOLL_UNROLL
    for (unsigned i = 0; i < kCodecBlock; ++i) v[i] = Value(scale == kNan ? 0 : Code(v[i], scale), scale);
  }
};

struct Int8Codes {
  static constexpr int kBinade = 6;  // the largest code is 127
  static constexpr int kStep = 0;    // codes are multiples of 2^-kStep
  static constexpr float kLargest = 127, kBeyond = 127.5;

  HETCOLL_DEVICE unsigned Encode(float x) { return BitCast<unsigned>(x + 12582912.0f) & 0xffu; }  // the addition rounds
  HETCOLL_DEVICE float Decode(unsigned code) { return static_cast<float>(static_cast<signed char>(code)); }
};

struct Fp8Codes {
  static constexpr int kBinade = 8, kStep = 9;
  static constexpr float kLargest = 448, kBeyond = 464.5;  // at 464, a tie, rounding goes to 448

  HETCOLL_DEVICE unsigned Encode(float x) { return type_float8_e4m3fn::Narrow(x); }
  HETCOLL_DEVICE float Decode(unsigned code) {
    return type_float8_e4m3fn::Widen(static_cast<type_float8_e4m3fn::Storage>(code));
  }
};

using format_bf16 = AsBf16;
using format_fp8 = Scaled<Fp8Codes>;
using format_int8 = Scaled<Int8Codes>;

// ---- Whole buffers ----

template <class Type, class Format>
struct Coding {
  using T = typename Type::Storage;
  static constexpr U64 kBytes = kCodecBlock * sizeof(T), kWire = Format::kScale + kCodecBlock * Format::kCode;

  HETCOLL_DEVICE bool Aligned(const void* a, const void* b = nullptr) {
    return (reinterpret_cast<U64>(a) | reinterpret_cast<U64>(b)) % alignof(T) == 0;
  }
  template <unsigned kAlign>
  HETCOLL_DEVICE void Read(float* v, const char* from, unsigned n) {
    HETCOLL_UNROLL
    for (unsigned i = 0; i < kCodecBlock; ++i) {
      v[i] = i < n ? Type::Widen(Load<T, kAlign>(from + i * sizeof(T))) : 0.0f;
    }
  }
  template <unsigned kAlign>
  HETCOLL_DEVICE void Write(char* to, const float* v, unsigned n) {
    HETCOLL_UNROLL
    for (unsigned i = 0; i < kCodecBlock; ++i) {
      if (i < n) Store<kAlign>(to + i * sizeof(T), Type::Narrow(v[i]));
    }
  }

  template <unsigned kAlign>
  HETCOLL_DEVICE void Encode(char* wire, const char* src, U64 count) {
    const U64 blocks = (count + kCodecBlock - 1) / kCodecBlock;
    for (U64 b = ThreadIndex(); b < blocks; b += ThreadCount()) {
      const unsigned n = Length(b, count);
      float v[kCodecBlock];
      Read<kAlign>(v, src + b * kBytes, n);
      Format::template Encode<Type>(wire + b * kWire, v, n);
    }
  }

  // dst = what the codes stand for, or that added to `x`.
  template <unsigned kAlign>
  HETCOLL_DEVICE void Decode(char* dst, const char* x, const char* wire, U64 count) {
    const U64 blocks = (count + kCodecBlock - 1) / kCodecBlock;
    for (U64 b = ThreadIndex(); b < blocks; b += ThreadCount()) {
      const unsigned n = Length(b, count);
      float v[kCodecBlock];
      Format::Decode(v, wire + b * kWire, n);
      if (x != nullptr) {
        float mine[kCodecBlock];
        Read<kAlign>(mine, x + b * kBytes, n);
        HETCOLL_UNROLL
        for (unsigned i = 0; i < kCodecBlock; ++i) {
          v[i] = Type::Widen(Type::Settle(mine[i] + Type::Widen(Type::Narrow(v[i]))));
        }
      }
      Write<kAlign>(dst + b * kBytes, v, n);
    }
  }

  template <unsigned kAlign>
  HETCOLL_DEVICE void Round(char* dst, const char* src, float* residual, U64 count) {
    const U64 blocks = (count + kCodecBlock - 1) / kCodecBlock;
    for (U64 b = ThreadIndex(); b < blocks; b += ThreadCount()) {
      const unsigned n = Length(b, count);
      float v[kCodecBlock], y[kCodecBlock], *lost = residual + b * kCodecBlock;
      Read<kAlign>(v, src + b * kBytes, n);
      if (residual != nullptr) {
        HETCOLL_UNROLL
        for (unsigned i = 0; i < kCodecBlock; ++i) v[i] += i < n ? lost[i] : 0.0f;
      }
      HETCOLL_UNROLL
      for (unsigned i = 0; i < kCodecBlock; ++i) y[i] = v[i];
      Format::template Round<Type>(y);
      Write<kAlign>(dst + b * kBytes, y, n);
      if (residual == nullptr) continue;
      HETCOLL_UNROLL
      for (unsigned i = 0; i < kCodecBlock; ++i) {
        const float left = v[i] - y[i];
        if (i < n) lost[i] = (BitCast<unsigned>(left) & 0x7f800000u) == 0x7f800000u ? 0.0f : left;
      }
    }
  }

 private:
  HETCOLL_DEVICE unsigned Length(U64 block, U64 count) {
    const U64 left = count - block * kCodecBlock;
    return static_cast<unsigned>(left < kCodecBlock ? left : kCodecBlock);
  }
};

}  // namespace hetcoll

// Elements may lie anywhere; codes and residuals at multiples of 4.
#define HETCOLL_CODECS(dtype, format)                                                                         \
  HETCOLL_KERNEL round_##dtype##_##format(void* dst, const void* src, void* residual, unsigned long long n) { \
    using C = hetcoll::Coding<hetcoll::type_##dtype, hetcoll::format_##format>;                               \
    auto *to = static_cast<char*>(dst), *lost = static_cast<char*>(residual);                                 \
    const auto* from = static_cast<const char*>(src);                                                         \
    auto* kept = reinterpret_cast<float*>(lost);                                                              \
    C::Aligned(dst, src) ? C::template Round<alignof(C::T)>(to, from, kept, n)                                \
                         : C::template Round<1>(to, from, kept, n);                                           \
  }                                                                                                           \
  HETCOLL_ENTRY(round_##dtype##_##format)                                                                     \
  HETCOLL_KERNEL encode_##dtype##_##format(void* wire, const void* src, unsigned long long n) {               \
    using C = hetcoll::Coding<hetcoll::type_##dtype, hetcoll::format_##format>;                               \
    auto* to = static_cast<char*>(wire);                                                                      \
    const auto* from = static_cast<const char*>(src);                                                         \
    C::Aligned(src) ? C::template Encode<alignof(C::T)>(to, from, n) : C::template Encode<1>(to, from, n);    \
  }                                                                                                           \
  HETCOLL_ENTRY(encode_##dtype##_##format)                                                                    \
  HETCOLL_KERNEL decode_##dtype##_##format(void* dst, const void* wire, unsigned long long n) {               \
    using C = hetcoll::Coding<hetcoll::type_##dtype, hetcoll::format_##format>;                               \
    auto* to = static_cast<char*>(dst);                                                                       \
    const auto* from = static_cast<const char*>(wire);                                                        \
    C::Aligned(dst) ? C::template Decode<alignof(C::T)>(to, nullptr, from, n)                                 \
                    : C::template Decode<1>(to, nullptr, from, n);                                            \
  }                                                                                                           \
  HETCOLL_ENTRY(decode_##dtype##_##format)                                                                    \
  HETCOLL_KERNEL add_##dtype##_##format(void* dst, const void* x, const void* wire, unsigned long long n) {   \
    using C = hetcoll::Coding<hetcoll::type_##dtype, hetcoll::format_##format>;                               \
    auto* to = static_cast<char*>(dst);                                                                       \
    const auto *mine = static_cast<const char*>(x), *from = static_cast<const char*>(wire);                   \
    C::Aligned(dst, x) ? C::template Decode<alignof(C::T)>(to, mine, from, n)                                 \
                       : C::template Decode<1>(to, mine, from, n);                                            \
  }                                                                                                           \
  HETCOLL_ENTRY(add_##dtype##_##format)
