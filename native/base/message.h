// Messages, as plans name them and transports carry them: which FIFOs there are between two ranks, and what is said of
// a message on one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hetcoll {

inline constexpr int kChannels = 3;  // two phases of collectives, and point to point
// Of a host rank: the same again to ranks on GPUs, and once more instead of slots that did not work.
inline constexpr int kLinkChannels = 3 * kChannels;

// What a message is to its call, for transports that have several ways.
enum class Use : std::uint8_t {
  kLone,       // its receiver comes when it likes
  kExchanged,  // its receiver only stores it, and its sender has as much to store meanwhile
  kStored,     // of a call that all ranks make, so the receiver is there or soon will be, and only stores it
  kSummed,     // of one that makes sums
};

inline constexpr int kMaxRails = 8;  // of a link over RDMA

// Where in a peer's memory this rank may write over RDMA, and the key for each rail.
struct Placement {
  std::uint64_t given = 0;    // or it may write nowhere
  std::uint64_t address = 0;  // of a dma-buf's memory, which may begin at 0
  std::uint32_t rkeys[kMaxRails] = {};
};

struct Message {
  std::uint64_t signature;  // of the operation, plus kNumberStep for each message of it that went before
  std::size_t total;
  bool may_lend = false;  // the sender can wait until the receiver has read it
  int back = -1;          // the channel on which the receiver may send the answer in this message's place, or -1
  Use use = Use::kLone;
  bool mutual = false;     // the sender receives on this channel, too: places of messages may change hands
  bool gives = false;      // the sender reads it no more: a sum of it may be written where it lies
  bool revocable = false;  // its receiver may take the memory for it back meanwhile: no clear-to-send
  bool answered = false;   // what it is a part of is answered as a whole: what is lent need not be given back before
  bool device = false;     // it lies in a device's memory, which no processor touches
  // Of a sender: where its first byte may be written. Of a receiver, where that was allowed: its place, as named here.
  const Placement* into = nullptr;
};

inline constexpr std::uint64_t kNumberStep = 0x9e3779b97f4a7c15u;

}  // namespace hetcoll
