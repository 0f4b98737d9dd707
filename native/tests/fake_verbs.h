// RDMA devices in memory, behind the same table of functions as libibverbs.
//
// Strict where devices are: queue pairs must be brought up in order and with matching parameters, keys and bounds are
// checked, queues overflow. Kind where it helps a test: it can be slow, overtake between queue pairs, lose a link, fail
// a request (delivered or not), and run out of anything.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "transport/verbs/nic.h"

namespace hetcoll::testing {

struct FabricOptions {
  bool threaded = false;  // a thread of its own delivers, a little later; otherwise whoever posts
  bool overtake = false;  // threaded: between queue pairs, in any order
  bool resends = false;   // frames of rails that die come again: see ReadUnseen
  std::uint32_t seed = 1;
  std::uint32_t max_inline = 128;
  std::vector<std::uint32_t> mtus = {};  // of the first devices; others have 1024
};

struct FakeQp;
struct FakeCq;
struct FakeMr;

class Fabric;

// One device with one port.
struct FakeNic : ibv::Context {
  Fabric* fabric = nullptr;
  ibv::Pd pd{};
  int number = 0;
  // What goes wrong; under the fabric's lock.
  bool down = false;                               // nothing comes through
  std::uint64_t down_from = ~std::uint64_t{0};     // bytes sent, from which on it is down
  bool stalled = false;                            // it does not even say so
  std::uint64_t stalled_from = ~std::uint64_t{0};  // bytes sent, from which on it is stalled
  bool corrupt = false;                            // a byte of what it sends changes on the way
  std::int64_t corrupt_after = -1;                 // frames until one is sent of which a byte changes
  std::size_t corrupt_byte = 0;                    // which, from the end; a shorter frame's first
  std::int64_t fail_after = -1;                    // requests until one fails
  bool fail_delivered = false;                     // though it was delivered
  // What it sends changes on the way: the bytes, and the immediate word.
  std::function<void(std::span<std::byte>, std::uint32_t&)> change;
  std::int64_t skip_after = -1;  // requests until one is not delivered, and said to be
  ibv::WcStatus fail_status = ibv::WcStatus::kRetryExcErr;
  std::int64_t refuse_after = -1;                // requests until post_send refuses
  std::size_t largest_packet = ~std::size_t{0};  // bytes of payload that the network takes from it
  double ns_per_byte = 0;                        // threaded: its line's speed
  int queue_pairs_left = 1 << 20;                // until there is no memory
  int registrations_left = 1 << 20;
  std::int64_t busy_until_ns = 0;
  std::uint64_t bytes = 0;  // that it sent
  // Writes into a GPU's memory that are not there yet: until the NIC reads from there, or for ever.
  std::vector<std::pair<std::byte*, std::vector<std::byte>>> landing;
  void Land();
  bool no_reads = false;  // it refuses to read there
};

class Fabric {
 public:
  explicit Fabric(const FabricOptions& options = {});
  ~Fabric();  // complains about what was not given back
  Fabric(const Fabric&) = delete;
  Fabric& operator=(const Fabric&) = delete;

  static const VerbsApi& Api();

  // A new device, as Python would describe it.
  NicInfo AddNic(const std::string& name);
  FakeNic& nic(int number) { return *nics_[static_cast<std::size_t>(number)]; }
  // Changes a device while it is in use.
  template <class Fn>
  void Change(int number, Fn&& change) {
    const std::lock_guard lock(mutex_);
    change(nic(number));
  }
  std::uint64_t bytes(int number) {
    const std::lock_guard lock(mutex_);
    return nic(number).bytes;
  }
  // Memory of a GPU, which begins at 0 for the device: writes there land late.
  ibv::Mr* RegDmaBuf(ibv::Pd* pd, std::byte* memory, std::size_t n);
  // What no correct user does, and what was never to happen.
  std::string complaints();

 private:
  friend struct FakeCalls;
  friend struct FakeQp;

  struct Op {
    std::uint64_t wr_id;
    std::vector<std::pair<const std::byte*, std::size_t>> parts;
    std::vector<std::byte> inlined;
    bool signalled;
    bool immediate;
    bool read;
    std::uint32_t imm;
    std::uint64_t remote_addr;
    std::uint32_t rkey;
    std::int64_t ready_ns;
  };

  void Complain(const std::string& what);
  void DeliverAll(FakeQp& qp);
  void Deliver(FakeQp& qp);
  ibv::WcStatus Write(FakeQp& qp, const Op& op);
  void Break(FakeQp& qp);
  void Push(FakeQp& qp, FakeCq& cq, std::uint64_t wr_id, ibv::WcStatus status, const ibv::Wc& rest = {});
  void Loop();

  FabricOptions options_;
  std::mutex mutex_;
  std::mt19937 random_;
  std::vector<std::unique_ptr<FakeNic>> nics_;
  std::map<std::uint32_t, FakeQp*> qps_;
  std::map<std::uint32_t, FakeMr*> mrs_;
  std::map<std::byte*, std::byte*> device_memory_;  // begin and end
  std::set<FakeCq*> cqs_;
  int channels_ = 0;
  std::uint32_t next_key_ = 100;
  std::uint32_t next_qpn_ = 17;
  std::vector<std::string> complaints_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace hetcoll::testing
