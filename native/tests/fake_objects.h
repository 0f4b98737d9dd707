// What programs hold of fake RDMA devices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>

#include "fake_verbs.h"

namespace hetcoll::testing {

struct FakeChannel : ibv::CompChannel {
  std::deque<FakeCq*> events;
};

struct FakeCq : ibv::Cq {
  std::size_t capacity = 0;
  std::deque<std::pair<ibv::Wc, FakeQp*>> entries;
  bool armed = false;
  int unacknowledged = 0;
  int users = 0;
};

struct FakeMr : ibv::Mr {
  int access = 0;
  std::uint64_t iova = 0;  // the address of its first byte for devices

  // Where these bytes are; null where they are not inside.
  std::byte* At(std::uint64_t address, std::size_t n) const {
    if (address < iova || n > length || address - iova > length - n) return nullptr;
    return static_cast<std::byte*>(addr) + (address - iova);
  }
};

struct FakeQp : ibv::Qp {
  FakeNic* nic = nullptr;
  ibv::QpState state = ibv::QpState::kReset;
  ibv::QpCap cap{};
  ibv::QpAttr rtr{};
  ibv::QpAttr rts{};
  std::deque<Fabric::Op> sending;
  std::uint64_t sq_used = 0;
  std::deque<std::uint64_t> unfinished;  // wr_ids that take a place in the send queue
  std::uint32_t receives = 0;
  std::uint32_t access = 0;  // the peer's
};

// Those that a program's handle stands for.
inline FakeNic& Of(ibv::Context* context) { return *static_cast<FakeNic*>(context); }
inline FakeCq& Of(ibv::Cq* cq) { return *static_cast<FakeCq*>(cq); }
inline FakeQp& Of(ibv::Qp* qp) { return *static_cast<FakeQp*>(qp); }
inline FakeChannel& Of(ibv::CompChannel* channel) { return *static_cast<FakeChannel*>(channel); }

}  // namespace hetcoll::testing
