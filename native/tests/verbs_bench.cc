// What the verbs transport itself executes for a message: both ends of one link over fake devices, in one thread.
//
//   hetcoll_verbs_bench NAME COUNT    NAME: small (8 bytes), copied, lent, direct (64 KiB)
//
// Run by benchmarks/verbs_instructions.py under callgrind, which leaves out what the fake devices and the copying of
// payload cost, and with two counts, whose difference leaves out setting up.

#include <sys/socket.h>

#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "fake_verbs.h"
#include "transport/verbs/verbs.h"

namespace hetcoll::testing {
namespace {

struct End {
  End(Fabric& fabric, int rank, int fd) : host(Fabric::Api(), std::make_shared<TcpShared>(), events) {
    nic = fabric.AddNic(rank == 0 ? "fake0" : "fake1");
    host.AddNic(nic);
    const std::pair<int, std::string> rails[] = {{0, "fake"}};
    ends = host.Attach({rank, 1 - rank, 0, 1 << 20}, rails, std::vector{fd});
  }

  ibv::Mr* Register(std::vector<std::byte>& bytes) {
    ibv::Mr* mr = Fabric::Api().reg_mr(nic.pd, bytes.data(), bytes.size(), 3);
    const auto at = reinterpret_cast<std::uintptr_t>(bytes.data());
    host.regions().Add(at, bytes.size(), {{0, mr->lkey, mr->rkey}});
    return mr;
  }

  std::atomic<bool> events{false};
  NicInfo nic;
  VerbsHost host;
  LinkEnds ends;
};

int Run(std::string_view name, int count) {
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) return 1;
  Fabric fabric;
  End sender(fabric, 0, pair[0]), receiver(fabric, 1, pair[1]);
  for (int i = 0; i < 10; ++i) {
    sender.host.Service();
    receiver.host.Service();
  }
  const bool lent = name == "lent" || name == "direct";
  const std::size_t n = name == "small" ? 8 : 64 << 10;
  std::vector<std::byte> from(n), to(n);
  std::vector<ibv::Mr*> mrs;
  if (lent) mrs.push_back(sender.Register(from));
  if (name == "direct") mrs.push_back(receiver.Register(to));
  Message m{1, n, lent};
  for (int i = 0; i < count; ++i) {
    m.signature += kNumberStep;
    if (name == "direct" && receiver.ends.recv->Pull(m, 0, to.data(), n, false) != kWouldBlock) return 1;
    if (sender.ends.send->Push(m, 0, from.data(), n) != static_cast<std::ptrdiff_t>(n)) return 1;
    if (receiver.ends.recv->Pull(m, 0, to.data(), n, false) != static_cast<std::ptrdiff_t>(n)) return 1;
    if (sender.ends.send->Lent() != 0) return 1;
  }
  for (const auto& [key, value] : sender.host.Counters()) {
    std::printf("%s %llu\n", key.c_str(), static_cast<unsigned long long>(value));
  }
  for (ibv::Mr* mr : mrs) Fabric::Api().dereg_mr(mr);
  return 0;
}

}  // namespace
}  // namespace hetcoll::testing

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  return hetcoll::testing::Run(argv[1], std::atoi(argv[2]));
}
