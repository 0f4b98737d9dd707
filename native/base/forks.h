// Whether an object was made by a parent of this process. A child of fork has copies of its parent's objects, mappings
// and descriptors, but neither its threads nor whoever held a lock, and must not speak in its name.
#pragma once

#include <atomic>

namespace hetcoll {

class Birthplace {
 public:
  Birthplace();
  // Whether this process is a fork of the one where the object was made.
  bool left() const { return forks_.load(std::memory_order_relaxed) != born_; }

 private:
  static std::atomic<int> forks_;  // that this process is away from the one where its program began
  int born_;
};

}  // namespace hetcoll
