// What a struct that we declare ourselves must have in common with the one in somebody else's header.
#pragma once

#include <cstddef>

#define SAME_SIZE(ours, theirs) static_assert(sizeof(ours) == sizeof(theirs))
#define SAME_PLACE(ours, a, theirs, b)                     \
  static_assert(offsetof(ours, a) == offsetof(theirs, b)); \
  static_assert(sizeof(ours::a) == sizeof(theirs::b))
#define SAME(ours, theirs, field) SAME_PLACE(ours, field, theirs, field)
