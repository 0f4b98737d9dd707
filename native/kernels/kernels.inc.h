// The kernels, compiled once per instruction set: kernels_<isa>.cc defines HETCOLL_ISA_NAMESPACE and includes this.
// Everything but Table() has internal linkage (floats.h says why).

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "kernels/codecs.inc.h"
#include "kernels/kernel_table.h"
#include "kernels/operations.h"

namespace hetcoll::HETCOLL_ISA_NAMESPACE {
namespace {

// ---- Pages by turns ----

constexpr std::size_t kPart = 512;  // bytes of one page before the next one's turn

// Calls part(at), inlined, for the parts of whole groups of four pages. Returns where these end.
template <class Part>
HETCOLL_INLINE std::size_t ByPages(std::size_t nbytes, Part part) {
  constexpr std::size_t kPage = 4096, kPages = 4;
  std::size_t at = 0;
  for (; at + kPages * kPage <= nbytes; at += kPages * kPage) {
    for (std::size_t i = 0; i < kPage; i += kPart) {
      for (std::size_t page = at + i; page < at + kPages * kPage; page += kPage) part(page);
    }
  }
  return at;
}

// ---- Reductions ----

// Where results go: Put takes whole vectors, PutPart the first bytes of one of 16.
struct One {
  char* dst;

  One At(std::size_t at) const { return {dst + at}; }

  template <class V>
  HETCOLL_INLINE void Put(std::size_t at, V v) const {
    Store(dst + at, v);
  }
  template <class V>
  HETCOLL_INLINE void PutPart(V v, std::size_t nbytes) const {
    StorePart(dst, v, nbytes);
  }
};

struct Both {
  char *dst, *dst2;

  Both At(std::size_t at) const { return {dst + at, dst2 + at}; }

