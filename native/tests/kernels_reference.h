// The reference for kernels_test.cc: one element at a time, narrow floats through double and nearbyint.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "base/types.h"

namespace hetcoll::reference {

using Bytes = std::vector<unsigned char>;

struct Format {
  int exponent, mantissa, bias;
  bool infinity, negative_zero;
  int Bits() const { return 1 + exponent + mantissa; }
  double Largest() const {
    const int top = (1 << exponent) - 1;  // the highest exponent field; of finite numbers one less with infinities
    if (infinity) return std::ldexp(2.0 - std::ldexp(1.0, -mantissa), top - 1 - bias);
    // Without infinities all ones is a number, unless it is the NaN.
    return std::ldexp(2.0 - std::ldexp(negative_zero ? 2.0 : 1.0, -mantissa), top - bias);
  }
};

inline Format FormatOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return {5, 10, 15, true, true};
    case DType::kBfloat16:
      return {8, 7, 127, true, true};
    case DType::kFloat8E5m2:
      return {5, 2, 15, true, true};
    case DType::kFloat8E4m3fn:
      return {4, 3, 7, false, true};
    case DType::kFloat8E4m3fnuz:
      return {4, 3, 8, false, false};
    default:
      return {5, 2, 16, false, false};
  }
}

inline float Decode(const Format& f, unsigned code) {
  const bool negative = code >> (f.Bits() - 1);
  const int field = static_cast<int>(code >> f.mantissa) & ((1 << f.exponent) - 1);
  const int fraction = static_cast<int>(code) & ((1 << f.mantissa) - 1);
  const bool top = field == (1 << f.exponent) - 1;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  if (!f.negative_zero && negative && field == 0 && fraction == 0) return nan;
  if (f.infinity && top) {
    if (fraction != 0) return nan;
    return negative ? -std::numeric_limits<float>::infinity() : std::numeric_limits<float>::infinity();
  }
  if (!f.infinity && f.negative_zero && top && fraction == (1 << f.mantissa) - 1) return nan;
  const double significand = field == 0 ? fraction : fraction + (1 << f.mantissa);
  const double value = std::ldexp(significand, std::max(field, 1) - f.bias - f.mantissa);
  return static_cast<float>(negative ? -value : value);
}

inline unsigned Encode(const Format& f, float value) {
  const unsigned sign = 1u << (f.Bits() - 1);
  const unsigned infinity = ((1u << f.exponent) - 1) << f.mantissa;
  const unsigned nan = f.infinity ? infinity | 1u << (f.mantissa - 1) : f.negative_zero ? sign - 1 : sign;
  if (std::isnan(value)) return nan;
  const unsigned negative = std::signbit(value) ? sign : 0;
  const double magnitude = std::fabs(static_cast<double>(value));
  const int lowest = 1 - f.bias;
  const int exponent = magnitude == 0 || std::isinf(magnitude) ? lowest : std::max(std::ilogb(magnitude), lowest);
  const double place = std::ldexp(1.0, exponent - f.mantissa);
  const double rounded = std::isinf(magnitude) ? magnitude : std::nearbyint(magnitude / place) * place;
  if (rounded > f.Largest()) return f.infinity ? infinity | negative : f.negative_zero ? nan | negative : nan;
  if (rounded == 0) return f.negative_zero ? negative : 0;
  const int final_exponent = std::max(std::ilogb(rounded), lowest);
  const auto steps = static_cast<unsigned>(std::ldexp(rounded, f.mantissa - final_exponent));
  return ((static_cast<unsigned>(final_exponent - lowest) << f.mantissa) + steps) | negative;
}

template <class T>
T ReduceFloat(ReduceOp op, T a, T b) {
  if (op == ReduceOp::kSum || op == ReduceOp::kAvg) return a + b;
  if (op == ReduceOp::kProd) return a * b;
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
  const bool a_less = a < b || (a == b && std::signbit(a));
  return a_less == (op == ReduceOp::kMin) ? a : b;
}

template <class T>
T ReduceInt(ReduceOp op, T a, T b) {
  using U = std::uint64_t;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
    case ReduceOp::kProd:
      return static_cast<T>(static_cast<U>(a) * static_cast<U>(b));
    case ReduceOp::kMax:
      return std::max(a, b);
    case ReduceOp::kMin:
      return std::min(a, b);
    case ReduceOp::kLand:
      return a && b;
    case ReduceOp::kLor:
      return a || b;
    case ReduceOp::kLxor:
      return !a != !b;
    case ReduceOp::kBand:
      return static_cast<T>(a & b);
    case ReduceOp::kBor:
      return static_cast<T>(a | b);
    case ReduceOp::kBxor:
      return static_cast<T>(a ^ b);
  }
  return 0;
}

inline unsigned char ReduceBool(ReduceOp op, unsigned char a, unsigned char b) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
    case ReduceOp::kLor:
    case ReduceOp::kBor:
      return a || b;
    case ReduceOp::kLxor:
    case ReduceOp::kBxor:
      return !a != !b;
    default:
      return a && b;
  }
}

// Calls f with a value of the C++ type that holds `dtype`'s elements, or parts of them where they are complex.
template <class Function>
auto WithType(DType dtype, Function f) {
  switch (dtype) {
    case DType::kInt8:
      return f(std::int8_t{});
    case DType::kInt16:
      return f(std::int16_t{});
    case DType::kUint16:
      return f(std::uint16_t{});
    case DType::kInt32:
      return f(std::int32_t{});
    case DType::kUint32:
      return f(std::uint32_t{});
    case DType::kInt64:
      return f(std::int64_t{});
    case DType::kUint64:
      return f(std::uint64_t{});
    case DType::kFloat32:
    case DType::kComplex64:
      return f(float{});
    case DType::kFloat64:
    case DType::kComplex128:
      return f(double{});
    default:
      return f(std::uint8_t{});
  }
}

