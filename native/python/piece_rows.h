// The pieces of one-sided messages as a call says them: offsets and a length each, or one for all. What needs a
// conversion is left to src/hetcoll/runtime/offsets.py, and so are all errors.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "host/transfer.h"
#include "python/known_types.h"
#include "python/numpy_array.h"

namespace hetcoll {

namespace nb = nanobind;

// An int, or a NumPy array of int64 in one dimension, from 0 on.
class PieceColumn {
 public:
  // False, and no Python error set, for anything else.
  bool Read(PyObject* object) {
    if (PyLong_CheckExact(object)) {
      int overflow = 0;
      one_ = PyLong_AsLongLongAndOverflow(object, &overflow);
      rows_ = &one_;
      return overflow == 0;
    }
    if (!KnownTypes::Instance().IsArray(object)) return false;
    const auto& array = *reinterpret_cast<const NumpyArray*>(object);
    if (array.nd != 1 || !array.Plain(false) || array.Element() != DType::kInt64) return false;
    rows_ = reinterpret_cast<const std::int64_t*>(array.data);
    count_ = array.Count();
    step_ = count_ == 1 ? 0 : 1;
    return true;
  }
  std::size_t count() const { return count_; }
  std::int64_t at(std::size_t row) const { return rows_[row * step_]; }

 private:
  std::int64_t one_ = 0;
  const std::int64_t* rows_ = nullptr;
  std::size_t count_ = 1;
  std::size_t step_ = 0;
};

// Rows of Piece, but for empty ones, and how many bytes they are together. None: a column is no PieceColumn, they are
// not as long as each other, or a piece is not inside memory here or there, of so many elements.
inline nb::object PieceRows(nb::handle here, nb::handle there, nb::handle length, std::int64_t here_count,
                            std::int64_t there_count, std::int64_t itemsize) {
  PieceColumn own, other, lengths;
  if (!own.Read(here.ptr()) || !other.Read(there.ptr()) || !lengths.Read(length.ptr())) return nb::none();
  const std::size_t count = own.count() == 0 || other.count() == 0 || lengths.count() == 0
                                ? 0
                                : std::max({own.count(), other.count(), lengths.count()});
  for (const PieceColumn* each : {&own, &other, &lengths}) {
    if (each->count() != count && each->count() != 1) return nb::none();
  }
  if (count > kMostPieces) return nb::none();
  auto rows = std::make_unique<std::vector<Piece>>();
  rows->reserve(count);
  std::uint64_t nbytes = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::int64_t from = own.at(i), to = other.at(i), n = lengths.at(i);
    const bool inside = n >= 0 && from >= 0 && to >= 0 && n <= here_count && from <= here_count - n &&
                        n <= there_count && to <= there_count - n;
    if (!inside) return nb::none();
    if (n == 0) continue;
    rows->push_back({static_cast<std::uint64_t>(from * itemsize), static_cast<std::uint64_t>(to * itemsize),
                     static_cast<std::uint64_t>(n * itemsize)});
    nbytes += rows->back().nbytes;
  }
  const std::size_t left = rows->size();
  Piece* data = rows->data();
  nb::capsule owner(rows.get(), [](void* p) noexcept { delete static_cast<std::vector<Piece>*>(p); });
  static_cast<void>(rows.release());  // the capsule's now
  nb::ndarray<nb::numpy, std::int64_t, nb::ndim<2>> array(data, {left, 3}, owner);
  return nb::make_tuple(nb::cast(array), nbytes);
}

}  // namespace hetcoll
