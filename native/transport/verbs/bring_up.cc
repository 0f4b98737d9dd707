#include "transport/verbs/bring_up.h"

#include <algorithm>
#include <bit>
#include <iterator>

namespace hetcoll {

std::uint32_t PathMtu(const Nic& nic, const RailAddress& remote) {
  return std::clamp<std::uint32_t>(std::bit_floor(std::min(nic.info().mtu, remote.mtu)), 256, 4096);
}

BringUpError InitPair(const Nic& nic, ibv::Qp* qp, std::uint32_t access) {
  ibv::QpAttr attr{};
  attr.qp_state = ibv::QpState::kInit;
  attr.port_num = nic.info().port;
  attr.qp_access_flags = access;
  const int mask = ibv::kQpState | ibv::kQpPkeyIndex | ibv::kQpPort | ibv::kQpAccessFlags;
  const int error = nic.api().modify_qp(qp, &attr, mask);
  return error == 0 ? BringUpError{} : BringUpError{"INIT", error};
}

BringUpError ConnectPair(const Nic& nic, ibv::Qp* qp, const RailAddress& remote, std::uint32_t psn) {
  const NicInfo& info = nic.info();
  ibv::QpAttr rtr{};
  rtr.qp_state = ibv::QpState::kRtr;
  rtr.path_mtu = static_cast<std::uint32_t>(std::countr_zero(PathMtu(nic, remote))) - 7;  // IBV_MTU_256 is 1
  rtr.dest_qp_num = remote.qpn;
  rtr.rq_psn = remote.psn & 0xffffff;
  rtr.max_dest_rd_atomic = 1;
  rtr.min_rnr_timer = 12;  // 0.64 ms; there is always a receive
  rtr.ah_attr.dlid = remote.lid;
  rtr.ah_attr.sl = info.service_level;
  rtr.ah_attr.port_num = info.port;
  if (info.ethernet) {
    rtr.ah_attr.is_global = 1;
    std::copy(std::begin(remote.gid), std::end(remote.gid), rtr.ah_attr.grh.dgid);
    rtr.ah_attr.grh.sgid_index = info.gid_index;
    rtr.ah_attr.grh.hop_limit = 64;
    rtr.ah_attr.grh.traffic_class = info.traffic_class;
  }
  const int to_rtr = ibv::kQpState | ibv::kQpAv | ibv::kQpPathMtu | ibv::kQpDestQpn | ibv::kQpRqPsn |
                     ibv::kQpMaxDestRdAtomic | ibv::kQpMinRnrTimer;
  if (const int error = nic.api().modify_qp(qp, &rtr, to_rtr)) return {"RTR", error};
  ibv::QpAttr rts{};
  rts.qp_state = ibv::QpState::kRts;
  rts.timeout = info.timeout;
  rts.retry_cnt = info.retries;
  rts.rnr_retry = info.rnr_retries;
  rts.sq_psn = psn;
  rts.max_rd_atomic = 1;
  const int to_rts =
      ibv::kQpState | ibv::kQpTimeout | ibv::kQpRetryCnt | ibv::kQpRnrRetry | ibv::kQpSqPsn | ibv::kQpMaxQpRdAtomic;
  if (const int error = nic.api().modify_qp(qp, &rts, to_rts)) return {"RTS", error};
  return {};
}

}  // namespace hetcoll
