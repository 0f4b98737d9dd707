// How a rail comes to be, and how it ends: see rail.h.

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <utility>

#include "transport/verbs/bring_up.h"
#include "transport/verbs/rail.h"

namespace hetcoll {

Rail::Rail(Nic& nic, const RailMemory& memory, int number, int peer, std::string peer_device, bool checks)
    : nic_(nic),
      memory_(memory),
      number_(number),
      peer_(peer),
      peer_device_(std::move(peer_device)),
      checks_(checks),
      psn_(std::random_device{}() & 0xffffff),
      bytes_per_ns_(nic.info().gbps / 8) {
  try {
    Make();
  } catch (const Fault& fault) {
    error_ = fault.what();
  }
}

void Rail::Make() {
  const VerbsApi& api = nic_.api();
  ibv::Pd* pd = nic_.info().pd;
  ring_mr_ = {api.reg_mr(pd, memory_.ring, memory_.ring_bytes, ibv::kAccessLocalWrite | ibv::kAccessRemoteWrite),
              {api.dereg_mr}};
  if (ring_mr_ == nullptr) nic_.Fail("registering " + std::to_string(memory_.ring_bytes) + " bytes", errno);
  staging_mr_ = {api.reg_mr(pd, memory_.staging, memory_.ring_bytes, ibv::kAccessLocalWrite), {api.dereg_mr}};
  if (staging_mr_ == nullptr) nic_.Fail("registering " + std::to_string(memory_.ring_bytes) + " bytes", errno);
  MakeQueues();
  Check(InitPair(nic_, qp_.get(), ibv::kAccessRemoteWrite));
  for (std::uint32_t i = 0; i + 1 < kRepost; ++i) recv_wrs_[i].next = &recv_wrs_[i + 1];
  for (std::uint32_t i = 0; i < kRecvDepth; i += kRepost) PostRecvs();
}

Rail::~Rail() { GiveBack(); }

void Rail::GiveBack() {
  if (qp_ != nullptr) {
    qp_.reset();  // before its queues
    nic_.Drain();
  }
  send_cq_.reset();
  recv_cq_.reset();
  ring_mr_.reset();
  staging_mr_.reset();
}

void Rail::MakeQueues() {
  const VerbsApi& api = nic_.api();
  send_cq_ = {api.create_cq(&nic_.context(), kSendDepth, nullptr, nullptr, 0), {api.destroy_cq}};
  if (send_cq_ == nullptr) nic_.Fail("no completion queue", errno);
  recv_cq_ = {api.create_cq(&nic_.context(), kRecvDepth, &armed_, nic_.channel(), 0), {api.destroy_cq}};
  if (recv_cq_ == nullptr) nic_.Fail("no completion queue", errno);
  for (const std::uint32_t inlined : {224u, 96u, 0u}) {  // as much as the device allows
    ibv::QpInitAttr init{};
    init.send_cq = send_cq_.get();
    init.recv_cq = recv_cq_.get();
    init.cap = {kSendDepth, kRecvDepth, 2, 1, inlined};
    init.qp_type = ibv::kQpTypeRc;
    qp_ = {api.create_qp(nic_.info().pd, &init), {api.destroy_qp}};
    inline_bytes_ = init.cap.max_inline_data;
    if (qp_ != nullptr) return;
  }
  nic_.Fail("no queue pair", errno);
}

RailAddress Rail::address() const {
  const NicInfo& nic = nic_.info();
  RailAddress a{};
  if (!alive()) return a;
  a.ring = reinterpret_cast<std::uintptr_t>(memory_.ring);
  a.rkey = ring_mr_->rkey;
  a.qpn = qp_->qp_num;
  a.psn = psn_;
  a.mtu = nic.mtu;
  std::copy(nic.gid.begin(), nic.gid.end(), a.gid);
  a.lid = nic.lid;
  a.ethernet = nic.ethernet;
  a.usable = 1;
  return a;
}

void Rail::Check(const BringUpError& bad) const {
  if (bad.state == nullptr) return;
  throw Fault(FaultKind::kSystem, peer_,
              Name() + ": to " + bad.state + ": " + std::strerror(bad.error) +
                  " (is the link down, or the GID not of the peer's network?)");
}

void Rail::Connect(const RailAddress& remote) {
  remote_ = remote;
  Check(ConnectPair(nic_, qp_.get(), remote, psn_));
}

std::string Rail::Name() const {
  return "verbs: " + nic_.info().Name() + " QP " + std::to_string(qp_ == nullptr ? 0 : qp_->qp_num) + " to rank " +
         std::to_string(peer_) + "'s " + peer_device_;
}

void Rail::Kill(const std::string& why) {
  if (!alive()) return;
  error_ = why;
  if (qp_ == nullptr) return;
  ibv::QpAttr attr{};
  attr.qp_state = ibv::QpState::kErr;
  static_cast<void>(nic_.api().modify_qp(qp_.get(), &attr, ibv::kQpState));
}

void Rail::Failed(const ibv::Wc& wc, const char* doing) {
  const std::string too_large = wc.status == ibv::WcStatus::kRetryExcErr ? OnlyEmptyThrough() : "";
  Kill(Name() + ": " + doing + ": " + StatusName(wc.status) + ", vendor error " + std::to_string(wc.vendor_err) + ": " +
       (too_large.empty() ? LikelyCause(wc.status) : too_large));
}

std::string Rail::OnlyEmptyThrough() const {
  const bool out = sq_done_ > 0 && bytes_done_ == 0;
  const bool in = empty_came_ && counters_.received == 0;
  if (!out && !in) return "";
  return "an empty message came through, and packets of " + std::to_string(PathMtu(nic_, remote_)) +
         " bytes did not: MTU mismatch, the network takes smaller packets than both ports";
}

void Rail::Corrupt(const char* what) const { throw Fault(FaultKind::kCorrupt, peer_, Name() + ": " + what); }

}  // namespace hetcoll
