#include "reduce.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

namespace fake::nccl {
namespace {

// A binary float of 1 sign bit, `kExponent` and `kMantissa` bits. With infinity as IEEE 754 has it, or (e4m3) without:
// then all ones is NaN and the highest exponent holds numbers.
template <class Storage, int kExponent, int kMantissa, bool kInfinity>
struct Small {
  Storage bits;

  static constexpr int kBias = (1 << (kExponent - 1)) - 1;
  static constexpr unsigned kMask = (1u << (kExponent + kMantissa)) - 1;
  static constexpr unsigned kTop = ((1u << kExponent) - 1) << kMantissa;  // the highest exponent

  operator float() const {
    unsigned magnitude = bits & kMask;
    float sign = bits >> (kExponent + kMantissa) & 1 ? -1.0f : 1.0f;
    if (kInfinity ? magnitude > kTop : magnitude == kMask) return std::numeric_limits<float>::quiet_NaN();
    if (kInfinity && magnitude == kTop) return sign * std::numeric_limits<float>::infinity();
    int exponent = static_cast<int>(magnitude >> kMantissa);
    unsigned fraction = magnitude & ((1u << kMantissa) - 1);
    if (exponent) fraction |= 1u << kMantissa;
    return sign * std::ldexp(static_cast<float>(fraction), (exponent ? exponent : 1) - kBias - kMantissa);
  }

  static Small from(float value) {
    unsigned sign = std::signbit(value) ? 1u << (kExponent + kMantissa) : 0;
    auto make = [sign](unsigned magnitude) { return Small{static_cast<Storage>(sign | magnitude)}; };
    constexpr unsigned kNan = kInfinity ? kTop | 1u << (kMantissa - 1) : kMask;
    constexpr unsigned kOverflow = kInfinity ? kTop : kMask;
    if (std::isnan(value)) return make(kNan);
    if (std::isinf(value)) return make(kOverflow);
    if (value == 0) return make(0);
    int exponent = std::ilogb(value);
    if (exponent < 1 - kBias) exponent = 1 - kBias;
    // In units of the last place, which nearbyint rounds to even.
    auto units = static_cast<unsigned>(std::nearbyint(std::ldexp(std::fabs(value), kMantissa - exponent)));
    unsigned code = units < 1u << kMantissa
                        ? units
                        : (static_cast<unsigned>(exponent + kBias) << kMantissa) + (units - (1u << kMantissa));
    return make(code >= kOverflow || exponent > kBias + 1 ? kOverflow : code);
  }
};

using Half = Small<std::uint16_t, 5, 10, true>;
using Brain = Small<std::uint16_t, 8, 7, true>;
using E4m3 = Small<std::uint8_t, 4, 3, false>;
using E5m2 = Small<std::uint8_t, 5, 2, true>;

template <class T>
constexpr bool kSmall = !std::is_arithmetic_v<T>;
template <class T>
using Wide = std::conditional_t<kSmall<T>, float, T>;

template <class W>
W combine(W a, W b, int op) {
  if constexpr (std::is_integral_v<W>) {
    using U = std::make_unsigned_t<W>;
    using Safe = std::conditional_t<(sizeof(U) < sizeof(unsigned)), unsigned, U>;  // no promotion to int
    if (op == kSum || op == kAvg) return static_cast<W>(static_cast<Safe>(a) + static_cast<Safe>(b));
    if (op == kProd) return static_cast<W>(static_cast<Safe>(a) * static_cast<Safe>(b));
  } else {
    if (op == kSum || op == kAvg) return a + b;
    if (op == kProd) return a * b;
    if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<W>::quiet_NaN();
  }
  return (op == kMax) == (a < b) ? b : a;
}

template <class T>
Wide<T> load(const unsigned char* from) {
  T element;
  std::memcpy(&element, from, sizeof(T));
  return static_cast<Wide<T>>(element);
}

template <class T>
void store(unsigned char* to, Wide<T> value) {
  T element;
  if constexpr (kSmall<T>) {
    element = T::from(value);
  } else {
    element = value;
  }
  std::memcpy(to, &element, sizeof(T));
}

template <class T>
void reduce_as(unsigned char* to, const unsigned char* const* sources, int ranks, std::size_t count, int op) {
  using W = Wide<T>;
  for (std::size_t at = 0; at < count * sizeof(T); at += sizeof(T)) {
    W total = load<T>(sources[0] + at);
    for (int rank = 1; rank < ranks; ++rank) total = combine<W>(total, load<T>(sources[rank] + at), op);
    if (std::is_integral_v<W> && op == kAvg) total = static_cast<W>(total / static_cast<W>(ranks));
    store<T>(to + at, total);
  }
}

// Calls `use` with a value of the type.
template <class Use>
void with_type(int dtype, Use use) {
  switch (dtype) {
    case kInt8:
      return use(std::int8_t{});
    case kUint8:
      return use(std::uint8_t{});
    case kInt32:
      return use(std::int32_t{});
    case kUint32:
      return use(std::uint32_t{});
    case kInt64:
      return use(std::int64_t{});
    case kUint64:
      return use(std::uint64_t{});
    case kFloat16:
      return use(Half{});
    case kFloat32:
      return use(float{});
    case kFloat64:
      return use(double{});
    case kBfloat16:
      return use(Brain{});
    case kFloat8e4m3:
      return use(E4m3{});
    case kFloat8e5m2:
      return use(E5m2{});
  }
}

}  // namespace

std::size_t itemsize(int dtype) {
  std::size_t size = 0;
  with_type(dtype, [&](auto element) { size = sizeof element; });
  return size;
}

void reduce(void* to, const unsigned char* const* sources, int ranks, std::size_t count, int dtype, int op) {
  with_type(dtype, [&](auto element) {
    reduce_as<decltype(element)>(static_cast<unsigned char*>(to), sources, ranks, count, op);
  });
}

void scale(void* data, std::size_t count, int dtype, double factor) {
  auto* bytes = static_cast<unsigned char*>(data);
  with_type(dtype, [&](auto element) {
    using T = decltype(element);
    for (std::size_t at = 0; at < count * sizeof(T); at += sizeof(T)) {
      store<T>(bytes + at, static_cast<Wide<T>>(load<T>(bytes + at) * static_cast<Wide<T>>(factor)));
    }
  });
}

bool integral(int dtype) { return dtype <= kUint64; }

double scalar(const void* value, int dtype) {
  double number = 0;
  with_type(dtype, [&](auto element) {
    number = static_cast<double>(load<decltype(element)>(static_cast<const unsigned char*>(value)));
  });
  return number;
}

}  // namespace fake::nccl
