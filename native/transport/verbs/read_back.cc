#include "transport/verbs/read_back.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/verbs/bring_up.h"

namespace hetcoll {

ReadBack::ReadBack(const Nic& nic) : name_("verbs: reading back through " + nic.info().Name()) {
  try {
    Make(nic);
  } catch (const Fault& fault) {
    error_ = fault.what();
  }
}

void ReadBack::Make(const Nic& nic) {
  const VerbsApi& api = nic.api();
  word_mr_ = {api.reg_mr(nic.info().pd, &word_, sizeof word_, ibv::kAccessLocalWrite), {api.dereg_mr}};
  if (word_mr_ == nullptr) nic.Fail("registering a word", errno);
  cq_ = {api.create_cq(&nic.context(), 2, nullptr, nullptr, 0), {api.destroy_cq}};
  if (cq_ == nullptr) nic.Fail("no completion queue", errno);
  ibv::QpInitAttr init{};
  init.send_cq = init.recv_cq = cq_.get();
  init.cap = {1, 1, 1, 1, 0};
  init.qp_type = ibv::kQpTypeRc;
  qp_ = {api.create_qp(nic.info().pd, &init), {api.destroy_qp}};
  if (qp_ == nullptr) nic.Fail("no queue pair", errno);
  RailAddress self{};
  self.qpn = qp_->qp_num;
  self.mtu = nic.info().mtu;
  self.lid = nic.info().lid;
  std::copy(nic.info().gid.begin(), nic.info().gid.end(), self.gid);
  BringUpError bad = InitPair(nic, qp_.get(), ibv::kAccessRemoteRead);
  if (bad.state == nullptr) bad = ConnectPair(nic, qp_.get(), self, self.psn);
  if (bad.state != nullptr) nic.Fail(std::string("a queue pair to itself, to ") + bad.state, bad.error);
}

void ReadBack::Begin(std::uint64_t address, std::uint32_t rkey) {
  if (!error_.empty() || begun_ != done_) return;
  ibv::Sge sge{reinterpret_cast<std::uintptr_t>(&word_), 1, word_mr_->lkey};
  ibv::SendWr wr{};
  wr.wr_id = ++begun_;
  wr.sg_list = &sge;
  wr.num_sge = 1;
  wr.opcode = ibv::kWrRdmaRead;
  wr.send_flags = ibv::kSendSignaled;
  wr.remote_addr = address;
  wr.rkey = rkey;
  ibv::SendWr* bad = nullptr;
  const int error = qp_->context->ops.post_send(qp_.get(), &wr, &bad);
  if (error != 0) error_ = name_ + ": post_send: " + std::strerror(error);
}

void ReadBack::Poll() {
  if (!error_.empty() || begun_ == done_) return;
  ibv::Wc wc;
  const int n = qp_->context->ops.poll_cq(cq_.get(), 1, &wc);
  if (n < 0) error_ = name_ + ": poll_cq: " + std::strerror(n < -1 ? -n : EIO);
  if (n <= 0) return;
  if (wc.status != ibv::WcStatus::kSuccess) {
    error_ = name_ + ": " + StatusName(wc.status) + ": " + LikelyCause(wc.status);
    return;
  }
  done_ = wc.wr_id;
}

}  // namespace hetcoll
