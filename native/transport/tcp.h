// TCP: one or several connected sockets ("stripes") for each pair of ranks and channel.
//
// A message is cut into blocks, dealt to the stripes; each has a header that also says which stripe brings the next
// one, so the sender is free to choose and the receiver never searches. Payload goes straight from the sender's memory
// into the socket and from the socket into the destination; only reductions pass through a staging buffer.
//
// A socket that breaks is made again, and the stream goes on where the peer's ended (tcp_mending.h). For that the link
// keeps what the peer's kernel has not acknowledged (tcp_sent.h): data that is sent from the caller's memory is lent
// (SendEnd::Lent) until `Keep`.
//
// A checked block (tcp_block.h) is a piece that its receiver keeps to itself until its checksum was found right: what
// was spoiled on the way is neither used nor passed on. The receiver breaks the socket, and the piece comes first over
// the new one: the link keeps what is checked until the receiver said that it was right. Where sockets are not mended,
// or an edge spoils too much, it is a Fault.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "transport/integrity.h"
#include "transport/tcp_mending.h"
#include "transport/transport.h"

namespace hetcoll {

// HETCOLL_FAULT: what links do beneath the checksums; 0: never.
struct TcpFaults {
  std::uint64_t spoil = 0;        // the byte that each link spoils, the first time
  std::uint64_t spoil_every = 0;  // and so many bytes later the next one, and so on; 0: no further one
  std::uint64_t truncate = 0;     // the byte behind which each link's stream ends, for good
  std::uint64_t reset = 0;        // so many bytes, on average, go over a socket until it is reset
  std::uint64_t seed = 1;
};

// What the TCP links of an engine share.
struct TcpShared {
  explicit TcpShared(Integrity checks = Integrity::kOff, const TcpFaults& made = {})
      : integrity(checks), faults(made), dice(made.seed) {}

  Integrity integrity;  // the same at both ends of each link
  TcpFaults faults;
  std::uint64_t dice;                // of the faults
  std::shared_ptr<Mending> mending;  // null: whoever owns the links cannot make sockets again
  std::vector<std::byte> staging;    // what is received to be reduced: one link's, between Peek and Consume
  IntegrityCounts counts;
};

// Takes over the descriptors: they are set non-blocking and closed with the last owner. `first` is by what `Mending`
// knows the first of them.
std::shared_ptr<Sockets> MakeSockets(std::span<const int> fds, const SocketId& first,
                                     const std::shared_ptr<TcpShared>& shared);
// The two ends of a link over sockets that both own.
LinkEnds MakeTcp(std::shared_ptr<Sockets> sockets, const std::shared_ptr<TcpShared>& shared);

}  // namespace hetcoll
