// Reading a message where it lies in the sender's process, with one copy instead of two: process_vm_readv(2).
//
// Whether that is allowed depends on users, containers and kernel.yama.ptrace_scope, so the receiver tries: it looks
// for a random number that the sender says it holds. The kernel looks up every page, so it pays for long messages only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/shm.h"

namespace hetcoll {

inline constexpr std::size_t kPrivateFragment = std::size_t{4} << 20;

// The lengths from which on messages are read in this way, where it works: those that lie in huge pages, and all. Up to
// there two copies that stay in the L2 caches are faster: docs/performance.md.
struct LeastPrivate {
  LeastPrivate(PrivateReads reads, const StorePolicy& policy) {
    constexpr std::size_t kKiB = 1024;
    if (reads == PrivateReads::kNever) huge = any = SIZE_MAX;
    if (reads == PrivateReads::kAlways) huge = any = 128 * kKiB;
    if (reads == PrivateReads::kAuto) huge = 512 * kKiB, any = policy.claims() ? SIZE_MAX : 2048 * kKiB;
  }
  std::size_t huge = 0;
  std::size_t any = 0;
};

// Another process's memory, on the receiver's side.
class PrivateMemory {
 public:
  explicit PrivateMemory(const ShmOwner& owner, int peer) : owner_(owner), peer_(peer) {}

  // Whether the owner's memory can be read.
  bool Try() const;
  // Reads n bytes at `address` of the owner's process. Throws Fault.
  void Read(std::byte* dst, std::uint64_t address, std::size_t n) const;
  // Throws Fault where the owner has failed: what was read of its memory until now may be anything.
  void CheckValid() const;

 private:
  const ShmOwner& owner_;
  int peer_;
};

}  // namespace hetcoll
