// TCP: one or several connected sockets ("stripes") for each pair of ranks and channel.
//
// A message is cut into blocks, dealt to the stripes; each has a header that also says which stripe brings the next
// one, so the sender is free to choose and the receiver never searches. Payload goes straight from the sender's memory
// into the socket and from the socket into the destination; only reductions pass through a staging buffer.
//
// A checked block (tcp_block.h) is a piece that its receiver keeps to itself until its checksum was found right: what
// was spoiled on the way is neither used nor passed on. It cannot be sent again, since the sender may have given the
// memory back: it is a Fault.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "transport/integrity.h"
#include "transport/transport.h"

namespace hetcoll {

// What the TCP links of an engine share.
struct TcpShared {
  explicit TcpShared(Integrity checks = Integrity::kOff, std::uint64_t fault = 0) : integrity(checks), spoil(fault) {}

  Integrity integrity;             // the same at both ends of each link
  std::uint64_t spoil;             // HETCOLL_FAULT: the byte that each link spoils; 0: none
  std::vector<std::byte> staging;  // what is received to be reduced: one link's, between Peek and Consume
  IntegrityCounts counts;
};

// Takes over the descriptors: they are set non-blocking and closed with the last of the two ends.
LinkEnds MakeTcp(std::span<const int> fds, int peer, std::shared_ptr<TcpShared> shared);

}  // namespace hetcoll
