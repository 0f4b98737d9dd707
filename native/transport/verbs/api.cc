#include "transport/verbs/api.h"

#include <dlfcn.h>

#include <array>
#include <cstdint>

namespace hetcoll {
namespace {

struct Library {
  VerbsApi api{};
  std::string why;
};

template <class Fn>
void Resolve(void* library, const char* name, Fn& fn, std::string& why) {
  void* symbol = dlsym(library, name);
  if (symbol == nullptr && why.empty()) why = std::string("libibverbs.so.1 has no ") + name;
  fn = reinterpret_cast<Fn>(symbol);
}

Library Open() {
  Library found;
  void* library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* error = dlerror();
    found.why = error != nullptr ? error : "libibverbs.so.1 cannot be opened";
    return found;
  }
  VerbsApi& a = found.api;
  Resolve(library, "ibv_create_comp_channel", a.create_comp_channel, found.why);
  Resolve(library, "ibv_destroy_comp_channel", a.destroy_comp_channel, found.why);
  Resolve(library, "ibv_create_cq", a.create_cq, found.why);
  Resolve(library, "ibv_destroy_cq", a.destroy_cq, found.why);
  Resolve(library, "ibv_get_cq_event", a.get_cq_event, found.why);
  Resolve(library, "ibv_ack_cq_events", a.ack_cq_events, found.why);
  Resolve(library, "ibv_create_qp", a.create_qp, found.why);
  Resolve(library, "ibv_modify_qp", a.modify_qp, found.why);
  Resolve(library, "ibv_destroy_qp", a.destroy_qp, found.why);
  Resolve(library, "ibv_reg_mr", a.reg_mr, found.why);
  Resolve(library, "ibv_dereg_mr", a.dereg_mr, found.why);
  return found;
}

struct StatusText {
  const char* name;
  const char* cause;
};

constexpr std::array<StatusText, 22> kStatuses{{
    {"IBV_WC_SUCCESS", ""},
    {"IBV_WC_LOC_LEN_ERR", "a write was longer than the port allows"},
    {"IBV_WC_LOC_QP_OP_ERR", "the port is down, or the device refused the request"},
    {"IBV_WC_LOC_EEC_OP_ERR", "the device refused the request"},
    {"IBV_WC_LOC_PROT_ERR", "a local key does not cover the memory: was it unregistered?"},
    {"IBV_WC_WR_FLUSH_ERR",
     "the queue pair had failed before: its link or device went down, or the peer's end is gone"},
    {"IBV_WC_MW_BIND_ERR", "the device refused the request"},
    {"IBV_WC_BAD_RESP_ERR", "the peer's device answered what was not asked"},
    {"IBV_WC_LOC_ACCESS_ERR", "a local key does not allow this access"},
    {"IBV_WC_REM_INV_REQ_ERR",
     "the peer's device refused the request: MTU mismatch, or a length that it does not take"},
    {"IBV_WC_REM_ACCESS_ERR", "wrong remote key, or the peer unregistered the memory"},
    {"IBV_WC_REM_OP_ERR", "the peer's queue pair failed"},
    {"IBV_WC_RETRY_EXC_ERR",
     "no answer: the peer or its queue pair is gone, a link is down, there is no route for that GID, or MTU mismatch: "
     "the network takes smaller packets than both ports"},
    {"IBV_WC_RNR_RETRY_EXC_ERR", "the peer posted no receive"},
    {"IBV_WC_LOC_RDD_VIOL_ERR", "the device refused the request"},
    {"IBV_WC_REM_INV_RD_REQ_ERR", "the peer's device refused the request"},
    {"IBV_WC_REM_ABORT_ERR", "the peer's device gave up"},
    {"IBV_WC_INV_EECN_ERR", "the device refused the request"},
    {"IBV_WC_INV_EEC_STATE_ERR", "the device refused the request"},
    {"IBV_WC_FATAL_ERR", "the device failed"},
    {"IBV_WC_RESP_TIMEOUT_ERR", "no answer in time"},
    {"IBV_WC_GENERAL_ERR", "the device failed"},
}};

const StatusText& StatusOf(ibv::WcStatus status) {
  static constexpr StatusText kUnknown{"an unknown status", "the device failed"};
  const auto index = static_cast<std::size_t>(status);
  return index < kStatuses.size() ? kStatuses[index] : kUnknown;
}

}  // namespace

const VerbsApi* SystemVerbs(std::string& why) {
  static const Library library = Open();
  why = library.why;
  return why.empty() ? &library.api : nullptr;
}

const char* StatusName(ibv::WcStatus status) { return StatusOf(status).name; }
const char* LikelyCause(ibv::WcStatus status) { return StatusOf(status).cause; }

}  // namespace hetcoll
