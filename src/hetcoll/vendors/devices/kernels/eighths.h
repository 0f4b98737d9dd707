// 8-bit floats of tokens (hetcoll.experts): e4m3, with a float32 scale for each 128 elements.
#pragma once

#include "devices/kernels/reduce.h"

namespace hetcoll {

constexpr unsigned kGroup = 128;                      // elements with a scale in common
constexpr float kLargestE4m3 = 448;                   // of type_float8_e4m3fn
constexpr float kLeastTop = 7.8886090522101181e-31f;  // 2^-100: so a scale is a normal number, and 448 / top is finite

constexpr unsigned kCodes = 8;  // that a thread reads or writes at a time

template <class Type>
struct Eight {
  typename Type::Storage element[kCodes];
};

// A group as codes and what they are to be multiplied by. One that holds an infinity or a NaN is all NaN.
template <class Type, unsigned kAlign>
HETCOLL_DEVICE float EncodeAligned(char* codes, const char* from) {
  constexpr unsigned kUnits = kGroup / kCodes;
  unsigned top = 0;
  for (unsigned i = 0; i < kUnits; ++i) {
    const auto x = Load<Eight<Type>, kAlign>(from + i * sizeof(Eight<Type>));
    HETCOLL_UNROLL
    for (unsigned e = 0; e < kCodes; ++e) {
      const unsigned magnitude = BitCast<unsigned>(Type::Widen(x.element[e])) & 0x7fffffffu;
      top = magnitude > top ? magnitude : top;
    }
  }
  const bool finite = top < 0x7f800000u;
  const float most = BitCast<float>(top) < kLeastTop ? kLeastTop : BitCast<float>(top);
  const float factor = kLargestE4m3 / most;
  for (unsigned i = 0; i < kUnits; ++i) {
    const auto x = Load<Eight<Type>, kAlign>(from + i * sizeof(Eight<Type>));
    U64 found = 0;
    HETCOLL_UNROLL
    for (unsigned e = 0; e < kCodes; ++e) {
      const float y = Type::Widen(x.element[e]) * factor, low = y < -kLargestE4m3 ? -kLargestE4m3 : y;
      found |= U64{type_float8_e4m3fn::Narrow(low > kLargestE4m3 ? kLargestE4m3 : low)} << (8 * e);
    }
    Store<8>(codes + i * kCodes, finite ? found : U64{0});
  }
  return finite ? most / kLargestE4m3 : Nan<float>();
}

// Codes begin at a multiple of 8.
template <class Type>
HETCOLL_DEVICE float EncodeGroup(char* codes, const char* from) {
  return reinterpret_cast<U64>(from) % kPack == 0 ? EncodeAligned<Type, kPack>(codes, from)
                                                  : EncodeAligned<Type, 1>(codes, from);
}

// Unit `i` of a row of codes with the scales behind them.
template <class Type>
HETCOLL_DEVICE Eight<Type> DecodeUnit(const char* row, U64 hidden, U64 i) {
  const float scale = Load<float, 4>(row + hidden + i * kCodes / kGroup * 4);
  const auto codes = Load<U64, 8>(row + i * kCodes);
  Eight<Type> values;
  HETCOLL_UNROLL
  for (unsigned e = 0; e < kCodes; ++e) {
    const auto code = static_cast<type_float8_e4m3fn::Storage>(codes >> (8 * e));
    values.element[e] = Type::Narrow(type_float8_e4m3fn::Widen(code) * scale);
  }
  return values;
}

}  // namespace hetcoll
