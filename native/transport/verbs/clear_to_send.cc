// Straight to the destination: see link.h.

#include <algorithm>
#include <cstring>

#include "kernels/kernels.h"
#include "transport/verbs/link.h"
#include "transport/verbs/read_back.h"

namespace hetcoll {

// Only where all of the rest may be written now. Whether the peer takes it up is its affair, and it may come too late;
// but not where the memory is a GPU's: there the peer waits for it.
void VerbsLink::Invite(const Message& m, std::size_t at, std::byte* dst, std::size_t n) {
  if (!options_.device() && !open()) return;  // who waits until it is comes here again
  expected_ = m.signature;
  if (!options_.device() && (at + n != m.total || n < kInviteBytes)) return;
  Region* region = shared_.regions.Find(dst, n, outbox_.nics());
  if (region == nullptr && options_.device()) {
    throw Fault(FaultKind::kSystem, options_.rank, "verbs: a GPU's memory is not registered");
  }
  if (region == nullptr) return;
  if (invited_.size() == kClearToSends) {
    throw Fault(FaultKind::kSystem, options_.rank,
                "verbs: more than " + std::to_string(kClearToSends) + " messages were announced");
  }
  ClearToSend clear_to_send{m.signature,       m.total, reinterpret_cast<std::uintptr_t>(region->Seen(dst - at)),
                            clear_to_sends_++, 0,       {}};
  for (const auto& rail : rails_) {
    clear_to_send.rkeys[rail->number()] = region->rkey[static_cast<std::size_t>(rail->nic().index())];
  }
  invited_.push_back({clear_to_send, region, dst - at});
  ++unposted_;
  ++region->uses;
  if (invited_.size() == 1) inbox_.Direct(m.signature, dst - at);
  PostClearToSends();
}

void VerbsLink::Uninvite() {
  --invited_.front().region->uses;
  invited_.pop_front();
  unposted_ = std::min(unposted_, invited_.size());
  if (invited_.empty()) {
    inbox_.Direct(0, nullptr);
  } else {
    inbox_.Direct(invited_.front().what.signature, invited_.front().base);
  }
}

// There may be no room for them: then later.
void VerbsLink::PostClearToSends() {
  if (state_ != State::kUp) return;
  while (unposted_ > 0 && PostClearToSend(invited_[invited_.size() - unposted_].what)) --unposted_;
}

bool VerbsLink::PostClearToSend(ClearToSend& clear_to_send) {
  for (const auto& rail : rails_) {
    Frame* frame = rail->alive() ? rail->Slot(sizeof(ClearToSend)) : nullptr;
    if (frame == nullptr) continue;
    *frame = {0, 0, kNoSeq, sizeof(ClearToSend), kFrameInvite};
    clear_to_send.taken = inbox_.due();
    std::memcpy(static_cast<void*>(frame + 1), &clear_to_send, sizeof clear_to_send);
    if (checks()) {
      frame->flags |= kFrameChecked;
      frame->body = Crc32c(0, frame + 1, sizeof clear_to_send);
    }
    rail->Post(frame, reinterpret_cast<std::byte*>(frame + 1), rail->staging_lkey());
    return rail->alive();
  }
  return false;
}

Placement VerbsLink::Expose(std::byte* base, std::size_t n) {
  if (!open() || Alive() == 0 || options_.device() || shared_.tcp->integrity == Integrity::kAll) return {};
  Region* region = shared_.regions.Find(base, n, outbox_.nics());
  if (region == nullptr) return {};
  Placement where{1, reinterpret_cast<std::uintptr_t>(region->Seen(base)), {}};
  for (const auto& rail : rails_) {
    where.rkeys[rail->number()] = region->rkey[static_cast<std::size_t>(rail->nic().index())];
  }
  ++region->uses;
  exposed_devices_ += !region->on_host;
  exposed_.push_back(region);
  return where;
}

// At once: a key cannot be taken back from one peer alone, but queue pairs can be ended. What the peer still sends
// comes over TCP.
void VerbsLink::Hide(bool at_once) {
  revoked_ = at_once && !exposed_.empty();
  if (revoked_) KillRails(~0u, "the memory that the peer writes is taken back");
  for (std::size_t n = at_once ? exposed_.size() : std::min<std::size_t>(1, exposed_.size()); n > 0; --n) {
    --exposed_.front()->uses;
    exposed_devices_ -= !exposed_.front()->on_host;
    exposed_.pop_front();
  }
}

void VerbsLink::Recall() {
  if (outbox_.Lent() == 0) return;
  KillRails(~0u, "the memory that is sent from is taken back");
  PollRails();
  outbox_.Keep();
}

std::ptrdiff_t VerbsLink::Place(std::byte* dst, const View& bytes, bool stream) {
  if (bytes.data == dst) return bytes.n;  // a NIC wrote it there
  auto n = static_cast<std::size_t>(bytes.n);
  copied_bytes_ += n;
  if (bounce_ != nullptr) return bounce_->In(dst, bytes.data, n) ? static_cast<std::ptrdiff_t>(n) : kWouldBlock;
  CopyBytes(dst, bytes.data, n, stream ? Sweep::kAround : Sweep::kPlain);
  return bytes.n;
}

// Memory of the GPU that frames are on their way to, if there is any.
const Region* VerbsLink::Lands() const {
  if (!invited_.empty() && options_.device()) return invited_.front().region;
  const auto found = std::find_if(exposed_.begin(), exposed_.end(), [](const Region* r) { return !r->on_host; });
  return found == exposed_.end() ? nullptr : *found;
}

bool VerbsLink::Landed() {
  if (inbox_.ready() && inbox_.landed()) return true;
  landing_ = false;
  const Region* region = Lands();
  if (region == nullptr) return false;
  for (const auto& rail : rails_) {
    Nic& nic = rail->nic();
    ReadBack& read_back = nic.read_back();
    read_back.Poll();
    if (!read_back.error().empty()) {
      for (const auto& other : rails_) {
        if (&other->nic() == &nic) other->Kill(read_back.error());
      }
      inbox_.Forget(nic);
      continue;
    }
    if (inbox_.Land(nic, read_back.done(), read_back.begun())) {
      read_back.Begin(region->seen_at, region->rkey[static_cast<std::size_t>(nic.index())]);
    }
    landing_ |= read_back.begun() != read_back.done();
  }
  return inbox_.ready() && inbox_.landed();
}

}  // namespace hetcoll
