// What a NIC wrote into a GPU's memory is on its way there when the NIC says that it is done: the completion took
// another way, to host memory. A read of that memory by the same NIC does not overtake what it wrote (PCI Express
// orders reads behind writes), so once it is answered, kernels and copy engines of the GPU see what was written before.
// It is the same for GPUs of all vendors, and no driver is called for it.
//
// The queue pair is connected to itself. Reads are counted: one that was begun after something arrived covers it.
#pragma once

#include <cstdint>
#include <string>

#include "transport/verbs/nic.h"

namespace hetcoll {

class ReadBack {
 public:
  // Where the queue pair cannot be made, it has failed from the start.
  explicit ReadBack(const Nic& nic);
  ReadBack(const ReadBack&) = delete;
  ReadBack& operator=(const ReadBack&) = delete;

  // Begins to read the byte that the NIC knows at `address`. Not while another read is under way.
  void Begin(std::uint64_t address, std::uint32_t rkey);
  // Looks whether it is done.
  void Poll();

  // Takes the place of another: what that was asked for and did not answer has not been begun.
  void Follow(const ReadBack& old) { begun_ = done_ = old.done_; }

  std::uint64_t begun() const { return begun_; }
  std::uint64_t done() const { return done_; }
  const std::string& error() const { return error_; }  // empty while it works

 private:
  void Make(const Nic& nic);

  std::uint64_t word_ = 0;
  VerbsOwned<ibv::Mr> word_mr_;
  VerbsOwned<ibv::Cq> cq_;
  VerbsOwned<ibv::Qp> qp_;
  std::uint64_t begun_ = 0;
  std::uint64_t done_ = 0;
  std::string name_;
  std::string error_;
};

}  // namespace hetcoll
