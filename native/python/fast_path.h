// A method whose plain calls go straight from the interpreter to `self._call`, without a Python frame: see short_way in
// src/hetcoll/_native.pyi. A frame with its defaults for absent keywords takes some 1000 instructions, more than the
// whole engine for a small message.
#pragma once

namespace nanobind {
class module_;
}

namespace hetcoll {

void BindShortWay(nanobind::module_& m);

}  // namespace hetcoll
