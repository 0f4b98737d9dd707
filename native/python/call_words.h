// The numbers among a call's arguments, as the fast path reads them.
#pragma once

#include <Python.h>

#include <cstdint>

namespace hetcoll {

// A Python int from 0 on that fits; -1 for any other object.
inline std::int32_t SmallNumber(PyObject* object) {
  static PyObject* const zero = PyLong_FromLong(0);  // the root of most calls; CPython has one object of it
  if (object == zero) return 0;
  if (!PyLong_CheckExact(object)) return -1;
  int overflow = 0;
  const long value = PyLong_AsLongAndOverflow(object, &overflow);
  return overflow != 0 || value < 0 || value > INT32_MAX ? -1 : static_cast<std::int32_t>(value);
}

// What an exchange with two ranks has in place of a root; -1 where these cannot be ranks.
inline std::int32_t RanksKey(PyObject* dest, PyObject* source) {
  const std::int32_t to = SmallNumber(dest), from = SmallNumber(source);
  return to < 0 || to > INT16_MAX || from < 0 || from > INT16_MAX ? -1 : to << 16 | from;
}

}  // namespace hetcoll
