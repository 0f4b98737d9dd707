// The kernels, compiled once per instruction set: kernels_<isa>.cc defines HETCOLL_ISA_NAMESPACE and includes this.
//
// Everything but the table and CopyStreaming has internal linkage (floats.h says why).

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "device/floats.h"
#include "device/kernel_table.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

// dst may be a or b, so one element's store may hit the loads of the same element, and of no other.
#ifdef __clang__
#define HETCOLL_VECTORIZE _Pragma("clang loop vectorize(assume_safety)")
#else
#define HETCOLL_VECTORIZE _Pragma("GCC ivdep")
#endif

namespace hetcoll::HETCOLL_ISA_NAMESPACE {
namespace {

// ---- Element-wise operations: Storage, and Apply on two elements ----

// Integers are summed and multiplied unsigned, which wraps; types narrower than int must not be promoted to it.
template <class T>
using Wide = decltype(T{} + 0u);

template <class T>
struct Sum {
  using Storage = T;
  static T Apply(T a, T b) { return static_cast<T>(Wide<T>{a} + Wide<T>{b}); }
};

template <class T>
struct Prod {
  using Storage = T;
  static T Apply(T a, T b) { return static_cast<T>(Wide<T>{a} * Wide<T>{b}); }
};

template <class T>
struct Max {
  using Storage = T;
  static T Apply(T a, T b) { return a > b ? a : b; }
};

template <class T>
struct Min {
  using Storage = T;
  static T Apply(T a, T b) { return a < b ? a : b; }
};

template <class T>
struct LogicalAnd {
  using Storage = T;
  static T Apply(T a, T b) { return static_cast<T>((a != 0) & (b != 0)); }
};

template <class T>
struct LogicalOr {
  using Storage = T;
  static T Apply(T a, T b) { return static_cast<T>((a | b) != 0); }
};

template <class T>
struct LogicalXor {
  using Storage = T;
  static T Apply(T a, T b) { return static_cast<T>((a != 0) ^ (b != 0)); }
};

template <class T>
struct BitAnd {
  using Storage = T;
  static T Apply(T a, T b) { return static_cast<T>(a & b); }
};

template <class T>
struct BitOr {
  using Storage = T;
  static T Apply(T a, T b) { return static_cast<T>(a | b); }
};

template <class T>
struct BitXor {
  using Storage = T;
  static T Apply(T a, T b) { return static_cast<T>(a ^ b); }
};

// float and double. Max and min propagate NaN and put -0 below +0, so that the order of the operands never shows.
template <class T>
struct FloatSum {
  using Storage = T;
  static T Apply(T a, T b) { return a + b; }
};

template <class T>
struct FloatProd {
  using Storage = T;
  static T Apply(T a, T b) { return a * b; }
};

template <class T>
struct BitsOf;
template <>
struct BitsOf<float> {
  using Type = std::uint32_t;
};
template <>
struct BitsOf<double> {
  using Type = std::uint64_t;
};

template <class T>
struct FloatMax {
  using Storage = T;
  static T Apply(T a, T b) {
    using Bits = typename BitsOf<T>::Type;
    const T larger = a > b ? a : b;
    const T equal = BitCast<T>(static_cast<Bits>(BitCast<Bits>(a) & BitCast<Bits>(b)));
    const T ordered = a == b ? equal : larger;
    return (a != a) | (b != b) ? static_cast<T>(__builtin_nan("")) : ordered;
  }
};

template <class T>
struct FloatMin {
  using Storage = T;
  static T Apply(T a, T b) {
    using Bits = typename BitsOf<T>::Type;
    const T smaller = a < b ? a : b;
    const T equal = BitCast<T>(static_cast<Bits>(BitCast<Bits>(a) | BitCast<Bits>(b)));
    const T ordered = a == b ? equal : smaller;
    return (a != a) | (b != b) ? static_cast<T>(__builtin_nan("")) : ordered;
  }
};

template <class T>
struct Complex {
  T re, im;
};

template <class T>
struct ComplexProd {
  using Storage = Complex<T>;
  static Storage Apply(Storage a, Storage b) { return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re}; }
};

// The narrow formats of floats.h: arithmetic in float32, comparisons on the codes.
template <class Format>
struct NarrowSum {
  using Storage = typename Format::Storage;
  static Storage Apply(Storage a, Storage b) {
    return static_cast<Storage>(Format::template Encode<std::uint32_t, float>(
        Format::template Decode<std::uint32_t, float>(a) + Format::template Decode<std::uint32_t, float>(b)));
  }
};

template <class Format>
struct NarrowProd {
  using Storage = typename Format::Storage;
  static Storage Apply(Storage a, Storage b) {
    return static_cast<Storage>(Format::template Encode<std::uint32_t, float>(
        Format::template Decode<std::uint32_t, float>(a) * Format::template Decode<std::uint32_t, float>(b)));
  }
};

template <class Bits>
struct SignedOf;
template <>
struct SignedOf<std::uint8_t> {
  using Type = std::int8_t;
};
template <>
struct SignedOf<std::uint16_t> {
  using Type = std::int16_t;
};

// Sign and magnitude to two's complement order, and back: flips the magnitude of negative codes.
template <class Bits>
inline Bits SortKey(Bits x) {
  using Signed = typename SignedOf<Bits>::Type;
  constexpr int kTop = 8 * sizeof(Bits) - 1;
  return static_cast<Bits>(x ^ (static_cast<Bits>(static_cast<Signed>(x) >> kTop) >> 1));
}

template <class Format, bool kLargest>
struct NarrowExtreme {
  using Storage = typename Format::Storage;
  static Storage Apply(Storage a, Storage b) {
    using Signed = typename SignedOf<Storage>::Type;
    const auto x = static_cast<Signed>(SortKey(a));
    const auto y = static_cast<Signed>(SortKey(b));
    const Signed best = kLargest ? (x > y ? x : y) : (x < y ? x : y);
    const Storage ordered = SortKey(static_cast<Storage>(best));
    return Format::IsNan(a) | Format::IsNan(b) ? static_cast<Storage>(Format::kNan) : ordered;
  }
};

template <class Format>
using NarrowMax = NarrowExtreme<Format, true>;
template <class Format>
using NarrowMin = NarrowExtreme<Format, false>;

// ---- Loops ----

// An element at any address, of any declared type.
template <class T>
struct __attribute__((packed, may_alias)) Unaligned {
  T value;
};

// Element counts below this go one by one: entering a vectorised loop costs more than it saves.
constexpr std::size_t kShort = 8;

template <class E>
void Loop(void* dst, const void* a, const void* b, std::size_t count) {
  using Slot = Unaligned<typename E::Storage>;
  auto* d = static_cast<Slot*>(dst);
  const auto* x = static_cast<const Slot*>(a);
  const auto* y = static_cast<const Slot*>(b);
  HETCOLL_VECTORIZE
  for (std::size_t i = 0; i < count; ++i) d[i].value = E::Apply(x[i].value, y[i].value);
}

template <class E>
void Loop2(void* dst, void* dst2, const void* a, const void* b, std::size_t count) {
  using Slot = Unaligned<typename E::Storage>;
  auto* d = static_cast<Slot*>(dst);
  auto* e = static_cast<Slot*>(dst2);
  const auto* x = static_cast<const Slot*>(a);
  const auto* y = static_cast<const Slot*>(b);
  HETCOLL_VECTORIZE
  for (std::size_t i = 0; i < count; ++i) {
    const auto value = E::Apply(x[i].value, y[i].value);
    d[i].value = value;
    e[i].value = value;
  }
}

// ---- Streaming: results are made in a block that stays in L1 and leave from there, past the cache ----

constexpr std::size_t kBlockBytes = 4096;

void StreamFence() {
#ifdef __x86_64__
  _mm_sfence();
#endif
}

// memcpy past the cache; the caller fences.
void CopyStream(void* dst, const void* src, std::size_t nbytes) {
#ifdef __x86_64__
  auto* d = static_cast<char*>(dst);
  const auto* s = static_cast<const char*>(src);
  std::size_t head = -reinterpret_cast<std::uintptr_t>(d) & 63;
  if (head > nbytes) head = nbytes;
  std::memcpy(d, s, head);
  d += head, s += head, nbytes -= head;
  for (; nbytes >= 64; d += 64, s += 64, nbytes -= 64) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(d), _mm512_loadu_si512(s));
#elif defined(__AVX2__)
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(s));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(s + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(d), low);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(d + 32), high);
#else
    for (int i = 0; i < 64; i += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(d + i), _mm_loadu_si128(reinterpret_cast<const __m128i_u*>(s + i)));
    }
