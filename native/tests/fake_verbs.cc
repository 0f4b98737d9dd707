#include "fake_verbs.h"

#include <arpa/inet.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/clock.h"

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

namespace {

// Copies, hidden from TSan: by words, and not by a call of memcpy, which it would see.
__attribute__((no_sanitize("thread"))) void CopyUnseen(std::byte* into, const std::byte* from, std::size_t n) {
  std::uint64_t word;
  for (; n >= sizeof word; into += sizeof word, from += sizeof word, n -= sizeof word) {
    std::memcpy(&word, from, sizeof word);  // of a length that is known: a load and a store
    std::memcpy(into, &word, sizeof word);
    asm volatile("" ::: "memory");
  }
  for (; n > 0; --n) {
    *into++ = *from++;
    asm volatile("" ::: "memory");
  }
}

FakeNic& Of(ibv::Context* context) { return *static_cast<FakeNic*>(context); }
FakeCq& Of(ibv::Cq* cq) { return *static_cast<FakeCq*>(cq); }
FakeQp& Of(ibv::Qp* qp) { return *static_cast<FakeQp*>(qp); }
FakeChannel& Of(ibv::CompChannel* channel) { return *static_cast<FakeChannel*>(channel); }

}  // namespace

struct FakeCalls {
  static ibv::CompChannel* CreateCompChannel(ibv::Context* context) {
    Fabric& f = *Of(context).fabric;
    const std::lock_guard lock(f.mutex_);
    ++f.channels_;
    auto* channel = new FakeChannel;
    channel->context = context;
    channel->fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
    return channel;
  }

  static int DestroyCompChannel(ibv::CompChannel* channel) {
    Fabric& f = *Of(channel->context).fabric;
    const std::lock_guard lock(f.mutex_);
    --f.channels_;
    for (const FakeCq* cq : f.cqs_) {
      if (cq->channel == channel) f.Complain("a channel was destroyed before its completion queue");
    }
    close(channel->fd);
    delete &Of(channel);
    return 0;
  }

  static ibv::Cq* CreateCq(ibv::Context* context, int entries, void* cq_context, ibv::CompChannel* channel, int) {
    Fabric& f = *Of(context).fabric;
    const std::lock_guard lock(f.mutex_);
    auto* cq = new FakeCq;
    cq->context = context;
    cq->channel = channel;
    cq->cq_context = cq_context;
    cq->capacity = static_cast<std::size_t>(entries);
    f.cqs_.insert(cq);
    return cq;
  }

  static int DestroyCq(ibv::Cq* base) {
    Fabric& f = *Of(base->context).fabric;
    const std::lock_guard lock(f.mutex_);
    FakeCq& cq = Of(base);
    if (cq.users > 0) {
      f.Complain("a completion queue was destroyed before its queue pair");
      return EBUSY;
    }
    if (cq.unacknowledged > 0) f.Complain("a completion queue was destroyed with events not acknowledged: that hangs");
    if (cq.channel != nullptr) {
      std::erase(Of(cq.channel).events, &cq);
    }
    f.cqs_.erase(&cq);
    delete &cq;
    return 0;
  }

  static int GetCqEvent(ibv::CompChannel* channel, ibv::Cq** cq, void** cq_context) {
    Fabric& f = *Of(channel->context).fabric;
    eventfd_t count = 0;
    if (eventfd_read(channel->fd, &count) != 0) return -1;
    const std::lock_guard lock(f.mutex_);
    std::deque<FakeCq*>& events = Of(channel).events;
    if (events.empty()) return -1;  // of a queue that is gone
    FakeCq* found = events.front();
    events.pop_front();
    ++found->unacknowledged;
    *cq = found;
    *cq_context = found->cq_context;
    return 0;
  }

  static void AckCqEvents(ibv::Cq* cq, unsigned events) {
    Fabric& f = *Of(cq->context).fabric;
    const std::lock_guard lock(f.mutex_);
    Of(cq).unacknowledged -= static_cast<int>(events);
  }

