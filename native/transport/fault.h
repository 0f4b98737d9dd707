// Links that misbehave on purpose, for tests: HETCOLL_FAULT.
//
// `delay`, `short` and `reorder` are what any transport may do; they must never change a result. `duplicate`, `drop`
// and `close` are what none may do; they must end in an error that names the peer, in bounded time, and never in wrong
// data. Over TCP `corrupt` spoils a byte on the way, beneath the checksums of HETCOLL_INTEGRITY, and `reset` has the
// kernel reset sockets again and again, which must not change a result either; `corrupt_every` never ends, and must end
// in an error, as must `truncate`, which ends a stream where it is, most often in the middle of a frame.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "transport/tcp.h"
#include "transport/transport.h"

namespace hetcoll {

struct FaultSpec {
  // Reads "delay=0.2,short=0.5,seed=7"; nothing is no fault. Throws std::invalid_argument that says what was wanted and
  // what came.
  static FaultSpec Parse(const std::string& text);

  bool any() const {
    return delay > 0 || cut > 0 || reorder > 0 || duplicate > 0 || drop > 0 || close > 0 || stall > 0;
  }

  double delay = 0;    // how often an end that has moved something rests, for up to 100 us
  double cut = 0;      // "short": how often an end moves fewer bytes than it could, down to one
  double reorder = 0;  // how often a message waits before its first byte, for up to 1 ms: other channels overtake it
  std::uint64_t stall =
      0;  // the byte, counted on each end, from which on it moves nothing for `hold` seconds; 0: never
  double hold = 5;
  // Messages are counted on each end from 1; 0 is never.
  std::uint64_t duplicate = 0;  // the message that is sent twice
  std::uint64_t drop = 0;       // the message that is not sent
  std::uint64_t close = 0;      // the message before which the link is closed
  std::uint64_t corrupt = 0;    // the byte of what each link sends, counted from 1, of which a bit is turned; 0: none
  std::uint64_t corrupt_every = 0;  // so many bytes behind that, and so on, another one, also of what is sent again
  std::uint64_t truncate = 0;       // the last byte that each link sends, counted from 1; 0: it goes on
  std::uint64_t reset = 0;          // bytes of what goes over a TCP socket, on average, until it is reset; 0: never
  int rank = -1;                    // the rank whose links misbehave; -1: every rank's
  std::uint64_t seed = 1;
};

class ReadyFd;

// Wraps the links of one rank.
class FaultInjector {
 public:
  FaultInjector(const FaultSpec& spec, int rank) : spec_(spec), rank_(rank) {}

  // `ends` themselves where this rank's links are to behave. What is sent is cut to multiples of `grain` bytes: 1 where
  // the transport joins the pieces again, the largest element's size where the receiver sees them as they are.
  LinkEnds Wrap(LinkEnds ends, std::size_t grain, int peer, int channel);

  // For TCP links, whose bytes a wrapper does not see: FaultSpec::corrupt to FaultSpec::reset.
  TcpFaults tcp() const {
    if (!Applies()) return {};
    return {spec_.corrupt > 0 ? spec_.corrupt : spec_.corrupt_every, spec_.corrupt_every, spec_.truncate, spec_.reset,
            spec_.seed};
  }

 private:
  bool Applies() const { return spec_.rank < 0 || spec_.rank == rank_; }

  FaultSpec spec_;
  int rank_;
  std::weak_ptr<ReadyFd> ready_;  // the links'
};

}  // namespace hetcoll
