// How a link comes to be: see link.h.

#include <bit>

#include "base/clock.h"
#include "transport/verbs/link.h"

namespace hetcoll {
namespace {

constexpr std::uint32_t kHelloMagic = 0x48435632;  // "HCV2": its last digit is the version

std::byte ProbeByte(std::uint32_t seed, std::size_t i) {
  return static_cast<std::byte>((static_cast<std::uint32_t>(i) * 2654435761u + seed) >> 13);
}

}  // namespace

std::string VerbsLink::NothingCame(const Rail& rail, const std::string& to) {
  const std::string why = rail.OnlyEmptyThrough();
  return rail.Name() + ": nothing came through" + to + (why.empty() ? "" : ": " + why);
}

void VerbsLink::SendHello() {
  Hello hello{};
  hello.magic = kHelloMagic;
  hello.rails = static_cast<std::uint32_t>(rails_.size());
  hello.ring_bytes = options_.ring_bytes;
  for (const auto& rail : rails_) hello.addresses[rail->number()] = rail->address();
  control_socket_.Send(hello);
}

void VerbsLink::TakeHello() {
  if (!control_socket_.Receive(peer_hello_)) return;
  const Hello& hello = peer_hello_;
  const auto refuse = [&](const char* what, std::uint64_t ours, std::uint64_t theirs) {
    throw Fault(FaultKind::kCorrupt, options_.peer,
                std::string("verbs: ") + what + ": " + std::to_string(ours) + " here, " + std::to_string(theirs) +
                    " on rank " + std::to_string(options_.peer));
  };
  if (hello.magic != kHelloMagic) refuse("protocol", kHelloMagic, hello.magic);
  if (hello.rails != rails_.size()) refuse("rails", rails_.size(), hello.rails);
  if (hello.ring_bytes != options_.ring_bytes) refuse("bytes of a ring", options_.ring_bytes, hello.ring_bytes);
  for (const auto& rail : rails_) {
    if (!rail->alive()) continue;
    const RailAddress& address = hello.addresses[rail->number()];
    try {
      if (address.usable == 0) throw Fault(FaultKind::kSystem, options_.peer, "the peer could not make its end");
      rail->Connect(address);
    } catch (const Fault& fault) {
      rail->Kill(fault.what());
    }
  }
  control_socket_.Send(Word{kReadyWord, Alive(), 0});
  state_ = State::kConnect;
}

void VerbsLink::SendProbe(Rail& rail) {
  const std::size_t n = options_.ring_bytes / 4;
  rail.PostEmpty();
  Frame* frame = rail.Slot(n);
  *frame = {0, n, kNoSeq, static_cast<std::uint32_t>(n), kFrameProbe};
  auto* payload = reinterpret_cast<std::byte*>(frame + 1);
  const std::uint32_t seed = rail.address().psn;
  for (std::size_t i = 0; i < n; ++i) payload[i] = ProbeByte(seed, i);
  rail.Post(frame, payload, rail.staging_lkey());
  rail.PostEmpty();
}

void VerbsLink::TakeProbe(Rail& rail, const Frame& frame, const std::byte* payload) {
  const Recovery& r = recoveries_[static_cast<std::size_t>(rail.number())];
  const bool again = r.made.rail.get() == &rail;
  const std::uint32_t seed = again ? r.peer.psn : peer_hello_.addresses[rail.number()].psn;
  bool whole = frame.nbytes == options_.ring_bytes / 4;
  for (std::size_t i = 0; i < frame.nbytes && whole; ++i) whole = payload[i] == ProbeByte(seed, i);
  if (!whole) return rail.Kill(rail.Name() + ": what came was not what was sent");
  if (!again) {
    verified_ |= 1u << rail.number();
  } else if (leads()) {
    TakeUp(rail);
  } else {
    SendProbe(rail);
  }
}

void VerbsLink::Probe() {
  for (const auto& rail : rails_) rail->Poll(*this);
  if (NowNs() >= probe_until_) {
    for (const auto& rail : rails_) {
      if ((verified_ & 1u << rail->number()) == 0) rail->Kill(NothingCame(*rail, ""));
    }
  }
  Word word{};
  if (!heard_ && ReceiveWord(kVerifiedWord, word)) {
    heard_ = word.mask;
    for (const auto& rail : rails_) {
      if ((word.mask & 1u << rail->number()) == 0) rail->Kill(NothingCame(*rail, " to the peer"));
    }
  }
  if (!told_ && (Alive() & ~verified_) == 0) {
    told_ = Alive();
    control_socket_.Send(Word{kVerifiedWord, *told_, 0});
  }
  if (told_ && heard_) FinishProbe(*told_ & *heard_);
}

void VerbsLink::FinishProbe(std::uint32_t mask) {
  std::string why;
  for (const auto& rail : rails_) {
    if ((mask & 1u << rail->number()) != 0) continue;
    rail->Kill(rail->Name() + ": the peer does not use it");
    buried_ |= 1u << rail->number();
    AwaitRecovery(*rail);
    why += "; " + rail->error();
  }
  ++news_;
  state_ = State::kUp;
  if (!why.empty())
    Tell(std::to_string(std::popcount(mask)) + " of " + std::to_string(rails_.size()) + " rails in use" + why);
  if (mask != 0) return PostClearToSends();
  if (options_.device()) {
    throw Fault(FaultKind::kSystem, options_.peer,
                "verbs: no rail to rank " + std::to_string(options_.peer) +
                    " works, and a link between GPUs' memory begins with one (HETCOLL_CROSS=staged goes through host "
                    "memory, over TCP where there is no RDMA)" +
                    why);
  }
  state_ = State::kSwitch;
}

}  // namespace hetcoll
