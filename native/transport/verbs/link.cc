#include "transport/verbs/link.h"

#include <sys/mman.h>

#include <bit>
#include <cerrno>
#include <cstring>

#include "base/clock.h"

namespace hetcoll {
namespace {

std::shared_ptr<std::byte> Map(std::size_t nbytes, int peer) {
  void* at = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) {
    throw Fault(FaultKind::kSystem, peer,
                "verbs: no " + std::to_string(nbytes) + " bytes for rings: " + std::strerror(errno));
  }
  // A child of fork must not share it: pages that a device writes would be copied under it.
  static_cast<void>(madvise(at, nbytes, MADV_DONTFORK));
  return {static_cast<std::byte*>(at), [nbytes](std::byte* p) { munmap(p, nbytes); }};
}

}  // namespace

VerbsLink::VerbsLink(const VerbsLinkOptions& options, std::span<const std::pair<Nic*, std::string>> rails,
                     std::span<const int> fds, VerbsShared& shared)
    : options_(options),
      shared_(shared),
      control_socket_(fds, {options.peer, options.channel, 0}, shared.tcp),
      memory_(Map(2 * rails.size() * options.ring_bytes, options.peer)),
      rails_(MakeRails(rails)),
      bounce_(options.device() ? std::make_unique<BounceBuffer>(options.copier, options.pinned, options.peer)
                               : nullptr),
      outbox_(rails_, control_socket_, shared.regions, options.ring_bytes, options.peer, bounce_.get(),
              shared.tcp->integrity),
      inbox_(options.peer, options.device(), shared.tcp->counts),
      recoveries_(rails.size()) {
  SendHello();
}

RailMemory VerbsLink::MemoryOf(std::size_t rail) const {
  std::byte* ring = memory_.get() + 2 * rail * options_.ring_bytes;
  return {ring, ring + options_.ring_bytes, options_.ring_bytes};
}

Rails VerbsLink::MakeRails(std::span<const std::pair<Nic*, std::string>> peers) const {
  Rails rails;
  for (const auto& [nic, device] : peers) {
    const auto number = static_cast<int>(rails.size());
    rails.push_back(std::make_unique<Rail>(*nic, MemoryOf(rails.size()), number, options_.peer, device, checks()));
  }
  return rails;
}

void VerbsLink::Drive() {
  if (fault_) throw *fault_;
  try {
    DriveOnce();
  } catch (const Fault& fault) {
    fault_ = fault;
    ++news_;
    throw;
  }
}

void VerbsLink::DriveOnce() {
  Word word{};
  if (state_ == State::kHello) TakeHello();
  if (state_ == State::kConnect && ReceiveWord(kReadyWord, word)) {
    KillRails(~word.mask, "the peer could not connect its end");
    for (const auto& rail : rails_) {
      if (rail->alive()) SendProbe(*rail);
    }
    probe_until_ = DeadlineNs(kProbeSeconds);
    state_ = State::kProbe;
  }
  if (state_ == State::kProbe) Probe();
  if (state_ == State::kUp) {
    if (AllBuried()) ReadWords();
    PollRails();
    if (outbox_.resending() || outbox_.copying()) outbox_.Resend(AllBuried());
    if (unposted_ > 0) PostClearToSends();
  }
  if (state_ == State::kSwitch && control_socket_.Flush()) GoOverTcp();
}

bool VerbsLink::Service() {
  if (fault_) return false;
  const std::uint64_t news = news_;
  const bool ended = control_socket_.ended();
  if (state_ == State::kUp) {
    ReadWords();
    Confirm(true);
    const std::int64_t now = NowNs();
    for (const auto& rail : rails_) rail->Watch(now);
    Recover(now);
  }
  Drive();
  return news != news_ || ended != control_socket_.ended();
}

bool VerbsLink::ReceiveWord(WordKind kind, Word& word) {
  if (!control_socket_.Receive(word)) return false;
  CheckWord(kind, word);
  return true;
}