#endif
  }
  std::memcpy(d, s, nbytes);
#else
  std::memcpy(dst, src, nbytes);
#endif
}

template <class E>
void Reduce(void* dst, const void* a, const void* b, std::size_t count, bool stream) {
  constexpr std::size_t kSize = sizeof(typename E::Storage);
  if (!stream || count * kSize < kBlockBytes) return Loop<E>(dst, a, b, count);
  alignas(64) char block[kBlockBytes];
  for (std::size_t done = 0; done < count;) {
    const std::size_t n = count - done < kBlockBytes / kSize ? count - done : kBlockBytes / kSize;
    Loop<E>(block, static_cast<const char*>(a) + done * kSize, static_cast<const char*>(b) + done * kSize, n);
    CopyStream(static_cast<char*>(dst) + done * kSize, block, n * kSize);
    done += n;
  }
  StreamFence();
}

template <class E>
void Reduce2(void* dst, void* dst2, const void* a, const void* b, std::size_t count, bool stream) {
  constexpr std::size_t kSize = sizeof(typename E::Storage);
  if (!stream || count * kSize < kBlockBytes) return Loop2<E>(dst, dst2, a, b, count);
  for (std::size_t done = 0; done < count;) {
    const std::size_t n = count - done < kBlockBytes / kSize ? count - done : kBlockBytes / kSize;
    char* block = static_cast<char*>(dst2) + done * kSize;
    Loop<E>(block, static_cast<const char*>(a) + done * kSize, static_cast<const char*>(b) + done * kSize, n);
    CopyStream(static_cast<char*>(dst) + done * kSize, block, n * kSize);
    done += n;
  }
  StreamFence();
}

