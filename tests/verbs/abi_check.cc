// Our declarations of libibverbs' structs (native/transport/verbs/abi.h) against its own header. Only compiled, by
// tests/verbs/test_verbs_abi.py.

#include <infiniband/verbs.h>

#include "support/same_layout.h"
#include "transport/verbs/abi.h"
#include "transport/verbs/api.h"

namespace hetcoll::ibv {

SAME_PLACE(Context, ops, ibv_context, ops);
SAME_SIZE(ContextOps, ibv_context_ops);
SAME(ContextOps, ibv_context_ops, poll_cq);
SAME(ContextOps, ibv_context_ops, req_notify_cq);
SAME(ContextOps, ibv_context_ops, post_send);
SAME(ContextOps, ibv_context_ops, post_recv);
SAME(Pd, ibv_pd, context);
SAME(Mr, ibv_mr, lkey);
SAME(Mr, ibv_mr, rkey);
SAME(CompChannel, ibv_comp_channel, fd);
SAME(Cq, ibv_cq, context);
SAME(Cq, ibv_cq, cq_context);
SAME(Qp, ibv_qp, context);
SAME(Qp, ibv_qp, qp_num);

SAME_SIZE(Wc, ibv_wc);
SAME(Wc, ibv_wc, wr_id);
SAME(Wc, ibv_wc, status);
SAME(Wc, ibv_wc, opcode);
SAME(Wc, ibv_wc, vendor_err);
SAME(Wc, ibv_wc, imm_data);
SAME(Wc, ibv_wc, wc_flags);

SAME_SIZE(QpInitAttr, ibv_qp_init_attr);
SAME(QpInitAttr, ibv_qp_init_attr, send_cq);
SAME(QpInitAttr, ibv_qp_init_attr, recv_cq);
SAME(QpInitAttr, ibv_qp_init_attr, cap);
SAME(QpInitAttr, ibv_qp_init_attr, qp_type);
SAME_SIZE(QpCap, ibv_qp_cap);
SAME(QpCap, ibv_qp_cap, max_inline_data);

SAME_SIZE(QpAttr, ibv_qp_attr);
SAME(QpAttr, ibv_qp_attr, qp_state);
SAME(QpAttr, ibv_qp_attr, path_mtu);
SAME(QpAttr, ibv_qp_attr, rq_psn);
SAME(QpAttr, ibv_qp_attr, sq_psn);
SAME(QpAttr, ibv_qp_attr, dest_qp_num);
SAME(QpAttr, ibv_qp_attr, qp_access_flags);
SAME(QpAttr, ibv_qp_attr, ah_attr);
SAME(QpAttr, ibv_qp_attr, max_rd_atomic);
SAME(QpAttr, ibv_qp_attr, max_dest_rd_atomic);
SAME(QpAttr, ibv_qp_attr, min_rnr_timer);
SAME(QpAttr, ibv_qp_attr, port_num);
SAME(QpAttr, ibv_qp_attr, timeout);
SAME(QpAttr, ibv_qp_attr, retry_cnt);
SAME(QpAttr, ibv_qp_attr, rnr_retry);
SAME_SIZE(AhAttr, ibv_ah_attr);
SAME(AhAttr, ibv_ah_attr, grh);
SAME(AhAttr, ibv_ah_attr, dlid);
SAME(AhAttr, ibv_ah_attr, sl);
SAME(AhAttr, ibv_ah_attr, is_global);
SAME(AhAttr, ibv_ah_attr, port_num);
SAME(GlobalRoute, ibv_global_route, dgid);
SAME(GlobalRoute, ibv_global_route, sgid_index);
SAME(GlobalRoute, ibv_global_route, hop_limit);
SAME(GlobalRoute, ibv_global_route, traffic_class);

SAME_SIZE(Sge, ibv_sge);
SAME(Sge, ibv_sge, length);
SAME(Sge, ibv_sge, lkey);
SAME_SIZE(SendWr, ibv_send_wr);
SAME(SendWr, ibv_send_wr, next);
SAME(SendWr, ibv_send_wr, sg_list);
SAME(SendWr, ibv_send_wr, num_sge);
SAME(SendWr, ibv_send_wr, opcode);
SAME(SendWr, ibv_send_wr, send_flags);
SAME(SendWr, ibv_send_wr, imm_data);
SAME_PLACE(SendWr, remote_addr, ibv_send_wr, wr.rdma.remote_addr);
SAME_PLACE(SendWr, rkey, ibv_send_wr, wr.rdma.rkey);
SAME_SIZE(RecvWr, ibv_recv_wr);
SAME(RecvWr, ibv_recv_wr, next);
SAME(RecvWr, ibv_recv_wr, num_sge);

#define SAME_VALUE(ours, theirs) static_assert(static_cast<unsigned>(ours) == static_cast<unsigned>(theirs))
SAME_VALUE(WcStatus::kWrFlushErr, IBV_WC_WR_FLUSH_ERR);
SAME_VALUE(WcStatus::kRemInvReqErr, IBV_WC_REM_INV_REQ_ERR);
SAME_VALUE(WcStatus::kRemAccessErr, IBV_WC_REM_ACCESS_ERR);
SAME_VALUE(WcStatus::kRetryExcErr, IBV_WC_RETRY_EXC_ERR);
SAME_VALUE(kWcRecvRdmaWithImm, IBV_WC_RECV_RDMA_WITH_IMM);
SAME_VALUE(kWcWithImm, IBV_WC_WITH_IMM);
SAME_VALUE(kAccessLocalWrite, IBV_ACCESS_LOCAL_WRITE);
SAME_VALUE(kAccessRemoteWrite, IBV_ACCESS_REMOTE_WRITE);
SAME_VALUE(kAccessRemoteRead, IBV_ACCESS_REMOTE_READ);
SAME_VALUE(kQpTypeRc, IBV_QPT_RC);
SAME_VALUE(QpState::kInit, IBV_QPS_INIT);
SAME_VALUE(QpState::kRtr, IBV_QPS_RTR);
SAME_VALUE(QpState::kRts, IBV_QPS_RTS);
SAME_VALUE(QpState::kErr, IBV_QPS_ERR);
SAME_VALUE(kQpState, IBV_QP_STATE);
SAME_VALUE(kQpAccessFlags, IBV_QP_ACCESS_FLAGS);
SAME_VALUE(kQpPkeyIndex, IBV_QP_PKEY_INDEX);
SAME_VALUE(kQpPort, IBV_QP_PORT);
SAME_VALUE(kQpAv, IBV_QP_AV);
SAME_VALUE(kQpPathMtu, IBV_QP_PATH_MTU);
SAME_VALUE(kQpTimeout, IBV_QP_TIMEOUT);
SAME_VALUE(kQpRetryCnt, IBV_QP_RETRY_CNT);
SAME_VALUE(kQpRnrRetry, IBV_QP_RNR_RETRY);
SAME_VALUE(kQpRqPsn, IBV_QP_RQ_PSN);
SAME_VALUE(kQpMaxQpRdAtomic, IBV_QP_MAX_QP_RD_ATOMIC);
SAME_VALUE(kQpMinRnrTimer, IBV_QP_MIN_RNR_TIMER);
SAME_VALUE(kQpSqPsn, IBV_QP_SQ_PSN);
SAME_VALUE(kQpMaxDestRdAtomic, IBV_QP_MAX_DEST_RD_ATOMIC);
SAME_VALUE(kQpDestQpn, IBV_QP_DEST_QPN);
SAME_VALUE(kWrRdmaWrite, IBV_WR_RDMA_WRITE);
SAME_VALUE(kWrRdmaWriteWithImm, IBV_WR_RDMA_WRITE_WITH_IMM);
SAME_VALUE(kWrRdmaRead, IBV_WR_RDMA_READ);
SAME_VALUE(kSendSignaled, IBV_SEND_SIGNALED);
SAME_VALUE(kSendInline, IBV_SEND_INLINE);

// The functions take and return what we say, but for the types' names.
template <class Ours, class Theirs>
constexpr bool kSameShape = sizeof(Ours) == sizeof(Theirs);
template <class R, class... A, class R2, class... B>
constexpr bool kSameShape<R (*)(A...), R2 (*)(B...)> =
    sizeof...(A) == sizeof...(B) && (kSameShape<A, B> && ...) && std::is_void_v<R> == std::is_void_v<R2>;
static_assert(kSameShape<decltype(VerbsApi::create_comp_channel), decltype(&ibv_create_comp_channel)>);
static_assert(kSameShape<decltype(VerbsApi::create_cq), decltype(&ibv_create_cq)>);
static_assert(kSameShape<decltype(VerbsApi::get_cq_event), decltype(&ibv_get_cq_event)>);
static_assert(kSameShape<decltype(VerbsApi::ack_cq_events), decltype(&ibv_ack_cq_events)>);
static_assert(kSameShape<decltype(VerbsApi::create_qp), decltype(&ibv_create_qp)>);
static_assert(kSameShape<decltype(VerbsApi::modify_qp), decltype(&ibv_modify_qp)>);
static_assert(kSameShape<decltype(VerbsApi::destroy_qp), decltype(&ibv_destroy_qp)>);
static_assert(kSameShape<decltype(VerbsApi::dereg_mr), decltype(&ibv_dereg_mr)>);

}  // namespace hetcoll::ibv