inline bool IsComplex(DType t) { return t == DType::kComplex64 || t == DType::kComplex128; }
inline bool IsNarrow(DType t) {
  return t == DType::kFloat16 || t == DType::kBfloat16 || t == DType::kFloat8E4m3fn || t == DType::kFloat8E5m2 ||
         t == DType::kFloat8E4m3fnuz || t == DType::kFloat8E5m2fnuz;
}
inline bool IsFloat(DType t) { return IsNarrow(t) || t == DType::kFloat32 || t == DType::kFloat64; }

// types.py: supports.
inline bool Supports(DType t, ReduceOp op) {
  if (IsComplex(t)) return op == ReduceOp::kSum || op == ReduceOp::kProd || op == ReduceOp::kAvg;
  if (IsFloat(t)) return op <= ReduceOp::kAvg;
  return !(t == DType::kBool && op == ReduceOp::kAvg);
}

template <class T>
T Get(const unsigned char* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class T>
void Put(unsigned char* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

inline unsigned GetCode(const unsigned char* from, std::size_t size) {
  return size == 1 ? *from : Get<std::uint16_t>(from);
}
inline void PutCode(unsigned char* to, std::size_t size, unsigned code) {
  size == 1 ? Put(to, static_cast<std::uint8_t>(code)) : Put(to, static_cast<std::uint16_t>(code));
}

inline Bytes ReferenceReduce(DType t, ReduceOp op, const Bytes& a, const Bytes& b) {
  const std::size_t size = ItemSize(t);
  Bytes result(a.size());
  for (std::size_t i = 0; i + size <= a.size(); i += size) {
    const unsigned char *x = &a[i], *y = &b[i];
    if (t == DType::kBool) {
      result[i] = ReduceBool(op, *x, *y);
    } else if (IsNarrow(t)) {
      const Format f = FormatOf(t);
      PutCode(&result[i], size, Encode(f, ReduceFloat(op, Decode(f, GetCode(x, size)), Decode(f, GetCode(y, size)))));
    } else {
      WithType(t, [&]<class T>(T) {
        if constexpr (std::is_integral_v<T>) {
          Put(&result[i], ReduceInt(op, Get<T>(x), Get<T>(y)));
        } else if (!IsComplex(t)) {
          Put(&result[i], ReduceFloat(op, Get<T>(x), Get<T>(y)));
        } else {
          const T p = Get<T>(x), q = Get<T>(x + sizeof(T)), r = Get<T>(y), s = Get<T>(y + sizeof(T));
          Put(&result[i], op == ReduceOp::kProd ? p * r - q * s : p + r);
          Put(&result[i + sizeof(T)], op == ReduceOp::kProd ? p * s + q * r : q + s);
        }
      });
    }
  }
  return result;
}

inline Bytes ReferenceScale(DType t, const Bytes& x, unsigned divisor) {
  const std::size_t size = ItemSize(t);
  Bytes result(x.size());
  for (std::size_t i = 0; i + size <= x.size(); i += size) {
    if (IsNarrow(t)) {
      const Format f = FormatOf(t);
      PutCode(&result[i], size, Encode(f, Decode(f, GetCode(&x[i], size)) / static_cast<float>(divisor)));
      continue;
    }
    WithType(t, [&]<class T>(T) {
      using Wide = std::conditional_t<std::is_floating_point_v<T>, T,
                                      std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>>;
      for (std::size_t part = 0; part < size; part += sizeof(T)) {
        Put(&result[i + part], static_cast<T>(static_cast<Wide>(Get<T>(&x[i + part])) / static_cast<Wide>(divisor)));
      }
    });
  }
  return result;
}

// `x` with the quiet NaN of sign 0 without a payload in place of every NaN.
inline Bytes WithOneNan(DType t, Bytes x) {
  const std::size_t size = ItemSize(t);
  if (IsNarrow(t)) {
    const Format f = FormatOf(t);
    for (std::size_t i = 0; i + size <= x.size(); i += size) {
      const unsigned nan = Encode(f, std::numeric_limits<float>::quiet_NaN());
      if (std::isnan(Decode(f, GetCode(&x[i], size)))) PutCode(&x[i], size, nan);
    }
    return x;
  }
  WithType(t, [&]<class T>(T) {
    if constexpr (std::is_floating_point_v<T>) {
      for (std::size_t i = 0; i + sizeof(T) <= x.size(); i += sizeof(T)) {
        if (std::isnan(Get<T>(&x[i]))) Put(&x[i], std::numeric_limits<T>::quiet_NaN());
      }
    }
  });
  return x;
}

// ---- Comparison ----

inline bool SameElement(DType t, const unsigned char* x, const unsigned char* y) {
  const std::size_t size = ItemSize(t);
  if (std::memcmp(x, y, size) == 0) return true;
  if (IsNarrow(t)) {
    const Format f = FormatOf(t);
    return std::isnan(Decode(f, GetCode(x, size))) && std::isnan(Decode(f, GetCode(y, size)));
  }
  return WithType(t, [&]<class T>(T) {
    if constexpr (std::is_floating_point_v<T>) {
      for (std::size_t i = 0; i < size; i += sizeof(T)) {
        const T p = Get<T>(x + i), q = Get<T>(y + i);
        if (std::memcmp(x + i, y + i, sizeof(T)) != 0 && !(std::isnan(p) && std::isnan(q))) return false;
      }
      return true;
    }
    return false;
  });
}

}  // namespace hetcoll::reference