void VerbsLink::CheckWord(WordKind kind, const Word& word) const {
  if (word.kind == kind) return;
  throw Fault(FaultKind::kCorrupt, options_.peer,
              "verbs: word " + std::to_string(word.kind) + " came, " + std::to_string(kind) + " was due");
}

// ---- What rails report ----

void VerbsLink::OnFrame(Rail& rail, std::uint64_t index, const Frame& frame, const std::byte* payload) {
  ++news_;
  if ((frame.flags & kFrameChecked) != 0) NoteRight(frame);
  if ((frame.flags & (kFrameProbe | kFrameInvite | kFrameProved)) == 0) {
    const bool lands = options_.device() || ((frame.flags & kFrameDirect) != 0 && exposed_devices_ > 0);
    return inbox_.Arrived(rail, index, frame, payload, lands);
  }
  if ((frame.flags & kFrameProbe) != 0) TakeProbe(rail, frame, payload);
  if ((frame.flags & kFrameInvite) != 0 && frame.nbytes == sizeof(ClearToSend)) {
    ClearToSend clear_to_send;
    std::memcpy(&clear_to_send, payload, sizeof clear_to_send);
    outbox_.Invited(clear_to_send);
  }
  if ((frame.flags & kFrameProved) != 0) {
    if (leads() || recoveries_[static_cast<std::size_t>(rail.number())].made.rail.get() != &rail) {
      throw Fault(FaultKind::kCorrupt, options_.peer, "verbs: a rail was taken up that was not lost");
    }
    TakeUp(rail);
  }
  rail.Release(index, false);
}

// As a rail that fails: what it brought and what is not confirmed comes again, by another way. One that is still being
// tried has nothing to lose.
void VerbsLink::OnSpoiled(Rail& rail, const Frame* frame) {
  const std::string what =
      frame == nullptr ? "a frame's header"
                       : std::to_string(frame->nbytes) + " bytes of a message of " + std::to_string(frame->total);
  const std::string why = "what rank " + std::to_string(options_.peer) + " sent was spoiled on the way: " + what +
                          " came with a wrong checksum (CRC32C)";
  rail.Kill(rail.Name() + ": " + why);
  if (state_ != State::kUp || rails_[static_cast<std::size_t>(rail.number())].get() != &rail) return;
  shared_.tcp->counts.spoiled += 1;
  if (spoils_.Add(NowNs())) throw Fault(FaultKind::kCorrupt, options_.peer, "verbs: " + why + spoils_.Times());
  inbox_.Await(frame == nullptr ? kNoSeq : frame->seq);
}

void VerbsLink::NoteRight(const Frame& frame) const { shared_.tcp->counts.checked_bytes += frame.nbytes; }

void VerbsLink::OnDelivered(std::uint64_t seq) {
  ++news_;
  outbox_.Delivered(seq);
}

void VerbsLink::OnLost(int rail, std::uint32_t life) {
  const auto n = static_cast<std::size_t>(rail);
  if (n < rails_.size() && recoveries_[n].life == life) KillRails(1u << n, "the peer has given it up");
}

void VerbsLink::Fence() {
  for (const auto& rail : rails_) rail->Kill("the engine has failed");
  for (const Recovery& r : recoveries_) {
    if (r.made.rail != nullptr) r.made.rail->Kill("the engine has failed");
  }
  if (!fault_) fault_ = Fault(FaultKind::kAborted, options_.rank, "verbs: the engine has failed");
  outbox_.DeliveredBefore(outbox_.next());
  while (!invited_.empty()) Uninvite();
  while (!exposed_.empty()) Hide(false);
}

// ---- When rails die ----

void VerbsLink::PollRails() {
  for (const auto& rail : rails_) rail->Poll(*this);
  for (const Recovery& r : recoveries_) {
    if (Rail* rail = r.made.rail.get()) rail->Poll(*this);
  }
  for (const auto& rail : rails_) {
    if (!rail->alive() && (buried_ & 1u << rail->number()) == 0) Bury(*rail);
  }
}

