// Reductions and element types, one value at a time: what native/kernels/operations.h does to vectors, with the same
// bits.
#pragma once

#include "devices/kernels/floats.h"
#include "devices/kernels/platform.h"

namespace hetcoll {

template <bool kFirst, class A, class B>
struct Either {
  using Type = A;
};
template <class A, class B>
struct Either<false, A, B> {
  using Type = B;
};

template <class T>
struct alignas(2 * sizeof(T)) Pair {
  T real, imaginary;
};

// ---- Reductions. Integers wrap ----

// Unsigned, and wide enough that C++ promotes it to nothing else on the way.
template <class T>
using Wrapping = typename Either<sizeof(T) <= 4, unsigned, U64>::Type;

template <class T>
constexpr bool kIsFloat = false;
template <>
constexpr bool kIsFloat<float> = true;
template <>
constexpr bool kIsFloat<double> = true;

// The quiet NaN of sign 0 without a payload.
template <class T>
HETCOLL_DEVICE T Nan() {
  return BitCast<T>(static_cast<Wrapping<T>>(sizeof(T) == 4 ? 0x7fc00000u : 0x7ff8ull << 48));
}

struct Sum {
  static constexpr bool kAverages = true;

  template <class T>
  HETCOLL_DEVICE T Combine(T a, T b) {
    if constexpr (kIsFloat<T>) {
      return a + b;
    } else {
      return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
    }
  }
  template <class T>
  HETCOLL_DEVICE Pair<T> Combine(Pair<T> a, Pair<T> b) {
    return {a.real + b.real, a.imaginary + b.imaginary};
  }
};

struct NeverAverages {
  static constexpr bool kAverages = false;
};

struct Prod : NeverAverages {
  template <class T>
  HETCOLL_DEVICE T Combine(T a, T b) {
    if constexpr (kIsFloat<T>) {
      return a * b;
    } else {
      return static_cast<T>(static_cast<Wrapping<T>>(a) * static_cast<Wrapping<T>>(b));
    }
  }
  template <class T>
  HETCOLL_DEVICE Pair<T> Combine(Pair<T> a, Pair<T> b) {
    return {a.real * b.real - a.imaginary * b.imaginary, a.real * b.imaginary + a.imaginary * b.real};
  }
};

// Of floats, NaN propagates, and -0 is below +0, so that the order of the operands never shows.
template <bool kLargest>
struct Extreme : NeverAverages {
  template <class T>
  HETCOLL_DEVICE T Combine(T a, T b) {
    const T best = kLargest ? (a > b ? a : b) : (a < b ? a : b);
    if constexpr (kIsFloat<T>) {
      const Wrapping<T> x = BitCast<Wrapping<T>>(a), y = BitCast<Wrapping<T>>(b);
      const T equal = BitCast<T>(kLargest ? x & y : x | y);  // differs from them only where they are two zeros
      const T ordered = a == b ? equal : best;
      return a != a || b != b ? Nan<T>() : ordered;
    } else {
      return best;
    }
  }
};
using Max = Extreme<true>;
using Min = Extreme<false>;

struct LogicalAnd : NeverAverages {
  template <class T>
  HETCOLL_DEVICE T Combine(T a, T b) {
    return static_cast<T>(a != 0 && b != 0);
  }
};

struct LogicalOr : NeverAverages {
  template <class T>
  HETCOLL_DEVICE T Combine(T a, T b) {
    return static_cast<T>(a != 0 || b != 0);
  }
};

struct LogicalXor : NeverAverages {
  template <class T>
  HETCOLL_DEVICE T Combine(T a, T b) {
    return static_cast<T>((a != 0) != (b != 0));
  }
};

struct BitAnd : NeverAverages {
  template <class T>
  HETCOLL_DEVICE T Combine(T a, T b) {
    return static_cast<T>(a & b);
  }
};

struct BitOr : NeverAverages {
  template <class T>
  HETCOLL_DEVICE T Combine(T a, T b) {
    return static_cast<T>(a | b);
  }
};

struct BitXor : NeverAverages {
  template <class T>
  HETCOLL_DEVICE T Combine(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

// ---- Types: how elements lie in memory (Storage), what they are computed in (Value), and what each reduction is ----

template <class T>
struct Number {
  using Storage = T;
  using Value = T;

  HETCOLL_DEVICE Value Widen(Storage x) { return x; }
  HETCOLL_DEVICE Storage Narrow(Value x) { return x; }
  HETCOLL_DEVICE Storage Settle(Value x) { return x; }  // the same with one NaN, as Nan()
};

template <class T>
struct Integer : Number<T> {
  using sum = Sum;
  using prod = Prod;
  using max = Max;
  using min = Min;
  using land = LogicalAnd;
  using lor = LogicalOr;
  using lxor = LogicalXor;
  using band = BitAnd;
  using bor = BitOr;
  using bxor = BitXor;

  // A quotient of integers below 2^16 (2^32) is truncated right out of a float (double): rounding moves it by less
  // than its distance from the next integer.
  using Divisor = typename Either<sizeof(T) <= 2, float, typename Either<sizeof(T) == 4, double, T>::Type>::Type;

  HETCOLL_DEVICE T Divide(T x, unsigned by) {
    return static_cast<T>(static_cast<Divisor>(x) / static_cast<Divisor>(by));
  }
};

struct Bool : Number<unsigned char> {
  using sum = LogicalOr;
  using prod = LogicalAnd;
  using max = LogicalOr;
  using min = LogicalAnd;
  using land = LogicalAnd;
  using lor = LogicalOr;
  using lxor = LogicalXor;
  using band = LogicalAnd;
  using bor = LogicalOr;
  using bxor = LogicalXor;
};

template <class T>
struct Float : Number<T> {
  using sum = Sum;
  using prod = Prod;
  using max = Max;
  using min = Min;

  // Vendors differ in the NaN that comes out of arithmetic.
  HETCOLL_DEVICE T Settle(T x) { return x == x ? x : Nan<T>(); }
  HETCOLL_DEVICE T Divide(T x, unsigned by) { return x / static_cast<T>(by); }
};

template <class T>
struct Complex : Number<Pair<T>> {
  using sum = Sum;
  using prod = Prod;

  HETCOLL_DEVICE Pair<T> Settle(Pair<T> x) { return {Float<T>::Settle(x.real), Float<T>::Settle(x.imaginary)}; }
  HETCOLL_DEVICE Pair<T> Divide(Pair<T> x, unsigned by) {
    return {Float<T>::Divide(x.real, by), Float<T>::Divide(x.imaginary, by)};
  }
};

// The formats of floats.h are computed in float32 and rounded once.
template <class Format>
struct Small : Float<float> {
  using Codes = Format;
  using Storage = typename Format::Storage;
  static constexpr int kAbove = 32 - 8 * static_cast<int>(sizeof(Storage));

  HETCOLL_DEVICE float Widen(Storage x) {
    return Format::template Decode<std::uint32_t, float>(static_cast<std::uint32_t>(x) << kAbove);
  }
  HETCOLL_DEVICE Storage Narrow(float x) {
    return static_cast<Storage>(Format::template Encode<std::uint32_t, float>(x) >> kAbove);
  }
  // Overflow gives NaN of either sign in some formats.
  HETCOLL_DEVICE Storage Settle(float x) {
    const Storage code = Narrow(x);
    return (code & Format::kMagnitude) > Format::kTop ? static_cast<Storage>(Format::kNan) : code;
  }
};

// By the names in hetcoll/types.py.
using type_int8 = Integer<signed char>;
using type_uint8 = Integer<unsigned char>;
using type_int16 = Integer<short>;
using type_uint16 = Integer<unsigned short>;
using type_int32 = Integer<int>;
using type_uint32 = Integer<unsigned>;
using type_int64 = Integer<long long>;
using type_uint64 = Integer<U64>;
using type_float16 = Small<Float16>;
using type_bfloat16 = Small<Bfloat16>;
using type_float32 = Float<float>;
using type_float64 = Float<double>;
using type_float8_e4m3fn = Small<Float8E4m3fn>;
using type_float8_e5m2 = Small<Float8E5m2>;
using type_float8_e4m3fnuz = Small<Float8E4m3fnuz>;
using type_float8_e5m2fnuz = Small<Float8E5m2fnuz>;
using type_complex64 = Complex<float>;
using type_complex128 = Complex<double>;
using type_bool = Bool;

}  // namespace hetcoll
