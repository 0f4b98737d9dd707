// A method whose plain calls go straight from the interpreter to `self._call`, without a Python frame: see fast_path in
// src/hetcoll/_native.pyi. A frame with its defaults for absent keywords takes some 1000 instructions, more than the
// whole engine for a small message.
#pragma once

namespace nanobind {
class module_;
}

namespace hetcoll {

void BindFastPath(nanobind::module_& m);

}  // namespace hetcoll
