// TCP: one or several connected sockets ("stripes") for each pair of ranks and channel.
//
// A message is cut into blocks, dealt to the stripes; each has a header that also says which stripe brings the next
// one, so the sender is free to choose and the receiver never searches. Payload goes straight from the sender's memory
// into the socket and from the socket into the destination; only reductions pass through a staging buffer.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "transport/transport.h"

namespace hetcoll {

// What is received to be reduced, shared by the links of an engine: it holds one link's bytes between Peek and Consume.
struct TcpStaging {
  std::vector<std::byte> bytes;
};

// Takes over the descriptors: they are set non-blocking and closed with the last of the two ends.
LinkEnds MakeTcp(std::span<const int> fds, int peer, std::shared_ptr<TcpStaging> staging);

}  // namespace hetcoll
