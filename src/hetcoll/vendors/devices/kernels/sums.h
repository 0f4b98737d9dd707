// A row as the weighted sum of others, in float32 from 0 on: tokens.h.
#pragma once

#include "devices/kernels/reduce.h"

namespace hetcoll {

// `terms` gives each row and its weight, in their order, to what it is called with.
template <class Type, unsigned kElements, unsigned kAlign, class Terms>
HETCOLL_DEVICE void SumRow(char* to, U64 hidden, const Terms& terms) {
  using T = typename Type::Storage;
  struct Unit {
    T element[kElements];
  };
  for (U64 i = ThreadInBlock(); i < hidden / kElements; i += BlockSize()) {
    float sum[kElements] = {};
    terms([&](const char* row, float weight) {
      const auto unit = Load<Unit, kAlign>(row + i * sizeof(Unit));
      HETCOLL_UNROLL
      for (unsigned e = 0; e < kElements; ++e) sum[e] = sum[e] + weight * Type::Widen(unit.element[e]);
    });
    Unit result;
    HETCOLL_UNROLL
    for (unsigned e = 0; e < kElements; ++e) result.element[e] = Type::Narrow(sum[e]);
    Store<kAlign>(to + i * sizeof(Unit), result);
  }
}

}  // namespace hetcoll
