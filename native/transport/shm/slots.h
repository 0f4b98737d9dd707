// Slots of host memory through which messages pass to and from a GPU: the host's view of src/hetcoll/gpu/slots.py.
//
// Message k of an edge lies in slot k % count. Its sender writes k + 1 to the slot's `ready` word when it is there, its
// receiver to the `credit` word when it has gone: words only grow. On a GPU it is a stream that writes and waits.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "transport/transport.h"

namespace hetcoll {

inline constexpr std::size_t kWordStride = 64 / sizeof(std::uint64_t);
inline constexpr std::uint64_t kStreamsGone = 2;  // in a rank's word of `aborts`; kernels look for any bit
inline constexpr std::uint64_t kReleased = std::uint64_t{1} << 62;  // above the number of any message

struct Slots {
  std::byte* slots = nullptr;
  std::uint64_t* ready = nullptr;   // a word for each slot, kWordStride apart
  std::uint64_t* credit = nullptr;  // the same
  std::size_t slot_bytes = 0;
  unsigned count = 1;
  const std::uint64_t* aborts = nullptr;  // a word for each rank of the host, kWordStride apart: see Aborted
  unsigned ranks = 0;

  // Whether a rank of the host has let go of streams that wait: what these move from then on is not the data. It says
  // so before it does, so whoever sees a word that such a stream wrote sees this as well. Who leaves in order lets only
  // kernels go: what its streams have moved is the data.
  bool Aborted() const {
    for (unsigned rank = 0; rank < ranks; ++rank) {
      if (std::atomic_ref(const_cast<std::uint64_t&>(aborts[rank * kWordStride])).load(std::memory_order_acquire) &
          kStreamsGone) {
        return true;
      }
    }
    return false;
  }

  std::size_t Index(std::uint64_t message) const { return message % count; }
  std::byte* At(std::uint64_t message) const { return slots + Index(message) * slot_bytes; }
  std::uint64_t* Ready(std::uint64_t message) const { return ready + Index(message) * kWordStride; }
  std::uint64_t* Credit(std::uint64_t message) const { return credit + Index(message) * kWordStride; }

  // Whether the message is in its slot, and whether the slot is free for it.
  bool Full(std::uint64_t message) const { return Load(Ready(message)) > message; }
  bool Free(std::uint64_t message) const { return message < count || Load(Credit(message)) + count > message; }
  void Publish(std::uint64_t message) const { Store(Ready(message), message + 1); }
  void Grant(std::uint64_t message) const { Store(Credit(message), message + 1); }

  // Whoever waits for such a word, now or later, waits no more.
  void ReleaseReady() const {
    for (unsigned slot = 0; slot < count; ++slot) Store(Ready(slot), kReleased);
  }
  void ReleaseCredit() const {
    for (unsigned slot = 0; slot < count; ++slot) Store(Credit(slot), kReleased);
  }

 private:
  static std::uint64_t Load(std::uint64_t* word) { return std::atomic_ref(*word).load(std::memory_order_acquire); }
  static void Store(std::uint64_t* word, std::uint64_t value) {
    std::atomic_ref(*word).store(value, std::memory_order_release);
  }
};

// The ends of a rank without a GPU: its processor fills and empties slots. A message must fit in one. Slots carry no
// signature; empty messages are none. Once a rank of the host has aborted nothing comes or goes any more: the
// communicator has failed, and its engine hears of that otherwise.
// `team` helps, where it is not null.
std::unique_ptr<SendEnd> MakeSlotSend(const Slots& slots, std::shared_ptr<Team> team);
std::unique_ptr<RecvEnd> MakeSlotRecv(const Slots& slots, std::shared_ptr<Team> team);

}  // namespace hetcoll
