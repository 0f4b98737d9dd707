// TCP: one or several connected sockets ("stripes") for each pair of ranks and channel.
//
// A message is cut into blocks, dealt to the stripes in turn; each block has a header of its own. Payload goes straight
// from the sender's memory into the socket and from the socket into the destination; only reductions pass through a
// staging buffer, which stays in the L2 cache.
#pragma once

#include <span>

#include "transport/transport.h"

namespace hetcoll {

// Takes over the descriptors: they are set non-blocking and closed with the last of the two ends.
LinkEnds MakeTcp(std::span<const int> fds, int peer);

}  // namespace hetcoll
