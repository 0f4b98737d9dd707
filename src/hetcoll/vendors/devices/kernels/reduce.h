// dst[i] = a[i] (+) b[i], and dst[i] = src[i] / divisor: any number of threads, any alignment.
#pragma once

#include "devices/kernels/operations.h"

namespace hetcoll {

template <class Type, class Op>
struct Reduction {
  using T = typename Type::Storage;
  HETCOLL_DEVICE T Apply(T a, T b, unsigned) { return Type::Settle(Op::Combine(Type::Widen(a), Type::Widen(b))); }
};

template <class Type>
struct Division {
  using T = typename Type::Storage;
  HETCOLL_DEVICE T Apply(T x, T, unsigned divisor) { return Type::Settle(Type::Divide(Type::Widen(x), divisor)); }
};

constexpr unsigned kPack = 16;  // bytes that a thread reads and writes at a time

template <class T>
struct alignas(kPack) Pack {
  static constexpr unsigned kElements = kPack / sizeof(T);
  T element[kElements];
};

// Of addresses that are multiples of kAlign.
template <class V, unsigned kAlign>
HETCOLL_DEVICE V Load(const char* from) {
  V value;
  HETCOLL_MEMCPY(&value, __builtin_assume_aligned(from, kAlign), sizeof(V));
  return value;
}
template <unsigned kAlign, class V>
HETCOLL_DEVICE void Store(char* to, const V& value) {
  HETCOLL_MEMCPY(__builtin_assume_aligned(to, kAlign), &value, sizeof(V));
}

template <class F>
HETCOLL_DEVICE Pack<typename F::T> Apply(const Pack<typename F::T>& a, const Pack<typename F::T>& b, unsigned divisor) {
  Pack<typename F::T> result;
  HETCOLL_UNROLL
  for (unsigned i = 0; i < result.kElements; ++i) {
    result.element[i] = F::Apply(a.element[i], b.element[i], divisor);
  }
  return result;
}

// dst may be a or b: a thread reads all that it will overwrite before it writes.
template <class F>
HETCOLL_DEVICE void ForPacks(char* dst, const char* a, const char* b, U64 packs, unsigned divisor) {
  using P = Pack<typename F::T>;
  constexpr unsigned kDeep = P::kElements > 8 ? 1 : P::kElements == 8 ? 2 : 4;  // packs of each operand under way
  const U64 step = ThreadCount() * kPack, end = packs * kPack;
  U64 at = ThreadIndex() * kPack;
  for (; at + (kDeep - 1) * step < end; at += kDeep * step) {
    P x[kDeep], y[kDeep];
    HETCOLL_UNROLL
    for (unsigned i = 0; i < kDeep; ++i) {
      x[i] = Load<P, kPack>(a + at + i * step);
      y[i] = Load<P, kPack>(b + at + i * step);
    }
    HETCOLL_UNROLL
    for (unsigned i = 0; i < kDeep; ++i) Store<kPack>(dst + at + i * step, Apply<F>(x[i], y[i], divisor));
  }
  for (; at < end; at += step) {
    Store<kPack>(dst + at, Apply<F>(Load<P, kPack>(a + at), Load<P, kPack>(b + at), divisor));
  }
}

template <class F, unsigned kAlign>
HETCOLL_DEVICE void ForElements(char* dst, const char* a, const char* b, U64 first, U64 count, unsigned divisor) {
  using T = typename F::T;
  for (U64 i = first + ThreadIndex(); i < count; i += ThreadCount()) {
    const U64 at = i * sizeof(T);
    Store<kAlign>(dst + at, F::Apply(Load<T, kAlign>(a + at), Load<T, kAlign>(b + at), divisor));
  }
}

template <class F>
HETCOLL_DEVICE void ForAll(void* dst, const void* a, const void* b, U64 count, unsigned divisor) {
  using T = typename F::T;
  constexpr unsigned kElements = Pack<T>::kElements;
  auto* d = static_cast<char*>(dst);
  const auto *x = static_cast<const char*>(a), *y = static_cast<const char*>(b);
  const auto address = reinterpret_cast<U64>(d) | reinterpret_cast<U64>(x) | reinterpret_cast<U64>(y);
  if (address % kPack == 0) {
    ForPacks<F>(d, x, y, count / kElements, divisor);
    ForElements<F, alignof(T)>(d, x, y, count / kElements * kElements, count, divisor);
  } else if (address % alignof(T) == 0) {
    ForElements<F, alignof(T)>(d, x, y, 0, count, divisor);
  } else {
    ForElements<F, 1>(d, x, y, 0, count, divisor);
  }
}

}  // namespace hetcoll

#define HETCOLL_REDUCE(dtype, op)                                                                           \
  HETCOLL_KERNEL reduce_##dtype##_##op(void* dst, const void* a, const void* b, unsigned long long count) { \
    using Type = hetcoll::type_##dtype;                                                                     \
    hetcoll::ForAll<hetcoll::Reduction<Type, Type::op>>(dst, a, b, count, 1);                               \
  }                                                                                                         \
  HETCOLL_ENTRY(reduce_##dtype##_##op)

#define HETCOLL_SCALE(dtype)                                                                             \
  HETCOLL_KERNEL scale_##dtype(void* dst, const void* src, unsigned long long count, unsigned divisor) { \
    hetcoll::ForAll<hetcoll::Division<hetcoll::type_##dtype>>(dst, src, src, count, divisor);            \
  }                                                                                                      \
  HETCOLL_ENTRY(scale_##dtype)
