// The kernels, compiled once per instruction set: kernels_<isa>.cc defines HETCOLL_ISA_NAMESPACE and includes this.
// Everything but Table() has internal linkage (floats.h says why).

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "kernels/codecs.inc.h"
#include "kernels/copies.inc.h"
#include "kernels/kernel_table.h"
#include "kernels/operations.h"

namespace hetcoll::HETCOLL_ISA_NAMESPACE {
namespace {

// ---- Reductions ----

// Compilers take their time with each place that an operation is inlined in, and there are a hundred operations and
// three instruction sets: six places are what speed needs.

// Where results go.
struct One {
  char* dst;

  One At(std::size_t at) const { return {dst + at}; }

  template <class V>
  HETCOLL_INLINE void Put(std::size_t at, V v) const {
    Store(dst + at, v);
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
};

// At least one whole vector. The last one may overlap the one before it, so it is computed before anything is stored:
// dst may be a or b. Nothing is called after these: GCC 12 leaves vectors' upper halves in use where it makes a jump of
// a call (no vzeroupper), and code that knows no such halves is slow until somebody clears them.
template <class E, class Out>
HETCOLL_INLINE void Vectors(E op, Out out, const char* a, const char* b, std::size_t nbytes) {
  using V = Vector<typename E::Element, E::kStep>;
  const std::size_t end = nbytes - E::kStep;
  const V last = op.Apply(Load<V>(a + end), Load<V>(b + end));
  for (std::size_t i = 0; i < end; i += E::kStep) out.Put(i, op.Apply(Load<V>(a + i), Load<V>(b + i)));
  out.Put(end, last);
}

// Fewer bytes than that, 16 at a time: wide vectors cost some processors a pause when they come seldom.
template <class E>
HETCOLL_INLINE void Short(E op, char* dst, const char* a, const char* b, std::size_t nbytes) {
  using V = Vector<typename E::Element, 16>;
  for (; nbytes >= 16; nbytes -= 16, dst += 16, a += 16, b += 16) Store(dst, op.Apply(Load<V>(a), Load<V>(b)));
  if (nbytes > 0) StorePart(dst, op.Apply(LoadPart<V>(a, nbytes), LoadPart<V>(b, nbytes)), nbytes);
}

template <class E>
HETCOLL_INLINE void Run(E op, One out, const char* a, const char* b, std::size_t nbytes) {
  nbytes < E::kStep ? Short(op, out.dst, a, b, nbytes) : Vectors(op, out, a, b, nbytes);
}

template <class E>
__attribute__((noinline)) void Plain(One out, const char* a, const char* b, std::size_t nbytes) {
  Run(E{}, out, a, b, nbytes);
}

template <class E>
__attribute__((noinline)) void Plain(Both out, const char* a, const char* b, std::size_t nbytes) {
  if (nbytes >= E::kStep) return Vectors(E{}, out, a, b, nbytes);
  Plain<E>(One{out.dst}, a, b, nbytes);
  CopyShort(out.dst2, out.dst, nbytes);
}

struct Elementwise {
  void (*one)(One out, const char* a, const char* b, std::size_t nbytes);
  void (*both)(Both out, const char* a, const char* b, std::size_t nbytes);
};

// What sweeps of at least kStreamBytes need of an operation. They wait for memory, and a call for each piece costs them
// nothing: one copy of them serves all operations.
struct Swept {
  Elementwise any, part;
  std::size_t unit;
};

constexpr std::size_t kPart = 1024;

// Plain for kPart bytes, without its loop's counting in three vectors of four.
template <class E, class Out>
__attribute__((noinline)) void Part(Out out, const char* a, const char* b, std::size_t) {
  using V = Vector<typename E::Element, E::kStep>;
#pragma GCC unroll 4
  for (std::size_t i = 0; i < kPart; i += E::kStep) out.Put(i, E{}.Apply(Load<V>(a + i), Load<V>(b + i)));
}

template <class E>
constexpr Swept SweptBy() {
  const Elementwise plain{&Plain<E>, &Plain<E>};
  if constexpr (E::kCommon) return {plain, {&Part<E, One>, &Part<E, Both>}, E::kUnit};
  return {plain, plain, E::kUnit};
}

template <class E>
constexpr Swept kSwept = SweptBy<E>();

void Through(const Elementwise& way, Both out, std::size_t at, const char* a, const char* b, std::size_t nbytes) {
  if (out.dst2 == nullptr) return way.one(One{out.dst + at}, a + at, b + at, nbytes);
  way.both(out.At(at), a + at, b + at, nbytes);
}

void Pages(const Swept& op, Both out, const char* a, const char* b, std::size_t nbytes) {
  const std::size_t rest = ByPages<kPart>(nbytes, [&](std::size_t at) { Through(op.part, out, at, a, b, kPart); });
  Through(op.any, out, rest, a, b, nbytes - rest);
}

// To dst around the cache, and where there is a dst2 to that through it.
void Stream(const Swept& op, Both out, const char* a, const char* b, std::size_t nbytes) {
  const std::size_t head = -reinterpret_cast<std::uintptr_t>(out.dst) % kLine;
  // Elements that straddle cache lines go through the cache.
  if (head % op.unit != 0) return Through(op.any, out, 0, a, b, nbytes);
  Through(op.any, out, 0, a, b, head);
  const std::size_t end = head + (nbytes - head) / kLine * kLine;
  alignas(kLine) char cached[2048];  // a part of the nearest cache
  for (std::size_t i = head, n; i < end; i += n) {
    n = std::min(end - i, sizeof cached);
    char* result = out.dst2 == nullptr ? cached : out.dst2 + i;
    op.any.one(One{result}, a + i, b + i, n);
#pragma GCC unroll 4
    for (std::size_t j = 0; j < n; j += kWidth) StoreStream(out.dst + i + j, Load<Vector<char, kWidth>>(result + j));
  }
  Through(op.any, out, end, a, b, nbytes - end);
  StoreFence();
}

void Sweeping(const Swept& op, Both out, const char* a, const char* b, std::size_t nbytes, Sweep sweep) {
  sweep == Sweep::kPages ? Pages(op, out, a, b, nbytes) : Stream(op, out, a, b, nbytes);
}

// kSize is the size of the caller's elements: E's may be halves of complex numbers, or words of bits.
template <class E, std::size_t kSize>
void Reduce(void* dst, const void* a, const void* b, std::size_t count, Sweep sweep) {
  auto* d = static_cast<char*>(dst);
  const auto *x = static_cast<const char*>(a), *y = static_cast<const char*>(b);
  const std::size_t nbytes = count * kSize;
  if constexpr (!E::kSlow) {  // sweeps are for those that wait for memory
    if (sweep != Sweep::kPlain && nbytes >= kStreamBytes) {
      return Sweeping(kSwept<E>, {d, nullptr}, x, y, nbytes, sweep);
    }
  }
  Plain<E>(One{d}, x, y, nbytes);
}

template <class E, std::size_t kSize>
void Reduce2(void* dst, void* dst2, const void* a, const void* b, std::size_t count, Sweep sweep) {
  auto *d = static_cast<char*>(dst), *d2 = static_cast<char*>(dst2);
  const auto *x = static_cast<const char*>(a), *y = static_cast<const char*>(b);
  const std::size_t nbytes = count * kSize;
  if constexpr (!E::kSlow) {
    if (sweep != Sweep::kPlain && nbytes >= kStreamBytes) {
      return Sweeping(kSwept<E>, {d, d2}, x, y, nbytes, sweep);
    }
  }
  Plain<E>(Both{d, d2}, x, y, nbytes);
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