  template <class V>
  HETCOLL_INLINE void Put(std::size_t at, V v) const {
    Store(dst + at, v);
    Store(dst2 + at, v);
  }
  template <class V>
  HETCOLL_INLINE void PutPart(V v, std::size_t nbytes) const {
    StorePart(dst, v, nbytes);
    StorePart(dst2, v, nbytes);
  }
};

// At least one vector of kBytes. The last one may overlap the one before it, so it is computed before anything is
// stored: dst may be a or b.
template <std::size_t kBytes, class E, class Out>
HETCOLL_INLINE void Vectors(E op, Out out, const char* a, const char* b, std::size_t nbytes) {
  using V = Vector<typename E::Element, kBytes>;
  const std::size_t end = nbytes - kBytes;
  const V last = op.Apply(Load<V>(a + end), Load<V>(b + end));
  for (std::size_t i = 0; i < end; i += kBytes) out.Put(i, op.Apply(Load<V>(a + i), Load<V>(b + i)));
  out.Put(end, last);
}

template <class E, class Out>
HETCOLL_INLINE void Run(E op, Out out, const char* a, const char* b, std::size_t nbytes) {
  if (nbytes < 16) {
    using V = Vector<typename E::Element, 16>;
    out.PutPart(op.Apply(LoadPart<V>(a, nbytes), LoadPart<V>(b, nbytes)), nbytes);
  } else if (nbytes < E::kStep) {
    Vectors<16>(op, out, a, b, nbytes);
  } else {
    Vectors<E::kStep>(op, out, a, b, nbytes);
  }
}

template <class E, class Out>
void Plain(Out out, const char* a, const char* b, std::size_t nbytes) {
  Run(E{}, out, a, b, nbytes);
}

template <class E, class Out>
__attribute__((noinline)) void Pages(Out out, const char* a, const char* b, std::size_t nbytes) {
  using V = Vector<typename E::Element, E::kStep>;
  const std::size_t rest = ByPages(nbytes, [=](std::size_t at) HETCOLL_LAMBDA {
#pragma GCC unroll 4
    for (std::size_t i = at; i < at + kPart; i += E::kStep) out.Put(i, E{}.Apply(Load<V>(a + i), Load<V>(b + i)));
  });
  Plain<E>(out.At(rest), a + rest, b + rest, nbytes - rest);
}

// ---- Copies, and what goes past the cache ----

// At least kLine bytes. The first and the last line are unaligned and may overlap the aligned ones between them.
template <bool kStream>
HETCOLL_INLINE void CopyLines(char* dst, const char* src, std::size_t nbytes) {
  CopyEnds<kLine>(dst, src, nbytes);
  std::size_t i = kLine - reinterpret_cast<std::uintptr_t>(dst) % kLine;
#pragma GCC unroll 4
  for (; i + kLine < nbytes; i += kLine) {
#pragma GCC unroll 4
    for (std::size_t j = 0; j < kLine; j += kWidth) {
      const auto v = Load<Vector<char, kWidth>>(src + i + j);
      kStream ? StoreStream(dst + i + j, v) : Store(dst + i + j, v);
    }
  }
}

// Below this, waiting for the stores to arrive costs more than the cache gains.
constexpr std::size_t kStreamBytes = 4096;

// A word into each of the lines that begin in [at, end).
HETCOLL_INLINE void Claim(char* at, const char* end) {
  for (; at < end; at += kLine) Store(at, std::uint64_t{0});
}

// CopyLines, a few lines at a time so that they are claimed while they are at hand. Claims never overtake reads.
template <bool kStream>
HETCOLL_INLINE void TakeLines(char* dst, char* src, std::size_t nbytes) {
  CopyEnds<kLine>(dst, src, nbytes);
  std::size_t i = kLine - reinterpret_cast<std::uintptr_t>(dst) % kLine;
  std::size_t claimed = 0;
  for (; i + 4 * kLine <= nbytes; i += 4 * kLine) {
#pragma GCC unroll 16
    for (std::size_t j = 0; j < 4 * kLine; j += kWidth) {
      const auto v = Load<Vector<char, kWidth>>(src + i + j);
      kStream ? StoreStream(dst + i + j, v) : Store(dst + i + j, v);
    }
    Claim(src + claimed, src + claimed + 4 * kLine);
    claimed += 4 * kLine;
  }
  for (; i + kLine < nbytes; i += kLine) {
#pragma GCC unroll 4
    for (std::size_t j = 0; j < kLine; j += kWidth) Store(dst + i + j, Load<Vector<char, kWidth>>(src + i + j));
  }
  Claim(src + claimed, src + nbytes);
}

void Take(char* dst, char* src, std::size_t nbytes, bool stream) {
  if (nbytes <= kSmallCopy) {
    CopySmall(dst, src, nbytes);
    return Claim(src, src + nbytes);
  }
  if (!stream || nbytes < kStreamBytes) return TakeLines<false>(dst, src, nbytes);
  TakeLines<true>(dst, src, nbytes);
  StoreFence();
}

void CopyPlain(char* dst, const char* src, std::size_t nbytes) {
  if (nbytes <= kSmallCopy) return CopySmall(dst, src, nbytes);
  CopyLines<false>(dst, src, nbytes);
}

void CopyPages(char* dst, const char* src, std::size_t nbytes) {
  const std::size_t head = -reinterpret_cast<std::uintptr_t>(dst) % kLine;  // stores do not straddle lines
  CopySmall(dst, src, head);
  const std::size_t rest = head + ByPages(nbytes - head, [=](std::size_t at) HETCOLL_LAMBDA {
#pragma GCC unroll 4
                             for (std::size_t i = head + at; i < head + at + kPart; i += kWidth) {
                               Store(dst + i, Load<Vector<char, kWidth>>(src + i));
                             }
                           });
  CopyPlain(dst + rest, src + rest, nbytes - rest);
}

void Copy(char* dst, const char* src, std::size_t nbytes, Sweep sweep) {
  if (sweep == Sweep::kPlain || nbytes < kStreamBytes) return CopyPlain(dst, src, nbytes);
  if (sweep == Sweep::kPages) return CopyPages(dst, src, nbytes);
  CopyLines<true>(dst, src, nbytes);
  StoreFence();
}

// To dst around the cache, and where kTwo to dst2 through it.
template <class E, bool kTwo>
__attribute__((noinline)) void Stream(char* dst, char* dst2, const char* a, const char* b, std::size_t nbytes) {
  using V = Vector<typename E::Element, E::kStep>;
  const auto plain = [=](std::size_t i, std::size_t n) {
    kTwo ? Plain<E>(Both{dst + i, dst2 + i}, a + i, b + i, n) : Plain<E>(One{dst + i}, a + i, b + i, n);
  };
  const std::size_t head = -reinterpret_cast<std::uintptr_t>(dst) % kLine;
  // Elements that straddle cache lines go through the cache.
  if (head % E::kUnit != 0) return plain(0, nbytes);
  plain(0, head);
  const std::size_t end = head + (nbytes - head) / kLine * kLine;
  for (std::size_t i = head; i < end; i += E::kStep) {
    const V v = E{}.Apply(Load<V>(a + i), Load<V>(b + i));
    StoreStream(dst + i, v);
    if constexpr (kTwo) Store(dst2 + i, v);
  }
  plain(end, nbytes - end);
  StoreFence();
}

// kSize is the size of the caller's elements: E's may be halves of complex numbers, or words of bits.
template <class E, std::size_t kSize>
void Reduce(void* dst, const void* a, const void* b, std::size_t count, Sweep sweep) {
  auto* d = static_cast<char*>(dst);
  const auto *x = static_cast<const char*>(a), *y = static_cast<const char*>(b);
  const std::size_t nbytes = count * kSize;
  if (sweep == Sweep::kPlain || nbytes < kStreamBytes) return Plain<E>(One{d}, x, y, nbytes);
  sweep == Sweep::kPages ? Pages<E>(One{d}, x, y, nbytes) : Stream<E, false>(d, nullptr, x, y, nbytes);
}

template <class E, std::size_t kSize>
void Reduce2(void* dst, void* dst2, const void* a, const void* b, std::size_t count, Sweep sweep) {
  auto *d = static_cast<char*>(dst), *d2 = static_cast<char*>(dst2);
  const auto *x = static_cast<const char*>(a), *y = static_cast<const char*>(b);
  const std::size_t nbytes = count * kSize;
  if (sweep == Sweep::kPlain || nbytes < kStreamBytes) return Plain<E>(Both{d, d2}, x, y, nbytes);
  sweep == Sweep::kPages ? Pages<E>(Both{d, d2}, x, y, nbytes) : Stream<E, true>(d, d2, x, y, nbytes);
}

// ---- Division by a small integer ----

template <class T>
struct Quotient : Operation<T> {
  T divisor;

