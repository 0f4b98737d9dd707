// dst[i] = src[i] as the other kind of 8-bit float, and what both kinds hold of src[i]: by value, see convert.h.
#pragma once

#include "devices/kernels/convert.h"
#include "devices/kernels/reduce.h"

namespace hetcoll {

template <class From, class To>
struct Conversion {
  using T = unsigned char;
  HETCOLL_DEVICE T Apply(T x, T, unsigned) {
    return static_cast<T>(Convert<typename From::Codes, typename To::Codes>(x));
  }
};

template <class Ocp, class Fnuz>
struct Commoning {
  using T = unsigned char;
  HETCOLL_DEVICE T Apply(T x, T, unsigned) {
    return static_cast<T>(Common<typename Ocp::Codes, typename Fnuz::Codes>(x));
  }
};

}  // namespace hetcoll

#define HETCOLL_CONVERT(name, step, first, second)                             \
  HETCOLL_KERNEL name(void* dst, const void* src, unsigned long long count) {  \
    using Step = hetcoll::step<hetcoll::type_##first, hetcoll::type_##second>; \
    hetcoll::ForAll<Step>(dst, src, src, count, 1);                            \
  }                                                                            \
  HETCOLL_ENTRY(name)
