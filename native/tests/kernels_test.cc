// Every type, operation and instruction set against a scalar reference, over counts, alignments, aliasing and
// streaming. Prints a summary; exits with 1 when anything differed.

#include "device/kernels.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

using hetcoll::CopyBytes;
using hetcoll::DType;
using hetcoll::FindKernels;
using hetcoll::ItemSize;
using hetcoll::KernelIsa;
using hetcoll::Kernels;
using hetcoll::ReduceOp;
using hetcoll::SetKernelIsa;

namespace {

long passed = 0, failed = 0;

#define CHECK(condition, ...)                                                      \
  do {                                                                             \
    if (condition) {                                                               \
      ++passed;                                                                    \
    } else if (++failed <= 20) {                                                   \
      std::printf("%s:%d: %s: %s: ", __FILE__, __LINE__, KernelIsa(), #condition); \
      std::printf(__VA_ARGS__);                                                    \
      std::printf("\n");                                                           \
    }                                                                              \
  } while (0)

using Bytes = std::vector<unsigned char>;

// ---- The reference: one element at a time, narrow floats through double and nearbyint ----

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

Format FormatOf(DType dtype) {
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

float Decode(const Format& f, unsigned code) {
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

unsigned Encode(const Format& f, float value) {
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

unsigned char ReduceBool(ReduceOp op, unsigned char a, unsigned char b) {
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

bool IsComplex(DType t) { return t == DType::kComplex64 || t == DType::kComplex128; }
bool IsNarrow(DType t) {
  return t == DType::kFloat16 || t == DType::kBfloat16 || t == DType::kFloat8E4m3fn || t == DType::kFloat8E5m2 ||
         t == DType::kFloat8E4m3fnuz || t == DType::kFloat8E5m2fnuz;
}
bool IsFloat(DType t) { return IsNarrow(t) || t == DType::kFloat32 || t == DType::kFloat64; }

// types.py: supports.
bool Supports(DType t, ReduceOp op) {
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

unsigned GetCode(const unsigned char* from, std::size_t size) { return size == 1 ? *from : Get<std::uint16_t>(from); }
void PutCode(unsigned char* to, std::size_t size, unsigned code) {
  size == 1 ? Put(to, static_cast<std::uint8_t>(code)) : Put(to, static_cast<std::uint16_t>(code));
}

Bytes ReferenceReduce(DType t, ReduceOp op, const Bytes& a, const Bytes& b) {
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

Bytes ReferenceScale(DType t, const Bytes& x, unsigned divisor) {
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

// ---- Comparison ----

bool SameElement(DType t, const unsigned char* x, const unsigned char* y) {
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

constexpr unsigned char kCanary = 0xa5;

// The index of the first element that differs, -1 where a byte outside was written, `count` where all is well.
long FirstDifference(DType t, const Bytes& got, std::size_t offset, const Bytes& want, std::size_t count) {
  const std::size_t size = ItemSize(t);
  for (std::size_t i = 0; i < got.size(); ++i) {
    if ((i < offset || i >= offset + count * size) && got[i] != kCanary) return -1;
  }
  if (std::memcmp(&got[offset], want.data(), count * size) == 0) return static_cast<long>(count);
  for (std::size_t i = 0; i < count; ++i) {
    if (!SameElement(t, &got[offset + i * size], &want[i * size])) return static_cast<long>(i);
  }
  return static_cast<long>(count);
}

// `data` at an offset, surrounded by canaries.
Bytes Framed(const unsigned char* data, std::size_t nbytes, std::size_t offset) {
  Bytes frame(offset + nbytes + 96, kCanary);
  if (nbytes != 0) std::memcpy(&frame[offset], data, nbytes);
  return frame;
}

// ---- Input: bit patterns of all kinds, and numbers that meet in a sum ----

Bytes Input(DType t, std::size_t count, unsigned seed) {
  std::mt19937_64 random(seed);
  Bytes data(count * ItemSize(t));
  for (auto& byte : data) byte = static_cast<unsigned char>(random());
  if (t == DType::kBool) {
    for (auto& byte : data) byte = random() % 2 ? byte : 0;
  } else if (!IsNarrow(t)) {
    WithType(t, [&]<class T>(T) {
      using Limits = std::numeric_limits<T>;
      const T special[] = {T{0},
                           static_cast<T>(-T{0}),
                           T{1},
                           Limits::max(),
                           Limits::lowest(),
                           Limits::min(),
                           Limits::denorm_min(),
                           Limits::infinity(),
                           static_cast<T>(-Limits::infinity()),
                           Limits::quiet_NaN(),
                           static_cast<T>(1.5)};
      for (std::size_t i = 0; i + sizeof(T) <= data.size(); i += sizeof(T)) {
        const auto pick = random() % 8;
        if (pick == 0) Put(&data[i], special[random() % std::size(special)]);
        if (pick >= 5) Put(&data[i], static_cast<T>(static_cast<T>(random() % 2000) / static_cast<T>(8)));
      }
    });
  }
  return data;
}

constexpr std::size_t kMost = 5000;

std::vector<std::size_t> Counts() {
  std::vector<std::size_t> counts;
  for (std::size_t i = 0; i <= 130; ++i) counts.push_back(i);
  counts.insert(counts.end(), {1000, 1024, 2049, kMost});
  return counts;
}

// ---- The tests ----

enum class Alias { kNone, kA, kB };

void TestReduce(DType t, ReduceOp op, const Kernels& kernels, const Bytes& a, const Bytes& b, const Bytes& want,
                std::size_t count, Alias alias, bool stream, std::size_t offset) {
  const std::size_t nbytes = count * ItemSize(t);
  Bytes x = Framed(a.data(), nbytes, offset), y = Framed(b.data(), nbytes, (offset * 3 + 1) % 64);
  const Bytes x_before = x, y_before = y;
  unsigned char *pa = &x[offset], *pb = &y[(offset * 3 + 1) % 64];
  const std::size_t at = alias == Alias::kB ? (offset * 3 + 1) % 64 : (alias == Alias::kA ? offset : (offset * 7) % 64);
  Bytes fresh(alias == Alias::kNone ? at + nbytes + 96 : 0, kCanary);
  Bytes& out = alias == Alias::kNone ? fresh : alias == Alias::kA ? x : y;
  const auto describe = [&](long where) {
    std::printf("dtype %d op %d count %zu alias %d stream %d offset %zu first difference at %ld\n", static_cast<int>(t),
                static_cast<int>(op), count, static_cast<int>(alias), stream, offset, where);
  };
  kernels.reduce(&out[at], pa, pb, count, stream);
  long where = FirstDifference(t, out, at, want, count);
  if (where != static_cast<long>(count)) describe(where);
  CHECK(where == static_cast<long>(count), "reduce");
  CHECK(alias == Alias::kA || x == x_before, "reduce wrote to a");
  CHECK(alias == Alias::kB || y == y_before, "reduce wrote to b");

  x = x_before, y = y_before;
  if (alias == Alias::kNone) std::fill(fresh.begin(), fresh.end(), kCanary);
  const std::size_t at2 = (offset * 5 + 3) % 64;
  Bytes second(at2 + nbytes + 96, kCanary);
  kernels.reduce2(&out[at], &second[at2], pa, pb, count, stream);
  where = std::min(FirstDifference(t, out, at, want, count), FirstDifference(t, second, at2, want, count));
  if (where != static_cast<long>(count)) describe(where);
  CHECK(where == static_cast<long>(count), "reduce2");
}

void TestScale(DType t, const Kernels& kernels, const Bytes& a) {
  for (unsigned divisor : {1u, 2u, 3u, 7u, 8u, 100u, 4097u, 16777217u, 3000000000u}) {
    const Bytes want = ReferenceScale(t, a, divisor);
    for (std::size_t count : Counts()) {
      const std::size_t offset = count % 64;
      Bytes x = Framed(a.data(), count * ItemSize(t), offset);
      kernels.scale(&x[offset], count, divisor);
      const long where = FirstDifference(t, x, offset, want, count);
      CHECK(where == static_cast<long>(count), "dtype %d divisor %u count %zu element %ld", static_cast<int>(t),
            divisor, count, where);
    }
  }
}

void TestType(DType t) {
  const Bytes a = Input(t, kMost, 1), b = Input(t, kMost, 2);
  for (int o = 0; o < hetcoll::kReduceOps; ++o) {
    const auto op = static_cast<ReduceOp>(o);
    const Kernels* kernels = FindKernels(t, op);
    CHECK((kernels != nullptr) == Supports(t, op), "dtype %d op %d", static_cast<int>(t), o);
    if (kernels == nullptr || op == ReduceOp::kAvg) continue;
    const Bytes want = ReferenceReduce(t, op, a, b);
    for (std::size_t count : Counts()) {
      for (Alias alias : {Alias::kNone, Alias::kA, Alias::kB}) {
        for (bool stream : {false, true}) {
          if (stream && count <= 130 && count % 64 > 1) continue;  // too short to stream: the same path
          TestReduce(t, op, *kernels, a, b, want, count, alias, stream, count % 3 == 0 ? 0 : (count * 5) % 64);
        }
      }
    }
  }
  const Kernels* average = FindKernels(t, ReduceOp::kAvg);
  if (average != nullptr) {
    CHECK(average->reduce == FindKernels(t, ReduceOp::kSum)->reduce, "kAvg reduces as kSum");
    TestScale(t, *average, a);
  }
}

// Every pair of codes of an 8-bit format, and all codes of a 16-bit one against some.
void TestAllCodes(DType t) {
  const std::size_t size = ItemSize(t);
  Bytes a(65536 * size), b(65536 * size), got(65536 * size);
  std::mt19937 random(3);
  for (unsigned i = 0; i < 65536; ++i) {
    PutCode(&a[i * size], size, size == 1 ? i >> 8 : i);
    PutCode(&b[i * size], size, size == 1 ? i & 255 : static_cast<unsigned>(random()) & 65535);
  }
  for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kProd, ReduceOp::kMax, ReduceOp::kMin}) {
    FindKernels(t, op)->reduce(got.data(), a.data(), b.data(), 65536, false);
    const Bytes want = ReferenceReduce(t, op, a, b);
    for (std::size_t i = 0; i < got.size(); i += size) {
      CHECK(SameElement(t, &got[i], &want[i]), "dtype %d op %d: %x with %x gave %x, not %x", static_cast<int>(t),
            static_cast<int>(op), GetCode(&a[i], size), GetCode(&b[i], size), GetCode(&got[i], size),
            GetCode(&want[i], size));
    }
  }
}

void TestCopy() {
  std::vector<std::size_t> sizes;
  for (std::size_t i = 0; i <= 600; ++i) sizes.push_back(i);
  sizes.insert(sizes.end(), {4095, 4096, 4097, 65536, 100001, 1 << 20, (1 << 21) + 7});
  Bytes source(1 << 22);
  std::mt19937 random(4);
  for (auto& byte : source) byte = static_cast<unsigned char>(random());
  for (std::size_t nbytes : sizes) {
    for (std::size_t offset : {0, 1, 17, 63}) {
      for (bool stream : {false, true}) {
        Bytes out(offset + nbytes + 96, kCanary);
        const unsigned char* from = &source[(nbytes + offset * 3) % 64];
        CopyBytes(&out[offset], from, nbytes, stream);
        bool same = std::memcmp(&out[offset], from, nbytes) == 0;
        for (std::size_t i = 0; i < offset; ++i) same = same && out[i] == kCanary;
        for (std::size_t i = offset + nbytes; i < out.size(); ++i) same = same && out[i] == kCanary;
        CHECK(same, "copy of %zu bytes at %zu, stream %d", nbytes, offset, stream);
      }
    }
  }
}

}  // namespace

int main() {
  CHECK(!SetKernelIsa("mmx"), "an unknown instruction set");
  CHECK(FindKernels(static_cast<DType>(hetcoll::kDTypes), ReduceOp::kSum) == nullptr, "an unknown type");
  CHECK(FindKernels(DType::kInt8, static_cast<ReduceOp>(hetcoll::kReduceOps)) == nullptr, "an unknown operation");
  CHECK(SetKernelIsa("baseline"), "every processor has it");
  int tested = 0;
  for (const char* isa : {"baseline", "avx2", "avx512"}) {
    if (!SetKernelIsa(isa)) continue;
    CHECK(std::strcmp(KernelIsa(), isa) == 0, "%s", isa);
    ++tested;
    for (int t = 0; t < hetcoll::kDTypes; ++t) {
      TestType(static_cast<DType>(t));
      if (IsNarrow(static_cast<DType>(t))) TestAllCodes(static_cast<DType>(t));
    }
    TestCopy();
  }
  std::printf("%ld passed, %ld failed, %d instruction sets\n", passed, failed, tested);
  return failed == 0 ? 0 : 1;
}
