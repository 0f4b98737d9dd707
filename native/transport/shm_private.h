// Reading a message where it lies in the sender's process, with one copy instead of two: process_vm_readv(2).
//
// Whether that is allowed depends on users, containers and kernel.yama.ptrace_scope, so the receiver tries: it looks
// for a random number that the sender says it holds. The kernel looks up every page, so it pays for long messages only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "transport/shm.h"

namespace hetcoll {

inline constexpr std::size_t kPrivateFragment = std::size_t{4} << 20;

// The lengths of messages that are read in this way, where it works. Where slots are claimed, two copies through them
// are faster than the kernel's look at every page, unless pages are huge; elsewhere hardly ever: docs/performance.md.
struct PrivateLengths {
  PrivateLengths(PrivateReads reads, const StorePolicy& policy) {
    constexpr std::size_t kKiB = 1024;
    if (reads == PrivateReads::kNever) return;
    if (reads == PrivateReads::kAlways) {
      huge = any = least_one_way = 128 * kKiB;
      most_one_way = SIZE_MAX;
    } else if (policy.claims()) {
      huge = 512 * kKiB;
    } else {
      huge = any = 32 * kKiB;
      least_one_way = 256 * kKiB;
      most_one_way = 8192 * kKiB;
    }
  }

  std::size_t Least() const { return std::min(huge, least_one_way); }

  // `in_huge_pages` says so of most of the message. A sum that comes back takes the slot that its summand came in.
  template <class InHugePages>
  bool Include(const Message& m, InHugePages&& in_huge_pages) const {
    if (m.exchanged) return m.total >= any || (m.total >= huge && in_huge_pages());
    return m.collective && m.back < 0 && m.total >= least_one_way && m.total <= most_one_way;
  }

  std::size_t huge = SIZE_MAX;  // exchanges: in huge pages
  std::size_t any = SIZE_MAX;   // and in any
  std::size_t least_one_way = SIZE_MAX;
  std::size_t most_one_way = SIZE_MAX;
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