// Complex numbers are summed by parts, and bits have no width: `kTimes` elements of E for each of the caller's.
template <class E, std::size_t kTimes>
void ReduceParts(void* dst, const void* a, const void* b, std::size_t count, bool stream) {
  Reduce<E>(dst, a, b, count * kTimes, stream);
}
template <class E, std::size_t kTimes>
void Reduce2Parts(void* dst, void* dst2, const void* a, const void* b, std::size_t count, bool stream) {
  Reduce2<E>(dst, dst2, a, b, count * kTimes, stream);
}

// ---- Division by a small integer ----

// A quotient of integers below 2^16 (2^32) is truncated right out of a float (double): rounding moves it by less than
// its distance from the next integer.
template <class T>
using Quotient = std::conditional_t<sizeof(T) <= 2, float, double>;

template <class T>
struct ScaleInt {
  using Storage = T;
  using Divisor = Quotient<T>;
  static T Apply(T x, Divisor divisor) { return static_cast<T>(static_cast<Divisor>(x) / divisor); }
};
template <>
struct ScaleInt<std::int64_t> {
  using Storage = std::int64_t;
  using Divisor = std::int64_t;
  static Storage Apply(Storage x, Divisor divisor) { return x / divisor; }
};
template <>
struct ScaleInt<std::uint64_t> {
  using Storage = std::uint64_t;
  using Divisor = std::uint64_t;
  static Storage Apply(Storage x, Divisor divisor) { return x / divisor; }
};

template <class T>
struct ScaleFloat {
  using Storage = T;
  using Divisor = T;
  static T Apply(T x, T divisor) { return x / divisor; }
};

template <class Format>
struct ScaleNarrow {
  using Storage = typename Format::Storage;
  using Divisor = float;
  static Storage Apply(Storage x, float divisor) {
    return static_cast<Storage>(
        Format::template Encode<std::uint32_t, float>(Format::template Decode<std::uint32_t, float>(x) / divisor));
  }
};

template <class E, std::size_t kTimes = 1>
void Scale(void* data, std::size_t count, unsigned divisor) {
  auto* x = static_cast<Unaligned<typename E::Storage>*>(data);
  const auto by = static_cast<typename E::Divisor>(divisor);
  HETCOLL_VECTORIZE
  for (std::size_t i = 0; i < count * kTimes; ++i) x[i].value = E::Apply(x[i].value, by);
}

// ---- The table ----

template <class E, std::size_t kTimes = 1>
constexpr Kernels Make(ScaleFn scale) {
  if constexpr (kTimes == 1) return {&Reduce<E>, &Reduce2<E>, scale};
  return {&ReduceParts<E, kTimes>, &Reduce2Parts<E, kTimes>, scale};
}

constexpr Kernels& At(KernelTable& table, DType dtype, ReduceOp op) {
  return table.entry[static_cast<int>(dtype)][static_cast<int>(op)];
}

// T orders and divides; its unsigned counterpart U does the rest, so that both signs share code.
template <class T, class U>
constexpr void AddInt(KernelTable& table, DType dtype) {
  constexpr ScaleFn kScale = &Scale<ScaleInt<T>>;
  At(table, dtype, ReduceOp::kSum) = At(table, dtype, ReduceOp::kAvg) = Make<Sum<U>>(kScale);
  At(table, dtype, ReduceOp::kProd) = Make<Prod<U>>(kScale);
  At(table, dtype, ReduceOp::kMax) = Make<Max<T>>(kScale);
  At(table, dtype, ReduceOp::kMin) = Make<Min<T>>(kScale);
  At(table, dtype, ReduceOp::kLand) = Make<LogicalAnd<U>>(kScale);
  At(table, dtype, ReduceOp::kLor) = Make<LogicalOr<U>>(kScale);
  At(table, dtype, ReduceOp::kLxor) = Make<LogicalXor<U>>(kScale);
  At(table, dtype, ReduceOp::kBand) = Make<BitAnd<std::uint8_t>, sizeof(T)>(kScale);
  At(table, dtype, ReduceOp::kBor) = Make<BitOr<std::uint8_t>, sizeof(T)>(kScale);
  At(table, dtype, ReduceOp::kBxor) = Make<BitXor<std::uint8_t>, sizeof(T)>(kScale);
}

