// Memory that every rank of this host has mapped: buffers from it move without a staging copy.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>

#include "base/forks.h"
#include "transport/shm/shm.h"

namespace hetcoll {

// Hands out parts of this rank's heap in its host's segment. Thread-safe: arrays die on any thread.
class Heap {
 public:
  Heap(std::shared_ptr<ShmSegment> segment, int local_rank);

  // Page-aligned memory, or null when no hole is large enough. Its pages cost nothing until they are touched.
  std::byte* Allocate(std::size_t nbytes);
  // Gives the pages back to the system as well. In a forked child it does nothing.
  void Free(std::byte* at, std::size_t nbytes);

  // What is handed out.
  std::size_t used();
  std::size_t capacity() const { return capacity_; }

 private:
  Birthplace birthplace_;
  std::shared_ptr<ShmSegment> segment_;  // arrays may outlive the communicator
  std::byte* base_;
  std::size_t capacity_;
  std::mutex mutex_;
  std::map<std::size_t, std::size_t> holes_;  // offset to length, never adjacent
};

}  // namespace hetcoll
