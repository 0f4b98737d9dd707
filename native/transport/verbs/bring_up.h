// From a queue pair that was just made to one that sends and receives.
#pragma once

#include <cstdint>

#include "transport/verbs/rail.h"

namespace hetcoll {

// What a queue pair could not be brought to, and errno's value of why; null where it could.
struct BringUpError {
  const char* state = nullptr;
  int error = 0;
};

// Bytes of payload in the largest packet between two ports.
std::uint32_t PathMtu(const Nic& nic, const RailAddress& remote);

// RESET -> INIT, where the peer may do what `access` says.
BringUpError InitPair(const Nic& nic, ibv::Qp* qp, std::uint32_t access);
// INIT -> RTR -> RTS. `psn` is this end's first packet.
BringUpError ConnectPair(const Nic& nic, ibv::Qp* qp, const RailAddress& remote, std::uint32_t psn);

}  // namespace hetcoll
