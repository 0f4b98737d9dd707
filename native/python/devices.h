#pragma once

#include <nanobind/nanobind.h>

namespace hetcoll {

void BindDevices(nanobind::module_& m);

}  // namespace hetcoll
