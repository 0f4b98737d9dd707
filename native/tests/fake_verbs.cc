#include "fake_verbs.h"

#include <arpa/inet.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "base/clock.h"
#include "fake_objects.h"

namespace hetcoll::testing {

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
    mr->iova = reinterpret_cast<std::uintptr_t>(addr);
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
      total += sge.length;
      if ((wr.send_flags & ibv::kSendInline) != 0) {
        const auto* at = reinterpret_cast<const std::byte*>(sge.addr);
        op.inlined.insert(op.inlined.end(), at, at + sge.length);
        continue;
      }
      const auto found = f.mrs_.find(sge.lkey);
      const FakeMr* mr = found == f.mrs_.end() ? nullptr : found->second;
      const std::byte* at = mr == nullptr || mr->pd != qp.pd ? nullptr : mr->At(sge.addr, sge.length);
      if (at == nullptr) {
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

ibv::Mr* Fabric::RegDmaBuf(ibv::Pd* pd, std::byte* memory, std::size_t n) {
  ibv::Mr* mr = Api().reg_mr(pd, memory, n, ibv::kAccessLocalWrite | ibv::kAccessRemoteWrite | ibv::kAccessRemoteRead);
  const std::lock_guard lock(mutex_);
  static_cast<FakeMr*>(mr)->iova = 0;
  device_memory_[memory] = memory + n;
  return mr;
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

}  // namespace hetcoll::testing
