// Reading a message where it lies in the sender's process, with one copy instead of two: process_vm_readv(2).
//
// Whether that is allowed depends on users, containers and kernel.yama.ptrace_scope, so the receiver tries: it looks
// for a random number that the sender says it holds. The kernel looks up every page, so it pays for long messages only.
//
// A sender that has nothing else to do meanwhile writes pieces of it into the receiver's process: the receiver invites
// it, and each end takes the next piece when it is done with one. Whoever fails says so (`withdrawn`) and then waits
// until nobody writes any more, before its memory is its user's again.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

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
      of(Use::kStored).huge = 2048 * kKiB;
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
  // Writes them. False where only the owner itself can: memory of devices, memfd_secret(2). Throws Fault.
  bool Write(std::uint64_t address, const std::byte* src, std::size_t n) const;
  // Throws Fault where the owner has failed: what was read of its memory until now may be anything.
  void CheckValid() const;

 private:
  const ShmOwner& owner_;
  int peer_;
};

// Shorter pieces cost more than it helps that two copy them.
inline constexpr std::size_t kLeastPiece = std::size_t{32} << 10;
inline constexpr std::size_t kMostPiece = std::size_t{1} << 20;

// Of a fragment that both ends copy: half of it, so that neither asks the kernel more often than it must, but no more
// than one end would like to wait for when the other one has lost its core.
constexpr std::size_t PieceBytes(std::size_t nbytes) {
  constexpr std::size_t kPage = 4096;
  return std::clamp((nbytes / 2 + kPage - 1) / kPage * kPage, kLeastPiece, kMostPiece);
}

struct Piece {
  std::size_t at;
  std::size_t n;
};

// The fragments of an edge that both ends copy.
class SharedCopy {
 public:
  explicit SharedCopy(ShmPieces& pieces) : pieces_(pieces) {}

  static std::size_t Pieces(std::size_t nbytes) { return (nbytes + PieceBytes(nbytes) - 1) / PieceBytes(nbytes); }

  // By the receiver: invites the sender to write the fragment with this number to `into`.
  void Open(std::uint64_t fragment, std::byte* into);
  // The number of the fragment that was opened last.
  std::uint64_t fragment() const { return pieces_.next.load(std::memory_order_acquire) >> kPieceBits; }
  // The next piece of that fragment, of `nbytes`. False where there is none left, or it is not the one that is open.
  bool Take(std::uint64_t fragment, std::size_t nbytes, Piece& piece);
  // By the sender: writes pieces into the receiver's process until there are none left. Whether there were any. One
  // that cannot be written is given back.
  bool Write(std::uint64_t fragment, const std::byte* data, std::size_t nbytes, const ShmOwner& receiver, int peer);
  // By the receiver: a piece that was given back.
  bool TakeBack(std::size_t nbytes, Piece& piece);
  // By the sender: whether it has ever given one back.
  bool gave_back() const { return gave_back_; }
  // Pieces that the sender has written, of all fragments.
  std::uint64_t written() const { return pieces_.written.load(std::memory_order_acquire); }

 private:
  static constexpr unsigned kPieceBits = 8;
  static_assert(kPrivateFragment / kLeastPiece < 1u << kPieceBits);

  ShmPieces& pieces_;
  bool gave_back_ = false;
};

// Who was invited to write into this rank's memory.
class CopyingSenders {
 public:
  void Add(const ShmPieces& pieces, const ShmOwner& sender);
  // Once this rank has withdrawn: returns when nobody writes into its memory any more. A process that was stopped just
  // then (SIGSTOP, a debugger) is waited for for a second.
  void Settle();

 private:
  std::mutex mutex_;  // who fails a communicator may be another thread than the one that moves its data
  std::vector<std::pair<const ShmPieces*, const ShmOwner*>> senders_;
};

}  // namespace hetcoll
