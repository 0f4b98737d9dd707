// How a lost rail comes back, beside others that carry on, or TCP: see link.h. So does one that did not work when the
// link was made.
//
// The end with the lower rank leads. It makes a new queue pair over the lost one's memory and says so over the
// control socket; the other end makes its own, connects it and answers; the first connects as well and sends a probe.
// The other end answers a whole probe with its own, and that is answered with the frame that puts the rail to use at
// both ends: what follows it has been proved both ways. Whoever fails says so, with an address that is not usable. Then
// the leader waits twice as long as before, up to half a minute, and tries again, for ever: what a try takes of a
// device is nothing beside such a pause.

#include <algorithm>
#include <bit>
#include <chrono>
#include <system_error>

#include "base/clock.h"
#include "transport/verbs/link.h"

namespace hetcoll {
namespace {

using Step = Recovery::Step;

constexpr int kMostDoublings = 5;                 // of a second: half a minute
constexpr std::int64_t kLongNs = 60'000'000'000;  // who was up for so long is tried as soon as at first

bool Works(const Recovery& r) { return r.made.rail != nullptr && r.made.rail->alive(); }
std::string Why(const Recovery& r) {
  return r.made.rail != nullptr ? r.made.rail->error() : "no thread could be started";
}

}  // namespace

void VerbsLink::Recover(std::int64_t now) {
  if (control_socket_.ended() || leaving_ || revoked_) return;
  for (std::size_t n = 0; n < rails_.size(); ++n) {
    Recovery& r = recoveries_[n];
    if (r.making.valid()) {
      if (r.making.wait_for(std::chrono::seconds(0)) != std::future_status::ready) continue;
      r.made = r.making.get();
      ++news_;
    }
    const Step before = r.step;
    if (leads()) {
      Lead(*rails_[n], r, now);
    } else {
      Follow(*rails_[n], r);
    }
    if (r.step != before) ++news_;
  }
}

void VerbsLink::Lead(Rail& lost, Recovery& r, std::int64_t now) {
  const bool answered = r.heard && r.heard->attempt == r.attempt;
  // It was lost at the other end before that knew that it is in use.
  const bool late = r.step == Step::kIdle && answered && r.attempt == r.life && r.heard->address.usable == 0;
  if (late) lost.Kill(lost.Name() + ": the peer has given it up");
  if (r.step == Step::kIdle) {
    const bool due = IsDown(lost) && now >= r.next_ns;
    if (!due || outbox_.Uses(lost)) return;
    ++r.tries;
    ++r.all_tries;
    ++r.attempt;
    r.heard.reset();
    r.step = Step::kMake;
    return Make(r, lost.number(), false);
  }
  if (!Works(r)) return Failed(r, lost.number(), Why(r), now);
  if (answered && r.heard->address.usable == 0) return Failed(r, lost.number(), "the peer could not", now);
  switch (r.step) {
    case Step::kMake:
      SendOffer(lost.number(), r.attempt, r.made.rail->address());
      r.step = Step::kOffered;
      return;
    case Step::kOffered:  // the peer may take its time: its end is in use until it has sent everything again
      if (!answered) return;
      r.peer = r.heard->address;
      r.step = Step::kConnect;
      return Make(r, lost.number(), true);
    case Step::kConnect:
      SendProbe(*r.made.rail);
      r.until_ns = DeadlineNs(kProbeSeconds);
      r.step = Step::kProbe;
      return;
    default:
      if (now >= r.until_ns) Failed(r, lost.number(), NothingCame(*r.made.rail, ""), now);
  }
}

void VerbsLink::Follow(Rail& lost, Recovery& r) {
  if (r.heard) {
    const Recovery::LocalNics offer = *std::exchange(r.heard, std::nullopt);
    r.made = {};
    r.step = Step::kIdle;
    if (offer.address.usable == 0) return;
    r.attempt = offer.attempt;
    ++r.all_tries;
    r.peer = offer.address;
    r.step = Step::kOffered;
    lost.Kill(lost.Name() + ": the peer has given it up");
  }
  if (r.step == Step::kOffered && IsDown(lost) && !outbox_.Uses(lost)) {
    r.step = Step::kConnect;
    return Make(r, lost.number(), true);
  }
  if (r.step < Step::kConnect) return;
  if (!Works(r)) {
    r.why = Why(r);
    r.made = {};
    r.step = Step::kIdle;
    SendOffer(lost.number(), r.attempt, RailAddress{});
  } else if (r.step == Step::kConnect) {
    SendOffer(lost.number(), r.attempt, r.made.rail->address());
    r.step = Step::kProbe;
  }
}

// Makes a new rail, where there is none yet, and connects it.
void VerbsLink::Make(Recovery& r, int number, bool connect) {
  const auto n = static_cast<std::size_t>(number);
  Rail& lost = *rails_[n];
  if (r.made.rail == nullptr) {
    inbox_.Leave(lost);
    lost.GiveBack();
    ++news_;  // it may have taken news that others wait for
  }
  auto make = [made = std::move(r.made), &nic = lost.nic(), memory = MemoryOf(n), number, peer = options_.peer,
               device = lost.peer_device(), checks = checks(), connect, address = r.peer,
               reads = options_.device() || lost.nic().reads_back()]() mutable {
    if (made.rail == nullptr) made.rail = std::make_unique<Rail>(nic, memory, number, peer, device, checks);
    if (reads && made.read_back == nullptr) made.read_back = std::make_unique<ReadBack>(nic);
    Rail& rail = *made.rail;
    try {
      if (connect && rail.alive()) rail.Connect(address);
    } catch (const Fault& fault) {
      rail.Kill(fault.what());
    }
    if (reads && !made.read_back->error().empty()) rail.Kill(made.read_back->error());
    return std::move(made);
  };
  try {
    r.making = std::async(std::launch::async, std::move(make));
  } catch (const std::system_error&) {
    r.made = {};  // no thread could be had
  }
}

void VerbsLink::Failed(Recovery& r, int number, const std::string& why, std::int64_t now) {
  if (r.step > Step::kMake) SendOffer(number, r.attempt, RailAddress{});
  r.why = why;
  r.made = {};
  r.step = Step::kIdle;
  WaitForTry(r, now);
}

void VerbsLink::WaitForTry(Recovery& r, std::int64_t now) const {
  r.next_ns = now + (options_.recovery_ns << std::min(r.tries, kMostDoublings));
}

// A rail that was in use has died, or one never came to be.
void VerbsLink::AwaitRecovery(const Rail& rail) {
  Recovery& r = recoveries_[static_cast<std::size_t>(rail.number())];
  const std::int64_t now = NowNs();
  if (r.life != 0 && now - r.up_ns > kLongNs) r.tries = 0;
  WaitForTry(r, now);
}

void VerbsLink::SendOffer(int number, std::uint32_t attempt, const RailAddress& address) {
  control_socket_.Send(Word{kRailWord, static_cast<std::uint32_t>(number), attempt});
  control_socket_.Send(address);
}

// False until the rest of it is here.
bool VerbsLink::TakeOffer() {
  RailAddress address{};
  if (!control_socket_.Receive(address)) return false;
  if (rail_word_->mask >= rails_.size()) {
    throw Fault(FaultKind::kCorrupt, options_.peer, "verbs: the peer has a rail more");
  }
  recoveries_[rail_word_->mask].heard = {static_cast<std::uint32_t>(rail_word_->seq), address};
  rail_word_.reset();
  return true;
}

// The new rail brought the peer's probe whole, or (the other end) the frame that follows it.
void VerbsLink::TakeUp(Rail& rail) {
  const auto n = static_cast<std::size_t>(rail.number());
  Recovery& r = recoveries_[n];
  if (leads()) rail.PostControl(kFrameProved);
  rail.Follow(*rails_[n]);
  rails_[n] = std::move(r.made.rail);
  if (r.made.read_back != nullptr) rails_[n]->nic().Renew(std::move(r.made.read_back));
  buried_ &= ~(1u << n);
  lost_ &= ~(1u << n);
  r.step = Step::kIdle;
  r.life = r.attempt;
  r.up_ns = NowNs();
  r.why.clear();
  ++r.successes;
  if (bounce_ != nullptr) bounce_->Forget();
  ++news_;
  for (std::size_t other = 0; other < rails_.size(); ++other) {
    if ((lost_ & 1u << other) != 0) rail.PostLost(static_cast<int>(other), recoveries_[other].life);
  }
  Tell("took up a lost rail again, " + std::to_string(std::popcount(Alive())) + " in use: " + rail.Name());
}

}  // namespace hetcoll