void VerbsLink::Bury(Rail& rail) {
  buried_ |= 1u << rail.number();
  ++news_;
  ReadWords();
  if (control_socket_.ended()) return;  // the peer has left: nothing is lost
  ++lost_rails_;
  lost_ |= 1u << rail.number();
  outbox_.Lost(rail);
  if (options_.device()) unposted_ = invited_.size();  // it may have carried some
  AwaitRecovery(rail);
  const std::uint32_t left = Alive();
  Tell("lost a rail, " + std::to_string(std::popcount(left)) + " left" + (left == 0 ? ", going on over TCP" : "") +
       ": " + rail.error());
  for (const auto& other : rails_) {
    if (other->alive()) other->PostLost(rail.number(), recoveries_[static_cast<std::size_t>(rail.number())].life);
  }
  if (left != 0 || leaving_) return;
  for (const auto& other : rails_) {  // the last may not have brought the news of those before
    const Recovery& r = recoveries_[static_cast<std::size_t>(other->number())];
    if (IsLost(*other)) control_socket_.Send(Word{kLostWord, static_cast<std::uint32_t>(other->number()), r.life});
  }
}

// What the control socket brings while the link is up.
void VerbsLink::ReadWords() {
  control_socket_.Flush();
  for (Word word{};;) {
    if (rail_word_) {
      if (!TakeOffer()) return;
    } else if (in_frame_) {
      if (!TakeFrame()) return;
    } else if (control_socket_.Receive(word)) {
      TakeWord(word);
    } else {
      return;
    }
  }
}

void VerbsLink::TakeWord(const Word& word) {
  switch (word.kind) {
    case kRailWord:
      rail_word_ = word;
      return;
    case kFrameWord:
      in_frame_ = true;
      return;
    case kLostWord:
      return OnLost(static_cast<int>(word.mask), static_cast<std::uint32_t>(word.seq));
    default:
      CheckWord(kTakenWord, word);
      if (word.seq > outbox_.next()) {
        throw Fault(FaultKind::kCorrupt, options_.peer, "verbs: the peer has frames that were not sent");
      }
      outbox_.DeliveredBefore(word.seq);
      ++news_;
  }
}

// False until the rest of it is here.
bool VerbsLink::TakeFrame() {
  if (!incoming_) {
    Frame frame{};
    if (!control_socket_.Receive(frame)) return false;
    if (frame.nbytes > options_.ring_bytes) {
      throw Fault(FaultKind::kCorrupt, options_.peer, "verbs: a frame that may not come over TCP");
    }
    incoming_ = {frame, std::make_unique_for_overwrite<std::byte[]>(frame.nbytes), 0};
  }
  if (!control_socket_.ReceiveBytes(incoming_->payload.get(), incoming_->frame.nbytes, incoming_->have)) return false;
  if ((incoming_->frame.flags & kFrameChecked) != 0) {
    if (Crc32c(0, incoming_->payload.get(), incoming_->frame.nbytes) == incoming_->frame.body) {
      NoteRight(incoming_->frame);
      control_socket_.NoteRight();
    } else if (!Has(incoming_->frame)) {  // else as in Rail::Receive
      incoming_->have = 0;
      control_socket_.AskAgain(incoming_->frame.nbytes,
                               "bytes of a message of " + std::to_string(incoming_->frame.total));
      return false;
    }
  }
  inbox_.Arrived(incoming_->frame, std::move(incoming_->payload));
  incoming_.reset();
  in_frame_ = false;
  ++news_;
  return true;
}

void VerbsLink::SendTaken() {
  if (leaving_) return;
  confirmed_ = inbox_.due();
  control_socket_.Send(Word{kTakenWord, 0, confirmed_});
}

void VerbsLink::GrantRest() {
  granted_ = inbox_.due();
  for (const auto& rail : rails_) rail->Grant();
}