  static ibv::Qp* CreateQp(ibv::Pd* pd, ibv::QpInitAttr* init) {
    Fabric& f = *Of(pd->context).fabric;
    const std::lock_guard lock(f.mutex_);
    FakeNic& nic = Of(pd->context);
    if (nic.queue_pairs_left-- <= 0) {
      errno = ENOMEM;
      return nullptr;
    }
    if (init->cap.max_inline_data > f.options_.max_inline) {
      errno = EINVAL;
      return nullptr;
    }
    auto* qp = new FakeQp;
    qp->context = pd->context;
    qp->pd = pd;
    qp->send_cq = init->send_cq;
    qp->recv_cq = init->recv_cq;
    qp->qp_num = f.next_qpn_++;
    qp->nic = &nic;
    qp->cap = init->cap;
    if (init->qp_type != ibv::kQpTypeRc) f.Complain("not a reliable connection");
    ++Of(init->send_cq).users;
    ++Of(init->recv_cq).users;
    f.qps_[qp->qp_num] = qp;
    return qp;
  }

  static int ModifyQp(ibv::Qp* base, ibv::QpAttr* attr, int mask) {
    using S = ibv::QpState;
    Fabric& f = *Of(base->context).fabric;
    const std::lock_guard lock(f.mutex_);
    FakeQp& qp = Of(base);
    const int init = ibv::kQpState | ibv::kQpPkeyIndex | ibv::kQpPort | ibv::kQpAccessFlags;
    const int rtr = ibv::kQpState | ibv::kQpAv | ibv::kQpPathMtu | ibv::kQpDestQpn | ibv::kQpRqPsn |
                    ibv::kQpMaxDestRdAtomic | ibv::kQpMinRnrTimer;
    const int rts =
        ibv::kQpState | ibv::kQpTimeout | ibv::kQpRetryCnt | ibv::kQpRnrRetry | ibv::kQpSqPsn | ibv::kQpMaxQpRdAtomic;
    if (attr->qp_state == S::kErr) {
      f.Break(qp);
      return 0;
    }
    if (attr->qp_state == S::kInit && qp.state == S::kReset && mask == init) {
      if ((attr->qp_access_flags & (ibv::kAccessRemoteWrite | ibv::kAccessRemoteRead)) == 0) {
        f.Complain("the peer may neither write nor read");
      }
      qp.access = attr->qp_access_flags;
    } else if (attr->qp_state == S::kRtr && qp.state == S::kInit && mask == rtr) {
      if (qp.nic->down) return ENETUNREACH;
      qp.rtr = *attr;
    } else if (attr->qp_state == S::kRts && qp.state == S::kRtr && mask == rts) {
      qp.rts = *attr;
    } else {
      return EINVAL;
    }
    qp.state = attr->qp_state;
    return 0;
  }

  static int DestroyQp(ibv::Qp* base) {
    Fabric& f = *Of(base->context).fabric;
    const std::lock_guard lock(f.mutex_);
    FakeQp& qp = Of(base);
    for (FakeCq* cq : {&Of(qp.send_cq), &Of(qp.recv_cq)}) {
      --cq->users;
      std::erase_if(cq->entries, [&](const auto& entry) { return entry.second == &qp; });
    }
    f.qps_.erase(qp.qp_num);
    delete &qp;
    return 0;
  }

  static ibv::Mr* RegMr(ibv::Pd* pd, void* addr, std::size_t length, int access) {
    Fabric& f = *Of(pd->context).fabric;
    const std::lock_guard lock(f.mutex_);
    if (Of(pd->context).registrations_left-- <= 0) {
      errno = ENOMEM;
      return nullptr;
    }
    auto* mr = new FakeMr;
    mr->context = pd->context;
    mr->pd = pd;
    mr->addr = addr;
    mr->length = length;
    mr->lkey = mr->rkey = f.next_key_++;
    mr->access = access;
    f.mrs_[mr->lkey] = mr;
    return mr;
  }