template <class T>
constexpr void AddFloat(KernelTable& table, DType dtype) {
  constexpr ScaleFn kScale = &Scale<ScaleFloat<T>>;
  At(table, dtype, ReduceOp::kSum) = At(table, dtype, ReduceOp::kAvg) = Make<FloatSum<T>>(kScale);
  At(table, dtype, ReduceOp::kProd) = Make<FloatProd<T>>(kScale);
  At(table, dtype, ReduceOp::kMax) = Make<FloatMax<T>>(kScale);
  At(table, dtype, ReduceOp::kMin) = Make<FloatMin<T>>(kScale);
}

template <class Format>
constexpr void AddNarrow(KernelTable& table, DType dtype) {
  constexpr ScaleFn kScale = &Scale<ScaleNarrow<Format>>;
  At(table, dtype, ReduceOp::kSum) = At(table, dtype, ReduceOp::kAvg) = Make<NarrowSum<Format>>(kScale);
  At(table, dtype, ReduceOp::kProd) = Make<NarrowProd<Format>>(kScale);
  At(table, dtype, ReduceOp::kMax) = Make<NarrowMax<Format>>(kScale);
  At(table, dtype, ReduceOp::kMin) = Make<NarrowMin<Format>>(kScale);
}

template <class T>
constexpr void AddComplex(KernelTable& table, DType dtype) {
  constexpr ScaleFn kScale = &Scale<ScaleFloat<T>, 2>;
  At(table, dtype, ReduceOp::kSum) = At(table, dtype, ReduceOp::kAvg) = Make<FloatSum<T>, 2>(kScale);
  At(table, dtype, ReduceOp::kProd) = Make<ComplexProd<T>>(kScale);
}

constexpr void AddBool(KernelTable& table) {
  for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kLor, ReduceOp::kBor}) {
    At(table, DType::kBool, op) = Make<LogicalOr<std::uint8_t>>(nullptr);
  }
  for (ReduceOp op : {ReduceOp::kProd, ReduceOp::kMin, ReduceOp::kLand, ReduceOp::kBand}) {
    At(table, DType::kBool, op) = Make<LogicalAnd<std::uint8_t>>(nullptr);
  }
  for (ReduceOp op : {ReduceOp::kLxor, ReduceOp::kBxor}) {
    At(table, DType::kBool, op) = Make<LogicalXor<std::uint8_t>>(nullptr);
  }
}

void CopyStreamFenced(void* dst, const void* src, std::size_t nbytes) {
  CopyStream(dst, src, nbytes);
  StreamFence();
}

constexpr KernelTable MakeTable() {
  KernelTable table{};
  AddInt<std::int8_t, std::uint8_t>(table, DType::kInt8);
  AddInt<std::uint8_t, std::uint8_t>(table, DType::kUint8);
  AddInt<std::int16_t, std::uint16_t>(table, DType::kInt16);
  AddInt<std::uint16_t, std::uint16_t>(table, DType::kUint16);
  AddInt<std::int32_t, std::uint32_t>(table, DType::kInt32);
  AddInt<std::uint32_t, std::uint32_t>(table, DType::kUint32);
  AddInt<std::int64_t, std::uint64_t>(table, DType::kInt64);
  AddInt<std::uint64_t, std::uint64_t>(table, DType::kUint64);
  AddFloat<float>(table, DType::kFloat32);
  AddFloat<double>(table, DType::kFloat64);
  AddNarrow<Float16>(table, DType::kFloat16);
  AddNarrow<Bfloat16>(table, DType::kBfloat16);
  AddNarrow<Float8E4m3fn>(table, DType::kFloat8E4m3fn);
  AddNarrow<Float8E5m2>(table, DType::kFloat8E5m2);
  AddNarrow<Float8E4m3fnuz>(table, DType::kFloat8E4m3fnuz);
  AddNarrow<Float8E5m2fnuz>(table, DType::kFloat8E5m2fnuz);
  AddComplex<float>(table, DType::kComplex64);
  AddComplex<double>(table, DType::kComplex128);
  AddBool(table);
  table.copy_stream = &CopyStreamFenced;
  return table;
}

constexpr KernelTable kTable = MakeTable();

}  // namespace

const KernelTable& Table() { return kTable; }

}  // namespace hetcoll::HETCOLL_ISA_NAMESPACE