void VerbsLink::GoOverTcp() {
  tcp_ = MakeTcp(control_socket_.Release(), shared_.tcp);
  state_ = State::kTcp;
  ++news_;
}

void VerbsLink::KillRails(std::uint32_t mask, const std::string& why) {
  for (const auto& rail : rails_) {
    if ((mask & 1u << rail->number()) != 0) rail->Kill(rail->Name() + ": " + why);
  }
}

std::uint32_t VerbsLink::Alive() const {
  std::uint32_t mask = 0;
  for (const auto& rail : rails_) mask |= rail->alive() ? 1u << rail->number() : 0;
  return mask;
}

void VerbsLink::Tell(const std::string& event) {
  shared_.events.push_back("rank " + std::to_string(options_.rank) + ", link to rank " + std::to_string(options_.peer) +
                           ", channel " + std::to_string(options_.channel) + ": " + event);
  shared_.has_events.store(true, std::memory_order_relaxed);
}

void VerbsLink::PeerGone() const {
  throw Fault(FaultKind::kPeerGone, options_.peer, "verbs: " + control_socket_.why());
}

// ---- Sleeping, and the end ----

// While it is up, what the control socket brings is the keeper's business; it wakes the others.
void VerbsLink::AddWatch(std::vector<pollfd>& fds) const {
  if (!fault_ && state_ != State::kTcp) control_socket_.AddPoll(fds);
}

void VerbsLink::Count(Holdings& held) const {
  control_socket_.Count(held);
  if (tcp_.send != nullptr) tcp_.send->Count(held);
  held.pinned_bytes += rails_.size() * 2 * options_.ring_bytes;  // what comes, and what goes
}

void VerbsLink::AddPoll(std::vector<pollfd>& fds) {
  const std::uint64_t news = news_;
  bool awake = false;
  const auto watch = [&](Rail* rail) {
    if (rail == nullptr || !rail->alive()) return;
    awake |= rail->nic().Drain();  // perhaps another link's news, which it has not been told of then
    rail->Arm();
    fds.push_back(rail->nic().Poll());
  };
  try {
    if (state_ == State::kProbe || state_ == State::kUp) {
      for (const auto& rail : rails_) watch(rail.get());
      for (const Recovery& r : recoveries_) watch(r.made.rail.get());
    }
    Drive();  // what came before the queues were armed announces itself to nobody
  } catch (const Fault&) {
    awake = true;  // it is thrown again where it can be caught
  }
  if (awake || landing_ || outbox_.copying() || (bounce_ != nullptr && bounce_->busy()) || news != news_)
    fds.push_back(shared_.ready.Poll());
  if (state_ != State::kUp || Alive() == 0) AddWatch(fds);
}

bool VerbsLink::Drained() {
  if (fault_ || control_socket_.ended() || state_ < State::kUp) return true;
  Drive();
  if (state_ == State::kTcp) return true;
  if (state_ != State::kUp || outbox_.resending()) return false;
  bool drained = !outbox_.waits_for_tcp() || control_socket_.Delivered();
  for (const auto& rail : rails_) drained &= !rail->alive() || rail->Drained();
  return drained;
}

bool VerbsLink::Settled() const {
  if (fault_ || control_socket_.ended() || state_ == State::kTcp) return true;
  if (state_ != State::kUp || outbox_.resending()) return false;
  bool settled = true;
  for (const auto& rail : rails_) settled &= !rail->alive() || rail->confirmed();
  return settled;
}

void VerbsLink::Shutdown() {
  leaving_ = true;
  if (tcp_.send != nullptr) {
    tcp_.send->Finish();
  } else {
    control_socket_.Shutdown();
  }
}

void VerbsLink::Abandon() const {
  if (tcp_.send != nullptr) {
    tcp_.send->Abandon();
  } else {
    control_socket_.Close();
  }
}

}  // namespace hetcoll
