// The part of libibverbs' binary interface that we use, declared here so that no vendor header is needed to build.
//
// The layouts are those of rdma-core's <infiniband/verbs.h>, fixed since its ABI 1.1; tests/verbs/abi_check.cc compares
// them where that header is installed. Structs that only the library makes are declared up to the last field we read.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hetcoll::ibv {

struct Cq;
struct Qp;
struct Wc;
struct SendWr;
struct RecvWr;

// What the header's inline functions call.
struct ContextOps {
  void* before_poll_cq[11];
  int (*poll_cq)(Cq*, int entries, Wc*);
  int (*req_notify_cq)(Cq*, int solicited_only);
  void* before_post_send[12];
  int (*post_send)(Qp*, SendWr*, SendWr** bad);
  int (*post_recv)(Qp*, RecvWr*, RecvWr** bad);
  void* after_post_recv[5];
};

struct Context {
  void* device;
  ContextOps ops;
};

struct Pd {
  Context* context;
};

struct Mr {
  Context* context;
  Pd* pd;
  void* addr;
  std::size_t length;
  std::uint32_t handle;
  std::uint32_t lkey;
  std::uint32_t rkey;
};

struct CompChannel {
  Context* context;
  int fd;
};

struct Cq {
  Context* context;
  CompChannel* channel;
  void* cq_context;
};

struct Qp {
  Context* context;
  void* qp_context;
  Pd* pd;
  Cq* send_cq;
  Cq* recv_cq;
  void* srq;
  std::uint32_t handle;
  std::uint32_t qp_num;
};

enum class WcStatus : std::uint32_t {
  kSuccess = 0,
  kWrFlushErr = 5,
  kRemInvReqErr = 9,
  kRemAccessErr = 10,
  kRetryExcErr = 12
};
inline constexpr std::uint32_t kWcRecvRdmaWithImm = 129;
inline constexpr std::uint32_t kWcWithImm = 1u << 1;

struct Wc {
  std::uint64_t wr_id;
  WcStatus status;
  std::uint32_t opcode;
  std::uint32_t vendor_err;
  std::uint32_t byte_len;
  std::uint32_t imm_data;  // network byte order
  std::uint32_t qp_num;
  std::uint32_t src_qp;
  std::uint32_t wc_flags;
  std::uint16_t pkey_index;
  std::uint16_t slid;
  std::uint8_t sl;
  std::uint8_t dlid_path_bits;
};
static_assert(sizeof(Wc) == 48);

enum AccessFlags : int { kAccessLocalWrite = 1, kAccessRemoteWrite = 2, kAccessRemoteRead = 4 };

struct GlobalRoute {
  alignas(8) std::uint8_t dgid[16];
  std::uint32_t flow_label;
  std::uint8_t sgid_index;
  std::uint8_t hop_limit;
  std::uint8_t traffic_class;
};

struct AhAttr {
  GlobalRoute grh;
  std::uint16_t dlid;
  std::uint8_t sl;
  std::uint8_t src_path_bits;
  std::uint8_t static_rate;
  std::uint8_t is_global;
  std::uint8_t port_num;
};
static_assert(sizeof(AhAttr) == 32);

struct QpCap {
  std::uint32_t max_send_wr;
  std::uint32_t max_recv_wr;
  std::uint32_t max_send_sge;
  std::uint32_t max_recv_sge;
  std::uint32_t max_inline_data;
};

inline constexpr std::uint32_t kQpTypeRc = 2;

struct QpInitAttr {
  void* qp_context;
  Cq* send_cq;
  Cq* recv_cq;
  void* srq;
  QpCap cap;
  std::uint32_t qp_type;
  int sq_sig_all;
};
static_assert(sizeof(QpInitAttr) == 64);

enum class QpState : std::uint32_t { kReset = 0, kInit = 1, kRtr = 2, kRts = 3, kErr = 6 };

enum QpAttrMask : int {
  kQpState = 1 << 0,
  kQpAccessFlags = 1 << 3,
  kQpPkeyIndex = 1 << 4,
  kQpPort = 1 << 5,
  kQpAv = 1 << 7,
  kQpPathMtu = 1 << 8,
  kQpTimeout = 1 << 9,
  kQpRetryCnt = 1 << 10,
  kQpRnrRetry = 1 << 11,
  kQpRqPsn = 1 << 12,
  kQpMaxQpRdAtomic = 1 << 13,
  kQpMinRnrTimer = 1 << 15,
  kQpSqPsn = 1 << 16,
  kQpMaxDestRdAtomic = 1 << 17,
  kQpDestQpn = 1 << 20,
};

struct QpAttr {
  QpState qp_state;
  QpState cur_qp_state;
  std::uint32_t path_mtu;  // 1..5: 256..4096 bytes
  std::uint32_t path_mig_state;
  std::uint32_t qkey;
  std::uint32_t rq_psn;
  std::uint32_t sq_psn;
  std::uint32_t dest_qp_num;
  std::uint32_t qp_access_flags;
  QpCap cap;
  AhAttr ah_attr;
  AhAttr alt_ah_attr;
  std::uint16_t pkey_index;
  std::uint16_t alt_pkey_index;
  std::uint8_t en_sqd_async_notify;
  std::uint8_t sq_draining;
  std::uint8_t max_rd_atomic;
  std::uint8_t max_dest_rd_atomic;
  std::uint8_t min_rnr_timer;
  std::uint8_t port_num;
  std::uint8_t timeout;
  std::uint8_t retry_cnt;
  std::uint8_t rnr_retry;
  std::uint8_t alt_port_num;
  std::uint8_t alt_timeout;
  std::uint32_t rate_limit;
};
static_assert(sizeof(QpAttr) == 144);

struct Sge {
  std::uint64_t addr;
  std::uint32_t length;
  std::uint32_t lkey;
};

inline constexpr std::uint32_t kWrRdmaWrite = 0;
inline constexpr std::uint32_t kWrRdmaWriteWithImm = 1;
inline constexpr std::uint32_t kWrRdmaRead = 4;
enum SendFlags : std::uint32_t { kSendSignaled = 1u << 1, kSendSolicited = 1u << 2, kSendInline = 1u << 3 };

struct SendWr {
  std::uint64_t wr_id;
  SendWr* next;
  Sge* sg_list;
  int num_sge;
  std::uint32_t opcode;
  std::uint32_t send_flags;
  std::uint32_t imm_data;     // network byte order
  std::uint64_t remote_addr;  // from here on: of RDMA, in a union with other kinds
  std::uint32_t rkey;
  std::uint32_t other_kinds[19];
};
static_assert(sizeof(SendWr) == 128);

struct RecvWr {
  std::uint64_t wr_id;
  RecvWr* next;
  Sge* sg_list;
  int num_sge;
};

}  // namespace hetcoll::ibv