  static int DeregMr(ibv::Mr* mr) {
    Fabric& f = *Of(mr->context).fabric;
    const std::lock_guard lock(f.mutex_);
    f.mrs_.erase(mr->lkey);
    delete static_cast<FakeMr*>(mr);
    return 0;
  }

  static int PollCq(ibv::Cq* base, int entries, ibv::Wc* wc) {
    Fabric& f = *Of(base->context).fabric;
    const std::lock_guard lock(f.mutex_);
    FakeCq& cq = Of(base);
    int n = 0;
    for (; n < entries && !cq.entries.empty(); ++n) {
      wc[n] = cq.entries.front().first;
      FakeQp& qp = *cq.entries.front().second;
      if (qp.send_cq == base) {  // it and all before it have left the send queue
        while (!qp.unfinished.empty()) {
          const bool last = qp.unfinished.front() == wc[n].wr_id;
          qp.unfinished.pop_front();
          if (last) break;
        }
      }
      cq.entries.pop_front();
    }
    return n;
  }

  static int ReqNotifyCq(ibv::Cq* base, int) {
    Fabric& f = *Of(base->context).fabric;
    const std::lock_guard lock(f.mutex_);
    Of(base).armed = true;
    return 0;
  }

  static int PostSend(ibv::Qp* base, ibv::SendWr* wr, ibv::SendWr** bad) {
    Fabric& f = *Of(base->context).fabric;
    const std::lock_guard lock(f.mutex_);
    FakeQp& qp = Of(base);
    *bad = wr;
    if (qp.nic->refuse_after >= 0 && qp.nic->refuse_after-- == 0) return ENOMEM;
    for (; wr != nullptr; wr = wr->next) {
      *bad = wr;
      if (const int error = PostOne(f, qp, *wr); error != 0) return error;
    }
    if (!f.options_.threaded) f.DeliverAll(qp);
    return 0;
  }

  static int PostOne(Fabric& f, FakeQp& qp, const ibv::SendWr& wr) {
    const bool immediate = wr.opcode == ibv::kWrRdmaWriteWithImm;
    const bool read = wr.opcode == ibv::kWrRdmaRead;
    if ((!immediate && !read && wr.opcode != ibv::kWrRdmaWrite) || qp.state < ibv::QpState::kRts) return EINVAL;
    if (qp.state == ibv::QpState::kErr) {
      f.Push(qp, Of(qp.send_cq), wr.wr_id, ibv::WcStatus::kWrFlushErr);
      return 0;
    }
    if (qp.unfinished.size() >= qp.cap.max_send_wr) {
      f.Complain("the send queue is full");
      return ENOMEM;
    }
    Fabric::Op op{};
    op.wr_id = wr.wr_id;
    op.signalled = (wr.send_flags & ibv::kSendSignaled) != 0;
    op.immediate = immediate;
    op.read = read;
    op.imm = wr.imm_data;
    op.remote_addr = wr.remote_addr;
    op.rkey = wr.rkey;
    std::size_t total = 0;
    for (int i = 0; i < wr.num_sge; ++i) {
      const ibv::Sge& sge = wr.sg_list[i];
      const auto* at = reinterpret_cast<const std::byte*>(sge.addr);
      total += sge.length;
      if ((wr.send_flags & ibv::kSendInline) != 0) {
        op.inlined.insert(op.inlined.end(), at, at + sge.length);
        continue;
      }
      const auto found = f.mrs_.find(sge.lkey);
      const FakeMr* mr = found == f.mrs_.end() ? nullptr : found->second;
      if (mr == nullptr || mr->pd != qp.pd || at < mr->addr ||
          at + sge.length > static_cast<const std::byte*>(mr->addr) + mr->length) {
        f.Complain("a local key does not cover what is sent");
        return EINVAL;
      }
      op.parts.emplace_back(at, sge.length);
    }
    if (op.inlined.size() > qp.cap.max_inline_data) return EINVAL;
    qp.unfinished.push_back(wr.wr_id);
    const std::int64_t now = NowNs();
    if (f.options_.threaded) {
      qp.nic->busy_until_ns = std::max(qp.nic->busy_until_ns, now) +
                              static_cast<std::int64_t>(qp.nic->ns_per_byte * static_cast<double>(total));
      op.ready_ns = qp.nic->busy_until_ns;
    }
    qp.sending.push_back(std::move(op));
    return 0;
  }

