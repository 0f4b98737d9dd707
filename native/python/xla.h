#pragma once

#include <nanobind/nanobind.h>

namespace hetcoll {

void BindXla(nanobind::module_& m);

}  // namespace hetcoll
