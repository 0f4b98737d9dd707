// The vocabulary of src/hetcoll/types.py, with the same wire values (tests/plan/test_types.py compares them).
#pragma once

#include <cstddef>
#include <cstdint>

namespace hetcoll {

enum class DType : std::uint8_t {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kUint32 = 3,
  kInt64 = 4,
  kUint64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
  kFloat8E4m3fn = 10,
  kFloat8E5m2 = 11,
  kInt16 = 12,
  kUint16 = 13,
  kComplex64 = 14,
  kComplex128 = 15,
  kFloat8E4m3fnuz = 16,
  kFloat8E5m2fnuz = 17,
  kBool = 18,
};
inline constexpr int kDTypes = 19;

enum class ReduceOp : std::uint8_t {
  kSum = 0,
  kProd = 1,
  kMax = 2,
  kMin = 3,
  kAvg = 4,
  kLand = 5,
  kLor = 6,
  kLxor = 7,
  kBand = 8,
  kBor = 9,
  kBxor = 10,
};
inline constexpr int kReduceOps = 11;

enum class Collective : std::uint8_t {
  kAllreduce = 0,
  kAllgather = 1,
  kReduceScatter = 2,
  kBroadcast = 3,
  kReduce = 4,
  kGather = 5,
  kScatter = 6,
  kAlltoall = 7,
};  // those that an island's members do among themselves

constexpr std::size_t ItemSize(DType t) {
  switch (t) {
    case DType::kInt8:
    case DType::kUint8:
    case DType::kFloat8E4m3fn:
    case DType::kFloat8E5m2:
    case DType::kFloat8E4m3fnuz:
    case DType::kFloat8E5m2fnuz:
    case DType::kBool:
      return 1;
    case DType::kFloat16:
    case DType::kBfloat16:
    case DType::kInt16:
    case DType::kUint16:
      return 2;
    case DType::kInt32:
    case DType::kUint32:
    case DType::kFloat32:
      return 4;
    case DType::kInt64:
    case DType::kUint64:
    case DType::kFloat64:
    case DType::kComplex64:
      return 8;
    case DType::kComplex128:
      return 16;
  }
  return 0;
}

}  // namespace hetcoll