  static int PostRecv(ibv::Qp* base, ibv::RecvWr* wr, ibv::RecvWr** bad) {
    Fabric& f = *Of(base->context).fabric;
    const std::lock_guard lock(f.mutex_);
    FakeQp& qp = Of(base);
    for (; wr != nullptr; wr = wr->next) {
      *bad = wr;
      if (qp.receives == qp.cap.max_recv_wr) {
        f.Complain("the receive queue is full");
        return ENOMEM;
      }
      if (qp.state == ibv::QpState::kErr) {
        f.Push(qp, Of(qp.recv_cq), 0, ibv::WcStatus::kWrFlushErr);
      } else {
        ++qp.receives;
      }
    }
    return 0;
  }
};

Fabric::Fabric(const FabricOptions& options) : options_(options), random_(options.seed) {
  if (options.threaded) thread_ = std::thread([this] { Loop(); });
}

Fabric::~Fabric() {
  stop_ = true;
  if (thread_.joinable()) thread_.join();
  if (!qps_.empty()) Complain(std::to_string(qps_.size()) + " queue pairs are left");
  for (const auto& [key, mr] : mrs_) {
    Complain(std::to_string(mr->length) + " bytes of device " + std::to_string(Of(mr->context).number) +
             " are left registered");
  }
  if (!cqs_.empty()) Complain(std::to_string(cqs_.size()) + " completion queues are left");
  if (channels_ != 0) Complain(std::to_string(channels_) + " channels are left");
  for (const std::string& complaint : complaints_) std::fprintf(stderr, "fake verbs: %s\n", complaint.c_str());
  if (!complaints_.empty()) std::abort();
}

const VerbsApi& Fabric::Api() {
  static const VerbsApi api{FakeCalls::CreateCompChannel,
                            FakeCalls::DestroyCompChannel,
                            FakeCalls::CreateCq,
                            FakeCalls::DestroyCq,
                            FakeCalls::GetCqEvent,
                            FakeCalls::AckCqEvents,
                            FakeCalls::CreateQp,
                            FakeCalls::ModifyQp,
                            FakeCalls::DestroyQp,
                            FakeCalls::RegMr,
                            FakeCalls::DeregMr};
  return api;
}

NicInfo Fabric::AddNic(const std::string& name) {
  const std::lock_guard lock(mutex_);
  auto nic = std::make_unique<FakeNic>();
  nic->fabric = this;
  nic->number = static_cast<int>(nics_.size());
  nic->ops.poll_cq = FakeCalls::PollCq;
  nic->ops.req_notify_cq = FakeCalls::ReqNotifyCq;
  nic->ops.post_send = FakeCalls::PostSend;
  nic->ops.post_recv = FakeCalls::PostRecv;
  nic->pd.context = nic.get();
  NicInfo info;
  info.device = name;
  info.pd = &nic->pd;
  info.gid[15] = static_cast<std::uint8_t>(nic->number + 1);
  if (nics_.size() < options_.mtus.size()) info.mtu = options_.mtus[nics_.size()];
  nics_.push_back(std::move(nic));
  return info;
}

// A device does not ask who else looks at the memory: what is written for the second time may be in use, and has the
// same bytes then.
void FakeNic::Land() {
  for (const auto& [at, bytes] : landing) CopyUnseen(at, bytes.data(), bytes.size());
  landing.clear();
}

