// Reading a message where it lies in the sender's process, with one copy instead of two: process_vm_readv(2).
//
// Whether that is allowed depends on users, containers and kernel.yama.ptrace_scope, so the receiver tries: it looks
// for a random number that the sender says it holds. The kernel looks up every page, so it pays for long messages only.
//
// Nobody writes into another process's memory: whoever fails may give its own back at once. It says so (`withdrawn`),
// so that nobody takes what was read from it since for good.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "transport/shm/protocol_choice.h"
#include "transport/shm/shm.h"

namespace hetcoll {

inline constexpr std::size_t kPrivateFragment = std::size_t{4} << 20;

// The lengths of messages that are read in this way, where it works. Where slots are claimed, two copies through them
// are faster than the kernel's look at every page, unless pages are huge; elsewhere hardly ever
// (docs/performance.md, "Slots, or the sender's memory").
// Of those of middle length ProtocolChoice decides, where it is asked (ShmSegment::weighs).
struct PrivateLengths {
  struct Range {
    std::size_t any = SIZE_MAX;   // from here on in any pages
    std::size_t huge = SIZE_MAX;  // from here on where most of the message lies in huge ones
    std::size_t most = SIZE_MAX;
  };

  PrivateLengths(PrivateReads reads, const StorePolicy& policy) {
    constexpr std::size_t kKiB = 1024;
    if (reads == PrivateReads::kNever) return;
    if (reads == PrivateReads::kAlways) {
      for (const Use use : {Use::kExchanged, Use::kStored, Use::kSummed}) of(use).any = 128 * kKiB;
    } else if (policy.claims()) {
      of(Use::kExchanged).huge = 512 * kKiB;
      of(Use::kStored) = {.huge = 2048 * kKiB, .most = 8192 * kKiB};  // of more the sender's core copies half
    } else {
      // What no cache holds is better stored around it.
      of(Use::kExchanged) = {.any = 64 * kKiB, .most = ProtocolChoice::kUncached - 1};
      of(Use::kStored).any = 256 * kKiB;
      of(Use::kSummed).any = 1024 * kKiB;
    }
  }

  Range& of(Use use) { return ranges_[static_cast<std::size_t>(use)]; }
  const Range& of(Use use) const { return ranges_[static_cast<std::size_t>(use)]; }

  std::size_t Least() const {
    std::size_t least = SIZE_MAX;
    for (const Range& range : ranges_) least = std::min({least, range.any, range.huge});
    return least;
  }

  // `in_huge_pages` says so of most of the message. A sum that comes back takes the slot that its summand came in.
  template <class InHugePages>
  bool Include(const Message& m, InHugePages&& in_huge_pages) const {
    if (m.use == Use::kSummed && m.back >= 0) return false;
    const Range& range = of(m.use);
    return m.total <= range.most && (m.total >= range.any || (m.total >= range.huge && in_huge_pages()));
  }

 private:
  std::array<Range, 4> ranges_;  // by Use; of lone messages, whose receivers may be late, none
};

// Another process's memory.
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
