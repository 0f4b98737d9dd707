// What fake RDMA devices do.
#include <arpa/inet.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "base/clock.h"
#include "fake_objects.h"

namespace hetcoll::testing {
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

}  // namespace

// A device does not ask who else looks at the memory: what is written for the second time may be in use, and has the
// same bytes then.
void FakeNic::Land() {
  for (const auto& [at, bytes] : landing) CopyUnseen(at, bytes.data(), bytes.size());
  landing.clear();
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
  std::byte* at = nullptr;
  if (total > 0) {
    const auto key = mrs_.find(op.rkey);
    const FakeMr* mr = key == mrs_.end() ? nullptr : key->second;
    const int wanted = op.read ? ibv::kAccessRemoteRead : ibv::kAccessRemoteWrite;
    const bool may = mr != nullptr && mr->pd == to.pd && (mr->access & wanted) != 0 && (to.access & wanted) != 0;
    if (may) at = mr->At(op.remote_addr, total);
    if (at == nullptr) {
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
  qp.nic->stalled |= qp.nic->bytes >= qp.nic->stalled_from;
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
      for (FakeQp* qp : ready) {
        if (!qp->nic->stalled) Deliver(*qp);
      }
      continue;
    }
    FakeQp& qp = *ready[random_() % ready.size()];
    for (std::uint32_t i = random_() % 8; !qp.sending.empty() && !qp.nic->stalled; --i) {
      Deliver(qp);
      if (i == 0) break;
    }
  }
}

}  // namespace hetcoll::testing