void Fabric::HoldBack(std::byte* at, std::size_t n) {
  const std::lock_guard lock(mutex_);
  device_memory_[at] = at + n;
}

std::string Fabric::complaints() {
  const std::lock_guard lock(mutex_);
  std::string all;
  for (const std::string& complaint : complaints_) all += complaint + "; ";
  complaints_.clear();
  return all;
}

void Fabric::Complain(const std::string& what) { complaints_.push_back(what); }

void Fabric::Push(FakeQp& qp, FakeCq& cq, std::uint64_t wr_id, ibv::WcStatus status, const ibv::Wc& rest) {
  if (cq.entries.size() == cq.capacity) return Complain("a completion queue is full");
  ibv::Wc wc = rest;
  wc.wr_id = wr_id;
  wc.status = status;
  wc.qp_num = qp.qp_num;
  cq.entries.emplace_back(wc, &qp);
  if (!cq.armed || cq.channel == nullptr) return;
  cq.armed = false;
  Of(cq.channel).events.push_back(&cq);
  static_cast<void>(eventfd_write(cq.channel->fd, 1));
}

void Fabric::Break(FakeQp& qp) {
  if (qp.state == ibv::QpState::kErr) return;
  qp.state = ibv::QpState::kErr;
  // What it wrote, and what was written through it, is there long before anybody has noticed.
  qp.nic->Land();
  if (const auto peer = qps_.find(qp.rtr.dest_qp_num); peer != qps_.end()) peer->second->nic->Land();
  for (const Op& op : qp.sending) {
    Push(qp, Of(qp.send_cq), op.wr_id, ibv::WcStatus::kWrFlushErr);
  }
  qp.sending.clear();
  for (; qp.receives > 0; --qp.receives) {
    Push(qp, Of(qp.recv_cq), 0, ibv::WcStatus::kWrFlushErr);
  }
}

