// libibverbs as a table of function pointers: opened at run time, never linked, and replaced by a fake in tests.
#pragma once

#include <memory>
#include <string>

#include "transport/verbs/abi.h"

namespace hetcoll {

// Each function is its ibv_ namesake. Posting and polling are inline functions there, through Context::ops, and so
// here.
struct VerbsApi {
  ibv::CompChannel* (*create_comp_channel)(ibv::Context*);
  int (*destroy_comp_channel)(ibv::CompChannel*);
  ibv::Cq* (*create_cq)(ibv::Context*, int entries, void* cq_context, ibv::CompChannel*, int vector);
  int (*destroy_cq)(ibv::Cq*);
  int (*get_cq_event)(ibv::CompChannel*, ibv::Cq**, void** cq_context);
  void (*ack_cq_events)(ibv::Cq*, unsigned events);
  ibv::Qp* (*create_qp)(ibv::Pd*, ibv::QpInitAttr*);
  int (*modify_qp)(ibv::Qp*, ibv::QpAttr*, int mask);
  int (*destroy_qp)(ibv::Qp*);
  ibv::Mr* (*reg_mr)(ibv::Pd*, void*, std::size_t, int access);
  int (*dereg_mr)(ibv::Mr*);
};

// Opens libibverbs once. Null where it cannot be used: then `why` says so.
const VerbsApi* SystemVerbs(std::string& why);

// An object of the library's with the function that gives it back.
template <class T>
struct VerbsDeleter {
  int (*destroy)(T*);
  void operator()(T* object) const { static_cast<void>(destroy(object)); }
};
template <class T>
using VerbsOwned = std::unique_ptr<T, VerbsDeleter<T>>;

// "IBV_WC_RETRY_EXC_ERR", and what is usually the matter.
const char* StatusName(ibv::WcStatus status);
const char* LikelyCause(ibv::WcStatus status);

}  // namespace hetcoll
