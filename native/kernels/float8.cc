// 8-bit floats of both kinds on the processor: the GPU kernels' rules, as tables that the compiler fills.
#include <array>
#include <cstdint>

#include "devices/kernels/convert.h"
#include "kernels/kernels.h"

namespace hetcoll {
namespace {

using Table = std::array<std::uint8_t, 256>;

template <std::uint32_t (*kStep)(std::uint32_t)>
constexpr Table TableOf() {
  Table table{};
  for (std::uint32_t code = 0; code < table.size(); ++code) table[code] = static_cast<std::uint8_t>(kStep(code));
  return table;
}

template <class Ocp, class Fnuz>
struct Tables {
  static constexpr Table kToFnuz = TableOf<Convert<Ocp, Fnuz>>();
  static constexpr Table kToOcp = TableOf<Convert<Fnuz, Ocp>>();
  static constexpr Table kCommon = TableOf<Common<Ocp, Fnuz>>();

  static constexpr const Table* Find(DType from, DType to, DType ocp, DType fnuz) {
    if (to == fnuz) return from == ocp ? &kToFnuz : nullptr;
    if (to != ocp) return nullptr;
    return from == fnuz ? &kToOcp : from == ocp ? &kCommon : nullptr;
  }
};

}  // namespace

bool ConvertFloat8(void* dst, const void* src, std::size_t count, DType from, DType to) {
  const Table* table =
      Tables<Float8E4m3fn, Float8E4m3fnuz>::Find(from, to, DType::kFloat8E4m3fn, DType::kFloat8E4m3fnuz);
  if (table == nullptr) {
    table = Tables<Float8E5m2, Float8E5m2fnuz>::Find(from, to, DType::kFloat8E5m2, DType::kFloat8E5m2fnuz);
  }
  if (table == nullptr) return false;
  auto* out = static_cast<std::uint8_t*>(dst);
  const auto* in = static_cast<const std::uint8_t*>(src);
  for (std::size_t i = 0; i < count; ++i) out[i] = (*table)[in[i]];
  return true;
}

}  // namespace hetcoll