ibv::WcStatus Fabric::Write(FakeQp& qp, const Op& op) {
  const auto found = qps_.find(qp.rtr.dest_qp_num);
  if (found == qps_.end()) return ibv::WcStatus::kRetryExcErr;
  FakeQp& to = *found->second;
  const auto gid = static_cast<std::uint8_t>(to.nic->number + 1);
  const bool answers = to.state == ibv::QpState::kRtr || to.state == ibv::QpState::kRts;
  if (!answers || qp.nic->down || to.nic->down || qp.rtr.ah_attr.grh.dgid[15] != gid) {
    return ibv::WcStatus::kRetryExcErr;
  }
  if (to.rtr.dest_qp_num != qp.qp_num || to.rtr.rq_psn != qp.rts.sq_psn || to.rtr.path_mtu != qp.rtr.path_mtu) {
    return ibv::WcStatus::kRetryExcErr;
  }
  std::size_t total = op.inlined.size();
  for (const auto& part : op.parts) total += part.second;
  const std::size_t packet = std::min(total, std::size_t{128} << qp.rtr.path_mtu);
  if (packet > qp.nic->largest_packet) return ibv::WcStatus::kRetryExcErr;
  auto* at = reinterpret_cast<std::byte*>(op.remote_addr);
  if (total > 0) {
    const auto key = mrs_.find(op.rkey);
    const FakeMr* mr = key == mrs_.end() ? nullptr : key->second;
    const int wanted = op.read ? ibv::kAccessRemoteRead : ibv::kAccessRemoteWrite;
    if (mr == nullptr || mr->pd != to.pd || (mr->access & wanted) == 0 || (to.access & wanted) == 0 || at < mr->addr ||
        at + total > static_cast<std::byte*>(mr->addr) + mr->length) {
      Break(to);
      return ibv::WcStatus::kRemAccessErr;
    }
  }
  if (op.immediate && to.receives == 0) {
    Complain("no receive was posted");
    return static_cast<ibv::WcStatus>(13);  // IBV_WC_RNR_RETRY_EXC_ERR
  }
  if (op.read && to.nic->no_reads) {
    Break(to);
    return ibv::WcStatus::kRemAccessErr;
  }
  if (op.read) {
    to.nic->Land();  // what is read is not looked at, and may be changing
    return ibv::WcStatus::kSuccess;
  }
  std::vector<std::byte> bytes(op.inlined);
  for (const auto& [from, n] : op.parts) {
    if (options_.resends) {
      // Frames of a dead rail are sent again, from where they lie; where the first ones had come, the memory may be in
      // use again meanwhile, and the receiver drops the second ones unread.
      bytes.resize(bytes.size() + n);
      CopyUnseen(bytes.data() + bytes.size() - n, from, n);
    } else {
      bytes.insert(bytes.end(), from, from + n);
    }
  }
  if (op.immediate && total > 0 && qp.nic->corrupt_after >= 0 && qp.nic->corrupt_after-- == 0) {
    bytes[total - 1 - std::min(total - 1, qp.nic->corrupt_byte)] ^= std::byte{1};
  }
  std::uint32_t imm = ntohl(op.imm);
  if (op.immediate && qp.nic->change) qp.nic->change(bytes, imm);
  if (qp.nic->corrupt && total > sizeof(std::uint64_t) * 8) bytes[total - 1] ^= std::byte{1};
  const auto device = device_memory_.upper_bound(at);
  if (device != device_memory_.begin() && at < std::prev(device)->second) {
    to.nic->landing.emplace_back(at, std::move(bytes));
  } else {
    std::copy(bytes.begin(), bytes.end(), at);
  }
  qp.nic->bytes += total;
  qp.nic->down |= qp.nic->bytes >= qp.nic->down_from;
  if (!op.immediate) return ibv::WcStatus::kSuccess;
  --to.receives;
  ibv::Wc wc{};
  wc.opcode = ibv::kWcRecvRdmaWithImm;
  wc.byte_len = static_cast<std::uint32_t>(total);
  wc.imm_data = htonl(imm);
  wc.wc_flags = ibv::kWcWithImm;
  Push(to, Of(to.recv_cq), 0, ibv::WcStatus::kSuccess, wc);
  return ibv::WcStatus::kSuccess;
}

void Fabric::Deliver(FakeQp& qp) {
  const Op op = std::move(qp.sending.front());
  qp.sending.pop_front();
  FakeNic& nic = *qp.nic;
  ibv::WcStatus status = ibv::WcStatus::kSuccess;
  const bool fails = nic.fail_after >= 0 && nic.fail_after-- == 0;
  const bool skips = nic.skip_after >= 0 && nic.skip_after-- == 0;
  if ((!fails || nic.fail_delivered) && !skips) status = Write(qp, op);
  if (fails && status == ibv::WcStatus::kSuccess) status = nic.fail_status;
  if (status != ibv::WcStatus::kSuccess || op.signalled) {
    Push(qp, Of(qp.send_cq), op.wr_id, status);
  }
  if (status != ibv::WcStatus::kSuccess) Break(qp);
}

void Fabric::DeliverAll(FakeQp& qp) {
  while (!qp.sending.empty() && !qp.nic->stalled) Deliver(qp);
}

void Fabric::Loop() {
  while (!stop_) {
    std::unique_lock lock(mutex_);
    const std::int64_t now = NowNs();
    std::vector<FakeQp*> ready;
    for (const auto& [number, qp] : qps_) {
      if (!qp->sending.empty() && !qp->nic->stalled && qp->sending.front().ready_ns <= now) ready.push_back(qp);
    }
    if (ready.empty()) {
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(20));
      continue;
    }
    if (!options_.overtake) {
      for (FakeQp* qp : ready) Deliver(*qp);
      continue;
    }
    FakeQp& qp = *ready[random_() % ready.size()];
    for (std::uint32_t i = random_() % 8; !qp.sending.empty(); --i) {
      Deliver(qp);
      if (i == 0) break;
    }
  }
}

}  // namespace hetcoll::testing
