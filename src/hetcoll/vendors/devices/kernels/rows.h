// Rows of tokens (hetcoll.experts): gathered, summed by weights, as 8-bit floats and back. Blocks take rows in turn.
#pragma once

#include "devices/kernels/copy.h"
#include "devices/kernels/eighths.h"
#include "devices/kernels/sums.h"

namespace hetcoll {

HETCOLL_DEVICE bool Packed(const Rows& rows, unsigned itemsize) {
  const U64 all = reinterpret_cast<U64>(rows.to) | reinterpret_cast<U64>(rows.from) | rows.to_stride;
  return (all | rows.hidden * itemsize) % kPack == 0;
}

// The sum of what `columns` places hold, each times its weight, in the order of the columns.
template <class Type>
HETCOLL_DEVICE void Combine(const Rows& rows) {
  using T = typename Type::Storage;
  const bool packed = Packed(rows, sizeof(T));
  for (U64 row = BlockIndex(); row < rows.rows; row += Blocks()) {
    const long long* offsets = rows.offsets + row * rows.columns;
    const float* weights = rows.weights == nullptr ? nullptr : rows.weights + row * rows.columns;
    const auto terms = [&](const auto& add) {
      for (unsigned column = 0; column < rows.columns; ++column) {
        if (offsets[column] >= 0) add(rows.from + offsets[column], weights == nullptr ? 1.0f : weights[column]);
      }
    };
    char* to = rows.to + row * rows.to_stride;
    packed ? SumRow<Type, kPack / sizeof(T), kPack>(to, rows.hidden, terms)
           : SumRow<Type, 1, 1>(to, rows.hidden, terms);
  }
}

// Rows of `hidden` elements, one behind the other, as codes with their scales behind them.
template <class Type>
HETCOLL_DEVICE void Encode(const Rows& rows) {
  const U64 groups = rows.hidden / kGroup, nbytes = kGroup * sizeof(typename Type::Storage);
  for (U64 i = ThreadIndex(); i < rows.rows * groups; i += ThreadCount()) {
    const U64 group = i % groups;
    char* to = rows.to + i / groups * rows.to_stride;
    Store<4>(to + rows.hidden + 4 * group, EncodeGroup<Type>(to + group * kGroup, rows.from + i * nbytes));
  }
}

template <class Type>
HETCOLL_DEVICE void Decode(const Rows& rows) {
  const bool aligned = (reinterpret_cast<U64>(rows.to) | rows.to_stride) % kPack == 0;
  for (U64 row = BlockIndex(); row < rows.rows; row += Blocks()) {
    const char* from = rows.from + rows.offsets[row];
    for (U64 i = ThreadInBlock(); i < rows.hidden / kCodes; i += BlockSize()) {
      const auto values = DecodeUnit<Type>(from, rows.hidden, i);
      char* to = rows.to + row * rows.to_stride + i * sizeof(values);
      aligned ? Store<kPack>(to, values) : Store<1>(to, values);
    }
  }
}

}  // namespace hetcoll

HETCOLL_KERNEL gather_rows(HETCOLL_CONSTANT hetcoll::Rows rows) {
  using namespace hetcoll;
  for (U64 row = BlockIndex(); row < rows.rows; row += Blocks()) {
    const Piece piece{rows.to + row * rows.to_stride, rows.from + rows.offsets[row], rows.hidden * rows.itemsize};
    CopyPiece(piece, ThreadInBlock(), BlockSize());
  }
}
HETCOLL_ENTRY(gather_rows)

#define HETCOLL_ROWS(dtype)                                                  \
  HETCOLL_KERNEL combine_rows_##dtype(HETCOLL_CONSTANT hetcoll::Rows rows) { \
    hetcoll::Combine<hetcoll::type_##dtype>(rows);                           \
  }                                                                          \
  HETCOLL_ENTRY(combine_rows_##dtype)                                        \
  HETCOLL_KERNEL encode_rows_##dtype(HETCOLL_CONSTANT hetcoll::Rows rows) {  \
    hetcoll::Encode<hetcoll::type_##dtype>(rows);                            \
  }                                                                          \
  HETCOLL_ENTRY(encode_rows_##dtype)                                         \
  HETCOLL_KERNEL decode_rows_##dtype(HETCOLL_CONSTANT hetcoll::Rows rows) {  \
    hetcoll::Decode<hetcoll::type_##dtype>(rows);                            \
  }                                                                          \
  HETCOLL_ENTRY(decode_rows_##dtype)
HETCOLL_ROWS(float32)
HETCOLL_ROWS(float16)
HETCOLL_ROWS(bfloat16)
