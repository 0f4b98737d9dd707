// The receiving half of a link: puts frames that rails bring into the link's order and drops what came twice.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "transport/transport.h"
#include "transport/verbs/outbox.h"
#include "transport/verbs/rail.h"

namespace hetcoll {

class Inbox {
 public:
  // `device`: all frames lie in a GPU's memory.
  Inbox(int peer, bool device, IntegrityCounts& counts) : peer_(peer), device_(device), counts_(counts) {}

  // `lands`: it may lie in a GPU's memory.
  void Arrived(Rail& rail, std::uint64_t index, const Frame& frame, const std::byte* payload, bool lands);
  void Arrived(const Frame& frame, std::unique_ptr<std::byte[]> payload);  // over TCP

  // Whether this frame came, and is here or was consumed.
  bool Has(std::uint64_t seq) const { return seq < due_ || (seq < due_ + kWindow && At(seq).present); }
  // Whether the frame that is due is here.
  bool ready() const { return At(due_).present; }
  // Up to n bytes of the message that is due: its frame must be here. Throws Fault where it is of another one.
  View Peek(const Message& m, std::size_t at, std::size_t n);
  void Consume(std::size_t n);

  // The message with this signature may be written straight to `base`, its first byte's place; null: no more.
  void Direct(std::uint64_t signature, const std::byte* base) {
    direct_signature_ = signature;
    direct_ = base;
  }

  // Of what NICs wrote straight into a GPU's memory.
  // Whether the frame that is due is where the GPU sees it.
  bool landed() const { return At(due_).landed; }
  // This NIC has answered so many reads of that memory (see ReadBack): what it had brought before the last of them is
  // there. Whether it needs one more, behind the `begun` so far.
  bool Land(const Nic& nic, std::uint64_t answered, std::uint64_t begun);
  // Whether the sender waits to hear that something is there that came twice.
  bool owes() const { return !again_.empty(); }
  // What this NIC brought and is not known to be there has not arrived: it must come again.
  void Forget(const Nic& nic);

  // This frame was spoiled, and comes again; kNoSeq: one of which nothing is known, but that it is not here.
  void Await(std::uint64_t seq);

  std::uint64_t due() const { return due_; }
  // Behind the last frame that came over TCP.
  std::uint64_t tcp_end() const { return tcp_end_; }

  // Copies what waits for an earlier frame, so that there is room in the rails' rings for that one: it may have to be
  // sent again behind them.
  void MakeRoom();

  // Copies what this dead rail brought: its ring is needed, and it will be no more.
  void Leave(const Rail& rail);

  std::uint64_t twice() const { return twice_; }

 private:
  struct Arrival {
    bool present = false;
    Frame frame;
    const std::byte* payload;
    Rail* rail;  // null once copied
    std::uint64_t index;
    std::unique_ptr<std::byte[]> copy;
    const Nic* nic;       // that brought it
    std::uint64_t reads;  // that the NIC had begun before
    bool landed;
  };

  // A frame that came twice, into a GPU's memory: it must be there before the peer writes anything new.
  struct Again {
    Rail* rail;
    std::uint64_t index;
    std::uint64_t reads;
  };

  Arrival* Take(const Frame& frame);
  static void Copy(Arrival& a);

  Arrival& At(std::uint64_t seq) { return arrivals_[seq % kWindow]; }
  const Arrival& At(std::uint64_t seq) const { return arrivals_[seq % kWindow]; }

  int peer_;
  bool device_;
  IntegrityCounts& counts_;
  std::vector<std::uint64_t> awaited_;  // what was spoiled
  std::array<Arrival, kWindow> arrivals_;
  std::vector<Again> again_;
  std::uint64_t due_ = 0;
  std::uint64_t end_ = 0;  // behind the last that arrived
  std::uint64_t tcp_end_ = 0;
  std::uint64_t direct_signature_ = 0;
  const std::byte* direct_ = nullptr;
  std::size_t taken_ = 0;  // bytes of the frame that is due
  bool open_ = false;      // it was compared with the message
  std::uint64_t twice_ = 0;
};

}  // namespace hetcoll
