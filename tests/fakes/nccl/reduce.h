// The reductions of nccl.h on its data types: operands are combined in rank order; floats of 16 and 8 bits in float,
// rounded once.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fake::nccl {

enum DType : int {
  kInt8,
  kUint8,
  kInt32,
  kUint32,
  kInt64,
  kUint64,
  kFloat16,
  kFloat32,
  kFloat64,
  kBfloat16,
  kFloat8e4m3,
  kFloat8e5m2,
  kTypes
};
enum Op : int { kSum, kProd, kMax, kMin, kAvg, kPreMulSum };

std::size_t itemsize(int dtype);

// to[i] = sources[0][i] (op) sources[1][i] ..., `count` elements; op is kSum to kAvg. kAvg divides a sum of integers,
// truncating, and leaves one of floats as it is: their operands were scaled before (`scale`).
void reduce(void* to, const unsigned char* const* sources, int ranks, std::size_t count, int dtype, int op);

// data[i] *= factor, in the type.
void scale(void* data, std::size_t count, int dtype, double factor);

bool integral(int dtype);

// A scalar of the type as a number.
double scalar(const void* value, int dtype);

}  // namespace fake::nccl