  template <class V>
  HETCOLL_INLINE V Apply(V x, V) const {
    return x / divisor;
  }
};

template <class T>
struct Multiple : Operation<T> {
  T factor;

  template <class V>
  HETCOLL_INLINE V Apply(V x, V) const {
    return x * factor;
  }
};

template <class T, std::size_t kSize>
void Scale(void* data, std::size_t count, unsigned divisor) {
  auto* x = static_cast<char*>(data);
  const auto by = static_cast<T>(divisor);
  // The reciprocal of a power of two is exact: multiplying by it, which is faster, rounds as the division does.
  if ((divisor & (divisor - 1)) == 0) return Run(Multiple<T>{{}, 1 / by}, One{x}, x, x, count * kSize);
  Run(Quotient<T>{{}, by}, One{x}, x, x, count * kSize);
}

template <class Format>
struct NarrowQuotient : InFloat32<Format> {
  float divisor;

  template <class V>
  HETCOLL_INLINE V Apply(V x, V) const {
    return InFloat32<Format>::Call([by = divisor](auto value) HETCOLL_LAMBDA { return value / by; }, x);
  }
};

template <class Format>
void ScaleNarrow(void* data, std::size_t count, unsigned divisor) {
  auto* x = static_cast<char*>(data);
  const auto by = static_cast<float>(divisor);
  Run(NarrowQuotient<Format>{{}, by}, One{x}, x, x, count * sizeof(typename Format::Storage));
}

// An integer at any address, of any declared type.
template <class T>
struct __attribute__((packed, may_alias)) Unaligned {
  T value;
};

// A quotient of integers below 2^16 (2^32) is truncated right out of a float (double): rounding moves it by less than
// its distance from the next integer.
template <class T>
void ScaleInt(void* data, std::size_t count, unsigned divisor) {
  using Divisor = std::conditional_t<sizeof(T) <= 2, float, std::conditional_t<sizeof(T) == 4, double, T>>;
  const auto by = static_cast<Divisor>(divisor);
  auto* x = static_cast<Unaligned<T>*>(data);
  for (std::size_t i = 0; i < count; ++i) x[i].value = static_cast<T>(static_cast<Divisor>(x[i].value) / by);
}

// ---- The table ----

template <class E, std::size_t kSize>
constexpr Kernels Make(ScaleFn scale) {
  return {&Reduce<E, kSize>, &Reduce2<E, kSize>, scale};
}

constexpr Kernels& At(KernelTable& table, DType dtype, ReduceOp op) {
  return table.entry[static_cast<int>(dtype)][static_cast<int>(op)];
}

constexpr Kernels& OneNanAt(KernelTable& table, DType dtype, ReduceOp op) {
  return table.one_nan[static_cast<int>(dtype)][static_cast<int>(op)];
}

// Into the table of those that give one NaN.
template <class S, class P, std::size_t kSize>
constexpr void AddOneNan(KernelTable& table, DType dtype, ScaleFn scale) {
  OneNanAt(table, dtype, ReduceOp::kSum) = OneNanAt(table, dtype, ReduceOp::kAvg) = Make<S, kSize>(scale);
  OneNanAt(table, dtype, ReduceOp::kProd) = Make<P, kSize>(scale);
}

// T orders and divides; its unsigned counterpart U does the rest: it wraps, and both signs share code.
template <class T, class U>
constexpr void AddInt(KernelTable& table, DType dtype) {
  constexpr ScaleFn kScale = &ScaleInt<T>;
  constexpr std::size_t kSize = sizeof(T);
  At(table, dtype, ReduceOp::kSum) = At(table, dtype, ReduceOp::kAvg) = Make<Sum<U>, kSize>(kScale);
  At(table, dtype, ReduceOp::kProd) = Make<Prod<U>, kSize>(kScale);
  At(table, dtype, ReduceOp::kMax) = Make<Max<T>, kSize>(kScale);
  At(table, dtype, ReduceOp::kMin) = Make<Min<T>, kSize>(kScale);
  At(table, dtype, ReduceOp::kLand) = Make<LogicalAnd<U>, kSize>(kScale);
  At(table, dtype, ReduceOp::kLor) = Make<LogicalOr<U>, kSize>(kScale);
  At(table, dtype, ReduceOp::kLxor) = Make<LogicalXor<U>, kSize>(kScale);
  At(table, dtype, ReduceOp::kBand) = Make<BitAnd, kSize>(kScale);
  At(table, dtype, ReduceOp::kBor) = Make<BitOr, kSize>(kScale);
  At(table, dtype, ReduceOp::kBxor) = Make<BitXor, kSize>(kScale);
}

template <class T>
constexpr void AddFloat(KernelTable& table, DType dtype) {
  constexpr ScaleFn kScale = &Scale<T, sizeof(T)>;
  At(table, dtype, ReduceOp::kSum) = At(table, dtype, ReduceOp::kAvg) = Make<Sum<T>, sizeof(T)>(kScale);
  At(table, dtype, ReduceOp::kProd) = Make<Prod<T>, sizeof(T)>(kScale);
  At(table, dtype, ReduceOp::kMax) = Make<FloatExtreme<T, true>, sizeof(T)>(kScale);
  At(table, dtype, ReduceOp::kMin) = Make<FloatExtreme<T, false>, sizeof(T)>(kScale);
  AddOneNan<OneNan<Sum<T>>, OneNan<Prod<T>>, sizeof(T)>(table, dtype, kScale);
}

template <class Format>
constexpr void AddNarrow(KernelTable& table, DType dtype) {
  constexpr std::size_t kSize = sizeof(typename Format::Storage);
  constexpr ScaleFn kScale = &ScaleNarrow<Format>;
  At(table, dtype, ReduceOp::kSum) = At(table, dtype, ReduceOp::kAvg) = Make<NarrowSum<Format>, kSize>(kScale);
  At(table, dtype, ReduceOp::kProd) = Make<NarrowProd<Format>, kSize>(kScale);
  At(table, dtype, ReduceOp::kMax) = Make<NarrowExtreme<Format, true>, kSize>(kScale);
  At(table, dtype, ReduceOp::kMin) = Make<NarrowExtreme<Format, false>, kSize>(kScale);
  if constexpr (Format::kNan <= Format::kMagnitude) {  // the others have one NaN
    AddOneNan<NarrowOneNan<Format, NarrowSum<Format>>, NarrowOneNan<Format, NarrowProd<Format>>, kSize>(table, dtype,
                                                                                                        kScale);
  }
}

template <class T>
constexpr void AddComplex(KernelTable& table, DType dtype) {
  constexpr std::size_t kSize = 2 * sizeof(T);
  constexpr ScaleFn kScale = &Scale<T, kSize>;
  At(table, dtype, ReduceOp::kSum) = At(table, dtype, ReduceOp::kAvg) = Make<Sum<T>, kSize>(kScale);
  At(table, dtype, ReduceOp::kProd) = Make<ComplexProd<T>, kSize>(kScale);
  AddOneNan<OneNan<Sum<T>>, OneNan<ComplexProd<T>>, kSize>(table, dtype, kScale);
}

constexpr void AddBool(KernelTable& table) {
  for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kLor, ReduceOp::kBor}) {
    At(table, DType::kBool, op) = Make<LogicalOr<std::uint8_t>, 1>(nullptr);
  }
  for (ReduceOp op : {ReduceOp::kProd, ReduceOp::kMin, ReduceOp::kLand, ReduceOp::kBand}) {
    At(table, DType::kBool, op) = Make<LogicalAnd<std::uint8_t>, 1>(nullptr);
  }
  for (ReduceOp op : {ReduceOp::kLxor, ReduceOp::kBxor}) {
    At(table, DType::kBool, op) = Make<LogicalXor<std::uint8_t>, 1>(nullptr);
  }
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
  AddCodecs<Single>(table, DType::kFloat32);
  AddCodecs<Half<Float16, 15, -24>>(table, DType::kFloat16);
  AddCodecs<Half<Bfloat16, 127, -126>>(table, DType::kBfloat16);
  table.copy = &Copy;
  table.take = &Take;
  return table;
}

constexpr KernelTable kTable = MakeTable();

}  // namespace

const KernelTable& Table() { return kTable; }

}  // namespace hetcoll::HETCOLL_ISA_NAMESPACE
