// A method whose plain calls go straight from the interpreter to `self._call`, without a Python frame: see fast_path in
// src/hetcoll/_native.pyi. A frame with its defaults for absent keywords takes some 1000 instructions, more than the
// whole engine for a small message.
#pragma once

#include "python/py_engine.h"

namespace hetcoll {

void BindFastPath(nanobind::module_& m);

// Methods of which a repeated call is one. They are bound here since the other bindings are not compiled for speed.
void BindRepeated(nanobind::class_<PyEngine>& engine);

}  // namespace hetcoll
