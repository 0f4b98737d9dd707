// What the ranks of one host have called, in memory that they share: the GPU's counterpart of the signature on frames.
//
// Streams move bytes without looking at them, so each rank writes down every call before it enqueues it and compares
// with what the others wrote under the same number. Of two ranks that disagree, the later one sees it, before anything
// of its own is enqueued. The memory starts as zeros.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace hetcoll {

struct LedgerEntry {
  std::uint64_t signature;
  std::array<char, 184> text;  // for people: the call and where it was made; ends with a zero byte
};

inline constexpr std::size_t kLedgerEntries = 64;

struct LedgerPage {  // one rank's
  std::atomic<std::uint64_t> calls;
  std::array<std::byte, 56> unused;
  std::array<LedgerEntry, kLedgerEntries> entries;
};
inline constexpr std::size_t kLedgerBytes = 12352;
static_assert(sizeof(LedgerPage) == kLedgerBytes && std::atomic<std::uint64_t>::is_always_lock_free);

class Ledger {
 public:
  Ledger(LedgerPage* pages, int rank, int size) : pages_(pages), rank_(rank), size_(size) {}

  static LedgerEntry Entry(std::uint64_t signature, std::string_view text) {
    LedgerEntry entry{signature, {}};
    std::copy_n(text.data(), std::min(text.size(), entry.text.size() - 1), entry.text.data());
    return entry;
  }

  // The same call as a part of a graph, which is another call.
  static LedgerEntry Captured(const LedgerEntry& entry) {
    constexpr std::uint64_t kCaptured = 0x6a09e667f3bcc909;
    return Entry(entry.signature ^ kCaptured, "in a graph, " + std::string(entry.text.data()));
  }

  // Writes the next call down. Returns a rank that called something else under its number, or -1.
  int Note(const LedgerEntry& entry) {
    LedgerPage& mine = pages_[rank_];
    const std::uint64_t number = mine.calls.load(std::memory_order_relaxed) + 1;
    mine.entries[number % kLedgerEntries] = entry;
    mine.calls.store(number, std::memory_order_seq_cst);  // before the others' are read, so that one of two sees it
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_ && Differs(pages_[peer], number, entry.signature)) return peer;
    }
    return -1;
  }

  std::uint64_t calls(int rank) const { return pages_[rank].calls.load(std::memory_order_acquire); }

  // What `rank` wrote down under a number; empty where that is long ago or has not come yet.
  std::string Text(int rank, std::uint64_t number) const {
    const std::uint64_t now = calls(rank);
    if (number == 0 || number > now || now - number >= kLedgerEntries) return {};
    return pages_[rank].entries[number % kLedgerEntries].text.data();
  }

 private:
  static bool Differs(const LedgerPage& page, std::uint64_t number, std::uint64_t signature) {
    const std::uint64_t now = page.calls.load(std::memory_order_seq_cst);
    // One entry less than there are: the peer may be writing its next call over the oldest.
    if (now < number || now - number >= kLedgerEntries - 1) return false;
    const bool differs = page.entries[number % kLedgerEntries].signature != signature;
    return differs && page.calls.load(std::memory_order_acquire) - number < kLedgerEntries - 1;
  }

  LedgerPage* pages_;
  int rank_;
  int size_;
};

}  // namespace hetcoll
